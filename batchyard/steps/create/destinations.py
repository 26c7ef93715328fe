"""Where the results of a batch go: places that can work, and that replace nothing that counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.datasets.files import fits, is_table, split_pattern
from batchyard.errors import RequestRefused
from batchyard.locations.bucket_object import BucketObject
from batchyard.locations.local_file import LocalFile
from batchyard.locations.several import Several, places_in
from batchyard.processes.threads import in_thread
from batchyard.store import UrlFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.locations.access import Location
    from batchyard.settings import Settings


async def check_destinations(
    output: Location | None,
    error: Location | None,
    *,
    taken: Mapping[str, Location | None],
    dataset: Location | None = None,
) -> tuple[Location | None, Location | None]:
    """Where results go, each as a location that means the same to whichever process uses it.

    ``taken`` are the places of what must not be replaced, each under its name in a refusal.
    ``dataset`` is what the requests are made from; no result may be one of its files.
    Raises :class:`~batchyard.errors.RequestRefused`, and
    :class:`~batchyard.errors.StorageError` for a location that can never work.
    """
    wanted = {"output": output, "error": error}
    if error is not None and is_table(error):
        raise RequestRefused(
            f"{error}: failed lines are JSON lines, and rows of the output where that is Parquet. "
            "Give a place that does not end in .parquet.",
            param="error",
            code="invalid_value",
        )
    for destination in wanted.values():
        if destination is not None:
            await destination.check_output()
    await in_thread(_check_distinct, wanted, taken)
    await in_thread(_check_outside, wanted, dataset)
    return absolute(output), absolute(error)


def url_facts(output: Location | None, error: Location | None) -> dict[str, UrlFacts]:
    """What the destinations say of themselves, for those who see the batch."""
    return {
        kind: UrlFacts(expires_at=place.expires_at)
        for kind, place in (("output", output), ("error", error))
        if place is not None and place.expires_at is not None
    }


def check_paths(settings: Settings, *, output: Location | None, errors: Location | None) -> None:
    """Whether a batch that is handed over may write to these places.

    To be asked by those who do not run it themselves. Raises
    :class:`~batchyard.errors.RequestRefused` for a path where it may be run on another machine.
    """
    if settings.knows_its_machine:
        return
    for name, location in (("output", output), ("errors", errors)):
        if isinstance(location, LocalFile):
            raise RequestRefused(
                f"{name} is the path {location}, and the batch may be run on another machine than "
                f"{settings.this_machine}: give s3://bucket/key (or az://, gs://, hf://) or a URL, "
                "or leave it out and fetch the results with `batchyard results`. If a path means "
                "the same on every machine, set BATCHYARD_SHARED_PATHS=true.",
                param=name,
                code="invalid_value",
            )


def _check_distinct(
    wanted: Mapping[str, Location | None], taken: Mapping[str, Location | None]
) -> None:
    """Results must replace nothing that counts, nor the error file the results."""
    names = {
        _resolved(place): name
        for name, places in taken.items()
        if places is not None
        for place in places_in(places)
    }
    for name, location in wanted.items():
        if location is None:
            continue
        place = _resolved(location)
        if place in names:
            raise RequestRefused(
                f"{names[place]} and {name} are the same place, {location}: give another one.",
                param=name,
                code="invalid_value",
            )
        names[place] = name


def _check_outside(wanted: Mapping[str, Location | None], dataset: Location | None) -> None:
    """Results must neither replace a file of the dataset nor be read as one by the next batch."""
    for name, location in wanted.items():
        if location is None or dataset is None:
            continue
        for part in places_in(dataset):
            if _is_in(location, part):
                raise RequestRefused(
                    f"The {name} {location} is in the dataset {part}: it could replace a file of "
                    "the dataset, and the next batch would read it as one. Choose a place outside "
                    "of it.",
                    param=name,
                    code="invalid_value",
                )


def _is_in(place: Location, dataset: Location) -> bool:
    """Whether the place is below the dataset's folder or prefix, or its pattern matches it."""
    if isinstance(place, BucketObject) and isinstance(dataset, BucketObject):
        if (place.scheme, place.bucket) != (dataset.scheme, dataset.bucket):
            return False
        is_below = dataset.is_folder and place.key.startswith(dataset.key)
        return is_below or fits(place.key, dataset.key)
    if isinstance(place, LocalFile) and isinstance(dataset, LocalFile):
        # Results are written through a link, and the link is itself a file of its folder.
        ways = (place.path.resolve(), place.path.parent.resolve() / place.path.name)
        return any(_is_in_local(path, dataset.path.absolute()) for path in ways)
    return False


def _is_in_local(path: Path, dataset: Path) -> bool:
    if path.is_relative_to(dataset.resolve()):
        return True
    above, pattern = split_pattern(str(dataset))
    folder = Path(above).resolve()
    return path.is_relative_to(folder) and fits(path.relative_to(folder).as_posix(), pattern)


def _resolved(location: Location) -> Location:
    """The same for every path that leads to one file."""
    return LocalFile(location.path.resolve()) if isinstance(location, LocalFile) else location


def absolute(location: Location | None) -> Location | None:
    """A path that means the same to whichever process comes to use it."""
    if isinstance(location, Several):
        return Several(tuple(filter(None, map(absolute, location.places))))
    return location.absolute() if isinstance(location, LocalFile) else location
