"""Any error of an adapter ends only its own link, and is reported with the adapter's own words."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from weightsync.engine import driver
from weightsync.errors import ProtocolError, TransportError
from weightsync.protocol.messages import Hello
from weightsync.transports.process import own_host


class Adapter:
    """A link whose methods all raise the given error, or else record their arguments."""

    peer = "somebody"

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[Any] = []

    def _ask(self, *what: Any) -> Any:
        self.asked.append(what)
        if self.error is not None:
            raise self.error
        return self.asked

    def receive(self) -> Any:
        return self._ask()

    def flush(self) -> Any:
        return self._ask()

    def close(self) -> None:
        self._ask()

    def watch(self, pid: int, started: int) -> None:
        self._ask(pid, started)


def hello_from(host: str) -> Hello:
    return Hello(
        model_id="policy", incarnation=1, version=0, layout_digest=b"", layout=b"", host=host, pid=77, started=88
    )


def watch(link: Any) -> None:
    driver.watch(link, hello_from(own_host()))


@pytest.mark.parametrize("ask", [driver.read, driver.flush, watch])
def test_an_unexpected_error_of_an_adapter_becomes_an_adapter_fault_and_is_logged(
    ask: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    error = KeyError("lost")
    with pytest.raises(driver.AdapterFault, match=r"^the adapter of the link to somebody failed: KeyError\('lost'\)"):
        ask(Adapter(error))
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


@pytest.mark.parametrize("ask", [driver.read, driver.flush, watch])
def test_a_transport_error_is_raised_unchanged(ask: Callable[[Any], Any]) -> None:
    error = TransportError("gone")
    with pytest.raises(TransportError) as caught:
        ask(Adapter(error))
    assert caught.value is error


def test_a_protocol_error_of_reading_is_raised_unchanged() -> None:
    with pytest.raises(ProtocolError, match="nonsense"):
        driver.read(Adapter(ProtocolError("nonsense")))  # type: ignore[arg-type]


def test_the_results_of_an_adapter_are_returned_unchanged() -> None:
    link: Any = Adapter()

    assert driver.read(link) is link.asked
    assert driver.flush(link) is link.asked


def test_only_a_process_of_this_host_is_watched() -> None:
    near, far = Adapter(), Adapter()
    driver.watch(near, hello_from(own_host()))  # type: ignore[arg-type]
    driver.watch(far, hello_from("elsewhere"))  # type: ignore[arg-type]

    assert (near.asked, far.asked) == ([(77, 88)], [])


def test_an_error_of_closing_a_link_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    error, link = OSError("stuck"), Adapter()
    driver.close(link)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, "weightsync"):
        driver.close(Adapter(error))  # type: ignore[arg-type]

    assert link.asked == [()]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


def test_an_error_of_handling_a_message_becomes_a_reason_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("odd")

    assert driver.handler_failed(Adapter(), error) == (  # type: ignore[arg-type]
        "a message from somebody could not be handled: ValueError('odd')"
    )
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
