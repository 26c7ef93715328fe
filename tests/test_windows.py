"""Each place where a process writes to two stores is in ``reference/windows.toml``."""

from __future__ import annotations

import ast
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reference.windows_page import exceptions, windows
from tests.store_writes import STORES, Code

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
FILE = "reference/windows.toml"
MADE_UP = """
class Writer:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._log = Log(services)

    async def close(self) -> None:
        await self._log.note("closed")
        await self._services.storage.delete("key")

    async def look(self) -> None:
        await self._log.note("seen")
        await self._log.note("seen again")


class Log:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def note(self, text: str) -> None:
        await self._services.store.files.create(text)


async def direct(services: Services) -> None:
    stored = await services.storage.put("key", b"")
    await services.store.files.create(stored)


async def through_others(services: Services) -> None:
    files = services.store.files
    await _put(services)
    await patiently(partial(files.create, "key"))


async def only_through_a_window(services: Services) -> None:
    await direct(services)


async def before_a_window(services: Services) -> None:
    emit_event("begun")
    await direct(services)


async def twice_the_same(services: Services) -> None:
    await services.store.files.create("key")
    await services.store.files.rename("key")


async def reads(services: Services) -> None:
    await services.store.files.get("key")
    await services.storage.put("key", b"")


async def _put(services: Services) -> None:
    await services.storage.put("key", b"")
"""
STORE = """
class Store:
    files: Files


class Files:
    @writes
    async def create(self, connection, text): ...

    async def rename(self, text):
        await self._write(text)

    @writes
    async def _write(self, connection, text): ...

    @reads
    async def get(self, connection, text): ...
"""


@pytest.fixture(scope="module")
def code() -> Iterator[Code]:
    # The collector would look at all of the syntax trees again and again: twice the time.
    gc.disable()
    try:
        yield Code.of(ROOT, "batchyard", "flows", "tasks", "commands")
    finally:
        gc.enable()


def test_each_function_that_writes_to_two_stores_is_in_the_file(code: Code) -> None:
    named = {name for each in windows() for name in each.functions} | exceptions().keys()
    new = {name: sorted(kinds) for name, kinds in code.windows().items() if name not in named}
    assert not new, f"What if the process dies in between? Add a row to {FILE}, or name it in one."


def test_each_function_in_the_file_is_in_the_code(code: Code) -> None:
    named = {name for each in windows() for name in each.functions}
    assert sorted(named - code.functions.keys()) == []


def test_each_exception_is_needed(code: Code) -> None:
    assert sorted(exceptions().keys() - code.windows().keys()) == []


def test_each_test_in_the_file_is_there() -> None:
    missing = []
    for path, _, name in {each.partition("::") for row in windows() for each in row.tests}:
        source = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
        if not source or not re.search(rf"def {name}\(" if name else "def test_", source):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_names_and_stores_are_of_the_known_form() -> None:
    rows = windows()
    assert len({each.name for each in rows}) == len(rows)
    assert [each.name for each in rows if not re.fullmatch(r"[a-z]+(-[a-z]+)*", each.name)] == []
    stores = set(STORES.values())
    assert {store for each in rows for store in (each.first, each.second)} <= stores
    assert [each.name for each in rows if each.first == each.second] == []


def test_windows_are_found_in_made_up_code() -> None:
    code = Code({"store": ast.parse(STORE), "made_up": ast.parse(MADE_UP)})
    assert code.windows() == {
        "made_up:Writer.close": {"database", "objects"},
        "made_up:direct": {"database", "objects"},
        "made_up:through_others": {"database", "objects"},
        "made_up:before_a_window": {"database", "objects", "prefect"},
    }
