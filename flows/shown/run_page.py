"""The page of a flow run in Prefect: its name, and the tags by which people find a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from coolname.data import config as _words_of_slugs
from httpx import HTTPError
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException

from batchyard.logs import event_logger
from flows.process.prefect_client import get_client

if TYPE_CHECKING:
    from batchyard.store import BatchRecord

log = event_logger(__name__)

NOT_SHOWN: Final = (PrefectException, HTTPError, OSError, RuntimeError)
"""Errors of Prefect that prevent showing something. No batch fails because of them."""
_WORDS: Final = {word for part in _words_of_slugs.values() for word in part.get("words", [])}


def is_made_up(name: str) -> bool:
    """Whether Prefect has made up the name, such as ``straight-kiwi``, and not a person."""
    words = name.split("-")
    return len(words) == 2 and _WORDS.issuperset(words)


async def name_run(name: str) -> None:
    """Name the current flow run, unless a person has given it a name."""
    if (context := FlowRunContext.get()) is not None and is_made_up(str(context.flow_run.name)):
        await _change(name=name)


def tags_of(batch: BatchRecord) -> list[str]:
    """The tags by which people find a batch's flow run: its id, its tenant, its model."""
    tags = [batch.id, f"tenant:{batch.tenant}"]
    return [*tags, *(f"model:{model}" for model in batch.models)]


async def tag_run(batch: BatchRecord) -> None:
    """Add the batch's tags to those of the current flow run."""
    context = FlowRunContext.get()
    if context is not None and not set(tags_of(batch)) <= set(context.flow_run.tags):
        await _change(tags=sorted({*context.flow_run.tags, *tags_of(batch)}))


async def _change(**fields: Any) -> None:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    try:
        async with get_client() as client:
            await client.update_flow_run(context.flow_run.id, **fields)
    except NOT_SHOWN as error:
        log.warning("flow_run.not_changed", type(error).__name__)
        return
    for field, value in fields.items():
        setattr(context.flow_run, field, value)
