"""One fault, while batches of two tenants run: nobody's batch is touched.

Engines are stand-ins for vLLM that each machine starts for itself; everything else is real. More
faults, which take longer, are in :mod:`tests.machines.test_more_faults`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchyard.lifecycle import BatchStatus
from tests.machines.operator import engine_of
from tests.machines.stub_vllm import LOAD_SECONDS

if TYPE_CHECKING:
    from tests.machines.cluster import Cluster
    from tests.machines.operator import Operator


async def test_a_gpu_machine_loses_power(cluster: Cluster, operator: Operator) -> None:
    """The other one goes on with what it had, and it is of use again when it is back."""
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 150)
    lost, _ = await operator.machines_of(model, 2)
    lost.cut_power()
    await operator.goes_on(*batches)
    cluster.boot(lost.name)
    await operator.check_completed(*batches)


async def test_a_machine_that_is_set_up_wrong_ends_nobodys_batch(
    cluster: Cluster, operator: Operator
) -> None:
    """It gets the model's second runner, which fails; the other machine serves."""
    cluster.reboot("c", BATCHYARD_ENGINE_PYTHON="/no/such/python")
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 200, milliseconds=250)
    await operator.runner_ends(model, says="/no/such/python")
    await operator.check_completed(*batches)


async def test_an_engine_that_is_killed_while_it_loads_ends_nobodys_batch(
    cluster: Cluster, operator: Operator
) -> None:
    """As when a machine is out of memory: the other machine serves all the time."""
    cluster.reboot("c", **{LOAD_SECONDS: "60"})
    model = cluster.new_model()
    batches = await operator.two_tenants(model, 200, milliseconds=250)
    await operator.machines_of(model, 2)
    assert cluster["c"].kill("--served-model-name", model)
    await operator.runner_ends(model, says="ended with exit code -9")
    assert engine_of(cluster["b"], model)
    await operator.check_completed(*batches)


async def test_a_request_that_kills_engines_costs_its_tenant_one_line(
    cluster: Cluster, operator: Operator
) -> None:
    model = cluster.new_model()
    ours = await operator.submit(model, 150, "ours")
    await operator.is_under_way(ours)
    theirs = await operator.submit(model, 4, "theirs", tenant="theirs", poison=3)
    assert (await operator.ended(theirs)).status is BatchStatus.COMPLETED
    counts = (await operator.check(theirs)).counts
    assert (counts.completed, counts.failed) == (3, 1)
    await operator.check_completed(ours)


async def test_services_that_go_away_and_come_back_end_nobodys_batch(
    cluster: Cluster, operator: Operator
) -> None:
    """The database crashes, then the object store is away, then Prefect, all in one batch."""
    batches = await operator.two_tenants(cluster.new_model(), 300, milliseconds=200)
    cluster.postgres.crash()
    cluster.postgres.start_again()
    await operator.goes_on(*batches)
    cluster.s3.go_away()
    cluster.prefect.kill("server")
    cluster.s3.come_back()
    await operator.goes_on(*batches)
    cluster.prefect.start_server()
    await operator.check_completed(*batches)
