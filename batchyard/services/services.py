"""What every step works with, built once by a composition root: the CLI, a flow run, a test."""

from __future__ import annotations

import shutil
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.errors import SettingsError, StorageFull, WrongSealingKey
from batchyard.lines.offer import ANYTHING
from batchyard.locations.access import Access, credentials_of_environment
from batchyard.locations.local_file import LocalFile
from batchyard.locations.web import WebAccess
from batchyard.processes.threads import in_thread
from batchyard.services.arrivals import Arrivals
from batchyard.services.machine.home import in_home
from batchyard.services.machine.scratch import Scratch, remove_left
from batchyard.services.machine.secret_key import key_file, read_secret_keys
from batchyard.storage.bucket_storage import BucketStorage
from batchyard.storage.buckets import BUCKETS, bucket_address
from batchyard.storage.local import LocalStorage
from batchyard.store import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator

    from batchyard.engine.base import Engine
    from batchyard.errors import ModelNotFound
    from batchyard.lines.offer import Offer
    from batchyard.locations.access import FindCredentials, Location
    from batchyard.schedule.hours import Hours
    from batchyard.services.leases.held_batches import HeldBatches
    from batchyard.settings import Settings
    from batchyard.storage.backoff import Backoff
    from batchyard.storage.base import Storage
    from batchyard.store import BatchOptions, Store

_LEAST_ROOM_BYTES = 1024**2
"""Enough for the database; what files need is found out as they are written."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a batch is. ``total`` is None while it is not known."""

    batch_id: str
    phase: str
    done: int = 0
    total: int | None = None
    message: str = ""


def ignore_progress(_: Progress) -> None:
    """Do nothing: the process shows no progress."""


async def no_engine(model: str) -> Engine:
    """For processes that run no engine: raises :class:`~batchyard.errors.SettingsError`."""
    raise SettingsError(f"This process runs no engine, so none for {model}.")


async def nothing_is_known(_: str | None) -> None:
    """For processes with an engine of their own, or without Prefect: None."""


async def anything_is_offered(_: Collection[str] = ()) -> Offer:
    """For the same ones: every name goes through to the engine."""
    return ANYTHING


@dataclass(frozen=True, slots=True)
class Services:
    """The state (``store``), the bytes (``storage``), inference, and this machine's folders."""

    settings: Settings
    store: Store
    storage: Storage
    spool: Path
    """Scratch space of this process; safe to lose."""
    engine_for: Callable[[str], Awaitable[Engine]]
    """The engine, not yet started, that serves a model."""
    access: Access = field(default_factory=Access)
    """How the places that users name are reached, with their rights or our credentials."""
    on_progress: Callable[[Progress], None] = ignore_progress
    why_not_offered: Callable[[str], Awaitable[ModelNotFound | None]] = nothing_is_known
    """Why no engine serves a model; None: one does, or it is not known."""
    endpoints_of: Callable[[str | None], Awaitable[frozenset[str] | None]] = nothing_is_known
    """The endpoints that a model's engine may serve, and without a model any engine; None: it is
    not known."""
    find_offer: Callable[[Collection[str]], Awaitable[Offer]] = anything_is_offered
    """Which models and adapters engines serve. If any of the names is none that was known, it is
    asked for."""
    hours_of: Callable[[str], Awaitable[Hours]] | None = None
    """When batches may use a model's engine, as its block says; None: the engines of this process
    have no blocks, and no hours."""
    arrivals: Arrivals = field(default_factory=Arrivals)
    """What this process is storing for tenants."""
    held: HeldBatches | None = None
    """The batches that this process has leased, where it takes batches to their ends."""

    @property
    def owner(self) -> str | None:
        """The owner of what this process leases; None where it leases no batches."""
        return None if self.held is None else self.held.owner

    def where(self, location: Location) -> str:
        """The machine on which a path was looked for, for messages; empty if that is obvious."""
        if isinstance(location, LocalFile) and self.settings.runners == "pool":
            return f", on the machine {self.settings.this_machine}"
        return ""

    def access_for(self, options: BatchOptions) -> Access:
        """The access for a batch: a client's own URLs lead to public addresses only."""
        if not options.public_urls:
            return self.access
        return replace(self.access, web=self.public_web)

    @property
    def public_web(self) -> WebAccess:
        """The access for URLs of clients: to public addresses and internal networks only."""
        settings = self.settings
        return WebAccess(guard=settings.address_guard, ssl_context=settings.tls_context)


def access_with(
    settings: Settings, credentials: FindCredentials = credentials_of_environment
) -> Access:
    """The access for the operator's own places, with the authorities that the settings name."""
    return Access(credentials, WebAccess(ssl_context=settings.tls_context), settings.ca_file)


@asynccontextmanager
async def open_services(
    settings: Settings,
    *,
    engine_for: Callable[[str], Awaitable[Engine]] = no_engine,
    credentials: FindCredentials = credentials_of_environment,
    on_progress: Callable[[Progress], None] = ignore_progress,
    why_not_offered: Callable[[str], Awaitable[ModelNotFound | None]] = nothing_is_known,
    endpoints_of: Callable[[str | None], Awaitable[frozenset[str] | None]] = nothing_is_known,
    find_offer: Callable[[Collection[str]], Awaitable[Offer]] = anything_is_offered,
    hours_of: Callable[[str], Awaitable[Hours]] | None = None,
    checks_keys: bool = True,
    storage_backoff: Backoff | None = None,
) -> AsyncIterator[Services]:
    """Open the database, the object store and a scratch folder; close them at the end.

    ``credentials``: for locations that users name, for example ``s3://``; the object store itself
    has those of the environment. ``storage_backoff``: how often each call of a bucket is tried;
    None: for half a minute. Within the block, :func:`current_services` gives the services to
    whatever runs in its context. Only the embedded database, which no other version uses, is
    migrated here.

    Raises :class:`~batchyard.errors.OtherTables` where a database is not migrated to this version,
    and :class:`~batchyard.errors.WrongSealingKey`, unless ``checks_keys`` is false, where this
    process could not open what others have sealed.
    """
    storage = _open_storage(settings, storage_backoff)
    scratch, keys = _open_home(settings)
    try:
        migrate = settings.database_url is None
        async with open_store(
            settings.database, keys=keys, migrate=migrate, prices=settings.price_table
        ) as store:
            if checks_keys and not await store.sealing_proof.is_opened():
                raise _wrong_key(settings)
            services = Services(
                settings,
                store,
                storage,
                scratch.path,
                engine_for,
                access_with(settings, credentials),
                on_progress,
                why_not_offered,
                endpoints_of,
                find_offer,
                hours_of,
            )
            with as_current(services):
                yield services
    finally:
        await storage.close()
        await in_thread(scratch.remove)


_CURRENT: ContextVar[Services] = ContextVar("services")
"""Prefect calls flows and tasks with parameters, and records them: they are ids. What flows and
tasks work with must come another way. The only other context variable is the operator, in
``store.audit``."""


def current_services() -> Services:
    """The services of the innermost :func:`as_current`; LookupError outside of one."""
    return _CURRENT.get()


@contextmanager
def as_current(services: Services) -> Iterator[None]:
    """Within the block, :func:`current_services` gives these to whatever runs in its context."""
    token = _CURRENT.set(services)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _open_home(settings: Settings) -> tuple[Scratch, list[str]]:
    """A scratch folder in the home, and the keys that seal locations."""
    with in_home(settings) as home:
        (home / "spool").mkdir(mode=0o700, exist_ok=True)
        # They may be what fills the disk.
        remove_left(home / "spool", settings.this_machine.name)
        if shutil.disk_usage(home).free < _LEAST_ROOM_BYTES:
            # SQLite would call it an I/O error.
            raise StorageFull(
                f"BATCHYARD_HOME, {home}, has no room: free some space, or name another folder."
            )
        keys = read_secret_keys(settings)
        return Scratch(home / "spool", settings.this_machine.name), keys


def _wrong_key(settings: Settings) -> WrongSealingKey:
    ours = (
        "the keys in BATCHYARD_SECRET_KEY"
        if settings.secret_key is not None
        else f"the key file {key_file(settings)}"
    )
    return WrongSealingKey(
        f"The database was sealed with another key than {ours}. Every machine that uses this "
        "database needs the same BATCHYARD_SECRET_KEY, or the same secret.key in BATCHYARD_HOME. "
        "If the right key is lost: batchyard secrets adopt"
    )


def _open_storage(settings: Settings, backoff: Backoff | None) -> Storage:
    place = settings.storage
    if place is None:
        return LocalStorage(settings.home_folder / "objects")
    if address := bucket_address(place):
        scheme, name, prefix = address
        kind = BUCKETS[scheme]
        bucket = kind.open(name, kind.credentials(ca_file=settings.ca_file), backoff)
        return BucketStorage(bucket, prefix)
    return LocalStorage(Path(place).expanduser().absolute())
