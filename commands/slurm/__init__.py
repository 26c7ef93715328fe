"""Slurm as a work pool: a worker that submits flow runs as jobs, and watches them (ADR 92).

===================  ========================================================================
``options``          what an operator says of a pool's jobs: partition, GPUs, time limit …
``template``           the pool's base job template, in which they are the variables
``job_script``       the script of a job, and the words of `sbatch`
``cluster``          the calls of Slurm's commands, and a job as a value
``verdict``          what is to be done about a flow run, from what Slurm and Prefect say
``worker``           Prefect's worker that does it
===================  ========================================================================
"""

from __future__ import annotations

from typing import Final

TYPE: Final = "slurm"
"""The type of such a work pool."""
