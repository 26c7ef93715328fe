"""The nodes of an engine as a step of a real Slurm job; a stand-in takes vLLM's place."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.store import new_sealing_key
from commands.slurm.job_script import script_of, words_of
from commands.slurm.options import JobOptions
from tests.patience import PATIENCE
from tests.services.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
LEADER = Path(__file__).with_name("leader_in_slurm.py")
FAKE_VLLM = ROOT / "tests" / "unit" / "engine" / "fake_vllm.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    slurm = pytest.importorskip("tests.services.slurm", reason="no cluster to start here")
    with slurm.running_slurm() as running:
        srun = running.bin / "srun"
        if not srun.exists():
            srun.write_text((running.bin / "sbatch").read_text().replace("sbatch", "srun"))
            srun.chmod(0o755)
        yield running


@pytest.mark.parametrize("whose", ["one's own", "a pool's"])
def test_a_runner_in_a_job_starts_its_nodes_on_the_others_and_again_after_a_loss(
    cluster: Any, tmp_path: Path, whose: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit\nexec {sys.executable} {FAKE_VLLM} "$@"\n')
    python.chmod(0o755)
    variables = {
        "PATH": f"{cluster.bin}:{os.environ['PATH']}",
        "SLURM_CONF": str(cluster.folder / "slurm.conf"),
        "PYTHONPATH": str(ROOT),
        "BATCHYARD_HOME": str(tmp_path / "home"),
        "BATCHYARD_SECRET_KEY": new_sealing_key(),
        "BATCHYARD_ENGINE_PYTHON": str(python),
    }
    said = tmp_path / "said"
    exports = "\n".join(f"export {name}='{value}'" for name, value in variables.items())
    command = f"{sys.executable} {LEADER} {free_port()} {tmp_path} > {said} 2>&1"
    if whose == "a pool's":
        pool = JobOptions(gpus=0, cpus=2, setup=exports, command=command, options=["--nodes=2"])
        _, _, *options = words_of(pool, name="huge", comment="", output="/dev/null")
        job = cluster.submit(*options, script=script_of(pool))
    else:
        options = ["--nodes=2", "--ntasks-per-node=1"]
        job = cluster.submit(*options, script=f"{exports}\nexec {command}")
    deadline = time.monotonic() + PATIENCE * 60
    while job in cluster.jobs("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.2)
    assert cluster.state_of(job).startswith("COMPLETED"), said.read_text()
    seen = json.loads(said.read_text().splitlines()[-1])
    assert seen["answers"] == [200, 200]
    assert "its vLLM ended with exit code -9" in seen["loss"]
    assert seen["loss_seconds"] < PATIENCE * 3
    assert seen["left"] == 0
