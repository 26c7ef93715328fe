"""`make bench-gpu`: refuses what it cannot measure, and writes its page. Tests have no GPU."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import gpu, no_barrier, overhead, page, plan_gain, timed
from benchmarks.timed import Job, Timed
from tests.pages import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = gpu.Size(
    plan_gain.Size(groups=4, each=4, unshared=12, pairs=1),
    overhead.Size(requests=60, barrier_requests=20, files=1),
    sequences=16,
    tail=40,
    part=20,
)


FACTS = {"vllm": "0.32.0", "torch": "2.13.0", "device": "NVIDIA X", "tokens": 400.0}


def test_the_page_has_a_place_for_the_tables() -> None:
    assert page.sections(page.GPU_PAGE.read_text()) == ["gpu"]


@pytest.mark.parametrize("words", [[], ["/no/such/model"], [str(ROOT / "docs")]])
def test_without_a_model_nothing_is_measured(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "page.md"
    shutil.copy(page.GPU_PAGE, kept)
    assert gpu.main([*words, "--page", str(kept)]) == 2
    assert "MODEL" in capsys.readouterr().err
    assert kept.read_text() == page.GPU_PAGE.read_text()


def test_without_an_engine_environment_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(timed, "ENGINE_PYTHON", tmp_path / "bin" / "python")
    with pytest.raises(gpu.Refused, match="make setup DEVICE=cuda"):
        gpu.check(str(tmp_path))


def test_the_command_of_the_page_is_the_make_files() -> None:
    """As far as one can see without running it: its model goes to the program as one word."""
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", "bench-gpu"]
    command += ["MODEL=/a model", "ARGS=--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert '.venv/bin/python -m benchmarks.gpu "/a model" --short' in done.stdout.splitlines()


def test_every_engine_has_the_model_that_is_given_and_a_cache_for_a_third_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is put into the text is not measured here: engines would take minutes."""
    engines: list[Sequence[str]] = []

    def run(jobs: Sequence[Job], options: Sequence[str], *, warm_up: str) -> list[Timed]:
        assert Path(warm_up).is_file()
        engines.append(options)
        return [Timed(job, 1.0, 10, 10, 100, 50) for job in jobs]

    for module in (plan_gain, no_barrier, overhead):
        monkeypatch.setattr(module, "run_jobs", run)

    monkeypatch.setattr(plan_gain, "cache_ceilings", lambda files, **_: [0.5] * len(files))
    monkeypatch.setattr(timed, "facts_of", lambda *_: FACTS)
    text = "\n".join(gpu.measure(timed.TINY, size=gpu.WHOLE))
    assert "tiny-chat with vLLM 0.32.0 and PyTorch 2.13.0 on NVIDIA X; " in text
    assert gpu.NOT_MEASURED not in text
    assert len(engines) == 3
    assert {each[each.index("--model") + 1] for each in engines} == {timed.TINY}
    blocks = int(engines[0][engines[0].index("--num-gpu-blocks-override") + 1])
    assert blocks * plan_gain.BLOCK_SIZE == pytest.approx(32 * 400 / 3, rel=0.05)


def test_options_that_are_swept_reach_every_engine_after_its_own_and_are_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes the last of two, so one that the benchmark sets itself can be swept too."""
    swept = ["--max-num-batched-tokens", "16384", "--speculative-config", '{"method": "ngram"}']
    engines: list[Sequence[str]] = []

    def run(jobs: Sequence[Job], options: Sequence[str], *, warm_up: str) -> list[Timed]:
        engines.append(options)
        return [Timed(job, 1.0, 10, 10, 100, 50) for job in jobs]

    for module in (plan_gain, no_barrier, overhead):
        monkeypatch.setattr(module, "run_jobs", run)
    monkeypatch.setattr(plan_gain, "cache_ceilings", lambda files, **_: [0.5] * len(files))
    monkeypatch.setattr(timed, "facts_of", lambda *_: FACTS)
    kept = tmp_path / "page.md"
    shutil.copy(page.GPU_PAGE, kept)
    words = ["--short", f"--engine-options={shlex.join(swept)}"]
    assert gpu.main([timed.TINY, "--page", str(kept), *words]) == 0
    assert [list(each[-len(swept) :]) for each in engines] == [swept] * 3
    assert f"Every engine has `{shlex.join(swept)}`." in kept.read_text()


def test_a_table_that_cannot_be_measured_says_why_and_costs_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> list[plan_gain.Gain]:
        raise SystemExit("run_batch did not do all the work")

    def interrupt(*_: object, **__: object) -> list[plan_gain.Gain]:
        raise KeyboardInterrupt

    rates = overhead.Rates(60, {timed.RUN_BATCH: 100.0, timed.OURS: 150.0}, {})
    rates.spreads.update(dict.fromkeys(rates.rates, 0.1))
    monkeypatch.setattr(timed, "facts_of", lambda *_: FACTS)
    monkeypatch.setattr(plan_gain, "measure", fail)
    monkeypatch.setattr(overhead, "measure", lambda *_, **__: rates)
    monkeypatch.setattr(no_barrier, "on_vllm", interrupt)
    kept = tmp_path / "page.md"
    shutil.copy(page.GPU_PAGE, kept)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([timed.TINY, "--page", str(kept)])
    written = kept.read_text()
    assert f"{gpu.NOT_MEASURED} run_batch did not do all the work" in written
    assert "| Batchyard | 150 | **1.50×** | 10 % |" in written
    monkeypatch.setattr(no_barrier, "on_vllm", fail)
    assert gpu.main([timed.TINY, "--page", str(kept)]) == 1


@pytest.mark.slow
@pytest.mark.vllm
def test_without_a_gpu_nothing_is_measured() -> None:
    with pytest.raises(gpu.Refused, match="sees no GPU"):
        next(gpu.measure(timed.TINY, size=SMALL))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_small_size_runs_on_the_cpu_and_is_written(tmp_path: Path) -> None:
    text = "\n\n".join(gpu.measure(timed.TINY, on_cpu=True, size=SMALL))
    kept = tmp_path / "page.md"
    shutil.copy(page.GPU_PAGE, kept)
    page.write("gpu", text, kept)
    written = kept.read_text()
    assert re.search(
        r"tiny-chat with vLLM \d\S+ and PyTorch \d\S+ on the CPU, and no GPU; \d+ cores of ",
        written,
    )
    headings = ("B1: the order", "B2: no barrier", "B3: overhead")
    for heading in headings:
        assert f"## {heading}" in written
    assert "| questions on documents |" in written
    assert "| 60 short requests |" in written
