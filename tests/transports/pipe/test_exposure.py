"""A link without a key that other hosts can reach is logged once for each process."""

from __future__ import annotations

import os
import socket

import pytest

from weightsync.transports import exposure


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "weightsync")
    monkeypatch.setattr(exposure, "_warning", exposure._Warning())


def test_an_exposed_link_is_logged_once_per_process_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    for link in ("The store at 10.0.0.7:1", "Another"):
        exposure.warn_exposed(link)

    [record] = caplog.records
    assert "The store at 10.0.0.7:1" in record.getMessage()
    assert "WEIGHTSYNC_KEY" in record.getMessage()


def test_a_forked_child_logs_the_warning_again(caplog: pytest.LogCaptureFixture) -> None:
    exposure.warn_exposed("The parent's")
    child = os.fork()
    if not child:
        caplog.clear()
        exposure.warn_exposed("The child's")
        os._exit(len(caplog.records))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize(
    ("address", "exposed"), [("127.0.0.1", False), ("127.0.1.1", False), ("0.0.0.0", True)], ids=str
)
def test_a_port_is_exposed_where_it_listens_on_all_interfaces(address: str, exposed: bool) -> None:
    with socket.create_server((address, 0)) as listener:
        assert exposure.is_exposed("127.0.0.1", listener.getsockname()[1]) is exposed


def test_a_port_is_exposed_at_a_non_loopback_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert exposure.is_exposed("192.0.2.1", port)
        assert not exposure.is_exposed("localhost", port)
        assert not exposure.is_exposed("::1", port)


def test_a_socket_pair_and_a_connection_over_the_loopback_stay_on_the_host() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        with connection:
            assert not exposure.leaves_host(ours)
            assert not exposure.leaves_host(connection)
