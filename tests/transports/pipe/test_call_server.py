"""A call server delivers calls from any thread in the order of their numbers, and answers each once.

No call waits for one that never comes.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

from weightsync import ConfigurationError, ProtocolError, RPCWeightSyncScheme, TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Bye, Hello, Update
from weightsync.transports.base import Received, Waker, wait
from weightsync.transports.calls.server import CallServer, Parcel, decoded
from weightsync.transports.calls.server_link import MAX_AHEAD, CallServerLink
from weightsync.transports.process import own_identity
from weightsync.transports.rpc import _CallServers, call_server_of


def ack(version: int) -> Ack:
    return Ack(model_id="m", incarnation=1, version=version)


def parcel(number: int, nbytes: int = 0, link: str = "a", payload: bytes | None = None) -> Parcel:
    update = Update(model_id="m", incarnation=1, version=number + 1, layout_digest=b"", nbytes=nbytes)
    brought = payload if payload is not None else bytes([number % 256]) * nbytes
    return Parcel(link, number, codec.encode(update), memoryview(bytearray(brought)) if nbytes else None)


@pytest.fixture
def opened() -> Any:
    call_server, links = CallServer("m"), []
    stop = call_server.open(links.append)
    yield call_server, links
    stop()
    for link in links:
        link.close()


def brought(link: Any) -> list[int]:
    """The numbers of the calls that the link has delivered."""
    return [one.message.version - 1 for one in link.receive()]


def answers(future: Any) -> list[Any]:
    return decoded(future.result(timeout=30))


def test_calls_are_delivered_in_the_order_in_which_they_were_begun(opened: Any) -> None:
    call_server, links = opened
    call_server.submit(parcel(0))
    (link,) = links
    call_server.submit(parcel(2, nbytes=3))
    call_server.submit(parcel(3))
    assert brought(link) == [0]
    assert wait(Waker(), [link], 0.0) == [] or brought(link) == []
    call_server.submit(parcel(1))

    assert wait(Waker(), [link], 5.0) == [link]
    received = link.receive()
    assert [one.message.version - 1 for one in received] == [1, 2, 3]
    assert bytes(received[1].payload) == b"\x02\x02\x02"


def test_calls_from_many_threads_all_arrive_once_and_in_order(opened: Any) -> None:
    call_server, links = opened
    numbers = list(range(200))
    random.Random(3).shuffle(numbers)
    threads = [
        threading.Thread(target=lambda part=part: [call_server.submit(parcel(n)) for n in part])
        for part in (numbers[0::4], numbers[1::4], numbers[2::4], numbers[3::4])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert brought(links[0]) == list(range(200))
    assert len(links) == 1


def test_an_answer_is_returned_by_the_oldest_unanswered_call(opened: Any) -> None:
    call_server, links = opened
    first, second = call_server.submit(parcel(0)), call_server.submit(parcel(1))
    (link,) = links
    link.send(ack(1))
    assert (answers(first), second.done()) == ([ack(1)], False)
    link.send(ack(2))
    link.send(ack(3))

    assert answers(second) == [ack(2)]
    assert answers(call_server.submit(parcel(2))) == [ack(3)]


def test_a_repeated_call_gets_the_same_answer_and_is_delivered_once(opened: Any) -> None:
    call_server, links = opened
    waiting = call_server.submit(parcel(0))
    again = call_server.submit(parcel(0))
    (link,) = links
    assert brought(link) == [0]
    link.send(ack(1))
    assert answers(waiting) == answers(again) == answers(call_server.submit(parcel(0))) == [ack(1)]

    assert brought(link) == []
    assert not call_server.submit(parcel(1)).done()


def test_a_malformed_call_fails_and_is_reported_after_earlier_messages(opened: Any) -> None:
    call_server, links = opened
    call_server.submit(parcel(0))
    bad = Parcel("a", 2, b"nonsense" * 20)
    with pytest.raises(ProtocolError):
        call_server.submit(bad)
    call_server.submit(parcel(3))
    call_server.submit(parcel(1))

    (link,) = links
    assert brought(link) == [0, 1]
    assert wait(Waker(), [link], 5.0) == [link]
    for _ in range(2):
        with pytest.raises(ProtocolError):
            link.receive()


def test_an_update_without_its_payload_bytes_is_malformed(opened: Any) -> None:
    call_server, links = opened
    with pytest.raises(ProtocolError, match="without its 9 bytes"):
        call_server.submit(parcel(0, nbytes=9, payload=b"short"))

    with pytest.raises(ProtocolError, match="without its 9 bytes"):
        links[0].receive()


def test_closing_a_link_fails_its_pending_and_later_calls(opened: Any) -> None:
    call_server, links = opened
    calls = [call_server.submit(parcel(number)) for number in range(3)]
    links[0].close()

    for call in calls:
        with pytest.raises(TransportError, match="before it answered"):
            call.result(timeout=30)
    with pytest.raises(TransportError, match="closed"):
        call_server.submit(parcel(3))


def test_a_goodbye_is_returned_by_one_pending_call_and_the_others_return_empty(opened: Any) -> None:
    call_server, links = opened
    calls = [call_server.submit(parcel(number)) for number in range(3)]
    bye = Bye(model_id="m", incarnation=1)
    links[0].send(bye)
    links[0].close()

    assert [answers(call) for call in calls] == [[bye], [], []]


def test_a_goodbye_without_a_pending_call_answers_the_next_call(opened: Any) -> None:
    call_server, links = opened
    links_first = call_server.submit(parcel(0))
    (link,) = links
    link.send(ack(1))
    assert answers(links_first) == [ack(1)]
    bye = Bye(model_id="m", incarnation=1)
    link.send(bye)
    link.close()

    assert answers(call_server.submit(parcel(1))) == [bye]
    with pytest.raises(TransportError):
        call_server.submit(parcel(2))


def test_the_goodbye_of_an_old_link_is_kept_after_many_newer_links_have_ended(opened: Any) -> None:
    """Many younger links end, for example, if a former trainer tries again and again to come back."""
    call_server, links = opened
    answer = call_server.submit(parcel(0))
    links[0].send(ack(1))
    assert answers(answer) == [ack(1)]
    for number in range(100):
        call_server.submit(parcel(0, link=f"younger {number}"))
        links[-1].close()
    bye = Bye(model_id="m", incarnation=1)
    links[0].send(bye)
    links[0].close()
    call_server.submit(parcel(0, link="b"))

    assert answers(call_server.submit(parcel(1))) == [bye]
    assert len(call_server._links) == 64 + 1


def test_a_released_call_returns_at_once_and_a_later_answer_is_returned_by_the_next_call(opened: Any) -> None:
    call_server, links = opened
    call = call_server.submit(parcel(0))
    call_server.release(parcel(0))
    assert answers(call) == []
    call_server.release(parcel(0))
    links[0].send(ack(7))

    assert answers(call_server.submit(parcel(1))) == [ack(7)]


def test_after_a_senders_goodbye_earlier_and_later_calls_of_its_link_return_empty(opened: Any) -> None:
    call_server, _ = opened
    early = call_server.submit(parcel(0))
    call_server.hang_up(Parcel("a", 2, codec.encode(Bye(model_id="m", incarnation=1))))
    late = call_server.submit(parcel(1))

    assert [answers(early), answers(late)] == [[], []]


@pytest.mark.parametrize("early", [False, True], ids=["while the receiver listens", "before it listens"])
def test_no_call_of_a_link_is_processed_before_the_receiver_has_the_link(early: bool) -> None:
    """The call would find a receiver without this link, and end the link."""
    call_server, begun, let_go, links = CallServer("m"), threading.Event(), threading.Event(), []

    def accept(link: Any) -> None:
        begun.set()
        assert let_go.wait(20)
        links.append(link)

    def serve() -> None:
        if early:
            call_server.submit(parcel(0))
        stops.append(call_server.open(accept))
        if not early:
            call_server.submit(parcel(0))

    def second() -> None:
        call_server.submit(parcel(1))
        seen.append(list(links))

    stops: list[Any] = []
    seen: list[Any] = []
    threads = [threading.Thread(target=serve), threading.Thread(target=second)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    assert seen == []
    let_go.set()
    for thread in threads:
        thread.join()

    assert seen == [links]
    assert brought(links[0]) == [0, 1]
    links[0].close()
    stops[0]()


def test_calls_made_before_a_receiver_listens_wait_at_the_call_server() -> None:
    call_server, links = CallServer("m"), []
    early = call_server.submit(parcel(0)), call_server.submit(parcel(0, link="b"))
    stop = call_server.open(links.append)
    assert [brought(link) for link in links] == [[0], [0]]
    with pytest.raises(ConfigurationError, match="has a receiver"):
        call_server.open(links.append)
    links[1].send(ack(5))
    assert (early[0].done(), answers(early[1])) == (False, [ack(5)])
    stop()
    call_server.submit(parcel(0, link="c"))
    assert len(links) == 2
    again = call_server.open(links.append)

    assert len(links) == 3
    again()
    for link in links:
        link.close()


def test_a_dropped_receiver_stops_listening_and_its_links_end_when_another_listens() -> None:
    call_server, links, later = CallServer("m"), [], []
    stop = call_server.open(links.append)
    waiting = call_server.submit(parcel(0))
    assert call_server.listening
    del stop
    gc.collect()
    assert not call_server.listening
    call_server.submit(parcel(0, link="b"))
    assert len(links) == 1
    stop = call_server.open(later.append)

    assert "was dropped without close()" in str(waiting.exception(timeout=0))
    assert brought(later[0]) == [0]
    stop()
    later[0].close()


def test_a_new_receiver_over_rpc_replaces_a_dropped_one() -> None:
    first = RPCWeightSyncScheme()
    first.init_on_worker("dropped", model=nn.Linear(2, 2))
    del first
    gc.collect()
    with RPCWeightSyncScheme() as another:
        another.init_on_worker("dropped", model=nn.Linear(2, 2))


def test_a_skipped_call_is_no_longer_awaited(opened: Any) -> None:
    call_server, links = opened
    call_server.submit(parcel(0))
    call_server.submit(parcel(2))
    assert brought(links[0]) == [0]
    assert call_server.awaits_turn(parcel(2))
    call_server.skip(parcel(2), [1])

    assert brought(links[0]) == [2]
    assert not call_server.awaits_turn(parcel(2))


def test_calls_too_far_ahead_of_the_awaited_number_are_refused_and_not_kept(opened: Any) -> None:
    call_server, links = opened
    call_server.submit(parcel(0))
    with pytest.raises(ProtocolError, match="call 1 is awaited"):
        call_server.submit(parcel(MAX_AHEAD + 1))
    call_server.submit(parcel(1))

    assert brought(links[0]) == [0, 1]


def test_a_message_with_a_payload_from_the_receiver_is_refused(opened: Any) -> None:
    call_server, links = opened
    call_server.submit(parcel(0))

    with pytest.raises(ConfigurationError):
        links[0].send(ack(1), object())


def test_a_dead_sender_ends_the_link_after_its_last_messages(opened: Any) -> None:
    call_server, links = opened
    call_server.submit(parcel(0))
    pid, started = own_identity()
    links[0].watch(pid, started + 1)

    assert brought(links[0]) == [0]
    with pytest.raises(TransportError, match=f"process {pid} is dead"):
        links[0].receive()


def test_closing_an_inherited_link_in_a_forked_child_answers_no_call(opened: Any) -> None:
    call_server, links = opened
    call = call_server.submit(parcel(0))
    pid = os.fork()
    if pid == 0:
        try:
            links[0].close()
            with pytest.raises(TransportError):
                links[0].receive()
            os._exit(0 if not call.done() else 2)
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert brought(links[0]) == [0]


def test_a_malformed_waiting_call_fails_and_its_link_is_not_given_to_a_receiver() -> None:
    call_server, links = CallServer("m"), []
    early = call_server.submit(parcel(0)), call_server.submit(parcel(0, link="b"))
    for bad in (Parcel("a", 1, b"nonsense" * 20), Parcel("c", 0, codec.encode(ack(1)))):
        with pytest.raises(ProtocolError):
            call_server.submit(bad)
    stop = call_server.open(links.append)

    assert [brought(link) for link in links] == [[0]]
    assert not early[1].done()
    with pytest.raises(TransportError, match="broke the protocol"):
        early[0].result(timeout=30)
    with pytest.raises(TransportError, match="closed"):
        call_server.submit(parcel(2))
    stop()
    links[0].close()


def test_call_servers_of_models_without_a_receiver_are_bounded_in_number() -> None:
    """A worker may outlive thousands of trainers, and must not keep a call server for each model id they named."""
    servers, bye = _CallServers(), Parcel("a", 1, codec.encode(Bye(model_id="m", incarnation=1)))
    waiting, opened = servers.of("waiting"), servers.of("opened")
    waiting.submit(parcel(0))
    opened.open([].append)()

    for number in range(400):
        server = servers.of(f"run {number}")
        call = server.submit(parcel(0))
        server.hang_up(bye)
        assert call.result(timeout=0) == []

    assert (servers.of("waiting"), servers.of("opened")) == (waiting, opened)
    assert servers.of("run 399") is server
    assert len(servers._call_servers) == 256 + 2
    waiting.hang_up(bye)


def test_a_receiver_connects_despite_a_malformed_call_waiting_for_it() -> None:
    call_server, scheme = call_server_of("past a malformed call"), RPCWeightSyncScheme()
    with pytest.raises(ProtocolError):
        call_server.submit(Parcel("bad", 0, b"nonsense" * 20))
    answer = call_server.submit(Parcel("good", 0, codec.encode(Hello(model_id=call_server.model_id, incarnation=7))))
    with scheme:
        scheme.init_on_receiver(model_id=call_server.model_id, model=torch.nn.Linear(1, 1))
        scheme.connect(worker_idx=0, timeout=60)

        assert [type(message) for message in answers(answer)] == [Hello]
        assert scheme.get_receiver().driver.data.fence == 7


def test_only_the_receiver_that_listens_can_stop_listening() -> None:
    call_server, links = CallServer("m"), []
    first = call_server.open([].append)
    first()
    second = call_server.open(links.append)
    first()

    call_server.submit(parcel(0))
    assert len(links) == 1
    second()
    links[0].close()


def test_what_arrived_before_rpc_was_shut_down_is_read_before_that_is_reported() -> None:
    link = CallServerLink("the sender", lambda: "RPC was shut down")
    link.bring(0, Received(ack(1)))

    assert [received.message for received in link.receive()] == [ack(1)]
    with pytest.raises(TransportError, match="was shut down"):
        link.receive()
    link.close()


def test_a_call_repeated_after_many_others_is_not_delivered_again(opened: Any) -> None:
    call_server, links = opened
    for number in range(20):
        call_server.submit(parcel(number))
        links[0].send(ack(number + 1))
    assert brought(links[0]) == list(range(20))

    assert answers(call_server.submit(parcel(0))) == []
    assert brought(links[0]) == []


def test_no_call_of_a_closed_link_awaits_its_turn(opened: Any) -> None:
    """A transport that repeats early calls would repeat this one without end."""
    call_server, links = opened
    call_server.submit(parcel(0))
    assert call_server.awaits_turn(parcel(2))
    links[0].close()

    assert not call_server.awaits_turn(parcel(2))
