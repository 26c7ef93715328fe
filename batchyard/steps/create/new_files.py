"""New files: each file of requests in a folder becomes a batch, once.

Who has seen which file is in the database: the folder is only read. So any number of processes may
look at the same folder at the same time.
"""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from batchyard.datasets.files import TABLE_SUFFIX
from batchyard.errors import QuotaExceeded, RequestRefused, StorageError, WindowUnattainable
from batchyard.logs import event_logger
from batchyard.logs.printable import printable
from batchyard.steps.create.create import accept_batch
from batchyard.storage.compression import SUFFIXES, packed_suffix
from batchyard.store import NEW_FILES, IdempotencyKey
from batchyard.wire import new_file_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.locations.folder import Folder, FoundFile
    from batchyard.services.services import Services
    from batchyard.steps.create.create import BatchRequest

log = event_logger(__name__)

_SUFFIX: Final = ".jsonl"
_SUFFIXES: Final = (_SUFFIX, *(_SUFFIX + packed for packed in SUFFIXES))
_KEYS_AT_ONCE: Final = 500
_OF_A_FILE: Final = frozenset({"input", "output", "error"})
"""Parameters of a batch that are other ones for each file."""


@dataclass(slots=True)
class NewFiles:
    """What was done with the files of a folder."""

    batches: dict[str, str] = field(default_factory=dict)
    """The batches that were created, by the names of their files."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why there is no batch of a file, by its printable name. It is tried again each time."""
    known: int = 0
    """Files that have their batch already."""
    unfinished: int = 0
    """Files that may still be written."""
    held_back: str | None = None
    """Why some files were left for the next time; None: none was."""


async def submit_new_files(
    services: Services,
    source: Folder,
    target: Folder | None,
    request: BatchRequest,
    *,
    limit: int,
) -> NewFiles:
    """Create a batch for each ``.jsonl`` file in ``source`` that has none, up to ``limit``.

    A batch is as ``request`` has it, with the file as its input. The results of ``a/b.jsonl`` go to
    ``a/b.results.jsonl`` and ``a/b.errors.jsonl`` in ``target``; those of ``a/b.jsonl.gz`` and
    ``a/b.jsonl.zst`` are compressed as well. Where the request has a template, a batch is also
    created for each ``a/b.parquet``, and its results go to ``a/b.results.parquet`` and
    ``a/b.parquet.errors.jsonl``. A file that was replaced by another one is new. What is wrong with
    one file leaves the others as they are.

    Raises :class:`~batchyard.errors.RequestRefused` for a request that no file could be run with,
    and :class:`~batchyard.errors.StorageError` if the folder cannot be read.
    """
    if target is not None and source.contains(target):
        raise RequestRefused(
            f"The output {target} is in the input {source}, so results would be new files: "
            "give another one.",
            param="output_prefix",
            code="invalid_value",
        )
    done = NewFiles()
    suffixes = _SUFFIXES if request.template is None else (*_SUFFIXES, TABLE_SUFFIX)
    async with aclosing(_in_groups(services, source, suffixes, done)) as groups:
        async for group in groups:
            await _submit_group(services, group, target, request, done, limit=limit)
            if done.held_back is not None:
                break
    return done


async def _in_groups(
    services: Services, source: Folder, suffixes: tuple[str, ...], done: NewFiles
) -> AsyncGenerator[list[FoundFile]]:
    """The files of requests that are whole, some hundreds at a time."""
    group: list[FoundFile] = []
    async with aclosing(source.files(services.access)) as files:
        async for file in files:
            if not file.name.endswith(suffixes):
                continue
            if not file.is_whole:
                done.unfinished += 1
                continue
            group.append(file)
            if len(group) == _KEYS_AT_ONCE:
                yield group
                group = []
    if group:
        yield group


async def _submit_group(
    services: Services,
    group: list[FoundFile],
    target: Folder | None,
    request: BatchRequest,
    done: NewFiles,
    *,
    limit: int,
) -> None:
    """Stop at the first file that has to wait, as those after it would."""
    keys = [_key(file) for file in group]
    seen = await services.store.idempotency.renew(request.tenant, NEW_FILES, keys)
    for file, key in zip(group, keys, strict=True):
        if key in seen:
            done.known += 1
            continue
        if len(done.batches) >= limit:
            done.held_back = f"{limit} batches were created, which is the limit of one run."
            return
        try:
            _check_name(file)
            await _submit(services, file, target, request, done, key=key)
        except (QuotaExceeded, WindowUnattainable) as error:
            done.held_back = str(error)
            return
        except (RequestRefused, StorageError) as error:
            if isinstance(error, RequestRefused) and error.param not in _OF_A_FILE:
                raise
            log.warning("new_file.refused", printable(f"{file.name}: {error}"))
            done.refused[printable(file.name)] = printable(str(error))


def _check_name(file: FoundFile) -> None:
    """Its place is kept as text. A name on a disk may be any bytes."""
    try:
        file.location.text.encode()
    except UnicodeEncodeError:
        raise RequestRefused(
            "its name is not UTF-8: rename it", param="input", code="invalid_value"
        ) from None


async def _submit(
    services: Services,
    file: FoundFile,
    target: Folder | None,
    request: BatchRequest,
    done: NewFiles,
    *,
    key: str,
) -> None:
    suffix = _SUFFIX + packed_suffix(file.name)
    stem = file.name.removesuffix(suffix)
    results = f"{stem}.results{suffix}"
    if stem.endswith(TABLE_SUFFIX):
        results = f"{stem.removesuffix(TABLE_SUFFIX)}.results{TABLE_SUFFIX}"
    ours = new_file_id()
    batch = await accept_batch(
        services,
        replace(
            request,
            input=file.location,
            input_file_id=ours,
            output=None if target is None else await target.place(results),
            error=None if target is None else await target.place(f"{stem}.errors{suffix}"),
        ),
        # Of one file there may be one batch, whatever was asked besides.
        idempotency=IdempotencyKey(route=NEW_FILES, key=key, fingerprint=key),
    )
    if batch.input_file_id != ours:  # another process was first
        done.known += 1
        return
    log.info("new_file.submitted", printable(file.name), batch=batch.id)
    done.batches[file.name] = batch.id


def _key(file: FoundFile) -> str:
    """The same for the same content at the same place."""
    identity = f"{file.location.text}\0{file.version}\0{file.size_bytes}"
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()
