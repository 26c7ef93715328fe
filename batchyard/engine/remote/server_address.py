"""Where a server has its endpoints, by the URL that an operator gave. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from batchyard.errors import SettingsError
from batchyard.lines.endpoints import ENDPOINTS

MODELS: Final = "/v1/models"
_V1: Final = "/v1"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One way to make the URL of a request: ``base``, and the path that the request names.

    ``without_v1``: the base takes the place of the ``/v1`` that the path begins with. OpenAI's SDKs
    append ``/chat/completions`` to any base; other clients append ``/v1/chat/completions``.
    """

    base: str
    socket_path: str | None = None
    without_v1: bool = False

    def url(self, path: str) -> str:
        """The URL of a path such as ``/v1/chat/completions``."""
        return self.base + self.below_base(path)

    def below_base(self, path: str) -> str:
        """The path as the server knows it."""
        is_shorter = self.without_v1 and path.startswith(f"{_V1}/")
        return path.removeprefix(_V1) if is_shorter else path

    @property
    def shown(self) -> str:
        """For messages: without secrets, as the URL of a server has none."""
        return self.socket_path or self.base


def possible_addresses(base_url: str) -> tuple[ServerAddress, ...]:
    """What a base URL may mean, the most usual first: one that ends in ``/v1`` means one thing.

    Raises :class:`~batchyard.errors.SettingsError` for what is no base URL.
    """
    parts = _parts(base_url.strip())
    if parts is not None and parts.scheme == "unix" and parts.path and not parts.netloc:
        base, socket_path = "http://engine", parts.path
    elif parts is not None and parts.scheme in {"http", "https"} and parts.hostname:
        path = parts.path.rstrip("/")
        base, socket_path = f"{parts.scheme}://{parts.netloc}{path}", None
        shorter = without_endpoint(base)
        if shorter is not None and _is_surely_an_endpoint(base, shorter):
            raise SettingsError(
                f"the engine's base_url ends in an endpoint: use {shorter}, to which the endpoint "
                "of each line is appended"
            )
    else:
        raise SettingsError(
            "the engine's base_url must be http://host, https://host or unix:///path.sock, with a "
            "port that exists, and without a space, a user name, a query (?) or a fragment (#) in "
            "it"
        )
    if urlsplit(base).path.endswith(_V1):
        return (ServerAddress(base.removesuffix(_V1), socket_path),)
    return (
        ServerAddress(base, socket_path),
        ServerAddress(base, socket_path, without_v1=True),
    )


def _parts(url: str) -> SplitResult | None:
    """Those of a URL that has nothing that a base may not have; None: it has."""
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:
        return None
    # To a query or a fragment no path can be appended.
    is_plain = not {"?", "#"} & set(url) and _UNUSABLE.search(parts.netloc) is None
    return parts if is_plain and has_port else None


def without_endpoint(base: str) -> str | None:
    """The base of a URL that ends like an endpoint; None if it does not."""
    path = urlsplit(base).path
    tail = next((each for each in _TAILS if path.endswith(each)), None)
    return None if tail is None else base.removesuffix(tail)


def _is_surely_an_endpoint(url: str, base: str) -> bool:
    """A gateway may have a whole server below ``/rerank``, and hardly below ``/v1/rerank``."""
    tail = url.removeprefix(base)
    return tail.count("/") > 1 or _VERSION.search(urlsplit(base).path) is not None


_TAILS: Final = sorted({path.removeprefix(_V1) for path in (*ENDPOINTS, MODELS)}, key=len)[::-1]
"""The longest first: ``/v2/rerank`` ends in ``/rerank`` too."""
_UNUSABLE: Final = re.compile(r"[\s@]")
_VERSION: Final = re.compile(r"/v[0-9]+$", re.ASCII)
