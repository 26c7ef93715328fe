"""An installation for one script: SQLite and a folder, or PostgreSQL and S3; three processes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import time
from typing import TYPE_CHECKING, Any, Final

import httpx

from tests.faults.site import open_site
from tests.mixtures.outside import running_outside
from tests.mixtures.player import Player
from tests.patience import PATIENCE
from tests.services.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.faults.nursery import Nursery
    from tests.mixtures.script import Script

NURSERY: Final = "tests.mixtures.processes"
LEASE_SECONDS: Final = 2.0


@contextlib.asynccontextmanager
async def open_installation(
    folder: Path, nursery: Nursery, *, empty_database: Path | None = None, **settings: Any
) -> AsyncIterator[Player]:
    """``empty_database``: one of SQLite with tables, to be copied, which is quicker."""
    (port,) = free_ports(1)
    if empty_database is not None:
        (folder / "home").mkdir(mode=0o700)
        shutil.copy(empty_database, folder / "home")
    async with (
        running_outside(folder / "outside") as outside,
        open_site(
            folder,
            lease_seconds=LEASE_SECONDS,
            chunk_requests=6,
            allow_private_urls=True,
            **settings,
        ) as site,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        keys = {
            tenant: (await site.services.store.api_keys.create(tenant, "test")).secret
            for tenant in ("one", "other")
        }
        player = Player(site, nursery, outside, http, keys, port)
        for role in ("api", "control", "runner"):
            await player.start(role)
        # What is older than the first row is taken for another installation's.
        await player.upload_first()
        keeper = asyncio.create_task(player.keep_alive())
        try:
            yield player
            assert not keeper.done(), keeper
        finally:
            tasks = [each.followed for each in player.asked.values() if each.followed]
            tasks += [keeper, *player.later]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for actor in player.actors.values():
                await nursery.kill(actor)


async def run_script(
    script: Script, folder: Path, nursery: Nursery, **installation: Any
) -> dict[str, Any]:
    """Play it and check all that must hold; what was seen, for a report."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    began = time.monotonic()
    async with (
        asyncio.timeout(PATIENCE * 120),
        open_installation(folder, nursery, **installation) as player,
    ):
        await player.play(script)
        await player.settle()
        await player.check()
        await player.check_rest()
        return {"seconds": time.monotonic() - began, "refused": player.refused}


def own_prefix(bucket: str) -> str:
    """A part of a bucket for one installation."""
    return f"s3://{bucket}/{secrets.token_hex(8)}"
