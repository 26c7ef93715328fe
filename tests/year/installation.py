"""An installation that began with version 0.2.0: its tables, some rows of then, its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx

from batchyard.intervals import DAY_SECONDS
from batchyard.store import PATIENCE_SECONDS, upgrade
from tests.faults.nursery import running_nursery
from tests.faults.site import open_site
from tests.migrations.test_schema import _migrated_to
from tests.patience import PATIENCE
from tests.services.ports import free_port
from tests.year.census import Census, take
from tests.year.clock import age
from tests.year.days import Days

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

    from tests.faults.nursery import Actor, Nursery
    from tests.faults.site import Site

OF_0_2_0: Final = "0011"
"""The last migration of version 0.2.0."""
OLD_BATCHES: Final = 20
TENANTS: Final = ("one", "other")
_ROOT = Path(__file__).parents[2]
_START_SECONDS = 30.0
_STOP_SECONDS = 20.0
_RUNNER_EVERY_DAYS = 9
_CONTROL_EVERY_DAYS = 14


@dataclass
class Installation:
    """Processes and days. ``control`` and ``api`` live for the whole time; others are killed."""

    site: Site
    nursery: Nursery
    days: Days
    logs: Path
    control: Actor
    runner: Actor
    second: Actor
    api: subprocess.Popen[bytes]
    found: dict[int, Census] = field(default_factory=dict)
    """What was there in the evening of some days."""

    async def live(self, days: int, looks: Collection[int], *, apart: int = 1) -> None:
        """So many days, and a look in the evening of those that ``looks`` has.

        ``apart``: how many days later the next one is. In between nothing happens.
        """
        database = self.site.services.store.database
        for _ in range(days):
            await self.days.live()
            await self._replace_some()
            await self.days.clean_up(*self.logs.glob("*.log"))
            if self.days.day in looks:
                self.found[self.days.day] = await self._census()
            await age(database, self.site.folder, apart * DAY_SECONDS)

    async def _census(self) -> Census:
        pids = {"control process": self.control.pid, "API process": self.api.pid}
        home = Path(self.site.settings["home"])
        return await take(self.days.day, self.site.services.store.database, home, pids)

    async def _replace_some(self) -> None:
        if self.days.day % _RUNNER_EVERY_DAYS == 0:
            self.runner = await self._replaced(self.runner)
        if self.days.day % _CONTROL_EVERY_DAYS == 0:
            self.second = await self._replaced(self.second)

    async def _replaced(self, actor: Actor) -> Actor:
        await self.nursery.signal(actor, signal.SIGKILL)
        await self.nursery.gone(actor)
        return await self.nursery.start(actor.role, actor.parts)


@contextlib.asynccontextmanager
async def begun_with_0_2_0(
    folder: Path, database_url: str | None = None
) -> AsyncIterator[Installation]:
    """Its database has been migrated to the newest tables, and its processes are at work."""
    home = folder / "home"
    home.mkdir(mode=0o700)
    url = database_url or f"sqlite:///{home / 'batchyard.db'}"
    await _migrated_to(url, OF_0_2_0, *_rows_of_then(int(time.time())))
    await upgrade(url, patience_seconds=PATIENCE_SECONDS)
    logs = home / "logs"
    logs.mkdir()
    given = {"lease_seconds": 10.0, "look_seconds": 0.1, "allow_private_urls": True}
    async with (
        open_site(folder, database_url=database_url, **given) as site,  # type: ignore[arg-type]
        running_nursery() as nursery,
    ):
        keys = [await site.services.store.api_keys.create(each, "main") for each in TENANTS]
        actors = {
            name: await nursery.start(role, site.parts() | {"log": str(logs / f"{name}.log")})
            for name, role in (("control", "control"), ("runner", "runner"), ("second", "control"))
        }
        async with contextlib.AsyncExitStack() as stack:
            api, address = stack.enter_context(_running_api(site, logs / "api.log"))
            clients = [
                await stack.enter_async_context(
                    httpx.AsyncClient(
                        base_url=f"{address}/v1",
                        headers={"authorization": f"Bearer {key.secret}"},
                        timeout=PATIENCE * 30,
                    )
                )
                for key in keys
            ]
            days = Days(site, clients, TENANTS, [key.record.id for key in keys])
            yield Installation(site, nursery, days, logs, api=api, **actors)


@contextlib.contextmanager
def _running_api(site: Site, log_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`batchyard serve` with the settings of the site, and its address."""
    port = free_port()
    settings = {
        f"BATCHYARD_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in site.settings.items()
    }
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "batchyard.cli", "serve", "--port", str(port)],
            cwd=_ROOT,
            env=os.environ | settings,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        give_up_at = time.monotonic() + PATIENCE * _START_SECONDS
        while not _answers(address):
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < give_up_at, log_path.read_text()
            time.sleep(0.05)
        yield process, address
    finally:
        process.terminate()
        process.wait(PATIENCE * _STOP_SECONDS)


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/livez").is_success
    except httpx.TransportError:
        return False


def _rows_of_then(now: int) -> Iterator[str]:
    """Batches that ended in the weeks before the upgrade, and their files."""
    yield "INSERT INTO tenants (name, served_at) VALUES ('one', 5)"
    for number in range(OLD_BATCHES):
        at = now - (number + 1) * DAY_SECONDS
        files = {"input": "batch", "output": "batch_output"}
        for kind, purpose in files.items():
            yield (
                "INSERT INTO files (id, tenant, purpose, filename, size_bytes, sha256, "  # noqa: S608 - constants
                "storage_key, created_at, expires_at) VALUES "
                f"('file-old-{kind}-{number}', 'one', '{purpose}', 'f', 1, '', "
                f"'files/old-{kind}-{number}', {at}, {at + 30 * DAY_SECONDS})"
            )
        yield (
            "INSERT INTO batches (id, tenant, status, endpoint, input_file_id, output_file_id, "  # noqa: S608 - constants
            "completion_window, created_at, expires_at, completed_at, total, completed, failed, "
            "options, priority, epoch, token_estimate, input_tokens, cached_tokens, "
            "output_tokens, reasoning_tokens, total_tokens, deduplicated_requests) VALUES "
            f"('batch_old{number}', 'one', 'completed', '/v1/chat/completions', "
            f"'file-old-input-{number}', 'file-old-output-{number}', '24h', {at}, "
            f"{at + DAY_SECONDS}, {at}, 3, 3, 0, '{{}}', 0, 0, 0, 0, 0, 0, 0, 0, 0)"
        )
        yield (
            'INSERT INTO chunks (batch_id, "index", model, deadline, first_record, '  # noqa: S608 - constants
            "request_count, token_estimate, status, epoch, completed, failed, input_tokens, "
            "cached_tokens, output_tokens, reasoning_tokens, total_tokens, strikes, deaths) "
            f"VALUES ('batch_old{number}', 0, 'stub-model', {at}, 0, 3, 30, 'done', 1, 3, 0, "
            "0, 0, 0, 0, 0, 0, 0)"
        )
