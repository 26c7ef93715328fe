"""What is changed, one mutation at a time, and which tests notice it: the lists, as values.

A list is a TOML file of tables ``[[mutation]]``:

``in``
    The function, method, class or constant that is changed: ``package.module:Class.method``.
``replace``, ``with``
    Python that occurs exactly once in it, and what takes its place: an expression, or one or more
    statements. They are compared as syntax trees, so that line breaks, quotes, brackets, comments
    and the place in the file do not matter. An empty ``with`` deletes statements.
``breaks``
    One sentence: what is wrong afterwards.
``tests``
    What pytest is given: files, or tests in them.
``on_postgres``
    Only PostgreSQL shows it: the tests run on that database, too.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTS = Path(__file__).parent / "lists"
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class BadMutation(Exception):
    """The mutation cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One wrong change. ``place`` is the key ``in`` of the list, ``put`` is ``with``."""

    theme: str
    """The name of its list."""
    place: str
    replace: str
    put: str
    breaks: str
    tests: tuple[str, ...]
    on_postgres: bool = False

    def file_in(self, root: Path) -> Path:
        """The file of its module. Raises :class:`BadMutation` where there is none."""
        module = root.joinpath(*self.place.partition(":")[0].split("."))
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if path.is_file():
                return path
        raise BadMutation(f"{self.place}: there is no such module")

    def applied_to(self, source: str) -> str:
        """The module's text with the change. Raises :class:`BadMutation`."""
        tree = ast.parse(source)
        old, new = ast.parse(self.replace).body, ast.parse(self.put).body
        if _text(old) == _text(new):
            raise BadMutation(f"{self.place}: {self.replace!r} is replaced with itself")
        scopes = list(_named(tree.body, self.place.partition(":")[2].split(".")))
        if not scopes:
            raise BadMutation(f"{self.place}: nothing has that name")
        change = _Replacing(old, new)
        for scope in scopes:
            change.visit(scope)
        if change.times != 1:
            raise BadMutation(f"{self.place}: {self.replace!r} occurs {change.times} times")
        return ast.unparse(tree)

    @property
    def test_files(self) -> set[str]:
        return {test.partition("::")[0] for test in self.tests}


def read_mutations(folder: Path = LISTS) -> list[Mutation]:
    """All of them, list by list."""
    found: list[Mutation] = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutation"]:
            place, put, tests = entry.pop("in"), entry.pop("with"), tuple(entry.pop("tests"))
            found.append(Mutation(theme=path.stem, place=place, put=put, tests=tests, **entry))
    return found


def _named(body: list[ast.stmt], names: list[str]) -> Iterator[ast.stmt]:
    """What has the dotted name: several where one name is defined again, as a setter is."""
    for statement in body:
        if isinstance(statement, _SCOPES):
            if statement.name == names[0]:
                yield from _named(statement.body, names[1:]) if names[1:] else [statement]
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if [ast.unparse(target) for target in targets] == names:
                yield statement
        else:
            for inner in _bodies(statement):
                yield from _named(inner, names)


class _Replacing(ast.NodeTransformer):
    """Puts ``new`` wherever ``old`` occurs, and counts how often that is."""

    def __init__(self, old: list[ast.stmt], new: list[ast.stmt]) -> None:
        self.times = 0
        self._wanted, self._length, self._new = _text(old), len(old), new
        self._is_expression = _is_expression(old) and _is_expression(new)

    def visit(self, node: ast.AST) -> ast.AST:
        if self._is_expression:
            if isinstance(node, ast.expr) and ast.unparse(node) == self._wanted:
                self.times += 1
                return self._new[0].value
            return self.generic_visit(node)
        # What is inside comes first: what is put may contain what was there.
        self.generic_visit(node)
        for body in _bodies(node):
            self._put_into(body)
        return node

    def _put_into(self, body: list[ast.stmt]) -> None:
        for start in range(len(body) - self._length, -1, -1):
            run = slice(start, start + self._length)
            if _text(body[run]) == self._wanted:
                self.times += 1
                body[run] = self._new
        if not body:
            body.append(ast.Pass())


def _bodies(node: ast.AST) -> list[list[ast.stmt]]:
    lists = [value for _, value in ast.iter_fields(node) if isinstance(value, list)]
    return [value for value in lists if value and isinstance(value[0], ast.stmt)]


def _is_expression(statements: list[ast.stmt]) -> bool:
    return len(statements) == 1 and isinstance(statements[0], ast.Expr)


def _text(statements: list[ast.stmt]) -> str:
    if _is_expression(statements):
        return ast.unparse(statements[0].value)
    return "\n".join(ast.unparse(statement) for statement in statements)
