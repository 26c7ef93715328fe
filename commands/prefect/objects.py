"""Pools and blocks on a Prefect server, made as a file of models has them.

Each function yields a text for each change that it has made, and changes only what differs from the
file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from blocks import CREDENTIALS, RemoteEngineBlock, VllmEngineBlock
from commands.prefect.pools import CONTROL_POOL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prefect.blocks.core import Block
    from prefect.client.orchestration import PrefectClient

    from commands.prefect.deploy_file import DeployFile

CREDENTIALS_BLOCK = "default"
"""The block of the credentials for each kind of bucket; flows/process/worker.py loads it by this
name."""

_FIRST_LIMIT = 1
"""The engines at once of a GPU pool that we create, unless the file has another number."""


async def make_pools(client: PrefectClient, wanted: DeployFile) -> AsyncIterator[str]:
    """The control pool, and a pool for each kind of GPU that the file names.

    A pool that exists keeps its type, its template and, unless the file has one, its limit.
    """
    for name in (CONTROL_POOL, *wanted.gpu_pools):
        limit = wanted.engines_at_once.get(name)
        try:
            pool = await client.read_work_pool(name)
        except ObjectNotFound:
            if limit is None and name != CONTROL_POOL:
                limit = _FIRST_LIMIT
            template = ProcessWorker.get_default_base_job_template()
            await client.create_work_pool(
                WorkPoolCreate(
                    name=name, type="process", base_job_template=template, concurrency_limit=limit
                )
            )
            yield f"pool {name} created{'' if limit is None else f', engines at once: {limit}'}"
            continue
        if limit is not None and pool.concurrency_limit != limit:
            await client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
            yield f"pool {name} changed, engines at once: {limit}"


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
