"""What is changed, one mutation at a time, and which tests are to notice it: the lists, as values.

A list is a TOML file of tables ``[[mutation]]``:

``name``
    To find it by; unique among all lists.
``breaks``
    One sentence: what is wrong afterwards.
``file``
    Of the product, from the root of the repository.
``find``, ``put``
    The text that stands there exactly once, and what takes its place.
``tests``
    What pytest is given: files, or tests in them.
``on_postgres``
    Only PostgreSQL shows it: the tests run on that database, too.
``equivalent``
    Why nothing is wrong afterwards. It is not run and does not count.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

LISTS = Path(__file__).parent / "lists"


class BadMutation(Exception):
    """The mutation cannot be made, or says nothing of how it is noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One wrong change."""

    name: str
    breaks: str
    file: str
    find: str
    put: str
    tests: tuple[str, ...] = ()
    on_postgres: bool = False
    equivalent: str = ""

    def applied_to(self, text: str) -> str:
        """The file's text with the change. Raises :class:`BadMutation`."""
        times = text.count(self.find)
        if times != 1:
            raise BadMutation(f"{self.name}: its text stands {times} times in {self.file}")
        changed = text.replace(self.find, self.put)
        if changed == text:
            raise BadMutation(f"{self.name} changes nothing")
        return changed

    @property
    def test_files(self) -> set[str]:
        return {test.partition("::")[0] for test in self.tests}


def read_mutations(folder: Path = LISTS) -> list[Mutation]:
    """All of them, list by list. Raises :class:`BadMutation` for a name that is there twice."""
    found: list[Mutation] = []
    for path in sorted(folder.glob("*.toml")):
        entries = tomllib.loads(path.read_text())["mutation"]
        found += [Mutation(**{**each, "tests": tuple(each.get("tests", ()))}) for each in entries]
    names = [mutation.name for mutation in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise BadMutation(f"more than one mutation is called {', '.join(sorted(twice))}")
    return found
