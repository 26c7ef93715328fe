"""`make bench`: measure everything and write ``docs/benchmarks.md``. About half an hour.

``python -m benchmarks NAME …`` measures some of it; what is measured is written at once, and what
fails leaves its rows as they were.
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from typing import TYPE_CHECKING

from benchmarks import (
    api_load,
    batch_list,
    cache_isolation,
    chain,
    eviction,
    lengths,
    lifecycle,
    live_gaps,
    million,
    no_barrier,
    other_tools,
    overhead,
    page,
    plan_gain,
    plan_speed,
    rss_flat,
    same_answers,
    shared_roots,
    shared_server,
    turns,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def lifecycle_section() -> str:
    """Measure, and return what the page is to say."""
    found = lifecycle.measure()
    return "\n".join(
        [
            "| batches of ten lines, `make up`, real vLLM warm | |",
            "|---|---|",
            f"| one alone, from submission to end | **{statistics.median(found.alone):.2f} s** |",
            f"| … to the arrival of its webhook | **{statistics.median(found.told):.2f} s** |",
            f"| {lifecycle.TOGETHER} at once | **{found.batches_per_hour:,.0f} an hour** |",
            *(
                f"| processor time of {name}, per batch | {1000 * seconds:.0f} ms |"
                for name, seconds in found.processors.items()
            ),
        ]
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "machine": page.machine,
    "plan_gain": plan_gain.section,
    "no_barrier": no_barrier.section,
    "overhead": overhead.section,
    "other_tools": other_tools.section,
    "rss_flat": rss_flat.section,
    "plan_speed": plan_speed.section,
    "lifecycle": lifecycle_section,
    "eviction": eviction.section,
    "cache_isolation": cache_isolation.section,
    "shared_server": shared_server.section,
    "live_gaps": live_gaps.section,
    "million": million.section,
    "same_answers": same_answers.section,
    "turns": turns.section,
    "lengths": lengths.section,
    "shared_roots": shared_roots.section,
    "chain": chain.section,
    "api_load": api_load.section,
    "batch_list": batch_list.section,
}
"""In the order of the page."""


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in SECTIONS]:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
        return 2
    failed = []
    for name in names or SECTIONS:
        began = time.monotonic()
        print(f"{name} …", end=" ", flush=True)
        try:
            page.write(name, SECTIONS[name]())
        except (Exception, SystemExit):  # noqa: BLE001 - whatever it is, the others go on
            traceback.print_exc()
            failed.append(name)
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    print(f"written: {page.PAGE}")
    if failed:
        print(f"failed, to be measured again: python -m benchmarks {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
