"""What tokens and engine time cost."""

from __future__ import annotations

from batchyard.batch.prices import BILLION, NO_PRICES, Price, Prices, money

TOKENS = {"input_tokens": 1_000_000, "cached_tokens": 400_000, "output_tokens": 500_000}


def test_each_kind_of_token_has_its_price() -> None:
    price = Price(input=1.0, cached=0.25, output=4.0)
    assert price.amount(**TOKENS, engine_seconds=9e9) == (600_000 + 100_000 + 2_000_000) * 1000


def test_cached_tokens_cost_as_much_as_others_unless_said() -> None:
    assert Price(input=1.0).amount(**TOKENS, engine_seconds=0) == BILLION
    assert Price(input=1.0, cached=0.0).amount(**TOKENS, engine_seconds=0) == BILLION * 6 // 10


def test_an_engines_hour_is_charged_by_the_second() -> None:
    assert Price(engine_hour=3.6).amount(**TOKENS, engine_seconds=500) == BILLION // 2


def test_a_star_is_for_models_without_a_price_of_their_own() -> None:
    own, others = Price(input=1.0), Price(input=2.0)
    prices = Prices(by_model={"a": own, "*": others})
    assert (prices.of("a"), prices.of("b")) == (own, others)
    assert Prices(by_model={"a": own}).of("b") is None
    assert NO_PRICES.of("a") is None


def test_sums_of_small_amounts_are_exact() -> None:
    """Ten batches of a tenth of a cent are a cent."""
    tenth = Price(input=0.1).amount(
        input_tokens=10_000, cached_tokens=0, output_tokens=0, engine_seconds=0
    )
    assert sum([tenth] * 10) == BILLION // 100


def test_money_has_the_digits_that_it_needs() -> None:
    assert money(1234 * BILLION + BILLION // 2, "usd") == "1,234.50 USD"
    assert money(2_700_000, "eur") == "0.002700 EUR"
    assert money(1_000, "eur") == "0.000001 EUR"
    assert money(400, "eur") == "0.000000400 EUR"  # else it would look like nothing
    assert money(0, "usd") == "0.00 USD"
