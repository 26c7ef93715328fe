"""How many requests a server runs at once, by its own words or by a guess."""

from __future__ import annotations

from typing import Final

import msgspec

UNKNOWN: Final = 32
"""For a server that others use and that does not tell: fewer than vLLM has by default."""
UNKNOWN_EXCLUSIVE: Final = 256
"""For a server that no one else uses and that does not tell: a queue there keeps no one waiting."""
_MOST: Final = 100_000
"""Of all ranks. A server that says more need not mean well: a window has twice as many requests in
memory."""


def seats_of(server_info: bytes) -> int | None:
    """From vLLM's ``/server_info?config_format=json``, for all its ranks; None: unknown."""
    try:
        config = msgspec.json.decode(server_info, type=_ServerInfo).vllm_config
    except (ValueError, RecursionError):
        return None
    seats = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
    return seats if 0 < seats <= _MOST else None


class _SchedulerConfig(msgspec.Struct):
    max_num_seqs: int


class _ParallelConfig(msgspec.Struct):
    data_parallel_size: int = 1


class _VllmConfig(msgspec.Struct):
    scheduler_config: _SchedulerConfig
    parallel_config: _ParallelConfig = msgspec.field(default_factory=_ParallelConfig)


class _ServerInfo(msgspec.Struct):
    vllm_config: _VllmConfig
