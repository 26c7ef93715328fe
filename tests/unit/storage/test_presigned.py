"""What can be read from a presigned URL without asking its server."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from batchyard.errors import AccessDenied
from batchyard.storage.presigned import check_not_expired, expires_at, signature_of

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
    ],
    ids=["S3 version 4", "Google V4", "S3 version 2"],
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
