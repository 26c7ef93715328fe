"""The archives of a release that a machine of ours may install, with their hashes.

pip's report names only the archive that it would install here: with that one alone, another Python
or an older glibc would be refused. So this asks the indexes that pip is configured for, by the
code that pip itself asks them with, which is not a public interface: requirements/lock.py is
the only user.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from pip._internal.cli.main_parser import parse_command
from pip._internal.commands import create_command
from pip._internal.index.collector import parse_links
from pip._vendor.packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pip._internal.index.package_finder import PackageFinder
    from pip._internal.models.link import Link
    from pip._vendor.packaging.tags import Tag

_OLDEST_PYTHON = 11
_MACHINES = ("x86_64", "aarch64")
_UNREADABLE = (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion)


def hashes_of(pins: Mapping[str, str]) -> dict[str, list[str]]:
    """``sha256:…`` of every wheel for Linux with glibc, of each name; of the sdist without one.

    Raises ``LookupError`` for a release without any.
    """
    name, arguments = parse_command(["install"])
    command = create_command(name)
    options, _ = command.parse_args(arguments)
    found = {}
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)  # noqa: SLF001 - see above
        for each, version in pins.items():
            links = list(_links(finder, each))
            wheels = {_sha256(link) for link in links if _is_wheel_of(link.filename, version)}
            sdists = {_sha256(link) for link in links if _is_sdist_of(link.filename, version)}
            if not (wheels or sdists):
                raise LookupError(f"no archive of {each} {version} at the indexes of pip")
            found[each] = sorted(wheels or sdists)
    return found


def _links(finder: PackageFinder, name: str) -> Iterator[Link]:
    """Everything that the indexes have of a project, whatever it is for, and local folders."""
    collector = finder._link_collector  # noqa: SLF001 - see above

    def of_page(page: Link) -> Iterable[Link]:
        response = collector.fetch_response(page)
        return list(parse_links(response)) if response else []

    sources = collector.collect_sources(canonicalize_name(name), candidates_from_page=of_page)
    for source in (*sources.index_urls, *sources.find_links):
        if source is not None:
            yield from source.page_candidates()
            yield from source.file_links()


def _is_wheel_of(filename: str, version: str) -> bool:
    try:
        _, found, _, tags = parse_wheel_filename(filename)
    except _UNREADABLE:
        return False
    return found == Version(version) and any(_is_for_us(tag) for tag in tags)


def _is_for_us(tag: Tag) -> bool:
    is_our_machine = tag.platform == "any" or (
        tag.platform.startswith(("manylinux", "linux")) and tag.platform.endswith(_MACHINES)
    )
    cpython = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    is_our_python = re.fullmatch(r"py3\d*", tag.interpreter) is not None or (
        cpython is not None
        and (int(cpython[1]) >= _OLDEST_PYTHON or tag.abi in {"abi3", "none"})
        and not tag.abi.endswith("t")
    )
    return is_our_machine and is_our_python


def _is_sdist_of(filename: str, version: str) -> bool:
    try:
        _, found = parse_sdist_filename(filename)
    except _UNREADABLE:
        return False
    return found == Version(version)


def _sha256(link: Link) -> str:
    if link.is_file and link.hash_name is None:
        with open(link.file_path, "rb") as file:  # noqa: PTH123 - a file in a folder of wheels
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    if link.hash_name != "sha256":
        raise LookupError(f"no SHA-256 of {link.filename} at the indexes of pip")
    return f"sha256:{link.hash}"
