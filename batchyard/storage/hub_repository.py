"""One dataset of a Hugging Face hub, as files under the paths of its repository.

By huggingface_hub, which is an extra and is loaded when the first dataset is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, unquote

from batchyard import __version__
from batchyard.errors import LocationRefused, ObjectNotFound, StorageUnavailable
from batchyard.processes.threads import from_thread, in_executor
from batchyard.storage.backoff import Backoff
from batchyard.storage.blocks import BLOCK_BYTES
from batchyard.storage.file import os_errors_as_ours
from batchyard.storage.hub_client import (
    HubSilent,
    check_installed,
    hub_errors_as_ours,
    prepare,
    silence_as_ours,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator
    from pathlib import Path

T = TypeVar("T")

_ADDRESS: Final = re.compile(
    r"(?i:hf)://datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert/[\w.-]+|pr/\d+)|[^/]+))?(?:/(.*))?",
    re.ASCII | re.DOTALL,
)
_SYNTAX: Final = "write hf://datasets/OWNER/NAME[@REVISION][/PATH]"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_CONCURRENT_CALLS: Final = 4
_DEFAULT: Final = "main"


def hub_address(text: str) -> tuple[str, str]:
    """The dataset and the path in it, such as ``("datasets/me/mine@v1", "data/a.parquet")``.

    The forms are those of huggingface_hub; ``@~parquet``, which DuckDB and Polars have, is
    ``@refs/convert/parquet``. Raises :class:`~batchyard.errors.LocationRefused` for all others.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise LocationRefused(f"{text} names no dataset: {_SYNTAX}")
    repository, revision, path = found[1], unquote(found[2] or _DEFAULT), found[3] or ""
    if revision.startswith("~"):
        revision = f"refs/convert/{revision[1:]}"
    if not {"", ".", ".."}.isdisjoint(path.removesuffix("/").split("/")) and path:
        raise LocationRefused(f"{text}: a path has no empty part, '.' or '..'")
    at = "" if revision == _DEFAULT else f"@{quote(revision, safe='')}"
    return f"datasets/{repository}{at}", path


def is_commit(name: str) -> bool:
    """Whether a dataset's name has a commit for its revision."""
    return _COMMIT.fullmatch(name.rpartition("@")[2]) is not None


@dataclass(frozen=True, slots=True)
class HubCredentials:
    """What is empty, huggingface_hub takes from the environment: ``HF_TOKEN``, ``HF_ENDPOINT``.

    Where there is no token either, it takes that of ``hf auth login``.
    """

    token: str = field(default="", repr=False)
    endpoint_url: str = ""
    """The address of the hub where it is not huggingface.co."""
    ca_file: Path | None = None
    """The certificate authorities to trust, in PEM; None: the system's."""

    def api(self) -> Any:
        """huggingface_hub's object for the hub. Takes a few 100 ms the first time.

        Raises :class:`~batchyard.errors.LocationRefused` where it is not installed.
        """
        check_installed()
        from huggingface_hub import HfApi, constants  # noqa: PLC0415 - an extra

        if constants.HF_HUB_OFFLINE:
            raise LocationRefused("HF_HUB_OFFLINE is set, so hf:// cannot be used: unset it")
        prepare(self.ca_file)
        return HfApi(
            endpoint=self.endpoint_url or None,
            token=self.token or None,
            library_name="batchyard",
            library_version=__version__,
        )


class HubRepository:
    """A :class:`~batchyard.storage.buckets.ReadBucket` of one commit; writing makes another one.

    ``name`` is like that of :func:`hub_address`. Everything is read from the commit that a branch
    had when this was first asked for it. Every call is tried again while the hub is unavailable.
    """

    def __init__(
        self, name: str, credentials: HubCredentials, *, backoff: Backoff | None = None
    ) -> None:
        self._name = name
        repository, _, revision = name.removeprefix("datasets/").partition("@")
        self._of: dict[str, Any] = {"repo_id": repository, "repo_type": "dataset"}
        self._revision = unquote(revision) or _DEFAULT
        self._backoff = backoff or Backoff()
        self._api = credentials.api()
        # As for S3: slow transfers must not hold up those that asyncio resolves names in.
        self._threads = ThreadPoolExecutor(_CONCURRENT_CALLS, thread_name_prefix="hub")
        self._commit = self._revision if is_commit(name) else ""

    def shown(self, key: str) -> str:
        """The file's address, for messages."""
        return f"hf://{self._name}/{key}"

    async def pinned(self) -> str:
        """The dataset's name with the commit that it has now; raises where there is none."""
        self._commit = await self._ask_commit()
        return f"datasets/{self._of['repo_id']}@{self._commit}"

    async def read(self, key: str) -> AsyncGenerator[bytes]:
        """Stream the file; a broken connection is resumed where it broke.

        What came is compared with the hash that the repository has of it.
        """
        file = await self._file(key)
        check, done = _Check(file), 0
        waits = self._backoff.waits()
        while not check.is_whole:
            try:
                blocks = from_thread(self._blocks(key, done, check), self._threads)
                async with contextlib.aclosing(blocks):
                    async for block in blocks:
                        done += len(block)
                        waits = self._backoff.waits()
                        yield block
            except StorageUnavailable as error:
                if (wait := next(waits, None)) is None:
                    raise
                await self._backoff.sleep(wait, error)
        if not check.fits():
            raise StorageUnavailable(
                f"{self.shown(key)}: what came is not what the dataset has, by its hash"
            )

    def _blocks(self, key: str, done: int, check: _Check) -> Iterator[bytes]:
        """The file from this byte on, as long as the connection lasts. Blocks."""
        from huggingface_hub import get_session, hf_hub_url  # noqa: PLC0415 - an extra

        url = hf_hub_url(
            **self._of, filename=key, revision=self._commit, endpoint=self._api.endpoint
        )
        session = get_session()
        headers = {**self._headers(), "Range": f"bytes={done}-", "Accept-Encoding": "identity"}
        with hub_errors_as_ours(self.shown(key)):
            response = session.send(session.build_request("GET", url, headers=headers), stream=True)
            with contextlib.closing(response), silence_as_ours():
                # One that does not know ranges sends all of it, which is the same commit's.
                again = done if response.status_code == 200 else 0
                for block in response.iter_raw(BLOCK_BYTES):
                    new = block[again:]
                    again -= len(block) - len(new)
                    if new:
                        check.add(new)
                        yield new
                if not check.is_whole:
                    raise HubSilent("it stopped too early")

    def _headers(self) -> dict[str, str]:
        from huggingface_hub import utils  # noqa: PLC0415 - an extra

        build: Callable[..., dict[str, str]] = utils.build_hf_headers  # type: ignore[attr-defined]  # it makes its names when it is asked for them
        api = self._api
        return build(
            token=api.token, library_name=api.library_name, library_version=api.library_version
        )

    async def list(self, prefix: str) -> AsyncGenerator[str]:
        """Every path that starts with ``prefix``, in byte order."""
        commit, stop = await self._at(), threading.Event()

        def found() -> list[str]:
            tree = self._api.list_repo_tree(
                **self._of,
                path_in_repo=prefix.rpartition("/")[0] or None,
                revision=commit,
                recursive=True,
            )
            # Page by page: there may be many.
            some = itertools.takewhile(lambda _: not stop.is_set(), tree)
            return sorted(each.path for each in some if hasattr(each, "blob_id"))

        with contextlib.suppress(ObjectNotFound):  # the commit is there, but not this folder
            for path in await self._call(prefix, found, stop):
                if path.startswith(prefix):
                    yield path

    async def write_file(self, key: str, path: Path) -> None:
        """Make a commit with the local file's content, if the branch does not have it already.

        So a commit whose answer was lost is not made twice. A file object goes through git LFS; for
        a path, huggingface_hub would use hf_xet, which has connections and retries of its own.
        """
        stop = threading.Event()
        commit = partial(self._commit_file, key, path, stop)
        await self._call(key, commit, stop)

    def _commit_file(self, key: str, path: Path, stop: threading.Event) -> None:
        from huggingface_hub import CommitOperationAdd  # noqa: PLC0415 - an extra

        with os_errors_as_ours(str(path)), _LocalFile(path, stop) as file:
            made = self._api.create_commit(
                **self._of,
                operations=[CommitOperationAdd(key, file)],
                commit_message=f"Write {key}",
                revision=self._revision,
            )
            found = self._api.get_paths_info(**self._of, paths=[key], revision=made.oid)
            if not found:
                raise LocationRefused(
                    f"{self.shown(key)} was left out of the commit: the dataset's .gitignore "
                    "excludes it, choose another path"
                )
            check = _Check(found[0])
            file.seek(0)
            while block := file.read(BLOCK_BYTES):
                check.add(block)
            if not check.fits():
                raise StorageUnavailable(
                    f"{self.shown(key)}: what was committed is not what was sent, by its hash"
                )

    async def probe(self) -> None:
        """Ask whether there is such a branch, and whether the token may write there.

        Raises :class:`~batchyard.errors.StorageError`.
        """

        def ask() -> None:
            self._info()
            self._api.auth_check(**self._of, write=True)

        await self._call("", ask)

    async def close(self) -> None:
        """Release the threads. huggingface_hub keeps its connections."""
        self._threads.shutdown(wait=False)

    async def _at(self) -> str:
        if not self._commit:
            self._commit = await self._ask_commit()
        return self._commit

    async def _ask_commit(self) -> str:
        return str((await self._call("", self._info)).sha)

    def _info(self) -> Any:
        repository = self._of["repo_id"]
        return self._api.dataset_info(repository, revision=self._revision, expand=["sha"])

    async def _file(self, key: str) -> Any:
        commit = await self._at()
        found = await self._call(
            key, lambda: self._api.get_paths_info(**self._of, paths=[key], revision=commit)
        )
        if not found:
            raise ObjectNotFound(f"{self.shown(key)}: the dataset has no such file")
        if not hasattr(found[0], "blob_id"):
            raise LocationRefused(
                f"{self.shown(key)} is a folder: give a file, or {self.shown(key)}/ for a dataset "
                "of all its files"
            )
        return found[0]

    async def _call(
        self, key: str, call: Callable[[], T], stop: threading.Event | None = None
    ) -> T:
        """Have huggingface_hub do it, again while the hub is unavailable.

        ``stop``: set when the caller is cancelled, which then waits until the call has ended.
        """

        def attempt() -> T:
            name = self.shown(key)
            # It reads files for a token.
            with os_errors_as_ours(name), hub_errors_as_ours(name):
                return call()

        interrupt = None if stop is None else stop.set
        return await self._backoff.retry(
            partial(in_executor, self._threads, attempt, interrupt=interrupt)
        )


class _Check:
    """The hash of a file's bytes, of the kind that the repository has of it."""

    def __init__(self, file: Any) -> None:
        self._left_bytes: int = file.size
        if file.lfs is not None:
            self._wanted, self._hash = str(file.lfs.sha256), hashlib.sha256()
        else:
            self._wanted = str(file.blob_id)
            self._hash = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def add(self, block: bytes) -> None:
        self._left_bytes -= len(block)
        self._hash.update(block)

    @property
    def is_whole(self) -> bool:
        """Whether so many bytes came as the file has."""
        return self._left_bytes <= 0

    def fits(self) -> bool:
        return self._hash.hexdigest() == self._wanted


class _LocalFile(io.BufferedReader):
    """A file whose upload can be stopped: reading it fails then."""

    def __init__(self, path: Path, stop: threading.Event) -> None:
        super().__init__(io.FileIO(path))
        self._stop = stop

    def read(self, size: int | None = -1, /) -> bytes:
        if self._stop.is_set():
            raise HubSilent("the batch was stopped")
        return super().read(size)
