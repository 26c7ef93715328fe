"""The base job template of a work pool of the type ``slurm``, and what it gives for a flow run."""

from __future__ import annotations

from typing import Any

from prefect.workers.base import BaseJobConfiguration, BaseVariables

from commands.slurm.job_script import COMMAND
from commands.slurm.options import JobOptions


class JobConfiguration(BaseJobConfiguration, JobOptions):
    """What the template gives for one flow run."""

    @staticmethod
    def _base_flow_run_command() -> str:
        # Prefect's own ends the flow run at the first SIGTERM.
        return COMMAND


class JobVariables(BaseVariables, JobOptions):
    """The options, and the variables that Prefect's templates of any type have."""


def base_job_template(options: JobOptions) -> dict[str, Any]:
    """The template of a work pool whose jobs have these options unless they are told otherwise."""
    schema = JobVariables.model_json_schema()
    schema.pop("title", None)
    for name, value in options.model_dump(exclude_none=True).items():
        schema["properties"][name]["default"] = value
    return {
        "job_configuration": {name: f"{{{{ {name} }}}}" for name in schema["properties"]},
        "variables": schema,
    }
