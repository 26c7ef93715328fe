"""Free ports for servers that tests start."""

from __future__ import annotations

import contextlib
import secrets
import socket

_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections: none takes one before its server."""


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int) -> list[int]:
    """Several, all held until the last one is known, so that they differ."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = _PORTS[secrets.randbelow(len(_PORTS))]
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
