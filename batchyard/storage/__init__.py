"""The object store: bytes under keys. Users' own places are in :mod:`batchyard.locations`.

==================  ==============================================================
``base``            the Storage Protocol; ``local``, ``bucket_storage`` and ``memory`` implement it
``buckets``         the kinds of buckets: ``bucket`` of S3, ``cloud_bucket`` of Azure and Google
``hub_repository``  a hub's dataset, which cannot be the object store; by ``hub_client``
``key``             which keys there may be
``file``            local files, which appear whole or not at all
==================  ==============================================================

Nothing here knows batches, the database or Prefect.
"""
