"""vLLM's own server, `vllm serve`."""

from __future__ import annotations

from typing import Final

import msgspec

from batchyard.engine.kinds.gauges import Gauges
from batchyard.engine.kinds.kind import OPENAPI, Known, Pages, Says, ServerKind, as_seats

GAUGES: Final = Gauges(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    # Tokens count when a prompt has been read or a token made. A prompt of many steps is read in
    # silence, but its share of the cache grows with each.
    progress=(
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:kv_cache_usage_perc",
    ),
    cache="vllm:kv_cache_usage_perc",
    ttft="vllm:time_to_first_token_seconds",
    itl="vllm:inter_token_latency_seconds",
)
SEATS_PAGE: Final = "/server_info?config_format=json"
"""Only a server in its development mode has this page."""


def seats_of(pages: Pages) -> int | None:
    """The seats of all its ranks together."""
    try:
        config = msgspec.json.decode(pages.by_path[SEATS_PAGE], type=_ServerInfo).vllm_config
    except (KeyError, ValueError, RecursionError):
        return None
    return as_seats(
        config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
    )


class _SchedulerConfig(msgspec.Struct):
    max_num_seqs: int


class _ParallelConfig(msgspec.Struct):
    data_parallel_size: int = 1


class _VllmConfig(msgspec.Struct):
    scheduler_config: _SchedulerConfig
    parallel_config: _ParallelConfig = msgspec.field(default_factory=_ParallelConfig)


class _ServerInfo(msgspec.Struct):
    vllm_config: _VllmConfig


KIND: Final = ServerKind(
    name="vLLM",
    known=Known(
        "0.32.0",
        is_run=True,
        works=(
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/messages",
            "/v1/embeddings",
            "/v1/rerank",
            "/score",
        ),
        at_once="`max_num_seqs`, which it tells in its development mode "
        "(`VLLM_SERVER_DEV_MODE=1`); else found",
    ),
    is_it=lambda pages: pages.owner == "vllm" or b'"vllm_xargs"' in pages.by_path.get(OPENAPI, b""),
    seats_page=SEATS_PAGE,
    seats=seats_of,
    gauges=GAUGES,
    too_long=(Says(400, "maximum context length"),),
    busy=(Says(503, ""),),
    unknown_model=(Says(404, "does not exist"),),
)
