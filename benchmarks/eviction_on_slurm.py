"""What is lost when Slurm takes the job of a runner away at half of a batch.

``python -m benchmarks.eviction_on_slurm`` starts a real Slurm cluster with two nodes and all that
is deployed around it, as ``tests/slurm`` does. The engine is a stub that the runner of each job
asks over HTTP; it counts executions. As soon as half of the requests have their durable answer, a
job of an urgent partition preempts the runner's, with a grace time or without, or the node is lost.
The next job is the scheduler's and Slurm's. The requests are those of ``benchmarks.eviction``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchyard.lifecycle import BatchStatus
from benchmarks.eviction import (
    MAX_NUM_SEQS,
    NOTHING,
    Loss,
    answered,
    longest_gap,
    seconds_of,
    table,
    work_again,
)
from tests.deployed.conftest import LEASE_SECONDS, opened
from tests.services.slurm import CPUS, PARTITION, URGENT, running_slurm
from tests.slurm.conftest import DRAIN_SECONDS, deployed_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.deployed.conftest import Deployment
    from tests.services.slurm import SlurmCluster

_GRACE_SECONDS = 2 * DRAIN_SECONDS


@dataclass(frozen=True)
class Size:
    """``shortest_seconds``: of a request; the longest takes 16 times as long."""

    requests: int = 640
    shortest_seconds: float = 0.5


def measure(size: Size | None = None) -> list[Loss]:
    """The batch in peace first."""
    with (
        running_slurm() as slurm,
        tempfile.TemporaryDirectory() as name,
        # One job at a time, of as many requests as in `benchmarks.eviction`.
        deployed_on(slurm, Path(name), jobs=1, chunk_requests=MAX_NUM_SEQS) as server,
    ):
        os.environ["BATCHYARD_CONFIG"] = server.environment["BATCHYARD_CONFIG"]

        async def all_of_them() -> list[Loss]:
            async with opened(server, Path(name)) as deployed:
                return [await _life(size or Size(), deployed, slurm, what) for what in _EVICTIONS]

        return asyncio.run(all_of_them())


async def _life(size: Size, deployed: Deployment, slurm: SlurmCluster, what: str) -> Loss:
    def latency(body: bytes) -> float:
        return seconds_of(hashlib.sha256(body).hexdigest(), size.shortest_seconds)

    model = f"evicted-{[*_EVICTIONS].index(what)}"
    engine = await deployed.serve(model, latency=latency, max_num_seqs=MAX_NUM_SEQS)
    source, _ = deployed.input(model, size.requests)
    batch_id = await deployed.submit(source)
    began = time.monotonic()
    looking = asyncio.create_task(longest_gap(deployed.services, batch_id, size.requests))
    await answered(deployed.services, batch_id, size.requests // 2)
    node = slurm.call("squeue", "--noheader", "--states=RUNNING", "--format=%N").strip()
    _EVICTIONS[what](slurm, node)
    gap = await looking
    seconds = time.monotonic() - began
    assert (await deployed.ended_batch(batch_id)).status is BatchStatus.COMPLETED
    seconds = time.monotonic() - began
    # Each custom_id is in the results once, or this raises.
    answers = (await deployed.checked(batch_id, source)).counts.completed
    await asyncio.to_thread(slurm.cancel_all)
    if slurm.node_state(node).startswith("down"):
        slurm.start(node)
    executed = Counter(hashlib.sha256(request.body).hexdigest() for request in engine.log)
    return Loss(
        what,
        size.requests,
        answers,
        engine.executed,
        work_again(executed, size.shortest_seconds),
        gap,
        seconds,
    )


def _preempt(grace_seconds: int) -> Callable[[SlurmCluster, str], None]:
    def preempt(slurm: SlurmCluster, node: str) -> None:
        partition = f"PartitionName={PARTITION}"
        slurm.call("scontrol", "update", partition, f"GraceTime={grace_seconds}")
        words = (f"--partition={URGENT}", f"--cpus-per-task={CPUS}", f"--nodelist={node}")
        slurm.submit(*words)

    return preempt


_EVICTIONS: dict[str, Callable[[SlurmCluster, str], None]] = {
    NOTHING: lambda *_: None,
    f"the node is lost (leases of {LEASE_SECONDS} s)": lambda slurm, node: slurm.lose(node),
    "preempted, without a grace time": _preempt(0),
    f"preempted, {_GRACE_SECONDS} s of grace": _preempt(_GRACE_SECONDS),
}


if __name__ == "__main__":
    print(table(measure()))
