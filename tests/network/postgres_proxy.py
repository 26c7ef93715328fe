"""A proxy on loopback before PostgreSQL, which knows statements and the end of their answers.

Of version 3 of the protocol it reads what is needed for that: the names of prepared statements and
portals (Parse, Bind), what runs (Execute, Query) and ReadyForQuery. It speaks no TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tests.network.faults import Fault, Faults, Wrong
from tests.network.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_NO_TLS = {80877103, 80877104}
"""What asks for TLS or GSS encryption, which is refused with one letter."""
_BROKEN = {Wrong.ANSWER_LOST, Wrong.ANSWER_CUT}


@dataclass(slots=True)
class PostgresProxy:
    """Passes on to the server that listens on the Unix socket ``socket``."""

    socket: Path
    faults: Faults = field(default_factory=Faults)
    port: int = 0
    _open: list[_Connection] = field(default_factory=list)

    def url(self, url: str) -> str:
        """The database of this ``url``, through this proxy."""
        return f"postgresql://batchyard@127.0.0.1:{self.port}{urlsplit(url).path}"

    def lose_connections(self) -> None:
        """Pass nothing on any more of those that there are, and tell neither end."""
        for each in self._open:
            each.is_silent = True

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[PostgresProxy]:
        """Listen on a free port for the time of the block; then end every connection."""
        async with serving(self._serve) as self.port:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            length = await reader.readexactly(4)
            rest = await reader.readexactly(struct.unpack("!i", length)[0] - 4)
            if struct.unpack("!i", rest[:4])[0] not in _NO_TLS:
                break
            writer.write(b"N")
        server_reader, server_writer = await asyncio.open_unix_connection(self.socket)
        server_writer.write(length + rest)
        connection = _Connection(self, (reader, writer), (server_reader, server_writer))
        self._open.append(connection)
        ways = [
            asyncio.create_task(connection.pass_requests()),
            asyncio.create_task(connection.pass_answers()),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.remove(connection)
            for each in ways:
                each.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            server_writer.close()


@dataclass(slots=True)
class _Connection:
    proxy: PostgresProxy
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    is_silent: bool = False
    _statements: dict[bytes, str] = field(default_factory=dict)
    _portals: dict[bytes, str] = field(default_factory=dict)
    _transaction: list[str] = field(default_factory=list)
    """What has run since it began."""
    _fault: Fault | None = None
    """Of the answer that comes next."""

    async def pass_requests(self) -> None:
        """Return when the client has ended the connection, or a fault ends it."""
        while True:
            message = await _read(self.client[0])
            text = self._runs(message[:1], message[5:])
            fault = None if text is None else self.proxy.faults.take(text)
            if fault is not None:
                if fault.wrong is Wrong.REQUEST_LOST:
                    return
                if fault.wrong is Wrong.REQUEST_CUT:
                    await self._send(self.server[1], message[: len(message) // 2])
                    return
                self._fault = fault
            if not self.is_silent:
                await self._send(self.server[1], message)

    async def pass_answers(self) -> None:
        """Return when the server has ended the connection, or a fault ends it."""
        kept = b""
        while True:
            message = await _read(self.server[0])
            fault = self._fault
            if fault is not None and fault.wrong in _BROKEN:
                kept += message
                if message[:1] == b"Z":
                    if fault.wrong is Wrong.ANSWER_CUT:
                        await self._send(self.client[1], kept[: len(kept) // 2])
                    return
                continue
            if fault is not None:
                self._fault = None
                await asyncio.sleep(fault.seconds)
            if not self.is_silent:
                await self._send(self.client[1], message)

    def _runs(self, kind: bytes, content: bytes) -> str | None:
        """The text of what a message runs; see :class:`.Fault`. None: it runs nothing."""
        match kind:
            case b"P":
                name, query, _ = content.split(b"\0", 2)
                self._statements[name] = query.decode()
                return None
            case b"B":
                portal, name, _ = content.split(b"\0", 2)
                self._portals[portal] = self._statements.get(name, "")
                return None
            case b"E":
                return self._noted(self._portals.get(content.split(b"\0", 1)[0], ""))
            case b"Q":
                return self._noted(content.rstrip(b"\0").decode())
        return None

    def _noted(self, query: str) -> str:
        word = query.split(maxsplit=1)[0].rstrip(";").upper() if query.strip() else ""
        text = query
        if word == "COMMIT":
            text = "\n".join(["COMMIT", *self._transaction])
        if word in {"BEGIN", "START", "COMMIT", "ROLLBACK"}:
            self._transaction.clear()
        else:
            self._transaction.append(query)
        return text

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """One message, whole."""
    head = await reader.readexactly(5)
    return head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)
