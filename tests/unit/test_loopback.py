"""The variables that keep calls to this machine from a proxy."""

from __future__ import annotations

from urllib.request import proxy_bypass_environment

import pytest

from commands.loopback import without_proxy, without_proxy_to


@pytest.mark.parametrize(
    ("given", "lower", "upper"),
    [
        ({}, "127.0.0.1,localhost", "127.0.0.1,localhost"),
        (
            {"NO_PROXY": "a.example"},
            "a.example,127.0.0.1,localhost",
            "a.example,127.0.0.1,localhost",
        ),
        (
            {"no_proxy": " localhost, b.example ", "NO_PROXY": "a.example"},
            "localhost,b.example,127.0.0.1",
            "a.example,127.0.0.1,localhost",
        ),
        # It means all hosts, and only if it stands alone.
        ({"no_proxy": "*"}, "*", "*"),
    ],
)
def test_what_was_to_have_no_proxy_has_none_as_before(
    given: dict[str, str], lower: str, upper: str
) -> None:
    made = without_proxy(given)
    assert made == {"no_proxy": lower, "NO_PROXY": upper}
    assert proxy_bypass_environment("127.0.0.1:4200", {"no": made["no_proxy"]})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_server_on_this_machine_is_called_without_a_proxy(host: str) -> None:
    made = without_proxy_to(f"http://{host}:4200/api", {})
    assert proxy_bypass_environment(f"{host}:4200", {"no": made["no_proxy"]})


@pytest.mark.parametrize("host", ["prefect.example", "10.0.0.1", "localhost.example"])
def test_a_server_elsewhere_is_called_through_the_proxy(host: str) -> None:
    assert without_proxy_to(f"https://{host}/api", {}) == {}
