"""What a presigned URL says about itself: until when it holds, and what it covers.

Understands signatures of S3 (versions 2 and 4), of Google Cloud Storage (V2 and V4) and shared
access signatures of Azure; see
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html and
https://learn.microsoft.com/rest/api/storageservices/create-service-sas. Whether a signature is
right, only the server knows. SDKs make such URLs and read none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from batchyard.errors import AccessDenied, LocationRefused
from batchyard.logs.time_words import bare_moment
from batchyard.web.url import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OCTET_STREAM: Final = "application/octet-stream"
"""What vLLM's ``run-batch`` sends, and so what URLs for batch results are signed with."""

S3_PUT_LIMIT_BYTES: Final = 5 * 1024**3
"""The most that S3 takes in one PUT."""
_AZURE_PUT_LIMIT_BYTES: Final = 5000 * 1024**2
_AZURE_HEADERS: Final = {"x-ms-blob-type": "BlockBlob"}
"""Without it, Azure refuses every PUT of a blob."""

_KNOWN_HEADERS: Final = {"host", "content-type", ""}
_DIGEST: Final = re.compile(
    r"content-md5|x-amz-content-sha256|x-amz-checksum-(?!algorithm$|type$|mode$)\w+"
)
"""Parameters that say which content the URL is for."""
_ANY_CONTENT: Final = "UNSIGNED-PAYLOAD"
_WRITES: Final = {"PutObject", "UploadPart", "CompleteMultipartUpload"}
"""What AWS's SDK for JavaScript writes into the ``x-id`` of a URL that we can use."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The readable part of a presigned URL's query."""

    expires_at: datetime | None
    """Aware, UTC. ``None``: the URL gives no readable time."""
    signed_headers: frozenset[str]
    """Lower case. What is not in here may be sent or left out."""
    content_type: str | None
    """The Content-Type for a PUT; ``None``: a PUT must send none."""
    most_bytes: int | None = None
    """What its server takes in one PUT; None: no limit is known."""
    own_headers: Mapping[str, str] = field(default_factory=dict)
    """What a PUT to this server sends besides."""


def _query_of(url: str) -> dict[str, str]:
    """The parameters of the URL, with names in lower case."""
    return {name.lower(): value for name, value in parse_qsl(urlsplit(url).query)}


def signature_of(url: str) -> Signature | None:
    """Read the signature; ``None`` when the URL is a plain one."""
    query = _query_of(url)
    for vendor in ("x-amz-", "x-goog-"):
        if f"{vendor}signature" in query:
            return Signature(
                expires_at=_expiry_v4(query, vendor),
                signed_headers=frozenset(
                    query.get(f"{vendor}signedheaders", "").lower().split(";")
                ),
                content_type=OCTET_STREAM,
                most_bytes=S3_PUT_LIMIT_BYTES if vendor == "x-amz-" else None,
            )
    if "signature" in query and "expires" in query:
        # Version 2 always signs the Content-Type, be it empty; boto3 leaves it in the query.
        return Signature(
            expires_at=_expiry_v2(query),
            signed_headers=frozenset({"content-type"}),
            content_type=query.get("content-type"),
            most_bytes=S3_PUT_LIMIT_BYTES if "awsaccesskeyid" in query else None,
        )
    if _is_azure(query):
        return Signature(
            expires_at=_expiry_azure(query),
            signed_headers=frozenset(),
            content_type=OCTET_STREAM,
            most_bytes=_AZURE_PUT_LIMIT_BYTES,
            own_headers=_AZURE_HEADERS,
        )
    return None


def _expiry_v4(query: Mapping[str, str], vendor: str) -> datetime | None:
    try:
        signed_at = datetime.strptime(query[f"{vendor}date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return signed_at + timedelta(seconds=int(query[f"{vendor}expires"]))
    except (KeyError, ValueError, OverflowError):
        return None


def _expiry_v2(query: Mapping[str, str]) -> datetime | None:
    try:
        return datetime.fromtimestamp(int(query["expires"]), UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _expiry_azure(query: Mapping[str, str]) -> datetime | None:
    try:
        expiry = datetime.fromisoformat(query["se"])
        return expiry.replace(tzinfo=UTC) if expiry.tzinfo is None else expiry.astimezone(UTC)
    except (KeyError, ValueError, OverflowError):
        return None


def expires_at(url: str) -> datetime | None:
    """Until when the URL's own signature holds (aware, UTC); ``None`` when it does not say."""
    signature = signature_of(url)
    return signature.expires_at if signature else None


def earliest_expiry(urls: Iterable[str]) -> int | None:
    """Until when all of the URLs hold, in Unix seconds; None when none of them says."""
    moments = [moment for url in urls if (moment := expires_at(url)) is not None]
    return int(min(moments).timestamp()) if moments else None


def check_not_expired(url: str) -> None:
    """Raise :class:`~batchyard.errors.AccessDenied` when the URL's time is over by our clock."""
    expiry = expires_at(url)
    if expiry is not None and expiry <= _now():
        raise AccessDenied(
            f"the presigned URL {shown(url)} expired at {bare_moment(expiry.timestamp())} UTC: "
            "make a new one"
        )


def _now() -> datetime:
    return datetime.now(UTC)


def put_headers(url: str) -> dict[str, str]:
    """The headers, beside Content-Length, that a PUT to this URL has to send.

    Raises :class:`~batchyard.errors.LocationRefused` when the signature allows no PUT of a file
    that is not there yet.
    """
    signature = signature_of(url)
    if signature is None:
        return {"Content-Type": OCTET_STREAM}
    _check_allows_writing(url, signature)
    headers = dict(signature.own_headers)
    if signature.content_type is not None:
        headers["Content-Type"] = signature.content_type
    return headers


def post_headers(url: str) -> dict[str, str]:
    """The headers that the POST of a list of parts to this URL has to send; raises as the above."""
    signature = signature_of(url)
    if signature is None:
        return {}
    _check_allows_writing(url, signature)
    is_signed = "content-type" in signature.signed_headers
    return {"Content-Type": signature.content_type} if is_signed and signature.content_type else {}


def _check_allows_writing(url: str, signature: Signature) -> None:
    name, query = shown(url), _query_of(url)
    if unknown := sorted(signature.signed_headers - _KNOWN_HEADERS):
        raise LocationRefused(
            f"the presigned URL {name} signs {', '.join(unknown)}, for which only its signer has "
            "the value: sign only host and content-type"
        )
    operation = query.get("x-id")
    if operation is not None and operation not in _WRITES:
        raise LocationRefused(f"the presigned URL {name} is for {operation}: make one for PUT")
    if _is_azure(query) and not {"c", "w"} & set(query.get("sp", "w")):
        raise LocationRefused(
            f"the shared access signature of {name} allows no writing: make one with the "
            "permissions create and write"
        )


def _is_azure(query: Mapping[str, str]) -> bool:
    return "sig" in query and "sv" in query


def creates_only(url: str) -> bool:
    """Whether its signature, one of Azure, allows a new blob and never the same one again."""
    query = _query_of(url)
    return _is_azure(query) and "c" in query.get("sp", "") and "w" not in query.get("sp", "")


def other_content(url: str) -> str | None:
    """In words, what binds the URL to a content that is not that of our file; None: nothing does.

    Only the server knows whether it compares them.
    """
    digests = [
        name
        for name, value in _query_of(url).items()
        if _DIGEST.fullmatch(name) and value != _ANY_CONTENT
    ]
    if not digests:
        return None
    return (
        f"the URL has the checksum of another content in {', '.join(digests)}. AWS's SDK for "
        "JavaScript adds that of an empty body unless its client is made with "
        'requestChecksumCalculation: "WHEN_REQUIRED": make a new URL without it'
    )


def wanted_signature(url: str) -> str:
    """How a URL like this one must be signed for a PUT of ours, behind the word "signed"."""
    signature = signature_of(url)
    if signature is None or "content-type" not in signature.signed_headers:
        return "for PUT"
    if signature.content_type is None:
        return "for PUT without a content-type"
    return f"for PUT with the content-type {signature.content_type}, which is what we send"
