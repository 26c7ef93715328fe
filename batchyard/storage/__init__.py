"""The object store: bytes under keys. Users' own places are in :mod:`batchyard.locations`.

===========  ==============================================================
``base``     the Storage Protocol; ``local``, ``s3`` and ``memory`` implement it
``bucket``   one S3 bucket: streams, multipart, resuming
``key``      which keys there may be
``file``     local files, which appear whole or not at all
===========  ==============================================================

Nothing here knows batches, the database or Prefect.
"""
