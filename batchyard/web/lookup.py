"""Names that clients chose are looked up in threads of their own, one for each lookup.

Nothing can interrupt ``getaddrinfo``: for a name whose name server is silent, it takes ten seconds
to minutes, and goes on after its caller has given up. In asyncio's own threads, where files are
read and written, such names of one client would hold up everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from functools import partial
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

Entries: TypeAlias = list[tuple[Any, ...]]
"""The result of ``getaddrinfo``, for port 0."""


class Lookups:
    """``most`` lookups at once in each event loop, of one name one: all who want it share it.

    The threads are daemons, so that no process waits at its end for a name server.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Neither a semaphore nor a thread goes with a process that is forked.
        self._of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LookupsOfLoop] = (
            WeakKeyDictionary()
        )

    async def entries(self, host: str, *, family: int = 0, flags: int = 0) -> Entries:
        """What ``getaddrinfo`` says of the host, for TCP.

        Raises ``OSError`` (``socket.gaierror`` included), and ``UnicodeError`` for what cannot be
        a name. A caller that is cancelled while it waits for a thread does not keep its turn.
        """
        of_loop = self._of_loops.setdefault(asyncio.get_running_loop(), _LookupsOfLoop(self._most))
        return await of_loop.entries((host, family, flags))


CONNECTIONS: Final = Lookups(256)
"""For requests: several times as many as a deliverer attempts at once, since lookups go on."""


class _LookupsOfLoop:
    def __init__(self, most: int) -> None:
        self._room = asyncio.Semaphore(most)
        self._under_way: dict[tuple[str, int, int], asyncio.Future[Entries]] = {}

    async def entries(self, asked: tuple[str, int, int]) -> Entries:
        if asked not in self._under_way:
            await self._room.acquire()
            # Another may have begun it meanwhile.
            if asked in self._under_way:
                self._room.release()
            else:
                self._begin(asked)
        return await asyncio.shield(self._under_way[asked])

    def _begin(self, asked: tuple[str, int, int]) -> None:
        found = self._under_way[asked] = asyncio.get_running_loop().create_future()
        found.add_done_callback(partial(self._end, asked))
        try:
            threading.Thread(
                target=_look_up, args=(asked, found), name="lookup", daemon=True
            ).start()
        except RuntimeError:
            found.set_exception(socket.gaierror(socket.EAI_AGAIN, "no thread can be started"))

    def _end(self, asked: tuple[str, int, int], found: asyncio.Future[Entries]) -> None:
        del self._under_way[asked]
        self._room.release()
        # Else asyncio logs an error where all callers have given up.
        found.exception()


def _look_up(asked: tuple[str, int, int], found: asyncio.Future[Entries]) -> None:
    host, family, flags = asked
    try:
        entries = socket.getaddrinfo(host, 0, family=family, type=socket.SOCK_STREAM, flags=flags)
    except Exception as error:  # noqa: BLE001 - it is the caller's
        outcome = partial(found.set_exception, error)
    else:
        outcome = partial(found.set_result, entries)
    # The event loop may have ended meanwhile.
    with contextlib.suppress(RuntimeError):
        found.get_loop().call_soon_threadsafe(outcome)
