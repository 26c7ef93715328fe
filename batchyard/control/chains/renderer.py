"""Renders a client's template in a process of its own, which can do no harm but waste some time.

See :mod:`batchyard.lines.templates` for what the process does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self

import msgspec

from batchyard.lines import templates
from batchyard.lines.templates import BodyNotMade
from batchyard.processes.child_loop import Limits
from batchyard.processes.child_program import ChildProgram, ProgramEnded
from batchyard.processes.tenant_turns import TenantTurns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_AT_ONCE: Final = 4
"""Processes that render, each with up to a gigabyte."""
_TURNS: Final = TenantTurns(_AT_ONCE)
_MOST_SLOW: Final = 10
"""After so many lines that take too long or too much memory, no more groups are tried, or a
template could hold a core."""
_CPU_SECONDS: Final = 300.0
"""The limit of a stage, as for a dataset; then no more lines are tried either."""
_LINE_CPU_SECONDS: Final = 0.05
"""And so many in addition for each line rendered, or a large chain would end for its size. Most
lines take less than a millisecond."""
_IDLE_SECONDS: Final = 30.0
"""A process has 20 MiB, and a tenant may have one for each stage of hundreds of chains."""
_LIMITS: Final = Limits(address_bytes=1024**3, file_bytes=0)


class _Rendered(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw()
    error: str | None = None
    is_slow: bool = False
    cpu_seconds: float = 0.0


_decode = msgspec.json.Decoder(_Rendered).decode


class Renderer:
    """One template of a tenant. A context manager; its process starts with the first body.

    One process of a tenant renders at a time, and few of all tenants.
    """

    def __init__(self, source: str, tenant: str) -> None:
        self._source = source
        self._tenant = tenant
        self._process: ChildProgram | None = None
        self._used_at = 0.0
        self._slow = 0
        self._lines = 0
        self._cpu_seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def render(self, variables: Sequence[Mapping[str, Any]]) -> list[bytes | BodyNotMade]:
        """A body as JSON for each of the first of these, or why there is none.

        Of one at least, and of as many as have :data:`~.templates.GROUP_BYTES` and one
        body more, or take :data:`~.templates.GROUP_CPU_SECONDS`: the caller asks for the
        rest once it has handed these on, and other chains and tenants have their turns.
        """
        async with _TURNS.turn(self._tenant):
            if self._is_spent:
                why = "it took too long or too much memory for earlier lines"
                return [BodyNotMade(why) for _ in variables]
            try:
                return await self._ask(variables)
            except BaseException:
                # It may be in the middle of an answer, which must not become another line's.
                await self._end()
                raise
            finally:
                self._used_at = time.monotonic()

    async def end_if_idle(self) -> None:
        """End the process if it has not been used for a while. The next body starts another."""
        if time.monotonic() - self._used_at >= _IDLE_SECONDS:
            await self._end()

    @property
    def _is_spent(self) -> bool:
        most_seconds = _CPU_SECONDS + _LINE_CPU_SECONDS * self._lines
        return self._slow >= _MOST_SLOW or self._cpu_seconds >= most_seconds

    async def _ask(self, variables: Sequence[Mapping[str, Any]]) -> list[bytes | BodyNotMade]:
        """The answers until the process leaves the rest, or ends, which is the last one's fault."""
        bodies: list[bytes | BodyNotMade] = []
        try:
            process = self._process or await self._start()
            await process.send(msgspec.json.encode(variables))
            for _ in variables:
                part = await process.receive()
                bodies.append(self._body_in(_decode(part.data)))
                if part.is_last:
                    break
        except ProgramEnded:
            self._slow += 1
            bodies.append(BodyNotMade("it takes too long or too much memory"))
            await self._end()
        return bodies

    def _body_in(self, answer: _Rendered) -> bytes | BodyNotMade:
        self._lines += 1
        self._cpu_seconds += answer.cpu_seconds
        if answer.error is None:
            return bytes(answer.body)
        self._slow += answer.is_slow
        return BodyNotMade(answer.error)

    async def _start(self) -> ChildProgram:
        # Nothing of ours is in its environment, and nothing of Batchyard is imported.
        start = ChildProgram.start(
            templates.__file__, _LIMITS, environment={}, options=("-I",), folder="/"
        )
        self._process = process = await start
        await process.send(self._source.encode())
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()
