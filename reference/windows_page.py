"""docs/reference/windows.md: where a process writes to two stores, from ``windows.toml``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final, NamedTuple

from reference.markdown import table

FILE: Final = Path(__file__).with_name("windows.toml")
_PAGE: Final = """\
# Windows

A process that writes to two stores one after the other may die in between, or the answer of the \
first may be lost. These are all such places: what [holds](../reliability.md#promises) whatever \
happens there, what may be lost or done twice, and what puts it right. The sweep is the clean-up \
that deletes objects without a row once they are a day old. A lease ends by itself when its \
process no longer renews it, and has a number, so that an earlier owner's writes are refused or \
ignored.

{windows}
## In the code

The functions in which both writes happen. A test compares them with the code.

{functions}"""


class Window(NamedTuple):
    """One row of the file."""

    name: str
    functions: list[str]
    """``module:function`` or ``module:Class.method``."""
    first: str
    second: str
    promise: str
    lost: str
    mended_by: str
    tests: list[str]
    """``path::function``, or the path of a file whose tests all show it."""


def windows() -> list[Window]:
    """The rows of the file, in their order."""
    return [Window(**row) for row in _file()["window"]]


def exceptions() -> dict[str, str]:
    """Functions that write to two stores and have no window, and why."""
    return {row["function"]: row["why"] for row in _file()["exception"]}


def page() -> str:
    """The whole page."""
    rows = windows()
    return _PAGE.format(
        windows=table(
            ("window", "first", "then", "what holds", "lost, or done twice", "mended by", "tests"),
            [
                (
                    f"`{each.name}`",
                    each.first,
                    each.second,
                    each.promise,
                    each.lost,
                    each.mended_by,
                    _links(each.tests),
                )
                for each in rows
            ],
        ),
        functions=table(
            ("window", "functions"),
            [
                (f"`{each.name}`", ", ".join(f"`{name}`" for name in each.functions))
                for each in rows
            ],
        ),
    )


def _file() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def _links(tests: list[str]) -> str:
    paths = dict.fromkeys(test.partition("::")[0] for test in tests)
    return ", ".join(f"[`{Path(path).name}`](../../{path})" for path in paths)
