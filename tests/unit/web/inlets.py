"""The three ways in which a tenant's URL makes us connect to something, and who must not notice."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.errors import LocationRefused, StorageError
from batchyard.locations.download import download
from batchyard.locations.upload import upload
from batchyard.locations.web import WebAccess
from batchyard.notify.webhook import WebhookSender
from batchyard.storage.backoff import Backoff

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from batchyard.web.address import AddressGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What every inlet is given besides the URL."""

    guard: AddressGuard | None
    seconds: float = 5.0
    ssl_context: ssl.SSLContext | None = None

    @property
    def access(self) -> WebAccess:
        return WebAccess(
            connect_seconds=self.seconds,
            stall_seconds=self.seconds,
            backoff=Backoff(1),
            ssl_context=self.ssl_context,
            guard=self.guard,
        )


@dataclass(frozen=True, slots=True)
class Inlet:
    """``go`` returns when the URL was reached, and raises a ``StorageError`` when it was not."""

    name: str
    go: Callable[[str, Way], Awaitable[None]]
    refusal: type[StorageError]
    """What stands for a URL that is not to be tried again."""


async def _read(url: str, way: Way) -> None:
    async for _ in download(url, limit_bytes=1000, web=way.access):
        pass


async def _write(url: str, way: Way) -> None:
    await upload(url, Path(__file__), web=way.access)


async def _tell(url: str, way: Way) -> None:
    sender = WebhookSender(way.guard, timeout_seconds=way.seconds, ssl_context=way.ssl_context)
    async with sender:
        answer = await sender.send(url, b"{}", delivery_id="wh_1", secrets=["whsec_" + "A" * 44])
    if answer.error is not None:
        raise StorageError(answer.error)


INLETS = (
    Inlet("input_url", _read, LocationRefused),
    Inlet("output_url", _write, LocationRefused),
    # The log of deliveries knows words alone.
    Inlet("webhook_url", _tell, StorageError),
)


class Canary:
    """Listens on every address of this machine, IPv4 and IPv6; nobody may come."""

    def __init__(self) -> None:
        self.socket, self.port = self._listen()

    @staticmethod
    def _listen() -> tuple[socket.socket, int]:
        # On a port that would be open, so that it is the address that is refused.
        for port in range(8100, 10_000):
            with contextlib.suppress(OSError):
                listening = socket.create_server(
                    ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=200
                )
                listening.setblocking(False)
                return listening, port
        raise AssertionError("no port is free")

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has connected, or begun to, since it was last asked."""
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return True
        return False


def words(text: str) -> list[str]:
    return text.split()


def resolving(*answers: list[str]) -> Callable[..., list[Any]]:
    """A stand-in for ``socket.getaddrinfo``: each time the next answer, the last one stays."""
    left = list(answers)

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        addresses = left.pop(0) if len(left) > 1 else left[0]
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (one, port, 0, 0))
            if ":" in one
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
            for one in addresses
        ]

    return resolve
