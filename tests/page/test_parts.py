"""Parts of the page, without a browser."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from sqlalchemy import update

from batchyard.api.http.api_error import ApiError
from batchyard.batch.prices import Price, Prices
from batchyard.batch_error import BatchError
from batchyard.errors import ObjectTooLarge, RecordNotFound, StorageError, StorageUnavailable
from batchyard.files.failures import find, grouped_refusals
from batchyard.page import static_files
from batchyard.page.batch_rows import asked_from, query_of, read_page, table_of
from batchyard.page.charts import Charts, charts_of
from batchyard.page.engine_rows import engine_rows
from batchyard.page.html import render
from batchyard.page.new_batch import estimate_of, first_url, windows_of
from batchyard.page.one_batch import batch_page
from batchyard.page.shared import SharedAnswers
from batchyard.page.words import compact, line_count, percent, short_duration, size
from batchyard.results.line_errors import ErrorCount
from batchyard.results.results import NoAnswerCode, answered, refused, unanswered
from batchyard.runner.meters.load_meter import SLOT_SECONDS, LoadMeter
from batchyard.services.keys import chunk_prefix
from batchyard.services.segments.segments import encode_entry, put_bytes
from batchyard.settings import read_settings
from batchyard.settings_parts import LimitSettings
from batchyard.storage.memory import MemoryStorage
from batchyard.store import EngineLoad, RunnerKind, RunnerRecord, RunnerStatus
from batchyard.store.batch.filters import Asked, Show, Sort
from batchyard.store.batch.history import POINTS
from batchyard.store.overview import Engines, ModelQueue, Overview
from batchyard.wire import TokenUsage
from tests.contract.store.samples import rewrite
from tests.page import samples
from tests.page.screenshots import MADE_FROM, source_hash

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from batchyard.services.services import Services
    from batchyard.storage.base import Storage

VENDOR = Path(static_files.__file__).parent / "static" / "vendor"


def test_what_others_wrote_is_as_npm_has_it() -> None:
    """Each script and style sheet has its hash, and each package its licence."""
    files = {each.name for each in VENDOR.iterdir()}
    hashed = {
        each.name: hashlib.sha256(each.read_bytes()).hexdigest()
        for each in VENDOR.iterdir()
        if each.suffix in {".js", ".css"}
    }
    assert hashed == static_files.VENDORED
    assert files - set(hashed) == {"htmx-LICENSE.txt", "uplot-LICENSE.txt"}


def test_the_screenshots_are_of_this_page() -> None:
    """If not: ``.venv/bin/python -m tests.page.screenshots``."""
    assert MADE_FROM.read_text().strip() == source_hash()


def test_who_look_at_the_same_ask_the_database_once() -> None:
    asked = []

    async def ask() -> int:
        asked.append(1)
        await asyncio.sleep(0)
        return len(asked)

    async def look() -> list[int]:
        now = [0.0]
        answers = SharedAnswers(clock=lambda: now[0])
        first = await asyncio.gather(*(answers.get("tiles", ask) for _ in range(50)))
        now[0] = 10.0
        later = await answers.get("tiles", ask)
        answers.forget()
        return [*set(first), later, await answers.get("tiles", ask)]

    assert asyncio.run(look()) == [1, 2, 3]


def test_an_error_is_no_answer() -> None:
    async def fail() -> int:
        raise OSError

    async def work() -> int:
        return 7

    async def look() -> int:
        answers = SharedAnswers(clock=lambda: 1.0)
        with pytest.raises(OSError):  # noqa: PT011 — any
            await answers.get("q", fail)
        return await answers.get("q", work)

    assert asyncio.run(look()) == 7


@pytest.mark.parametrize(
    "asked",
    [
        Asked(tenant="one"),
        Asked(tenant="one", show=Show.LATE, search="a & b=c", page=3),
        Asked(tenant="one", sort=Sort.ETA, is_descending=False),
    ],
)
def test_the_state_of_the_table_survives_its_url(asked: Asked) -> None:
    from urllib.parse import parse_qsl  # noqa: PLC0415

    query = dict(parse_qsl(query_of(asked).removeprefix("?")))
    assert asked_from(query, "one") == asked


def test_a_url_of_nonsense_is_the_default() -> None:
    query = {"show": "x", "sort": "' OR 1", "order": "?", "page": "-1"}
    assert asked_from(query, None) == Asked()


def test_a_page_with_more_digits_than_python_reads_is_the_first_one() -> None:
    assert asked_from({"page": "9" * 5000}, None) == Asked()


def test_numbers_are_short_and_do_not_lie() -> None:
    assert [compact(each) for each in (0, 950, 999.6, 1_234, 34_400_000)] == [
        "0",
        "950",
        "1.0 k",
        "1.2 k",
        "34 M",
    ]
    assert [percent(*each) for each in ((0, 9), (1, 900), (899, 900), (9, 9), (1, 0))] == [
        "0 %",
        "<1 %",
        ">99 %",
        "100 %",
        "–",
    ]


def test_one_line_is_no_lines_and_no_minute_has_seconds() -> None:
    assert [line_count(each) for each in (0, 1, 1_234)] == ["0 lines", "1 line", "1,234 lines"]
    found = [short_duration(each) for each in (-3, 59.4, 59.7, 60, 3_599.4, 3_599.6)]
    assert found == ["0 s", "59 s", "1 min", "1 min", "59 min", "1 h 0 min"]


def test_sizes_have_the_units_of_bytes() -> None:
    found = [size(each) for each in (0, 1, 812, 1_400, 1_234_000_000)]
    assert found == ["0 B", "1 B", "812 B", "1.4 kB", "1.2 GB"]


def test_a_line_with_several_errors_is_named_once() -> None:
    errors = [BatchError("missing", "No.", line=line) for line in (3, 3, 3, *range(4, 18))]
    (group,) = grouped_refusals([*errors, BatchError("missing", "No.")])
    assert (group.count, [line.number for line in group.lines]) == (18, list(range(3, 15)))
    assert group.more == 3


@pytest.mark.parametrize(
    ("content", "url"),
    [
        (b'{"url": "/v1/embeddings"}\n{"url": "/v1/completions"}', "/v1/embeddings"),
        (b'\xef\xbb\xbf{"url": "/v1/embeddings"}', "/v1/embeddings"),
        (b' \r\n\n{"url": "/v1/embeddings"}', "/v1/embeddings"),
        (b'{"url": "\xff"}', ""),
        (b'{"body": %b%b}' % (b"[" * 5000, b"]" * 5000), ""),
        (b"", ""),
    ],
    ids=["plain", "with a BOM", "blank lines", "no UTF-8", "deep", "empty"],
)
def test_the_endpoint_to_offer_is_that_of_the_first_line(
    tmp_path: Path, content: bytes, url: str
) -> None:
    """A bad line names none, and does not hide what the estimate says of it."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    assert first_url(file) == url


@pytest.mark.parametrize(
    ("days", "longest"), [(30, ["72h", "7d"]), (3, ["24h", "72h"]), (1, ["6h", "24h"])]
)
def test_no_window_is_offered_that_is_refused(days: int, longest: list[str]) -> None:
    settings = read_settings(max_window_days=days)
    assert windows_of(settings)[-3:] == [*longest, "background"]


async def test_a_file_that_cannot_be_read_now_is_not_said_to_be_missing(
    services: Services,
) -> None:
    """Nor is the place told where it is: that is for the log. A deleted file is missing."""
    file = await services.store.files.create(
        await samples.stored(services, ["{}"], "in.jsonl", "one")
    )
    away = replace(services, storage=Away())
    with pytest.raises(StorageUnavailable):
        await estimate_of(away, file)
    few = services.settings.model_copy(update={"limits": LimitSettings(max_bytes=1)})
    with pytest.raises(ObjectTooLarge, match=r"^The input of a batch may have 1 bytes\.$"):
        await estimate_of(replace(services, settings=few), file)
    # As where the disk is full: no folder can be made there.
    with pytest.raises(StorageError):
        await estimate_of(replace(services, spool=services.spool / "nowhere"), file)
    await services.store.files.delete(file.id)
    with pytest.raises(RecordNotFound):
        await estimate_of(away, file)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["no JSON"] * 1_500, "1,500 bad lines"),
        (["no JSON"], "1 bad line"),
        ([], "The file cannot be used"),
    ],
    ids=["many", "one", "none"],
)
async def test_an_estimate_counts_all_bad_lines(
    services: Services, lines: list[str], words: str
) -> None:
    """Of which it lists the first thousand errors."""
    file = await services.store.files.create(
        await samples.stored(services, lines, "in.jsonl", "one")
    )
    assert (await estimate_of(services, file)).bad_lines == words


async def test_an_estimate_shows_the_beginning_of_a_very_long_model(services: Services) -> None:
    """It stays in memory with those of 255 other files."""
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m" * 100_000, "prompt": "Once"},
    }
    file = await services.store.files.create(
        await samples.stored(services, [json.dumps(line)], "in.jsonl", "one")
    )
    facts = dict((await estimate_of(services, file)).facts)
    assert facts["Model"] == "m" * 199 + "…"


async def test_a_line_with_millions_of_values_is_not_checked_by_the_api(
    services: Services,
) -> None:
    """It would stop all else there for seconds. What is as large and one text is no trouble."""
    settings = services.settings.model_copy(update={"limits": LimitSettings()})
    services = replace(services, settings=settings)
    costly = '{"body": [%s[]]}' % ("[]," * 400_000)
    large = json.dumps({"body": "x" * len(costly)})
    for lines, is_refused in (([large, costly], True), ([large, "{}"], False)):
        file = await services.store.files.create(
            await samples.stored(services, lines, "in.jsonl", "one")
        )
        if not is_refused:
            assert (await estimate_of(services, file)).bad_lines
            continue
        with pytest.raises(ApiError, match=r"Line 2 of in\.jsonl has too many values"):
            await estimate_of(services, file)


class Away(MemoryStorage):
    """It cannot be reached."""

    async def local_path(self, key: str, spool: Path) -> Path:  # noqa: ARG002 - as in the base
        raise StorageUnavailable(f"s3://bucket-of-ours/{key} does not answer")


async def test_blank_lines_count_for_the_numbers_of_failed_lines(services: Services) -> None:
    """As in an editor. A line that the input does not have has no number."""
    batch = await samples.ended(services, "x", tenant="one")
    lines = ["", '{"custom_id": "item-4"}', " \t\r", "", '{"custom_id": "item-94"}']
    source = await samples.stored(services, lines, "blank.jsonl", "one")
    await services.store.files.create(source)
    await rewrite(services.store, batch.id, input_file_id=source.id)
    found = await find(services, await services.store.batches.get(batch.id))
    (group,) = found.groups
    numbers = {line.custom_id: line.number for line in group.lines}
    assert (group.count, numbers["item-4"], numbers["item-94"]) == (7, 2, 5)
    assert numbers["item-184"] is None


async def test_the_counts_are_of_all_lines_and_stay_when_the_file_of_them_is_deleted(
    services: Services,
) -> None:
    """Only the messages and the names of lines go with it."""
    batch = await samples.ended(services, "x", tenant="one")
    (head,) = (await find(services, batch)).groups
    counts = (ErrorCount(head.code, 9_000), ErrorCount("503", 2))
    options = msgspec.structs.replace(batch.options, error_counts=counts)
    await rewrite(services.store, batch.id, options=options)
    batch = await services.store.batches.get(batch.id)
    found = await find(services, batch)
    assert [(group.code, group.count) for group in found.groups] == [(head.code, 9_000), ("503", 2)]
    assert found.groups[0].sample == head.sample
    assert found.groups[0].more == 9_000 - len(head.lines)
    assert not found.is_partial
    await services.store.files.delete(str(batch.error_file_id))
    found = await find(services, batch)
    assert [(group.count, group.sample) for group in found.groups] == [(9_000, ""), (2, "")]


async def test_errors_and_answers_are_shown_although_the_input_was_deleted(
    services: Services,
) -> None:
    """Only the numbers of lines are in the input."""
    batch = await samples.ended(services, "x", tenant="one")
    await services.store.files.delete(batch.input_file_id)
    found = await find(services, batch)
    (group,) = found.groups
    assert [line.custom_id for line in group.lines][:2] == ["item-4", "item-94"]
    assert {line.number for line in group.lines} == {None}
    assert found.answers


async def test_each_line_that_was_left_out_has_its_own_number(services: Services) -> None:
    """They may have no name, or that of a line that has run."""
    batch = await samples.ended(services, "x", tenant="one")
    source = ["{", "", '{"custom_id": "a"}', "{", '{"custom_id": "a"}', '{"custom_id": "a"}']
    left_out = ((0, None), (2, None), (3, "a"), (4, "a"))
    failed = [
        refused(batch.id, ordinal, name, "duplicate_custom_id" if name else "bad", "No.").line
        for ordinal, name in left_out
    ]
    failed.append(unanswered("a", NoAnswerCode.TIMEOUT).line)
    lines = {
        "input_file_id": source,
        "error_file_id": [line.decode().rstrip("\n") for line in failed],
    }
    for column, content in lines.items():
        file = await services.store.files.create(
            await samples.stored(services, content, "x.jsonl", "one")
        )
        await rewrite(services.store, batch.id, **{column: file.id})
    found = await find(services, await services.store.batches.get(batch.id))
    numbers = {group.code: [line.number for line in group.lines] for group in found.groups}
    assert numbers == {"bad": [1, 4], "duplicate_custom_id": [5, 6], "request_timeout": [3]}


@pytest.mark.parametrize("behind", ["cut", "damaged"])
async def test_lines_are_shown_that_stand_before_the_end_of_what_is_read(
    services: Services, behind: str
) -> None:
    """Of a segment of a running batch. Fast engines write more than a mebibyte at a time."""
    batch = await samples.running(services, "x", owner="r", failed=0.0)
    answer = answered("a", "req", 200, b'{"choices":[{"message":{"content":"%b"}}]}' % (b"x" * 100))
    error = unanswered("e", NoAnswerCode.TIMEOUT)
    lines = [encode_entry(0, answer), encode_entry(1, error)]
    rest = [encode_entry(2, answer)] * 6_000 if behind == "cut" else [lines[0][:20]]
    key = f"{chunk_prefix(batch.id, 0)}000001-000001-x"
    await put_bytes(services.storage, key, [*lines, *rest])
    found = await find(services, batch)
    assert [group.code for group in found.groups] == ["request_timeout"]
    assert found.answers


async def test_of_one_tenant_one_page_at_a_time_is_read(services: Services) -> None:
    """Each has up to 50 MB: hundreds at once would fill the memory of the API."""
    batches = [await samples.ended(services, str(n), tenant=str(n % 2)) for n in range(6)]
    storage = Counting(services.storage)
    counted = replace(services, storage=storage)
    await asyncio.gather(*(find(counted, batch) for batch in batches))
    assert storage.most == 2


class Counting(MemoryStorage):
    """How many objects of ``inner`` are read at once."""

    def __init__(self, inner: Storage) -> None:
        super().__init__()
        self._inner = inner
        self._now = self.most = 0

    async def get(
        self, key: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncGenerator[bytes]:
        self._now += 1
        self.most = max(self.most, self._now)
        async for part in self._inner.get(key, start=start, stop=stop):
            yield part
        self._now -= 1


async def test_failed_lines_of_a_running_batch_have_no_numbers(services: Services) -> None:
    """Blank lines and bad ones before them are not known; their names are."""
    batch = await samples.running(services, "x", owner="r")
    found = await find(services, batch)
    lines = [line for group in found.groups for line in group.lines]
    assert "product-401" in {line.custom_id for line in lines}
    assert {line.number for line in lines} == {None}


async def test_nothing_is_drawn_before_a_line_was_in_an_engine(services: Services) -> None:
    """Not even if points were kept: a chart of zeros says nothing."""
    store = services.store
    batch = await samples.waiting(store, "Waits", tenant="one")
    await samples.history(store, batch.id, 1, int(await store.database.now()) - 60, 0, 0, 8_000)
    await change_points(services, running=0)
    assert await charts(services, batch.id) is None
    await change_points(services, running=1)
    assert await charts(services, batch.id) is not None


async def change_points(services: Services, *, running: int) -> None:
    values = dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens"), 0)
    await samples.change(services.store, update(POINTS).values(running=running, **values))


async def charts(services: Services, batch_id: str) -> Charts | None:
    listed = await services.store.overview.batch(batch_id)
    assert listed
    points = await services.store.batch_history.of(batch_id)
    return charts_of(listed, points, await services.store.database.now(), None)


async def test_behind_the_last_page_is_the_last_one(services: Services) -> None:
    """Batches have left the filter meanwhile: the table must not say that there are none."""
    store = services.store
    await samples.many(store, 5)
    shown, listing = await read_page(store.overview, Asked(show=Show.ALL, page=9, limit=2))
    assert (shown.page, len(listing.batches), listing.total) == (2, 2, 6)
    table = table_of(shown, listing, await store.database.now())
    assert (table.shown, table.query, table.next) == ("5–6", "?show=all&page=2", None)
    shown, listing = await read_page(store.overview, Asked(tenant="nobody", page=9))
    assert (shown.page, listing.total) == (9, 0)


@pytest.mark.parametrize("is_descending", [True, False])
async def test_the_pages_of_the_table_are_named_alike_in_every_order(
    services: Services, *, is_descending: bool
) -> None:
    """With the oldest first, what comes next is newer."""
    store = services.store
    await samples.many(store, 5)
    asked = Asked(show=Show.ALL, page=1, limit=2, is_descending=is_descending)
    table = table_of(asked, await store.overview.batches(asked), await store.database.now())
    shown = bytes(render("parts/batches.html", table=table, caller=None).body).decode()
    assert re.findall(r'id="(previous|next)"[^>]*>([^<]*)<', shown) == [
        ("previous", "Previous"),
        ("next", "Next"),
    ]


async def test_the_table_has_costs_so_far_and_costs(services: Services) -> None:
    """Of a batch with a price; the batch's page says the same."""
    store = services.store
    priced = Overview(store.database, Prices(by_model={"qwen3-32b": Price(output=1.0)}))
    batch = await samples.running(services, "Runs", owner="r", total=1_000, done=0.5)
    await samples.waiting(store, "Waits", tenant="one")
    asked = Asked()
    table = table_of(asked, await priced.batches(asked), await store.database.now())
    assert {row.name: row.cost for row in table.rows} == {
        "Runs": "0.080000 USD so far",
        "Waits": "",
    }
    opened = replace(services, store=replace(store, overview=priced))
    page = await batch_page(opened, batch.id, None, "http://x")
    assert page is not None
    assert ("Cost", "0.080000 USD so far") in page.facts


async def test_a_batch_says_its_warnings(services: Services) -> None:
    batch = await samples.running(services, "Runs", owner="r", total=1_000, done=0.5)
    await services.store.batch_effects.note_ignored(batch.id, {"max_token": 1_000})
    page = await batch_page(services, batch.id, None, "http://x")
    assert page is not None
    said = "The engine ignores body.max_token, which is in 1,000 lines."
    assert ("Warning", said) in page.facts


def runner(**changes: object) -> RunnerRecord:
    values = {
        "id": "runner_1",
        "kind": RunnerKind.CHUNKS,
        "model": "m",
        "pool": "gpu",
        "flow_run_id": None,
        "started_at": 100.0,
        "ready_at": 110.0,
        "heartbeat_at": 200.0,
        "status": RunnerStatus.LIVE,
        "machine": "gpu-01@4f",
        "failure": None,
        "answered": 0,
        "load": EngineLoad(window=8),
    }
    return RunnerRecord(**{**values, **changes})


def queue(**changes: int | str) -> ModelQueue:
    values = {"model": "m", "free": 0, "leased": 0, "paused": 0, "pausing": 0, "wait_reason": None}
    return ModelQueue(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "waits", "state", "why"),
    [
        (runner(load=EngineLoad(running=2)), None, "running", ""),
        (runner(), None, "idle", "no work"),
        (runner(), queue(paused=3), "idle", "paused"),
        (runner(), queue(leased=3), "idle", "other engines"),
        (runner(), queue(free=1), "idle", "about to start"),
        (runner(), queue(pausing=1), "idle", "after an error"),
        (runner(load=EngineLoad(waiting=2)), None, "held back", "live traffic"),
        (runner(ready_at=None, load=None), None, "loading", "loads the model, 1 min"),
        (runner(status=RunnerStatus.DRAINING), None, "draining", "another model"),
        (None, queue(free=1), "not running", "no slot"),
        (None, queue(free=1, wait_reason="The pool is full."), "not running", "The pool is full."),
    ],
)
def test_an_engine_says_why_it_is_idle(
    found: RunnerRecord | None, waits: ModelQueue | None, state: str, why: str
) -> None:
    engines = Engines([found] if found else [], {}, {"m": waits} if waits else {})
    (row,) = engine_rows(engines, 200.0)
    assert row.state == state
    assert why in row.why
    assert bool(row.why) == bool(why)


@pytest.mark.parametrize(
    ("used", "shown"), [(0.374, "37 %"), (0.0, "0 %"), (0.002, "<1 %"), (None, "–")]
)
def test_an_engine_shows_how_full_its_cache_is(used: float | None, shown: str) -> None:
    engines = Engines([runner(load=EngineLoad(running=2, cache_used=used))], {}, {})
    assert [row.cache_used for row in engine_rows(engines, 200.0)] == [shown]


def test_a_runner_measures_its_tokens_in_slots_of_time() -> None:
    now = [0.0]
    meter = LoadMeter(clock=lambda: now[0])
    meter.count(TokenUsage(input_tokens=300, cached_tokens=200, output_tokens=100))
    now[0] = SLOT_SECONDS * 2.5
    load = meter.load(running=1, waiting=2, window=3)
    assert load.speeds == (20.0, 0.0)
    assert (load.input_tokens, load.cached_tokens, load.output_tokens) == (300, 200, 100)
    now[0] = SLOT_SECONDS * 1000
    assert len(meter.load(running=0, waiting=0, window=3).speeds) == 60
