"""Which files a dataset consists of: a file, a folder, a pattern, or what ``datasets`` saved."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from batchyard.errors import LocationRefused
from batchyard.storage.compression import SUFFIXES, packed_suffix, unpacked_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from batchyard.locations.access import Location

TABLE_SUFFIX: Final = ".parquet"
_LINES: Final = (".jsonl", ".ndjson", ".json")
_KINDS: Final = (
    (TABLE_SUFFIX,),
    (".arrow",),
    (*_LINES, *(lines + packed for lines in _LINES for packed in SUFFIXES)),
)
"""Of a folder with several, the first kind is the data."""
_NOT_DATA: Final = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
_PART_OF_SPLIT: Final = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?")
_PATTERN: Final = re.compile(r"[*?\[]")
_ANY_DEPTH: Final = "**"
_STARS: Final = re.compile(r"\*+")


def is_table(place: Location) -> bool:
    """Whether its name says that it is a Parquet file."""
    return place.filename.lower().endswith(TABLE_SUFFIX)


def local_files(path: Path) -> tuple[Path, ...]:
    """The files of the dataset at ``path``, in their order.

    Raises :class:`~batchyard.errors.LocationRefused` where they are not clear, and ``OSError``.
    """
    if path.is_dir():
        return _of_folder(path)
    if path.exists() or not is_pattern(str(path)):
        return (path,)
    # The user wrote out the folders above the pattern, so their names may begin with a dot.
    folder = Path(split_pattern(str(path))[0])
    names = [each.relative_to(folder).as_posix() for each in _matches(path)]
    return tuple(folder / each for each in data_files(names, str(path)))


def object_files(keys: Sequence[str], wanted: str, where: str) -> list[str]:
    """The keys of a dataset's files: ``wanted`` is a key, a prefix with its slash, or a pattern.

    ``keys`` are all keys of the bucket that begin with :func:`literal_of` ``wanted``. An object
    with exactly this key is used before the pattern is tried, as for local files. Raises
    :class:`~batchyard.errors.LocationRefused` where the files are not clear.
    """
    folder, pattern = split_pattern(wanted)
    if (not wanted or wanted.endswith("/")) and any(key.startswith(wanted) for key in keys):
        folder, pattern = wanted, _ANY_DEPTH
    elif wanted in keys:
        return [wanted]
    names = (key.removeprefix(folder) for key in keys)
    found = data_files((name for name in names if fits(name, pattern)), where)
    return [folder + name for name in found]


def is_pattern(text: str) -> bool:
    """Whether it may name several files."""
    return _PATTERN.search(text) is not None


def literal_of(pattern: str) -> str:
    """The beginning that all names have which the pattern matches."""
    return _PATTERN.split(pattern, maxsplit=1)[0]


def split_pattern(pattern: str) -> tuple[str, str]:
    """The folder that is written out, with its slash or empty, and the pattern below it."""
    above, slash, _ = literal_of(pattern).rpartition("/")
    folder = above + slash
    return folder, pattern.removeprefix(folder)


def fits(name: str, pattern: str) -> bool:
    """``*`` matches within a folder, ``**`` over any number of folders: as local files do."""
    parts = name.split("/")
    # How many parts of the name the parts of the pattern so far may stand for.
    matched = {0}
    for each in pattern.split("/"):
        if each == _ANY_DEPTH:
            matched = {end for start in matched for end in range(start, len(parts) + 1)}
        else:
            matched = {n + 1 for n in matched if n < len(parts) and fnmatchcase(parts[n], each)}
    return len(parts) in matched


def has_local_files(path: Path) -> bool:
    """Whether there is anything at the path, or of the pattern. Raises ``OSError``."""
    return path.exists() or (is_pattern(str(path)) and any(_matches(path)))


def _matches(pattern: Path) -> Iterator[Path]:
    folder, below = split_pattern(str(pattern))
    # Before Python 3.13, `glob` raises for two stars within a name, and names only folders where
    # the pattern ends with `**`.
    parts = [each if each == _ANY_DEPTH else _STARS.sub("*", each) for each in below.split("/")]
    if parts[-1] == _ANY_DEPTH:
        parts.append("*")
    return (each for each in Path(folder).glob("/".join(parts)) if each.is_file())


def data_files(names: Iterable[str], where: str) -> list[str]:
    """Those of a folder's files that are its data, in their order.

    Raises :class:`~batchyard.errors.LocationRefused` where there are none, and for several splits.
    """
    visible = [each for each in names if not _is_hidden(each)]
    for kind in _KINDS:
        found = sorted(each for each in visible if each.lower().endswith(kind))
        if not found:
            continue
        splits = sorted({split for each in found if (split := _split_of(each))})
        if len(splits) > 1:
            raise LocationRefused(
                f"{where} has the splits {', '.join(splits)}: name the files of one of them, for "
                f"example {splits[0]}-*{_suffix(found[0])}"
            )
        return found
    raise LocationRefused(f"{where} has no Parquet, Arrow or JSON lines files")


def _of_folder(folder: Path) -> tuple[Path, ...]:
    if (splits := folder / "dataset_dict.json").is_file():
        names = [str(each) for each in _read_object(splits).get("splits", ())]
        if len(names) != 1:
            raise LocationRefused(
                f"{folder} has the splits {', '.join(names)}: name the folder of one of them"
            )
        return _of_folder(folder / PurePosixPath(names[0]).name)
    if (state := folder / "state.json").is_file():
        # Beside its data the folder may have what `datasets` has cached.
        names = [_filename_of(each) for each in _read_object(state).get("_data_files", ())]
        if not any(names):
            raise LocationRefused(f"{state} names no files: save the dataset again")
        return tuple(folder / name for name in names if name)
    names = [each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()]
    return tuple(folder / each for each in data_files(names, str(folder)))


def _read_object(path: Path) -> dict[str, list[object]]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LocationRefused(f"{path} is not what datasets saves: it is no JSON object")
    return found


def _filename_of(part: object) -> str:
    return PurePosixPath(str(part.get("filename", ""))).name if isinstance(part, dict) else ""


def _is_hidden(name: str) -> bool:
    path = PurePosixPath(name)
    return path.name in _NOT_DATA or any(each.startswith((".", "_")) for each in path.parts)


def _split_of(name: str) -> str | None:
    found = _PART_OF_SPLIT.fullmatch(PurePosixPath(unpacked_name(name)).stem)
    return found[1] if found else None


def _suffix(name: str) -> str:
    return PurePosixPath(unpacked_name(name)).suffix + packed_suffix(name)
