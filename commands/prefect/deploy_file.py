"""The file of models, from which `batchyard deploy` makes blocks and pools.

::

    [[models]]
    model = "Qwen/Qwen3-8B"                       # every field of the engine's block, and its pool
    options = "--max-model-len 16384"
    pool = "gpu"

    [[models]]
    model = "big"
    base_url = "http://10.0.0.5:8000/v1"          # a server that runs already
    api_key = { variable = "BIG_API_KEY" }

    [engines_at_once]                             # the concurrency limit of each pool
    gpu = 2

    [slurm.gpu]                                   # the jobs of a pool whose engines Slurm starts
    partition = "gpu"
    time_limit = "4:00:00"

    [s3]                                          # the credentials for s3:// places
    endpoint_url = "https://s3.example.org"
    secret_access_key = { variable = "S3_SECRET" }

    [azure]                                       # for az://; [google]: for gs://; [hub]: for hf://
    account_name = "results"
    account_key = { variable = "AZURE_KEY" }

It may be the file of settings as well, ``batchyard.toml``.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, SecretStr, ValidationError

from batchyard.dispatch import block_name
from batchyard.engine.withdrawn import WITHDRAWN, why_withdrawn
from batchyard.errors import SettingsError
from batchyard.lines.offer import clashes
from batchyard.settings import Settings
from batchyard.settings_sources import read_config, settings_of, unknown_name
from blocks import (
    AzureCredentialsBlock,
    GoogleCredentialsBlock,
    HubCredentialsBlock,
    RemoteEngineBlock,
    S3CredentialsBlock,
    VllmEngineBlock,
)
from commands.prefect.pools import CONTROL_POOL, DEFAULT_POOL, gpu_pools
from commands.slurm.options import JobOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from prefect.blocks.core import Block

EngineBlock = VllmEngineBlock | RemoteEngineBlock
CredentialsBlock = (
    S3CredentialsBlock | AzureCredentialsBlock | GoogleCredentialsBlock | HubCredentialsBlock
)
B = TypeVar("B", bound=EngineBlock | CredentialsBlock)
M = TypeVar("M", bound=BaseModel)

CREDENTIALS: Final[Mapping[str, type[CredentialsBlock]]] = {
    "s3": S3CredentialsBlock,
    "azure": AzureCredentialsBlock,
    "google": GoogleCredentialsBlock,
    "hub": HubCredentialsBlock,
}
"""The tables of credentials, and the block that each of them is."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, how it is served, and the work pool whose workers do it."""

    block: EngineBlock
    pool: str

    @property
    def name(self) -> str:
        """The name of its block."""
        return block_name(self.block.model)


@dataclass(frozen=True, slots=True)
class DeployFile:
    """What the file has."""

    models: tuple[ServedModel, ...] = ()
    engines_at_once: Mapping[str, int] = field(default_factory=dict)
    credentials: Sequence[CredentialsBlock] = ()
    slurm: Mapping[str, JobOptions] = field(default_factory=dict)
    """The pools whose engines are jobs of Slurm."""

    @property
    def gpu_pools(self) -> list[str]:
        """The pools that run engines: the usual one, and those that the file names."""
        named = {model.pool for model in self.models}
        return gpu_pools(named | self.engines_at_once.keys() | self.slurm.keys())

    @property
    def pool_of_model(self) -> dict[str, str]:
        """The models that are not on the usual pool; see :attr:`Settings.pools`."""
        return {each.block.model: each.pool for each in self.models if each.pool != DEFAULT_POOL}


def read_deploy_file(path: Path) -> DeployFile:
    """Raises :class:`~batchyard.errors.SettingsError` that names the file and what is wrong."""
    data = read_config(path)
    try:
        settings_of(data, Settings)  # refuses names that mean nothing
        models = tuple(_model(entry) for entry in _tables(data.get("models", []), "[[models]]"))
        _check_distinct(models)
        limits = _limits(data.get("engines_at_once", {}))
        credentials = tuple(
            _block(kind, data[name], f"[{name}]")
            for name, kind in CREDENTIALS.items()
            if name in data
        )
        slurm = _slurm(data.get("slurm", {}))
        _check_reachable(models, slurm)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    wanted = DeployFile(models, limits, credentials, slurm)
    if CONTROL_POOL in wanted.gpu_pools:
        raise SettingsError(f"{path}: the pool {CONTROL_POOL} runs no engines: name another one.")
    return wanted


def _check_reachable(models: Sequence[ServedModel], slurm: Mapping[str, JobOptions]) -> None:
    for model in models:
        if model.pool in slurm and isinstance(model.block, VllmEngineBlock) and model.block.live:
            raise SettingsError(
                f"the model {model.block.model}: live requests cannot reach a job of Slurm, and an "
                "engine for them has no end: name another pool, or leave live out."
            )


def _tables(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise SettingsError(f"{what} must be a list of tables.")
    return value


def _model(entry: dict[str, Any]) -> ServedModel:
    fields = dict(entry)
    pool = fields.pop("pool", DEFAULT_POOL)
    if not isinstance(pool, str) or not pool:
        raise SettingsError(f"the pool of the model {entry.get('model')} must be a name.")
    what = f"the model {entry.get('model', 'without a name')}"
    if "base_url" in fields:
        return ServedModel(_block(RemoteEngineBlock, fields, what, "pool"), pool)
    return ServedModel(_block(VllmEngineBlock, fields, what, "pool", "base_url"), pool)


def _block(kind: type[B], given: Any, what: str, *more: str) -> B:
    """A block with these fields; ``more`` are names that are handled elsewhere."""
    if not isinstance(given, dict):
        raise SettingsError(f"{what} must be a table.")
    for name in given:
        if kind is VllmEngineBlock and name in WITHDRAWN:
            raise SettingsError(f"{what}: {why_withdrawn(name, name)}")
        if name not in kind.model_fields:
            known = {*kind.model_fields, *more}
            raise SettingsError(f"{what}: {unknown_name(name, known, 'field')}")
    values = {name: _value(kind, name, value, what) for name, value in given.items()}
    return _made(kind, values, what)


def _made(kind: type[M], values: Mapping[str, Any], what: str) -> M:
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"{what}: {where}: {first['msg']}.") from None


def _value(kind: type[Block], name: str, value: Any, what: str) -> Any:
    """The value of a field; of a secret, that of the variable which the file names."""
    if kind.model_fields[name].annotation is not SecretStr or not isinstance(value, dict):
        return value
    variable = value.get("variable")
    if len(value) != 1 or not isinstance(variable, str):
        raise SettingsError(f'{what}: {name} is a text, or {{ variable = "NAME" }}.')
    if variable not in os.environ:
        raise SettingsError(f"{what}: {name} is in the variable {variable}, which is not set.")
    return os.environ[variable]


def _slurm(given: Any) -> dict[str, JobOptions]:
    if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
        raise SettingsError("[slurm] has a table for each pool, such as [slurm.gpu].")
    for pool, options in given.items():
        for name in options:
            if name not in JobOptions.model_fields:
                raise SettingsError(
                    f"[slurm.{pool}]: {unknown_name(name, {*JobOptions.model_fields}, 'option')}"
                )
    return {pool: _made(JobOptions, options, f"[slurm.{pool}]") for pool, options in given.items()}


def _check_distinct(models: Sequence[ServedModel]) -> None:
    counted = Counter(model.name for model in models)
    for model in models:
        if counted[model.name] > 1:
            raise SettingsError(
                f"several models have the block name {model.name}, {model.block.model} for one: "
                "a block serves one model."
            )
    _check_adapters({model.block.model: [*model.block.adapters] for model in models})


def _check_adapters(adapters_of: Mapping[str, Sequence[str]]) -> None:
    for adapter, models in clashes(adapters_of).items():
        if adapter in adapters_of:
            raise SettingsError(
                f"the model {models[0]}: its adapter {adapter} has the name of a model: give it "
                "another one."
            )
        raise SettingsError(
            f"the models {' and '.join(models)} have adapters of one name, {adapter}: give each "
            "its own."
        )


def _limits(given: Any) -> dict[str, int]:
    is_usable = isinstance(given, dict) and all(
        isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
        for limit in given.values()
    )
    if not is_usable:
        raise SettingsError("[engines_at_once] has a number for each pool, such as gpu = 2.")
    return dict(given)
