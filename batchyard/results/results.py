"""Result lines: from what became of a request to its line in the output or error file. Pure.

The shapes are the OpenAI Batch API's: an answer with a 2xx status goes to the output file; any
other answer goes to the error file with ``response`` filled and ``error`` null; a request that
never got an answer has ``response`` null and ``error`` ``{code, message}``.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from batchyard.logs.printable import printable
from batchyard.wire import NO_USAGE, TokenUsage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


MAX_TOKENS: Final = 2**31 - 1
"""The most tokens of one line that are believed. A plan numbers its requests with 32 bits, so no
sum over a batch outgrows a 64-bit column, whatever its engine claims."""
REQUEST_ID_PREFIX: Final = "req_"
_SHOWN_CHARS: Final = 200
"""The most characters that are shown of an answer that is not JSON."""
_MOST_LOCATION_CHARS: Final = 1000


class Outcome(IntEnum):
    """The file that a result line belongs in."""

    OUTPUT = 0
    ERROR = 1


class NoAnswerCode(StrEnum):
    """``error.code`` of a line without an HTTP answer."""

    EXPIRED = "batch_expired"
    CANCELLED = "batch_cancelled"
    FAILED = "batch_failed"
    TIMEOUT = "request_timeout"
    ENGINE_CRASH = "engine_crash"
    SERVER_ERROR = "server_error"
    FILE_UNAVAILABLE = "file_url_unavailable"
    INVALID_OUTPUT = "invalid_output"
    """There were answers, and the batch asks that such are failures."""
    TEMPLATE = "template_failed"


NO_ANSWER_MESSAGES: dict[NoAnswerCode, str] = {
    NoAnswerCode.EXPIRED: (
        "This request could not be executed before the completion window expired."
    ),
    NoAnswerCode.CANCELLED: "This request was not executed because the batch was cancelled.",
    NoAnswerCode.FAILED: "This request was not executed because the batch failed.",
    NoAnswerCode.TIMEOUT: "The engine did not answer this request within its time limit.",
    NoAnswerCode.ENGINE_CRASH: "The engine went down each time that it ran this request.",
    NoAnswerCode.SERVER_ERROR: "No connection to the engine lasted until this request's answer.",
    NoAnswerCode.FILE_UNAVAILABLE: "The file that body.file_url names could not be fetched.",
    NoAnswerCode.INVALID_OUTPUT: "No answer to this request passed the tests of on_invalid_output.",
    NoAnswerCode.TEMPLATE: "The template of this stage made no request from the line:",
}


@dataclass(frozen=True, slots=True)
class ResultLine:
    """A finished line, newline included, and the tokens that it counts for."""

    outcome: Outcome
    line: bytes
    usage: TokenUsage = NO_USAGE
    is_copy: bool = False
    """It has the answer that another request got."""
    first_usage: TokenUsage | None = None
    """What the first answer used, where it was not the last: ``usage`` has all of them."""
    engine_status: int | None = None
    """The HTTP status that the engine answered with, if it did."""
    choices: int | None = None
    """How many answers there are; None: the engine's answer has no list of them."""


def answered(
    custom_id: str,
    request_id: str,
    status: int,
    body: bytes,
    *,
    content_type: str = "",
    location: str = "",
) -> ResultLine:
    """The line of a request that got an HTTP answer. ``body`` is written as it came.

    A body that is not JSON is not written raw, for it would break the line: it becomes an error
    object that says what came, and a 2xx status with such a body counts as a bad gateway (502).
    ``content_type`` and ``location`` are the answer's, as they may be shown.
    """
    engine_status = status
    is_json, usage, choices = _read_usage(body)
    if not is_json:
        body = _error_body(_not_json_words(status, body, content_type, location))
        status = 502 if 200 <= status < 300 else status
    elif b"\n" in body or b"\r" in body:
        body = msgspec.json.format(body, indent=-1)
    good = 200 <= status < 300
    response = b'{"status_code":%d,"request_id":"%s","body":%s}' % (
        status,
        request_id.encode(),
        _line_safe(body),
    )
    return ResultLine(
        Outcome.OUTPUT if good else Outcome.ERROR,
        _result_line(custom_id, response, b"null"),
        usage if good else NO_USAGE,
        engine_status=engine_status,
        choices=choices if good else None,
    )


def unanswered(custom_id: str, code: NoAnswerCode, reason: str = "") -> ResultLine:
    """The line of a request that got no HTTP answer; ``reason`` goes behind the message."""
    message = f"{NO_ANSWER_MESSAGES[code]} {reason}".rstrip()
    return ResultLine(Outcome.ERROR, _error_line(custom_id, code.value, message))


def not_run(
    batch_id: str, ordinal: int, custom_id: str, code: NoAnswerCode, reason: str
) -> ResultLine:
    """The line of a request of an ended batch that never ran: the same bytes each time that it is
    made, so that a file is not written again where it is already."""
    line_id = hashlib.blake2b(f"{batch_id} {ordinal}".encode(), digest_size=16).hexdigest()
    message = f"{NO_ANSWER_MESSAGES[code]} {reason}".rstrip()
    return ResultLine(Outcome.ERROR, _error_line(custom_id, code.value, message, line_id.encode()))


def unprocessed(custom_id: str, message: str) -> ResultLine:
    """The line of a request that Batchyard itself could not process; ``message`` says why."""
    return ResultLine(
        Outcome.ERROR, _error_line(custom_id, NoAnswerCode.SERVER_ERROR.value, message)
    )


def refused(batch_id: str, ordinal: int, custom_id: str | None, code: str, why: str) -> ResultLine:
    """The line of an input line that was left out because it is bad.

    Its ``id`` goes by its ``ordinal``, so that it has the same bytes each time that it is made.
    """
    mark = hashlib.blake2b(batch_id.encode(), digest_size=10).hexdigest()
    line_id = f"{_REFUSED}{ordinal:08x}{mark}".encode()
    return ResultLine(Outcome.ERROR, _error_line(custom_id, code, why, line_id))


def is_refused(line: bytes) -> bool:
    """Whether it is a line that :func:`refused` has made."""
    return line.startswith(_REFUSED_START)


def of_made_request(line: bytes, custom_id: str) -> bytes:
    """The refused ``line`` of a request that a template made: no line of the input is bad.

    It becomes an ordinary one, without the number that the request had.
    """
    error = _decode_refused(line).error
    return _error_line(custom_id, error.code, _LINE_NUMBER.sub("", error.message, count=1))


class LineHead(NamedTuple):
    """What a result line is of."""

    name: str
    """Its ``custom_id``. A bad line without one, or with that of an earlier line, has a name that
    no ``custom_id`` can be."""
    refused: int | None
    """The ordinal of the input line, if it is one that was left out because it is bad."""


def head_of(line: bytes) -> LineHead:
    """Raises ``ValueError`` for what is no result line."""
    head = _decode_head(line)
    if not head.id.startswith(_REFUSED_ID):
        if head.custom_id is None:
            raise ValueError("The line has no custom_id.")
        return LineHead(head.custom_id, None)
    ordinal = int(head.id[len(_REFUSED_ID) :][:8], 16)
    is_duplicate = head.error is not None and head.error.code == "duplicate_custom_id"
    if head.custom_id is None or is_duplicate:
        return LineHead(f"\0{ordinal}", ordinal)
    return LineHead(head.custom_id, ordinal)


def copied(result: ResultLine, source_id: str, custom_id: str) -> ResultLine:
    """The line of a request that takes the ``result`` of ``source_id``, which asked the same.

    Only ``id`` and ``custom_id`` are its own. Its tokens are counted with the source's.
    """
    answer = result.line[len(_line_head(source_id)) :]
    return ResultLine(result.outcome, _line_head(custom_id) + answer, is_copy=True)


def not_served(custom_id: str, request_id: str, url: str, served: Iterable[str]) -> ResultLine:
    """The line of a request whose endpoint the engine does not have: 404, without asking it."""
    offer = ", ".join(sorted(served)) or "none that a batch may name"
    body = _error_body(
        f"The engine does not serve {url}. It serves: {offer}.",
        kind="invalid_request_error",
        param="url",
        code="endpoint_not_served",
    )
    return replace(answered(custom_id, request_id, 404, body), engine_status=None)


def new_request_id() -> str:
    """``req_`` and 32 hex digits; sent to the engine and written to the file."""
    return f"{REQUEST_ID_PREFIX}{next(_RANDOM.ids)}"


def _not_json_words(status: int, body: bytes, content_type: str, location: str) -> str:
    """What came in place of JSON: a proxy's page, a redirect, a stream, nothing."""
    about = [f"HTTP {status}"]
    if content_type:
        about.append(printable(content_type[:_SHOWN_CHARS]))
    if location:
        about.append(f"redirects to {location[:_MOST_LOCATION_CHARS]}")
    # Of a long answer only the beginning is decoded: each character has four bytes at most.
    text = printable(body[: 8 * _SHOWN_CHARS].decode(errors="replace"), instead=" ")
    begin = " ".join(text.split())[:_SHOWN_CHARS]
    shown = f"Its body begins: {begin}" if begin else "It has no body."
    return f"The engine's answer was not valid JSON: {', '.join(about)}. {shown}"


def _error_line(
    custom_id: str | None, code: str, message: str, line_id: bytes | None = None
) -> bytes:
    error = msgspec.json.encode({"code": code, "message": message})
    return _result_line(custom_id, b"null", _line_safe(error), line_id)


def _result_line(
    custom_id: str | None, response: bytes, error: bytes, line_id: bytes | None = None
) -> bytes:
    head = _line_head(custom_id, line_id)
    return b'%s"response":%s,"error":%s}\n' % (head, response, error)


def _line_head(custom_id: str | None, line_id: bytes | None = None) -> bytes:
    """What comes before the answer: with one ``custom_id`` always of the same length."""
    return b'{"id":"batch_req_%s","custom_id":%s,' % (
        next(_RANDOM.ids).encode() if line_id is None else line_id,
        _line_safe(msgspec.json.encode(custom_id)),
    )


class _Random(threading.local):
    """Random ids of 32 hex digits, asked for 256 at a time: a system call takes 5 µs, a line 20 µs.

    Each thread has its own, because a generator runs in one thread at a time.
    """

    def __init__(self) -> None:
        self.ids = self._generate()

    @staticmethod
    def _generate() -> Iterator[str]:
        while True:
            digits = secrets.token_hex(16 * 256)
            yield from (digits[at : at + 32] for at in range(0, len(digits), 32))


_RANDOM = _Random()


class _Error(msgspec.Struct):
    code: str | None = None


class _Head(msgspec.Struct):
    id: str = ""
    custom_id: str | None = None
    error: _Error | None = None


_REFUSED: Final = "line"
"""What the ``id`` of a refused line has, where others have hexadecimal digits."""
_REFUSED_ID: Final = f"batch_req_{_REFUSED}"
_REFUSED_START: Final = f'{{"id":"{_REFUSED_ID}'.encode()
_LINE_NUMBER: Final = re.compile(r"^Line \d+: ")
_decode_head = msgspec.json.Decoder(_Head).decode
_SEPARATORS: Final = {
    b"\xc2\x85": b"\\u0085",
    b"\xe2\x80\xa8": b"\\u2028",
    b"\xe2\x80\xa9": b"\\u2029",
}
"""In UTF-8, and as JSON may write them."""


class _RefusedError(msgspec.Struct):
    code: str
    message: str


class _RefusedLine(msgspec.Struct):
    error: _RefusedError


_decode_refused = msgspec.json.Decoder(_RefusedLine).decode


def _line_safe(json: bytes) -> bytes:
    """Escape U+0085, U+2028 and U+2029, which some readers take for line ends.

    ``str.splitlines`` of Python does, and so ``iter_lines`` of httpx and of OpenAI's SDK. In JSON
    they can only stand inside a string, so the escape never changes the document.
    """
    # Of an embedding's 100 MiB, the searches would take half a second.
    for separator, escaped in () if json.isascii() else _SEPARATORS.items():
        if separator in json:
            json = json.replace(separator, escaped)
    return json


def _error_body(
    message: str, kind: str = "server_error", param: str | None = None, code: str | None = None
) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}
    )


# -- token usage ----------------------------------------------------------------------------------


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Chat, completions, embeddings and scores say prompt/completion; responses, images and audio
    say input/output; some rerankers say only a total. Seconds of audio are no tokens. Messages say
    input/output as well, and their input lacks what was read from the cache or written to it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _AnswerBody(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] | None = None
    """The choices of chats and completions, which may ask for several answers."""


_decode_answer = msgspec.json.Decoder(_AnswerBody).decode
_decode_any = msgspec.json.Decoder().decode


def usage_of(body: bytes) -> TokenUsage:
    """The token usage that an answer names; none where it names none or is not JSON."""
    return _read_usage(body)[1]


def _read_usage(body: bytes) -> tuple[bool, TokenUsage, int | None]:
    """``(body is JSON, its token usage, how many choices it has)``.

    A usage of unknown shape counts nothing.

    Nor does a number that no engine can have counted: one below zero or above
    :data:`MAX_TOKENS`. No more tokens were cached than read, or costs would be below zero.
    """
    try:
        answer = _decode_answer(body)
    except (ValueError, RecursionError):
        return _is_json(body), NO_USAGE, None
    # The typed decoder skips over strings that it does not keep without decoding them.
    if not body.isascii() and not _is_utf8(body):
        return False, NO_USAGE, None
    usage, choices = answer.usage, None if answer.choices is None else len(answer.choices)
    if usage is None:
        return True, NO_USAGE, choices
    inputs = _tokens(usage.prompt_tokens) or _tokens(usage.input_tokens)
    outputs = _tokens(usage.completion_tokens) or _tokens(usage.output_tokens)
    total = _tokens(usage.total_tokens)
    if not (inputs or outputs):
        # Nothing was made: what was counted was read.
        inputs = total
    cache_read = _tokens(usage.cache_read_input_tokens)
    inputs = min(inputs + cache_read + _tokens(usage.cache_creation_input_tokens), MAX_TOKENS)
    in_details = usage.prompt_tokens_details or usage.input_tokens_details
    out_details = usage.completion_tokens_details or usage.output_tokens_details
    cached = _tokens(in_details.cached_tokens) if in_details else cache_read
    counted = TokenUsage(
        input_tokens=inputs,
        cached_tokens=min(cached, inputs),
        output_tokens=outputs,
        reasoning_tokens=_tokens(out_details.reasoning_tokens) if out_details else 0,
        total_tokens=total or min(inputs + outputs, MAX_TOKENS),
    )
    return True, counted, choices


def _tokens(count: int | None) -> int:
    """``count``, or 0 where it is no number of tokens."""
    return count if count is not None and 0 <= count <= MAX_TOKENS else 0


def _is_json(body: bytes) -> bool:
    try:
        _decode_any(body)
    except (ValueError, RecursionError):
        return False
    return True


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
