"""What Prefect's own worker makes of a base job template, as JSON. Needs its package on the path.

``python render_pool.py TYPE TEMPLATE VARIABLES``: the type of the pool, a file, and JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import Flow, FlowRun
from prefect.workers.base import BaseWorker


async def rendered(kind: str, template: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The Job, or the settings of the container."""
    worker = {"kubernetes": "prefect_kubernetes.worker", "docker": "prefect_docker.worker"}[kind]
    __import__(worker)
    found = BaseWorker.get_worker_class_from_type(kind)
    assert found is not None
    configuration = await found.job_configuration.from_template_and_values(
        base_job_template=template, values=values, client=object()
    )
    run = FlowRun(id=uuid.UUID(int=7), name="org/Model-1", flow_id=uuid.UUID(int=8))
    flow = Flow(id=run.flow_id, name="run-chunks")
    if kind == "kubernetes":
        configuration.prepare_for_flow_run(run, flow=flow)
        return dict(configuration.job_manifest)
    configuration.prepare_for_flow_run(run, flow=flow)
    return configuration.model_dump(mode="json")


if __name__ == "__main__":
    kind, template, values = sys.argv[1:]
    given = json.loads(Path(template).read_text())
    made = asyncio.run(rendered(kind, given, json.loads(values)))
    sys.stdout.write(json.dumps(made))
