"""Under Slurm the runner starts the nodes itself, as a step on the other nodes of its job."""

from __future__ import annotations

import sys
import tempfile
from typing import IO, TYPE_CHECKING, Final

from batchyard.errors import EngineStartFailed
from batchyard.processes.guarded_process import GuardedProcess

if TYPE_CHECKING:
    from collections.abc import Mapping

STOP_SECONDS: Final = 15.0
"""A node ends its vLLM within ten."""
_LAST_LINES: Final = 20


class NodesStep:
    """``srun`` with one `batchyard engine-node` on each of the other nodes of this job."""

    def __init__(self, process: GuardedProcess, output: IO[bytes]) -> None:
        self._process = process
        self._output = output

    def check(self) -> None:
        """Raise :class:`~batchyard.errors.EngineStartFailed` if it has ended."""
        if (code := self._process.exit_code) is None:
            return
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        said = "\n".join(f"    {line}" for line in lines)
        raise EngineStartFailed(
            f"srun ended with exit code {code} before all nodes joined:\n{said}"
        )

    async def stop(self) -> None:
        """End what is left of it: nodes end by themselves when the leader has left them."""
        await self._process.stop(STOP_SECONDS)
        self._output.close()


def start_step(nodes: int, port: int, environment: Mapping[str, str]) -> NodesStep | None:
    """Start ``nodes`` nodes, which join ``port`` of this machine; None: there is no Slurm job.

    Raises :class:`~batchyard.errors.EngineStartFailed` for a job that is too small, and
    ``OSError`` where there is no ``srun``.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return None
    has = int(environment.get("SLURM_JOB_NUM_NODES") or 1)
    if has < nodes + 1:
        raise EngineStartFailed(
            f"the Slurm job {job} has too few nodes, {has}: the engine needs {nodes + 1}. Submit "
            f"it with --nodes={nodes + 1}."
        )
    words = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    if here := environment.get("SLURMD_NODENAME"):
        words.append(f"--exclude={here}")
    # Where srun runs is what Slurm tells the nodes: SLURM_LAUNCH_NODE_IPADDR.
    words += [sys.executable, "-m", "batchyard.cli", "engine-node", "--port", str(port), "--once"]
    output = tempfile.TemporaryFile()  # noqa: SIM115 - NodesStep closes it
    return NodesStep(GuardedProcess(words, environment=environment, log=output.fileno()), output)
