"""Reads one large input in a process of its own: orders on standard input, answers on output.

Run as ``python -m batchyard.steps.prepare.reader_program``, by :mod:`.reader_process`. Both
ways go frames: a length and a pickle. The first one is a :class:`~.input_reader.ReadingJob`. An
answer is a pair of an order's result and the error that it raised; one of them is None.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from typing import BinaryIO

HEAD: Final = struct.Struct("<Q")
_NICE: Final = 5
_PIPE_BYTES: Final = 1 << 20


def frame(value: object) -> bytes:
    """A value as the other side reads it."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(data)) + data


def main() -> None:
    """Answer orders, one after the other, until standard input ends: then at once."""
    # A signal to all processes is meant for our parent, which decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb", buffering=_PIPE_BYTES)
    os.dup2(2, 1)  # what a library prints is no answer
    orders: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_take, args=(sys.stdin.buffer, orders), daemon=True).start()
    _answer(orders, answers)


def _take(source: BinaryIO, orders: SimpleQueue[bytes]) -> None:
    """Pass on what comes. When our parent has closed the pipe or was killed, no process waits for
    an answer: nothing is written then to a folder that may be another one's."""
    try:
        while head := source.read(HEAD.size):
            (length,) = HEAD.unpack(head)
            orders.put(source.read(length))
    finally:
        os._exit(0)


def _answer(orders: SimpleQueue[bytes], answers: BinaryIO) -> None:
    # Here, so that signals are ignored while this takes its time.
    from batchyard.steps.prepare.input_reader import Check, InputReader  # noqa: PLC0415 - see above

    reader = InputReader(_next(orders))
    while True:
        order = _next(orders)
        answer: tuple[Any, Exception | None]
        try:
            if isinstance(order, Check):
                answer = reader.check(order, _go_on), None
            else:
                answer = reader.write_plan(order), None
        except Exception as error:  # noqa: BLE001 - it is raised on the other side
            answer = None, error
        answers.write(frame(answer))
        answers.flush()


def _next(orders: SimpleQueue[bytes]) -> Any:
    return pickle.loads(orders.get())  # noqa: S301 - our parent's


def _go_on() -> None:
    """Continue always: the parent kills this process to stop it."""


if __name__ == "__main__":
    main()
