"""Which proxies of the environment are used, and for which servers none is."""

from __future__ import annotations

from urllib.request import proxy_bypass_environment

import pytest

from batchyard.errors import SettingsError
from batchyard.web.proxies import check_proxies, proxy_for, without_proxy

HERE = "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("given", "lower", "upper"),
    [
        ({}, HERE, HERE),
        ({"NO_PROXY": "a.example"}, f"a.example,{HERE}", f"a.example,{HERE}"),
        (
            {"no_proxy": " localhost, b.example ", "NO_PROXY": "a.example"},
            "localhost,b.example,127.0.0.1,::1",
            f"a.example,{HERE}",
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


@pytest.mark.parametrize("variable", ["PREFECT_API_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "0.0.0.0", "[::1]"])  # noqa: S104 - a URL, nothing listens
def test_a_server_on_this_machine_is_called_without_a_proxy(variable: str, host: str) -> None:
    made = without_proxy({variable: f"http://{host}:4200/api"})
    assert proxy_bypass_environment(host.strip("[]"), {"no": made["no_proxy"]})
    named = made | {"http_proxy": "http://proxy.example"}
    assert proxy_for(f"http://{host}:4200/api", named) is None


@pytest.mark.parametrize("host", ["prefect.example", "10.0.0.1", "localhost.example", "[::2"])
def test_servers_elsewhere_are_not_added(host: str) -> None:
    assert without_proxy({"PREFECT_API_URL": f"https://{host}/api"})["no_proxy"] == HERE


@pytest.mark.parametrize(
    ("environment", "variable", "is_http"),
    [
        ({"https_proxy": "proxy.example:1"}, "https_proxy", True),
        ({"HTTPS_PROXY": "http://proxy.example:1"}, "HTTPS_PROXY", True),
        ({"ALL_PROXY": "socks5://proxy.example:1"}, "ALL_PROXY", False),
        (
            {"ALL_PROXY": "socks5://s.example", "HTTPS_PROXY": "http://h.example"},
            "HTTPS_PROXY",
            True,
        ),
        ({"HTTP_PROXY": "http://proxy.example:1"}, None, None),
        # The name in lower case counts, also if it is empty.
        ({"HTTPS_PROXY": "http://proxy.example:1", "https_proxy": ""}, None, None),
        ({"HTTPS_PROXY": "http://proxy.example:1", "NO_PROXY": ".example"}, None, None),
        ({"HTTPS_PROXY": "http://proxy.example:1", "NO_PROXY": "*"}, None, None),
        ({}, None, None),
    ],
)
def test_a_server_elsewhere_is_asked_through_the_proxy_that_prefects_client_uses(
    environment: dict[str, str], variable: str | None, is_http: bool | None
) -> None:
    proxy = proxy_for("https://prefect.example:4200/api", environment)
    found = (None, None) if proxy is None else (proxy.variable, proxy.is_http)
    assert found == (variable, is_http)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"ALL_PROXY": "socks4://u:hunter2@127.0.0.1:9"}, "ALL_PROXY names a proxy with socks4://"),
        # As GNOME writes it.
        ({"all_proxy": "socks://127.0.0.1:1080/"}, "all_proxy names a proxy with socks://"),
        ({"HTTP_PROXY": "http://hunter2:port"}, "HTTP_PROXY is not the URL of a proxy"),
        ({"https_proxy": "http://[::1"}, "https_proxy is not the URL of a proxy"),
    ],
)
def test_a_proxy_that_prefects_client_refuses_is_named(
    environment: dict[str, str], why: str
) -> None:
    with pytest.raises(SettingsError, match=why) as caught:
        check_proxies(environment)
    assert "hunter2" not in str(caught.value)
    check_proxies(environment | {"NO_PROXY": "*"})


@pytest.mark.parametrize(
    "url", ["socks5://127.0.0.1:9", "SOCKS5H://h:1", "http://u:p@h:1", "https://h", "h:3128"]
)
def test_proxies_that_prefects_client_uses_are_accepted(url: str) -> None:
    check_proxies({"ALL_PROXY": url, "http_proxy": url, "HTTPS_PROXY": ""})
