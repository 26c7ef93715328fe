"""Notifications of people and services: events, signed webhooks, e-mails. One attempt each.

============  =====================================================
``event``     the content, in OpenAI's format
``signing``   Standard Webhooks signatures
``webhook``   one POST to a receiver
``email``     one message about a batch; ``smtp`` hands it to a mail server
``answer``    the result of an attempt
============  =====================================================

``batchyard.delivery`` decides when and how often; nothing here knows the database.
"""
