"""Which addresses are public, and which the guard lets through."""

from __future__ import annotations

import socket
from ipaddress import ip_network

import pytest

from batchyard.errors import SettingsError
from batchyard.settings import read_settings
from batchyard.web.address import AddressGuard, AddressRefused, is_public
from tests.unit.web.inlets import words

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
INTERNAL = AddressGuard((ip_network("10.20.0.0/16"), ip_network("fd00:20::/64")))


def connect(guard: AddressGuard, host: str, port: int = 443, zone: int = 0) -> None:
    """What aiohttp does with an entry of ``getaddrinfo`` before it connects."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    address = (host, port, 0, zone) if is_v6 else (host, port)
    guard.socket((family, socket.SOCK_STREAM, 6, "", address)).close()


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_known_as_such(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_known_as_such(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("port", [80, 443, 8000, 8080, 9000, 9999])
def test_a_port_of_web_servers_is_open(port: int) -> None:
    connect(AddressGuard(), "8.8.8.8", port)


@pytest.mark.parametrize("port", [0, 22, 25, 53, 111, 445, 2375, 3306, 5432, 6379, 10250, 11211])
def test_any_other_port_is_closed(port: int) -> None:
    with pytest.raises(AddressRefused, match="port"):
        connect(AddressGuard(), "8.8.8.8", port)


def test_a_zone_is_refused_even_where_the_address_is_public() -> None:
    with pytest.raises(AddressRefused, match="address"):
        connect(AddressGuard(), "2606:4700::1111", zone=2)


@pytest.mark.parametrize("port", [22, 443, 5432, 8443, 65535])
@pytest.mark.parametrize(
    "address", words("10.20.0.0 10.20.255.255 ::ffff:10.20.3.4 fd00:20::1 fd00:20::ffff")
)
def test_an_internal_network_is_open_at_any_port(address: str, port: int) -> None:
    """The operator's own receivers and stores; an IPv4 address may be written as IPv6."""
    connect(INTERNAL, address, port)


@pytest.mark.parametrize(
    "address",
    words("""
        10.19.255.255 10.21.0.0 ::ffff:10.21.0.1 ::10.20.0.1 64:ff9b::a14:1 2002:a14:1:: 127.0.0.1
        ::1 169.254.169.254 fd00:20:0:1::1 fd00:21::1 fe80::1 localhost
    """),
)
def test_an_internal_network_opens_no_other(address: str) -> None:
    """Neighbours, and ways around: NAT64, 6to4, addresses that were IPv4-compatible once."""
    with pytest.raises(AddressRefused, match="address"):
        connect(INTERNAL, address)


def test_a_zone_is_refused_in_an_internal_network_too() -> None:
    with pytest.raises(AddressRefused, match="address"):
        connect(INTERNAL, "fd00:20::1", zone=2)


def test_public_addresses_stay_open_beside_internal_networks() -> None:
    connect(INTERNAL, "8.8.8.8")
    with pytest.raises(AddressRefused, match="port"):
        connect(INTERNAL, "8.8.8.8", 22)


def test_internal_networks_are_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHYARD_INTERNAL_NETWORKS", '["10.20.0.0/16", "fd00:20::/64"]')
    assert read_settings().address_guard == INTERNAL


def test_a_network_that_is_none_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address with host bits may be a typing error for a network of another size."""
    monkeypatch.setenv("BATCHYARD_INTERNAL_NETWORKS", '["10.20.0.1/16"]')
    with pytest.raises(SettingsError, match="BATCHYARD_INTERNAL_NETWORKS"):
        read_settings()
