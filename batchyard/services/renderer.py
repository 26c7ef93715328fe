"""Renders a client's template in a process of its own, which can do no harm but waste two seconds.

See :mod:`batchyard.templates` for what the process does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final, Self

import msgspec

from batchyard import templates
from batchyard.templates import BodyNotMade, frame_length, write_frame

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_MOST_SLOW: Final = 10
"""So many lines may take too long; then no more are tried, or a template could hold a core."""
_HEAD_BYTES: Final = 4


class _Answer(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw()
    error: str | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class Renderer:
    """One template. A context manager; its process starts with the first body."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: asyncio.subprocess.Process | None = None
        self._slow = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def render(self, variables: Mapping[str, Any]) -> bytes:
        """A body as JSON. Raises :class:`~batchyard.templates.BodyNotMade`."""
        if self._slow >= _MOST_SLOW:
            raise BodyNotMade("it took too long for earlier lines")
        try:
            answer = await self._ask(variables)
        except BaseException:
            # It may be in the middle of an answer, which must not become another line's.
            await self._end()
            raise
        if answer is None:
            self._slow += 1
            await self._end()
            raise BodyNotMade("it takes too long or too much memory")
        if answer.error is not None:
            self._slow += "too long" in answer.error
            raise BodyNotMade(answer.error)
        return bytes(answer.body)

    async def _ask(self, variables: Mapping[str, Any]) -> _Answer | None:
        """None: the process has ended."""
        process = self._process or await self._start()
        assert process.stdin is not None  # noqa: S101 - they are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            process.stdin.write(write_frame(variables))
            await process.stdin.drain()
            head = await process.stdout.readexactly(_HEAD_BYTES)
            return _decode(await process.stdout.readexactly(frame_length(head)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _start(self) -> asyncio.subprocess.Process:
        # Nothing of ours is in its environment, and nothing of Batchyard is imported.
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", templates.__file__),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        process.stdin.write(write_frame({"source": self._source}))
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
