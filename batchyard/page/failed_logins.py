"""Counts failed logins by address, to limit how fast keys can be tried."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_FAILURES: Final = 10
WINDOW_SECONDS: Final = 300.0
_MOST_ADDRESSES: Final = 4096


class FailedLogins:
    """Counts for each address, in this process. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, address: str) -> None:
        """A login from there failed."""
        key = _network(address)
        failures = self._failures.setdefault(key, deque(maxlen=MOST_FAILURES))
        failures.append(self._clock())
        self._failures.move_to_end(key)
        while len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)

    def wait_seconds(self, address: str) -> int:
        """For how many seconds logins from the address are refused; 0: they are not."""
        failures = self._failures.get(_network(address))
        if failures is None or len(failures) < MOST_FAILURES:
            return 0
        return max(0, math.ceil(failures[0] + WINDOW_SECONDS - self._clock()))


def _network(address: str) -> str:
    """The address; of IPv6 the network of 64 bits, of which one host may have every address.

    An IPv4 address may be written as one of IPv6: a proxy that listens on both does so.
    """
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or found.exploded[:19])
    return address
