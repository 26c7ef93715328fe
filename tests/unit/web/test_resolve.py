"""URLs that lead to refused addresses only are told as they are given."""

from __future__ import annotations

import socket
import threading
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import pytest

from batchyard.errors import LocationRefused
from batchyard.web import resolve
from batchyard.web.address import AddressGuard
from batchyard.web.resolve import check_address

if TYPE_CHECKING:
    from collections.abc import Callable

GUARD = AddressGuard()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What each name means; others are unknown."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **more: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [entry for each in known[host] for entry in real(each, port, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "0x7f000001", "2130706433", "[::1]", "[::ffff:10.0.0.1]"]
)
async def test_a_private_address_is_refused_however_it_is_written(host: str) -> None:
    with pytest.raises(LocationRefused, match=r"/out may not be used: its address is not public$"):
        await check_address(f"https://{host}/out?sign=secret", GUARD)


@pytest.mark.parametrize("url", ["https://1.1.1.1/", "https://[2606:4700:4700::1111]:8443/x"])
async def test_a_public_address_is_none_of_our_business(url: str) -> None:
    await check_address(url, GUARD)


async def test_a_port_that_is_not_the_webs_is_refused() -> None:
    with pytest.raises(LocationRefused, match="its port is none of 80, 443"):
        await check_address("https://1.1.1.1:22/", GUARD)


async def test_a_name_is_refused_if_all_its_addresses_are_private(
    names: dict[str, list[str]],
) -> None:
    names["inside.example"] = ["10.0.0.1", "fd00::1"]
    names["both.example"] = ["10.0.0.1", "1.1.1.1"]
    with pytest.raises(LocationRefused, match=r"inside\.example/ may not be used"):
        await check_address("https://inside.example/", GUARD)
    await check_address("https://both.example/", GUARD)


async def test_a_name_that_is_not_known_now_is_no_refusal(names: dict[str, list[str]]) -> None:
    await check_address("https://soon.example/", GUARD)


async def test_internal_networks_and_an_operator_without_a_guard_allow_what_they_name() -> None:
    await check_address("https://10.20.1.1/", AddressGuard((ip_network("10.20.0.0/16"),)))
    await check_address("https://127.0.0.1/", None)


async def test_a_name_server_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    wait: Callable[..., Any] = lambda *_, **__: answers.wait(20)  # noqa: E731 - a name would say no more
    monkeypatch.setattr(socket, "getaddrinfo", wait)
    monkeypatch.setattr(resolve, "_SECONDS", 0.05)
    try:
        await check_address("https://slow.example/", GUARD)
    finally:
        answers.set()
