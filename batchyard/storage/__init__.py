"""Bytes: the object store, and users' locations for input and output.

=============  ==================================================================
``base``       the Storage Protocol; ``local``, ``s3`` and ``memory`` implement it
``location``   a user's location: ``local_file``, ``s3_object``, ``web_url``
``access``     what such a location can do, and the credentials that it needs
``bucket``     one S3 bucket: streams, multipart, resuming
``download``   GET of a URL that survives broken connections; ``upload``: its PUT
``web``        time limits, retries and errors of both
``file``       local files, which appear whole or not at all
=============  ==================================================================

Nothing here knows batches, the database or Prefect.
"""
