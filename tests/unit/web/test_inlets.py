"""Where a URL that a tenant gives may lead: nowhere near us, whatever it is written as.

The same for each of the three inlets: a download, an upload and a webhook.
"""

from __future__ import annotations

import socket
from ipaddress import ip_network
from typing import TYPE_CHECKING

import pytest

from batchyard.errors import StorageError
from batchyard.web.address import AddressGuard, is_public
from tests.services.receiver import Receiver, Reply, running_receiver
from tests.unit.web.inlets import Canary, Inlet, Way, resolving, words

if TYPE_CHECKING:
    from collections.abc import Iterator

GUARDED = Way(guard=AddressGuard())
HOSTS = words("""
    127.0.0.1 127.0.0.2 127.255.255.254 127.1 127.0.1 127.00.00.01 0127.0.0.1 0177.0.0.1
    0177.0.0.01 00000177.1 017700000001 2130706433 02130706433 0x7f000001 0x7F000001
    0x7f.0.0.1 0x7f.1 0x7f.0x0.0x0.0x1 0x7f.0.1 127.0x1 127.000000000001 127.0.0.1.
    0 0.0.0.0 0x0 00 0.0 10.0.0.1 0xa000001 167772161 172.16.0.1 192.168.0.1 192.168.1
    169.254.169.254 2852039166 0xa9fea9fe 0251.0376.0251.0376 169.254.43518 168.63.129.16
    100.100.100.200 224.0.0.1 255.255.255.255
    localhost LOCALHOST localhost. LocalHost.
    [::] [::1] [0:0:0:0:0:0:0:1] [0000::0001] [::127.0.0.1] [::ffff:127.0.0.1] [::ffff:7f00:1]
    [::ffff:0:127.0.0.1] [0:0:0:0:0:ffff:127.0.0.1] [::ffff:169.254.169.254] [64:ff9b::127.0.0.1]
    [64:ff9b::7f00:1] [2002:7f00:1::] [2001:0:4136:e378:8000:63bf:80ff:fffe] [fe80::1]
    [fe80::1%25lo] [fe80::1%lo] [::1%25lo] [::1%lo] [::1%251] [fec0::1] [fd00:ec2::254] [ff02::1]
    [ff02::1%25lo]
    user@127.0.0.1 user:secret@127.0.0.1 1.1.1.1@127.0.0.1 127.0.0.1%2f.example.com
    127。0。0。1 １２７.０.０.１ ①②⑦.0.0.1 127.0.0.1\\@example.com example.com@[::1]
""")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An HTTPS server on 127.0.0.1."""
    with running_receiver(names=("127.0.0.1", "::ffff:127.0.0.1")) as running:
        yield running


@pytest.mark.parametrize("host", HOSTS)
async def test_no_way_of_writing_a_local_address_reaches_it(
    inlet: Inlet, host: str, canary: Canary
) -> None:
    with pytest.raises(inlet.refusal):
        await inlet.go(f"https://{host}:{canary.port}/x", GUARDED)

    assert canary.is_untouched


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "0x7f.1"])
async def test_nor_without_tls(inlet: Inlet, host: str, canary: Canary) -> None:
    with pytest.raises(inlet.refusal):
        await inlet.go(f"http://{host}:{canary.port}/x", GUARDED)

    assert canary.is_untouched


@pytest.mark.parametrize(
    "url",
    [
        "https:127.0.0.1/",
        "https:/127.0.0.1/",
        "https:///127.0.0.1/",
        "//127.0.0.1/",
        "https://",
        "https://a..b/",
        "https://" + "a" * 64 + ".example/",
        "https://[::1/",
        "https://127.0.0.1:0/",
        "https://127.0.0.1:99999/",
        "https://127.0.0.1 /",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_INFO",
        "ftp://127.0.0.1/",
        "unix:///run/docker.sock",
        "https://xn--/",
    ],
)
async def test_what_is_hardly_a_url_is_refused(inlet: Inlet, url: str) -> None:
    with pytest.raises(inlet.refusal):
        await inlet.go(url, GUARDED)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_the_canary_would_notice(inlet: Inlet, host: str, canary: Canary) -> None:
    """The operator's own URLs may lead to it."""
    with pytest.raises(StorageError):
        await inlet.go(f"https://{host}:{canary.port}/x", Way(guard=None, seconds=0.2))

    assert not canary.is_untouched


@pytest.mark.parametrize(
    "answers",
    [
        [["127.0.0.1"]],
        [["127.0.0.1", "::1", "127.0.0.2"]],
        [["::ffff:127.0.0.1"]],
        # The first look is harmless, the one that counts is not.
        [["8.8.8.8"], ["127.0.0.1"]],
        [["8.8.8.8"], ["::1"]],
    ],
)
async def test_a_name_that_means_us_is_refused(
    inlet: Inlet, answers: list[list[str]], canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a name server says is not trusted: the address is judged as it is connected to."""
    monkeypatch.setattr(socket, "getaddrinfo", resolving(*answers))
    if len(answers) > 1:
        assert is_public(str(socket.getaddrinfo("rebinding.example", 80)[0][4][0]))

    with pytest.raises(inlet.refusal, match="not public"):
        await inlet.go(f"https://rebinding.example:{canary.port}/x", GUARDED)

    assert canary.is_untouched


async def test_a_name_is_judged_anew_each_time(
    inlet: Inlet, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It led where it may, and the next time it does not."""
    guard = AddressGuard((ip_network("127.0.0.1/32"),))
    with running_receiver(names=("rebinding.example",)) as named:
        way = Way(guard=guard, ssl_context=named.client_context)
        monkeypatch.setattr(socket, "getaddrinfo", resolving(["127.0.0.1"], ["127.0.0.2"]))
        await inlet.go(named.url(host="rebinding.example"), way)

        with pytest.raises(inlet.refusal, match="not public"):
            await inlet.go(f"https://rebinding.example:{canary.port}/x", way)

    assert len(named.requests) == 1
    assert canary.is_untouched


async def test_the_refusal_does_not_say_where_the_name_led(
    inlet: Inlet, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the query: names of internal hosts cannot be looked up through us."""
    monkeypatch.setattr(socket, "getaddrinfo", resolving(["10.11.12.13"]))

    with pytest.raises(inlet.refusal) as failure:
        await inlet.go(f"https://intranet.example:{canary.port}/x?token=secret-1", GUARDED)

    assert "10.11.12.13" not in str(failure.value)
    assert "secret-1" not in str(failure.value)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(
    inlet: Inlet, status: int, receiver: Receiver, canary: Canary
) -> None:
    """Not even to where the URL itself could have led."""
    receiver.reply = Reply(status, {"Location": f"https://127.0.0.1:{canary.port}/x"})
    guard = AddressGuard((ip_network("127.0.0.0/8"),))

    with pytest.raises(inlet.refusal):
        await inlet.go(receiver.url(host="127.0.0.1"), _to(receiver, guard))

    assert len(receiver.requests) == 1
    assert canary.is_untouched


async def test_no_chain_of_redirects_is_followed(
    inlet: Inlet, receiver: Receiver, canary: Canary
) -> None:
    """Nor one that begins on the same host."""
    there = f"https://127.0.0.1:{canary.port}/x"
    receiver.answers = [Reply(302, {"Location": "/other"}), Reply(307, {"Location": there})]
    guard = AddressGuard((ip_network("127.0.0.0/8"),))

    with pytest.raises(inlet.refusal):
        await inlet.go(receiver.url(host="127.0.0.1"), _to(receiver, guard))

    assert len(receiver.requests) == 1
    assert canary.is_untouched


async def test_a_proxy_of_the_environment_is_not_asked(
    inlet: Inlet, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{canary.port}")
    monkeypatch.setattr(socket, "getaddrinfo", resolving(["10.0.0.1"]))

    with pytest.raises(inlet.refusal):
        await inlet.go("https://example.com:8080/x", GUARDED)

    assert canary.is_untouched


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]"])
async def test_a_server_in_an_internal_network_is_reached(
    inlet: Inlet, host: str, receiver: Receiver
) -> None:
    """At whatever port it listens."""
    guard = AddressGuard((ip_network("127.0.0.1/32"),))
    await inlet.go(receiver.url(host=host), _to(receiver, guard))
    assert len(receiver.requests) == 1


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]", "[::ffff:127.0.0.2]", "0", "localhost."])
async def test_the_address_beside_an_internal_network_is_not(
    inlet: Inlet, host: str, canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "localhost.":
        monkeypatch.setattr(socket, "getaddrinfo", resolving(["::1"]))
    way = Way(guard=AddressGuard((ip_network("127.0.0.1/32"),)))
    with pytest.raises(inlet.refusal):
        await inlet.go(f"https://{host}:{canary.port}/x", way)

    assert canary.is_untouched


def _to(receiver: Receiver, guard: AddressGuard) -> Way:
    return Way(guard=guard, ssl_context=receiver.client_context)
