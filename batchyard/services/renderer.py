"""Renders a client's template in a process of its own, which can do no harm but waste two seconds.

See :mod:`batchyard.templates` for what the process does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

import msgspec

from batchyard import templates
from batchyard.child_program import ChildProgram
from batchyard.templates import BodyNotMade, frame_length, write_frame

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_MOST_SLOW: Final = 10
"""So many lines may take too long; then no more are tried, or a template could hold a core."""
_HEAD_BYTES: Final = 4


class _Rendered(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw()
    error: str | None = None
    is_slow: bool = False
    is_left: bool = False


_decode = msgspec.json.Decoder(_Rendered).decode


class Renderer:
    """One template. A context manager; its process starts with the first body."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: ChildProgram | None = None
        self._slow = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def render(self, variables: Sequence[Mapping[str, Any]]) -> list[bytes | BodyNotMade]:
        """A body as JSON for each of the first of these, or why there is none.

        Of one at least, and of as many as have :data:`~batchyard.templates.GROUP_BYTES` and one
        body more: the caller asks for the rest once it has handed these on.
        """
        if self._slow >= _MOST_SLOW:
            return [BodyNotMade("it took too long for earlier lines") for _ in variables]
        try:
            return await self._ask(variables)
        except BaseException:
            # It may be in the middle of an answer, which must not become another line's.
            await self._end()
            raise

    async def _ask(self, variables: Sequence[Mapping[str, Any]]) -> list[bytes | BodyNotMade]:
        """The answers until the process leaves the rest, or ends, which is the last one's fault."""
        process = self._process or await self._start()
        bodies: list[bytes | BodyNotMade] = []
        try:
            # All at once: with a turn of the event loop for each, many lines take seconds.
            process.stdin.writelines(map(write_frame, (len(variables), *variables)))
            for _ in variables:
                head = await process.stdout.readexactly(_HEAD_BYTES)
                answer = _decode(await process.stdout.readexactly(frame_length(head)))
                if not answer.is_left:
                    bodies.append(self._body_in(answer))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._slow += 1
            bodies.append(BodyNotMade("it takes too long or too much memory"))
            await self._end()
        return bodies

    def _body_in(self, answer: _Rendered) -> bytes | BodyNotMade:
        if answer.error is None:
            return bytes(answer.body)
        self._slow += answer.is_slow
        return BodyNotMade(answer.error)

    async def _start(self) -> ChildProgram:
        # Nothing of ours is in its environment, and nothing of Batchyard is imported.
        self._process = process = await ChildProgram.start(
            "-I", templates.__file__, environment={}, folder="/"
        )
        process.stdin.write(write_frame({"source": self._source}))
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()
