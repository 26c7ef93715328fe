"""Several places as a user's IN: their lines, one place after the other, are one input."""

from __future__ import annotations

import codecs
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import quote, unquote

from batchyard.errors import LocationRefused
from batchyard.storage.compression import unpacked

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
    from pathlib import Path

    from batchyard.locations.access import Access, Location

MOST_PLACES: Final = 1000
_SCHEME: Final = "several://"


@dataclass(frozen=True, slots=True)
class Several:
    """A :class:`~batchyard.locations.access.Location`: two places or more, in their order."""

    places: tuple[Location, ...]

    def __post_init__(self) -> None:
        if not 1 < len(self.places) <= MOST_PLACES:
            raise LocationRefused(f"give 2 to {MOST_PLACES:,} places")

    @classmethod
    def parse(cls, text: str, parse_location: Callable[[str], Location]) -> Self:
        """What :attr:`text` is; raises LocationRefused for anything else."""
        try:
            texts = json.loads(unquote(text.removeprefix(_SCHEME)))
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise LocationRefused(f"{_SCHEME} comes without its places")
        return cls(tuple(map(parse_location, texts)))

    def __str__(self) -> str:
        return ", ".join(map(str, self.places))

    @property
    def text(self) -> str:
        return _SCHEME + quote(json.dumps([place.text for place in self.places]))

    @property
    def filename(self) -> str:
        return ""

    @property
    def expires_at(self) -> int | None:
        known = [place.expires_at for place in self.places if place.expires_at is not None]
        return min(known, default=None)

    async def read(self, access: Access, *, limit_bytes: int) -> AsyncGenerator[bytes]:
        for place in self.places:
            async with (
                contextlib.aclosing(place.read(access, limit_bytes=limit_bytes)) as blocks,
                contextlib.aclosing(unpacked(blocks, str(place), limit_bytes=limit_bytes)) as lines,
            ):
                async for block, _ in whole_lines(lines):
                    yield block

    async def check_output(self) -> None:
        raise LocationRefused("several places cannot be written to: give one")

    async def probe(self, _: Access) -> None:
        await self.check_output()

    async def write(self, path: Path, _: Access) -> None:  # noqa: ARG002 - nothing is written
        await self.check_output()


async def whole_lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, int]]:
    """The blocks with how many lines end in each, without a BOM, and ending with a line end."""
    last = b"\n"
    async for block in _without_bom(blocks):
        yield block, block.count(b"\n")
        last = block
    if not last.endswith(b"\n"):
        yield b"\n", 1


async def _without_bom(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, none of them empty."""
    head: bytes | None = b""
    async for block in blocks:
        if head is None:
            yield block
            continue
        head += block
        if len(head) >= len(codecs.BOM_UTF8):
            if rest := head.removeprefix(codecs.BOM_UTF8):
                yield rest
            head = None
    if head:
        yield head


def one_of(places: Sequence[Location]) -> Location:
    """The place, or all of them as one."""
    return places[0] if len(places) == 1 else Several(tuple(places))


def places_in(place: Location) -> Sequence[Location]:
    """The reverse: all places that it is."""
    return place.places if isinstance(place, Several) else (place,)
