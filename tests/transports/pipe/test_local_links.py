"""Links within a process, and their simulated network."""

from __future__ import annotations

import threading

import pytest
from local_links import Pace, Side, local_pair

from weightsync.errors import ConfigurationError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Update
from weightsync.transports.base import Link, Payloads, Waker, wait
from weightsync.transports.buffers import Buffer


def ack(version: int) -> Ack:
    return Ack(model_id="m", incarnation=1, version=version)


def update(version: int, nbytes: int) -> Update:
    return Update(model_id="m", incarnation=1, version=version, layout_digest=b"", nbytes=nbytes)


def versions(link: Link) -> list[int]:
    return [received.message.version for received in link.receive()]


@pytest.mark.parametrize("delivery", Delivery)
def test_a_prompt_network_delivers_at_once_and_in_order(delivery):
    first, second = local_pair(delivery)
    for version in range(1, 6):
        first.send(ack(version))

    assert delivery is first.delivery
    assert versions(second) == [1, 2, 3, 4, 5]
    assert versions(second) == []


def test_a_held_network_delivers_on_request():
    first, second = local_pair(pace=Pace.HELD)
    first.send(ack(1))
    first.send(ack(2))
    assert versions(second) == []
    first.network.deliver(first.network.deliverable()[0])
    assert versions(second) == [1]
    first.network.deliver_all()

    assert versions(second) == [2]


@pytest.mark.parametrize("delivery", Delivery)
def test_the_network_allows_only_the_faults_of_its_delivery(delivery):
    first, second = local_pair(delivery, pace=Pace.HELD)
    for version in (1, 2, 3):
        first.send(ack(version))
    network = first.network
    for allowed, misbehave in (
        (delivery.reorders, lambda: network.deliver(network.in_flight[-1])),
        (delivery.duplicates, lambda: network.duplicate(network.in_flight[0])),
        (delivery.loses, lambda: network.drop(network.in_flight[0])),
    ):
        if allowed:
            misbehave()
        else:
            with pytest.raises(ConfigurationError, match="promised"):
                misbehave()
    network.deliver_all()
    heard = versions(second)

    expected = {
        Delivery.ORDERED: [1, 2, 3],
        Delivery.REORDERED: [3, 1, 2],
        Delivery.AT_LEAST_ONCE: [3, 1, 2, 1],
        Delivery.BEST_EFFORT: [3, 2, 1],
    }
    assert expected[delivery] == heard


def test_each_direction_has_an_order_of_its_own():
    first, second = local_pair(pace=Pace.HELD)
    first.send(ack(1))
    second.send(ack(2))

    assert {Side.FIRST, Side.SECOND} == {parcel.to for parcel in first.network.deliverable()}


@pytest.mark.parametrize("delivery", [Delivery.ORDERED, Delivery.REORDERED, Delivery.AT_LEAST_ONCE])
def test_a_cut_is_reported_at_both_ends_after_messages_that_had_arrived(delivery):
    first, second = local_pair(delivery, pace=Pace.HELD)
    first.send(ack(1))
    first.send(ack(2))
    first.network.deliver(first.network.deliverable()[0])
    first.network.cut()

    assert versions(second) == [1]
    for link in (first, second):
        for use in (link.receive, lambda link=link: link.send(ack(3))):
            with pytest.raises(TransportError, match="was cut"):
                use()


def test_a_lossy_link_does_not_report_a_cut():
    first, second = local_pair(Delivery.BEST_EFFORT, pace=Pace.HELD)
    first.send(ack(1))
    first.network.cut()
    first.network.crash(Side.SECOND)

    assert versions(first) == []
    first.send(ack(2))
    with pytest.raises(TransportError, match="process is dead"):
        second.receive()


def test_a_crash_is_reported_at_the_other_end_and_the_dead_end_cannot_send():
    first, second = local_pair()
    first.send(ack(1))
    second.send(ack(2))
    first.network.crash(Side.SECOND)

    assert versions(first) == [2]
    with pytest.raises(TransportError, match="process is dead"):
        first.receive()
    with pytest.raises(TransportError, match="This end's process is dead"):
        second.send(ack(3))


def test_a_close_ends_the_other_end_after_the_last_message():
    first, second = local_pair(pace=Pace.HELD)
    first.send(ack(1))
    first.close()
    first.close()
    assert versions(second) == []
    second.network.deliver_all()

    assert versions(second) == [1]
    with pytest.raises(TransportError, match="closed by the other end"):
        second.receive()
    with pytest.raises(TransportError, match="closed"):
        first.send(ack(2))


def test_inline_payloads_are_snapshots_and_shared_ones_are_the_buffer_itself():
    for payloads in Payloads:
        first, second = local_pair(payloads=payloads)
        buffer = Buffer(4)
        buffer.view[:] = b"old!"
        first.send(update(1, 4), buffer)
        buffer.view[:] = b"new!"
        shared = payloads is Payloads.SHARED

        assert (b"new!" if shared else b"old!") == second.receive()[0].payload
        assert shared == buffer.pinned


def test_shared_payloads_are_pinned_until_a_newer_ack_and_retired_at_close():
    first, second = local_pair(payloads=Payloads.SHARED)
    old, new, last = Buffer(4), Buffer(4), Buffer(4)
    for version, buffer in enumerate((old, new, last), 1):
        first.send(update(version, 4), buffer)
    second.send(ack(2))
    first.receive()
    assert [buffer.pinned for buffer in (old, new, last)] == [False, True, True]
    first.close()

    assert [buffer.retired for buffer in (old, new, last)] == [False, True, True]


def test_a_dead_workers_buffers_are_freed_when_its_link_is_closed():
    first, _ = local_pair(payloads=Payloads.SHARED)
    buffer = Buffer(4)
    first.send(update(1, 4), buffer)
    first.network.crash(Side.SECOND)
    first.close()

    assert (buffer.pinned, buffer.retired) == (False, False)


def test_an_update_without_its_bytes_is_refused():
    first, second = local_pair()
    with pytest.raises(ConfigurationError, match="without its 4 bytes"):
        first.send(update(1, 4))

    assert versions(second) == []


def test_a_wait_ends_when_something_arrives_or_the_link_ends():
    first, second = local_pair()
    waker = Waker()
    assert wait(waker, [second], 0.0) == []
    threading.Timer(0.02, lambda: first.send(ack(1))).start()
    assert [second] == wait(waker, [second], 10.0)
    assert versions(second) == [1]
    assert wait(waker, [second], 0.0) == []
    first.network.cut()

    assert [second] == wait(waker, [second], 10.0)
    assert (first.flush(), first.wants_write()) == (True, None)
