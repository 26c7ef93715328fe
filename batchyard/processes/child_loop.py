"""The child's side of :mod:`.child_program`: limits, and the loop that answers requests.

Run as a script, with a Python file and :class:`Limits` as JSON. The file has a generator
``answers``: it takes the requests and yields each part of the answers, with whether it is the last
one of its answer. Requests and parts are bytes; what they mean is that file's and its caller's
business. Some of these files run in the engine's environment, so this one imports the standard
library only.

Both ways go frames: whether it is a last part, the length, and as many bytes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import struct
import sys
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

    Answers = Iterator[tuple[bool, bytes]]

HEAD: Final = struct.Struct(">?I")
_NICE: Final = 5
"""Less urgent than the process that runs the batches of all tenants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use, beside its time; None: no limit of its own. The kernel keeps them."""

    address_bytes: int | None = None
    data_bytes: int | None = None
    """Of memory that it writes to: not counted is what it only reserves."""
    cpu_seconds: int | None = None
    file_bytes: int | None = None
    """The length of each file that it writes."""


def frame(data: bytes, *, is_last: bool = True) -> bytes:
    """The bytes as the other side reads them."""
    return HEAD.pack(is_last, len(data)) + data


def main() -> NoReturn:
    """Answer requests, one after the other, until standard input ends: then exit at once."""
    # A signal to all processes is meant for our parent, which decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    file, limits = sys.argv[1:]
    _limit(Limits(**json.loads(limits)))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    requests: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_take, args=(requests,), daemon=True).start()
    try:
        for is_last, data in _loaded(file).answers(iter(requests.get, None)):
            answers.write(frame(data, is_last=is_last))
            answers.flush()
    finally:
        # An ordinary exit would wait for what the thread reads.
        os._exit(1)


def _limit(limits: Limits) -> None:
    os.nice(_NICE)
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits.address_bytes),
        (resource.RLIMIT_DATA, limits.data_bytes),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
    ):
        hard = resource.getrlimit(kind)[1]
        if most is not None and (hard == resource.RLIM_INFINITY or most < hard):
            resource.setrlimit(kind, (most, most))


def _take(requests: SimpleQueue[bytes]) -> None:
    """Pass on what comes. When our parent has closed the pipe or was killed, no process waits for
    an answer: nothing is written then to a folder that may be another one's."""
    try:
        source = sys.stdin.buffer
        while head := source.read(HEAD.size):
            requests.put(source.read(HEAD.unpack(head)[1]))
    finally:
        os._exit(0)


def _loaded(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("program", file)
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - it is a Python file
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
