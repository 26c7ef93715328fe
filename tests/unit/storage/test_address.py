"""Where a URL that a tenant gives may lead: nowhere near us, whatever it is written as."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import replace
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import LocationRefused, StorageError
from batchyard.storage.backoff import Backoff
from batchyard.storage.download import download
from batchyard.storage.upload import upload
from batchyard.storage.web import WebAccess
from batchyard.web.address import AddressGuard, AddressRefused, is_public
from tests.unit.storage.web_server import gives, says

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.unit.storage.web_server import WebServer

GUARDED = WebAccess(connect_seconds=5, stall_seconds=5, backoff=Backoff(1), guard=AddressGuard())


def words(text: str) -> list[str]:
    return text.split()


NOT_PUBLIC = words("""
    0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254
    168.63.129.16 169.254.0.1 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.8
    192.0.0.170 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
    239.255.255.250 240.0.0.1 255.255.255.255
    :: ::1 ::7f00:1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:a9fe:a9fe 64:ff9b::7f00:1
    64:ff9b::a9fe:a9fe 64:ff9b:1::a00:1 100::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2
    2001:20::1 2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe:: 3fff::1 5f00::1 fc00::1 fd00:ec2::254
    fe80::1 fe80::1%lo fe80::1%1 2606:4700::1111%eth0 fec0::1 ff02::1 ff0e::1
    localhost 127.1 0x7f000001
""")
PUBLIC = words("""
    1.1.1.1 8.8.8.8 93.184.215.14 100.63.255.255 100.128.0.0 172.32.0.1 192.0.1.1 223.255.255.255
    2606:4700:4700::1111 2a00:1450:4001:830::200e ::ffff:8.8.8.8
""")


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_known_as_such(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_known_as_such(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("port", [80, 443, 8000, 8080, 9000, 9999])
def test_a_port_of_web_servers_is_open(port: int) -> None:
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port))
    AddressGuard().socket(entry).close()


@pytest.mark.parametrize("port", [0, 22, 25, 53, 111, 445, 2375, 3306, 5432, 6379, 10250, 11211])
def test_any_other_port_is_closed(port: int) -> None:
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", port))
    with pytest.raises(AddressRefused, match="port"):
        AddressGuard().socket(entry)


def test_a_zone_is_refused_even_where_the_address_is_public() -> None:
    entry = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2606:4700::1111", 443, 0, 2))
    with pytest.raises(AddressRefused, match="address"):
        AddressGuard().socket(entry)


class Canary:
    """Listens on every address of this machine; nobody may come."""

    def __init__(self) -> None:
        self.socket, self.port = self._listen()

    @staticmethod
    def _listen() -> tuple[socket.socket, int]:
        # On a port that would be open, so that it is the address that is refused.
        for port in range(8100, 10_000):
            with contextlib.suppress(OSError):
                listening = socket.create_server(
                    ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=200
                )
                listening.setblocking(False)
                return listening, port
        raise AssertionError("no port is free")

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has connected, or begun to, since it was last asked."""
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def canary() -> Iterator[Canary]:
    one = Canary()
    yield one
    one.socket.close()


async def get(url: str, web: WebAccess = GUARDED) -> bytes:
    return b"".join([block async for block in download(url, limit_bytes=1000, web=web)])


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


@pytest.mark.parametrize("host", HOSTS)
async def test_no_way_of_writing_a_local_address_reaches_it(host: str, canary: Canary) -> None:
    with pytest.raises(LocationRefused):
        await get(f"http://{host}:{canary.port}/x")

    assert canary.is_untouched


@pytest.mark.parametrize(
    "url",
    [
        "http:127.0.0.1/",
        "http:/127.0.0.1/",
        "http:///127.0.0.1/",
        "//127.0.0.1/",
        "http://",
        "http://a..b/",
        "http://" + "a" * 64 + ".example/",
        "http://[::1/",
        "http://127.0.0.1:0/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1 /",
        "file:///etc/passwd",
        "gopher://127.0.0.1:6379/_INFO",
        "ftp://127.0.0.1/",
        "unix:///run/docker.sock",
        "http://xn--/",
    ],
)
async def test_what_is_hardly_a_url_is_refused(url: str) -> None:
    with pytest.raises(LocationRefused):
        await get(url)


async def test_the_canary_would_notice(canary: Canary) -> None:
    """The operator's own URLs may lead to it."""
    web = replace(GUARDED, guard=None, stall_seconds=0.1)
    with pytest.raises(StorageError):
        await get(f"http://127.0.0.1:{canary.port}/x", web)

    assert not canary.is_untouched


def resolving(*answers: list[str]) -> Callable[..., list[Any]]:
    """A stand-in for ``socket.getaddrinfo``: each time the next answer, the last one stays."""
    left = list(answers)

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        addresses = left.pop(0) if len(left) > 1 else left[0]
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (one, port, 0, 0))
            if ":" in one
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
            for one in addresses
        ]

    return resolve


@pytest.mark.parametrize(
    "answers",
    [
        [["127.0.0.1"]],
        [["127.0.0.1", "::1", "127.0.0.2"]],
        [["::ffff:127.0.0.1"]],
        # The first look is harmless, the one that counts is not.
        [["8.8.8.8"], ["127.0.0.1"]],
    ],
)
async def test_a_name_that_means_us_is_refused(
    answers: list[list[str]], canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a name server says is not trusted: the address is judged as it is connected to."""
    monkeypatch.setattr(socket, "getaddrinfo", resolving(*answers))
    if len(answers) > 1:
        assert is_public(socket.getaddrinfo("rebinding.example", 80)[0][4][0])

    with pytest.raises(LocationRefused, match="not public"):
        await get(f"http://rebinding.example:{canary.port}/x")

    assert canary.is_untouched


async def test_the_refusal_does_not_say_where_the_name_led(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the query: names of internal hosts cannot be looked up through us."""
    monkeypatch.setattr(socket, "getaddrinfo", resolving(["10.11.12.13"]))

    with pytest.raises(LocationRefused) as failure:
        await get(f"http://intranet.example:{canary.port}/x?token=secret-1")

    assert "10.11.12.13" not in str(failure.value)
    assert "secret-1" not in str(failure.value)


async def test_an_upload_is_guarded_as_well(canary: Canary, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"x")
    with pytest.raises(LocationRefused, match="not public"):
        await upload(f"http://127.0.0.1:{canary.port}/x", tmp_path / "out", web=GUARDED)

    assert canary.is_untouched


async def test_a_guarded_download_follows_no_redirect(
    server: WebServer,
) -> None:
    """Not even one on the same host."""
    server.answers = [says(302, Location="/other"), gives(b"content")]
    guard = AddressGuard((ip_network("127.0.0.0/8"),))

    with pytest.raises(LocationRefused, match="redirects"):
        await get(server.url(), replace(GUARDED, guard=guard))

    assert len(server.requests) == 1


async def test_a_proxy_of_the_environment_is_not_asked(
    canary: Canary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{canary.port}")
    monkeypatch.setattr(socket, "getaddrinfo", resolving(["10.0.0.1"]))

    with pytest.raises(LocationRefused):
        await get("http://example.com:8080/x")

    assert canary.is_untouched
