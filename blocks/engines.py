"""Engines: how a model is served. The block document is named after the model, as a slug."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Literal, Self

from prefect.blocks.core import Block
from pydantic import Field, SecretStr, field_validator, model_validator

from batchyard.engine.base import LivePromise
from batchyard.engine.objective import Objective
from batchyard.engine.remote.remote import RemoteEngine
from batchyard.engine.remote.server_address import possible_addresses
from batchyard.engine.vllm.lora import check_options
from batchyard.engine.vllm.nodes.leader import Nodes
from batchyard.engine.vllm.nodes.link import DEFAULT_PORT
from batchyard.engine.vllm.nodes.orders import check_nodes
from batchyard.engine.vllm.vllm import VllmEngine
from batchyard.engine.vllm.vllm_options import EngineOptions
from batchyard.errors import SettingsError
from batchyard.lines.offer import check_adapter_names
from batchyard.schedule.hours import Hours, HoursWindow

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from pathlib import Path


_MODEL = (
    "The name that request bodies carry. The block's own name is the same in lower case, with "
    "hyphens: org/Model-3.1-8B is org-model-3-1-8b."
)
_BATCH_HOURS = (
    'When batches may use the engine, such as [{"cron": "0 20 * * 1-5", "until": "06:00", '
    '"timezone": "Europe/Berlin"}]. Empty: at any time.'
)
_Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Quantile = Annotated[float, Field(ge=0.5, lt=1)]
_Seats = Annotated[int, Field(ge=0)]
_TTFT = (
    "Objective for users while batches run: time to first token in milliseconds. Batches then use "
    "as much of the engine as this allows."
)
_ITL = (
    "Objective for users while batches run: time between two tokens of an answer (inter-token "
    "latency) in milliseconds."
)
_QUANTILE = "The quantile for which ttft_ms and itl_ms must hold: 0.99 is p99."


class VllmEngineBlock(Block):
    """A model that a GPU worker serves with its own vLLM."""

    _block_type_name = "Batchyard vLLM engine"
    _block_type_slug = "batchyard-vllm-engine"

    model: str = Field(description=_MODEL)
    weights: str = Field(
        default="",
        description="The folder or hub id to load. Empty if the model's name is one.",
    )
    options: str = Field(
        default="",
        description="Options of `vllm serve`, as in a shell: --max-model-len 8192 --dtype half.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description='Environment variables of the engine, such as {"HF_HOME": "/data/models"}.',
    )
    batch_invariant: bool = Field(
        default=False,
        description="The answer to a request does not depend on the requests that run beside it, "
        "as far as vLLM can: VLLM_BATCH_INVARIANT. On a CPU requests run one at a time.",
    )
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters of the model, by the names that request bodies carry: "
        '{"contracts": "/data/adapters/contracts"}. Each is a folder as PEFT saves one, or a hub '
        "id.",
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="On how many machines the engine runs: the GPU worker's own, and others on "
        "which `batchyard engine-node` runs, or Slurm or Kubernetes starts it.",
    )
    nodes_port: int = Field(
        default=DEFAULT_PORT,
        ge=1,
        le=65_535,
        description="With nodes. The port of the GPU worker's machine at which the others join.",
    )
    batch_hours: list[HoursWindow] = Field(default_factory=list, description=_BATCH_HOURS)

    @property
    def hours(self) -> Hours:
        """When batches may use the engine."""
        return Hours(tuple(self.batch_hours))

    live: bool = Field(
        default=False,
        description="The engine also answers live requests: POST /v1/chat/completions and similar "
        "ones on the API, for tenants that may send them. It then runs all the time, and live "
        "requests go before batches.",
    )
    ttft_ms: _Milliseconds | None = Field(default=None, description=f"With live. {_TTFT}")
    itl_ms: _Milliseconds | None = Field(default=None, description=f"With live. {_ITL}")
    latency_quantile: _Quantile = Field(default=0.99, description=_QUANTILE)
    reserve_seats: _Seats | None = Field(
        default=None,
        description="With live. How many of the seats are always left free for live requests. "
        "Empty: a quarter, or one in 16 with an objective.",
    )

    @field_validator("options")
    @classmethod
    def _is_a_command_line(cls, options: str) -> str:
        shlex.split(options)
        return options

    @model_validator(mode="after")
    def _has_live_users_to_consider(self) -> Self:
        if not self.live and _considers_users(self):
            raise ValueError("ttft_ms, itl_ms and reserve_seats are for engines that are live")
        return self

    @model_validator(mode="after")
    def _is_no_option_given_twice(self) -> Self:
        check_options(self.adapters, EngineOptions(shlex.split(self.options)))
        return self

    @model_validator(mode="after")
    def _suits_its_nodes(self) -> Self:
        check_nodes(self.nodes, EngineOptions(shlex.split(self.options)), self.environment)
        return self

    @model_validator(mode="after")
    def _has_adapters_with_names(self) -> Self:
        check_adapter_names(self.model, self.adapters)
        for name, path in self.adapters.items():
            if not path.strip():
                raise ValueError(f"the adapter {name} needs a folder or a hub id")
        return self

    def build(
        self,
        *,
        python: Path,
        log_path: Path | None = None,
        media_domains: Sequence[str] = (),
        secret_keys: Sequence[str] = (),
    ) -> VllmEngine:
        """The engine, not started.

        ``media_domains``: from where it may fetch clients' media; ``secret_keys``: those of the
        installation, by which it and its nodes know each other.
        """
        return VllmEngine(
            self.model,
            shlex.split(self.options),
            python=python,
            weights=self.weights or None,
            environment=self.environment | self._invariance(),
            log_path=log_path,
            media_domains=media_domains,
            live=self.live,
            promise=LivePromise(
                Objective.of(self.ttft_ms, self.itl_ms, self.latency_quantile),
                self.reserve_seats,
            ),
            adapters=self.adapters,
            nodes=Nodes(self.nodes - 1, port=self.nodes_port, secret_keys=secret_keys),
        )

    def _invariance(self) -> dict[str, str]:
        return {"VLLM_BATCH_INVARIANT": "1"} if self.batch_invariant else {}


class RemoteEngineBlock(Block):
    """A model on an OpenAI-compatible server that runs already."""

    _block_type_name = "Batchyard remote engine"
    _block_type_slug = "batchyard-remote-engine"

    model: str = Field(description=_MODEL)
    base_url: str = Field(
        description="What comes before /chat/completions, for example http://10.0.0.5:8000/v1."
    )
    api_key: SecretStr = Field(default=SecretStr(""), description="Sent as a Bearer token.")
    max_num_seqs: int = Field(
        default=0,
        ge=0,
        description="How many requests the server runs at once. 0: Batchyard asks the server, and "
        "finds what is fastest if it does not answer.",
    )
    exclusive: bool = Field(
        default=False,
        description="The server has no other users, so batches may use all of it. Otherwise they "
        "use half of its seats, fewer if others need more than a quarter, more while no one "
        "else uses it, and wait while its queue is not empty.",
    )
    ttft_ms: _Milliseconds | None = Field(
        default=None, description=f"{_TTFT} By the server's own metrics."
    )
    itl_ms: _Milliseconds | None = Field(default=None, description=_ITL)
    latency_quantile: _Quantile = Field(default=0.99, description=_QUANTILE)
    reserve_seats: _Seats | None = Field(
        default=None,
        description="How many of the seats are always left free for users. Empty: one in 16.",
    )
    priority: int | None = Field(
        default=None,
        ge=-(2**63),
        le=2**63 - 1,
        description="The priority that requests of batches carry; requests with a lower one go "
        "first. Only for a vLLM with --scheduling-policy priority: without that, vLLM ignores it, "
        "and other servers may refuse it.",
    )
    cache_salt: Literal["ask", "always", "never"] = Field(
        default="ask",
        description="Whether requests carry their tenant's cache_salt, which vLLM accepts and "
        "other servers may refuse. ask: if the server's /openapi.json names it.",
    )
    adapters: list[str] = Field(
        default_factory=list,
        description="The names of the LoRA adapters that the server has for the model.",
    )
    batch_hours: list[HoursWindow] = Field(default_factory=list, description=_BATCH_HOURS)

    @property
    def hours(self) -> Hours:
        """When batches may use the engine."""
        return Hours(tuple(self.batch_hours))

    @field_validator("base_url")
    @classmethod
    def _is_a_base(cls, url: str) -> str:
        try:
            possible_addresses(url)
        except SettingsError as error:
            raise ValueError(str(error)) from None
        return url

    @model_validator(mode="after")
    def _has_adapters_with_names(self) -> Self:
        check_adapter_names(self.model, self.adapters)
        return self

    @model_validator(mode="after")
    def _has_users_to_consider(self) -> Self:
        if self.exclusive and _considers_users(self):
            raise ValueError("ttft_ms, itl_ms and reserve_seats are for servers with other users")
        if self.max_num_seqs and (self.reserve_seats or 0) >= self.max_num_seqs:
            raise ValueError("reserve_seats must be less than max_num_seqs")
        return self

    def build(self, ssl_context: ssl.SSLContext | None) -> RemoteEngine:
        """The engine, not started. ``ssl_context``: how certificates are checked."""
        return RemoteEngine(
            self.base_url,
            self.model,
            api_key=self.api_key.get_secret_value() or None,
            max_num_seqs=self.max_num_seqs or None,
            exclusive=self.exclusive,
            objective=Objective.of(self.ttft_ms, self.itl_ms, self.latency_quantile),
            reserve_seats=self.reserve_seats,
            priority=self.priority,
            takes_cache_salt={"ask": None, "always": True, "never": False}[self.cache_salt],
            adapters=self.adapters,
            ssl_context=ssl_context,
        )


def _considers_users(block: VllmEngineBlock | RemoteEngineBlock) -> bool:
    for_users = (block.ttft_ms, block.itl_ms, block.reserve_seats)
    return any(value is not None for value in for_users)
