"""The proxies that a shell names for the internet: who is asked through them, and who never is.

Companies set ``http_proxy`` and its like on their machines. A proxy cannot reach what listens on
this machine itself. Prefect's client and boto3 read the variables themselves; our own calls to
users' URLs, engines and webhooks read none.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined] # not in typeshed

from batchyard.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HERE: Final = ("127.0.0.1", "localhost", "::1")
_NOT_ASKED: Final = ("no_proxy", "NO_PROXY")
"""Some programs read only one of them, and Python the first."""
_SERVERS: Final = ("PREFECT_API_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
"""Servers that may be on this machine under another address than the usual ones."""
_VARIABLES: Final = ("http_proxy", "https_proxy", "all_proxy")
_HTTP: Final = ("http", "https")
_USABLE: Final = (*_HTTP, "socks5", "socks5h")
"""Schemes of proxies that Prefect's client understands."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and the variable that names it."""

    variable: str
    url: str = field(repr=False)
    """The proxy's URL, which may have a password."""

    @property
    def scheme(self) -> str:
        """The scheme of the URL, in lower case."""
        return urlsplit(self.url).scheme.lower()

    @property
    def is_http(self) -> bool:
        """Whether aiohttp can use it, which knows no SOCKS."""
        return self.scheme in _HTTP


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep calls to this machine from a proxy, with the hosts that they had."""
    hosts = [_host(environment.get(name, "")) for name in _SERVERS]
    here = (*_HERE, *(host for host in hosts if _is_here(host)))
    variables = {}
    for name, other in zip(_NOT_ASKED, reversed(_NOT_ASKED), strict=True):
        named = environment.get(name, environment.get(other, ""))
        kept = [host.strip() for host in named.split(",") if host.strip()]
        # Beside other hosts, Python would not understand it.
        kept = kept if "*" in kept else [*kept, *here]
        variables[name] = ",".join(dict.fromkeys(kept))
    return variables


def check_proxies(environment: Mapping[str, str]) -> None:
    """Raise :class:`~batchyard.errors.SettingsError` for a proxy that Prefect's client refuses.

    It does so at its first call, also of a server that it would not ask through the proxy.
    """
    if "*" in _unasked(environment).split(","):
        return
    for proxy in _proxies(environment):
        advice = "or set NO_PROXY=* to use no proxy for this command."
        if not _is_url(proxy.url):
            raise SettingsError(f"{proxy.variable} is not the URL of a proxy: correct it, {advice}")
        if proxy.scheme not in _USABLE:
            raise SettingsError(
                f"{proxy.variable} names a proxy with {proxy.scheme}://, which Prefect's client "
                f"does not know: write http://, https:// or socks5://, {advice}"
            )


def proxy_for(url: str, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy through which Prefect's client asks this URL; None: it asks directly."""
    parts = urlsplit(url)
    if _is_here(_host(url)) or proxy_bypass_environment(
        parts.netloc.rpartition("@")[2], {"no": _unasked(environment)}
    ):
        return None
    wanted = (f"{parts.scheme}_proxy", "all_proxy")
    found = {proxy.variable.lower(): proxy for proxy in _proxies(environment)}
    return next((found[name] for name in wanted if name in found), None)


def proxy_words(proxy: Proxy | None) -> str:
    """For messages, behind "does not answer"; never the proxy's own address."""
    return "" if proxy is None else f" through the proxy of {proxy.variable}"


def _proxies(environment: Mapping[str, str]) -> Iterator[Proxy]:
    for name in _VARIABLES:
        variable = name if name in environment else name.upper()
        if value := environment.get(variable):
            yield Proxy(variable, value if "://" in value else f"http://{value}")


def _unasked(environment: Mapping[str, str]) -> str:
    named = next((environment[name] for name in _NOT_ASKED if name in environment), "")
    return ",".join(host.strip() for host in named.split(","))


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _host(url: str) -> str:
    with contextlib.suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""


def _is_here(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host in _HERE
    return address.is_loopback or address.is_unspecified
