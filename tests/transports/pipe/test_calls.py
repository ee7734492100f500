"""Links over calls: answers in the order of the calls, failures at once, buffers released when calls end."""

from __future__ import annotations

import gc
import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol.messages import Ack, Bye, Hello, Update
from weightsync.transports import process
from weightsync.transports.base import Waker, wait
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls import succession
from weightsync.transports.calls.client import CallLink, ClosedByPeer
from weightsync.transports.process import own_identity
from weightsync.transports.rpc import RpcCallClient


class CallClient:
    """A fake call client that records calls, whose results the test sets."""

    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []
        self.messages: list[Any] = []
        self.closed = False
        self.refuses: Exception | None = None

    def start(self, message: Any, payload: Any) -> Future[Any]:
        if self.refuses is not None:
            raise self.refuses
        self.messages.append(message)
        self.calls.append(Future())
        return self.calls[-1]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def linked() -> Any:
    call_client = CallClient()
    link = CallLink(call_client, "worker 4")
    yield link, call_client
    link.close()


def ack(version: int) -> Ack:
    return Ack(model_id="m", incarnation=1, version=version)


def update(version: int, nbytes: int = 0) -> Update:
    return Update(model_id="m", incarnation=1, version=version, layout_digest=b"", nbytes=nbytes)


def versions(link: CallLink) -> list[int]:
    return [one.message.version for one in link.receive()]


def test_answers_are_received_in_call_order_whichever_call_ends_first(linked: Any) -> None:
    link, call_client = linked
    for version in (1, 2, 3):
        link.send(update(version))
    call_client.calls[2].set_result([ack(3)])
    call_client.calls[1].set_result([ack(2)])
    assert versions(link) == []
    assert wait(Waker(), [link], 0.0) == []
    call_client.calls[0].set_result([ack(1)])

    assert wait(Waker(), [link], 5.0) == [link]
    assert versions(link) == [1, 2, 3]
    assert versions(link) == []


@pytest.mark.parametrize("error", [TransportError("gone"), ProtocolError("nonsense"), OSError("no route"), KeyError(3)])
def test_a_call_that_fails_is_reported_at_once_after_earlier_messages(linked: Any, error: Exception) -> None:
    link, call_client = linked
    for version in (1, 2, 3):
        link.send(update(version))
    call_client.calls[0].set_result([ack(1)])
    call_client.calls[2].set_exception(error)

    assert versions(link) == [1]
    assert wait(Waker(), [link], 5.0) == [link]
    expected = ProtocolError if isinstance(error, ProtocolError) else TransportError
    for _ in range(2):
        with pytest.raises(expected) as raised:
            link.receive()
    assert raised.value is error or raised.value.__cause__ is error


def test_answers_of_calls_after_a_failed_call_are_dropped(linked: Any) -> None:
    link, call_client = linked
    for version in (1, 2, 3):
        link.send(update(version))
    call_client.calls[0].set_result([ack(1)])
    call_client.calls[2].set_result([ack(3)])
    call_client.calls[1].set_exception(TransportError("the actor died"))

    assert versions(link) == [1]
    with pytest.raises(TransportError, match="the actor died"):
        link.receive()


@pytest.mark.parametrize("last", [0, 2])
def test_the_peers_close_is_reported_after_all_its_answers(linked: Any, last: int) -> None:
    link, call_client = linked
    for version in (1, 2, 3):
        link.send(update(version))
    call_client.calls[1].set_exception(ClosedByPeer("given up"))
    call_client.calls[2 - last].set_result([ack(3 - last)])
    early = versions(link)
    call_client.calls[last].set_result([ack(last + 1)])
    assert wait(Waker(), [link], 5.0) == [link]

    assert [*early, *versions(link)] == [1, 3]
    with pytest.raises(TransportError, match="given up"):
        link.receive()


def test_a_transport_failure_is_reported_at_once_even_if_the_peer_closed_the_link(linked: Any) -> None:
    link, call_client = linked
    for version in (1, 2, 3):
        link.send(update(version))
    call_client.calls[1].set_exception(ClosedByPeer("given up"))
    call_client.calls[2].set_exception(OSError("no route"))

    with pytest.raises(TransportError):
        link.receive()


def test_a_specific_failure_is_reported_rather_than_that_the_link_was_closed(linked: Any) -> None:
    link, call_client = linked
    for version in (1, 2):
        link.send(update(version))
    call_client.calls[0].set_exception(ClosedByPeer("the receiver closed this link"))
    call_client.calls[1].set_exception(TransportError("the actor was restarted"))

    with pytest.raises(TransportError, match="the actor was restarted"):
        link.receive()


def test_of_several_failures_that_of_the_first_call_is_reported(linked: Any) -> None:
    link, call_client = linked
    for version in (1, 2):
        link.send(update(version))
    call_client.calls[0].set_exception(TransportError("another key"))
    call_client.calls[1].set_exception(TransportError("the link is not known"))

    with pytest.raises(TransportError, match="another key"):
        link.receive()


def test_a_cancelled_call_ends_the_link(linked: Any) -> None:
    link, call_client = linked
    link.send(update(1))
    call_client.calls[0].cancel()

    with pytest.raises(TransportError, match=r"worker 4.*cancelled"):
        link.receive()


def test_a_payload_stays_pinned_until_its_call_ends_even_after_close(linked: Any) -> None:
    link, call_client = linked
    over, late, refused = Buffer(4), Buffer(4), Buffer(4)
    link.send(update(1, 4), over)
    link.send(update(2, 4), late)
    call_client.refuses = TransportError("there is no way")
    with pytest.raises(TransportError, match="no way"):
        link.send(update(3, 4), refused)
    assert [buffer.pinned for buffer in (over, late, refused)] == [True, True, False]
    call_client.calls[0].set_result([])
    assert [over.pinned, late.pinned] == [False, True]
    link.close()
    assert late.pinned
    call_client.calls[1].set_exception(TransportError("closed"))

    assert not late.pinned
    assert call_client.closed


def test_an_update_without_its_bytes_is_refused_and_no_call_begun(linked: Any) -> None:
    link, call_client = linked
    for payload in (None, Buffer(3)):
        with pytest.raises(ConfigurationError, match="without its 4 bytes"):
            link.send(update(1, 4), payload)

    assert call_client.calls == []


def test_close_is_idempotent_and_a_closed_link_raises_on_use(linked: Any) -> None:
    link, _ = linked
    link.close()
    link.close()

    assert (link.waitables(), link.wants_write()) == ([], None)
    for use in (link.receive, link.flush, lambda: link.send(update(1))):
        with pytest.raises(TransportError, match="worker 4 is closed"):
            use()


def test_a_dead_process_ends_the_link_after_its_last_messages(linked: Any) -> None:
    link, call_client = linked
    link.send(Hello(model_id="m", incarnation=1))
    call_client.calls[0].set_result([ack(1)])
    pid, started = own_identity()
    link.watch(pid, started + 1)

    assert versions(link) == [1]
    with pytest.raises(TransportError, match=f"worker 4 has ended: process {pid} is dead"):
        link.receive()


def test_a_process_that_cannot_be_watched_is_a_transport_error(linked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(process.os, "pidfd_open", refuse)
    with pytest.raises(TransportError, match="cannot be watched: Too many open files"):
        linked[0].watch(*own_identity())


def test_a_goodbye_is_received_like_any_answer(linked: Any) -> None:
    link, call_client = linked
    link.send(update(1))
    call_client.calls[0].set_result([ack(1), Bye(model_id="m", incarnation=1)])

    assert [type(one.message) for one in link.receive()] == [Ack, Bye]


def test_a_replaced_links_goodbye_is_sent_after_the_handshake_of_the_new_link() -> None:
    hello, bye = Hello(model_id="m", incarnation=1), Bye(model_id="m", incarnation=1)
    clients = [CallClient() for _ in range(4)]
    old, newer, newest, others = (
        CallLink(each, "worker 4", worker=worker) for each, worker in zip(clients, "wwwv", strict=True)
    )
    for link in (old, others):
        link.send(hello)
        link.send(bye)
        link.close()
    assert (clients[0].messages, clients[3].messages) == ([hello], [hello, bye])  # worker "w" alone has later links
    newer.send(hello)
    newest.send(hello)
    newest.close()
    clients[2].calls[0].set_result([hello])  # an answer counts even if the link is closed
    assert clients[0].messages == [hello]
    clients[1].calls[0].set_exception(TransportError("gone"))
    assert clients[0].messages == [hello, bye]

    clients[1].refuses = TransportError("gone")
    unused = CallLink(CallClient(), "worker 4", worker="w")
    newer.send(bye)
    newer.close()
    unused.close()  # made no call, so nothing waits for it; the failure of the goodbye is not reported
    for answered in (0, 3):
        clients[answered].calls[0].set_result([hello])
    assert not {worker for worker, _ in succession._unmet._links} & {"w", "v"}


def test_a_link_dropped_before_its_handshake_does_not_delay_a_goodbye() -> None:
    """Such a link, for example of an unused copy of a sender, would leave the worker waiting for a closed sender."""
    call_client = CallClient()
    link = CallLink(call_client, "worker 4", worker="dropped")
    hello, bye = Hello(model_id="m", incarnation=1), Bye(model_id="m", incarnation=1)
    link.send(hello)
    unused = CallLink(CallClient(), "worker 4", worker="dropped")
    del unused
    gc.collect()
    link.send(bye)

    assert call_client.messages == [hello, bye]
    link.close()


def test_over_rpc_a_payload_is_a_view_of_exactly_its_bytes_in_the_buffer():
    buffer = Buffer(64)
    buffer.view[:6] = b"policy"
    client = RpcCallClient(SimpleNamespace(name="w"), "m", "the worker")
    _, carried = client._carried(update(1, nbytes=6), buffer)
    assert bytes(carried.tolist()) == b"policy"
    buffer.view[:6] = b"actors"
    assert bytes(carried.tolist()) == b"actors"
    assert client._carried(ack(1), buffer)[1] is None


def test_over_rpc_a_goodbye_after_shutdown_warns_to_close_before_the_shutdown(monkeypatch, caplog):
    monkeypatch.setattr("weightsync.transports.rpc.is_initialised", lambda: False)
    client = RpcCallClient(SimpleNamespace(name="w"), "policy", "worker 0")

    with caplog.at_level("WARNING", logger="weightsync"), pytest.raises(TransportError):
        client.start(Bye(model_id="policy", incarnation=3), None)

    assert "'policy': worker 0 was not told that its sender has closed" in caplog.text
    assert "before rpc.shutdown()" in caplog.text
