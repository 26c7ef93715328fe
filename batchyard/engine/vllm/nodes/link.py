r"""The connection between a leader and a node, on which the life of the engine depends.

A line each way, over TCP. The first one is a random challenge, in the clear. Each one after it is
a JSON object, encrypted with a key that both derive from the key of the installation, and has the
challenge of its reader: so nothing can be read, forged, sent back or sent again. Empty lines are
signs of life::

    leader                                     node
    challenge                               ⇄  challenge
                                            ←  {"name": "gpu2", "vllm": "0.32.0"}
    {"rank": 1, "words": […], …}            →
                                            ←  {"ended": -9, "log": […]}

vLLM's own connections between the machines are not encrypted and ask for no key.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import secrets
from typing import TYPE_CHECKING, Any, Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from batchyard.processes.beside import every

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

DEFAULT_PORT: Final = 29600
"""vLLM itself uses 29500, 29501 and 29550."""
ALIVE_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
"""After so long without a sign of life the other machine, or the network, counts as lost."""
MAX_LINE_BYTES: Final = 1 << 20
_CHALLENGE_BYTES: Final = 32
_PURPOSE: Final = b"batchyard: nodes of an engine"


class LinkLost(Exception):
    """The connection has ended; the text says how."""


class WrongKey(LinkLost):
    """The other side does not have the key of this installation."""


class Link:
    """One open connection. ``receive`` is called by one task at a time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: MultiFernet
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._keys = keys
        self._own_challenge = secrets.token_hex(_CHALLENGE_BYTES)
        self._their_challenge = ""

    @property
    def own_address(self) -> str:
        """The address of this machine that the other one reaches."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, message: Mapping[str, Any]) -> None:
        """Send soon. Does nothing on a connection that is lost."""
        body = json.dumps({**message, "for": self._their_challenge})
        self._write(self._keys.encrypt(body.encode()))

    def refuse(self) -> None:
        """Let the other side say that the keys differ: no key opens this."""
        self._write(b"refused")

    async def receive(self) -> dict[str, Any]:
        """The next message. Raises :class:`LinkLost`."""
        while not (line := await self._line()):
            pass
        try:
            message = json.loads(self._keys.decrypt(line))
        except InvalidToken:
            raise WrongKey("it has another key: BATCHYARD_SECRET_KEY or secret.key") from None
        if not isinstance(message, dict) or message.pop("for", None) != self._own_challenge:
            raise WrongKey("its message was not for this connection")
        return message

    async def sent(self) -> None:
        """Return when the kernel has all that was sent, or the connection is lost."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(ALIVE_SECONDS):
                await self._writer.drain()

    async def greet(self) -> None:
        """Exchange the challenges. Raises :class:`LinkLost`."""
        self._write(self._own_challenge.encode())
        self._their_challenge = (await self._line()).decode(errors="replace")

    async def show_life(self) -> None:
        """Send a sign of life."""
        self._write(b"")

    def close(self) -> None:
        """Close the connection, after what was sent."""
        self._writer.close()

    def _write(self, line: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(line + b"\n")

    async def _line(self) -> bytes:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                line = await self._reader.readuntil(b"\n")
        except TimeoutError:
            raise LinkLost(f"there was no sign of life in {SILENCE_SECONDS:g} s") from None
        except asyncio.IncompleteReadError:
            raise LinkLost("the connection was closed") from None
        except asyncio.LimitOverrunError:
            raise LinkLost("it sent something else than a message") from None
        except OSError as error:
            raise LinkLost(f"the connection was lost ({error.strerror or error})") from error
        return line[:-1]


@contextlib.asynccontextmanager
async def linked(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: MultiFernet
) -> AsyncIterator[Link]:
    """The connection, greeted and showing life while the block runs. Raises :class:`LinkLost`."""
    link = Link(reader, writer, keys)
    try:
        await link.greet()
        async with every(lambda: ALIVE_SECONDS, link.show_life, name="link"):
            yield link
    finally:
        link.close()


def link_keys(secret_keys: Sequence[str]) -> MultiFernet:
    """What encrypts links, from the keys of the installation: the first seals, any opens."""
    return MultiFernet([Fernet(_derived(key)) for key in secret_keys])


def _derived(key: str) -> bytes:
    return base64.urlsafe_b64encode(hmac.digest(key.encode(), _PURPOSE, "sha256"))
