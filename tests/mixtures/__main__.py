"""Play scripts of many seeds, and say what they mixed::

python -m tests.mixtures 0 1000
python -m tests.mixtures 0 300 --postgres
python -m tests.mixtures 17 18 --shrink
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchyard.store import PATIENCE_SECONDS, upgrade
from tests.faults.nursery import running_nursery
from tests.mixtures.installation import NURSERY, own_prefix, run_script
from tests.mixtures.script import pairs_of, possible_pairs, script_of, shrunk
from tests.services.ports import free_ports
from tests.services.postgres import postgres_on
from tests.services.swift import BUCKET, swift_for_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from tests.mixtures.script import Script


@contextlib.asynccontextmanager
async def _sqlite(root: Path) -> AsyncIterator[Callable[[], Any]]:
    path = root / "batchyard.db"
    await upgrade(f"sqlite:///{path}", patience_seconds=PATIENCE_SECONDS)

    async def settings() -> dict[str, Any]:
        return {"empty_database": path}

    yield settings


@contextlib.asynccontextmanager
async def _postgres(root: Path) -> AsyncIterator[Callable[[], Any]]:
    with postgres_on(*free_ports(1)) as cluster, _s3(root):

        async def settings() -> dict[str, Any]:
            url = cluster.url(await cluster.create_database())
            return {"database_url": url, "storage": own_prefix(BUCKET)}

        yield settings


@contextlib.contextmanager
def _s3(root: Path) -> Iterator[None]:
    with swift_for_session(root / "s3") as server:
        server.credentials.client().create_bucket(Bucket=BUCKET)
        os.environ |= {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": server.access_key_id,
            "AWS_SECRET_ACCESS_KEY": server.secret_access_key,
            "AWS_DEFAULT_REGION": server.region,
        }
        yield


async def _play(first: int, end: int, *, is_postgres: bool, shrinks: bool) -> int:
    root = Path(tempfile.mkdtemp(prefix="mixtures-"))
    failed: list[int] = []
    refused: Counter[str] = Counter()
    async with (
        (_postgres if is_postgres else _sqlite)(root) as settings,
        running_nursery(NURSERY) as nursery,
    ):
        count = 0

        async def why_not(script: Script) -> str | None:
            nonlocal count
            count += 1
            folder = root / str(count)
            try:
                seen = await run_script(script, folder, nursery, **await settings())
            except Exception:  # noqa: BLE001 - whatever it is, it is the script's failure
                return traceback.format_exc()
            shutil.rmtree(folder)
            refused.update(f"{status} {message}" for _, status, message in seen["refused"])
            return None

        async def fails(script: Script) -> bool:
            return await why_not(script) is not None

        for seed in range(first, end):
            script = script_of(seed)
            if (why := await why_not(script)) is None:
                continue
            failed.append(seed)
            print(f"seed {seed} fails, see {root / str(count)}:\n{why}", flush=True)  # noqa: T201
            if shrinks:
                script = await shrunk(script, fails)
                print(f"seed {seed} fails with:\n{json.dumps(script)}", flush=True)  # noqa: T201
    scripts = [script_of(seed) for seed in range(first, end)]
    met, wanted = pairs_of(scripts), possible_pairs()
    rare = sorted(pair for pair in wanted if met[pair] < 10)
    print(  # noqa: T201
        f"{len(scripts)} scripts, {len(failed)} fail: {failed}\n"
        f"{len(wanted)} pairs of features, {len(rare)} of them met less than ten times: {rare[:20]}"
    )
    for words, times in refused.most_common(20):
        print(f"{times} refused: {words[:200]}")  # noqa: T201
    if not failed:
        shutil.rmtree(root)
    return 1 if failed else 0


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:] if each.isdigit()]
    sys.exit(
        asyncio.run(
            _play(
                *numbers,
                is_postgres="--postgres" in sys.argv,
                shrinks="--shrink" in sys.argv,
            )
        )
    )
