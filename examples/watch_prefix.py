"""Have each new file below an S3 prefix run as a batch: by a schedule, and when S3 says so.

    python examples/watch_prefix.py s3://data/incoming/ s3://data/results/ --every 300

It needs ``PREFECT_API_URL`` (and the login, where the server asks for one). Run again, it replaces
what it made for this prefix before; ``--stop`` removes that. The events are sent by
examples/s3_events.py.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
from datetime import timedelta
from typing import TYPE_CHECKING

from prefect import get_client
from prefect.automations import Automation
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

DEPLOYMENT = "submit-new-files/default"
TOGETHER = timedelta(seconds=5)
"""Files that arrive within this time after the first one are handed in by one flow run."""


async def watch(prefix: str, parameters: dict[str, object], every_seconds: int) -> None:
    """Make the schedule and the automation. Both start the deployment with these parameters."""
    async with get_client() as client:
        await stop(client, prefix)
        deployment = await client.read_deployment_by_name(DEPLOYMENT)
        schedule = IntervalSchedule(interval=timedelta(seconds=every_seconds))
        await client.create_deployment_schedules(
            deployment.id,
            [DeploymentScheduleCreate(schedule=schedule, parameters=parameters, slug=slug(prefix))],
        )
        automation = Automation(
            name=slug(prefix),
            description=f"New files in {prefix} become batches.",
            trigger=EventTrigger(
                expect={"object.created"},
                match={"prefect.resource.id": f"{prefix}*"},
                posture=Posture.Reactive,
                threshold=1,
                within=TOGETHER,  # after the first event, the next ones are ignored for so long,
            ),
            actions=[
                RunDeployment(
                    deployment_id=deployment.id,
                    parameters=parameters,
                    schedule_after=TOGETHER,  # and then one flow run finds all their files
                )
            ],
        )
        await automation.acreate()


async def stop(client: PrefectClient, prefix: str) -> None:
    """Remove the schedule and the automation, if they are there."""
    deployment = await client.read_deployment_by_name(DEPLOYMENT)
    for schedule in deployment.schedules:
        if schedule.slug == slug(prefix):
            await client.delete_deployment_schedule(deployment.id, schedule.id)
    for automation in await client.read_automations_by_name(slug(prefix)):
        await client.delete_automation(automation.id)


def slug(prefix: str) -> str:
    """The name of both, and of no others: what the words leave out tells prefixes apart, too."""
    words = re.sub("[^a-z0-9]+", "-", prefix.lower()).strip("-")
    return f"new-files-of-{words}-{hashlib.sha256(prefix.encode()).hexdigest()[:8]}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input_prefix", help="s3://bucket/prefix/")
    parser.add_argument("output_prefix", nargs="?", default="")
    parser.add_argument("--every", type=int, default=300, help="seconds between two looks")
    parser.add_argument("--with", dest="more", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--stop", action="store_true")
    given = parser.parse_args()
    prefix = given.input_prefix.rstrip("/") + "/"
    if given.stop:
        async with get_client() as client:
            await stop(client, prefix)
        return
    places = {"input_prefix": prefix, "output_prefix": given.output_prefix}
    await watch(prefix, places | given.more, given.every)


if __name__ == "__main__":
    asyncio.run(main())
