"""What every task here has in common: retried when that can help, never cached or persisted."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

from batchyard.errors import BatchyardError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

P = ParamSpec("P")
R = TypeVar("R")

_RETRIES = 3
_RETRY_DELAY_SECONDS = [1.0, 5.0, 20.0]


def step(
    name: str, *, run_name: str | None = None, retries: int = _RETRIES
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Run a step as a Prefect task; the decorated function is awaited like the bare one.

    A :class:`BatchyardError` that no retry can mend ends the task run at once, as a failed state
    that carries it: raised inside the task, Prefect would log a traceback for what is a message
    to the user. Outside of it, the error is raised as always.
    """

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @wraps(function)
        async def attempt(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                return await function(*args, **kwargs)
            except BatchyardError as error:
                if error.is_retriable:
                    raise
                return Failed(message=str(error), data=error)

        prefect_task = task(
            name=name,
            task_run_name=run_name or name,
            retries=retries,
            retry_delay_seconds=_RETRY_DELAY_SECONDS[:retries],
            retry_condition_fn=_can_help,
            persist_result=False,
            cache_policy=NO_CACHE,
        )(attempt)

        @wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> R:
            state: Any = await prefect_task(*args, return_state=True, **kwargs)
            result: R = await state.aresult()
            return result

        return run

    return decorate


async def _can_help(_task: Any, _task_run: Any, state: Any) -> bool:
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, BatchyardError) and error.is_retriable
