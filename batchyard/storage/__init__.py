"""The object store: bytes under keys. Users' own places are in :mod:`batchyard.locations`.

===========  ==============================================================
``base``     the Storage Protocol; ``local``, ``bucket_storage`` and ``memory`` implement it
``buckets``  the kinds of buckets: ``bucket`` is one of S3, ``cloud_bucket`` of Azure and Google
``key``      which keys there may be
``file``     local files, which appear whole or not at all
===========  ==============================================================

Nothing here knows batches, the database or Prefect.
"""
