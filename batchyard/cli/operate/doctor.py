"""``batchyard doctor``: does what this machine needs for its role work, from here?"""

from __future__ import annotations

import asyncio
import enum
import os
import resource
import secrets
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from batchyard.cli.operate.findings import Finding, Level, failed, ok, warning, with_advice
from batchyard.cli.terminal.as_json import LINES, json_line
from batchyard.cli.terminal.say import say
from batchyard.dispatch import RUN_BATCHES, RUN_CHUNKS, PrefectApi
from batchyard.engine.vllm.vllm_version import vllm_version
from batchyard.errors import BatchyardError, StoreError, WrongSealingKey
from batchyard.lines.offer import clashes
from batchyard.processes.machine import this_machine
from batchyard.services.machine.connections import connections
from batchyard.services.machine.engine_python import engine_python
from batchyard.services.machine.shared_database import check_shared_database
from batchyard.services.restore.storage_mark import check_mark
from batchyard.services.services import open_services
from batchyard.settings import read_settings
from batchyard.storage.backoff import Backoff
from batchyard.store import connection_limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from batchyard.dispatch import OfferedModel
    from batchyard.services.services import Services
    from batchyard.settings import Settings
    from batchyard.store import ConnectionLimits

_ROOM_BYTES = 5 * 1024**3
"""What a batch of the usual limits takes in the home, several times over."""
_FULL_BYTES = 256 * 1024**2
_TWICE = Backoff(attempts=2)
"""A person waits, who will try again. Commands that have work to lose try for half a minute."""
_CLOCK_SECONDS = 30.0
"""S3 refuses requests whose clock is 15 minutes off, receivers of webhooks 5 minutes."""
_FILES = 4096
"""Each request in flight has a connection or two."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is asked for, nothing is written
_SHARED_MEMORY_BYTES = 1024**3
"""vLLM's processes hand tensors to one another in it."""


class Role(enum.StrEnum):
    """What a machine does."""

    ALL = "all"
    API = "api"
    CONTROL = "control"
    GPU = "gpu"
    CLI = "cli"


def doctor(
    role: Annotated[Role, typer.Argument(help="What this machine is for.")] = Role.ALL,
    as_json: Annotated[bool, LINES] = False,
) -> None:
    """Check what this machine needs, and say what to do about each thing that does not work.

    Settings, disk, database, key, object store, Prefect, engine and limits. The exit status is 1 if
    something does not work.
    """
    findings = asyncio.run(_found(role, as_json))
    if any(finding.level is Level.FAILED for finding in findings):
        raise typer.Exit(1)


async def _found(role: Role, as_json: bool) -> list[Finding]:
    findings = []
    async for finding in _check(role):
        if as_json:
            say(json_line(asdict(finding)))
        else:
            say(f"{finding.level.value:<8} {finding.what:<9} {finding.text}")
        findings.append(finding)
    return findings


async def _check(role: Role) -> AsyncIterator[Finding]:
    try:
        settings = read_settings()
    except BatchyardError as error:
        yield failed("settings", str(error))
        return
    yield ok("settings", connections(settings)["Settings"])
    for finding in _home(settings):
        yield finding
    async for finding in _services(settings, role):
        yield finding
    async for finding in _prefect(settings, role):
        yield finding
    if role in {Role.GPU, Role.ALL}:
        yield await asyncio.to_thread(_engine, settings)  # noqa: TID251 - it holds nothing
        yield _shared_memory()
    if role is not Role.CLI:
        yield _files()


# -- this machine --------------------------------------------------------------------------------


def _home(settings: Settings) -> Iterator[Finding]:
    home = settings.home_folder
    existing = next(path for path in (home, *home.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield failed("disk", f"BATCHYARD_HOME, {home}, cannot be written: name another folder.")
        return
    free = shutil.disk_usage(existing).free
    if free < _ROOM_BYTES:
        yield Finding(
            Level.FAILED if free < _FULL_BYTES else Level.WARNING,
            "disk",
            f"{home} has {decimal(free)} left; batches need {decimal(_ROOM_BYTES)} or more: free "
            "some space, or name a folder on another disk in BATCHYARD_HOME.",
        )
    else:
        yield ok("disk", f"{home}, {decimal(free)} free")


def _files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        return warning(
            "limits",
            f"A process may have {soft} open files: raise it to {_FILES} (ulimit -n, or "
            "LimitNOFILE in a systemd unit).",
        )
    return ok("limits", f"{soft} open files")


def _shared_memory() -> Finding:
    size = shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0
    if size < _SHARED_MEMORY_BYTES:
        return warning(
            "limits",
            f"{_SHARED_MEMORY} has {decimal(size)}: an engine on several GPUs needs "
            f"{decimal(_SHARED_MEMORY_BYTES)} or more (--shm-size, or an emptyDir in memory).",
        )
    return ok("limits", f"{_SHARED_MEMORY} has {decimal(size)}")


def _engine(settings: Settings) -> Finding:
    try:
        python = engine_python(settings)
        version = vllm_version(python, os.environ)
    except BatchyardError as error:
        return failed("engine", str(error))
    slots = ", ".join(settings.engine_slots) or "one with all devices"
    name = this_machine(settings.machine)
    return ok("engine", f"vLLM {version or 'of an unknown version'}; slots of {name}: {slots}")


# -- what it shares with others ------------------------------------------------------------------


async def _services(settings: Settings, role: Role) -> AsyncIterator[Finding]:
    """The database, the key and the object store: opened as every process opens them."""
    what = connections(settings)
    began = time.monotonic()
    try:
        if role is not Role.CLI:
            check_shared_database(settings)
        async with open_services(settings, storage_backoff=_TWICE) as services:
            yield ok("database", f"{what['Database']}, {_since(began)}")
            if (limits := await connection_limits(services.store.database)) is not None:
                yield _connections(limits)
                yield await _clock(services)
            yield _key(settings)
            yield (found := await _storage(services, what["Storage"]))
            if found.level is Level.OK:
                yield await _mark(services)
    except WrongSealingKey as error:
        yield failed("key", str(error))
    except StoreError as error:
        yield failed("database", f"{what['Database']}: {with_advice(error)}")
    except BatchyardError as error:
        yield failed("settings", str(error))


def _connections(limits: ConnectionLimits) -> Finding:
    """Each process opens connections as it needs them, so that there may be too few only later."""
    text = (
        f"{limits.most} connections; {limits.processes} processes of Batchyard are connected and "
        f"may open {limits.wanted - limits.others}, others have {limits.others}"
    )
    if limits.wanted <= limits.most:
        return ok("database", text)
    return warning(
        "database",
        f"{text}: raise max_connections of PostgreSQL by {limits.wanted - limits.most} or more.",
    )


async def _clock(services: Services) -> Finding:
    """Leases have the database's clock. Signatures have this machine's, and others judge them."""
    began = time.time()
    theirs = await services.store.database.now()
    ahead = (began + time.time()) / 2 - theirs
    if abs(ahead) < _CLOCK_SECONDS:
        return ok("clock", f"within {_CLOCK_SECONDS:.0f} s of the database's")
    return warning(
        "clock",
        f"The clock of this machine is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} "
        "the database's: let NTP set both. S3 and receivers of webhooks refuse signatures with a "
        "wrong time.",
    )


def _key(settings: Settings) -> Finding:
    """It is the database's: else the services would not have opened."""
    if settings.secret_key is None and settings.database_url is not None:
        return warning(
            "key",
            f"The key is a file in {settings.home_folder}: every machine that uses this database "
            "needs the same, in BATCHYARD_SECRET_KEY or as a copy of the file.",
        )
    return ok("key", "opens what the database has sealed")


async def _storage(services: Services, where: str) -> Finding:
    """An object that is written, read, listed and deleted again: all rights that are needed."""
    began, key, content = time.monotonic(), f"doctor/{secrets.token_hex(8)}", b"batchyard"

    async def parts() -> AsyncIterator[bytes]:
        yield content

    try:
        await services.storage.put(key, parts())
        found = b"".join([part async for part in services.storage.get(key)])
        listed = [name async for name in services.storage.list(key)]
        await services.storage.delete(key)
    except BatchyardError as error:
        return failed("storage", f"{where}: {with_advice(error)}")
    if listed != [key]:
        return failed("storage", f"{where}: what was written is not in the list of its objects.")
    if found != content:
        return failed("storage", f"{where}: what was read is not what was written.")
    return ok("storage", f"{where}, {_since(began)}")


async def _mark(services: Services) -> Finding:
    """Whether the database is the one that knows what is in the object store."""
    try:
        found = await check_mark(services)
    except BatchyardError as error:
        return failed("storage", str(error))
    ours = await services.store.storage_mark.get()
    if found is None and ours is not None and ours.number:
        return warning(
            "storage",
            "The database was used with an object store, and this one has no mark of it: is "
            "BATCHYARD_STORAGE right? If its objects are lost, batches that need them fail.",
        )
    return ok("storage", "is the one that the database knows")


async def _prefect(settings: Settings, role: Role) -> AsyncIterator[Finding]:
    began, where = time.monotonic(), connections(settings)["Prefect"]
    if role in {Role.ALL, Role.CLI} and not os.environ.get("PREFECT_API_URL"):
        yield warning(
            "Prefect", f"{where}; without it, only `batchyard run` and commands that read work."
        )
        return
    try:
        async with PrefectApi.from_environment() as api:
            models = await api.offered_models()
            yield ok("Prefect", f"{where}, {_since(began)}")
            yield _models(models)
            for name, named_by in clashes({each.name: each.adapters for each in models}).items():
                yield warning("models", _clash_words(name, named_by))
            for deployment in _deployments(settings, role):
                await api.latest(deployment)
                yield ok("Prefect", f"has the deployment {deployment}")
    except BatchyardError as error:
        yield failed("Prefect", with_advice(error))


def _models(models: Sequence[OfferedModel]) -> Finding:
    if models:
        names = (" + ".join([model.name, *model.adapters]) for model in models)
        return ok("models", ", ".join(names))
    return warning(
        "models",
        "No model has an engine block: name them in a file, and run `batchyard deploy`.",
    )


def _clash_words(name: str, models: Sequence[str]) -> str:
    if len(models) > 1:
        return (
            f"{' and '.join(models)} have adapters of one name, {name}, so that it cannot be used: "
            "give each its own."
        )
    return f"{name} is a model, and the name of an adapter of {models[0]}: give that another one."


def _deployments(settings: Settings, role: Role) -> list[str]:
    if role is Role.CLI:
        return []
    pools = sorted({settings.pool, *settings.pools.values()} - {"control"})
    return [RUN_BATCHES, *(f"{RUN_CHUNKS}/{pool}" for pool in pools)]


def _since(began: float) -> str:
    return f"{(time.monotonic() - began) * 1000:.0f} ms"
