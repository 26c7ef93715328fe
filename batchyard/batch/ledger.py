"""The ledger of a batch: what each of its lines used and cost, as rows of JSON Lines. Pure.

The tokens are those by which the batch's ``usage`` is counted: a line that has another one's answer
used none, and a line that was sent again used those of all attempts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from batchyard.batch.prices import BILLION
from batchyard.wire import TokenUsage

if TYPE_CHECKING:
    from batchyard.batch.prices import Prices


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one line used of one model, in one stage; or, without ``line``, what no line did."""

    line: int | None = None
    """The line's number in the input, from 1."""
    custom_id: str | None = None
    stage: int | None = None
    """The stage, from 1, which is the only one of a batch without ``then``."""
    endpoint: str | None = None
    model: str | None = None
    status: int | None = None
    """The HTTP status of the answer; None: there is no answer."""
    error: str | None = None
    """Why there is no answer: a code."""
    input_tokens: int = 0
    cached_tokens: int = 0
    """Those of the input that were read from the cache."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Those of the output that are no part of the answer."""
    total_tokens: int = 0
    deduplicated: bool = False
    """It has the answer of another line, which used the tokens."""
    cost: float | None = None
    """By the prices of tokens; None: there was no price."""
    currency: str | None = None

    @property
    def usage(self) -> TokenUsage:
        """The tokens of the row."""
        return TokenUsage(*(getattr(self, name) for name in TokenUsage._fields))

    def to_line(self) -> bytes:
        """As a line of JSON Lines, its end included."""
        return _encode(self) + b"\n"


@dataclass(frozen=True, slots=True)
class Charge:
    """What the lines of a segment are charged for, and by which prices."""

    stage: int
    endpoint: str
    model: str | None
    prices: Prices

    def row(self, ordinal: int, line: bytes, usage: TokenUsage, *, is_copy: bool) -> LedgerRow:
        """The row of a result line. ``ordinal`` is its place in the input, from 0."""
        result = _result_of(line)
        price = self.prices.of(self.model) if self.model is not None else None
        cost = None
        if price is not None:
            amount = price.amount(
                input_tokens=usage.input_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
                engine_seconds=0.0,
            )
            cost = amount / BILLION
        return LedgerRow(
            line=ordinal + 1,
            custom_id=result.custom_id,
            stage=self.stage,
            endpoint=self.endpoint,
            model=self.model,
            status=None if result.response is None else result.response.status_code,
            error=None if result.error is None else result.error.code,
            deduplicated=is_copy,
            cost=cost,
            currency=None if cost is None else self.prices.currency,
            **usage._asdict(),
        )


class LedgerSums:
    """Adds up rows, to find what of a batch's usage and cost is no line's."""

    def __init__(self) -> None:
        self._used = dict.fromkeys(TokenUsage._fields, 0)
        self._cost = 0

    def add(self, line: bytes) -> None:
        """Count a row that :meth:`LedgerRow.to_line` has made."""
        row = _decode_row(line)
        for name in self._used:
            self._used[name] += getattr(row, name)
        self._cost += round((row.cost or 0.0) * BILLION)

    def rest(
        self, usage: TokenUsage, cost: int | None, currency: str | None, model: str | None
    ) -> LedgerRow | None:
        """The row that makes the sums equal to a batch's; None: they are.

        ``cost`` in billionths; None: the batch had no price.
        """
        tokens = {name: getattr(usage, name) - used for name, used in self._used.items()}
        cost_left = 0 if cost is None else cost - self._cost
        if not (any(tokens.values()) or cost_left):
            return None
        return LedgerRow(
            model=model,
            cost=None if cost is None else cost_left / BILLION,
            currency=currency,
            **tokens,
        )


class _Response(msgspec.Struct):
    status_code: int | None = None


class _Error(msgspec.Struct):
    code: str | None = None


class _Result(msgspec.Struct):
    custom_id: str | None = None
    response: _Response | None = None
    error: _Error | None = None


def _result_of(line: bytes) -> _Result:
    """What the line says; nothing where it was damaged in the object store, as its batch ends."""
    try:
        return _decode_result(line)
    except (ValueError, RecursionError):
        return _Result()


_encode: Final = msgspec.json.Encoder().encode
_decode_result: Final = msgspec.json.Decoder(_Result).decode
_decode_row: Final = msgspec.json.Decoder(LedgerRow).decode
