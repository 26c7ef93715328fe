"""What the tables are made of: their base classes, the types of columns, the token columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import msgspec
from sqlalchemy import BigInteger, MetaData, String, Text
from sqlalchemy.types import TypeDecorator
from sqlmodel import Field, SQLModel

from batchyard.wire import BatchUsage, InputTokensDetails, OutputTokensDetails

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import StrEnum

    from sqlalchemy import Column, Dialect, RowMapping, Table


class JsonText(TypeDecorator[Any]):
    """``shape`` as JSON text, read back as that shape; keys that it does not know are dropped.

    Text and not PostgreSQL's own JSON types: both databases keep every string that a client
    may send, escaped NULs included.
    """

    impl = Text
    cache_ok = True

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.shape = shape

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's signature
        """The value as JSON text."""
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ARG002 - SQLAlchemy's signature
        """The text as a value of ``shape``."""
        return None if value is None else msgspec.json.decode(value, type=self.shape)


class EnumText(TypeDecorator[Any]):
    """The values of a string enumeration as text, read back as its members."""

    impl = String
    cache_ok = True

    def __init__(self, shape: type[StrEnum]) -> None:
        super().__init__()
        self.shape = shape

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's signature
        """The member as text."""
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> StrEnum | None:  # noqa: ARG002 - SQLAlchemy's signature
        """The text as a member of ``shape``."""
        return None if value is None else self.shape(value)


class Record(SQLModel):
    """The base of what is written into a table or read from it: a frozen value.

    Its fields are columns, declared here once. The table beside it is a class of its own that
    inherits them, with ``table=True``, and adds what no record shows.
    """

    # A wrong value may be a secret, and errors end up in logs.
    model_config = {
        "frozen": True,
        "arbitrary_types_allowed": True,
        "hide_input_in_errors": True,
        "defer_build": True,
    }

    @classmethod
    def read(cls, row: Mapping[str, Any] | RowMapping) -> Self:
        """From a row that has its columns, and maybe others."""
        record: Self = cls.__new__(cls)
        # Not validated, for it comes from columns of these types: to validate a page of batches
        # takes as long as to read it.
        record.__dict__.update((name, row[name]) for name in cls.model_fields)
        return record

    @classmethod
    def columns(cls, table: Table) -> list[Column[Any]]:
        """What :meth:`read` needs of ``table``."""
        return [table.c[name] for name in cls.model_fields]


class Row(SQLModel):
    """The base of our tables, with metadata of its own so that no other SQLModel joins in."""

    model_config = {"defer_build": True}
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        }
    )


class UsageColumns(SQLModel):
    """The five token counts of :class:`~batchyard.wire.BatchUsage`, flat."""

    input_tokens: int = Field(default=0, sa_type=BigInteger)
    cached_tokens: int = Field(default=0, sa_type=BigInteger)
    output_tokens: int = Field(default=0, sa_type=BigInteger)
    reasoning_tokens: int = Field(default=0, sa_type=BigInteger)
    total_tokens: int = Field(default=0, sa_type=BigInteger)


USAGE_COLUMNS = tuple(UsageColumns.model_fields)


def usage_values(usage: BatchUsage) -> dict[str, int]:
    """The column values for ``usage``."""
    return {
        "input_tokens": usage.input_tokens,
        "cached_tokens": usage.input_tokens_details.cached_tokens,
        "output_tokens": usage.output_tokens,
        "reasoning_tokens": usage.output_tokens_details.reasoning_tokens,
        "total_tokens": usage.total_tokens,
    }


def usage_from(row: Mapping[str, Any]) -> BatchUsage:
    """The usage in a row that has the five columns."""
    return BatchUsage(
        input_tokens=row["input_tokens"],
        input_tokens_details=InputTokensDetails(row["cached_tokens"]),
        output_tokens=row["output_tokens"],
        output_tokens_details=OutputTokensDetails(row["reasoning_tokens"]),
        total_tokens=row["total_tokens"],
    )
