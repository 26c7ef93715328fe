"""Try every mutation of the lists, and print what survived and the score.

::

    python -m tests.mutations                  # all
    python -m tests.mutations epoch leasing    # those with such a word in any of their texts
    python -m tests.mutations --jobs 1

Each is tried in a copy of the working tree, so that nothing happens to yours. The tests that are
to notice run once without any change first: one that fails anyway notices nothing. The exit
status is 0 if nothing survived and nothing was broken.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from tests.mutations.catalogue import read_mutations
from tests.mutations.trial import Outcome, Tree, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.mutations.catalogue import Mutation

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

ROOT = Path(__file__).parents[2]
_MOST_JOBS = 8
_LEAST_LIMIT_SECONDS = 90.0
_LIMIT_TIMES = 4
"""A mutation has so many times as long as its tests take without it."""
_BASELINE_SECONDS = 600.0


class Trees:
    """As many copies of the tree as there are jobs; each is used by one at a time."""

    def __init__(self, folder: Path, jobs: int) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
        self._free: SimpleQueue[Tree] = SimpleQueue()
        self._pool = ThreadPoolExecutor(jobs)
        for number in range(jobs):
            tree = Tree.copy_of(ROOT, folder / str(number), files)
            if not tree.imports("batchyard"):
                sys.exit("the tests of a copy would import the original")
            self._free.put(tree)

    def each(
        self, work: Callable[[Tree, ItemT], ResultT], items: Iterable[ItemT]
    ) -> Iterable[ResultT]:
        """What ``work`` makes of each item, in their order, several at a time."""

        def one(item: ItemT) -> ResultT:
            tree = self._free.get()
            try:
                return work(tree, item)
            finally:
                self._free.put(tree)

        return self._pool.map(one, items)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations with one of these in a text")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, _MOST_JOBS))
    parser.add_argument(
        "--without-postgres", action="store_true", help="leave out what only PostgreSQL shows"
    )
    asked = parser.parse_args(arguments)
    chosen = [one for one in read_mutations() if _is_wanted(one, asked.words)]
    if asked.without_postgres:
        chosen = [one for one in chosen if not one.on_postgres]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees = Trees(Path(folder), asked.jobs)
        seconds = _times(trees, chosen)
        outcomes = []
        for outcome in trees.each(lambda tree, one: _try(tree, one, seconds), chosen):
            outcomes.append(outcome)
            _print(outcome, len(outcomes), len(chosen))
    return _sum_up(outcomes, time.monotonic() - began)


def _is_wanted(mutation: Mutation, words: Sequence[str]) -> bool:
    said = f"{mutation.theme} {mutation.place} {mutation.put} {mutation.breaks}"
    return not words or any(word in said for word in words)


def _times(trees: Trees, mutations: Sequence[Mutation]) -> dict[str, float]:
    """How long each file of tests takes without a change, seconds; without those that fail."""
    wanted: dict[str, set[str]] = {}
    for mutation in mutations:
        for test in mutation.tests:
            wanted.setdefault(test.partition("::")[0], set()).add(test)
    on_postgres = {file for one in mutations if one.on_postgres for file in one.test_files}

    def run(tree: Tree, file: str) -> tuple[str, float, str]:
        tests = [file] if file in wanted[file] else sorted(wanted[file])
        done = tree.run_tests(tests, _BASELINE_SECONDS, on_postgres=file in on_postgres)
        return file, done.seconds, "" if done.status == 0 else done.output

    seconds = {}
    for file, took, failure in trees.each(run, sorted(wanted)):
        if failure:
            print(f"without any change, {file} fails:\n{failure}", flush=True)
        else:
            seconds[file] = took
    print(f"{len(seconds)} files of tests, {sum(seconds.values()):.0f} s", flush=True)
    return seconds


def _try(tree: Tree, mutation: Mutation, seconds: dict[str, float]) -> Outcome:
    failing = mutation.test_files - seconds.keys()
    if failing:
        reason = f"without any change {', '.join(sorted(failing))} fails, too"
        return Outcome(mutation, Verdict.BROKEN, 0.0, reason)
    return tree.judge(mutation, _limit(mutation, seconds))


def _limit(mutation: Mutation, seconds: dict[str, float]) -> float:
    usual = sum(seconds[file] for file in mutation.test_files)
    return max(_LEAST_LIMIT_SECONDS, _LIMIT_TIMES * usual)


def _print(outcome: Outcome, number: int, of: int) -> None:
    mutation = outcome.mutation
    print(
        f"{number:3}/{of} {outcome.verdict:9} {outcome.seconds:5.1f} s  {mutation.place}"
        f"  {outcome.detail or mutation.breaks}",
        flush=True,
    )


def _sum_up(outcomes: Sequence[Outcome], seconds: float) -> int:
    counts = Counter(outcome.verdict for outcome in outcomes)
    for outcome in outcomes:
        if outcome.verdict is Verdict.SURVIVED:
            mutation = outcome.mutation
            print(f"\nsurvived: {mutation.place}, with {mutation.put}\n  {mutation.breaks}")
    noticed = counts[Verdict.KILLED] + counts[Verdict.TIMED_OUT]
    score = 100 * noticed / len(outcomes) if outcomes else 0.0
    print(
        f"\n{noticed} of {len(outcomes)} mutations noticed, {score:.1f} % "
        f"({counts[Verdict.TIMED_OUT]} by their time limit), {counts[Verdict.SURVIVED]} survived, "
        f"{counts[Verdict.BROKEN]} without a verdict; {seconds / 60:.1f} minutes"
    )
    return 0 if outcomes and noticed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
