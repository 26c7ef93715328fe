"""The rows of ``responses``: what a new one needs, and what is known of each afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, ColumnElement, Double, Index, LargeBinary
from sqlmodel import Field

from batchyard.batch.responses import ResponseError, ResponseStatus
from batchyard.database.columns import EnumText, JsonText, Record, Row


class _ResponseColumns(Record):
    id: str = Field(primary_key=True)
    tenant: str
    model: str
    completion_window: str
    given: bytes = Field(sa_type=LargeBinary, repr=False)
    """What was asked for, as :func:`batchyard.batch.responses.given_object` shows it, in JSON."""
    token_estimate: int = Field(sa_type=BigInteger)
    """The tokens of its prompt and its answer, estimated."""


class NewResponse(_ResponseColumns):
    """A response that was accepted. ``line`` is its line of an input file, newline included."""

    window_seconds: int
    line: bytes = Field(repr=False)


class ResponseRecord(_ResponseColumns):
    """A response as the database has it. Times are Unix seconds."""

    status: ResponseStatus = Field(sa_type=EnumText(ResponseStatus))
    """``queued`` until it has ended."""
    created_at: float = Field(sa_type=Double)
    expires_at: float = Field(sa_type=Double)
    ended_at: int | None = Field(sa_type=BigInteger)
    batch_id: str | None = Field(foreign_key="batches.id", index=True)
    """The batch that holds it; None: it is not collected yet."""
    error: ResponseError | None = Field(sa_type=JsonText(ResponseError))


class ResponseRow(Row, ResponseRecord, table=True):
    """One row for each response, until it is deleted or a month has passed since its end."""

    __tablename__ = "responses"
    __table_args__ = (Index(None, "ended_at"),)

    line: bytes | None = Field(sa_type=LargeBinary)
    """Until the response is collected or has ended."""


RESPONSES = ResponseRow.metadata.tables["responses"]
IS_OPEN: ColumnElement[bool] = RESPONSES.c.ended_at.is_(None)
"""The response has not ended."""
Index(
    "ix_responses_open",
    RESPONSES.c.tenant,
    RESPONSES.c.model,
    RESPONSES.c.completion_window,
    sqlite_where=IS_OPEN,
    postgresql_where=IS_OPEN,
)


@dataclass(frozen=True, slots=True)
class ResponseKind:
    """What the responses of one batch have in common."""

    tenant: str
    model: str
    completion_window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Responses of one kind that are in no batch yet."""

    kind: ResponseKind
    count: int
    oldest_seconds: float
    """How long the first of them has waited."""
    has_idle_batch: bool
    """An earlier batch of the kind waits for an engine."""


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A response that waits, with what becomes its line of an input file."""

    id: str
    line: bytes
    expires_at: float
