"""Flow runs of one process that begin at the same moment, on a server with CSRF protection."""

from __future__ import annotations

import asyncio

from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Completed

from flows.batch_flow_run import End, FlowRuns
from flows.prefect_client import shared_client
from flows.process_batch import process_batch


async def test_all_are_made_at_the_first_try() -> None:
    """By a client that does not try again: the server knows one token of each client only."""

    async def work() -> End:
        return End(Completed())

    runs = FlowRuns(process_batch)
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        async with shared_client():
            begun = [
                runs.run(work, name=f"run {n}", tags=[], parameters={"batch_id": f"{n}"})
                for n in range(10)
            ]
            assert all(state.is_completed() for state in await asyncio.gather(*begun))
