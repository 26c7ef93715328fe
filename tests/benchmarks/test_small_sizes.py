"""Every benchmark runs, in a small size: it is measured rarely, and must not rot meanwhile."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from batchyard.engine.base import EngineAnswer
from batchyard.engine.vllm.vllm import SERVERS_SCRIPT
from benchmarks import (
    batch_list,
    cache_isolation,
    chain,
    eviction,
    lengths,
    live_gaps,
    many_nodes,
    million,
    no_barrier,
    other_tools,
    overhead,
    plan_gain,
    plan_speed,
    rss_flat,
    same_answers,
    shared_roots,
    shared_server,
    timed,
    turns,
)
from benchmarks.peak_memory import peak_mebibytes
from benchmarks.timed import OURS, RUN_BATCH, Job, Timed
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Sequence

    from batchyard.engine.base import EngineRequest

ROOT = Path(__file__).parents[2]


async def test_planning_is_timed_and_weighed() -> None:
    planned = await plan_speed.plan(200, 500, 2)
    assert planned.requests == 200
    assert abs(planned.input_bytes / 200 - 500) < 40
    assert 0 < planned.plan_bytes / 200 <= 100
    assert planned.seconds > 0
    assert planned.ratio > 0
    assert "| 200 lines, 0 MB |" in plan_speed.table([planned])


@pytest.mark.alone
def test_chunks_are_compared_with_one_window_and_with_barriers() -> None:
    size = no_barrier.Size(stub=300, stub_part=16)
    (shares,) = no_barrier.measure(size, with_vllm=False)
    assert shares.ours > max(shares.barriers.values())
    assert list(shares.barriers) == [no_barrier.STUB_SEQS, 10, 4]
    assert "stub engine, 300 requests" in no_barrier.table([shares])


def test_what_lengths_are_worth_is_simulated() -> None:
    size = lengths.Size(eta_requests=600, eta_seats=8, seeds=2, tail_seats=32, kinds_seeds=2)
    found = lengths.measure(size)
    tails = {each.name: max(each.tails) for each in found.tails}
    assert tails["a later one"] < tails["as before"]
    assert all(0 <= error < 10 for each in found.etas for error in each.errors)
    assert "| one kind, learned in the batch |" in lengths.table(found)


class Echo:
    """Answers with the request's own text; ``counts``: and with how many came before."""

    def __init__(self, *, counts: bool = False) -> None:
        self._counts = counts
        self._came = 0

    async def stream(
        self, requests: AsyncIterable[EngineRequest], **_: object
    ) -> AsyncGenerator[EngineAnswer, None]:
        async for request in requests:
            self._came += self._counts
            message = {"content": f"{request.body!r} {self._came}"}
            choices = [{"message": message, "logprobs": None}]
            yield EngineAnswer(request.tag, 200, json.dumps({"choices": choices}).encode())


async def test_answers_of_one_request_are_compared_over_orders_and_windows() -> None:
    asked = same_answers.bodies(24)
    same = await same_answers.answers_of(Echo(), asked)
    assert (same.requests, same.texts, same.logprobs) == (24, 0, 0)
    assert len(same.seconds) == 9
    other = await same_answers.answers_of(Echo(counts=True), asked)
    assert (other.texts, other.logprobs) == (24, 0)
    table = same_answers.table({False: other, True: same})
    assert "| 24 requests, 3 orders, 3 windows |" in table
    assert "| as Batchyard starts it | 100.0% | 0.0% | 1.00× |" in table


def answer(custom_id: str, tokens: int) -> str:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    line = {"custom_id": custom_id, "response": {"status_code": 200, "body": {"usage": usage}}}
    return json.dumps(line) + "\n"


def test_what_came_of_a_job_is_read_from_its_output(tmp_path: Path) -> None:
    job = Job(OURS, str(tmp_path / "in"))
    (tmp_path / "in").write_text(json.dumps({"custom_id": "a", "body": {"max_tokens": 8}}) + "\n")
    (tmp_path / "in.batchyard.out").write_text(answer("a", 8))
    found = timed.judged(job, timed.Used(2.0, 0.5))
    assert (found.requests, found.output_tokens, found.cached) == (1, 8, 0.4)
    assert (found.rate, found.token_rate, found.front_end_seconds) == (0.5, 4.0, 0.5)


def test_other_tools_are_compared_with_the_run_batch_of_the_engine() -> None:
    """One that did not come to an end has a row that says so."""
    found: dict[str, list[Timed] | str] = {
        way: [Timed(Job(way, "file"), seconds, requests, 0, 0, 0) for seconds in (1.0, 2.0, 4.0)]
        for way, requests in zip(
            other_tools.NAMES, (100, 110, 140, 150, 20, 30, 40, 50), strict=True
        )
    }
    found[other_tools.DAFT] = "cut off after 120 s"
    table = other_tools.table(found)
    assert "| 150 short requests |" in table
    assert "| Batchyard | 75 | **1.50×** | 150 % |" in table
    assert "| plain aiohttp client, 512 in flight, `vllm serve` | 70 | 1.40× | 150 % |" in table
    assert "| LiteLLM, `batch_completion`, 100 threads | 10 | 0.20× | 150 % |" in table
    assert "| saturate, `pump`, a window that adapts | 20 | 0.40× | 150 % |" in table
    assert "| Ray Data LLM, HTTP requests, blocks of 64 | 25 | 0.50× | 150 % |" in table
    assert "| Daft, `prompt`, up to 1,000 connections | – | – | cut off after 120 s |" in table


def tried(script: str, folder: Path, *, limit_seconds: float = 60.0) -> list[Timed] | str:
    """What comes of a tool that is this shell script; its file has one request."""
    (folder / "in").write_text(json.dumps({"custom_id": "a", "body": {"max_tokens": 8}}) + "\n")
    job = Job("tool", str(folder / "in"))
    Path(job.output).write_text(answer("a", 8))
    program = ["sh", "-c", script]
    return other_tools.attempt(program, [job], [], "warm-up", limit_seconds=limit_seconds)


def test_a_tool_that_ends_is_timed_without_its_warm_up(tmp_path: Path) -> None:
    (found,) = tried("echo SECONDS 5.0; echo SECONDS 0.5", tmp_path)
    assert isinstance(found, Timed)
    assert found.seconds == 0.5


def test_a_tool_that_does_not_end_is_cut_off_with_all_of_its_processes(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"sleep 600 & echo $! > {child}; wait"
    assert tried(script, tmp_path, limit_seconds=2.0) == "cut off after 2 s"
    command_line = Path("/proc", child.read_text().strip(), "cmdline")
    deadline = time.monotonic() + PATIENCE * 30
    while command_line.exists() and command_line.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tool_that_fails_ends_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried("echo no such model >&2; exit 1", tmp_path) == "failed"
    assert "no such model" in capsys.readouterr().err


def test_a_tool_whose_results_cannot_be_read_failed(tmp_path: Path) -> None:
    script = f"echo > {tmp_path}/in.tool.out; echo SECONDS 5.0; echo SECONDS 0.5"
    assert tried(script, tmp_path) == "failed"


def test_a_tool_that_ends_before_its_last_job_failed(tmp_path: Path) -> None:
    assert tried("echo SECONDS 5.0; exit 1", tmp_path) == "failed"


def taking_turns(name: str, log: Path, *, seconds: float = 1.0) -> tuple[str, ...]:
    """A program that writes its name into the log at each of its turns."""
    script = f"while read -r _; do echo {name} >> {log}; echo SECONDS {seconds}; done"
    return ("sh", "-c", script)


def test_programs_take_turns_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    """Each warms up first, in each of its ways."""
    log = tmp_path / "log"
    one, other = taking_turns("one", log), taking_turns("other", log, seconds=2.0)
    a, b, c = Job("way", "1"), Job("their way", "1"), Job("way", "2")
    seconds = timed.in_turns({one: [a, c], other: [b]}, [a, b, c], [], "warm-up")
    assert seconds == {a: (1.0, 0.0), b: (2.0, 0.0), c: (1.0, 0.0)}
    assert log.read_text().split() == ["one", "other", "one", "other", "one"]


def test_a_program_that_fails_at_its_turn_ends_the_others(tmp_path: Path) -> None:
    child = tmp_path / "child"
    waits = ("sh", "-c", f"echo $$ > {child}; echo SECONDS 1; sleep 600")
    fails = ("sh", "-c", "echo no such model >&2")
    shares = {waits: [Job("way", "1")], fails: [Job("their way", "1")]}
    with pytest.raises(SystemExit, match="no such model"):
        timed.in_turns(shares, [], [], "warm-up")
    assert not Path("/proc", child.read_text().strip()).exists()


def test_a_job_that_did_less_than_it_was_asked_for_is_void(tmp_path: Path) -> None:
    job = Job(OURS, str(tmp_path / "in"))
    (tmp_path / "in").write_text(json.dumps({"custom_id": "a", "body": {"max_tokens": 8}}) + "\n")
    (tmp_path / "in.batchyard.out").write_text(answer("a", 7))
    with pytest.raises(SystemExit, match="did not do all the work"):
        timed.judged(job, timed.Used(2.0, 0.5))


def answered_at_once(jobs: Sequence[Job], *_: object, **__: object) -> list[Timed]:
    """Every job, in a second for our ways and in two for those of others."""
    ours = (OURS, timed.OURS_INPUT_ORDER, timed.STREAM_WINDOW)
    return [Timed(job, 1.0 if job.way in ours else 2.0, 10, 10, 100, 50) for job in jobs]


def test_the_gain_from_the_order_is_that_over_run_batch_and_over_a_plain_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_gain, "run_jobs", answered_at_once)
    monkeypatch.setattr(plan_gain, "cache_ceilings", lambda files, **_: [0.5] * len(files))
    size = plan_gain.Size(groups=4, each=4, unshared=4, pairs=2)
    row = "| four-level tree | 5 | 5 | 10 | **2.00×** | **2.00×** | 50 %, 50 %, 50 % | 50 % |"
    assert row in plan_gain.table(plan_gain.measure(size))


def test_a_plain_client_is_compared_with_one_window_where_the_engine_is_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(no_barrier, "run_jobs", answered_at_once)
    on_stub = no_barrier.Shares("stub engine", 10, 1.0, 1.0, {32: 0.5, 10: 0.2, 4: 0.1})
    table = no_barrier.table([on_stub, no_barrier.on_vllm(40, 20)])
    assert "| plain aiohttp client, as many in flight, `vllm serve` | – | 50 % |" in table


@pytest.mark.parametrize("is_there", [True, False])
def test_the_front_end_in_rust_has_a_row_where_vllm_has_it(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's wheel for CUDA has it, that for CPUs has not."""
    package = tmp_path / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    if is_there:
        (package / "vllm-rs").touch()
    monkeypatch.delenv("VLLM_RUST_FRONTEND_PATH", raising=False)
    monkeypatch.setattr(timed, "ENGINE_PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr(overhead, "run_jobs", answered_at_once)
    found = overhead.measure(overhead.Size(requests=20, barrier_requests=4, files=1))
    table = overhead.table(found)
    assert ("| the same with vLLM's front end in Rust | 5 | 1.00× |" in table) is is_there


def test_each_server_that_a_plain_client_talks_to_is_started_as_its_row_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: dict[str, list[str]] = {}

    def run(
        shares: dict[tuple[object, ...], list[Job]], *_: object, **__: object
    ) -> dict[Job, timed.Used]:
        for command, jobs in shares.items():
            started[jobs[0].way] = list(map(str, command))
        return {job: timed.Used(1.0) for jobs in shares.values() for job in jobs}

    monkeypatch.setattr(timed, "is_environment_tuned", lambda: True)
    monkeypatch.setattr(timed, "in_turns", run)
    monkeypatch.setattr(timed, "judged", lambda job, used: Timed(job, used.seconds, 1, 1, 1, 1))
    ways = (timed.HTTP_INSTALLED, timed.HTTP_SEVERAL, timed.HTTP_RUST)
    timed.run_jobs([Job(way, "in") for way in ways], ["--api-server-count", "3"], warm_up="warm")
    several, rust = started[timed.HTTP_SEVERAL], started[timed.HTTP_RUST]
    assert several[several.index("--api-server-count") + 1] == "3"
    assert rust[rust.index("--api-server-count") + 1] == "1"
    # Else the script would import the file vllm.py beside it.
    assert all("-P" in words[: words.index(str(SERVERS_SCRIPT))] for words in (several, rust))
    assert "VLLM_USE_RUST_FRONTEND=1" in rust
    assert not any("RUST" in word for word in several + started[timed.HTTP_INSTALLED])


def big_parent(mebibytes: int) -> bytes:
    """So much memory of ours, in use."""
    return b"x" * mebibytes * 1024**2


@pytest.mark.alone
def test_the_peak_of_a_process_does_not_begin_with_that_of_its_parent() -> None:
    held = big_parent(300)
    program = "from benchmarks.peak_memory import *; print(peak_mebibytes(), forget_peak())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    assert all(0 < float(peak) < 100 for peak in done.stdout.split())
    assert peak_mebibytes() > len(held) / 1024**2


@pytest.mark.slow
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    held = big_parent(400)
    (peak,) = rss_flat.measure((500,))
    assert 50 < peak.mebibytes < len(held) / 1024**2


@pytest.mark.slow
def test_what_an_eviction_costs_is_counted_with_and_without_notice() -> None:
    size = eviction.Size(requests=256, shortest_seconds=0.2, notices=(0.0, 12.0))
    peace, killed, drained = eviction.measure(size)
    assert {each.answers for each in (peace, killed, drained)} == {256}
    assert 0 < killed.lost <= 2 * eviction.MAX_NUM_SEQS
    assert peace.lost == drained.lost == 0
    assert "| SIGKILL |" in eviction.table([peace, killed, drained])


@pytest.mark.slow
def test_what_prefect_costs_is_measured_in_everything_that_is_deployed() -> None:
    cost = million.measure(60)
    assert (cost.lines, cost.chunks) == (60, 1)
    assert 0 < cost.share < 1
    assert {million.SERVER, "GPU worker, run-chunks"} <= cost.processors.keys()
    assert "| one batch, stub engine | 60 lines |" in million.table([cost])


@pytest.mark.slow
def test_small_batches_are_timed_while_a_large_one_is_planned_and_while_it_runs() -> None:
    waits = turns.measure_beside(20_000, rounds=1)
    assert len(waits.beside_own) == len(waits.beside_other) == 1
    assert waits.planning_other
    assert "| beside that of its own tenant | 1 |" in turns.table_beside(waits)


def test_waits_beside_a_large_batch_are_compared_with_those_alone() -> None:
    waits = turns.LargeWaits(1_000_000, [1.0, 2.0, 4.0], [8.0], [3.0, 5.0], [2.0])
    table = turns.table_beside(waits)
    assert "| a batch of 10 lines, a large one of 1,000,000 |" in table
    assert "| beside that of its own tenant | 2 | 4.00 | **2.0** | 2.5 |" in table


@pytest.mark.slow
@pytest.mark.vllm
def test_every_way_answers_short_requests_on_vllm() -> None:
    rates = overhead.measure(overhead.Size(requests=60, barrier_requests=20, files=1))
    missing = {timed.HTTP_SEVERAL, timed.OURS_ONE_SERVER} if timed.servers_of(()) == 1 else set()
    missing |= set() if timed.has_rust_front_end() else {timed.HTTP_RUST}
    assert set(rates.rates) == set(overhead.NAMES) - missing
    assert all(seconds > 0 for seconds in rates.front_ends.values())
    assert len(rates.to_naive) == 1
    assert rates.ratio(RUN_BATCH) == 1.0
    assert "| 60 short requests" in overhead.table(rates)


@pytest.mark.slow
@pytest.mark.vllm
def test_hit_rates_on_vllm_stay_under_their_ceilings() -> None:
    size = plan_gain.Size(groups=4, each=4, unshared=12, pairs=1)
    *shared, nothing = plan_gain.measure(size)
    assert [gain.name for gain in shared] == list(plan_gain.kinds(size))
    for gain in shared:
        assert 0 < gain.cached <= gain.ceiling
        assert gain.naive > 0
    assert (nothing.cached, nothing.ceiling) == (0.0, 0.0)
    assert "With nothing shared" in plan_gain.table([*shared, nothing])


@pytest.mark.slow
@pytest.mark.vllm
def test_one_window_and_barriers_run_on_vllm() -> None:
    shares = no_barrier.on_vllm(40, 20)
    assert shares.window_tokens_per_second > 0
    assert shares.naive is not None
    assert shares.naive > 0
    assert list(shares.barriers) == [no_barrier.VLLM_SEQS, 10, 4]


@pytest.mark.slow
@pytest.mark.vllm
async def test_own_caches_find_less_than_a_shared_one_on_vllm() -> None:
    costs = await cache_isolation.measure(rounds=1)
    assert all(cost.own_cached < cost.shared_cached for cost in costs)
    assert costs[-1].own_cached < 0.1
    assert "| about the same 16 documents |" in cache_isolation.table(costs)


@pytest.mark.slow
@pytest.mark.vllm
async def test_users_wait_less_beside_a_batch_that_shares_on_vllm() -> None:
    alone, filling, sharing, promising = await shared_server.measure(seconds=8.0)
    assert alone.batch_rate < 5
    assert sharing.first_p50 < filling.first_p50 / 2
    assert sharing.batch_rate > filling.batch_rate / 4
    assert promising.first_p50 < filling.first_p50 / 2
    assert promising.batch_rate > 0
    table = shared_server.table([alone, filling, sharing, promising])
    assert "| a batch that shares it |" in table
    assert "| one with an objective |" in table


def test_a_batch_in_the_gaps_of_a_live_server_is_simulated() -> None:
    cell = live_gaps.measure_cell(0, seconds=live_gaps.WARM_SECONDS + live_gaps.WINDOW_SECONDS)
    assert cell.windows == cell.held == 1
    assert cell.held_ungated == 0
    alone, ours, ungated = cell.first_p99
    assert alone < ours < 250 < ungated
    assert cell.tokens > 0.5
    assert "**1** / " in live_gaps.table([cell])


def test_two_controllers_on_one_simulated_server_both_get_on() -> None:
    kind = live_gaps.KINDS[0]
    rate = kind.machine.capacity(*live_gaps.CHATS.mean)
    traffic = live_gaps.Traffic.of(random.Random(1), 0.3, rate, 120.0)
    two = [live_gaps.Controlled(kind.machine.seats, kind.objective) for _ in range(2)]
    result = live_gaps.Simulation(kind, traffic, two, seed=1).run(120.0)
    assert all(result.windows)
    assert min(each.sent_ever for each in two) > 0.15 * sum(each.sent_ever for each in two)


@pytest.mark.alone
async def test_the_page_is_timed_on_both_databases() -> None:
    """Every answer has batches in it, or it would not be an answer."""
    found = await batch_list.measure((5_200,), rounds=1)
    assert [each.database for each in found] == ["SQLite", "PostgreSQL"]
    assert all(each > 0 for answers in found for each in answers.milliseconds.values())
    assert "| milliseconds | 5,200 batches, SQLite | 5,200 batches, PostgreSQL |" in (
        batch_list.table(found)
    )


async def test_a_chain_is_timed_and_its_judge_finds_something_in_the_cache() -> None:
    size = chain.Size(lines=40, documents=40, first_seconds=0.01, second_seconds=0.01)
    timed = await chain.measure_time(size)
    assert timed.of_slower > 0
    cached = await chain.measure_cache(size)
    assert 0 < cached.by_files <= cached.chain <= 1
    assert "| a chain | **" in chain.table(timed, cached)


async def test_batches_that_begin_alike_are_simulated_in_every_way() -> None:
    size = shared_roots.Size(documents=4, questions=8, chunk_requests=8, words_each=200)
    found = await shared_roots.measure_simulated(size)
    ways = {(one.way, one.engines, one.tenants) for one in found}
    assert len(ways) == len(found) == 7
    assert all(0 < one.hit_rate <= 1.0001 for one in found)
    assert all(0 <= one.lead <= 1 for one in found)
    assert "| side by side | 2 | 1 |" in shared_roots.simulated_table(found, size)


def test_how_far_one_batch_is_ahead_of_another() -> None:
    assert shared_roots.lead([0, 1, 0, 1], 2) == 0.5
    assert shared_roots.lead([0, 0, 1, 1], 2) == 1.0


@pytest.mark.slow
@pytest.mark.vllm
async def test_batches_that_begin_alike_find_more_in_the_cache_of_vllm_side_by_side() -> None:
    one_file, together, apart = await shared_roots.measure_vllm(
        shared_roots.Size(questions=16), rounds=1
    )
    assert apart.cached < together.cached <= one_file.cached + 0.01


@pytest.mark.slow
def test_what_many_nodes_ask_of_the_database_is_counted() -> None:
    size = many_nodes.Size(nodes=(3,), seconds=10, batches=2, lines=100)
    (load,) = many_nodes.measure(size)
    assert load.nodes == 3
    assert load.connections >= 1
    assert 0.5 < load.share <= 1.3
    assert load.commits > 0
    assert load.lost == 0
