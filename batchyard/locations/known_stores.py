"""Hosts of object stores that store nothing of a PUT whose body does not come.

AWS, Google and Azure make an object of a whole body or not at all. Other servers of the same
protocols do not: SeaweedFS 4.48 stores an empty object, in place of the one that was there, for a
version 2 URL, and s3rver 3.7.1 for a version 4 one.

The names are those of https://docs.aws.amazon.com/general/latest/gr/s3.html, of
https://cloud.google.com/storage/docs/request-endpoints and of
https://learn.microsoft.com/azure/storage/common/storage-account-overview. What AWS runs on other
software or in other places (Outposts, S3 Express, Object Lambda) is not among them.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

_LABELS: Final = r"(?:[a-z0-9_.-]+\.)?"
"""A bucket, with dots or without, and what stands before the name of a private endpoint."""
_REGION: Final = r"[a-z]{2,4}(?:-[a-z]+)+-\d+"
_HOSTS: Final = (
    rf"{_LABELS}s3\.amazonaws\.com",
    rf"{_LABELS}s3(?:-accesspoint)?(?:-fips)?\.(?:dualstack\.)?{_REGION}\.amazonaws\.(?:com|com\.cn|eu)",
    # Names from before 2019, some of which have no other.
    rf"{_LABELS}s3-(?:fips-)?(?:{_REGION}|external-1)\.amazonaws\.com",
    rf"{_LABELS}s3-accelerate\.(?:dualstack\.)?amazonaws\.(?:com|eu)",
    r"[a-z0-9]+\.mrap\.accesspoint\.s3-global\.amazonaws\.(?:com|com\.cn|eu)",
    rf"{_LABELS}vpce-[a-z0-9-]+\.s3\.{_REGION}\.vpce\.amazonaws\.(?:com|com\.cn|eu)",
    rf"{_LABELS}storage\.googleapis\.com",
    r"storage\.[a-z0-9-]+\.rep\.googleapis\.com",
    r"[a-z0-9]+\.blob\.core\.(?:windows\.net|usgovcloudapi\.net|chinacloudapi\.cn)",
    r"[a-z0-9]+\.z\d+\.blob\.storage\.azure\.net",
)
_KNOWN: Final = re.compile("|".join(_HOSTS))


def is_known_store(url: str) -> bool:
    """Whether the URL leads to one of them: by https, so that its certificate proves the name."""
    parts = urlsplit(url)
    is_plain = parts.scheme.lower() == "https" and parts.port in {None, 443}
    return is_plain and _KNOWN.fullmatch(parts.hostname or "") is not None
