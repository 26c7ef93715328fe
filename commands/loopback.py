"""Calls to this machine itself go to it, and not to a proxy for the internet.

Prefect's client obeys `http_proxy`, which companies set on their machines, also for 127.0.0.1.
"""

from __future__ import annotations

import urllib.parse
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_HERE: Final = ("127.0.0.1", "localhost")
_VARIABLES: Final = ("no_proxy", "NO_PROXY")
"""Some programs read only one of them, and Python the first."""


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep calls to this machine from a proxy, with the hosts that they had."""
    return _with(environment, _HERE)


def without_proxy_to(url: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The same, if the host of ``url`` is this machine; otherwise nothing."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return _with(environment, (*_HERE, host)) if _is_here(host) else {}


def _is_here(host: str) -> bool:
    try:
        return host in _HERE or ip_address(host).is_loopback
    except ValueError:
        return False


def _with(environment: Mapping[str, str], added: tuple[str, ...]) -> dict[str, str]:
    variables = {}
    for name, other in zip(_VARIABLES, reversed(_VARIABLES), strict=True):
        named = environment.get(name, environment.get(other, ""))
        hosts = [host.strip() for host in named.split(",") if host.strip()]
        # Beside other hosts, Python would not understand it.
        hosts = hosts if "*" in hosts else [*hosts, *added]
        variables[name] = ",".join(dict.fromkeys(hosts))
    return variables
