"""A batch that runs in this process while a person watches: for `batchyard run` and the demo."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchyard.cli.batches.summary import summarise
from batchyard.cli.terminal.exit_status import batch_status
from batchyard.delivery.deliver import Deliverer
from batchyard.delivery.redeliver import redeliver
from batchyard.dispatch.run_states import UNPUBLISHED
from batchyard.errors import DispatchFailed, StoreError
from batchyard.lifecycle import TERMINAL, BatchStatus
from batchyard.logs import event_logger
from batchyard.services.restore.clock_steps import make_up_for_clock
from batchyard.services.services import Progress
from batchyard.services.stop_batch import stop_failed
from batchyard.web.proxies import check_proxies, proxy_for, proxy_words
from batchyard.web.url import shown
from commands.prefect.own import OwnPrefect
from commands.prefect.refusals import login_refused

if TYPE_CHECKING:
    from batchyard.services.services import Services
    from batchyard.store import BatchRecord

log = event_logger(__name__)

_DELIVERY_SECONDS = 20.0
"""How long a user waits at most for receivers that do not answer."""

# Prefect's log is for its server; the terminal has the progress display.
_QUIET_PREFECT = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLI_PROMPT": "false",
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a batch ended: the exit status and the text to print."""

    status: int
    text: str


def prepare_prefect() -> OwnPrefect:
    """Keep all logs off the terminal.

    Call it before Prefect is imported. Raises :class:`~batchyard.errors.SettingsError` for a proxy
    that Prefect's client cannot use.
    """
    check_proxies(os.environ)
    for name, value in _QUIET_PREFECT.items():
        os.environ.setdefault(name, value)
    # Without any handler, Python itself prints warnings.
    logging.getLogger().addHandler(logging.NullHandler())
    return OwnPrefect()


async def run_to_end(services: Services, batch_id: str, own_prefect: OwnPrefect) -> Ending:
    """Run the process-batch flow in this process, with the configured Prefect API or our own.

    Raises :class:`~batchyard.errors.DispatchFailed` where Prefect fails a batch that has begun.
    """
    from prefect.settings import (  # noqa: PLC0415 - a second
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        temporary_settings,
    )

    services.on_progress(Progress(batch_id, "connecting"))
    try:
        log_path = services.settings.home_folder / "logs" / "prefect.log"
        settings = {}
        if not PREFECT_API_URL.value():
            own = await own_prefect.start(
                log_path,
                lambda words: services.on_progress(Progress(batch_id, "connecting", message=words)),
            )
            settings = {PREFECT_API_URL: own.url, PREFECT_API_AUTH_STRING: own.login}
        with temporary_settings(settings):
            await _check_prefect(str(PREFECT_API_URL.value()))
            # `reconcile` does it as well, but there may be none.
            await make_up_for_clock(services)
            batch = await services.store.batches.get(batch_id)
            if batch.status in TERMINAL:
                # Here because credentials for s3:// may be in a block.
                ending = await _publish_again(services, batch)
            else:
                ending = await _run_flow(services, batch_id)
    except DispatchFailed as error:
        batch = await services.store.batches.get(batch_id)
        is_ours = batch.owner is not None and batch.owner == services.owner
        if batch.status is not BatchStatus.VALIDATING or not is_ours:
            # With --resume it may be any batch, also one that another process is about to run.
            raise DispatchFailed(f"{error} {how_to_resume(batch_id)}") from error
        # Nothing has begun, and no other process would continue the batch.
        ending = Ending(1, await summarise(services, await stop_failed(services, batch_id, error)))
    await _deliver(services)
    return ending


def how_to_resume(batch_id: str) -> str:
    """The advice for a user whose batch was stopped or lost."""
    return f"Finished lines are kept. To continue, repeat the command with --resume {batch_id}."


async def _deliver(services: Services) -> None:
    """Send what is due: no other process may be running. What fails is tried again later."""
    try:
        async with Deliverer(services) as deliverer:
            await deliverer.deliver_due(_DELIVERY_SECONDS)
    except StoreError as error:
        log.warning("deliveries.not_sent", error)


async def _check_prefect(url: str) -> None:
    from prefect import get_client  # noqa: PLC0415 - a second

    try:
        async with get_client() as client:
            await client.raise_for_api_version_mismatch()
    except Exception as error:  # RuntimeError, httpx's and Prefect's own
        raise DispatchFailed(_why_not_usable(url, error)) from error


def _why_not_usable(url: str, error: Exception) -> str:
    if (refused := login_refused(url, error)) is not None:
        return refused
    if isinstance(error, RuntimeError) and error.__cause__ is None:
        # Its version is another one.
        return f"The Prefect server at {shown(url)} cannot be used: {error}"
    way = proxy_words(proxy_for(url, os.environ))
    return (
        f"Prefect's API at {shown(url)} does not answer{way} ({type(error).__name__}): check that "
        "the server runs, or unset PREFECT_API_URL to use one that lives as long as this command."
    )


async def _run_flow(services: Services, batch_id: str) -> Ending:
    from flows.process.prefect_client import shared_client  # noqa: PLC0415 - Prefect
    from flows.process_batch import ProcessBatchRuns  # noqa: PLC0415 - Prefect

    try:
        async with shared_client():
            state = await ProcessBatchRuns(services).run(batch_id)
    except Exception as error:
        raise DispatchFailed(f"Prefect's API was lost ({type(error).__name__}).") from error
    batch = await services.store.batches.get(batch_id)
    is_unpublished = state.name == UNPUBLISHED
    text = await summarise(services, batch)
    if not is_unpublished and batch.status in TERMINAL:
        return Ending(batch_status(batch), text)
    if is_unpublished:
        text += _unpublished(batch, str(state.message))
    else:
        text += f"\nbatchyard: {state.message}\n{how_to_resume(batch_id)}"
    return Ending(1, text)


async def _publish_again(services: Services, batch: BatchRecord) -> Ending:
    """Write the files of a batch that has ended, where that has failed before."""
    failures = await redeliver(services, batch)
    batch = await services.store.batches.get(batch.id)
    text = await summarise(services, batch)
    if failures:
        text += _unpublished(batch, ". ".join(failures))
    return Ending(1 if batch.undelivered else batch_status(batch), text)


def _unpublished(batch: BatchRecord, reason: str) -> str:
    return (
        f"\nbatchyard: {reason}\nTo write it again, repeat the command with --resume {batch.id}, "
        f"or to another place: batchyard results {batch.id} -o PLACE"
    )
