"""`make bench`: measure everything and write ``docs/benchmarks.md``. About nine minutes."""

from __future__ import annotations

import platform
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import api_load, lifecycle, rss_flat, two_runners
from benchmarks.run_batch_ratio import OVERHEAD, PLAN_GAIN, compare

if TYPE_CHECKING:
    from benchmarks.api_load import ApiLoad
    from benchmarks.lifecycle import Lifecycle
    from benchmarks.rss_flat import Peak
    from benchmarks.run_batch_ratio import Comparison
    from benchmarks.two_runners import Shared

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->"


def main() -> None:
    comparisons = []
    for workload in (OVERHEAD, PLAN_GAIN):
        print(f"{workload.name} …", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            comparisons.append(compare(workload, Path(folder)))
    print("two runners …", flush=True)
    shared = two_runners.measure()
    print("lifecycle …", flush=True)
    small = lifecycle.measure()
    print("API …", flush=True)
    api = api_load.measure()
    print("memory …", flush=True)
    tables = _tables(comparisons, rss_flat.measure(), shared, small, api)
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + tables + END + after)
    print(f"written: {PAGE}")


def _tables(
    comparisons: list[Comparison],
    peaks: list[Peak],
    shared: Shared,
    small: Lifecycle,
    api: ApiLoad,
) -> str:
    cached = 100 * comparisons[1].cached
    lines = [
        f"On {_machine()}.",
        "",
        "| workload | `run_batch`, requests/s | Batchyard, requests/s | ratio | spread |",
        "|---|---|---|---|---|",
        *(
            f"| {c.name} | {c.run_batch:.0f} | {c.ours:.0f} | **{c.ratio:.2f}×** "
            f"| {100 * c.spread:.0f} % |"
            for c in comparisons
        ),
        "",
        f"In the second row {cached:.0f} % of our prompt tokens came from the engine's cache.",
        "",
        "| one batch of 9,600 requests, stub engines | seconds | ratio |",
        "|---|---|---|",
        f"| one runner | {shared.one:.1f} | |",
        f"| two runners | {shared.two:.1f} | **{shared.ratio:.2f}×** |",
        "",
        "| batches of ten lines, `make up`, real vLLM warm | |",
        "|---|---|",
        f"| one alone, from submission to end | **{statistics.median(small.alone):.2f} s** |",
        f"| {lifecycle.TOGETHER} at once | **{small.batches_per_hour:,.0f} an hour** |",
        *(
            f"| processor time of {name}, per batch | {1000 * seconds:.0f} ms |"
            for name, seconds in small.processors.items()
        ),
        "",
        "| the API, one process | | peak memory of the server |",
        "|---|---|---|",
        *_api_rows(api),
        "",
        "| requests | peak resident memory |",
        "|---|---|",
        *(f"| {peak.requests:,} | {peak.mebibytes:.0f} MiB |" for peak in peaks),
        "",
    ]
    return "\n".join(lines)


def _api_rows(api: ApiLoad) -> list[str]:
    upload = f"**{api.ratio:.2f}×** | +{api.upload_growth:.0f} MiB"
    polls = f"{api.polls_per_second:,.0f} a second | +{api.poll_growth:.0f} MiB"
    return [
        f"| upload of 200 MB, throughput over a plain streamed write | {upload} |",
        f"| {api_load.POLLERS} clients that retrieve and list | {polls} |",
    ]


def _machine() -> str:
    cpu = "an unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    cores = sum(1 for row in Path("/proc/cpuinfo").read_text().splitlines() if "processor" in row)
    return f"{cpu}, {cores} cores, no GPU, Python {platform.python_version()}, vLLM 0.32.0 (CPU)"


if __name__ == "__main__":
    main()
