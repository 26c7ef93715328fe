"""Which network addresses a URL that a tenant gives may lead to.

What counts is the address that is connected to, not the name: names change what they mean, and
``0x7f.1``, ``2130706433`` and ``::ffff:127.0.0.1`` are all this machine.
No maintained library does this for aiohttp.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ipaddress import IPv4Network, IPv6Network

# Global by Python's tables or in some of its versions, and yet not some stranger's server.
_NOT_PUBLIC_V4: Final = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "168.63.129.16/32",  # Azure's metadata, the same in every virtual network
            "192.0.0.0/24",  # protocol assignments
            "192.88.99.0/24",  # relays of 6to4
            "224.0.0.0/4",  # multicast
        ),
    )
)
_GLOBAL_UNICAST_V6: Final = ipaddress.IPv6Network("2000::/3")
"""All that is assigned; leaves out NAT64, IPv4-compatible, site-local and multicast."""
_NOT_PUBLIC_V6: Final = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # Teredo, which holds an IPv4 address, and other protocols
            "2002::/16",  # 6to4, the same
            "3fff::/20",  # documentation
        ),
    )
)
_PORTS: Final = frozenset({80, 443, *range(8000, 10_000)})
"""Where web servers listen; other ports speak protocols that an HTTP request could upset."""


class AddressRefused(OSError):
    """A connection that is not made. Same text for every address: one error for all of a name."""


def is_public(address: str) -> bool:
    """Whether this is an address of the public internet. False for what is no address at all."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed.is_global and not any(parsed in network for network in _NOT_PUBLIC_V4)
    if parsed.scope_id is not None:
        # A zone is an interface of this machine.
        return False
    if parsed.ipv4_mapped is not None:
        return is_public(str(parsed.ipv4_mapped))
    is_excluded = any(parsed in network for network in _NOT_PUBLIC_V6)
    return parsed.is_global and parsed in _GLOBAL_UNICAST_V6 and not is_excluded


@dataclass(frozen=True, slots=True)
class AddressGuard:
    """Lets connections out to web servers of the public internet, and to named networks."""

    internal_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks of the operator's own that may be reached too, at any port."""

    def socket(self, address: Sequence[Any]) -> socket.socket:
        """The socket for an entry of ``getaddrinfo``: aiohttp's ``socket_factory``.

        Called with the very address that is connected to next. Raises :class:`AddressRefused`.
        """
        family, kind, protocol, _, place = address
        self.check(place)
        return socket.socket(family, kind, protocol)

    def check(self, place: Sequence[Any]) -> None:
        """Raise :class:`AddressRefused` for the address and port of a socket that may not be."""
        host, port, *v6 = place
        # Of an IPv6 address: flow label and zone.
        is_scoped = any(v6[1:])
        if is_scoped or not self._is_internal(host):
            if is_scoped or not is_public(host):
                raise AddressRefused("its address is not public")
            if port not in _PORTS:
                raise AddressRefused("its port is none of 80, 443 and 8000 to 9999")

    def _is_internal(self, host: str) -> bool:
        try:
            parsed = ipaddress.ip_address(host)
        except ValueError:
            return False
        mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
        return any((mapped or parsed) in network for network in self.internal_networks)
