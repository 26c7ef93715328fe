"""What is known of a kind of server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from batchyard.engine.routes import post_routes
from batchyard.lines.body_fields import AllBut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchyard.engine.kinds.gauges import Gauges
    from batchyard.lines.body_fields import Routes

MODELS: Final = "/v1/models"
OPENAPI: Final = "/openapi.json"
MOST_SEATS: Final = 100_000
"""A server that says more need not mean well: a window has twice as many requests in memory."""


class Pages(NamedTuple):
    """What a server answered, with status 200, about itself: JSON by path, as far as it is JSON."""

    by_path: Mapping[str, bytes]

    def json(self, path: str) -> Any:
        """The page as values; None: there is none, or it is no JSON."""
        try:
            return msgspec.json.decode(self.by_path.get(path, b""))
        except (ValueError, RecursionError):
            return None

    @property
    def owner(self) -> object:
        """What the first model of its list says of its owner."""
        return dig(self.json(MODELS), "data", 0, "owned_by")

    @property
    def title(self) -> object:
        """The title of its OpenAPI document."""
        return dig(self.json(OPENAPI), "info", "title")


def dig(value: Any, *keys: str | int) -> Any:
    """``value[key]`` for each key in turn; None where there is none."""
    for key in keys:
        try:
            value = value[key]
        except (TypeError, KeyError, IndexError):
            return None
    return value


def as_seats(value: object) -> int | None:
    """A number of requests that may be believed."""
    return value if type(value) is int and 0 < value <= MOST_SEATS else None


class Usage(StrEnum):
    """What ``usage`` of an answer counts."""

    TOKENS = "tokens"
    CHARACTERS = "characters"
    ONE_CHOICE = "tokens, but of several choices or prompts only those of one"
    NOT_KNOWN = "not known"


class Says(NamedTuple):
    """How an answer says something: its status, and words that its body has."""

    status: int
    words: str

    def is_in(self, status: int, body: bytes) -> bool:
        """Whether this answer says it."""
        return status == self.status and self.words.encode() in body


@dataclass(frozen=True, slots=True)
class Known:
    """What the page about servers says of a version."""

    version: str
    """The one that was looked at."""
    is_run: bool
    """Whether our tests run it; otherwise what is known comes from its source."""
    works: tuple[str, ...]
    """The endpoints that were seen to work or, if it was not run, that its source has."""
    at_once: str
    """How many requests it runs at once, in words."""


def _nothing(_: Pages) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server. What it does not say is as for a server that nobody knows."""

    name: str
    known: Known | None = None
    is_it: Callable[[Pages], bool] = field(default=lambda _: False)
    """Whether a server that answers so is of this kind."""
    seats_page: str | None = None
    """Where it says how many requests it runs at once."""
    seats: Callable[[Pages], int | None] = _nothing
    """How many it runs at once, by that page."""
    seats_are_known: bool = True
    """Whether it says it of itself. False: it is what most servers of this kind run, and on one
    that others may use it is where the search for the fastest number begins."""
    gauges: Gauges | None = None
    """What its ``/metrics`` count; None: nothing that we can go by."""
    without_v1: bool = False
    """Whether its endpoints usually lie at ``/embeddings``, not at ``/v1/embeddings``."""
    ignored: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Fields that it takes with a good status and does nothing with, by endpoint."""
    usage: Usage = Usage.TOKENS
    too_long: tuple[Says, ...] = ()
    busy: tuple[Says, ...] = ()
    unknown_model: tuple[Says, ...] = ()
    """Empty: it answers with the model that it has."""

    def routes(self, openapi: bytes) -> Routes | None:
        """What takes POST requests, by its own description, less what it ignores."""
        described = post_routes(openapi, without_v1=self.without_v1)
        if described is None or not self.ignored:
            return described
        return {path: self._less(path, fields) for path, fields in described.items()}

    def _less(self, path: str, fields: frozenset[str] | None) -> frozenset[str] | None:
        ignored = self.ignored.get(path)
        if not ignored:
            return fields
        return AllBut(ignored) if fields is None else fields - ignored

    def may_lack(self, model: str, status: int, body: bytes) -> bool:
        """Whether this answer to a request may say that the server does not have the model.

        A server without the request's endpoint answers 404 too, and does not name the model.
        """
        names_it = model.encode() in body
        said_otherwise = any(each.is_in(status, body) for each in self.unknown_model)
        return names_it and (status == 404 or said_otherwise)
