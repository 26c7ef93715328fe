"""Notifications of people and services: events, signed webhooks, e-mails. One attempt each.

============  =====================================================
``event``     the content, in OpenAI's format
``webhook``   one POST to a receiver, signed as Standard Webhooks says
``email``     one message about a batch; ``smtp`` hands it to a mail server
``outcome``   the result of an attempt
============  =====================================================

``batchyard.delivery`` decides when and how often; nothing here knows the database.
"""
