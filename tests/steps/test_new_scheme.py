"""A scheme that is nothing but a class and a row of the table: a batch reads and writes there."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchyard.lifecycle import BatchStatus
from batchyard.locations.access import Access
from batchyard.locations.location import SCHEMES
from batchyard.storage.file import read_file
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    import pytest

SHELF: dict[str, bytes] = {}


@dataclass(frozen=True)
class ShelfKey:
    """What opens the shelf."""

    key: str = ""


@dataclass(frozen=True)
class OnShelf:
    """A place in this process's memory."""

    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def filename(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def expires_at(self) -> None:
        """It may be used for ever."""

    async def read(self, access: Access, *, limit_bytes: int) -> AsyncGenerator[bytes]:
        await access.credentials(ShelfKey)
        yield SHELF[self.text][: limit_bytes + 1]

    async def check_output(self) -> None:
        """There is always room."""

    async def probe(self, access: Access) -> None:
        """It refuses nobody."""

    async def write(self, path: Path, access: Access) -> None:
        await access.credentials(ShelfKey)
        SHELF[self.text] = b"".join([block async for block in read_file(path)])


async def test_a_batch_reads_and_writes_where_a_new_scheme_says(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, "shelf", OnShelf)
    SHELF["shelf://a/in.jsonl"] = json.dumps(chat_line("one")).encode()

    batch = await yard.run([], input="shelf://a/in.jsonl", output="shelf://a/out.jsonl")

    assert batch.status is BatchStatus.COMPLETED
    assert [
        json.loads(line)["custom_id"] for line in SHELF["shelf://a/out.jsonl"].splitlines()
    ] == ["one"]
    file = await yard.services.store.files.get(batch.input_file_id)
    assert file.filename == "in.jsonl"


async def test_a_new_scheme_gets_its_credentials_by_their_class(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who read and those who write ask whoever opened the services, and name the class."""
    asked: list[type] = []

    async def find(kind: type[Any]) -> Any:
        asked.append(kind)
        return kind("from a block")

    monkeypatch.setitem(SCHEMES, "shelf", OnShelf)
    SHELF["shelf://a/in.jsonl"] = json.dumps(chat_line("one")).encode()
    yard.services = replace(yard.services, access=Access(find))

    await yard.run([], input="shelf://a/in.jsonl", output="shelf://a/out.jsonl")

    assert asked == [ShelfKey, ShelfKey]
