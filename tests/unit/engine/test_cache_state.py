"""The KV cache of an engine of ours, as vLLM's metrics tell of it."""

from __future__ import annotations

import pytest

from batchyard.engine.base import CacheState
from batchyard.engine.progress_metrics import cache_state_of

PREEMPTIONS = 'vllm:num_preemptions_total{engine="0",model_name="m"} 7.0\n'
USED = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'


def config(blocks: str = "100", size: str = "16", engine: int = 0) -> str:
    return (
        f'vllm:cache_config_info{{block_size="{size}",cache_dtype="auto",engine="{engine}",'
        f'gpu_memory_utilization="0.9",num_gpu_blocks="{blocks}",'
        'num_gpu_blocks_override="None"} 1.0\n'
    )


def test_its_size_is_its_blocks_times_their_size() -> None:
    assert cache_state_of(config() + USED + PREEMPTIONS) == CacheState(1600, 0.25, 7.0)


def test_data_parallel_ranks_have_a_cache_each() -> None:
    metrics = config() + config("300", engine=1) + PREEMPTIONS + PREEMPTIONS
    assert cache_state_of(metrics) == CacheState(6400, None, 14.0)


@pytest.mark.parametrize(
    "metrics",
    ["", PREEMPTIONS, config(), config("None") + PREEMPTIONS, config("9" * 40) + PREEMPTIONS],
)
def test_metrics_that_do_not_tell_of_it_bound_nothing(metrics: str) -> None:
    assert cache_state_of(metrics + USED) is None
