"""What an operator may set, read once in a composition root (the CLI, a flow, the API).

Sources: ``BATCHYARD_…`` environment variables, then the file that ``BATCHYARD_CONFIG`` names, or
``batchyard.toml`` in the working folder, the folder where the worker was started, or
``BATCHYARD_HOME``; the first value wins. What only flows need, and an operator edits while flows
run (engine options, S3 credentials), is in Prefect blocks instead; `batchyard deploy` makes them.
"""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    IPvAnyNetwork,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from batchyard.batch.prices import Price, Prices
from batchyard.errors import SettingsError
from batchyard.intervals import BATCH_LEASE_SECONDS
from batchyard.processes.machine import Machine, this_machine
from batchyard.settings_parts import (
    BodySettings,
    LimitSettings,
    LogSettings,
    PriceSettings,
    QuotaSettings,
    SmtpSettings,
)
from batchyard.settings_sources import (
    PREFIX,
    Variables,
    check_database,
    check_names,
    check_storage,
    config_file,
    is_in_bucket,
    read_config,
    settings_of,
)
from batchyard.web.address import AddressGuard
from batchyard.web.authorities import context_trusting


class Settings(BaseSettings):
    """All settings. With the defaults everything runs on one machine without further services."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
    )

    home: Path = Path("~/.batchyard")
    """The folder of the database, objects, temporary files and keys, unless they are elsewhere."""
    database_url: SecretStr | None = None
    """``sqlite:////absolute/path`` or ``postgresql://…``; unset: SQLite in ``home``."""
    storage: str | None = None
    """The absolute path of a folder, ``s3://bucket/prefix``, ``az://container/prefix`` or
    ``gs://bucket/prefix``; unset: a folder in ``home``.

    S3 credentials and endpoint are those of boto3: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` ….
    Those of Azure are in ``AZURE_STORAGE_ACCOUNT_NAME``, ``AZURE_STORAGE_ACCOUNT_KEY`` …, those of
    Google in ``GOOGLE_APPLICATION_CREDENTIALS`` ….
    """
    shared_paths: bool = False
    """Whether a path means the same file on every machine, for example in a mounted folder.

    If not, and ``storage`` is in a bucket, submitted batches cannot write results to paths, because
    they may run on another machine than the one where the path was entered."""
    secret_key: SecretStr | None = None
    """Fernet keys, comma-separated, newest first; unset: a file in ``home``, made at first use."""
    metrics_token: SecretStr | None = None
    """What ``GET /metrics`` of the API asks for, as ``Authorization: Bearer …``; unset: nothing.

    Set it if users reach the API without a proxy that blocks ``/metrics``."""
    public_url: str | None = None
    """The address at which people open the API in a browser, for example
    ``https://batches.example.org``; unset: nothing links to a batch's page."""
    engine_python: Path | None = None
    """The Python of the environment that has vLLM; unset: the one that `batchyard engine install`
    has chosen, or ``.venv-engine`` next to the project."""
    runners: Literal["inline", "pool"] = "inline"
    """Where chunks run: ``inline``, in the process-batch flow run; ``pool``, in run-chunks flow
    runs on the GPU pool."""
    order: Literal["prefix", "input"] = "prefix"
    """The order in which requests run; results are always in input order."""
    chunk_requests: int = Field(default=1024, ge=1)
    """About how many requests one chunk holds. In a batch of more than 131,072 lines it holds more,
    up to 8192."""
    live_host: str | None = Field(default=None, pattern=r"^[A-Za-z0-9.:_-]{1,253}$")
    """The name or address of this machine at which the API reaches its engines for live requests.
    Unset: they listen on a Unix socket, for an API on the same machine."""
    live_port: int = Field(default=0, ge=0, le=65_535)
    """With ``live_host``: the port of the first engine of this machine that takes live requests;
    the next ones take the ports after it. 0: any free port."""
    lease_seconds: float = Field(default=60.0, gt=0)
    """How long a lease on a chunk or an engine slot lasts without renewal. A lease on a batch
    lasts as long, but 30 seconds at most."""
    batches_at_once: int = Field(default=200, ge=1)
    """How many batches of one tenant a run-batches flow run processes at a time. Batches of
    other tenants may have up to a third as many places in addition."""
    pools: dict[str, str] = Field(default_factory=dict)
    """The GPU work pool of each model, as JSON; all other models run on ``gpu``."""
    pool: str = "gpu"
    """The work pool that this process runs on; set by the deployment."""
    engine_slots: list[str] = Field(default_factory=list)
    """The engine slots of this machine: ``0,1`` for two with one GPU each. JSON for slots with
    several, each a value of ``CUDA_VISIBLE_DEVICES``: ``["0,1", "2"]``. Empty: one slot with all
    devices."""
    machine: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """The name of this machine in messages and for its engine slots; unset: its hostname.

    Processes of one host with the same name share engine slots. Give containers of one host the
    same name if they share GPUs, and different names if each has its own GPUs."""
    swap_seconds: float = Field(default=300.0, ge=0)
    """The least time that an engine serves its model before another model may take its slot."""
    admission: Literal["off", "refuse"] = "off"
    """``refuse``: refuse a batch if the forecast says that it cannot be done in its window."""
    validation: Literal["basic", "deep"] = "basic"
    """``deep``: the validation of every batch counts tokens with the model's own tokenizer and
    tries schemas and tools, whether the batch asks for it or not."""
    ledger: bool = False
    """Every batch has a ledger of what each line used and cost, whether it asks for one or not."""
    background_days: int = Field(default=30, ge=1, le=365)
    """How long a batch with the completion window ``background`` may take before it expires."""
    max_window_days: int = Field(default=30, ge=1, le=3650)
    """The longest completion window that may be asked for."""
    tenant: str | None = Field(default=None, min_length=1)
    """The tenant of all batches that `submit-batch` creates here, set in the job variables of a
    deployment; unset: the flow's parameter decides."""
    cache_shared_by: Literal["tenant", "all"] = "tenant"
    """Which tenants share the engines' prefix cache. ``tenant``: each has its own part, so that
    ``cached_tokens`` and speed reveal nothing about others' prompts; ``all``: all share it."""
    cache_groups: dict[str, list[str]] = Field(default_factory=dict)
    """Groups of tenants that share a part of the prefix cache, as JSON:
    ``{"search": ["alice", "bob"]}``. All other tenants have their own part."""
    quota: QuotaSettings = QuotaSettings()
    flush_seconds: float = Field(default=2.0, gt=0)
    """How long a finished line waits at most until it is durable. Each chunk that runs writes an
    object this often: a larger value saves requests to S3, and a crash repeats more lines."""
    runner_start_seconds: float = Field(default=1800.0, gt=0)
    """How long a runner on a GPU pool may take to start (a node is added, an image is pulled)
    before its flow run counts as lost. Until then it counts as started."""
    give_up_seconds: float = Field(default=900.0, ge=0)
    """How long all runners of a model must have failed, on any machine and without an answer in
    between, before the model's batches end as ``failed`` and keep their finished lines."""
    runner_idle_seconds: float = Field(default=60.0, ge=0)
    """How long a runner without work keeps its engine running."""
    drain_seconds: float = Field(default=20.0, ge=0)
    """How long a runner may take to finish the requests in its engine after SIGTERM. Then it ends,
    and they run again elsewhere. Give the service manager a minute more than this."""
    request_timeout_seconds: float = Field(default=3600.0, gt=0)
    """How long one request may take in the engine."""
    hang_seconds: float = Field(default=120.0, gt=0)
    """How long an engine with requests may produce no token before it counts as hung and is
    restarted."""
    request_attempts: int = Field(default=5, ge=1)
    """How often a request is attempted if it gets 408, 409, 425 or 500. Half a second passes before
    the second attempt, and twice as long before each further one. An answer that says that the
    server takes no requests now, such as 429 or 503, counts only if it is about this one request:
    others were answered meanwhile."""
    allow_private_urls: bool = False
    """Whether clients' URLs may use http and lead to any address; for development only."""
    internal_networks: list[IPvAnyNetwork] = Field(default_factory=list)
    """Private networks that clients' URLs may lead to, at any port, with commas between
    them: ``10.20.0.0/16,10.30.1.0/24``. For your own webhook receivers and object stores."""
    ca_file: Path | None = None
    """A PEM file with the certificate authorities to trust: those of webhook receivers, of the mail
    server, of input and output URLs, of S3 and of running engines. It replaces the system's list,
    so append yours to a copy of that list if you need both. Unset: the system's authorities."""
    prices: dict[str, PriceSettings] = Field(default_factory=dict)
    """What batches cost, by model, ``*`` for all others, as JSON:
    ``{"*": {"input": 0.1, "cached": 0.02, "output": 0.4, "engine_hour": 2.5}}``. The first three
    are prices of a million tokens; ``cached`` is as ``input`` if it is not set. ``engine_hour`` is
    the price of an hour of one engine, with all its GPUs. A batch's cost is fixed at its end; what
    it costs so far is computed by each process that shows it."""
    currency: str = Field(default="usd", pattern="^[A-Za-z]{3}$")
    """The currency of ``prices``, as its ISO code of three letters."""
    limits: LimitSettings = LimitSettings()
    bodies: BodySettings = BodySettings()
    smtp: SmtpSettings = SmtpSettings()
    log: LogSettings = LogSettings()
    webhook_data: Literal["thin", "full"] = "thin"
    """``thin``: an event has only the batch's id, like OpenAI's; ``full``: also its counts, files
    and usage."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the base class calls by name
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - see above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - see above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments come before the environment, and that before ``batchyard.toml``."""
        path = config_file()
        in_file = settings_of(read_config(path), settings_cls) if path else {}
        return init_settings, Variables(settings_cls), InitSettingsSource(settings_cls, in_file)

    @field_validator("cache_groups")
    @classmethod
    def _check_groups(cls, groups: dict[str, list[str]]) -> dict[str, list[str]]:
        members = [tenant for tenants in groups.values() for tenant in set(tenants)]
        twice = sorted({tenant for tenant in members if members.count(tenant) > 1})
        if twice:
            raise ValueError(f"a tenant can be in one group only: {', '.join(twice)}")
        return groups

    @field_validator("home", mode="before")
    @classmethod
    def _is_named(cls, home: Any) -> Any:
        if home == "":
            raise ValueError("it is empty: name a folder, or unset it for ~/.batchyard")
        return home

    @field_validator("database_url")
    @classmethod
    def _is_one_database(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            check_database(url.get_secret_value())
        return url

    @field_validator("storage")
    @classmethod
    def _is_one_place(cls, place: str | None) -> str | None:
        if place is not None:
            check_storage(place)
        return place

    @field_validator("public_url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
        # People see it in links: a query or a password has no business there.
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", url):
            # Nor in the message.
            raise ValueError("it is not an address such as https://batches.example.org")
        return url.rstrip("/")

    @field_validator("ca_file")
    @classmethod
    def _check_authorities(cls, ca_file: Path | None) -> Path | None:
        ca_file = ca_file and ca_file.expanduser().absolute()
        try:
            context_trusting(ca_file)
        except OSError as error:
            # OpenSSL's own message for a file without certificates names its C function.
            reason = "it has no certificates in PEM"
            if not isinstance(error, ssl.SSLError):
                reason = str(error.strerror)
            raise ValueError(f"{ca_file} cannot be used: {reason}") from None
        return ca_file

    def cache_scope(self, tenant: str) -> str | None:
        """The name of the cache that the tenant's requests use; None: the one that all share."""
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
        """How long a process owns a batch without renewing its lease: 30 seconds at most.

        After a crash, the batches of the process wait this long. If another process takes them
        over too early, that costs no inference.
        """
        return min(self.lease_seconds, BATCH_LEASE_SECONDS)

    @property
    def price_table(self) -> Prices:
        """What batches that end now cost."""
        by_model = {name: Price(**each.model_dump()) for name, each in self.prices.items()}
        return Prices(currency=self.currency.lower(), by_model=by_model)

    @property
    def address_guard(self) -> AddressGuard | None:
        """The addresses that clients' URLs may lead to; None: all."""
        if self.allow_private_urls:
            return None
        return AddressGuard(tuple(self.internal_networks))

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """How other servers' certificates are checked; None: as the system does."""
        return context_trusting(self.ca_file)

    @property
    def this_machine(self) -> Machine:
        """The machine that this process runs on."""
        return this_machine(self.machine)

    @property
    def knows_its_machine(self) -> bool:
        """Whether a user's path is on the machine where the batch will run."""
        return self.shared_paths or self.storage is None or not is_in_bucket(self.storage)

    def page_of(self, batch_id: str) -> str | None:
        """The address of the batch's page; None where people do not reach the API."""
        return None if self.public_url is None else f"{self.public_url}/batches/{batch_id}"

    @property
    def database(self) -> str:
        """The URL of the database, with its password."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.home_folder / 'batchyard.db'}"

    @property
    def home_folder(self) -> Path:
        """``home``, absolute, with ``~`` replaced."""
        return self.home.expanduser().absolute()


def read_settings(**overrides: Any) -> Settings:
    """Read and check all settings. Raises :class:`SettingsError` that names each wrong one."""
    check_names(Settings, os.environ)
    try:
        return Settings(**overrides)
    except ValidationError as error:
        wrong = "; ".join(
            f"BATCHYARD_{'__'.join(str(part) for part in entry['loc']).upper()}: {entry['msg']}"
            for entry in error.errors(include_input=False, include_url=False)
        )
        raise SettingsError(f"Unusable settings: {wrong}.") from None
