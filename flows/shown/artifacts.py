"""Artifacts of the current flow run, by one call each.

Prefect's own functions also send an event, for which they read the flow run, and which the server
writes with a row for each of its tags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect.artifacts import aupdate_progress_artifact
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import FlowRunContext

from flows.process.prefect_client import get_client

if TYPE_CHECKING:
    from uuid import UUID


async def create_artifact(
    *, kind: str, key: str | None = None, data: str | float, description: str
) -> UUID:
    """Keep the data, under a key or as the run's own; its id. Raises what the client raises."""
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    artifact = ArtifactCreate(
        key=key,
        type=kind,
        description=description,
        data=data,
        flow_run_id=None if run is None else run.id,
    )
    async with get_client() as client:
        return (await client.create_artifact(artifact)).id


async def update_progress(artifact_id: UUID, *, percent: float, description: str) -> None:
    """Change a progress bar. Raises what Prefect's client raises."""
    async with get_client() as client:
        await aupdate_progress_artifact(artifact_id, percent, description, client=client)
