"""What every step works with, built once by a composition root: the CLI, a flow run, a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from batchyard.engine.base import Engine
    from batchyard.settings import Settings
    from batchyard.storage.base import Storage
    from batchyard.storage.s3 import S3Credentials
    from batchyard.store.database import Store


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a batch is. ``total`` is None while it is not known."""

    batch_id: str
    phase: str
    done: int = 0
    total: int | None = None
    message: str = ""


def ignore_progress(_: Progress) -> None:
    """For those who do not watch."""


@dataclass(frozen=True, slots=True)
class Services:
    """The truth (``store``), the bytes (``storage``), inference, and this machine's folders."""

    settings: Settings
    store: Store
    storage: Storage
    spool: Path
    """Scratch space of this process; safe to lose."""
    engine_for: Callable[[str], Awaitable[Engine]]
    """The engine, not yet started, that serves a model."""
    s3_credentials: Callable[[], Awaitable[S3Credentials]]
    """For locations that users write as ``s3://bucket/key``."""
    on_progress: Callable[[Progress], None] = ignore_progress
