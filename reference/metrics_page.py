"""docs/reference/metrics.md: what `/metrics` of the API and of workers exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from batchyard.api.operators.metrics import families_of
from batchyard.metrics.metric_families import FAMILIES
from batchyard.store.figures import Figures
from reference.markdown import table

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_NOTHING: Final = Figures(
    ended=[],
    open=[],
    backlog=[],
    runners={},
    deliveries={},
    deliveries_due=0,
    due_seconds=0.0,
    held_leases=frozenset(),
    known_models=frozenset(),
    closed_models=frozenset(),
)
_SUFFIXES: Final = {"counter": "_total", "info": "_info"}
_HEAD: Final = ("metric", "type", "labels", "meaning")

_PAGE: Final = """\
# Metrics

In Prometheus' text format. [Monitor](../how-to/monitor.md) says how to read them, and has alerts \
and a dashboard. No label names a tenant, a batch, a URL or a request.

## The API

`GET /metrics` of `batchyard serve`. The figures are the database's, the same from each process.

{api}
## Workers

`GET /metrics` of `batchyard worker --metrics-port PORT`: what only this machine knows. Besides \
the labels below, `model` and `engine` say which engine a number is of, or `process` which \
process that takes batches through their steps. The engines' own metrics (`vllm:…`) are on the \
same page, with the labels `batchyard_model` and `batchyard_engine`.

{workers}"""


def labels_of(family: Metric) -> tuple[str, ...]:
    """Only the classes that fill a family know the names of its labels."""
    names: tuple[str, ...] = getattr(family, "_labelnames", ())
    return names


def page() -> str:
    """The whole page."""
    api = [
        (
            f"`{each.name}{_SUFFIXES.get(each.type, '')}`",
            each.type,
            ", ".join(f"`{label}`" for label in labels_of(each)),
            each.documentation,
        )
        for each in families_of(_NOTHING)
    ]
    workers = [
        (
            f"`{each.name}`",
            each.kind.value,
            f"`{each.label}`" if each.label else "",
            each.help,
        )
        for each in FAMILIES
    ]
    return _PAGE.format(api=table(_HEAD, api), workers=table(_HEAD, workers))
