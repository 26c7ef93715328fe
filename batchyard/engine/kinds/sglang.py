"""SGLang's server, `python -m sglang.launch_server`."""

from __future__ import annotations

from typing import Final

from batchyard.engine.kinds.gauges import Gauges
from batchyard.engine.kinds.kind import Known, Pages, Says, ServerKind, as_seats, dig

_INFO: Final = "/server_info"
_OF_RANK: Final = "effective_max_running_requests_per_dp"


def _seats(pages: Pages) -> int | None:
    """What its schedulers really run at once, one for each rank of data parallelism."""
    info = pages.json(_INFO)
    states = dig(info, "internal_states")
    ranks = [dig(each, _OF_RANK) for each in states] if isinstance(states, list) else []
    if ranks and all(type(each) is int for each in ranks):
        return as_seats(sum(ranks))
    given = dig(info, "max_running_requests")
    dp_size = dig(info, "dp_size") or 1
    return as_seats(given * dp_size) if type(given) is type(dp_size) is int else None


KIND: Final = ServerKind(
    name="SGLang",
    known=Known(
        "0.5.23",
        is_run=False,
        works=(
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/embeddings",
            "/v1/rerank",
            "/v1/score",
        ),
        at_once="`max_running_requests` of all ranks",
    ),
    is_it=lambda pages: pages.owner == "sglang",
    seats_page=_INFO,
    seats=_seats,
    gauges=Gauges(
        running="sglang:num_running_reqs",
        waiting="sglang:num_queue_reqs",
        # Those of finished requests stand still for as long as an answer is made.
        progress=("sglang:realtime_tokens_total", "sglang:token_usage"),
        cache="sglang:token_usage",
        ttft="sglang:time_to_first_token_seconds",
        itl="sglang:inter_token_latency_seconds",
    ),
    too_long=(
        Says(400, "longer than the model's context length"),
        Says(400, "maximum context length"),
        Says(400, "maximum allowed length"),
    ),
    busy=(Says(503, "The request queue is full."),),
)
