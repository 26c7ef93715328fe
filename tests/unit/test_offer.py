"""What the name in a line stands for: a model, an adapter of one, or nothing."""

from __future__ import annotations

import pytest

from batchyard.lines.offer import ANYTHING, Offer, check_adapter_names, clashes


def test_an_adapter_is_served_by_the_engine_of_its_model() -> None:
    offer = Offer.of({"big": ["law", "tone"], "small": []})
    assert [offer.model_of(name) for name in ("law", "big", "small", "none")] == [
        *("big", "big", "small", "none"),
    ]
    assert [offer.has(name) for name in ("law", "big", "none")] == [True, True, False]


def test_a_name_that_stands_for_several_things_is_no_adapters() -> None:
    """An answer of the wrong one would be taken for the right one."""
    served = {"big": ["law", "small", "tone"], "small": ["law"]}
    offer = Offer.of(served)
    assert clashes(served) == {"law": ["big", "small"], "small": ["big"]}
    assert offer.adapters == {"tone": "big"}
    assert (offer.has("law"), offer.model_of("small")) == (False, "small")


def test_where_no_block_says_what_there_is_any_name_may_be_a_model() -> None:
    assert (ANYTHING.has("x"), ANYTHING.model_of("x")) == (True, "x")


@pytest.mark.parametrize("name", ["law", "org/law-2:latest", "v1.0_b@main", "7"])
def test_an_adapter_is_named_as_a_model_is(name: str) -> None:
    check_adapter_names("big", [name])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        *(([name], "It is not a path") for name in ("/data/law", "./law", "../law", "~/law")),
        *(
            ([name], "must be like a model's")
            for name in ("", "a b", "a=b", "a\x1d", "a/", "x" * 201)
        ),
        (["big"], "the adapter big needs another name than its model"),
        (["law", "law"], "the adapter law is named twice"),
    ],
)
def test_a_name_that_no_adapter_can_have_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_adapter_names("big", names)
