"""What an operator may set, read once in a composition root (the CLI, a flow, the API).

Sources, first wins: ``BATCHYARD_…`` environment variables, ``batchyard.toml`` in the working
folder. What only flows need and an operator edits while they run (engine options, S3 credentials)
is a Prefect block instead, so that a fact has one home.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    Field,
    IPvAnyNetwork,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from batchyard.body_policy import REFUSABLE, BodyPolicy, is_host
from batchyard.errors import SettingsError
from batchyard.lines import Limits
from batchyard.machine import Machine, this_machine
from batchyard.notify.email import check_address
from batchyard.web.address import AddressGuard

_BATCH_LEASE_SECONDS = 30.0


class LimitSettings(BaseSettings):
    """What one input file may hold; see :class:`batchyard.lines.Limits`."""

    max_requests: int = Field(default=Limits().max_requests, ge=1)
    max_bytes: int = Field(default=Limits().max_bytes, ge=1)
    max_line_bytes: int = Field(default=Limits().max_line_bytes, ge=1)
    max_embedding_inputs: int = Field(default=Limits().max_embedding_inputs, ge=1)

    def to_limits(self) -> Limits:
        return Limits(**self.model_dump())


class BodySettings(BaseSettings):
    """What request bodies from clients may hold; see :class:`batchyard.body_policy.BodyPolicy`.

    ``batchyard run`` takes its own user's file as it is, unless told ``--client-rules``.
    """

    allowed_fields: list[str] = Field(default_factory=list)
    """Fields that reach into the engine and that clients may set all the same, as JSON:
    ``["chat_template", "priority"]``. docs/input-format.md lists them."""
    media_domains: list[str] = Field(default_factory=list)
    """The hosts from which engines may fetch the images, recordings and videos that bodies name by
    URL, as JSON: ``["media.example.org"]``. Empty: bodies hold their media as ``data:`` URLs."""
    max_choices: int = Field(default=BodyPolicy().max_choices, ge=1)
    """Of ``n`` and ``best_of``: how many answers one request may make."""
    max_logprobs: int = Field(default=BodyPolicy().max_logprobs, ge=0)
    """Of ``logprobs``, ``top_logprobs`` and ``prompt_logprobs``: alternatives for each token."""
    max_stops: int = Field(default=BodyPolicy().max_stops, ge=0)
    """How many texts ``stop`` may list."""
    max_list_items: int = Field(default=BodyPolicy().max_list_items, ge=0)
    """Of ``logit_bias``, ``bad_words`` and the lists of token ids: how many entries."""
    max_schema_bytes: int = Field(default=BodyPolicy().max_schema_bytes, ge=1)
    """Of ``response_format``, ``structured_outputs``, ``tools`` and their like, each as JSON."""
    max_grammar_bytes: int = Field(default=BodyPolicy().max_grammar_bytes, ge=1)
    """Of a regular expression or grammar that the answer must follow."""

    @field_validator("allowed_fields")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in REFUSABLE:
                raise ValueError(f"{name!r} is none of {', '.join(sorted(REFUSABLE))}")
        return names

    @field_validator("media_domains")
    @classmethod
    def _are_hosts(cls, names: list[str]) -> list[str]:
        for name in names:
            if not is_host(name):
                raise ValueError(f"{name!r} is no host name: give it without scheme and port")
        return [name.lower() for name in names]

    def to_policy(self) -> BodyPolicy:
        values = self.model_dump()
        for name in ("allowed_fields", "media_domains"):
            values[name] = frozenset(values[name])
        return BodyPolicy(**values)


class QuotaSettings(BaseSettings):
    """What a tenant without a quota of its own may have at a time; unset: no limit."""

    active_batches: int | None = Field(default=None, ge=0)
    enqueued_requests: int | None = Field(default=None, ge=0)
    enqueued_tokens: int | None = Field(default=None, ge=0)
    batches_per_hour: int | None = Field(default=2000, ge=0)
    """How many batches a tenant may create over the HTTP API in any hour; None: no limit."""


class SmtpSettings(BaseSettings):
    """The mail server that takes our e-mails; without ``host`` none are sent."""

    host: str | None = None
    port: int = Field(default=587, ge=1, le=65_535)
    security: Literal["starttls", "tls", "none"] = "starttls"
    """``starttls``: encrypt or give up; ``tls``: from the first byte on, port 465 as a rule;
    ``none``: for a server on this machine."""
    username: str | None = None
    password: SecretStr | None = None
    sender: str | None = None
    """The address that e-mails come from; unset: ``batchyard@`` and this machine's name."""

    @property
    def from_address(self) -> str:
        return self.sender or f"batchyard@{socket.gethostname()}"

    @model_validator(mode="after")
    def _check_sender(self) -> Self:
        if self.host is not None:
            try:
                check_address(self.from_address)
            except ValueError:
                raise ValueError(
                    f"e-mails cannot come from {self.from_address}: "
                    "set BATCHYARD_SMTP__SENDER to one plain address"
                ) from None
        return self


class Settings(BaseSettings):
    """Every setting, with the default that runs on one machine and needs nothing else."""

    model_config = SettingsConfigDict(
        env_prefix="BATCHYARD_",
        env_nested_delimiter="__",
        toml_file="batchyard.toml",
        extra="forbid",
    )

    home: Path = Path("~/.batchyard")
    """Database, objects, spool and key of the embedded set-up."""
    database_url: SecretStr | None = None
    """``sqlite:///path`` or ``postgresql://…``; unset: SQLite in ``home``."""
    storage: str | None = None
    """A folder, or ``s3://bucket/prefix``; unset: a folder in ``home``.

    Credentials and endpoint of S3 are boto3's own: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` ….
    """
    shared_paths: bool = False
    """Whether a path means the same file on every machine: a mounted folder, or one machine.

    Without it, batches that are handed over cannot write to paths where ``storage`` is in S3: they
    may run on another machine than where the path was written down."""
    secret_key: SecretStr | None = None
    """Fernet keys, comma-separated, newest first; unset: a file in ``home``, made at first use."""
    engine_python: Path | None = None
    """The Python of the environment that has vLLM; unset: ``.venv-engine`` beside the project."""
    runners: Literal["inline", "pool"] = "inline"
    """Who runs chunks: ``inline``, process-batch itself; ``pool``, run-chunks on the GPU pool."""
    order: Literal["prefix", "input"] = "prefix"
    """The order in which requests run; results are in input order either way."""
    chunk_requests: int = Field(default=1024, ge=1)
    """About how many requests one chunk holds."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """How long a runner owns a chunk or an engine slot, and at most 30 seconds of it a batch,
    without a sign of life."""
    look_seconds: float = Field(default=1.0, gt=0)
    """How often a runner looks whether what it runs is still wanted."""
    poll_seconds: float = Field(default=0.25, gt=0)
    """How often a runner that has room looks for work."""
    batches_at_once: int = Field(default=200, ge=1)
    """How many batches one run-batches flow run takes through their lives at a time."""
    pools: dict[str, str] = Field(default_factory=dict)
    """The GPU work pool of each model, as JSON; a model that is not named runs on ``gpu``."""
    pool: str = "gpu"
    """The work pool that this process runs on; set by the deployment."""
    engine_slots: list[str] = Field(default_factory=list)
    """The engine slots of this machine, as JSON: the value of ``CUDA_VISIBLE_DEVICES`` of each,
    for example ``["0", "1"]`` or ``["0,1"]``. Empty: one slot, which sees every device."""
    machine: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """The name of this machine in messages and for its engine slots; unset: its hostname.

    Processes on one host that have the same name share engine slots. Give containers of one host
    one name if they share GPUs, and different names if each has GPUs of its own."""
    swap_seconds: float = Field(default=300.0, ge=0)
    """How long an engine at least serves before it gives its slot to another model."""
    admission: Literal["off", "refuse"] = "off"
    """``refuse``: a batch that by forecast would not be done within its window is refused."""
    tenant: str | None = Field(default=None, min_length=1)
    """The tenant of every batch that `submit-batch` creates here, to be set in the job variables
    of a deployment; unset: the flow's parameter of that name decides."""
    cache_shared_by: Literal["tenant", "all"] = "tenant"
    """Who shares what engines have cached of prompts: each ``tenant`` its own, so that
    ``cached_tokens`` and speed tell nothing of others' prompts, or ``all`` tenants."""
    cache_groups: dict[str, list[str]] = Field(default_factory=dict)
    """Tenants that share their caches, as JSON, under the name of their group:
    ``{"search": ["alice", "bob"]}``. The others have their own."""
    quota: QuotaSettings = QuotaSettings()
    flush_seconds: float = Field(default=2.0, gt=0)
    """The longest that a finished line waits to be durable."""
    runner_start_seconds: float = Field(default=1800.0, gt=0)
    """How long a runner on a GPU pool may take to begin (a node is added, an image is pulled)
    before its flow run counts as lost. Until then it counts as started."""
    give_up_seconds: float = Field(default=900.0, ge=0)
    """How long every runner of a model must have failed, on whichever machine and with no answer
    in between, before the model's batches end as ``failed`` with what is finished of them."""
    runner_idle_seconds: float = Field(default=60.0, ge=0)
    """How long a runner keeps its engine warm with nothing to do."""
    request_timeout_seconds: float = Field(default=3600.0, gt=0)
    """How long one request may take in the engine."""
    hang_seconds: float = Field(default=120.0, gt=0)
    """An engine that has requests and makes no token for so long is taken for dead."""
    request_attempts: int = Field(default=5, ge=1)
    """How often a request is tried that gets 408, 429, 5xx or no answer."""
    retry_pause_seconds: float = Field(default=0.5, gt=0)
    """The pause before the second try; it doubles with each further one."""
    allow_private_urls: bool = False
    """Whether clients' URLs may be http and lead anywhere: for development alone."""
    internal_networks: list[IPvAnyNetwork] = Field(default_factory=list)
    """Networks that are not public and that clients' URLs may lead to all the same, at any port,
    as JSON: ``["10.20.0.0/16"]``. For receivers of webhooks and stores of your own."""
    limits: LimitSettings = LimitSettings()
    bodies: BodySettings = BodySettings()
    smtp: SmtpSettings = SmtpSettings()
    webhook_data: Literal["thin", "full"] = "thin"
    """What an event holds of its batch: the id, as OpenAI's do, or counts, files and usage too."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class calls by name
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @field_validator("cache_groups")
    @classmethod
    def _check_groups(cls, groups: dict[str, list[str]]) -> dict[str, list[str]]:
        members = [tenant for tenants in groups.values() for tenant in set(tenants)]
        twice = sorted({tenant for tenant in members if members.count(tenant) > 1})
        if twice:
            raise ValueError(f"a tenant can be in one group only: {', '.join(twice)}")
        return groups

    def cache_scope(self, tenant: str) -> str | None:
        """Whose cache the tenant's requests use, as a name; None: the one of all."""
        if self.cache_shared_by == "all":
            return None
        for group, tenants in self.cache_groups.items():
            if tenant in tenants:
                return f"group:{group}"
        return f"tenant:{tenant}"

    def pool_of(self, model: str) -> str:
        """The work pool whose workers run the model's engines."""
        return self.pools.get(model, "gpu")

    @property
    def batch_lease_seconds(self) -> float:
        """How long a process owns a batch without a sign of life: never more than 30 seconds.

        Batches whose process has crashed wait for so long, and it costs no inference when
        another process takes them over too soon.
        """
        return min(self.lease_seconds, _BATCH_LEASE_SECONDS)

    @property
    def address_guard(self) -> AddressGuard | None:
        """Where URLs that clients give may lead; None: anywhere."""
        if self.allow_private_urls:
            return None
        return AddressGuard(tuple(self.internal_networks))

    @property
    def this_machine(self) -> Machine:
        """The machine that this process runs on."""
        return this_machine(self.machine)

    @property
    def knows_its_machine(self) -> bool:
        """Whether a path that a user writes is on the machine where a batch will be run."""
        is_in_s3 = self.storage is not None and self.storage.startswith("s3://")
        return self.shared_paths or not is_in_s3

    @property
    def home_folder(self) -> Path:
        return self.home.expanduser().absolute()


def read_settings(**overrides: Any) -> Settings:
    """Read and check all settings. Raises :class:`SettingsError` that names each wrong one."""
    try:
        return Settings(**overrides)
    except ValidationError as error:
        wrong = "; ".join(
            f"BATCHYARD_{'__'.join(str(part) for part in entry['loc']).upper()}: {entry['msg']}"
            for entry in error.errors(include_input=False, include_url=False)
        )
        raise SettingsError(f"Unusable settings: {wrong}.") from None
