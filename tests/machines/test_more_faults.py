"""Faults that take their time: see :mod:`tests.machines.test_faults` for those that do not."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import asyncpg
import pytest

from batchyard.lifecycle import BatchStatus
from tests.contract.engine.conftest import require_vllm
from tests.machines.cluster import LEASE_SECONDS
from tests.machines.operator import engine_of
from tests.services.prefect import ROOT

if TYPE_CHECKING:
    from tests.machines.cluster import Cluster
    from tests.machines.operator import Operator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONTROL_SECONDS = 60.0
"""What the loss of the control machine may cost, from when it is back."""
BEGIN_SECONDS = 150
LOAD_SECONDS = 240.0
SERVED = BatchStatus.IN_PROGRESS.value


async def test_the_control_machine_loses_power(cluster: Cluster, operator: Operator) -> None:
    """With the reconciler too: the one that stood by has to start, and then `run-batches`."""
    batches = await operator.two_tenants(cluster.new_model(), 600, milliseconds=1000)
    await operator.reconciler_at_work()
    epochs = [(await operator.get(asked)).epoch for asked in batches]
    cluster.reboot("a")
    began = time.monotonic()
    for asked, epoch in zip(batches, epochs, strict=True):
        await operator.is_taken_up(asked, after=epoch)
    assert time.monotonic() - began < CONTROL_SECONDS
    await operator.check_completed(*batches, seconds=300)


async def test_a_runner_is_killed(cluster: Cluster, operator: Operator) -> None:
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 400, milliseconds=200)
    for machine in await operator.machines_of(model, 2):
        await operator.kill_runner(machine, model)
    await operator.goes_on(*batches)
    await operator.check_completed(*batches)


async def test_a_machine_stands_still_for_longer_than_its_leases(
    cluster: Cluster, operator: Operator
) -> None:
    """What it does when it goes on changes nothing: another one has its work."""
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 300, milliseconds=200)
    still, _ = await operator.machines_of(model, 2)
    still.freeze()
    await asyncio.sleep(LEASE_SECONDS + 5)
    await operator.goes_on(*batches)
    still.thaw()
    await operator.check_completed(*batches)


async def test_weights_that_a_machine_does_not_have_end_nobodys_batch(
    cluster: Cluster, operator: Operator
) -> None:
    weights = cluster["c"].disk / "weights"
    weights.rename(weights.with_name("elsewhere"))
    try:
        model = cluster.new_model()
        batches = await operator.two_tenants(model, 200, milliseconds=250)
        await operator.runner_ends(model, says="which does not exist on")
        await operator.check_completed(*batches)
    finally:
        weights.with_name("elsewhere").rename(weights)


async def test_a_model_that_no_machine_can_serve_ends_with_what_is_finished(
    cluster: Cluster, operator: Operator
) -> None:
    """After the time that the operator allows for it; every other line has an error line."""
    cluster.reboot("a", BATCHYARD_GIVE_UP_SECONDS="5")
    await operator.api_answers()
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 400, milliseconds=300)
    weights = [machine.disk / "weights" for machine in cluster.gpu_machines]
    for folder in weights:
        folder.rename(folder.with_name("elsewhere"))
    try:
        for machine in await operator.machines_of(model, 2):
            await operator.kill_runner(machine, model)
        for asked in batches:
            ended = await operator.ended(asked, seconds=180)
            assert ended.status is BatchStatus.FAILED
            assert ended.errors is not None
            assert "which does not exist on" in ended.errors[0].message
            counts = (await operator.check(asked)).counts
            assert 10 <= counts.completed < counts.total
    finally:
        for folder in weights:
            folder.with_name("elsewhere").rename(folder)


async def test_a_runner_that_takes_minutes_to_begin_is_waited_for(
    cluster: Cluster, operator: Operator
) -> None:
    """As where a node is added and an image is pulled first; nobody starts more meanwhile."""
    python = ROOT / ".venv" / "bin" / "python"
    command = f"sh -c 'sleep {BEGIN_SECONDS}; exec {python} -m prefect.engine'"
    await operator.set_job_variable("run-chunks/gpu", "command", command)
    try:
        model = cluster.new_model()
        batch = await operator.submit(model, 20, "ours")
        await operator.check_completed(batch, seconds=BEGIN_SECONDS + 90)
        assert len(await operator.runners_of(model)) == 1
    finally:
        await operator.set_job_variable("run-chunks/gpu", "command", None)


async def test_prefect_forgets_everything_and_engine_blocks_come_last(
    cluster: Cluster, operator: Operator
) -> None:
    """Pools and deployments are there again before any block is: batches wait for the blocks."""
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 400, milliseconds=300)
    # Nobody who still has an engine may finish them meanwhile.
    for name in ("a", "b", "c"):
        cluster[name].cut_power()
    try:
        await cluster.forget_in_prefect()
        await asyncio.to_thread(cluster.deploy)
        for name in ("a", "b", "c"):
            cluster.boot(name)
        await operator.runner_ends(model, says="o engine")
        assert await operator.statuses(*batches) == {SERVED}
    finally:
        await asyncio.to_thread(cluster.save_blocks)
    await operator.check_completed(*batches, seconds=240)


async def test_a_database_of_a_newer_version_is_waited_for(
    cluster: Cluster, operator: Operator
) -> None:
    """Somebody has run a command of the next version, and runners of this one are started."""
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 400, milliseconds=300)
    database = await asyncpg.connect(cluster.database_url)
    try:
        revision = await database.fetchval("SELECT version_num FROM alembic_version")
        await database.execute("UPDATE alembic_version SET version_num = '9999'")
        try:
            for machine in await operator.machines_of(model, 2):
                await operator.kill_runner(machine, model)
            await operator.runner_ends(model, says="newer than this version")
            assert await operator.statuses(*batches) == {SERVED}
        finally:
            await database.execute("UPDATE alembic_version SET version_num = $1", revision)
    finally:
        await database.close()
    await operator.check_completed(*batches, seconds=240)


async def test_a_home_without_room_is_waited_for(cluster: Cluster, operator: Operator) -> None:
    """On both GPU machines, so that there is no other."""
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 400, milliseconds=300)
    homes = [(machine, str(machine.here / "home")) for machine in cluster.gpu_machines]
    for machine, home in homes:
        machine.run("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", home)
    try:
        for machine, _ in homes:
            await operator.kill_runner(machine, model)
        await operator.runner_ends(model, says="has no room")
        assert await operator.statuses(*batches) == {SERVED}
    finally:
        for machine, home in homes:
            machine.run("umount", "--lazy", home)
    await operator.check_completed(*batches, seconds=240)


@pytest.mark.vllm
async def test_a_vllm_that_is_killed_while_it_loads_ends_nobodys_batch(
    cluster: Cluster, operator: Operator
) -> None:
    require_vllm()
    model = cluster.new_model(vllm=True)
    cluster["c"].cut_power()
    batch = await operator.submit(model, 600, "ours")
    await operator.is_under_way(batch, seconds=LOAD_SECONDS)
    cluster.boot("c")
    await operator.machines_of(model, 2)
    assert cluster["c"].kill("--served-model-name", model)
    await operator.runner_ends(model, says="exit code -9")
    assert engine_of(cluster["b"], model)
    await operator.check_completed(batch, seconds=LOAD_SECONDS)
