"""Large inputs are read by a process: what it finds, and what becomes of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from batchyard.engine.prompt_counting.counter import CounterProgram
from batchyard.errors import InputNotRead, StorageUnavailable
from batchyard.lifecycle import BatchStatus
from batchyard.lines.rules import Rules
from batchyard.plan.lengths import LengthHistory
from batchyard.steps.prepare import prepare, reader_process
from batchyard.steps.prepare.deep_validation import DeepFindings
from batchyard.steps.prepare.input_reader import Check, ReadingJob, WritePlan
from batchyard.steps.prepare.reader_process import input_reader
from batchyard.wire import RequestCounts
from tests.patience import PATIENCE
from tests.steps.conftest import Yard, chat_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchyard.steps.prepare.input_reader import Validated
    from batchyard.steps.prepare.reader_process import Reader

ROOT = Path(__file__).parents[2]
CHECK = Check(Rules(endpoint=None), None)
PLAN = WritePlan(LengthHistory(), b"key", "salt")
GOOD: list[Any] = [chat_line(f"line-{number}", f"{number % 3} times") for number in range(20)]
BAD: list[Any] = [*GOOD, {"custom_id": "b", "method": "GET"}, GOOD[0], "no object"]
PARENT = """
import asyncio, sys
from pathlib import Path
from batchyard.steps.prepare import reader_process
from tests.steps.test_reader_process import CHECK, job, pid_of

async def main():
    reader_process._PROCESS_BYTES = -1
    async with reader_process.input_reader(job(Path(sys.argv[1])), "acme") as reader:
        checking = asyncio.create_task(reader.check(CHECK))
        print(await pid_of(reader), flush=True)
        await checking

asyncio.run(main())
"""

COUNTING = """
import json, os
def answers(requests):
    next(requests)
    yield True, json.dumps({"max_model_len": 64}).encode()
    for request in requests:
        tokens = 3 if os.environ["TOKEN"] == "secret" else None
        yield True, json.dumps([[tokens, tokens, True, []] for _ in json.loads(request)]).encode()
"""
"""Counts 3 for every line."""


class Ends:
    """An order that ends the process that takes it."""

    def __init__(self, call: Callable[[int], object], argument: int) -> None:
        self._order = call, (argument,)

    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        return self._order


KILLED = cast("Check", Ends(signal.raise_signal, signal.SIGKILL))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input is read by a process, which is started again at once."""
    monkeypatch.setattr(reader_process, "_PROCESS_BYTES", -1)
    monkeypatch.setattr(reader_process, "_AGAIN_AFTER_SECONDS", (0.0, 0.0))


def job(folder: Path, lines: list[Any] | None = None, *, leaves_out: bool = False) -> ReadingJob:
    """To read these lines, or a pipe into which nobody writes."""
    path = folder / "input"
    if lines is None:
        os.mkfifo(path)
    else:
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ReadingJob(
        batch_id="batch_1",
        input_path=path,
        folder=folder,
        parts=(),
        leaves_out=leaves_out,
        order="prefix",
        chunk_requests=10,
        deduplicates=False,
    )


async def pid_of(reader: Reader) -> int:
    """Of the reader's process, once it has one."""
    while (process := reader._process) is None:  # type: ignore[attr-defined] # noqa: ASYNC110 - a test
        await asyncio.sleep(0.01)
    return int(process._process.pid)


def is_there(pid: int) -> bool:
    """Whether the process runs; one that has ended may be a zombie of whoever adopts orphans."""
    try:
        return " Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:2]
    except OSError:
        return False


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


async def everything_of(reading: ReadingJob) -> tuple[Validated, object, bytes, bytes]:
    """What a reader finds, its plan, and the bytes of both of its files."""
    async with input_reader(reading, "acme") as reader:
        found = await reader.check(CHECK)
        plan = await reader.write_plan(PLAN)
    left_out = b"" if found.left_out is None else found.left_out.path.read_bytes()
    return found, plan, (reading.folder / "plan").read_bytes(), left_out


@pytest.mark.parametrize(
    ("lines", "leaves_out"), [(GOOD, False), (BAD, False), (BAD, True)], ids=["good", "bad", "left"]
)
async def test_a_process_finds_and_writes_what_a_thread_does(
    tmp_path: Path, request: pytest.FixtureRequest, lines: list[Any], leaves_out: bool
) -> None:
    reading = job(tmp_path, lines, leaves_out=leaves_out)
    by_thread = await everything_of(reading)
    request.getfixturevalue("in_process")
    assert await everything_of(reading) == by_thread
    assert bool(by_thread[0].refusal) is (lines is BAD and not leaves_out)


async def test_lines_may_be_checked_again_by_other_rules(tmp_path: Path, in_process: None) -> None:
    async with input_reader(job(tmp_path, GOOD), "acme") as reader:
        assert not (await reader.check(CHECK)).refusal
        pid = await pid_of(reader)
        other = replace(CHECK.rules, models=frozenset({"another"}))
        found = await reader.check(Check(other, None))
        assert len(found.refusal) == len(GOOD)
        assert await pid_of(reader) == pid


async def test_a_process_that_is_killed_before_the_plan_reads_the_input_again(
    tmp_path: Path, in_process: None
) -> None:
    reading = job(tmp_path, GOOD)
    *_, plan, _ = await everything_of(reading)
    async with input_reader(reading, "acme") as reader:
        await reader.check(CHECK)
        os.kill(await pid_of(reader), signal.SIGKILL)
        await reader.write_plan(PLAN)
    assert (tmp_path / "plan").read_bytes() == plan


async def test_the_third_end_of_the_process_is_an_error_of_its_batch(
    tmp_path: Path, in_process: None
) -> None:
    async with input_reader(job(tmp_path, GOOD), "acme") as reader:
        with pytest.raises(InputNotRead, match="ended three times, at last by SIGKILL"):
            await reader.check(KILLED)
        # Not a fourth time, also for another order.
        with pytest.raises(InputNotRead, match="with exit status 7"):
            await reader.check(cast("Check", Ends(os._exit, 7)))


async def test_a_process_counts_prompts_for_a_deep_validation(
    tmp_path: Path, in_process: None
) -> None:
    counting, python = tmp_path / "counting.py", tmp_path / "python"
    counting.write_text(COUNTING)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} $1 {counting} '{{}}'\n")
    python.chmod(0o700)
    program = CounterProgram(python, {"TOKEN": "secret"}, {"model": "tiny"})
    async with input_reader(job(tmp_path, GOOD), "acme") as reader:
        found = await reader.check(Check(CHECK.rules, program))
    assert found.deep == DeepFindings(3 * len(GOOD), len(GOOD), max_model_len=64)


async def test_a_batch_waits_while_no_process_can_be_started(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    async with input_reader(job(tmp_path, GOOD), "acme") as reader:
        with pytest.raises(StorageUnavailable, match="no process can be started"):
            await reader.check(CHECK)
        monkeypatch.undo()
        assert (await reader.check(CHECK)).requests == len(GOOD)


@pytest.mark.parametrize("process_bytes", [-1, 10**9], ids=["process", "thread"])
async def test_a_plan_that_found_the_disk_full_is_written_whole_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_bytes: int
) -> None:
    monkeypatch.setattr(reader_process, "_PROCESS_BYTES", process_bytes)
    reading = job(tmp_path, GOOD)
    *_, plan, _ = await everything_of(reading)
    path = tmp_path / "plan"
    path.unlink()
    path.symlink_to("/dev/full")
    async with input_reader(reading, "acme") as reader:
        await reader.check(CHECK)
        with pytest.raises(OSError, match="No space left"):
            await reader.write_plan(PLAN)
        path.unlink()
        await reader.write_plan(PLAN)
    assert path.read_bytes() == plan


async def test_a_cancelled_check_leaves_no_process(tmp_path: Path, in_process: None) -> None:
    async def check() -> None:
        async with input_reader(job(tmp_path), "acme") as reader:
            readers.append(reader)
            await reader.check(CHECK)

    readers: list[Reader] = []
    checking = asyncio.create_task(check())
    while not readers:  # noqa: ASYNC110 - a task fills it
        await asyncio.sleep(0.01)
    pid = await pid_of(readers[0])
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert not is_there(pid)


async def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_there(pid)
    parent.kill()
    await parent.wait()
    until = time.monotonic() + PATIENCE * 30
    try:
        while is_there(pid):
            assert time.monotonic() < until
            await asyncio.sleep(0.02)
    finally:
        if is_there(pid):
            os.kill(pid, signal.SIGKILL)


async def test_a_process_has_a_low_priority_and_no_secrets(
    tmp_path: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHYARD_SECRET_KEY", "hunter2")
    async with input_reader(job(tmp_path, GOOD), "acme") as reader:
        await reader.check(CHECK)
        pid = await pid_of(reader)
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
        assert "BATCHYARD_SECRET_KEY" not in environment_of(pid)


async def test_signals_for_all_processes_leave_it_to_its_parent(
    tmp_path: Path, in_process: None
) -> None:
    async with input_reader(job(tmp_path, GOOD), "acme") as reader:
        await reader.check(CHECK)
        pid = await pid_of(reader)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        await reader.write_plan(PLAN)
        assert await pid_of(reader) == pid


async def test_a_batch_whose_input_a_process_reads_runs(yard: Yard, in_process: None) -> None:
    batch = await yard.run(BAD, on_invalid="error_file")
    assert batch.status is BatchStatus.COMPLETED
    assert batch.counts == RequestCounts(len(BAD), len(GOOD), len(BAD) - len(GOOD))
    assert not list(yard.services.spool.glob("plan-*"))


async def test_a_batch_fails_whose_process_is_killed_three_times(
    yard: Yard, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "Check", lambda *_: KILLED)
    batch = await yard.run(GOOD)
    assert batch.status is BatchStatus.FAILED
    assert batch.errors is not None
    assert [each.code for each in batch.errors] == ["input_not_read"]
    assert not list(yard.services.spool.glob("plan-*"))
