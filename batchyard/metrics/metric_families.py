"""The metrics that processes of a worker count and its exporter serves: names, types, texts.

``/metrics`` of the API has other ones, which it reads from the database.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """Prometheus' types of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``label`` is the label that tells the numbers of one process apart, if any.

    All have the labels of their process as well: ``model`` and ``engine`` of a runner, ``process``
    of a process that takes batches through their steps.
    """

    name: str
    kind: Kind
    help: str
    label: str = ""


INFLIGHT: Final = Family(
    "batchyard_engine_inflight", Kind.GAUGE, "Requests that are in the engine."
)
QUEUED: Final = Family(
    "batchyard_engine_queued",
    Kind.GAUGE,
    "Requests that have a place in the runner's window and wait for room in the engine or for"
    " their next attempt.",
)
LINES_WAITING: Final = Family(
    "batchyard_lines_waiting",
    Kind.GAUGE,
    "Lines of the runner's chunks that wait, by the gate that they or the lines before them wait"
    " for.",
    "gate",
)
WINDOW: Final = Family(
    "batchyard_engine_window",
    Kind.GAUGE,
    "Requests that may be in the engine at once; fewer than usual after a crash of the engine, or"
    " while its server refuses some. It changes where the best number is found by trying.",
)
READY: Final = Family(
    "batchyard_engine_ready",
    Kind.GAUGE,
    "1 if the engine takes requests; 0 while it loads or is started again.",
)
REFUSING: Final = Family(
    "batchyard_engine_refusing_seconds",
    Kind.GAUGE,
    "For how long the engine's server has refused all requests, with 429, 503, a gateway's 502 or"
    " 504, or broken connections; 0 if it takes them.",
)
LINE_SECONDS: Final = Family(
    "batchyard_line_seconds",
    Kind.HISTOGRAM,
    "How long requests were in the engine until it answered, in seconds. Each attempt counts.",
    "le",
)
LIVE_INFLIGHT: Final = Family(
    "batchyard_live_inflight", Kind.GAUGE, "Live requests that are in the engine."
)
LIVE_REQUESTS: Final = Family(
    "batchyard_live_requests_total",
    Kind.COUNTER,
    "Live requests that have ended: completed, failed in the engine, left by their client before"
    " the end, or lost with the engine.",
    "outcome",
)
LIVE_TOKENS: Final = Family(
    "batchyard_live_tokens_total",
    Kind.COUNTER,
    "Tokens of live requests: of prompts, those of them that were in the engine's cache, and of"
    " answers.",
    "kind",
)
LIVE_FIRST_SECONDS: Final = Family(
    "batchyard_live_first_token_seconds",
    Kind.HISTOGRAM,
    "How long live requests with a stream for an answer waited for its first event, from the"
    " runner on, in seconds.",
    "le",
)
RETRIES: Final = Family(
    "batchyard_retries_total",
    Kind.COUNTER,
    "Requests that are tried again, by what happened to the attempt before.",
    "reason",
)
RESTARTS: Final = Family(
    "batchyard_engine_restarts_total",
    Kind.COUNTER,
    "Starts of an engine again after it was lost, by how it was lost.",
    "reason",
)
LEASES_LOST: Final = Family(
    "batchyard_leases_lost_total",
    Kind.COUNTER,
    "Leases that another owner got while this process had them.",
    "lease",
)
BATCHES_HELD: Final = Family(
    "batchyard_batches_held",
    Kind.GAUGE,
    "Batches that a run-batches process has leased and takes through their steps.",
)
SLOTS: Final = Family(
    "batchyard_engine_slots",
    Kind.GAUGE,
    "Engine slots of this worker: free, or with an engine that is loading or ready.",
    "state",
)
WORKER: Final = Family(
    "batchyard_worker_info",
    Kind.GAUGE,
    "1. The labels say which work pool the worker serves, and its version.",
)
SCRAPE_OK: Final = Family(
    "batchyard_engine_scrape_ok",
    Kind.GAUGE,
    "1 if the engine's own metrics are on this page; 0 if it did not give them in time.",
)
SCRAPE_REFUSED: Final = Family(
    "batchyard_engine_scrape_refused_lines",
    Kind.GAUGE,
    "Lines of the engine's own metrics that are not on this page because they are not valid.",
)

SUM: Final = "sum"
"""Beside the buckets of a histogram, the key of the sum of its values."""

FAMILIES: Final = (
    WORKER,
    SLOTS,
    READY,
    INFLIGHT,
    QUEUED,
    LINES_WAITING,
    WINDOW,
    REFUSING,
    LINE_SECONDS,
    LIVE_INFLIGHT,
    LIVE_REQUESTS,
    LIVE_TOKENS,
    LIVE_FIRST_SECONDS,
    RETRIES,
    RESTARTS,
    LEASES_LOST,
    BATCHES_HELD,
    SCRAPE_OK,
    SCRAPE_REFUSED,
)
"""In the order in which a page has them."""
