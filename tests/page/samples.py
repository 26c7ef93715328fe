"""A store as it looks on a working day, for tests of the page and for its screenshots."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert, update

from batchyard.batch_error import BatchError
from batchyard.lifecycle import BatchStatus
from batchyard.results.results import NoAnswerCode, answered, unanswered
from batchyard.services.keys import chunk_prefix, file_key
from batchyard.services.segments.segments import encode_entry, put_bytes
from batchyard.store import EngineLoad, NewChunk, NewFile, RunnerKind
from batchyard.store.batch.history import POINTS
from batchyard.store.runner.runners import RunnerRow
from batchyard.store.tables.batch import BATCHES
from batchyard.wire import BatchUsage, InputTokensDetails, RequestCounts, new_file_id
from tests.contract.store.samples import batch_in, new_batch, rewrite

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from batchyard.services.services import Services
    from batchyard.store import BatchRecord, Store

HOUR = 3600
_IN_ENGINE = 4_000
_RUNNERS = RunnerRow.metadata.tables["runners"]
HOSTILE = (
    "<script>document.title='inert no more'</script><img src=x onerror=\"document.title='!'\">"
)


async def working_day(services: Services) -> dict[str, BatchRecord]:
    """Two engines, and batches in every state; by a short name of each."""
    store = services.store
    busy = await engine(store, "qwen3-32b", running=231, speeds=_wave(17_000), cached=0.83)
    await engine(store, "qwen3-embed-4b", running=0, speeds=(9_100.0, 8_700.0, 2_100.0, 0.0, 0.0))
    await loading_engine(store, "llama-3.3-70b")
    batches = {
        "running": await running(
            services, "Nightly product summaries", owner=busy, tenant="shop", total=50_000
        ),
        "second": await running(
            services,
            "Eval: tool use v7",
            owner=busy,
            tenant="research",
            total=12_000,
            done=0.31,
            failed=0.0,
            minutes=7,
        ),
        "waiting": await waiting(store, "Label reviews, June", tenant="shop"),
        "late": await waiting(
            store, "Translate help pages", tenant="docs", model="llama-3.3-70b", late=True
        ),
        "paused": await waiting(store, "Backfill 2024", tenant="research", paused=True),
    }
    batches["completed"] = await ended(services, "Nightly product summaries", tenant="shop")
    batches["failed"] = await refused(store, "Import test", tenant="docs")
    batches["cancelled"] = await batch_in(
        store, BatchStatus.CANCELLED, tenant="research", metadata={"name": "Wrong prompt"}
    )
    batches["plain"] = await batch_in(store, BatchStatus.COMPLETED, tenant="shop")
    await rewrite(store, batches["plain"].id, completed=10)
    for name, hours in (("failed", 2), ("cancelled", 5), ("plain", 9)):
        await earlier(store, batches[name], hours * HOUR)
    return batches


async def engine(
    store: Store, model: str, *, running: int, speeds: tuple[float, ...], cached: float = 0.4
) -> str:
    """A runner that is ready; its id."""
    runner = await store.runners.register(
        kind=RunnerKind.CHUNKS, model=model, pool="gpu", machine="gpu-01@4f"
    )
    await store.runners.ready(runner.id)
    load = EngineLoad(
        running=running,
        waiting=running // 2,
        window=512,
        input_tokens=9_400_000,
        cached_tokens=int(9_400_000 * cached),
        output_tokens=2_100_000,
        speeds=speeds,
        cache_used=0.91 if running else 0.0,
    )
    await store.runners.heartbeat(runner.id, answered=5, load=load)
    return runner.id


async def loading_engine(store: Store, model: str) -> None:
    runner = await store.runners.register(
        kind=RunnerKind.CHUNKS, model=model, pool="gpu", machine="gpu-02@77"
    )
    now = await store.database.now()
    await change(
        store, update(_RUNNERS).where(_RUNNERS.c.id == runner.id).values(started_at=now - 134)
    )


async def earlier(store: Store, batch: BatchRecord, seconds: int) -> None:
    """As if it had been so long ago, and had ended after half a minute."""
    columns = ("created_at", "in_progress_at", "finalizing_at", "cancelling_at", "expires_at")
    ends = ("completed_at", "failed_at", "cancelled_at")
    shifts = {**dict.fromkeys(columns, -seconds), **dict.fromkeys(ends, 30 - seconds)}
    times = {
        name: value + shift
        for name, shift in shifts.items()
        if (value := getattr(batch, name)) is not None
    }
    await rewrite(store, batch.id, **times)


async def change(store: Store, *statements: Any) -> None:
    async def work(connection: AsyncConnection) -> None:
        for statement in statements:
            await connection.execute(statement)

    await store.database.write(work)


async def running(
    services: Services,
    name: str,
    *,
    owner: str,
    tenant: str = "one",
    total: int = 1_000,
    done: float = 0.62,
    failed: float = 0.004,
    minutes: int = 48,
    metadata: dict[str, str] | None = None,
) -> BatchRecord:
    """A batch in the engine of ``owner``, with a history, failed lines and answers."""
    store = services.store
    batch = await store.batches.create(
        new_batch(tenant=tenant, metadata={"name": name, **(metadata or {})})
    )
    completed, bad = int(total * done), int(total * failed)
    begun = min(total, completed + bad + _IN_ENGINE)
    sizes = [begun, total - begun]
    chunks = [
        NewChunk(model="qwen3-32b", first_record=0, request_count=size, token_estimate=size * 700)
        for size in sizes
        if size
    ]
    await store.batches.begin(batch.id, model="qwen3-32b", total=total, plan_key="p", chunks=chunks)
    source = await stored(services, ["{}"] * 40, "products.jsonl", tenant)
    await store.files.create(source)
    (lease,) = await store.chunks.claim(
        model="qwen3-32b", owner=owner, lease_seconds=HOUR, batch_id=batch.id
    )
    usage = _usage(completed)
    await store.chunks.record_progress(lease, completed=completed, failed=bad, usage=usage)
    now = int(await store.database.now())
    began = now - minutes * 60
    left = int(minutes * 60 * (1 - done) / done)
    await rewrite(
        store,
        batch.id,
        created_at=began - 40,
        in_progress_at=began,
        expires_at=began + 24 * HOUR,
        eta_at=now + left,
        input_file_id=source.id,
        flow_run_id="6b84e0a3-52a1-4d6a-9f0e-3b1d2c4e5f60",
    )
    seen = completed - completed * 31 // (minutes * 60)  # so that its speed stays as it was
    await history(store, batch.id, began, now - 25, seen, bad, total)
    lines = [
        encode_entry(
            n,
            answered(
                f"product-{n + 1}",
                "req",
                200,
                json.dumps({"choices": [{"message": {"content": text}}]}).encode(),
            ),
        )
        for n, text in enumerate(_ANSWERS)
    ]
    lines += [
        encode_entry(400 + 37 * n, unanswered(f"product-{401 + 37 * n}", NoAnswerCode.TIMEOUT))
        for n in range(min(bad, 9))
    ]
    if bad:
        body = {"error": {"code": 400, "type": "BadRequestError", "message": _TOO_LONG}}
        lines += [
            encode_entry(
                700 + n, answered(f"product-{701 + n}", "req", 400, json.dumps(body).encode())
            )
            for n in range(min(bad, 31))
        ]
    await put_bytes(services.storage, f"{chunk_prefix(batch.id, 0)}000001-000000-x", lines)
    return batch


async def history(
    store: Store, batch_id: str, began: int, now: int, completed: int, failed: int, total: int
) -> None:
    """Points of a batch whose speed rises, and falls once in the middle."""
    count = 60
    shares = [min(1.0, (n / count) ** 1.12) for n in range(1, count + 1)]
    rows = []
    for n, share in enumerate(shares, start=1):
        usage = _usage(int(completed * share))
        rows.append(
            {
                "batch_id": batch_id,
                "at": began + (now - began) * n // count,
                "completed": int(completed * share),
                "failed": int(failed * share),
                "running": min(total - completed, _IN_ENGINE),
                "input_tokens": usage.input_tokens,
                "cached_tokens": int(usage.input_tokens * (0.72 + 0.108 * share)),
                "output_tokens": usage.output_tokens,
            }
        )
    await change(store, insert(POINTS).values(rows))


async def waiting(
    store: Store,
    name: str,
    *,
    tenant: str,
    model: str = "qwen3-32b",
    late: bool = False,
    paused: bool = False,
) -> BatchRecord:
    """A batch that is planned, and has no chunk in an engine."""
    batch = await store.batches.create(new_batch(tenant=tenant, metadata={"name": name}))
    chunk = NewChunk(model=model, first_record=0, request_count=8_000, token_estimate=5_600_000)
    await store.batches.begin(batch.id, model=model, total=8_000, plan_key="p", chunks=[chunk])
    now = int(await store.database.now())
    times: dict[str, Any] = {"created_at": now - 1_500, "in_progress_at": now - 1_480}
    if late:
        times |= {"expires_at": now + 2_100, "eta_at": now + 4_000, "late_since": now - 400}
        times["wait_reason"] = "the model is loading"
    elif not paused:
        times["eta_at"] = now + 6_200
    if paused:
        times["paused_at"] = now - 600
    await rewrite(store, batch.id, **times)
    return batch


async def ended(
    services: Services, name: str, *, tenant: str, hostile: bool = False
) -> BatchRecord:
    """A completed batch with its files, deliveries and some failed lines."""
    store, total, bad = services.store, 1_200, 7
    texts = [HOSTILE] * 3 if hostile else _ANSWERS
    ids = [f"{HOSTILE if hostile else 'item'}-{n}" for n in range(total)]
    requests = [json.dumps({"custom_id": each, "url": "/v1/chat/completions"}) for each in ids]
    good = [
        json.dumps(
            {
                "id": "b",
                "custom_id": ids[n],
                "response": {
                    "status_code": 200,
                    "body": {"choices": [{"message": {"content": text}}]},
                },
                "error": None,
            }
        )
        for n, text in enumerate(texts)
    ]
    error = {"code": "request_timeout", "message": HOSTILE if hostile else "It took too long."}
    failed = [
        json.dumps({"id": "b", "custom_id": ids[n * 90 + 4], "response": None, "error": error})
        for n in range(bad)
    ]
    names = {
        kind: f"{HOSTILE.replace('/', '') if hostile else 'summaries'}_{kind}.jsonl"
        for kind in ("input", "output", "error")
    }
    source = await stored(services, requests, names["input"], tenant)
    batch = await store.batches.create(
        new_batch(tenant=tenant, metadata={"name": name, "team": name}, input_file_id=source.id)
    )
    await store.files.create(source)
    chunk = NewChunk(
        model="qwen3-32b", first_record=0, request_count=total, token_estimate=total * 700
    )
    await store.batches.begin(
        batch.id, model="qwen3-32b", total=total, plan_key="p", chunks=[chunk]
    )
    await store.batches.advance(batch.id, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING)
    record = await store.batches.finish(
        batch.id,
        target=BatchStatus.COMPLETED,
        output=await stored(services, good, names["output"], tenant),
        error=await stored(services, failed, names["error"], tenant),
        counts=RequestCounts(total, total - bad, bad),
        usage=_usage(total),
    )
    now = int(await store.database.now())
    began = now - 3 * HOUR
    await rewrite(
        store,
        batch.id,
        created_at=began - 30,
        in_progress_at=began,
        finalizing_at=began + 1_310,
        completed_at=began + 1_317,
        expires_at=began + 24 * HOUR,
    )
    await history(store, batch.id, began, began + 1_310, total - bad, bad, total)
    return record


async def stored(services: Services, lines: list[str], filename: str, tenant: str) -> NewFile:
    """A file with these lines, its bytes durable and its row not yet there."""
    file_id = new_file_id()
    data = "".join(f"{line}\n" for line in lines).encode()
    await put_bytes(services.storage, file_key(file_id), [data])
    return NewFile(
        id=file_id,
        purpose="batch",
        filename=filename,
        size_bytes=len(data),
        sha256="ab" * 32,
        storage_key=file_key(file_id),
        tenant=tenant,
    )


async def refused(store: Store, name: str, *, tenant: str) -> BatchRecord:
    batch = await store.batches.create(new_batch(tenant=tenant, metadata={"name": name}))
    errors = [
        BatchError("invalid_json_line", "This line is not a JSON object.", line=line)
        for line in (3, 18, 411)
    ]
    errors.append(
        BatchError("duplicate_custom_id", "The custom_id 'a' is that of line 2 too.", line=7)
    )
    return await store.batches.fail(batch.id, errors)


async def many(store: Store, count: int, tenant: str = "one") -> None:
    """Completed batches, as rows: nothing else makes ten thousand in a second."""
    now = int(await store.database.now())
    batch = await batch_in(store, BatchStatus.COMPLETED, tenant=tenant)

    async def work(connection: AsyncConnection) -> None:
        found = await connection.execute(BATCHES.select().where(BATCHES.c.id == batch.id))
        row = dict(found.mappings().one())
        rows = [
            {
                **row,
                "id": f"batch_{n:032x}",
                "created_at": now - n,
                "completed_at": now - n,
                "client_metadata": {"name": f"Batch {n}"},
            }
            for n in range(count)
        ]
        await connection.execute(insert(BATCHES), rows)

    await store.database.write(work)


def _usage(lines: int) -> BatchUsage:
    return BatchUsage(
        input_tokens=lines * 640,
        input_tokens_details=InputTokensDetails(lines * 530),
        output_tokens=lines * 160,
        total_tokens=lines * 800,
    )


def _wave(top: float) -> tuple[float, ...]:
    return tuple(top * (0.72 + 0.28 * ((n * 7919) % 97) / 97) for n in range(60))


_TOO_LONG = (
    "This model's maximum context length is 32768 tokens. However, you requested 33211 tokens."
)
_ANSWERS = [
    (
        "A compact travel kettle with a fold-down handle. Boils 0.5 l in three minutes and "
        "switches itself off. Fits into its own cup."
    ),
    "Merino socks for cool days: reinforced heel, no seam at the toes, sizes 36 to 47.",
    "This desk lamp has a warm and a cold light, and remembers which one you used last.",
]
