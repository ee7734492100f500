"""What a receiver's driver sends and accepts over its links, and what it keeps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace
from scripted import Scripted

from weightsync import ProtocolError, StateError, TransportError
from weightsync.engine import driver as drivers
from weightsync.engine.receiver_driver import Pending, ReceiverDriver
from weightsync.errors import SenderClosed
from weightsync.protocol import receiver as pure
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.messages import Ack, BaseRef, Bye, Ending, Hello, Refusal, Update
from weightsync.protocol.report import SyncReport
from weightsync.transports.device import CarriesDevices
from weightsync.transports.process import own_host, own_identity
from weightsync.weights.layout import Layout

LAYOUT = Layout([("a", "float32", (2,))])
OTHER = Layout([("b", "float64", (3,))])
EPOCH = 5
NESTED = SyncReport(model_id="policy", version=1, incarnation=2, outcomes={})


def hello(incarnation: int = EPOCH, **fields: Any) -> Hello:
    return Hello(model_id="policy", incarnation=incarnation, **fields)


def update(version: int, layout: Layout = LAYOUT, *, with_layout: bool = True, incarnation: int = EPOCH) -> Update:
    return Update(
        model_id="policy",
        incarnation=incarnation,
        version=version,
        layout_digest=layout.digest,
        layout=layout.encode() if with_layout else b"",
        nbytes=layout.nbytes,
    )


def bye(incarnation: int = EPOCH, ending: Ending = Ending.CLOSED) -> Bye:
    return Bye(model_id="policy", incarnation=incarnation, reason="enough", ending=ending)


def ack(version: int) -> Ack:
    return Ack(model_id="policy", incarnation=EPOCH, version=version)


def refusal(version: int, kind: RefusalKind, reason: str, **what: Any) -> Refusal:
    fields = {"incarnation": EPOCH, "fence": EPOCH, **what}
    return Refusal(model_id="policy", version=version, kind=kind, reason=reason, **fields)


class Worker:
    """A receiver driver with one or more links. The first link has completed its handshake."""

    def __init__(self, others: int = 0) -> None:
        self.driver = ReceiverDriver("policy")
        self.links = [Scripted() for _ in range(1 + others)]
        for link in self.links:
            self.driver.add_link(link)
        self.receives(0, hello())
        self.link = self.links[0]
        self.link.takes()

    def receives(self, which: int, *messages: Any) -> None:
        """Make a link return these messages, and handle them."""
        for message in messages:
            self.links[which].receives(message)
        self.driver.pump()

    def applies(self, version: int) -> Ack:
        """Deliver a version and apply it. Returns the ack."""
        answer = ack(version)
        self.receives(0, update(version))
        self.driver.take(pure.Applied(answer))
        return answer

    def defers(self, version: int) -> Ack:
        """Deliver a version, apply it and defer its ack, as a relay does. Returns the ack."""
        answer = ack(version)
        self.receives(0, update(version))
        self.driver.take(pure.Defer(answer))
        return answer

    @property
    def state(self) -> State:
        return self.driver.machine.state


def raised_by(worker: Worker, which: int, *messages: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        worker.receives(which, *messages)
    return caught.value


# ------------------------------------------------------------------------------------------------ what it sends


def test_the_reason_of_the_last_refused_handshake_is_kept() -> None:
    worker, late = Worker(1), Scripted()
    assert worker.driver.handshake_refusal == ""
    worker.driver.layout = LAYOUT
    worker.driver.add_link(late)
    late.receives(hello(EPOCH + 1, layout_digest=OTHER.digest, layout=OTHER.encode()))
    worker.driver.pump()

    assert worker.driver.handshake_refusal
    assert worker.driver.ended == f"its handshake was refused: {worker.driver.handshake_refusal}"


def test_an_equal_layout_is_replaced_by_the_known_object() -> None:
    worker, equal = Worker(), Layout([("a", "float32", (2,))])
    worker.driver.layout = LAYOUT
    worker.receives(0, update(1, equal))
    assert worker.driver.pending is not None
    assert worker.driver.pending.layout is LAYOUT


def test_only_an_applied_version_can_be_the_base_of_a_delta() -> None:
    whole, delta = replace(update(1), base=BaseRef()), replace(update(2), base=BaseRef(version=1))
    for answer, holds in ((pure.Applied(ack(1)), True), (pure.Refused(refusal(1, RefusalKind.REFUSED, "no")), False)):
        worker = Worker()
        worker.receives(0, whole)
        worker.driver.take(answer)
        assert worker.driver.held.holds(delta) is holds


def test_a_receivers_hello_names_its_process_and_its_served_version_and_layout() -> None:
    worker, late = Worker(1), Scripted()
    pid, started = own_identity()
    greeting = hello(fence=EPOCH, host=own_host(), pid=pid, started=started)
    worker.driver.layout = LAYOUT
    worker.applies(3)
    worker.driver.add_link(late)
    late.receives(hello())
    worker.driver.pump()
    assert late.takes() == [replace(greeting, link=3, version=3, layout_digest=LAYOUT.digest)]

    worker.driver.layout = None
    worker.receives(1, hello(EPOCH + 1))
    assert worker.links[1].takes() == [replace(greeting, incarnation=EPOCH + 1, fence=EPOCH + 1, link=2)]


def test_an_older_senders_handshake_is_refused_with_the_fence_and_not_kept_as_greeting() -> None:
    worker = Worker(1)
    worker.receives(1, hello(EPOCH - 1))

    reason = "this worker has seen a newer sender"
    assert worker.links[1].takes() == [refusal(0, RefusalKind.FENCED, reason, incarnation=EPOCH - 1)]
    assert (worker.links[1].closed, worker.driver.greeting) == (1, hello())
    assert (worker.driver.ended, worker.driver.ended_error) == (f"its handshake was refused: {reason}", TransportError)


@pytest.mark.parametrize("layout", [OTHER, LAYOUT], ids=["another", "the same"])
def test_a_handshake_is_refused_only_if_the_layouts_differ_and_names_the_difference(layout: Layout) -> None:
    worker = Worker(1)
    worker.driver.layout = LAYOUT
    worker.receives(1, hello(EPOCH + 1, layout_digest=b"unknown digest..", layout=layout.encode()))

    (said,) = worker.links[1].takes()
    assert isinstance(said, Hello if layout is LAYOUT else Refusal)
    if isinstance(said, Refusal):
        assert (said.kind, said.reason) == (RefusalKind.REFUSED, str(LAYOUT.difference(OTHER)))


def test_a_sender_that_is_taken_over_from_gets_the_new_fence_as_its_last_message() -> None:
    worker = Worker(1)
    worker.receives(1, hello(EPOCH + 1))

    reason = "this worker has seen a newer sender"
    assert worker.link.takes() == [refusal(0, RefusalKind.FENCED, reason, fence=EPOCH + 1)]
    assert (worker.link.closed, worker.driver.current_link()) == (1, worker.links[1])


@pytest.mark.parametrize(("number", "over"), [(1, True), (3, False)])
def test_of_two_links_of_one_sender_the_one_with_the_lower_link_number_is_closed(number: int, over: bool) -> None:
    driver, former, newer, late = ReceiverDriver("policy"), Scripted(), Scripted(), hello(link=number)
    for link in (former, newer):
        driver.add_link(link)
    newer.receives(hello(link=2))
    driver.pump()
    for message in (late, update(1)):
        former.receives(message)
    driver.pump()

    assert (driver.data.link, driver.greeting) == ((2, hello(link=2)) if over else (1, late))
    assert (former.closed, newer.closed) == ((1, 0) if over else (0, 1))
    assert (driver.ended, driver.handshake_refusal, driver.pending is None) == ("", "", over)


def test_close_sends_a_goodbye_and_closes_all_links_although_a_send_fails() -> None:
    worker = Worker(1)
    worker.links[1].raises["send"] = ZeroDivisionError()
    worker.receives(0, update(1))
    worker.driver.close()

    said = Bye(model_id="policy", incarnation=EPOCH, reason="the receiver was closed")
    assert (worker.link.takes(), worker.links[1].takes()) == ([said], [])
    assert [link.closed for link in worker.links] == [1, 1]
    assert (worker.driver.links(), worker.driver.pending, worker.state) == ([], None, State.CLOSED)
    assert worker.driver.waker.enter() is None
    worker.driver.add_link(late := Scripted())
    assert (late.closed, worker.driver.links()) == (1, [])


@pytest.mark.parametrize("method", ["fail", "break_down"])
def test_a_failure_is_sent_last_over_the_current_link_and_closes_all_links(method: str) -> None:
    worker = Worker(1)
    worker.receives(0, update(1))
    getattr(worker.driver, method)("the bus is gone", "a traceback")

    assert worker.link.takes() == [refusal(0, RefusalKind.FAILED, "the bus is gone", remote_traceback="a traceback")]
    assert worker.links[1].takes() == [replace(bye(0, Ending.FAILED), reason="the bus is gone")]
    assert ([link.closed for link in worker.links], worker.driver.links()) == ([1, 1], [])
    assert worker.driver.pending is None
    assert worker.driver.waker.enter() is None


def test_superseded_and_stale_versions_are_refused_with_the_reason() -> None:
    worker = Worker()
    worker.receives(0, update(2), update(3, with_layout=False), update(1, with_layout=False))
    assert worker.link.takes() == [
        refusal(2, RefusalKind.SUPERSEDED, "a newer version arrived before this one was applied"),
        refusal(1, RefusalKind.STALE, "this worker has already seen a newer version or a newer sender"),
    ]
    assert worker.driver.pending is not None
    assert worker.driver.pending.update.version == 3


# --------------------------------------------------------------------------------------------------- its answers


def test_an_answer_is_sent_at_once_and_no_further_update_is_pending_until_it_has_left() -> None:
    worker = Worker(1)
    worker.link.gone = False
    answer = worker.applies(1)
    assert (worker.link.takes(), worker.state) == ([answer], State.AWAITING_ACK)
    worker.receives(0, update(2))
    assert worker.driver.pending is None

    worker.links[1].gone = True
    worker.receives(1, hello(EPOCH - 1))
    assert (worker.state, worker.links[1].closed) == (State.AWAITING_ACK, 1)
    worker.link.gone = True
    worker.driver.pump()
    assert worker.state is State.PENDING_ASYNC


def test_an_answer_has_not_left_when_only_another_link_is_flushed() -> None:
    worker = Worker(1)
    worker.link.gone = False
    worker.applies(1)
    worker.links[1].gone = True
    worker.driver.pump()

    assert worker.state is State.AWAITING_ACK


def test_a_deferred_ack_carries_the_nested_report() -> None:
    worker = Worker()
    answer = worker.defers(1)
    worker.driver.pump()
    assert (worker.link.takes(), worker.state, worker.driver.deferring) == ([], State.AWAITING_ACK, True)
    worker.driver.take(pure.SendAck(NESTED))

    sent = replace(answer, nested=NESTED)
    assert (worker.link.takes(), worker.state) == ([sent], State.READY)
    assert worker.driver.data.answer == sent
    worker.receives(0, update(1))
    assert worker.link.takes() == [sent]


def test_a_refusal_is_not_deferred() -> None:
    worker = Worker()
    worker.receives(0, update(1))
    worker.driver.take(pure.Refused(refusal(1, RefusalKind.REFUSED, "no")))

    assert worker.driver.data.answer == refusal(1, RefusalKind.REFUSED, "no")
    worker.link.takes()
    worker.driver.take(pure.SendAck(NESTED))
    assert (worker.link.takes(), worker.driver.deferring) == ([], False)


def test_an_ack_deferred_when_its_link_is_lost_is_kept_for_the_next_link() -> None:
    worker = Worker()
    answer = worker.defers(1)
    worker.link.raises["flush"] = TransportError("cut")
    worker.driver.pump()
    assert worker.driver.links() == []
    worker.driver.take(pure.SendAck(NESTED))
    worker.driver.add_link(late := Scripted())
    late.receives(hello())
    late.receives(update(1))
    worker.driver.pump()

    assert late.takes()[1:] == [replace(answer, nested=NESTED)]


def test_no_version_is_served_after_weights_were_written_by_hand() -> None:
    worker = Worker()
    worker.applies(1)
    assert worker.driver.data.served == (EPOCH, 1)
    worker.driver.take(pure.Invalidate())
    assert worker.driver.data.served is None


# ------------------------------------------------------------------------------------------------ how links end


@pytest.mark.parametrize("method", ["receive", "flush"])
@pytest.mark.parametrize(
    ("error", "reason"), [(TransportError("cut"), "cut"), (KeyError("odd"), "the adapter of the link to somebody fa")]
)
def test_a_failed_link_is_sent_the_reason_as_its_last_message_and_closed(
    method: str, error: Exception, reason: str
) -> None:
    worker = Worker()
    assert (worker.driver.ended, worker.driver.ended_error) == ("", TransportError)
    worker.link.raises[method] = error
    worker.driver.pump()

    (said,) = worker.link.takes()
    assert isinstance(said, Refusal)
    assert (said.kind, said.version, said.incarnation) == (RefusalKind.FAILED, 0, EPOCH)
    assert worker.driver.ended == said.reason
    assert said.reason.startswith(reason)
    assert (worker.link.closed, worker.driver.links()) == (1, [])
    assert (worker.driver.current_link(), worker.state) == (None, State.UNINITIALIZED)


@pytest.mark.parametrize("method", ["receive", "flush"])
def test_a_link_other_than_the_current_one_fails_alone_with_a_last_message(method: str) -> None:
    worker = Worker(2)
    worker.links[1].raises[method] = TransportError("cut")
    worker.links[2].receives(hello(EPOCH - 1))
    worker.driver.pump()

    assert worker.links[1].takes() == [refusal(0, RefusalKind.FAILED, "cut")]
    assert [link.closed for link in worker.links] == [0, 1, 1]
    assert (worker.driver.current_link(), worker.state) == (worker.link, State.READY)


def test_links_after_a_failed_one_are_flushed_too() -> None:
    worker = Worker(1)
    flushed = worker.links[1].flushed
    worker.link.raises["flush"] = TransportError("cut")
    worker.driver.flush()

    assert worker.links[1].flushed == flushed + 1


@pytest.mark.parametrize(("error", "reason"), [(TransportError("cut"), "cut"), (MemoryError(), "MemoryError()")])
def test_a_link_that_fails_to_send_is_lost_with_the_reason(error: Exception, reason: str) -> None:
    worker = Worker()
    worker.link.raises["send"] = error
    worker.receives(0, update(2), update(1))

    assert (worker.driver.ended, worker.link.closed, worker.state) == (reason, 1, State.UNINITIALIZED)


def test_a_goodbye_behind_an_update_that_cannot_be_answered_is_how_the_link_ended() -> None:
    worker = Worker()
    worker.link.raises["send"] = TransportError("cut")
    worker.receives(0, update(2), update(1), bye())
    assert (worker.driver.ended, worker.driver.ended_error) == ("the sender said goodbye: enough", SenderClosed)

    worker = Worker()
    worker.link.raises["send"] = TransportError("cut")
    worker.receives(0, update(2), update(1), update(3))
    assert (worker.driver.ended, worker.driver.ended_error) == ("cut", TransportError)


def test_a_goodbye_that_arrived_before_a_failed_write_is_how_the_link_ended() -> None:
    worker = Worker()
    worker.receives(0, update(1))
    worker.link.raises["flush"] = TransportError("cut")
    for message in (bye(EPOCH - 1), bye()):
        worker.link.receives(message)
    worker.driver.flush()
    assert (worker.driver.ended, worker.driver.ended_error) == ("the sender said goodbye: enough", SenderClosed)

    worker = Worker()
    worker.link.raises["flush"] = TransportError("cut")
    worker.link.receives(bye(EPOCH - 1))
    worker.driver.flush()
    assert (worker.driver.ended, worker.driver.ended_error) == ("cut", TransportError)

    worker = Worker()
    worker.link.raises |= {"flush": TransportError("cut"), "receive": ProtocolError("torn")}
    worker.driver.flush()
    assert (worker.driver.ended, worker.driver.ended_error) == ("cut", TransportError)


def test_a_goodbye_is_how_a_link_ended_although_it_fails_again_before_it_is_closed() -> None:
    worker = Worker()
    worker.receives(0, update(1))
    worker.link.raises |= {"send": TransportError("cut"), "flush": TransportError("still cut")}
    worker.link.receives(bye())
    worker.driver.take(pure.Applied(ack(1)))

    assert (worker.driver.ended, worker.driver.ended_error) == ("the sender said goodbye: enough", SenderClosed)
    assert (worker.link.closed, worker.state) == (1, State.UNINITIALIZED)


def test_messages_after_a_goodbye_are_ignored() -> None:
    worker = Worker()
    worker.receives(0, bye(), bye(ending=Ending.FAILED), update(1))

    assert worker.driver.ended == "the sender said goodbye: enough"
    assert worker.driver.pending is None


def test_a_closed_and_a_failed_sender_are_reported_with_their_error_types() -> None:
    worker = Worker(1)
    worker.receives(0, bye(EPOCH - 1))
    assert (worker.driver.ended, worker.link.closed) == ("", 0)
    worker.receives(0, bye())
    assert (worker.driver.ended, worker.driver.ended_error) == ("the sender said goodbye: enough", SenderClosed)
    assert (worker.link.closed, worker.link.takes(), worker.state) == (1, [], State.UNINITIALIZED)

    worker.receives(1, bye(EPOCH - 2, Ending.FAILED))
    assert (worker.driver.ended, worker.driver.ended_error) == ("the sender failed: enough", TransportError)
    assert (worker.links[1].closed, worker.links[1].takes()) == (1, [])


def test_the_end_of_the_last_link_is_cleared_once_another_is_added_or_expected() -> None:
    worker = Worker()
    worker.receives(0, bye())
    before, ended = worker.driver.waker.fired, worker.driver.ended
    with worker.driver.expecting_sender():
        assert worker.driver.ended == ""
    worker.driver.ended = ended
    with pytest.raises(KeyError), worker.driver.expecting_sender():
        raise KeyError
    assert worker.driver.ended == ended
    worker.driver.add_link(Scripted())
    assert (worker.driver.ended, worker.driver.waker.fired) == ("", before + 1)


def test_a_link_that_cannot_be_waited_for_is_lost_and_no_other() -> None:
    worker = Worker(1)
    worker.driver._lose_link(worker.links[1], "stuck")
    worker.driver.pump()

    assert ([link.closed for link in worker.links], worker.driver.ended) == ([0, 1], "stuck")
    assert worker.driver.links() == [worker.link]


# --------------------------------------------------------------------------------------------- breaches, failures


@pytest.mark.parametrize("which", [0, 1])
def test_a_protocol_breach_is_raised_only_if_it_is_over_the_current_link(
    which: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker, error = Worker(1), "a sender sent Ack; only receivers send it."
    if which == 0:
        assert str(raised_by(worker, 0, ack(1))) == error
    else:
        with caplog.at_level(logging.ERROR, "weightsync"):
            worker.receives(1, ack(1))
        assert f"a link of 'policy' to somebody broke the protocol: {error}" in caplog.text

    assert (worker.driver.ended, worker.links[which].closed) == (error, 1)
    assert worker.links[which].takes() == [refusal(0, RefusalKind.FAILED, error)]
    assert worker.driver.links() == [worker.links[1 - which]]


def test_a_protocol_breach_of_the_only_link_is_raised_although_it_is_not_current() -> None:
    driver, link = ReceiverDriver("policy"), Scripted()
    driver.add_link(link)
    link.receives(ack(1))
    with pytest.raises(ProtocolError, match="a sender sent Ack"):
        driver.pump()


def test_the_protocol_error_carries_the_unreadable_bytes() -> None:
    worker = Worker()
    worker.link.raises["receive"] = ProtocolError("nonsense", b"bytes")
    error = raised_by(worker, 0)
    assert (str(error), error.unread) == ("nonsense", b"bytes")

    driver, link = ReceiverDriver("policy"), Scripted()
    driver.add_link(link)
    link.receives(update(1))
    with pytest.raises(ProtocolError) as caught:
        driver.pump()
    assert isinstance(caught.value.__cause__, StateError)
    assert caught.value.unread == b""


def test_an_update_with_a_layout_or_size_that_its_link_has_not_carried_is_a_breach() -> None:
    for wrong in (update(1, with_layout=False), replace(update(1), nbytes=7)):
        worker = Worker()
        error = (
            "version 1 names a layout or a size that this link has not carried. If two workers share a "
            "connection, each gets only some of the messages: give each its own."
        )
        assert str(raised_by(worker, 0, wrong)) == error
        assert worker.driver.ended == error


def test_a_sender_whose_process_cannot_be_watched_is_told_why_its_link_ends() -> None:
    driver, link = ReceiverDriver("policy"), Scripted()
    driver.add_link(link)
    link.raises["watch"] = TransportError("no descriptor")
    link.receives(hello(host=own_host(), pid=77, started=88))
    driver.pump()

    greeting, last = link.takes()
    assert isinstance(greeting, Hello)
    assert last == refusal(0, RefusalKind.FAILED, "no descriptor")


def test_an_accepted_handshake_is_kept_as_greeting_and_its_process_is_watched() -> None:
    worker, greeting = Worker(1), hello(EPOCH + 1, host=own_host(), pid=77, started=88)
    worker.receives(1, greeting)
    assert (worker.driver.greeting, worker.links[1].watched) == (greeting, [(77, 88)])


def test_a_message_that_cannot_be_handled_ends_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(1)
    monkeypatch.setattr(worker.driver, "_layout_of", lambda update: update.nothing)
    worker.receives(0, update(1))

    assert worker.driver.ended.startswith("a message from somebody could not be handled: AttributeError(")
    assert worker.link.takes() == [refusal(0, RefusalKind.FAILED, worker.driver.ended)]
    assert [link.closed for link in worker.links] == [1, 0]


# ---------------------------------------------------------------------------------------------- what is pending


#: Any object will do as a slot: the driver only passes it on.
SLOT: Any = object()


def test_a_new_driver_has_no_pending_update_no_greeting_and_no_current_link() -> None:
    driver = ReceiverDriver("policy")

    assert (driver.pending, driver.greeting, driver.deferring, driver.current_link()) == (None, None, False, None)
    assert (driver.ended, driver.ended_error) == ("", TransportError)


def test_a_pending_update_has_everything_that_arrived_with_it() -> None:
    worker, payload = Worker(), memoryview(bytearray(8))
    assert worker.driver.pending is None
    worker.link.receives(update(1), payload=payload, slot=SLOT, untaken="no memory")
    worker.driver.pump()

    pending = worker.driver.pending
    assert pending is not None
    assert (pending.update, pending.layout, pending.untaken) == (update(1), LAYOUT, "no memory")
    assert (pending.payload, pending.slot) == (payload, SLOT)
    worker.receives(0, update(1))
    assert worker.driver.pending is pending
    worker.receives(0, update(2))
    assert worker.driver.pending is not None
    assert (bytes(worker.driver.pending.payload), worker.driver.pending.untaken) == (b"", "")
    worker.receives(0, bye())
    assert worker.driver.pending is None


def test_only_the_last_layout_of_a_link_is_remembered() -> None:
    worker = Worker()
    worker.receives(0, update(1), update(2, with_layout=False), update(3, OTHER), update(4, OTHER, with_layout=False))
    assert worker.driver.pending is not None
    assert worker.driver.pending.layout == OTHER
    assert "has not carried" in str(raised_by(worker, 0, update(5, with_layout=False)))


# ------------------------------------------------------------------------------------------ waits and steps


def test_a_wait_does_not_block_if_the_waker_fired_since_the_caller_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, calls = Worker(), []
    since = worker.driver.waker.fired
    worker.driver.waker.fire()
    worker.driver.waker.clear()
    assert worker.driver.wait(None, since) == []

    monkeypatch.setattr(drivers.Waits, "wait", lambda _, links, *given: calls.append(given) or list(links))
    assert worker.driver.wait(3.0, 7) == [worker.link]
    assert calls == [(3.0, 7)]


def test_watchers_of_steps_get_the_state_and_data_before_the_step() -> None:
    worker, seen = Worker(), []
    worker.driver.watch_steps(lambda *step: seen.append(step))
    state, data = worker.driver.machine.state, worker.driver.data
    worker.receives(0, update(1))

    assert seen[0][:2] == (state, data)
    assert seen[-1][3].data is worker.driver.data
    assert worker.driver.pending is not None


# ---------------------------------------------------------------------------------------------------- devices


class Opening(Scripted, CarriesDevices):
    """A link that may be able to open slots of a device, as ``opens`` says."""

    opens = True
    reached = frozenset()
    calls = 0

    def copied_to_device(self) -> None:
        self.calls += 1


def test_links_added_earlier_or_later_learn_that_the_model_is_on_a_device() -> None:
    driver, links = ReceiverDriver("policy"), [Opening(), Opening()]
    driver.add_link(links[0])
    driver.devices = b""
    driver.add_link(Scripted())
    assert links[0].calls == 0
    driver.devices = b"x" * 16
    driver.add_link(links[1])
    assert [link.calls for link in links] == [1, 1]


@pytest.mark.parametrize(("kind", "opens"), [(Scripted, False), (Opening, False), (Opening, True)])
def test_a_hello_names_the_models_devices_only_if_the_link_can_open_their_slots(
    kind: type[Scripted], opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Opening, "opens", opens)
    driver, links = ReceiverDriver("policy"), [kind(), kind()]
    for devices, link in zip((b"", b"d" * 16), links, strict=True):
        driver.devices = devices or driver.devices
        driver.add_link(link)
        link.receives(hello(EPOCH + len(devices)))
        driver.pump()

    assert [link.takes()[0].devices for link in links] == [b"", b"d" * 16 if opens else b""]
    driver.close()


def test_a_host_payload_is_not_copied_and_a_device_payload_is_copied_to_its_layouts_size() -> None:
    class OnDevice:
        def read(self, view: memoryview) -> None:
            view[:] = bytes(range(view.nbytes))

    here = memoryview(b"x" * 99)
    assert Pending(update(1), LAYOUT, here).on_host() is here
    assert bytes(Pending(update(1), LAYOUT, OnDevice()).on_host()) == bytes(range(LAYOUT.nbytes))  # type: ignore[arg-type]
