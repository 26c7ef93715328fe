"""``batchyard engine-node``: what it needs, where it finds its leader, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from batchyard.cli.terminal.exit_status import ExitStatus
from batchyard.store import new_sealing_key
from tests.patience import PATIENCE
from tests.services.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path


def engine_node(home: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {"BATCHYARD_HOME": str(home), "BATCHYARD_ENGINE_PYTHON": sys.executable}
    process = subprocess.Popen(
        [sys.executable, "-m", "batchyard.cli", "engine-node", *words],
        env=os.environ | environment | variables,
        stderr=subprocess.PIPE,
        text=True,
    )
    threading.Timer(PATIENCE * 20, process.kill).start()
    return process


def test_a_machine_without_the_key_of_the_installation_makes_none(tmp_path: Path) -> None:
    """It would be another key, with which no leader lets it in."""
    with engine_node(tmp_path, "gpu1") as process:
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == ExitStatus.FAILED
    assert "This machine has no key of the installation: set BATCHYARD_SECRET_KEY, or copy" in said
    assert not (tmp_path / "secret.key").exists()


def test_an_environment_without_vllm_is_said_at_once(tmp_path: Path) -> None:
    with engine_node(tmp_path, "gpu1", BATCHYARD_SECRET_KEY=new_sealing_key()) as process:
        assert process.stderr is not None
        assert "has no vLLM" in process.stderr.read()
    assert process.returncode == ExitStatus.FAILED


@pytest.mark.parametrize("variable", ["LWS_LEADER_ADDRESS", "SLURM_LAUNCH_NODE_IPADDR"])
def test_it_waits_for_the_leader_that_kubernetes_or_slurm_names(
    tmp_path: Path, variable: str
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    port = free_port()
    variables = {
        variable: "127.0.0.1",
        "BATCHYARD_SECRET_KEY": new_sealing_key(),
        "BATCHYARD_ENGINE_PYTHON": str(python),
    }
    with engine_node(tmp_path, "--port", str(port), **variables) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
    assert f"waiting for the leader 127.0.0.1:{port} (Connection refused)" in said
    assert process.returncode == ExitStatus.TERMINATED
