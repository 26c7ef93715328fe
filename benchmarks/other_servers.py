"""Is what Batchyard finds to keep in flight as good as the best fixed number?

``python -m benchmarks.other_servers [NAME …]`` starts servers, one after the other: those of
`make test-engines`, and a vLLM that does not say how many requests it runs at once. Each gets the
same requests through the same window. First fixed numbers in flight, in turns, which says what the
best one is. Then a batch for which nobody says a number, with the search in it, between two of the
best one. Then what was found and the best one in turns; it is searched on. It prints answers per
second, and those with the number that was found as a part of those with the best one at about the
same time, because speeds drift and the best of many is best by chance as well. The servers and the
clients share the machine, so only the ratios within one run mean something.

With ``--scale 0.3`` each part is shorter, for a look.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from batchyard.engine.remote.remote import RemoteEngine
from batchyard.runner.window.window import Window
from batchyard.runner.window.window_request import WindowRequest
from benchmarks.open_engine import OpenEngine
from benchmarks.timed import ENGINE_PYTHON, TINY
from tests.engines.environments import SERVERS, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from batchyard.results.results import ResultLine

ROUNDS: Final = 3
PAIRS: Final = 6
_VLLM: Final = "vLLM"
_WARM_SECONDS: Final = 1.5
"""At the beginning of each part nothing is counted: a server that others may use is looked at
first, and its requests follow one another."""
_CHAT, _EMBED = "/v1/chat/completions", "/v1/embeddings"
_MOST_TOKENS: Final = (8, 32, 16)
"""Answers of several lengths, in turns."""
_WORDS: Final = ["the", "weather", "in", "the", "north", "is", "cold", "and", "wet", "today"]


class Case(NamedTuple):
    """``fixed``: the numbers to compare with, for ``seconds`` each."""

    path: str
    fixed: tuple[int, ...]
    seconds: float
    found_seconds: float


_MANY: Final = (1, 4, 8, 16, 32, 64, 128, 256)
_FEW: Final = (1, 2, 4, 8, 16)
"""Of a server that runs one after the other, what waits in it would have to be waited for."""
_ALL: Final = sorted({*_MANY, *_FEW})
CASES: Final = {
    "infinity": Case(_EMBED, _MANY, 5.0, 150.0),
    "llama-cpp-python": Case(_CHAT, _FEW, 4.0, 80.0),
    "transformers-serve": Case(_CHAT, _FEW, 5.0, 80.0),
    _VLLM: Case(_CHAT, _MANY, 5.0, 150.0),
}


class _Fixed(RemoteEngine):
    """One with a number that somebody says."""

    number = 1

    @property
    def window_size(self) -> int:
        return self.number


class _Counter:
    """What came of requests, and when."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.answered: list[float] = []
        self.numbers: Counter[int] = Counter()
        """The numbers in flight that were allowed, by how many answers."""

    def rate(self, start: float, end: float) -> float:
        """Answers per second between two moments after the beginning."""
        return sum(start <= at < end for at in self.answered) / (end - start)


async def _send(engine: RemoteEngine, case: Case, seconds: float) -> _Counter:
    """Send requests for so long, and wait for those that are left."""
    async with Window(engine, timeout_seconds=600, hang_seconds=600) as window:
        counter = _Counter()

        def deliver(_: int, result: ResultLine) -> None:
            at = time.monotonic() - counter.began
            assert result.engine_status == 200, result
            counter.answered.append(at)
            counter.numbers[window.limit] += 1

        for ordinal in itertools.count():
            if time.monotonic() - counter.began > seconds:
                break
            body = _body(engine.model, case.path, ordinal)
            request = WindowRequest(ordinal, str(ordinal), case.path, body, deliver, owner="bench")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await window.submit(request)
        await window.withdraw("bench", abort=False)
    return counter


def _body(model: str, path: str, ordinal: int) -> bytes:
    words = " ".join(_WORDS[(ordinal + place) % len(_WORDS)] for place in range(20))
    text = f"{ordinal} {words}"
    if path == _EMBED:
        return json.dumps({"model": model, "input": text}).encode()
    limit = _MOST_TOKENS[ordinal % len(_MOST_TOKENS)]
    message = {"role": "user", "content": text}
    return json.dumps({"model": model, "messages": [message], "max_tokens": limit}).encode()


async def _compare(name: str, url: str, model: str, scale: float) -> str:
    case = CASES[name]
    fixed = _Fixed(url, model, exclusive=True)
    found = RemoteEngine(url, model)
    await fixed.start()
    await found.start()
    await _send(fixed, case, 2.0)
    whole, seconds = scale * case.found_seconds, max(2 * _WARM_SECONDS, scale * case.seconds)

    async def rate(engine: RemoteEngine, seconds: float) -> float:
        return (await _send(engine, case, seconds)).rate(_WARM_SECONDS, seconds)

    speeds: dict[int, list[float]] = {number: [] for number in case.fixed}
    for _ in range(ROUNDS):
        for fixed.number, seen in speeds.items():
            seen.append(await rate(fixed, seconds))
    median = {number: statistics.median(seen) for number, seen in speeds.items()}
    fixed.number = best = max(median, key=median.__getitem__)

    beside = [await rate(fixed, whole / 4)]
    run = (await _send(found, case, whole)).rate(0, whole)
    beside.append(await rate(fixed, whole / 4))

    numbers: Counter[int] = Counter()
    of_best, of_found = [], []
    for _ in range(PAIRS):
        of_best.append(await rate(fixed, 3 * seconds))
        counter = await _send(found, case, 3 * seconds)
        of_found.append(counter.rate(_WARM_SECONDS, 3 * seconds))
        numbers += counter.numbers
    await found.stop()
    await fixed.stop()
    ((number, _),) = numbers.most_common(1)
    cells = [f"{median[each]:.0f}" if each in median else "" for each in _ALL]
    cells += [f"{run:.0f}", f"{run / statistics.mean(beside):.2f} of {best}"]
    cells += [f"{statistics.median(of_found):.0f} with {number}"]
    part = statistics.median(of_found) / statistics.median(of_best)
    return f"| {name} | {' | '.join([*cells, f'{part:.2f}'])} |"


@contextlib.asynccontextmanager
async def _served(name: str, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """URL and model of a server that runs."""
    if name != _VLLM:
        with running(name, folder) as url:
            yield url, SERVERS[name].model
        return
    options = ["--max-model-len", "2048", "--enforce-eager"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    engine = OpenEngine(
        "tiny-chat", options, python=ENGINE_PYTHON, weights=TINY, environment=environment
    )
    await engine.start()
    try:
        yield engine.url, engine.model
    finally:
        await engine.stop()


async def _measure(name: str, scale: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with _served(name, Path(folder)) as (url, model):
            print(await _compare(name, url, model, scale), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--scale", type=float, default=1.0, help="of the time of each part")
    given = parser.parse_args()
    heads = ["server", *map(str, _ALL), "whole run", "of the best", "then", "of the best"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|", flush=True)
    for name in given.names:
        asyncio.run(_measure(name, given.scale))


if __name__ == "__main__":
    main()
