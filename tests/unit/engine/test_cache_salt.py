"""The salt of a body: what cannot be reached with it, and that the other bytes stay."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.engine.middleware.cache_salt import combined, spliced

SALT = "tenant-salt"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", b'{"cache_salt":"tenant-salt"}'),
        (b"{ }\n", b'{"cache_salt":"tenant-salt"}'),
        (b'{"a":  1.0 } ', b'{"a":  1.0,"cache_salt":"tenant-salt"}'),
        (b'{"a":"\xc3\xa9}"}', b'{"a":"\xc3\xa9}","cache_salt":"tenant-salt"}'),
    ],
)
def test_the_salt_becomes_the_last_member(body: bytes, expected: bytes) -> None:
    assert spliced(body, SALT) == expected


@given(st.dictionaries(st.text(max_size=5), JSON))
def test_every_other_member_stays_as_it_was(fields: dict[str, object]) -> None:
    body = json.dumps(fields).encode()
    after = json.loads(spliced(body, SALT))
    assert after.pop("cache_salt")
    fields.pop("cache_salt", None)
    assert after == fields


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":"mine"}',
        b'{"cache_salt":"other","cache_salt":"mine"}',
        b'{"c\\u0061che_salt":"mine"}',
    ],
)
def test_a_salt_of_its_own_counts_only_together_with_the_tenants(body: bytes) -> None:
    """However its key is written, it can neither replace the tenant's salt nor be without it."""
    after = json.loads(spliced(body, SALT))
    assert after["cache_salt"] == combined(SALT, "mine")
    assert after["cache_salt"] not in {SALT, "mine", combined("another-salt", "mine")}


def test_one_tenants_own_salts_are_different_caches() -> None:
    assert len({combined(SALT), combined(SALT, "a"), combined(SALT, "b")}) == 3
    assert combined(SALT, "a") == combined(SALT, "a")


@pytest.mark.parametrize("own", ["é", "\ud800", 5, ["a"], {"a": 1}, "x" * 1000])
def test_a_combined_salt_is_what_vllm_takes(own: object) -> None:
    """At most 128 characters, and none that vLLM forbids."""
    made = combined(SALT, own)
    assert len(made) == 43
    assert made.replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize("body", [b"[]", b"5", b"", b"{", b'"{}"'])
def test_what_is_no_object_is_left_as_it_is(body: bytes) -> None:
    assert spliced(body, SALT) == body
