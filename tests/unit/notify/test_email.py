"""What the e-mails say, and what never stands in them."""

from __future__ import annotations

import email.policy
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.batch_error import BatchError
from batchyard.lifecycle import BatchStatus
from batchyard.notify.email import GivenUp, batch_email, given_up_email
from batchyard.results.line_errors import ErrorCount
from batchyard.wire import BatchErrors, RequestCounts
from tests.unit.notify.batches import BATCH_ID, ended_batch

if TYPE_CHECKING:
    from email.message import EmailMessage

    from batchyard.wire import Batch

GIVEN_UP = GivenUp(
    delivery_id="wh_1",
    batch_id=BATCH_ID,
    event_type="batch.completed",
    endpoint_id="whe_1",
    host="hooks.example.com",
    attempts=10,
    status_code=503,
    error="the receiver answered 503",
)


def email_of(batch: Batch, **values: Any) -> EmailMessage:
    """The message as a reader has it, after it was bytes."""
    its_own = {"to": "me@example.com", "sender": "by@example.com", "delivery_id": "mail_1"}
    return as_received(batch_email(batch, **(its_own | values)))


def as_received(message: EmailMessage) -> EmailMessage:
    return message_from_bytes(message.as_bytes(), policy=email.policy.default)


def part(message: EmailMessage, kind: str) -> str:
    body = message.get_body((kind,))
    assert body is not None
    text = body.get_content()
    assert isinstance(text, str)
    return text.replace("\r\n", "\n")


def test_why_lines_failed_is_said_by_codes_and_counts() -> None:
    errors = (ErrorCount("503 server_error", 1_063), ErrorCount("request_timeout", 2))
    text = part(email_of(ended_batch(), errors=errors), "plain")
    assert "Failed with  1,063 × 503 server_error, 2 × request_timeout\n" in text
    assert "Failed with" not in part(email_of(ended_batch()), "plain")


class Elements(HTMLParser):
    """The names of all elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        assert not attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_plain_text_says_how_the_batch_ended_and_how_to_get_its_files() -> None:
    assert part(email_of(ended_batch()), "plain") == (
        "Batch batch_0123456789abcdef0123456789abcdef is completed.\n"
        "\n"
        "Created   2026-11-20 22:00:00 UTC\n"
        "Ended     2026-11-20 23:02:03 UTC\n"
        "Duration  1 h 2 min 3 s\n"
        "Requests  1,190 succeeded, 10 failed, 1,200 in all\n"
        "Tokens    34,000 in (0 from cache), 5,600 out\n"
        "Endpoint  /v1/chat/completions\n"
        "Model     tiny-chat\n"
        "Results   file-output\n"
        "Errors    file-error\n"
        "\n"
        "Get the files:\n"
        "\n"
        '    client.files.content("file-output").write_to_file("results.jsonl")\n'
        '    client.files.content("file-error").write_to_file("errors.jsonl")\n'
        "\n"
        '    curl -H "Authorization: Bearer $OPENAI_API_KEY" -o results.jsonl '
        '"$OPENAI_BASE_URL/files/file-output/content"\n'
        '    curl -H "Authorization: Bearer $OPENAI_API_KEY" -o errors.jsonl '
        '"$OPENAI_BASE_URL/files/file-error/content"\n'
        "\n"
        "See everything:\n"
        "\n"
        "    batchyard show batch_0123456789abcdef0123456789abcdef\n"
    )


def test_the_html_says_the_same() -> None:
    message = email_of(ended_batch())
    page = Elements(part(message, "html"))

    assert message.get_content_type() == "multipart/alternative"
    assert page.names == {"html", "body", "p", "table", "tr", "td", "h3", "pre"}
    # All but blanks, and the colons that headings have in the plain text alone.
    assert letters(page.text) == letters(part(message, "plain"))


def letters(text: str) -> str:
    return "".join(text.replace(":", "").split())


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (BatchStatus.COMPLETED, "is completed"),
        (BatchStatus.FAILED, "has failed"),
        (BatchStatus.EXPIRED, "has expired"),
        (BatchStatus.CANCELLED, "was cancelled"),
    ],
)
def test_each_way_to_end_has_its_subject_and_first_line(status: BatchStatus, words: str) -> None:
    message = email_of(ended_batch(status))

    assert message["Subject"] == f"{status.value.capitalize()} 1190/1200: {BATCH_ID}"
    assert part(message, "plain").startswith(f"Batch {BATCH_ID} {words}.\n")


def test_the_headers_are_those_of_a_machines_message() -> None:
    message = email_of(ended_batch())

    assert message["From"] == "Batchyard <by@example.com>"
    assert message["To"] == "me@example.com"
    assert message["Auto-Submitted"] == "auto-generated"
    assert abs(message["Date"].datetime - datetime.now(UTC)) < timedelta(minutes=1)


def test_a_subject_is_one_line_however_large_the_batch() -> None:
    counts = RequestCounts(total=10_000_000, completed=10_000_000)
    message = batch_email(
        ended_batch(BatchStatus.CANCELLED, request_counts=counts),
        to="me@example.com",
        sender="by@example.com",
        delivery_id="mail_1",
    )

    subject = f"\r\nSubject: Cancelled 10000000/10000000: {BATCH_ID}\r\n"
    assert subject.encode() in message.as_bytes()


def test_every_attempt_has_the_same_message_id() -> None:
    first, second = (email_of(ended_batch()) for _ in range(2))

    assert first["Message-ID"] == second["Message-ID"] == "<mail_1@batchyard>"


def test_unanswered_requests_are_counted() -> None:
    counts = RequestCounts(total=10, completed=4, failed=1)
    message = email_of(ended_batch(BatchStatus.EXPIRED, request_counts=counts))

    assert "Requests  4 succeeded, 1 failed, 5 unanswered, 10 in all\n" in part(message, "plain")


def test_a_batch_without_files_offers_none() -> None:
    batch = ended_batch(BatchStatus.CANCELLED, output_file_id=None, error_file_id=None, model=None)
    text = part(email_of(batch), "plain")

    assert "curl" not in text
    assert "Model" not in text
    assert f"batchyard show {BATCH_ID}" in text


def test_a_failed_batch_says_why_in_a_few_lines() -> None:
    errors = [BatchError("invalid_url", "url must be one of …", "url", line) for line in range(8)]
    batch = ended_batch(BatchStatus.FAILED, errors=BatchErrors(data=tuple(errors)))
    text = part(email_of(batch), "plain")

    assert text.count("invalid_url") == 5
    assert "- line 4: invalid_url: url must be one of …\n" in text
    assert "And 3 more.\n" in text


def test_an_error_of_the_whole_file_has_no_line() -> None:
    errors = BatchErrors(data=(BatchError("empty_file", "The file has no request lines."),))
    text = part(email_of(ended_batch(BatchStatus.FAILED, errors=errors)), "plain")

    assert "\n- empty_file: The file has no request lines.\n" in text


def test_metadata_is_the_users_and_stays_out() -> None:
    message = batch_email(
        ended_batch(metadata={"canary": "canary"}),
        to="me@example.com",
        sender="by@example.com",
        delivery_id="mail_1",
    )

    assert b"canary" not in message.as_bytes()


HOSTILE = "<script>alert('1')</script>\r\nBcc: you@example.com\r\n\r\n\u202e" + "x" * 5000


def test_hostile_text_is_one_escaped_line_of_limited_length() -> None:
    errors = BatchErrors(data=(BatchError("code", HOSTILE),))
    batch = ended_batch(BatchStatus.FAILED, model=HOSTILE, endpoint=HOSTILE, errors=errors)
    message = email_of(batch)
    page = Elements(part(message, "html"))

    assert "script" not in page.names
    assert page.text.count("<script>alert('1')</script>") == 3
    assert len(message.as_bytes()) < 12_000
    assert message["Bcc"] is None
    for text in (part(message, "plain"), page.text):
        assert "\nBcc" not in text
        assert "\u202e" not in text


def given_up(**values: Any) -> EmailMessage:
    about = GivenUp(**({name: getattr(GIVEN_UP, name) for name in GIVEN_UP.__slots__} | values))
    return as_received(
        given_up_email(about, to="me@example.com", sender="by@example.com", delivery_id="mail_2")
    )


def test_a_webhook_given_up_is_explained() -> None:
    message = given_up()

    assert message["Subject"] == f"Webhook failed: {BATCH_ID}"
    assert message["Message-ID"] == "<mail_2@batchyard>"
    assert part(message, "plain") == (
        "The event batch.completed of batch batch_0123456789abcdef0123456789abcdef could not be "
        "delivered, and is not tried again.\n"
        "\n"
        "Webhook      wh_1\n"
        "Endpoint     whe_1\n"
        "Host         hooks.example.com\n"
        "Attempts     10\n"
        "Last status  503\n"
        "Last error   the receiver answered 503\n"
        "\n"
        "Send it again:\n"
        "\n"
        "To send it again with the same webhook-id, once the receiver works:\n"
        "\n"
        "    batchyard deliveries replay wh_1\n"
        "\n"
        "See each attempt:\n"
        "\n"
        "    batchyard deliveries show wh_1\n"
    )


def test_a_webhook_of_a_response_names_it_and_says_where_the_others_are() -> None:
    message = given_up(batch_id="", response_id="resp_1", event_type="response.completed")

    assert message["Subject"] == "Webhook failed: resp_1"
    text = part(message, "plain")
    assert text.startswith(
        "The event response.completed of response resp_1 could not be delivered, and is not tried "
        "again.\n"
    )
    assert text.endswith(
        "See which others failed:\n"
        "\n"
        "There is at most one e-mail a day about responses and this endpoint.\n"
        "\n"
        "    batchyard deliveries list --endpoint whe_1 --status failed\n"
    )


def test_a_batchs_own_webhook_that_never_answered_is_called_so() -> None:
    text = part(given_up(endpoint_id=None, host=None, status_code=None), "plain")

    assert "Endpoint     the batch's own webhook_url\n" in text
    assert "Last status  no answer\n" in text
    assert "Host         unknown\n" in text


@pytest.mark.parametrize("field", ["to", "sender"])
def test_an_address_that_is_not_one_is_refused(field: str) -> None:
    bad = {field: "me@example.com, you@example.com"}
    with pytest.raises(ValueError, match="not one e-mail address"):
        email_of(ended_batch(), **bad)
    addresses = {"to": "me@example.com", "sender": "by@example.com"} | bad
    with pytest.raises(ValueError, match="not one e-mail address"):
        given_up_email(GIVEN_UP, delivery_id="mail_2", **addresses)
