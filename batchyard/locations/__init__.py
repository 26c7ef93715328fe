"""Users' places for input and output: files, objects and URLs.

=============  ==================================================================
``location``   one place: ``local_file``, ``bucket_object``, ``hub_file`` or ``web_url``
``access``     what a place can do, and the credentials that it needs
``folder``     a folder or a prefix, in which new files are found
``presigned``  what a presigned URL allows; ``probe`` asks known stores before a batch
``download``   GET of a URL that survives broken connections; ``upload``: its PUT
``web``        time limits, retries and errors of both
=============  ==================================================================
"""
