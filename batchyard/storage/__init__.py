"""Bytes: the object store, and the places that users name for input and output.

=============  ==================================================================
``base``       the Storage Protocol; ``local``, ``s3`` and ``memory`` fulfil it
``location``   a user's IN and OUT: a path, ``s3://bucket/key``, an http(s) URL
``bucket``     one S3 bucket: streams, multipart, resuming
``download``   GET of a URL that survives broken connections; ``upload``: its PUT
``web``        time limits, retries and errors of both
``file``       local files, whole or not at all
=============  ==================================================================

Nothing here knows batches, the database or Prefect.
"""
