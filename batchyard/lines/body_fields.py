"""Which fields the bodies of a file have, and which of them an engine ignores. Pure.

Fields are counted at the top of a body, and in ``response_format``, whose fields are read by the
engine only. In messages and tools a chat template may read any field, so none is ignored for
certain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from batchyard.lines.endpoints import takes_form

Routes: TypeAlias = Mapping[str, frozenset[str] | None]
"""The paths that take POST, each with the fields that its JSON body may have; None: any, as far as
is known. Those of ``response_format`` are ``response_format.NAME``, or ``response_format.*``."""
INNER: Final = "response_format"
"""Where fields are counted as well, as ``response_format.NAME``."""
_MOST_SHAPES: Final = 1000
_MOST_FIELDS: Final = 200
"""The most fields of one endpoint: a client may make up any number of names."""
_NAME_CHARS: Final = 40


class AllBut(frozenset[str]):
    """Any field but these."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


class FieldCounts:
    """How many of a file's lines have each field. ``null`` says nothing, and is not counted."""

    def __init__(self) -> None:
        self._shapes: Counter[tuple[str, ...]] = Counter()
        """The lines of each endpoint and set of fields: most files have one, so that a line costs
        one addition."""
        self._found: dict[str, Counter[str]] = {}

    def count(self, url: str, body: dict[str, Any]) -> None:
        """Count the fields of a line's body."""
        shape = (url, *[name for name, value in body.items() if value is not None])
        inner = body.get(INNER)
        if type(inner) is dict:
            shape += tuple(f"{INNER}.{name}" for name in inner)
        self._shapes[shape] += 1
        if len(self._shapes) > _MOST_SHAPES:
            self._sum_up()

    def by_endpoint(self) -> dict[str, dict[str, int]]:
        """The lines that have each field, by endpoint and field; of forms none."""
        self._sum_up()
        return {url: dict(found) for url, found in self._found.items()}

    def _sum_up(self) -> None:
        for (url, *names), lines in self._shapes.items():
            if takes_form(url):
                continue  # it has fields of ours, which the engine never sees
            found = self._found.setdefault(url, Counter())
            for name in map(_shown, names):
                if name in found or len(found) < _MOST_FIELDS:
                    found[name] += lines
        self._shapes.clear()


def ignored_fields(given: Mapping[str, Mapping[str, int]], routes: Routes) -> dict[str, int]:
    """The lines of each field that no engine with these routes reads, by its name.

    ``given``: as :meth:`FieldCounts.by_endpoint` has them.
    """
    found: Counter[str] = Counter()
    for url, fields in given.items():
        taken = routes.get(url)
        if taken is not None:
            found += Counter({name: n for name, n in fields.items() if not _is_taken(name, taken)})
    return dict(found)


def _is_taken(name: str, taken: frozenset[str]) -> bool:
    holder, dot, _ = name.partition(".")
    # Of an object that is ignored itself, or whose fields are not known, nothing is said.
    return name in taken or (bool(dot) and (holder not in taken or f"{holder}.*" in taken))


def _shown(name: str) -> str:
    """A client's own word, as a message may have it."""
    return re.sub(r"[^\w.-]", "?", name[:_NAME_CHARS]) or "?"
