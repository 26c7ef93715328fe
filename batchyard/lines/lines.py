"""The request lines of a batch file, validated. Pure; reads a local file.

Rules and codes are those of the OpenAI Batch input file (``custom_id``, ``method``, ``url``,
``body``; one JSON object per line, UTF-8, lines end only at byte 0x0A). Where OpenAI's own
behaviour is not on record the choice is ours and documented in ``docs/input-format.md``.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec

from batchyard.batch_error import BatchError
from batchyard.errors import InputRefused
from batchyard.lines.duplicates import IdHashes, repeated_lines
from batchyard.lines.earlier import EARLIER, MOST_EARLIER_BYTES, without_earlier
from batchyard.lines.endpoints import ENDPOINTS, takes_form
from batchyard.lines.forms import is_file_url
from batchyard.lines.framing import PhysicalLine, custom_id_of, other_format, read_lines, stray_mark
from batchyard.lines.json_depth import is_deeper_than

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from batchyard.lines.body_policy import Refusal
    from batchyard.lines.rules import Rules


TEMPLATE_ERROR: Final = "template_error"
"""The key of a line that stands for a row of which a template made no request."""
_MOST_STRAYS: Final = 16


class RequestLine(msgspec.Struct, frozen=True):
    """A valid request line, parsed."""

    number: int
    """The number of the line in the file, from 1."""
    ordinal: int
    """The number of the request, from 0: blank lines are none."""
    offset: int
    length: int
    custom_id: str
    url: str
    model: str
    """The model as the body names it."""
    body: dict[str, Any]
    adapter: str = ""
    """The name in ``model`` if it is an adapter's."""


class BadLine(msgspec.Struct, frozen=True):
    """A line that is left out, for all of ``errors``. ``custom_id`` None: it has none to use."""

    ordinal: int
    custom_id: str | None
    errors: tuple[BatchError, ...]


_parse_json = msgspec.json.Decoder().decode


class Validator:
    """One pass over an input file: yields the good lines, collects the bad ones.

    Use::

        validator = Validator(rules)
        for line in validator.lines(file):
            ...
        validator.finish(file)      # raises InputRefused with every error, capped

    Memory does not grow with the lines: ``spool`` is a folder for what shows that every
    ``custom_id`` is unique, see :class:`.IdHashes`.

    With ``leave_out``, a bad line is given to that, and only what is wrong with the file as a
    whole is raised. Which lines repeat a ``custom_id`` must be known before then:
    ``duplicates`` are their numbers, as :func:`duplicate_lines` finds them.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        leave_out: Callable[[BadLine], None] | None = None,
        duplicates: Collection[int] = (),
        spool: Path | None = None,
    ) -> None:
        self.rules = rules
        self._leave_out = leave_out
        self._duplicates = duplicates
        self._of_line: list[BatchError] = []
        """What is wrong with the line at hand, if it may be left out."""
        self._custom_id: str | None = None
        self._is_kept = False
        """Whether the line at hand has an answer already."""
        self._policy = rules.policy
        self.requests = 0
        """Good and bad request lines seen; blank lines are not requests."""
        self.model: str | None = None
        """The model of the first line that names one; of the first good one, if bad ones are left
        out. Where the line names an adapter, the adapter's model."""
        self.strays: set[str] = set()
        """Names that were refused because they are not of the model; the first ones."""
        self._errors: list[BatchError] = []
        self._error_count = 0
        self._last_kept = 0
        """The last line of which an error is kept."""
        self._embedding_inputs = 0
        self._id_hashes = IdHashes(spool)
        self._bad_numbers = array("Q")

    @property
    def bad_lines(self) -> int:
        """How many lines are bad, however many errors each has; known once it has finished."""
        return len(set(self._bad_numbers))

    @property
    def has_errors(self) -> bool:
        """Whether any line so far, or the file as a whole, is refused."""
        return self._error_count > 0

    def lines(self, file: BinaryIO) -> Iterator[RequestLine]:
        """Yield each valid line without an answer; stop early only where the rest could not change
        the verdict."""
        limits = self.rules.limits
        for physical in read_lines(file, limits.max_line_bytes):
            self.requests += 1
            if self.requests > limits.max_requests:
                self._refuse(
                    "too_many_tasks",
                    f"The file has more than {limits.max_requests} requests; split it.",
                )
                return
            self._of_line.clear()
            self._custom_id = None
            self._is_kept = False
            line = self._check(physical)
            if self._is_kept:
                continue
            if line is not None:
                if self.model is None:
                    self.model = self.rules.offer.model_of(line.model)
                yield line
                continue
            self._bad_numbers.append(physical.number)
            if self._of_line and self._leave_out is not None:
                bad = BadLine(self.requests - 1, self._custom_id, tuple(self._of_line))
                self._leave_out(bad)

    def refuse(self, line: RequestLine, refusals: Iterable[Refusal]) -> None:
        """Count a line that was good by these rules as bad, for what other checks have found."""
        self._of_line.clear()
        for refusal in refusals:
            self._refuse(*refusal, line.number)
        self._bad_numbers.append(line.number)
        if self._leave_out is not None:
            self._leave_out(BadLine(line.ordinal, line.custom_id, tuple(self._of_line)))
            self._of_line.clear()

    def finish(self, file: BinaryIO) -> None:
        """Raise :class:`InputRefused` if anything was wrong with the file as a whole."""
        if self.requests == 0:
            self._refuse("empty_file", "The file has no request lines.")
        if self._leave_out is None:
            self._refuse_duplicates(file)
        if not self._error_count:
            return
        cap = self.rules.limits.max_reported_errors
        # Entries without a line speak of the whole file and come last, as they were found.
        entries = sorted(self._errors, key=lambda e: (e.line is None, e.line or 0))[:cap]
        if self._error_count > len(entries):
            more = self._error_count - len(entries)
            entries.append(BatchError("more_errors", f"{more} more errors are not listed."))
        raise InputRefused(entries)

    # -- one line ---------------------------------------------------------------------------

    def _check(self, physical: PhysicalLine) -> RequestLine | None:
        before = self._error_count
        number, data = physical.number, physical.data
        if data is None:
            self._refuse_length(number)
            return None
        try:
            line = _parse_json(data)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            # UnicodeDecodeError would quote the line's bytes.
            reason = "it is not UTF-8" if isinstance(error, UnicodeError) else reason
            reason = (other_format(data) if number == 1 else None) or stray_mark(data) or reason
            message = f"This line is not valid JSON: {reason}."
            self._refuse("invalid_json_line", message, None, number)
            return None
        if not isinstance(line, dict):
            self._refuse("invalid_request", "A request line must be a JSON object.", None, number)
            return None
        if self.rules.merges and self._was_decided(line, data, number):
            return None
        depth = self.rules.limits.max_depth
        braces, brackets = data.count(b"{"), data.count(b"[")
        if braces + brackets > depth and is_deeper_than(line, depth):
            self._custom_id = custom_id_of(data) or None
            message = f"This line is not valid JSON: it is nested deeper than {depth} levels."
            self._refuse("invalid_json_line", message, None, number)
            return None
        custom_id = self._check_custom_id(line, number)
        if self.rules.is_rendered and TEMPLATE_ERROR in line:
            why = line[TEMPLATE_ERROR]
            self._refuse(why["code"], why["message"], "template", number)
            return None
        self._check_method(line, number)
        url = self._check_url(line, number)
        body = self._check_body(line, url, number)
        if body is not None and self._policy is not None:
            for refusal in self._policy.refusals(url, body, len(data), braces, brackets):
                self._refuse(*refusal, number)
        if self._error_count != before or self._of_line or body is None:
            return None
        assert custom_id is not None  # noqa: S101 - no error was counted, so all four are there
        assert url is not None  # noqa: S101 - see above
        return RequestLine(
            number,
            self.requests - 1,
            physical.offset,
            len(data),
            custom_id,
            url,
            body["model"],
            body,
            body["model"] if body["model"] in self.rules.offer.adapters else "",
        )

    def _was_decided(self, line: dict[str, Any], data: bytes, number: int) -> bool:
        """Whether the line has an answer already, or was left out because it is too long: the limit
        has room for what a retry has added."""
        self._is_kept = bool(line.get(EARLIER, {}).get("is_kept"))
        if self._is_kept:
            return True
        if len(without_earlier(data)) > self._most_bytes:
            self._refuse_length(number)
            return True
        return False

    @property
    def _most_bytes(self) -> int:
        """What a line of the user's may have."""
        added = MOST_EARLIER_BYTES if self.rules.merges else 0
        return self.rules.limits.max_line_bytes - added

    def _refuse_length(self, number: int) -> None:
        message = f"The line is longer than {self._most_bytes} bytes."
        self._refuse("line_too_long", message, None, number)

    def _check_custom_id(self, line: dict[str, Any], number: int) -> str | None:
        if "custom_id" not in line:
            self._missing("custom_id", number)
            return None
        custom_id = line["custom_id"]
        limit = self.rules.limits.max_custom_id_chars
        if not isinstance(custom_id, str) or not custom_id:
            message = "custom_id must be a string that is not empty."
            self._refuse("invalid_request", message, "custom_id", number)
            return None
        if len(custom_id) > limit or "\0" in custom_id:
            message = f"custom_id must have at most {limit} characters, none of them NUL."
            self._refuse("invalid_custom_id", message, "custom_id", number)
            return None
        self._custom_id = custom_id
        if self._leave_out is None:
            self._id_hashes.add(custom_id)
        elif number in self._duplicates:
            self._refuse_duplicate(number)
        return custom_id

    def _check_method(self, line: dict[str, Any], number: int) -> None:
        if "method" not in line:
            self._missing("method", number)
        elif line["method"] != "POST":
            self._refuse("invalid_method", "method must be POST.", "method", number)

    def _check_url(self, line: dict[str, Any], number: int) -> str | None:
        if "url" not in line:
            self._missing("url", number)
            return None
        url = line["url"]
        endpoint = self.rules.endpoint
        if endpoint is not None and url != endpoint:
            message = f"url must be the batch's endpoint, {endpoint}."
            self._refuse("invalid_url", message, "url", number)
            return None
        if not isinstance(url, str) or url not in ENDPOINTS:
            message = f"url must be one of {', '.join(ENDPOINTS)}."
            self._refuse("invalid_url", message, "url", number)
            return None
        return url

    def _check_body(
        self, line: dict[str, Any], url: str | None, number: int
    ) -> dict[str, Any] | None:
        if "body" not in line:
            self._missing("body", number)
            return None
        body = line["body"]
        if not isinstance(body, dict):
            self._refuse("invalid_request", "body must be a JSON object.", "body", number)
            return None
        self._check_model(body, number)
        if url is not None:
            self._check_fields(body, url, number)
        if body.get("stream"):
            message = "Streaming is not possible in a batch; leave out body.stream."
            self._refuse("streaming_unsupported", message, "body.stream", number)
        if url is not None and ENDPOINTS[url].limits_inputs:
            self._count_embedding_inputs(body, number)
        return body

    def _check_fields(self, body: dict[str, Any], url: str, number: int) -> None:
        choices = ENDPOINTS[url].required
        if not any(all(field in body for field in choice) for choice in choices):
            # The choice that comes nearest is the one that was meant.
            meant = max(choices, key=lambda choice: sum(field in body for field in choice))
            for field in meant:
                if field not in body:
                    message = f"body.{field} is required for {url}."
                    self._refuse("invalid_request", message, f"body.{field}", number)
        file_url = body.get("file_url")
        if takes_form(url) and "file_url" in body and not is_file_url(file_url):
            message = "body.file_url must be an http, https or data URL."
            self._refuse("invalid_request", message, "body.file_url", number)

    def _check_model(self, body: dict[str, Any], number: int) -> None:
        model = body.get("model")
        if not isinstance(model, str) or not model:
            message = "body.model is required and must be a string."
            self._refuse("invalid_request", message, "body.model", number)
            return
        if "\0" in model:
            # It becomes the batch's model, and PostgreSQL cannot keep a NUL.
            message = "body.model must not hold a NUL."
            self._refuse("invalid_request", message, "body.model", number)
            return
        offered, served = self.rules.models, self.rules.offer.model_of(model)
        if offered is not None and not offered & {model, served}:
            message = (
                f"The model {_shown(model)} is not offered here; "
                f"offered: {', '.join(sorted(offered))}."
            )
            self._note_stray(model)
            self._refuse("model_not_found", message, "body.model", number)
            return
        if self.model is None:
            if self._leave_out is None:
                self.model = served
        elif self.rules.one_model and served != self.model:
            self._refuse_other_model(model, served, number)

    def _refuse_other_model(self, name: str, served: str, number: int) -> None:
        """``name`` is not of the batch's model: of another one, ``served``, or of none."""
        self._note_stray(name)
        if not self.rules.offer.has(name):
            # What it names is not repeated: a line that is broken may have a prompt there.
            message = "The model of this line is not offered here: no engine serves it."
            self._refuse("model_not_found", message, "body.model", number)
            return
        what = "one model" if not self.rules.offer.adapters else "one model, or adapters of one"
        message = f"All lines of a file must name {what}; the first is {_shown(self.model or '')}."
        if served != name:
            message = f"{message[:-1]}, and {_shown(name)} is an adapter of {_shown(served)}."
        self._refuse("mismatched_model", message, "body.model", number)

    def _note_stray(self, name: str) -> None:
        if len(self.strays) < _MOST_STRAYS:
            self.strays.add(name)

    def _count_embedding_inputs(self, body: dict[str, Any], number: int) -> None:
        limit = self.rules.limits.max_embedding_inputs
        within_before = self._embedding_inputs <= limit
        self._embedding_inputs += embedding_inputs(body.get("input"))
        if within_before and self._embedding_inputs > limit:
            message = f"From this line on, the file has more than {limit} embedding inputs."
            self._refuse_file("too_many_embedding_inputs", message, "body.input", number)

    # -- bookkeeping ------------------------------------------------------------------------

    def _missing(self, key: str, number: int) -> None:
        message = f"The line lacks the required key {key}."
        self._refuse("missing_required_parameter", message, key, number)

    def _refuse(
        self, code: str, message: str, param: str | None = None, line: int | None = None
    ) -> None:
        if line is not None and self._leave_out is not None:
            self._of_line.append(BatchError(code, message, param, line))
        else:
            self._refuse_file(code, message, param, line)

    def _refuse_file(
        self, code: str, message: str, param: str | None = None, line: int | None = None
    ) -> None:
        self._error_count += 1
        # Lines come nearly in order (:meth:`refuse` is a little behind), so that what lies past
        # the cap and the last line can never be among the first. File-level entries are few.
        is_early = len(self._errors) < self.rules.limits.max_reported_errors
        if line is None or is_early or line < self._last_kept:
            self._errors.append(BatchError(code, message, param, line))
            self._last_kept = max(self._last_kept, line or 0)

    def _refuse_duplicates(self, file: BinaryIO) -> None:
        for number in repeated_lines(file, self._id_hashes, self.rules.limits):
            self._refuse_duplicate(number)
            self._bad_numbers.append(number)

    def _refuse_duplicate(self, number: int) -> None:
        message = "This custom_id was used on an earlier line."
        self._refuse("duplicate_custom_id", message, "custom_id", number)


def embedding_inputs(value: Any) -> int:
    """How many inputs an embeddings request holds: a string or a token list is one."""
    if isinstance(value, list) and value and not all(isinstance(item, int) for item in value):
        return len(value)
    return 1


def _shown(name: str) -> str:
    """A model name as it may stand in a message: short, printable."""
    return re.sub(r"[^\w./:@+-]", "?", name)[:120]
