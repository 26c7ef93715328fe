"""What an answer to a PUT at a presigned URL means, beside what it means at any other URL."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from batchyard.errors import AccessDenied, LocationRefused
from batchyard.locations.presigned import creates_only, other_content, wanted_signature
from batchyard.locations.web import refused
from batchyard.web.url import shown

if TYPE_CHECKING:
    import aiohttp

    from batchyard.errors import StorageError

_OTHER_CONTENT: Final = {
    *("BadDigest", "InvalidDigest"),
    *("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
}
_IS_THERE: Final = {"BlobAlreadyExists", "UnauthorizedBlobOverwrite", "BlobImmutableDueToPolicy"}
"""Azure's codes for a blob that may not be replaced."""
_NOT_PERMITTED: Final = "AuthorizationPermissionMismatch"
"""What Azurite 3.35 says instead, and Azure of every permission that a URL lacks."""
_REGION: Final = re.compile(r"[a-z0-9-]{1,32}")


def put_refused(response: aiohttp.ClientResponse, url: str, code: str) -> StorageError:
    """The error that an answer other than success stands for; ``code`` has been read from it."""
    name, said = shown(url), f"the server answered {response.status} {code}".rstrip()
    if code in _OTHER_CONTENT and (why := other_content(url)) is not None:
        return LocationRefused(f"{name}: {said}, for {why}")
    if code == "SignatureDoesNotMatch":
        return AccessDenied(
            f"not allowed to use {name} ({said}): make a new presigned URL, "
            f"signed {wanted_signature(url)}"
        )
    region = response.headers.get("x-amz-bucket-region", "")
    if 300 <= response.status < 400 and _REGION.fullmatch(region):
        return LocationRefused(
            f"{name} redirects ({said}), because its bucket is in {region}: make a new presigned "
            "URL with the endpoint of that region"
        )
    return refused(response, name, code)


def is_there_already(url: str, code: str) -> bool:
    """Whether a PUT was refused because the blob is there and may not be replaced.

    One that the same PUT has made, if the answer to that was lost.
    """
    return code in _IS_THERE or (code == _NOT_PERMITTED and creates_only(url))
