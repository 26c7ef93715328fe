"""Pools and blocks on a Prefect server, made as a file of models has them.

Each function yields a text for each change that it has made, and changes only what differs from the
file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from batchyard.errors import SettingsError
from blocks import CREDENTIALS, RemoteEngineBlock, VllmEngineBlock
from commands import slurm
from commands.prefect.pools import CONTROL_POOL
from commands.slurm.template import base_job_template

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prefect.blocks.core import Block
    from prefect.client.orchestration import PrefectClient

    from commands.prefect.deploy_file import DeployFile
    from commands.slurm.options import JobOptions

CREDENTIALS_BLOCK = "default"
"""The block of the credentials for each kind of bucket; flows/process/worker.py loads it by this
name."""

_FIRST_LIMIT = 1
"""The engines at once of a GPU pool that we create, unless the file has another number."""


async def make_pools(client: PrefectClient, wanted: DeployFile) -> AsyncIterator[str]:
    """The control pool, and a pool for each kind of GPU that the file names.

    A pool that exists keeps its type, and, unless the file has one, its template and its limit.
    Raises :class:`~batchyard.errors.SettingsError` if the type is not the file's.
    """
    for name in (CONTROL_POOL, *wanted.gpu_pools):
        limit = wanted.engines_at_once.get(name)
        options = wanted.slurm.get(name)
        kind = "process" if options is None else slurm.TYPE
        try:
            pool = await client.read_work_pool(name)
        except ObjectNotFound:
            if limit is None and name != CONTROL_POOL:
                limit = _FIRST_LIMIT
            template = _template(options)
            await client.create_work_pool(
                WorkPoolCreate(
                    name=name, type=kind, base_job_template=template, concurrency_limit=limit
                )
            )
            yield f"pool {name} created{'' if limit is None else f', engines at once: {limit}'}"
            continue
        if options is not None:
            if pool.type != kind:
                raise SettingsError(
                    f"The work pool {name} has the type {pool.type}, and batchyard.toml has "
                    f"[slurm.{name}]: name another pool, or delete this one in Prefect."
                )
            if pool.base_job_template != (template := _template(options)):
                await client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
                yield f"pool {name} changed, the options of its jobs"
        if limit is not None and pool.concurrency_limit != limit:
            await client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
            yield f"pool {name} changed, engines at once: {limit}"


def _template(options: JobOptions | None) -> dict[str, Any]:
    if options is None:
        return ProcessWorker.get_default_base_job_template()
    return base_job_template(options)


async def make_blocks(client: PrefectClient, wanted: DeployFile) -> AsyncIterator[str]:
    """The block types, a block for each model, and the credentials for buckets."""
    for kind in (VllmEngineBlock, RemoteEngineBlock, *CREDENTIALS.values()):
        await kind.aregister_type_and_schema(client=client)
    for model in wanted.models:
        if await _save(model.block, model.name):
            yield f"block {_slug(type(model.block))}/{model.name} written"
    for block in wanted.credentials:
        if await _save(block, CREDENTIALS_BLOCK):
            yield f"block {_slug(type(block))}/{CREDENTIALS_BLOCK} written"


async def other_blocks(client: PrefectClient, wanted: DeployFile) -> AsyncIterator[str]:
    """The engine blocks that the file does not name, as ``type/name``."""
    named = {(type(model.block), model.name) for model in wanted.models}
    for kind in (VllmEngineBlock, RemoteEngineBlock):
        for document in await client.read_block_documents_by_type(_slug(kind)):
            if (kind, document.name) not in named:
                yield f"{_slug(kind)}/{document.name}"


async def delete_block(client: PrefectClient, block: str) -> None:
    """``block``: ``type/name``."""
    kind, _, name = block.partition("/")
    document = await client.read_block_document_by_name(name, kind)
    await client.delete_block_document(document.id)


async def _save(block: Block, name: str) -> bool:
    """Whether the server had none, or another one."""
    kind = type(block)
    try:
        before = await kind.aload(name)
    except (ValueError, RuntimeError):  # there is none, or its fields are another version's
        pass
    else:
        if all(getattr(before, field) == getattr(block, field) for field in kind.model_fields):
            return False
    await block.asave(name, overwrite=True)
    return True


def _slug(kind: type[Block]) -> str:
    return str(kind.get_block_type_slug())
