"""The pause of a machine for a model whose runners failed there; other machines continue.

The cause may be the machine (no GPU, no disk space, no engine environment) or the model (its
weights are on other machines only), so the pause is for this model on this machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.errors import EngineStartFailed

if TYPE_CHECKING:
    from batchyard.errors import BatchyardError
    from batchyard.services.services import Services

_FIRST_PAUSE_SECONDS = 15.0
_LONGEST_PAUSE_SECONDS = 300.0
"""Each attempt may load a model for minutes, and the cause is not repaired within seconds."""


class MachinePaused(EngineStartFailed):
    """Runners of the model failed on this machine, and the next try is not due yet."""


def pause_seconds(failures: int) -> float:
    """How long a machine pauses after this many failures in a row."""
    if failures < 1:
        return 0.0
    return min(_FIRST_PAUSE_SECONDS * 2.0 ** (failures - 1), _LONGEST_PAUSE_SECONDS)


async def check_machine(services: Services, model: str) -> None:
    """Raise :class:`MachinePaused` unless a runner of the model may be tried here now."""
    settings = services.settings
    machine = settings.this_machine
    failed = await services.store.runners.failures(
        model=model, pool=settings.pool, machine=machine.identity
    )
    left = failed.last_at + pause_seconds(failed.count) - await services.store.database.now()
    if failed.count and left > 0:
        times = "once" if failed.count == 1 else f"{failed.count} times in a row"
        raise MachinePaused(
            f"On {machine}: no runner of {model} starts for another {left:.0f} s, because the "
            f"last one failed here, {times}: {failed.message or 'it ended without a message'}"
        )


async def record_failure(
    services: Services, model: str, flow_run_id: str, error: BatchyardError | OSError | MemoryError
) -> str:
    """Count the failure against this machine; the error's message with the machine's name."""
    settings = services.settings
    machine = settings.this_machine
    message = str(error) or type(error).__name__
    await services.store.runners.fail(
        model=model,
        pool=settings.pool,
        machine=machine.identity,
        flow_run_id=flow_run_id,
        message=message,
    )
    return f"On {machine}: {message}"
