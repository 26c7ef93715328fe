"""What can be read from a presigned URL without asking its server."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from batchyard.errors import AccessDenied, LocationRefused
from batchyard.locations.presigned import (
    check_not_expired,
    earliest_expiry,
    expires_at,
    post_headers,
    put_headers,
    signature_of,
)

V4 = "https://b.s3.amazonaws.com/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=x"


@pytest.mark.parametrize(
    "url",
    [
        f"{V4}&X-Amz-Date=20261120T100000Z&X-Amz-Expires=3600",
        (
            "https://storage.googleapis.com/b/k?X-Goog-Signature=x"
            "&X-Goog-Date=20261120T100000Z&X-Goog-Expires=3600"
        ),
        "https://b.s3.amazonaws.com/k?AWSAccessKeyId=k&Signature=x&Expires=1795172400",
        "https://storage.googleapis.com/b/k?GoogleAccessId=k&Signature=x&Expires=1795172400",
        "https://a.blob.core.windows.net/c/k?sv=2024-11-04&se=2026-11-20T11%3A00%3A00Z&sig=x",
        "https://a.blob.core.windows.net/c/k?sv=2024-11-04&se=2026-11-20T12:00:00%2B01:00&sig=x",
    ],
    ids=["S3 version 4", "Google V4", "S3 version 2", "Google V2", "Azure", "Azure, with a zone"],
)
def test_the_expiry_is_read(url: str) -> None:
    """Each kind of signature gives the same aware time."""
    assert expires_at(url) == datetime(2026, 11, 20, 11, tzinfo=UTC)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/in.jsonl",
        "https://example.org/in.jsonl?expires=1",
        V4,
        f"{V4}&X-Amz-Date=yesterday&X-Amz-Expires=3600",
        f"{V4}&X-Amz-Date=20261120T100000Z&X-Amz-Expires=soon",
        f"{V4}&X-Amz-Date=20261120T100000Z&X-Amz-Expires={'9' * 30}",
        f"https://example.org/k?Signature=x&Expires={'9' * 30}",
        "https://a.blob.core.windows.net/c/k?sv=2024-11-04&se=soon&sig=x",
        "https://a.blob.core.windows.net/c/k?sv=2024-11-04&se=9999-12-31T23:59:59-08:00&sig=x",
        "https://a.blob.core.windows.net/c/k?sv=2024-11-04&se=0001-01-01T00:00:00%2B08:00&sig=x",
        "https://a.blob.core.windows.net/c/k?sv=2024-11-04&si=policy&sig=x",
    ],
)
def test_what_gives_no_readable_time_is_left_to_its_server(url: str) -> None:
    """Plain URLs and damaged times are not refused here."""
    assert expires_at(url) is None
    check_not_expired(url)


def test_a_past_expiry_is_denied() -> None:
    """The message holds the time and no query."""
    with pytest.raises(
        AccessDenied, match=r"b\.s3\.amazonaws\.com/k expired at 2020-01-01 00:01:00"
    ):
        check_not_expired(f"{V4}&X-Amz-Date=20200101T000000Z&X-Amz-Expires=60")


def test_signed_headers_are_read_in_lower_case() -> None:
    """They are separated by semicolons, percent-encoded or not."""
    signature = signature_of(f"{V4}&X-Amz-SignedHeaders=Host%3Bcontent-type")

    assert signature is not None
    assert signature.signed_headers == {"host", "content-type"}


def test_a_plain_url_has_no_signature() -> None:
    """There is nothing to read."""
    assert signature_of("https://example.org/in.jsonl?version=3") is None


def test_the_earliest_expiry_of_several_urls_counts() -> None:
    """Those that do not say are left out."""
    early, late = (
        f"https://a.blob.core.windows.net/c/k?sv=1&se=2026-11-{day}&sig=x" for day in (20, 21)
    )
    assert earliest_expiry([late, early, V4]) == datetime(2026, 11, 20, tzinfo=UTC).timestamp()
    assert earliest_expiry([V4]) is None


def test_a_blob_of_azure_is_put_with_the_header_that_it_demands() -> None:
    """Azure answers 400 to a PUT without it, whatever the signature."""
    url = "https://a.blob.core.windows.net/c/k?sv=1&se=2126-11-20&sig=x"
    assert put_headers(url) == {
        "Content-Type": "application/octet-stream",
        "x-ms-blob-type": "BlockBlob",
    }


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("uploadId=u", {}),
        ("X-Amz-Signature=x&X-Amz-SignedHeaders=host", {}),
        (
            "X-Amz-Signature=x&X-Amz-SignedHeaders=content-type%3Bhost",
            {"Content-Type": "application/octet-stream"},
        ),
        ("AWSAccessKeyId=k&Signature=x&Expires=1795172400", {}),
        (
            "AWSAccessKeyId=k&Signature=x&Expires=1795172400&content-type=text%2Fxml",
            {"Content-Type": "text/xml"},
        ),
    ],
)
def test_an_upload_in_parts_is_completed_with_the_content_type_that_is_signed(
    query: str, headers: dict[str, str]
) -> None:
    assert post_headers(f"https://b.s3.amazonaws.com/k?{query}") == headers


def test_the_url_that_completes_an_upload_may_sign_nothing_unknown() -> None:
    with pytest.raises(LocationRefused, match="signs x-amz-checksum-type, for which"):
        post_headers(f"{V4}&X-Amz-SignedHeaders=host%3Bx-amz-checksum-type")
