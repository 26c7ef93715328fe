"""The e-mails: how a batch ended, and that a webhook failed for good.

Never in them: prompts and answers, metadata, names that users gave, URLs beyond their host.
"""

from __future__ import annotations

import email.policy
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.headerregistry import Address
from email.message import EmailMessage
from html import escape
from typing import TYPE_CHECKING, Final

from batchyard.batch.facts import error_words, facts_of
from batchyard.lifecycle import BatchStatus
from batchyard.logs.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchyard.results.line_errors import ErrorCount
    from batchyard.wire import Batch

MAX_ADDRESS_CHARS: Final = 254
_MAX_LOCAL_CHARS: Final = 64
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ADDRESS = re.compile(rf"(?P<local>{_ATOM}(\.{_ATOM})*)@{_LABEL}(\.{_LABEL})*")

_ENDED: Final = {
    BatchStatus.COMPLETED: "is completed",
    BatchStatus.FAILED: "has failed",
    BatchStatus.EXPIRED: "has expired",
    BatchStatus.CANCELLED: "was cancelled",
}
_MAX_ERRORS: Final = 5
_MAX_TEXT_CHARS: Final = 300


def check_address(text: str) -> str:
    """Return ``text`` if it is exactly one e-mail address.

    A name before it, a list, quotes and comments are refused, and a domain beyond ASCII must be in
    its ``xn--`` form: a comma would add recipients, and a line end would add headers. Raises
    ``ValueError``, whose message does not repeat the text.
    """
    parts = _ADDRESS.fullmatch(text)
    is_one = parts is not None and len(parts["local"]) <= _MAX_LOCAL_CHARS
    # An encoded word is made of harmless characters, and may be decoded to any others.
    if not is_one or len(text) > MAX_ADDRESS_CHARS or "=?" in text:
        raise ValueError("This is not one e-mail address, like name@example.com.")
    return text


def batch_email(
    batch: Batch, errors: Sequence[ErrorCount] = (), *, to: str, sender: str, delivery_id: str
) -> EmailMessage:
    """What became of a batch that has ended, why lines failed, and how to get its files.

    Raises ``ValueError`` for an address that is not one.
    """
    counts = batch.request_counts
    # Short enough for one line: a longer one would begin with a line end.
    done = f"{counts.completed}/{counts.total}"
    subject = f"{batch.status.value.capitalize()} {done}: {batch.id}"
    content = _Content(f"Batch {batch.id} {_ENDED[batch.status]}.")
    facts = facts_of(batch, errors)
    content.table([(name, facts[name]) for name in facts if name != "Window"])
    if batch.status is BatchStatus.FAILED and batch.errors is not None:
        content.heading("Why")
        content.items([error_words(error) for error in batch.errors.data[:_MAX_ERRORS]])
        if len(batch.errors.data) > _MAX_ERRORS:
            content.paragraph(f"And {len(batch.errors.data) - _MAX_ERRORS} more.")
    files = [("results", batch.output_file_id), ("errors", batch.error_file_id)]
    there = [(name, file_id) for name, file_id in files if file_id is not None]
    if there:
        content.heading("Get the files")
        content.code([_python_line(name, file_id) for name, file_id in there])
        content.code([_curl_line(name, file_id) for name, file_id in there])
    content.heading("See everything")
    content.code([f"batchyard show {batch.id}"])
    return _message(subject, content, to, sender, delivery_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A webhook that is not tried again automatically."""

    delivery_id: str
    """The delivery of the webhook, not of the e-mail about it."""
    batch_id: str
    """The batch; empty for an event of a response."""
    response_id: str | None = None
    """The background response that has ended."""
    event_type: str
    endpoint_id: str | None
    """The endpoint; None: it was the batch's own webhook."""
    host: str | None
    """The host of its URL, which may hold secrets elsewhere."""
    attempts: int
    status_code: int | None
    """The HTTP status of the last attempt."""
    error: str | None
    """The error of the last attempt, in our words."""


def given_up_email(given_up: GivenUp, *, to: str, sender: str, delivery_id: str) -> EmailMessage:
    """What was not delivered, why, and how to have it sent again.

    ``delivery_id`` is the e-mail's own. Raises ``ValueError`` for an address that is not one.
    """
    response_id = given_up.response_id
    ended = f"batch {given_up.batch_id}" if response_id is None else f"response {response_id}"
    subject = f"Webhook failed: {response_id or given_up.batch_id}"
    content = _Content(
        f"The event {given_up.event_type} of {ended} could not be delivered, "
        "and is not tried again."
    )
    content.table(
        [
            ("Webhook", given_up.delivery_id),
            ("Endpoint", given_up.endpoint_id or "the batch's own webhook_url"),
            ("Host", given_up.host or "unknown"),
            ("Attempts", f"{given_up.attempts:,}"),
            ("Last status", str(given_up.status_code or "no answer")),
            ("Last error", given_up.error or "none"),
        ]
    )
    content.heading("Send it again")
    content.paragraph("To send it again with the same webhook-id, once the receiver works:")
    content.code([f"batchyard deliveries replay {given_up.delivery_id}"])
    content.heading("See each attempt")
    content.code([f"batchyard deliveries show {given_up.delivery_id}"])
    if response_id is not None:
        content.heading("See which others failed")
        content.paragraph("There is at most one e-mail a day about responses and this endpoint.")
        endpoint = f"--endpoint {given_up.endpoint_id}"
        content.code([f"batchyard deliveries list {endpoint} --status failed"])
    return _message(subject, content, to, sender, delivery_id)


# -- what is said -------------------------------------------------------------------------------


def _python_line(name: str, file_id: str) -> str:
    return f'client.files.content("{file_id}").write_to_file("{name}.jsonl")'


def _curl_line(name: str, file_id: str) -> str:
    url = f"$OPENAI_BASE_URL/files/{file_id}/content"
    return f'curl -H "Authorization: Bearer $OPENAI_API_KEY" -o {name}.jsonl "{url}"'


# -- how it is written --------------------------------------------------------------------------


class _Content:
    """One text, written twice: plain and as HTML, in which all of it is escaped."""

    def __init__(self, first: str) -> None:
        self._plain: list[str] = []
        self._html: list[str] = []
        self.paragraph(first)

    def paragraph(self, text: str) -> None:
        text = _one_line(text)
        self._plain.append(text)
        self._html.append(f"<p>{escape(text)}</p>")

    def heading(self, text: str) -> None:
        self._plain.append(f"{text}:")
        self._html.append(f"<h3>{escape(text)}</h3>")

    def table(self, rows: list[tuple[str, str]]) -> None:
        shown = [(name, _one_line(value)) for name, value in rows]
        width = max(len(name) for name, _ in shown) + 2
        self._plain.append("\n".join(f"{name:<{width}}{value}" for name, value in shown))
        cells = (
            f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in shown
        )
        self._html.append("<table>\n" + "\n".join(cells) + "\n</table>")

    def items(self, texts: list[str]) -> None:
        shown = [_one_line(text) for text in texts]
        self._plain.append("\n".join(f"- {text}" for text in shown))
        self._html.append("<ul>" + "".join(f"<li>{escape(text)}</li>" for text in shown) + "</ul>")

    def code(self, lines: list[str]) -> None:
        self._plain.append("\n".join(f"    {line}" for line in lines))
        self._html.append("<pre>" + escape("\n".join(lines)) + "</pre>")

    @property
    def plain(self) -> str:
        return "\n\n".join(self._plain) + "\n"

    @property
    def html(self) -> str:
        return "<!DOCTYPE html>\n<html><body>\n" + "\n".join(self._html) + "\n</body></html>\n"


def _one_line(text: str) -> str:
    """What a message or a model's name may show: no line ends, no invisible signs, no end of it."""
    shown = printable(text)
    if len(shown) > _MAX_TEXT_CHARS:
        shown = shown[: _MAX_TEXT_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return shown


def _message(
    subject: str, content: _Content, to: str, sender: str, delivery_id: str
) -> EmailMessage:
    message = EmailMessage(policy=email.policy.SMTP)
    # Addresses as objects, not as text that would be parsed again.
    message["From"] = Address("Batchyard", addr_spec=check_address(sender))
    message["To"] = Address(addr_spec=check_address(to))
    message["Subject"] = subject
    message["Date"] = datetime.now(UTC)
    # The same for every attempt, so that a mail server or a reader can tell a second copy.
    message["Message-ID"] = f"<{delivery_id}@batchyard>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(content.plain)
    message.add_alternative(content.html, subtype="html")
    return message
