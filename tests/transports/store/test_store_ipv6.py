"""Hosts that have only IPv6 addresses."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from weightsync import TransportError
from weightsync.transports.store import stream
from weightsync.transports.store.store import Client, open_store
from weightsync.transports.store.stream import host_address, named_address, own_address

#: Contents of /proc/net/if_inet6.
LISTED = (
    "fe8000000000000000fc00fffe000001 04 40 20 80     eth7\n"
    "20010db8000000000000000000000007 04 40 00 82     eth7\n"
    "fe8000000000000000fc00fffe000002 05 40 20 80     eth8\n"
)


@pytest.fixture(scope="module")
def loopback() -> str:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("A STORE AT ::1 WAS NOT TESTED: this machine has no IPv6")
    return "::1"


def resolver(monkeypatch: pytest.MonkeyPatch, errno: int) -> list[str]:
    """Fake a host name with an IPv6 address, whose IPv4 look-up fails with ``errno``. Returns the names looked up."""
    asked: list[str] = []

    def no_ipv4(name: str) -> NoReturn:
        raise socket.gaierror(errno, "none")

    def ipv6(name: str, *_: Any) -> Any:
        asked.append(name)
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::7", 0, 0, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "trainer")
    monkeypatch.setattr(socket, "gethostbyname", no_ipv4)
    monkeypatch.setattr(socket, "getaddrinfo", ipv6)
    return asked


def test_a_store_of_our_own_can_listen_at_an_ipv6_address(loopback: str) -> None:
    made = open_store(loopback, 0, timedelta(seconds=7))
    client = Client(made)
    assert (made.host, client.own_address) == (loopback, loopback)
    client.close()


@pytest.mark.parametrize("errno", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_the_address_of_a_host_without_ipv4_is_its_ipv6_address(errno: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolver(monkeypatch, errno)
    assert (host_address(), asked) == ("2001:db8::7", ["trainer"])


def test_an_unresponsive_dns_is_not_queried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolver(monkeypatch, socket.EAI_AGAIN)
    assert (host_address(), asked) == ("127.0.0.1", [])


def test_an_interface_may_have_only_an_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "if_inet6").write_text(LISTED, encoding="ascii")
    monkeypatch.setattr(stream, "_IPV6_ADDRESSES", tmp_path / "if_inet6")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert named_address() == "2001:db8::7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    with pytest.raises(TransportError, match="GLOO_SOCKET_IFNAME names eth8, which has no address"):
        named_address()


@pytest.mark.parametrize(("towards_store", "wanted"), [("::1", "::1"), ("2001:db8::7", "127.0.0.1")])
def test_a_worker_on_the_trainers_host_listens_at_ipv6_loopback_only_if_it_reached_the_store_there(
    towards_store: str, wanted: str
) -> None:
    assert own_address(True, towards_store) == wanted
