#!/usr/bin/env bash
# Prefect 3.9.1: a flow run that is Pending gets a new message only together with a new name.
#
# One would guess: who waits for something can say anew what it waits for, with Pending and another
# message, as often as that changes; or Prefect refuses every Pending that follows Pending.
# What is seen: with the same name the server aborts it, and the old message stays; with another
# name it accepts it. After Running it aborts any Pending.
# Where it matters: commands/slurm/verdict.py puts Slurm's reason into the name of the state.
#
# Exits with 0 as long as it is so, and with another status once the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check prefect==3.9.1
cd "$folder"
export PREFECT_HOME="$folder/prefect" PREFECT_SERVER_ANALYTICS_ENABLED=false
export PREFECT_SERVER_ALLOW_EPHEMERAL_MODE=true PREFECT_LOGGING_LEVEL=ERROR
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Pending, Running


@flow
def waits() -> None:
    pass


async def main() -> list[str]:
    seen = []
    async with get_client() as client:
        run = await client.create_flow_run(waits, state=Pending(name="Queued (A)", message="first"))

        async def sets(what, state) -> None:
            answer = await client.set_flow_run_state(run.id, state)
            now = (await client.read_flow_run(run.id)).state
            seen.append(f"{what}: {answer.status.value}; now {now.name}, {now.message}")

        await sets("the same name", Pending(name="Queued (A)", message="second"))
        await sets("another name", Pending(name="Queued (B)", message="second"))
        await sets("Running", Running())
        await sets("after Running", Pending(name="Queued (C)", message="third"))
    return seen


seen = asyncio.run(main())
print("\n".join(seen))
assert seen == [
    "the same name: ABORT; now Queued (A), first",
    "another name: ACCEPT; now Queued (B), second",
    "Running: ACCEPT; now Running, None",
    "after Running: ABORT; now Running, None",
], "The behaviour has changed."
PYTHON
