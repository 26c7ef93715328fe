"""How people and services are told: events, signed webhooks, e-mails. One attempt each.

============  =====================================================
``event``     what is said, as OpenAI says it
``signing``   Standard Webhooks signatures
``webhook``   one POST to a receiver
``email``     one message about a batch; ``smtp`` hands it to a mail server
``answer``    how the one or the other went
============  =====================================================

When and how often is ``steps``'s to say; nothing here knows the database.
"""
