"""The page that the exporter serves: what flow runs have published, and what their engines say."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.metrics import metric_families as families
from batchyard.metrics.exporter.scrape import scrape
from batchyard.metrics.exporter.text import MergedPage
from batchyard.metrics.metric_families import FAMILIES, Family, Kind
from batchyard.metrics.published import published

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchyard.metrics.exporter.text import Sample
    from batchyard.metrics.published import Published

_LOADING, _READY, _FREE = "loading", "ready", "free"


@dataclass(slots=True)
class Samples:
    """What is known of each metric of ours."""

    of: dict[Family, list[Sample]] = field(default_factory=lambda: {each: [] for each in FAMILIES})

    def add(
        self, family: Family, labels: Mapping[str, str], value: float, suffix: str = ""
    ) -> None:
        """Add one sample; ``suffix`` follows the name of the metric."""
        self.of[family].append((suffix, labels, value))


async def make_page(folder: Path, slots: Sequence[str], worker: Mapping[str, str]) -> str:
    """The page of a worker with these engine slots, whose flow runs publish in ``folder``.

    ``worker``: the labels that describe it.
    """
    found = list(published(folder))
    samples = Samples()
    samples.add(families.WORKER, worker, 1)
    _add_slots(samples, slots, [each for each, is_running in found if is_running])
    for each, is_running in found:
        _add_figures(samples, each, is_running=is_running)
    engines = [
        (each.labels, each.figures.socket)
        for each, is_running in found
        if is_running and each.figures.socket is not None
    ]
    pages = await asyncio.gather(*(scrape(Path(socket)) for _, socket in engines))
    page = MergedPage()
    for (labels, _), text in zip(engines, pages, strict=True):
        _add_engine(page, samples, labels, text)
    for family, its_samples in samples.of.items():
        page.put(family, its_samples)
    return str(page)


def _add_slots(samples: Samples, slots: Sequence[str], running: Sequence[Published]) -> None:
    """How many slots are in which state; nothing for a worker without slots."""
    if not slots:
        return
    states = dict.fromkeys(slots, _FREE)
    for each in running:
        if (slot := each.labels.get("engine")) in states:
            is_ready = each.figures.gauges.get(families.READY.name)
            states[slot] = _READY if is_ready else _LOADING
    for state in (_FREE, _LOADING, _READY):
        samples.add(families.SLOTS, {"state": state}, [*states.values()].count(state))


def _add_figures(samples: Samples, each: Published, *, is_running: bool) -> None:
    for family in FAMILIES:
        if family.kind is Kind.GAUGE and family.label:
            parts = each.figures.parts.get(family.name, {}) if is_running else {}
            for label, part in parts.items():
                samples.add(family, each.labels | {family.label: label}, part)
        elif family.kind is Kind.GAUGE:
            value = each.figures.gauges.get(family.name)
            if is_running and value is not None:
                samples.add(family, each.labels, value)
        elif family.kind is Kind.HISTOGRAM:
            for suffix, labels, value in _histogram(each.figures.counters.get(family.name, {})):
                samples.add(family, {**each.labels, **labels}, value, suffix)
        else:
            for label, value in each.figures.counters.get(family.name, {}).items():
                samples.add(family, each.labels | {family.label: label}, value)


def _histogram(numbers: Mapping[str, float]) -> Iterator[Sample]:
    """The samples of a histogram; ``numbers`` has the count of each bucket, and their sum."""
    bounds = sorted(numbers.keys() - {families.SUM}, key=float)
    if not bounds:
        return
    totals = list(itertools.accumulate(numbers[bound] for bound in bounds))
    for bound, total in zip(bounds, totals, strict=True):
        yield "_bucket", {"le": bound}, total
    yield "_sum", {}, numbers.get(families.SUM, 0.0)
    yield "_count", {}, totals[-1]


def _add_engine(
    page: MergedPage, samples: Samples, labels: Mapping[str, str], text: str | None
) -> None:
    """Add the engine's own page; its own labels may be named ``model`` and ``engine``."""
    if text is not None:
        added = page.add(text, {f"batchyard_{name}": value for name, value in labels.items()})
        samples.add(families.SCRAPE_REFUSED, labels, added.refused)
    is_ok = text is not None and added.samples > 0
    samples.add(families.SCRAPE_OK, labels, int(is_ok))
