"""The work pools of a Prefect server: which there are for a file of models. No Prefect here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTROL_POOL: Final = "control"
DEFAULT_POOL: Final = "gpu"
"""Where a model runs for which no pool is named."""


def gpu_pools(named: Iterable[str]) -> list[str]:
    """The pools that run engines: the usual one, and those that a file names."""
    return [DEFAULT_POOL, *sorted({*named} - {DEFAULT_POOL})]
