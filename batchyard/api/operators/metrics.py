"""What ``/metrics`` says of all batches, in Prometheus' text format.

Every process of the API answers with the same figures, because they are the database's: add up
none of them over processes. No label names a tenant, a batch, a place or a request. Model names
are those that a runner has served, or whose engines have hours; what else tenants write into their
files counts as ``other``, so that they cannot make more and more series.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from batchyard import __version__
from batchyard.dispatch import RECONCILER_LEASE
from batchyard.lifecycle import TERMINAL
from batchyard.store.figures import DURATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from batchyard.store.figures import EndedBatches, Figures, OpenBatches

OTHER_MODEL: Final = "other"

_TOKENS: Final = {
    "prompt": "input_tokens",
    "cached": "cached_tokens",
    "completion": "output_tokens",
}
"""The tokens of each kind, as the label says; cached ones are among those of the prompt."""


def metrics_page(figures: Figures | None) -> bytes:
    """The page; ``figures`` None: the database does not answer, which is all that is known."""
    registry = CollectorRegistry()
    registry.register(_Collector(figures))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, figures: Figures | None) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        return families_of(self._figures)


def families_of(figures: Figures | None) -> Iterator[Metric]:
    """Each metric with its samples. ``figures`` None: the database does not answer."""
    yield InfoMetricFamily(
        "batchyard_build", "The version of this process.", value={"version": __version__}
    )
    yield GaugeMetricFamily(
        "batchyard_database_up",
        "1 if this process can read the database.",
        value=float(figures is not None),
    )
    if figures is not None:
        yield from _families(figures)


def _families(figures: Figures) -> Iterator[Metric]:
    model = _model_label(figures.known_models)
    yield _batches(figures)
    yield from _open_batches(figures.open, model)
    yield _batch_seconds(figures.ended)
    yield from _backlog(figures, model)
    yield _lines([*figures.ended, *figures.open], model)
    yield _tokens([*figures.ended, *figures.open], model)
    yield _filled(
        GaugeMetricFamily(
            "batchyard_hours_closed",
            "1 for a model whose batches wait for the hours of its engine.",
            labels=("model",),
        ),
        {(name,): 1.0 for name in figures.closed_models},
    )
    yield _runners(figures, model)
    yield from _deliveries(figures)
    yield GaugeMetricFamily(
        "batchyard_reconciler_up",
        "1 while a reconciler works: it schedules runners and takes over what was lost.",
        value=float(RECONCILER_LEASE in figures.held_leases),
    )


def _model_label(known: frozenset[str]) -> Callable[[str | None], str]:
    return lambda name: name if name in known and name is not None else OTHER_MODEL


def _batches(figures: Figures) -> Metric:
    family = GaugeMetricFamily(
        "batchyard_batches",
        "Batches, also those that have ended, by status and endpoint.",
        labels=("status", "endpoint"),
    )
    counts: Counter[tuple[str, str]] = Counter()
    batches: list[EndedBatches | OpenBatches] = [*figures.ended, *figures.open]
    for each in batches:
        counts[each.status.value, each.endpoint] += each.count
    return _filled(family, counts)


def _open_batches(
    batches: list[OpenBatches], model: Callable[[str | None], str]
) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "batchyard_batches_paused",
        "Batches in progress that are paused.",
        value=sum(each.paused for each in batches),
    )
    yield GaugeMetricFamily(
        "batchyard_batches_late",
        "Batches in progress whose forecast end is after their completion window.",
        value=sum(each.at_risk for each in batches),
    )
    slack = GaugeMetricFamily(
        "batchyard_deadline_slack_seconds",
        "The least time from the forecast end of a batch to the end of its window; negative: late.",
        labels=("model",),
    )
    waits = GaugeMetricFamily(
        "batchyard_queue_wait_seconds",
        "How long the oldest batch without a started request has waited, without paused and"
        " background ones.",
        labels=("model",),
    )
    least: dict[tuple[str], float] = {}
    longest: dict[tuple[str], float] = {}
    for each in batches:
        key = (model(each.model),)
        if each.slack_seconds is not None:
            least[key] = min(each.slack_seconds, least.get(key, each.slack_seconds))
        longest[key] = max(each.waiting_seconds or 0.0, longest.get(key, 0.0))
    yield _filled(slack, least)
    yield _filled(waits, longest)


def _batch_seconds(ended: list[EndedBatches]) -> Metric:
    family = HistogramMetricFamily(
        "batchyard_batch_seconds",
        "Time from the creation of a batch to its end.",
        labels=("status",),
    )
    # All of them from the start: of a counter that comes later Prometheus takes the first value for
    # no increase, so the first batches that fail would raise no alert.
    by_status: dict[str, list[EndedBatches]] = {status.value: [] for status in TERMINAL}
    for each in ended:
        by_status[each.status.value].append(each)
    for status, group in sorted(by_status.items()):
        within = [sum(each.within[i] for each in group) for i in range(len(DURATIONS))]
        buckets = [(f"{limit:.1f}", float(n)) for limit, n in zip(DURATIONS, within, strict=True)]
        buckets.append(("+Inf", float(sum(each.count for each in group))))
        family.add_metric((status,), buckets, sum(each.seconds for each in group))
    return family


def _backlog(figures: Figures, model: Callable[[str | None], str]) -> Iterator[Metric]:
    requests: Counter[tuple[str]] = Counter()
    tokens: defaultdict[tuple[str], float] = defaultdict(float)
    chunks: Counter[tuple[str, str]] = Counter()
    for each in figures.backlog:
        name = model(each.model)
        requests[(name,)] += each.requests
        tokens[(name,)] += each.tokens
        chunks[name, "waiting"] += each.free_chunks
        chunks[name, "running"] += each.leased_chunks
    yield _filled(
        GaugeMetricFamily(
            "batchyard_backlog_requests",
            "Requests without an answer, also those that run; paused batches left out.",
            labels=("model",),
        ),
        requests,
    )
    yield _filled(
        GaugeMetricFamily(
            "batchyard_backlog_tokens",
            "Tokens, estimated, of the requests of batchyard_backlog_requests.",
            labels=("model",),
        ),
        tokens,
    )
    yield _filled(
        GaugeMetricFamily(
            "batchyard_chunks",
            "Chunks that are not done: they run, or wait for a runner.",
            labels=("model", "state"),
        ),
        chunks,
    )


def _lines(
    batches: Iterable[EndedBatches | OpenBatches], model: Callable[[str | None], str]
) -> Metric:
    family = CounterMetricFamily(
        "batchyard_lines",
        "Lines with an answer (completed) or an error (failed).",
        labels=("model", "endpoint", "outcome"),
    )
    counts: Counter[tuple[str, str, str]] = Counter()
    for each in batches:
        for outcome in ("completed", "failed"):
            counts[model(each.model), each.endpoint, outcome] += each.sums[outcome]
    return _filled(family, counts)


def _tokens(
    batches: Iterable[EndedBatches | OpenBatches], model: Callable[[str | None], str]
) -> Metric:
    family = CounterMetricFamily(
        "batchyard_tokens",
        "Tokens of prompts, those of them that were in the engine's cache, and of answers.",
        labels=("model", "kind"),
    )
    counts: Counter[tuple[str, str]] = Counter()
    for each in batches:
        for kind, column in _TOKENS.items():
            counts[model(each.model), kind] += each.sums[column]
    return _filled(family, counts)


def _runners(figures: Figures, model: Callable[[str | None], str]) -> Metric:
    family = GaugeMetricFamily(
        "batchyard_runners",
        "Processes that run batches through their steps (batches) or in an engine (chunks).",
        labels=("kind", "model", "status"),
    )
    counts: Counter[tuple[str, str, str]] = Counter()
    for (kind, name, status), count in figures.runners.items():
        counts[kind, "" if name is None else model(name), status] += count
    return _filled(family, counts)


def _deliveries(figures: Figures) -> Iterator[Metric]:
    yield _filled(
        GaugeMetricFamily(
            "batchyard_deliveries",
            "Webhooks, e-mails and files, as long as they are kept after their end.",
            labels=("kind", "status"),
        ),
        figures.deliveries,
    )
    yield GaugeMetricFamily(
        "batchyard_deliveries_due", "Deliveries that are due now.", value=figures.deliveries_due
    )
    yield GaugeMetricFamily(
        "batchyard_delivery_delay_seconds",
        "For how long the oldest due delivery has been due.",
        value=figures.due_seconds,
    )


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[Any, float]) -> Metric:
    """``values`` by the values of the labels, in their order."""
    for labels, value in sorted(values.items()):
        family.add_metric(labels, value)
    return family
