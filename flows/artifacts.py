"""Artifacts of the current flow run, by one call each.

Prefect's own functions also send an event, for which they read the flow run, and which the server
writes with a row for each of its tags.
"""

from __future__ import annotations

from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import FlowRunContext

from flows.prefect_client import get_client


async def create_artifact(*, kind: str, key: str, data: str, description: str) -> None:
    """Keep the data under the key. Raises what Prefect's client raises."""
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
        await client.create_artifact(artifact)
