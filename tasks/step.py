"""Retry and record a step. Not Prefect's `@task`, which costs 2.5 times as much (ADR 74)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

from batchyard.errors import BatchyardError
from batchyard.logs import event_logger
from tasks.task_run import RecordedTask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = event_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_RETRY_AFTER_SECONDS: Final = (1.0, 5.0, 20.0)


def step(
    name: str, *, is_retried: bool = True
) -> Callable[[Callable[Concatenate[RecordedTask, P], Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Run a step as a task run of this name; it gets the task run as its first argument.

    An error that passes is tried again; another :class:`BatchyardError` ends the task run as
    failed, with the error's text, and is raised.
    """

    def decorate(
        function: Callable[Concatenate[RecordedTask, P], Awaitable[R]],
    ) -> Callable[P, Awaitable[R]]:
        async def run(*args: P.args, **kwargs: P.kwargs) -> R:
            delays = iter(_RETRY_AFTER_SECONDS if is_retried else ())
            async with RecordedTask(name, name) as task_run:
                while True:
                    try:
                        return await function(task_run, *args, **kwargs)
                    except BatchyardError as error:
                        delay = next(delays, None) if error.is_retriable else None
                        if delay is None:
                            raise
                        log.warning("step.repeated", error, step=name)
                        await asyncio.sleep(delay)

        return run

    return decorate
