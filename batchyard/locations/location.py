"""What a user may write for IN and OUT: a path, an object in a bucket or an http(s) URL.

::

    source = parse_location("s3://in/batch.jsonl")
    async for block in read_location(source, limit_bytes=200 * MIB, access=access): ...
    await write_location(parse_location("out.jsonl"), results, access)
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from batchyard.errors import LocationRefused, ObjectTooLarge
from batchyard.locations.bucket_object import BucketObject
from batchyard.locations.hub_file import SCHEME as HUB
from batchyard.locations.hub_file import HubFile
from batchyard.locations.local_file import LocalFile
from batchyard.locations.parted_url import PartedUrl
from batchyard.locations.several import Several
from batchyard.locations.web_url import WebUrl
from batchyard.storage.buckets import BUCKETS
from batchyard.storage.compression import unpacked

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from batchyard.locations.access import Access, Location

SCHEMES: Final[dict[str, Callable[[str], Location]]] = {
    **dict.fromkeys(BUCKETS, BucketObject.parse),
    HUB: HubFile.parse,
    "http": WebUrl.parse,
    "https": WebUrl.parse,
    # What the API makes of an object; users do not write them.
    "multipart+http": PartedUrl.parse,
    "multipart+https": PartedUrl.parse,
    # What commands make of several places.
    "several": lambda text: Several.parse(text, parse_location),
}
_IN_BUCKETS: Final = ", ".join(
    (*(f"{scheme}://bucket/key" for scheme in BUCKETS), f"{HUB}://datasets/OWNER/NAME/PATH")
)
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def parse_location(text: str) -> Location:
    """Say what kind of location ``text`` names, without checking whether it exists.

    Raises :class:`~batchyard.errors.LocationRefused`.
    """
    if not text or "\0" in text:
        raise LocationRefused(f"give a path, {_IN_BUCKETS}, or an http(s) URL")
    named = _SCHEME.match(text)
    if named is None:
        return LocalFile(Path(text))
    scheme = named[1].lower()
    if scheme not in SCHEMES:
        raise LocationRefused(
            f"{scheme}:// is not supported: use a plain path, {_IN_BUCKETS}, or http(s)://"
        )
    return SCHEMES[scheme](text)


async def read_location(
    location: Location, *, limit_bytes: int, access: Access
) -> AsyncGenerator[bytes]:
    """Stream the whole content in blocks of up to 1 MiB, decompressed if it is gzip or zstd.

    Raises :class:`~batchyard.errors.ObjectTooLarge` over ``limit_bytes``, and what else
    :mod:`batchyard.errors` lists for storage; a stream that ends without an error is complete.
    """
    async with (
        contextlib.aclosing(location.read(access, limit_bytes=limit_bytes)) as stream,
        contextlib.aclosing(unpacked(stream, str(location), limit_bytes=limit_bytes)) as content,
    ):
        received_bytes = 0
        async for block in content:
            received_bytes += len(block)
            if received_bytes > limit_bytes:
                raise ObjectTooLarge(f"{location} is larger than {limit_bytes} bytes")
            yield block


async def write_location(location: Location, path: Path, access: Access) -> None:
    """Copy the local file ``path`` there. What was there before stays until the copy is whole."""
    await location.check_output()
    await location.write(path, access)
