"""The rows of ``batches``: their table, what a new one needs, what clients see of it.

Changing them is in ``batches``, ``leases`` and ``schedule``.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - SQLModel reads it at run time
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    FromClause,
    Index,
    Text,
    and_,
    false,
    literal_column,
    or_,
)
from sqlmodel import Field, SQLModel

from batchyard.batch.batch_options import DeliveryKind  # noqa: TC001 - in a dataclass
from batchyard.batch.bounds import bound_words
from batchyard.batch.chains import Stage, stage_file_id
from batchyard.batch.prices import BILLION
from batchyard.batch_error import BatchError
from batchyard.database.columns import EnumText, JsonText, Record, Row, UsageColumns, usage_from
from batchyard.database.leasing import LeaseColumns
from batchyard.database.sealed import Sealed
from batchyard.intervals import DAY_SECONDS
from batchyard.lifecycle import TERMINAL, UNFINISHED, BatchStatus
from batchyard.logs.time_words import bare_moment
from batchyard.plan.lengths import LengthClass
from batchyard.store.tables.batch_options import BatchOptions
from batchyard.store.tables.file import HiddenFor
from batchyard.wire import (
    Amount,
    Batch,
    BatchErrors,
    BatchUsage,
    BatchWarning,
    RequestCounts,
    new_batch_id,
    new_file_id,
    result_file_id,
)

COMPLETION_WINDOW_SECONDS = DAY_SECONDS


@dataclass(frozen=True, slots=True)
class BatchLocations:
    """The user's own path, URL or S3 location of each file, and who is notified of its end.

    These are secrets, so ``repr`` does not show them.
    """

    input: str | None = field(default=None, repr=False)
    output: str | None = field(default=None, repr=False)
    error: str | None = field(default=None, repr=False)
    receivers: Mapping[DeliveryKind, str] = field(default_factory=dict, repr=False)
    """The receivers of each channel; an e-mail address is not a secret, and is the batch's."""
    template: str | None = field(default=None, repr=False)
    """What makes a request of each row, where the input is a dataset."""


class _BatchColumns(Record):
    id: str = Field(default_factory=new_batch_id, primary_key=True)
    tenant: str = "default"
    endpoint: str
    input_file_id: str = Field(default_factory=new_file_id)
    completion_window: str = "24h"
    # SQLModel has an attribute `metadata` of its own.
    client_metadata: dict[str, str] | None = Field(
        default=None,
        alias="metadata",
        sa_type=JsonText(dict[str, str]),
        sa_column_kwargs={"name": "metadata", "key": "client_metadata"},
    )
    options: BatchOptions = Field(default=BatchOptions(), sa_type=JsonText(BatchOptions))
    priority: int = 0
    """A higher priority runs first, among batches with the same deadline."""
    retry_of: str | None = None
    """The finished batch whose unanswered and failed lines these are."""
    output_lifetime_seconds: int | None = Field(default=None, sa_type=BigInteger)
    """How long its result files are kept, from their creation; None: the default."""
    notify_email: str | None = Field(default=None, repr=False)
    """The address that gets an e-mail when it ends."""
    message_requests: int | None = Field(default=None, sa_type=BigInteger)
    """Of a Message Batch that has not been deleted: how many requests it has; None: it is none."""
    hidden_for: HiddenFor | None = Field(default=None, sa_type=EnumText(HiddenFor))
    """What it is for, if its tenant neither created it nor sees it."""
    part_of: str | None = None
    """The chain of which it has lines of a further stage. None: it is no part of a chain."""
    is_inline: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    """Whether only `batchyard run` runs it, which has its engine: the one that made it, or one that
    resumes it."""
    stages: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    """How many further stages its lines go through. 0: it is no chain, and has no parts."""

    @property
    def metadata(self) -> dict[str, str] | None:  # type: ignore[override]  # the table has its own
        """What the client has attached to it."""
        return self.client_metadata

    @property
    def is_hidden(self) -> bool:
        """Whether its tenant neither created it nor sees it."""
        return self.hidden_for is not None

    @property
    def is_parent(self) -> bool:
        """Whether its lines go on in other batches, its parts."""
        return self.stages > 0


class NewBatch(_BatchColumns):
    """A new batch. ``window_seconds`` is the length of ``completion_window``.

    ``input_file_id`` may be that of a file which does not exist: yet, for one that is still
    to be fetched from ``locations.input``.
    """

    window_seconds: int = COMPLETION_WINDOW_SECONDS
    locations: BatchLocations = BatchLocations()
    then: tuple[Stage, ...] = ()
    """What its lines go through behind the first stage; ``stages`` follows from it."""

    def values(self) -> dict[str, Any]:
        """The values of its row, without the times, which the database adds."""
        places = {column.name: getattr(self.locations, name) for name, column in _PLACES.items()}
        columns = self.model_dump(exclude={"window_seconds", "locations", "then"})
        template = self.locations.template
        return {**columns, "stages": len(self.then), **places, "template": template}


class ScheduleColumns(SQLModel):
    """When a batch runs, and its forecast."""

    paused_at: int | None = Field(sa_type=BigInteger)
    eta_at: int | None = Field(sa_type=BigInteger)
    """When it will probably be done; None while nothing is known, and once it no longer runs."""
    late_since: int | None = Field(sa_type=BigInteger)
    """Since when every forecast has said that the window will end before the batch."""
    at_risk_at: int | None = Field(sa_type=BigInteger)
    """When it was first seen that the window will probably end before the batch."""
    tail_tokens: float | None = Field(default=None, sa_type=Double)
    """How many tokens the last of its answers will probably lack when the others have ended."""
    wait_reason: str | None
    """Why nothing of it goes on now; None: it goes on, or may soon. While it is in progress, no
    runner serves its model, or its chunks are in trouble. In any other status its step was put off.
    A change of the status clears it."""


NO_FORECAST: Final = {"eta_at": None, "late_since": None}
"""The new values of a batch that runs no more."""


class BatchRecord(_BatchColumns, ScheduleColumns, LeaseColumns, UsageColumns):
    """A batch, less its locations. Times are whole Unix seconds.

    ``counts`` and ``cost`` are live until the end; ``usage`` is zero until the end. The owner of
    its lease processes it.
    """

    status: BatchStatus = Field(sa_type=EnumText(BatchStatus))
    model: str | None
    output_file_id: str | None
    error_file_id: str | None
    created_at: int = Field(sa_type=BigInteger)
    expires_at: int = Field(sa_type=BigInteger)
    in_progress_at: int | None = Field(sa_type=BigInteger)
    finalizing_at: int | None = Field(sa_type=BigInteger)
    completed_at: int | None = Field(sa_type=BigInteger)
    failed_at: int | None = Field(sa_type=BigInteger)
    expired_at: int | None = Field(sa_type=BigInteger)
    cancelling_at: int | None = Field(sa_type=BigInteger)
    cancelled_at: int | None = Field(sa_type=BigInteger)
    total: int = Field(default=0, sa_type=BigInteger)
    completed: int = Field(default=0, sa_type=BigInteger)
    failed: int = Field(default=0, sa_type=BigInteger)
    errors: tuple[BatchError, ...] | None = Field(sa_type=JsonText(tuple[BatchError, ...]))
    """Why it failed or, while it is ``finalizing``, why it was stopped early."""
    plan_key: str | None
    flow_run_id: str | None
    token_estimate: int = Field(default=0, sa_type=BigInteger)
    """Tokens of all its requests, prompts and answers; 0 until it was planned once."""
    awaited_requests: int | None = Field(default=None, sa_type=BigInteger)
    """It waits, ``validating``, until its tenant's quota has room for so many requests, and for the
    tokens of ``token_estimate``. None: it does not wait for that."""
    deduplicated_requests: int = Field(default=0, sa_type=BigInteger)
    """Requests with another one's answer; zero until the end."""
    cost: int | None = Field(sa_type=BigInteger)
    """In billionths of ``currency``, by the prices at its end; None: it has, or had, no price.
    Until then, what it costs so far, which is not in its row.
    """
    currency: str | None
    undelivered: dict[str, str] | None = Field(sa_type=JsonText(dict[str, str]))
    """Why a result file is not where the user wanted it, by ``output`` and ``error``."""

    @property
    def models(self) -> tuple[str, ...]:
        """Its model. Before the input is read: those that its lines may name; empty: any."""
        return (self.model,) if self.model else self.options.models

    @property
    def counts(self) -> RequestCounts:
        """Its requests, and those that have their answer or their error."""
        return RequestCounts(self.total, self.completed, self.failed)

    @property
    def usage(self) -> BatchUsage:
        """The tokens of all its answers."""
        return usage_from(vars(self))

    @property
    def warnings(self) -> tuple[BatchWarning, ...]:
        """What its owner may have to repair: of its requests, and so that the result files get
        to their places."""
        found = self._warnings_of_lines()
        if self.status in TERMINAL:
            found += [
                BatchWarning(code="not_delivered", message=why, param=f"{kind}_url")
                for kind, why in (self.undelivered or {}).items()
            ]
            return tuple(found)
        if self.awaited_requests is not None and self.status is BatchStatus.VALIDATING:
            message = (
                "It waits until its tenant's quota has room for its "
                f"{self.awaited_requests:,} requests and {self.token_estimate:,} tokens. Batches "
                "that were created before it go first."
            )
            found.append(
                BatchWarning(code="waits_for_quota", message=message, param="input_file_id")
            )
        for kind, facts in self.options.urls.items():
            expires_at, eta_at = facts.expires_at, self.eta_at
            if expires_at is not None and eta_at is not None and expires_at <= eta_at:
                message = (
                    f"The URL for the {kind} file expires at {bare_moment(expires_at)} UTC, "
                    "before the batch will probably be done: give a new one."
                )
                found.append(
                    BatchWarning(code="url_expires_early", message=message, param=f"{kind}_url")
                )
            if facts.doubt is not None:
                message = f"It is not known whether the {kind} file can be written: {facts.doubt}"
                found.append(
                    BatchWarning(code="url_not_checked", message=message, param=f"{kind}_url")
                )
        return tuple(found)

    @property
    def limited_by(self) -> str:
        """What kept it from being faster, in words; empty: it has not ended, or was too short."""
        return bound_words(self.options.bounds) if self.status in TERMINAL else ""

    @property
    def batch_invariant(self) -> bool:
        """Whether it has ended, and all of its engines were batch-invariant."""
        return self.status in TERMINAL and self.options.batch_invariant is True

    def _warnings_of_lines(self) -> list[BatchWarning]:
        found = [
            BatchWarning(
                code="field_ignored",
                message=f"The engine ignores body.{name}, which is in {_lines(lines)}.",
                param=f"body.{name}",
            )
            for name, lines in self.options.ignored.items()
        ]
        if fewer := self.options.fewer_answers:
            message = (
                f"At least {_lines(fewer)} got fewer answers than body.n asks for: the engine may "
                "ignore it."
            )
            found.append(BatchWarning(code="fewer_answers", message=message, param="body.n"))
        return found

    def counting(
        self, *, completed: int, failed: int, cost: int | None = None, currency: str = ""
    ) -> BatchRecord:
        """The same batch, which has not ended, with these live counts and its cost so far."""
        live: dict[str, Any] = {"completed": completed, "failed": failed}
        if cost is not None:
            live |= {"cost": cost, "currency": currency}
        return self.model_copy(update=live)

    def to_wire(self) -> Batch:
        """The Batch object that clients see."""
        return Batch(
            id=self.id,
            endpoint=self.endpoint,
            model=self.model,
            errors=self._errors_to_wire(),
            input_file_id=self.input_file_id,
            completion_window=self.completion_window,
            status=self.status,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            created_at=self.created_at,
            in_progress_at=self.in_progress_at,
            expires_at=self.expires_at,
            finalizing_at=self.finalizing_at,
            completed_at=self.completed_at,
            failed_at=self.failed_at,
            expired_at=self.expired_at,
            cancelling_at=self.cancelling_at,
            cancelled_at=self.cancelled_at,
            request_counts=self.counts,
            usage=self._usage_to_wire(),
            metadata=self.metadata,
            warnings=self.warnings or msgspec.UNSET,
            limited_by=self.limited_by or msgspec.UNSET,
            batch_invariant=self.batch_invariant or msgspec.UNSET,
        )

    def _errors_to_wire(self) -> BatchErrors | None:
        # While the files of a batch that was stopped are made, it may still turn out complete.
        if self.errors is None or self.status is not BatchStatus.FAILED:
            return None
        return BatchErrors(data=self.errors)

    def _usage_to_wire(self) -> BatchUsage:
        usage = self.usage
        if self.options.deduplicate:
            count = self.deduplicated_requests
            usage = msgspec.structs.replace(usage, deduplicated_requests=count)
        if self.cost is not None and self.currency is not None:
            cost = Amount(value=self.cost / BILLION, currency=self.currency)
            name = "cost" if self.status in TERMINAL else "cost_so_far"
            usage = msgspec.structs.replace(usage, **{name: cost})
        return usage


class BatchRow(Row, BatchRecord, table=True):  # type: ignore[misc]  # `metadata` is the tables'
    """One row for each batch, never deleted. Counts and usage are final, and zero until the end."""

    __tablename__ = "batches"
    __table_args__ = (
        Index(None, "status", "expires_at"),
        Index(None, "tenant", "status"),
        Index(None, "tenant", "created_at", "id"),
        Index(None, "created_at", "id"),
    )

    length_classes: list[LengthClass] | None = Field(sa_type=JsonText(list[LengthClass]))
    """The classes in the order of their numbers in its plan, from 1."""
    input_location: str | None = Field(sa_type=Sealed)
    output_location: str | None = Field(sa_type=Sealed)
    error_location: str | None = Field(sa_type=Sealed)
    template: str | None = Field(default=None, sa_type=Text)
    """What makes a request of each row of its dataset; None: its input has requests."""


BATCHES = BatchRow.metadata.tables["batches"]
IS_IN_PROGRESS: ColumnElement[bool] = BATCHES.c.status == literal_column("'in_progress'")
"""A literal and no parameter, as the index on it needs."""
Index(
    "ix_batches_in_progress",
    BATCHES.c.model,
    BATCHES.c.expires_at,
    sqlite_where=IS_IN_PROGRESS,
    postgresql_where=IS_IN_PROGRESS,
)
IS_MESSAGE_BATCH: ColumnElement[bool] = BATCHES.c.message_requests.is_not(None)
Index(
    "ix_batches_messages",
    BATCHES.c.tenant,
    BATCHES.c.created_at,
    BATCHES.c.id,
    sqlite_where=IS_MESSAGE_BATCH,
    postgresql_where=IS_MESSAGE_BATCH,
)
Index(
    "ix_batches_part_of",
    BATCHES.c.part_of,
    sqlite_where=BATCHES.c.part_of.is_not(None),
    postgresql_where=BATCHES.c.part_of.is_not(None),
)
RESULTS: Final = (BATCHES.c.id, BATCHES.c.stages)
"""From these follow the ids of its files: see :func:`result_file_ids`."""
IS_PARENT: Final = BATCHES.c.stages > 0
"""Its lines go on in other batches, its parts: it is a chain."""
_UNFINISHED: Final[list[ColumnElement[str]]] = [
    literal_column(f"'{status.value}'") for status in sorted(UNFINISHED)
]


def _lines(number: int) -> str:
    return "1 line" if number == 1 else f"{number:,} lines"


def seen_by(tenant: str) -> ColumnElement[bool]:
    """The batch is the tenant's, and neither holds its background responses nor is a part."""
    return and_(BATCHES.c.tenant == tenant, BATCHES.c.hidden_for.is_(None))


def works_for(tenant: str) -> ColumnElement[bool]:
    """The batch is one that the tenant sees, or a part of it."""
    hidden_for = BATCHES.c.hidden_for
    is_wanted = or_(hidden_for.is_(None), hidden_for == HiddenFor.CHAIN)
    return and_(BATCHES.c.tenant == tenant, is_wanted)


def result_file_ids(batch_id: str, stages: int) -> set[str]:
    """The ids of the files that a batch with these :data:`RESULTS` may publish."""
    return {
        result_file_id(batch_id, "output"),
        result_file_id(batch_id, "error"),
        result_file_id(batch_id, "ledger"),
        *(stage_file_id(batch_id, stage) for stage in range(1, stages + 1)),
    }


def has_no_owner(table: FromClause) -> ColumnElement[bool]:
    """The batch has not ended, and no process has claimed it. As literals, for the index."""
    return and_(table.c.owner.is_(None), table.c.status.in_(_UNFINISHED))


Index(
    "ix_batches_no_owner",
    BATCHES.c.tenant,
    sqlite_where=has_no_owner(BATCHES),
    postgresql_where=has_no_owner(BATCHES),
)
_PLACES = {name: BATCHES.c[f"{name}_location"] for name in ("input", "output", "error")}
LOCATION_COLUMNS = [*_PLACES.values(), BATCHES.c.template]
"""The columns of :class:`BatchLocations`; its receivers have a table."""
RECORD_COLUMNS = BatchRecord.columns(BATCHES)
