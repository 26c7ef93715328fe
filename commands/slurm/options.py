"""What an operator says of the jobs of a work pool: a table ``[slurm.POOL]`` of batchyard.toml.

They are the variables of the pool's base job template, so that a deployment, or a flow run that
somebody starts by hand, may have others. No Prefect here.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class JobOptions(BaseModel):
    """The fields of the table."""

    model_config = ConfigDict(extra="forbid")

    partition: str | None = Field(
        default=None, min_length=1, description="The partition; without it, the cluster's own."
    )
    account: str | None = Field(default=None, min_length=1, description="What Slurm accounts to.")
    qos: str | None = Field(default=None, min_length=1, description="The quality of service.")
    gpus: str | int = Field(
        default=1, description="GPUs of each job, such as 2 or h100:2, all on one node. 0: none."
    )
    cpus: int | None = Field(default=None, ge=1, description="Processors of each job.")
    memory: str | None = Field(
        default=None, min_length=1, description="Memory of each job, such as 64G."
    )
    time_limit: str | None = Field(
        default=None,
        min_length=1,
        description="How long a job may run, such as 4:00:00; without it, the partition's limit.",
    )
    drain_seconds: int = Field(
        default=60,
        ge=0,
        description="How long requests may finish that are in the engine when the job has to end. "
        "Slurm is asked for its signal a minute earlier than that.",
    )
    setup: str = Field(
        default="", description="Lines of bash before the command, such as: module load cuda"
    )
    command: str | None = Field(
        default=None,
        min_length=1,
        description="The command of a job, for example in a container: "
        "apptainer exec --nv runner.sif batchyard execute. Default: batchyard execute",
    )
    scratch: str = Field(
        default="/tmp",  # noqa: S108 - every node has it, and the folder in it is the job's own
        min_length=1,
        description="A folder of the node for temporary files and the engine's log; each job "
        "makes its own folder in it, and removes it.",
    )
    output_folder: str | None = Field(
        default=None,
        min_length=1,
        description="The shared folder of the jobs' own output; default: logs, in the home of the "
        "worker.",
    )
    options: list[str] = Field(
        default=[], description="Further options of sbatch, such as --constraint=a100"
    )
