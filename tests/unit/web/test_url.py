"""Which URLs are accepted, and what of them is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchyard.errors import LocationRefused
from batchyard.web.url import checked_url, shown


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h.example/a/b%20c?sig=s3cret#frag", "https://h.example/a/b%20c"),
        ("https://user:s3cret@h.example:8443/a", "https://h.example:8443/a"),
        ("http://[::1]:80/a?s3cret", "http://[::1]:80/a"),
        ("https://h.example:port/?s3cret", "(an unreadable URL)"),
        ("https://h.example/a\nINFO forged", "https://h.example/aINFO forged"),
        ("https://h.example/a\x1b[31m", "https://h.example/a\N{REPLACEMENT CHARACTER}[31m"),
    ],
)
def test_only_scheme_host_and_path_are_shown(url: str, expected: str) -> None:
    """No query, user, password or control character gets into a message."""
    assert shown(url) == expected


@given(st.text())
def test_showing_never_fails(text: str) -> None:
    """Whatever a user wrote, an error message can be made of it."""
    assert "\n" not in shown(f"https://{text}")


@pytest.mark.parametrize(
    "url",
    ["https://h.example/a%2Fb?x=%2B+&y", "http://127.0.0.1:8080/", "https://[2001:db8::1]/a"],
)
def test_an_accepted_url_stays_as_it_was_written(url: str) -> None:
    """A signature covers every byte, so nothing is normalised."""
    assert str(checked_url(url)) == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h.example/a",
        "ftp://h.example/a",
        "file:///etc/passwd",
        "https://",
        "https:///a",
        "https://user@h.example/a",
        "https://user:pw@h.example/a",
        "https://:@h.example/a",
        "https://h.example:99999/a",
        "https://h.example:x/a",
        "https://[::1/a",
        "https://h.example/a b",
        "https://h.example/a\r\nX-Injected: 1",
        "https://h.example/é",
        "https://h\u2024example/a",
    ],
)
def test_a_url_that_is_not_plainly_one_is_refused(url: str) -> None:
    """Other schemes, passwords and whatever two parsers could read differently."""
    with pytest.raises(LocationRefused):
        checked_url(url)
