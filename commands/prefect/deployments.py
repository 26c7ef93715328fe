"""Deployments: what prefect.yaml says, for the pools that there are, and what a server has of it.

`prefect deploy` makes them, as it does for people; only those that are not as they should be.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prefect
import yaml
from prefect.exceptions import ObjectNotFound

import batchyard
from batchyard.errors import DispatchFailed
from commands import shipped
from commands.prefect.pools import CONTROL_POOL, DEFAULT_POOL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

_SAID_AT_MOST = 2000


@dataclass(frozen=True, slots=True)
class Wanted:
    """One deployment as prefect.yaml has it."""

    entry: Mapping[str, Any]

    @property
    def name(self) -> str:
        """``flow/deployment``."""
        flow = str(self.entry["entrypoint"]).rpartition(".")[2].replace("_", "-")
        return f"{flow}/{self.entry['name']}"

    def is_met(self, found: DeploymentResponse) -> bool:
        """Whether the server's is the same, as far as it can be compared.

        What cannot be, such as the form's fields, is in the version.
        """
        pool = self.entry["work_pool"]
        return (
            found.version == self.entry["version"]
            and found.entrypoint == self.entry["entrypoint"]
            and found.work_pool_name == pool["name"]
            and found.job_variables == pool["job_variables"]
            and self._has_our_schedules(found)
        )

    def _has_our_schedules(self, found: DeploymentResponse) -> bool:
        """A deployment of which the file schedules nothing may have schedules of its users."""
        ours = self.entry.get("schedules")
        return ours is None or [(each["interval"], each["active"]) for each in ours] == [
            (_seconds(each), each.active) for each in found.schedules
        ]


def wanted_deployments(gpu_pools: Sequence[str], pool_of_model: Mapping[str, str]) -> list[Wanted]:
    """Those of prefect.yaml, with one of run-chunks for each GPU pool."""
    file = yaml.safe_load(shipped.DEPLOYMENTS.read_text())
    made = []
    for entry in file["deployments"]:
        is_for_engines = entry["work_pool"]["name"] == DEFAULT_POOL
        for pool in gpu_pools if is_for_engines else (CONTROL_POOL,):
            each = copy.deepcopy(entry)  # YAML's anchors share what is the same
            environment = each["work_pool"]["job_variables"]["env"]
            if is_for_engines:
                each["name"] = each["work_pool"]["name"] = environment["BATCHYARD_POOL"] = pool
            elif pool_of_model:
                environment["BATCHYARD_POOLS"] = json.dumps(dict(pool_of_model), sort_keys=True)
            each["version"] = _version(each)
            made.append(Wanted(each))
    return made


async def deploy_unmet(client: PrefectClient, wanted: Sequence[Wanted]) -> list[str]:
    """Make those that are missing or different; their names.

    Raises :class:`~batchyard.errors.DispatchFailed` with what `prefect deploy` has said.
    """
    unmet = [each for each in wanted if not await _is_met(client, each)]
    if unmet:
        with tempfile.TemporaryDirectory(prefix="batchyard-deploy-") as folder:
            file = Path(folder) / "prefect.yaml"
            entries = [dict(each.entry) for each in unmet]
            file.write_text(yaml.safe_dump({"pull": [], "deployments": entries}))
            await _prefect_deploy(file)
    return [each.name for each in unmet]


async def _is_met(client: PrefectClient, wanted: Wanted) -> bool:
    try:
        return wanted.is_met(await client.read_deployment_by_name(wanted.name))
    except ObjectNotFound:
        return False


async def _prefect_deploy(file: Path) -> None:
    """`prefect deploy --all` in this process, as another one would import Prefect again."""
    from prefect.cli.deploy import deploy_app  # noqa: PLC0415 - a tenth of a second

    said = io.StringIO()  # no terminal, so it asks nothing
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            await deploy_app.run_async(["--all", "--prefect-file", str(file)])
    except SystemExit as end:
        if end.code:
            raise DispatchFailed(
                f"`prefect deploy` failed with exit code {end.code}:\n"
                f"{said.getvalue()[-_SAID_AT_MOST:]}"
            ) from None


def _version(entry: Mapping[str, Any]) -> str:
    """Ours, and a digest of all that a deployment is made from."""
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode())
    digest.update(prefect.__version__.encode())
    module = importlib.util.find_spec(str(entry["entrypoint"]).rpartition(".")[0])
    if module is not None and module.origin is not None:
        digest.update(Path(module.origin).read_bytes())
    return f"{batchyard.__version__}+{digest.hexdigest()[:12]}"


def _seconds(schedule: Any) -> float | None:
    interval = getattr(schedule.schedule, "interval", None)
    return None if interval is None else interval.total_seconds()
