"""The parts of the settings that have a table of their own in the file."""

from __future__ import annotations

import socket
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from batchyard.lines.body_policy import REFUSABLE, BodyPolicy, is_host
from batchyard.lines.rules import Limits
from batchyard.logs.setup import Format, Level
from batchyard.notify.email import check_address


class _Part(BaseModel):
    """Not `BaseSettings`, which would read variables without a prefix, such as ``PORT``."""

    model_config = ConfigDict(extra="forbid")


class LimitSettings(_Part):
    """The limits of one input file; see :class:`batchyard.lines.rules.Limits`.

    Those on the size of a file hold for clients of the API. The operator's files, of ``batchyard
    run``, ``submit`` and the deployments, may have any size.
    """

    max_requests: int = Field(default=Limits().max_requests, ge=1)
    """How many requests one input file of a client may have."""
    max_bytes: int = Field(default=Limits().max_bytes, ge=1)
    """How many bytes one input file of a client may have."""
    max_line_bytes: int = Field(default=Limits().max_line_bytes, ge=1)
    """How many bytes one line may have."""
    max_embedding_inputs: int = Field(default=Limits().max_embedding_inputs, ge=1)
    """How many texts all embedding requests of one file of a client may have together."""

    def to_limits(self, *, of_client: bool) -> Limits:
        """The limits as the validator takes them, for a client's file or the operator's own."""
        limits = Limits(**self.model_dump())
        return limits if of_client else limits.of_any_size()


class BodySettings(_Part):
    """What request bodies of clients may contain; see :class:`~.body_policy.BodyPolicy`.

    ``batchyard run`` does not check its own user's file, unless it has ``--client-rules``.
    """

    allowed_fields: list[str] = Field(default_factory=list)
    """Refused fields that clients may set nevertheless, with commas between
    them: ``chat_template,priority``. docs/input-format.md lists the refused fields."""
    media_domains: list[str] = Field(default_factory=list)
    """The hosts from which engines may fetch the images, recordings and videos that bodies name by
    URL, with commas between them. Empty: media must be ``data:`` URLs in the body."""
    max_choices: int = Field(default=BodyPolicy().max_choices, ge=1)
    """How many answers one request may ask for (``n``, ``best_of``)."""
    max_logprobs: int = Field(default=BodyPolicy().max_logprobs, ge=0)
    """How many alternatives a request may ask for each token (``logprobs``, ``top_logprobs``,
    ``prompt_logprobs``)."""
    max_stops: int = Field(default=BodyPolicy().max_stops, ge=0)
    """How many texts ``stop`` may list."""
    max_list_items: int = Field(default=BodyPolicy().max_list_items, ge=0)
    """How many entries ``logit_bias``, ``bad_words`` and lists of token ids may have."""
    max_schema_bytes: int = Field(default=BodyPolicy().max_schema_bytes, ge=1)
    """How many bytes ``response_format``, ``structured_outputs``, ``tools`` and similar fields may
    each have, as JSON."""
    max_grammar_bytes: int = Field(default=BodyPolicy().max_grammar_bytes, ge=1)
    """How many bytes a regular expression or grammar for the answer may have."""

    @field_validator("allowed_fields")
    @classmethod
    def _are_known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in REFUSABLE:
                raise ValueError(f"{name!r} is not one of {', '.join(sorted(REFUSABLE))}")
        return names

    @field_validator("media_domains")
    @classmethod
    def _are_hosts(cls, names: list[str]) -> list[str]:
        for name in names:
            if not is_host(name):
                raise ValueError(f"{name!r} is not a host name: give it without scheme and port")
        return [name.lower() for name in names]

    def to_policy(self) -> BodyPolicy:
        """The policy as the validator takes it."""
        values = self.model_dump()
        for name in ("allowed_fields", "media_domains"):
            values[name] = frozenset(values[name])
        return BodyPolicy(**values)


class QuotaSettings(_Part):
    """The quotas of a tenant that has none of its own; unset or ``none``: no limit."""

    active_batches: int | None = Field(default=None, ge=0)
    """How many batches of a tenant may be active at a time."""
    enqueued_requests: int | None = Field(default=None, ge=0)
    """How many unanswered requests all active batches of a tenant may have together."""
    enqueued_tokens: int | None = Field(default=None, ge=0)
    """How many tokens, by an estimate, these requests may need together."""
    when_full: Literal["refuse", "wait"] = "refuse"
    """What becomes of a batch for whose requests or tokens there is no room. ``refuse``: it fails.
    ``wait``: it waits until earlier batches of its tenant are done, and fails only if it is larger
    than the whole quota."""
    batches_per_hour: int | None = Field(default=2000, ge=0)
    """How many batches a tenant may create over the HTTP API in any hour; ``none``: no limit."""
    stored_bytes: int | None = Field(default=None, ge=0)
    """How many bytes the files and unfinished uploads of a tenant may have together. Results count,
    and are stored in any case."""
    live_requests: int = Field(default=0, ge=0)
    """How many live requests a tenant may have in flight at a time, in each process of the API;
    0: none, so that only tenants with a limit of their own may send any."""

    @field_validator(
        "active_batches",
        "enqueued_requests",
        "enqueued_tokens",
        "batches_per_hour",
        "stored_bytes",
        mode="before",
    )
    @classmethod
    def _none_is_no_limit(cls, given: object) -> object:
        return None if given == "none" else given


class LogSettings(_Part):
    """What the API, the workers and their flow runs log; docs/reference/logs.md has the events."""

    format: Format = "text"
    """``text``: lines for people; ``json``: one JSON object per line, for a log store."""
    level: Level = "INFO"
    """Log events of this level and above: ``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``."""


class PriceSettings(_Part):
    """The prices of one model, in the currency of the settings."""

    input: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    cached: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    output: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    engine_hour: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class SmtpSettings(_Part):
    """The mail server that sends the e-mails; without ``host`` no e-mail is sent."""

    host: str | None = None
    """The mail server's host name; unset: no e-mail is sent."""
    port: int = Field(default=587, ge=1, le=65_535)
    """The mail server's port."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """``starttls``: encrypt the connection, or send nothing; ``tls``: for servers that use TLS from
    the start, usually on port 465; ``none``: for a server on this machine."""
    username: str | None = None
    """The user name, if the mail server requires a login."""
    password: SecretStr | None = None
    """The password for ``username``."""
    sender: str | None = None
    """The address that e-mails come from; unset: ``batchyard@`` and this machine's name."""

    @property
    def from_address(self) -> str:
        """The address that messages are sent from."""
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
