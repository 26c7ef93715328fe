"""The results of a Message Batch: the lines of the batch's files in Anthropic's shape, as a stream.

A line is translated when it is sent; nothing is stored and no more than a block of lines is held.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from batchyard.api.http.api_error import ApiError
from batchyard.api.http.begun_stream import begun
from batchyard.api.http.message_errors import MessageError, message_error
from batchyard.batch_error import BatchError
from batchyard.errors import (
    InputRefused,
    ModelNotFound,
    ObjectNotFound,
    ObjectTooLarge,
    QuotaExceeded,
    RecordNotFound,
    WindowUnattainable,
)
from batchyard.files.found_lines import whole_lines
from batchyard.lifecycle import BatchStatus
from batchyard.lines.framing import custom_id_of
from batchyard.processes.threads import in_thread
from batchyard.results.results import NoAnswerCode
from batchyard.services.keys import file_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _NoAnswer(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Line(msgspec.Struct):
    custom_id: str | None
    response: _Response | None
    error: _NoAnswer | None


class _Message(msgspec.Struct):
    message: str | None = None


class _EngineError(msgspec.Struct):
    error: _Message | None = None


class _Result(msgspec.Struct):
    type: str
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: MessageError | msgspec.UnsetType = msgspec.UNSET


class _Individual(msgspec.Struct):
    custom_id: str
    result: _Result


_decode = msgspec.json.Decoder(_Line).decode
_decode_error = msgspec.json.Decoder(_EngineError).decode
_encode = msgspec.json.encode

_EXPIRED: Final = _Result("expired")
_CANCELED: Final = _Result("canceled")
_STATUSES: Final = {code.value: 500 for code in NoAnswerCode} | {NoAnswerCode.TIMEOUT.value: 504}
"""The HTTP status that the error of a request without an answer is like. All others are not valid:
400."""
_OF_INPUT: Final = (
    *(InputRefused.code, ModelNotFound.code, ObjectTooLarge.code),
    *("empty_file", "endpoint_not_served", "too_many_tasks"),
)
_COMMON_STATUSES: Final = dict.fromkeys(_OF_INPUT, 400) | dict.fromkeys(
    (QuotaExceeded.code, WindowUnattainable.code), 429
)
"""The same of all requests of a batch that failed before it began; where it failed for no fault of
theirs, 500. By it clients decide whether they may send the requests again as they are."""
_LINE: Final = re.compile(r"^Line \d+: ")
"""What a client that has sent no file cannot look up."""
_BODY: Final = re.compile(r"\bbody\b")
"""What a request's params are called in a line."""


def translated(line: bytes) -> bytes:
    """A line of an output or error file as a line of the results.

    A line whose ``custom_id`` could not be read, because a limit was lowered since, has an empty
    one: the others behind it are to be read.
    """
    read = _decode(line)
    return _encode(_Individual(read.custom_id or "", _result_of(read))) + b"\n"


def _result_of(line: _Line) -> _Result:
    response = line.response
    if response is not None:
        if response.status_code < 300:
            return _Result("succeeded", message=response.body)
        message = _message_in(response)
        return _errored(response.status_code, message, response.request_id)
    code = line.error.code if line.error else None
    if code == NoAnswerCode.EXPIRED:
        return _EXPIRED
    if code == NoAnswerCode.CANCELLED:
        return _CANCELED
    message = (line.error and line.error.message) or "The request has no answer."
    if code not in _STATUSES:
        message = _BODY.sub("params", _LINE.sub("", message))
    return _errored(_STATUSES.get(code or "", 400), message, None)


def _errored(status: int, message: str, request_id: str | None) -> _Result:
    return _Result("errored", error=message_error(status, message, request_id))


def _message_in(response: _Response) -> str:
    """What the engine says, in the shape of OpenAI or of Anthropic: the message is in one place."""
    try:
        said = _decode_error(response.body).error
    except (ValueError, RecursionError):
        said = None
    return (said and said.message) or f"The engine answered with status {response.status_code}."


async def open_results(services: Services, batch: BatchRecord) -> AsyncIterator[bytes]:
    """The result lines of a batch that has ended, in blocks; the first of them is read already.

    Raises 404 where they are no longer kept, and :class:`~batchyard.errors.StorageError`.
    """
    try:
        return await begun(_blocks(services, batch))
    except (ObjectNotFound, RecordNotFound):
        raise ApiError(
            404, "The results are no longer kept: they were deleted or have expired."
        ) from None


async def _blocks(services: Services, batch: BatchRecord) -> AsyncGenerator[bytes]:
    file_ids = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
    # Before anything is sent: a file that is gone is no 200.
    files = [await services.store.files.get(each, batch.tenant) for each in file_ids]
    for file in files:
        async for block in _translated(services, file.storage_key, translated):
            yield block
    if not files:
        # It ended before it was planned, so no line has a result of its own.
        result = _common_result(batch)
        async for block in _translated(
            services,
            file_key(batch.input_file_id),
            lambda line: _encode(_Individual(custom_id_of(line), result)) + b"\n",
        ):
            yield block


async def _translated(
    services: Services, key: str, translate: Callable[[bytes], bytes]
) -> AsyncGenerator[bytes]:
    def joined(lines: list[bytes]) -> bytes:
        return b"".join(map(translate, lines))

    async for lines in whole_lines(services.storage.get(key)):
        yield await in_thread(joined, lines)


def _common_result(batch: BatchRecord) -> _Result:
    match batch.status:
        case BatchStatus.CANCELLED:
            return _CANCELED
        case BatchStatus.EXPIRED:
            return _EXPIRED
        case _:
            why = batch.errors[0] if batch.errors else BatchError("", "The batch failed.")
            return _errored(_COMMON_STATUSES.get(why.code, 500), why.message, None)
