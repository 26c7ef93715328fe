"""What tokens and engine time cost: the operator's table of prices, and sums by it.

Amounts are whole billionths of the currency's unit: sums of them are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from batchyard.lifecycle import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchyard.lifecycle import BatchStatus

ANY_MODEL: Final = "*"
BILLION: Final = 1_000_000_000
MOST_AMOUNT: Final = 2**62
"""In billionths. A server that is not ours may claim any number of tokens, and the batch ends all
the same: the database has no larger numbers than twice this."""
_MILLION: Final = 1_000_000
_HOUR_SECONDS: Final = 3600
_SMALLEST_OF_SIX_DIGITS: Final = 1_000
"""The smallest cost that is shown with six digits, in billionths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a million tokens each, and of an hour of one engine; the sum of all of them is
    due.

    ``cached``: of prompt tokens that were in the engine's cache; None: as ``input``.
    """

    input: float = 0.0
    cached: float | None = None
    output: float = 0.0
    engine_hour: float = 0.0

    def amount(
        self, *, input_tokens: int, cached_tokens: int, output_tokens: int, engine_seconds: float
    ) -> int:
        """In billionths, :data:`MOST_AMOUNT` at most. Cached tokens are among the input tokens."""
        cached = self.input if self.cached is None else self.cached
        tokens = (
            (input_tokens - cached_tokens) * self.input
            + cached_tokens * cached
            + output_tokens * self.output
        )
        amount = (tokens / _MILLION + engine_seconds / _HOUR_SECONDS * self.engine_hour) * BILLION
        return round(min(amount, float(MOST_AMOUNT)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of models; ``*`` is for all models that have none of their own. Empty: nothing has
    a price."""

    currency: str = "usd"
    by_model: Mapping[str, Price] = field(default_factory=dict)

    @property
    def has_hours(self) -> bool:
        """Whether any model has a price for time."""
        return any(price.engine_hour for price in self.by_model.values())

    def of(self, model: str) -> Price | None:
        """The price of the model; None: it has none."""
        return self.by_model.get(model) or self.by_model.get(ANY_MODEL)


NO_PRICES: Final = Prices()


def money(billionths: int, currency: str) -> str:
    """For people: ``1.25 USD``; small amounts with as many digits as they need."""
    amount = billionths / BILLION
    small = 6 if billionths >= _SMALLEST_OF_SIX_DIGITS else 9
    digits = 2 if amount == 0 or amount >= 1 else small
    return f"{amount:,.{digits}f} {currency.upper()}"


class _Priced(Protocol):
    """A batch."""

    @property
    def status(self) -> BatchStatus: ...
    @property
    def cost(self) -> int | None: ...
    @property
    def currency(self) -> str | None: ...


def cost_words(batch: _Priced) -> str:
    """``1.25 USD``; ``0.40 USD so far`` until it has ended; empty: there is no price for it."""
    if batch.cost is None or batch.currency is None:
        return ""
    words = money(batch.cost, batch.currency)
    return words if batch.status in TERMINAL else f"{words} so far"
