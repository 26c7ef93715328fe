"""The composition root of a flow run: settings and blocks in, services out."""

from __future__ import annotations

import logging
import os
import shlex
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from httpx import HTTPError
from prefect.exceptions import PrefectException

from batchyard.dispatch import OfferedModels, block_name, block_remedy
from batchyard.engine.vllm.lora import lora_options
from batchyard.engine.vllm.vllm_options import EngineOptions, is_missing_path
from batchyard.engine.withdrawn import asked_in_vain, why_withdrawn
from batchyard.errors import DispatchFailed, ModelNotFound, SettingsError
from batchyard.logs import event_logger
from batchyard.services.machine.connections import connections_line
from batchyard.services.machine.engine_python import engine_python
from batchyard.services.machine.secret_key import read_secret_keys
from batchyard.services.machine.shared_database import check_shared_database
from batchyard.services.services import Services, current_services, open_services
from batchyard.settings import Settings, read_settings
from blocks import CREDENTIALS, RemoteEngineBlock, VllmEngineBlock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from prefect.blocks.core import Block

    from batchyard.engine.base import Engine
    from batchyard.schedule.hours import Hours


log = event_logger(__name__)

B = TypeVar("B", bound="Block")
C = TypeVar("C")


@asynccontextmanager
async def worker_services() -> AsyncIterator[Services]:
    """The services that the caller has open already, or new ones for this flow run."""
    try:
        services = current_services()
    except LookupError:
        pass
    else:
        yield services
        return
    settings = read_settings()
    check_shared_database(settings)
    # Prefect hands on what its extra loggers let through, by default no more than warnings.
    ours = logging.getLogger("batchyard")
    ours.setLevel(settings.log.level)
    log.info("flow_run.uses", connections_line(settings))

    async def engine_for(model: str) -> Engine:
        return await engine_from_block(settings, model)

    offered = OfferedModels()
    async with open_services(
        settings,
        engine_for=engine_for,
        credentials=credentials_from_block,
        why_not_offered=offered.why_not,
        endpoints_of=offered.endpoints,
        find_offer=offered.offer,
        hours_of=hours_from_block,
    ) as services:
        yield services


async def engine_from_block(settings: Settings, model: str) -> Engine:
    """The engine of the block document that is named after the model.

    Raises :class:`~batchyard.errors.ModelNotFound` where there is none,
    :class:`~batchyard.errors.SettingsError` for one that cannot be used on this machine, and
    :class:`~batchyard.errors.DispatchFailed` where Prefect does not answer.
    """
    name = block_name(model)
    block = await _engine_block(model)
    if isinstance(block, RemoteEngineBlock):
        return block.build(settings.tls_context)
    for field in asked_in_vain(block.model_extra or {}):
        log.warning("engine.option_withdrawn", why_withdrawn(field, field), model=model)
    _check_weights(name, block.weights or block.model)
    _check_adapters(name, block)
    return block.build(
        python=engine_python(settings),
        log_path=engine_log(settings, name),
        media_domains=settings.bodies.media_domains,
        secret_keys=read_secret_keys(settings),
    )


async def hours_from_block(model: str) -> Hours:
    """When batches may use the engine of the block; raises what :func:`engine_from_block` does."""
    return (await _engine_block(model)).hours


async def _engine_block(model: str) -> VllmEngineBlock | RemoteEngineBlock:
    name = block_name(model)
    for kind in (VllmEngineBlock, RemoteEngineBlock):
        if (block := await _load(kind, name)) is not None:
            _check_model(name, block.model, model)
            return block
    remedy = block_remedy(model)
    log.warning("model.not_offered", remedy, model=model)
    raise ModelNotFound(f"No engine is set up for the model {model}.", remedy=remedy)


def _check_model(name: str, served: str, wanted: str) -> None:
    """Two names may have the same slug, and an engine refuses requests for another model."""
    if served != wanted:
        raise SettingsError(
            f"The engine block {name} serves the model {served}, but the requests name {wanted}: "
            "correct its field `model`, or the requests."
        )


def _check_weights(name: str, weights: str) -> None:
    if is_missing_path(weights):
        raise SettingsError(
            f"The engine block {name} has its weights at {weights}, which does not exist on the "
            "machine of this GPU worker."
        )


def _check_adapters(name: str, block: VllmEngineBlock) -> None:
    """Check the adapters as the weights are: another machine may have them."""
    try:
        lora_options(block.adapters, EngineOptions(shlex.split(block.options)))
    except SettingsError as error:
        raise SettingsError(
            f"The engine block {name} cannot be used on the machine of this GPU worker. {error}"
        ) from None


async def credentials_from_block(kind: type[C], /) -> C:
    """The credentials of the block document ``default``.

    Without one, the scheme's library finds its own.
    """
    block = await _load(CREDENTIALS[kind], "default")
    return kind() if block is None else block.build()


def engine_log(settings: Settings, name: str) -> Path:
    """The path of the log of the engine of this name."""
    folder = settings.home_folder / "logs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Engines on other devices of this machine have logs of their own.
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "") if settings.engine_slots else ""
    parts = ["engine", name[-80:], *([devices.replace(",", "-")] if devices else [])]
    return folder / f"{'-'.join(parts)}.log"


async def _load(block_type: type[B], name: str) -> B | None:
    try:
        return await block_type.aload(name)
    except ValueError:
        # Prefect raises ValueError for a document, and for a type, that does not exist.
        return None
    except (HTTPError, PrefectException, OSError) as error:
        raise DispatchFailed(
            f"Prefect's API did not give the block {name} ({type(error).__name__})."
        ) from error
    except RuntimeError as error:
        raise SettingsError(
            f"The fields of the block {block_type.get_block_type_slug()}/{name} are not those of "
            "this version: save it again."
        ) from error
