"""What a sender's driver sends and accepts over its links, and what it keeps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace
from scripted import DIGEST, EPOCH, LAYOUT, OTHER, Fleet, Scripted, ack, both, hello, packed, plain, refusal, versions

from weightsync import ConfigurationError, ProtocolError, TransportError
from weightsync.engine.packer import Packed
from weightsync.engine.sender_driver import SenderDriver
from weightsync.options import Verify
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import Delivery, State
from weightsync.protocol.codec import slot_digest
from weightsync.protocol.messages import Bye, Ending, Update, WeightsForm
from weightsync.protocol.report import OutcomeKind
from weightsync.transports.base import SharesMemory
from weightsync.transports.buffers import INLINE_BELOW_NBYTES, Buffer, Storage
from weightsync.transports.process import own_host, own_identity


def bye(incarnation: int) -> Bye:
    return Bye(model_id="policy", incarnation=incarnation, reason="no more")


# ------------------------------------------------------------------------------------------------ what it sends


def test_a_senders_hello_names_its_process_and_its_latest_version_and_layout() -> None:
    driver, first, second = SenderDriver("policy"), Scripted(), Scripted()
    driver.join(4, first)
    driver.take(pure.Connect(EPOCH))
    pid, started = own_identity()
    expected = hello(host=own_host(), pid=pid, started=started)
    assert first.takes() == [replace(expected, link=1)]

    sent = packed()
    driver.dispatch(pure.SendAsync(None), sent)
    driver.layout = LAYOUT
    driver.join(5, second)
    layout = {"layout_digest": LAYOUT.digest, "layout": LAYOUT.encode()}
    greeting, update = second.takes()
    assert greeting == replace(expected, link=2, version=1, **layout)
    assert isinstance(update, Update)
    assert update.version == 1
    assert second.payloads == [None, sent.buffer]


def test_an_update_carries_all_packed_fields_and_its_layout_once_per_link() -> None:
    fleet = both()
    first, other = fleet.links
    sent = packed()
    sent.trace_context = "00-trace-span-01"
    fleet.sends(sent)
    message = Update(
        model_id="policy",
        incarnation=EPOCH,
        version=1,
        layout_digest=LAYOUT.digest,
        layout=LAYOUT.encode(),
        digest=DIGEST,
        nbytes=LAYOUT.nbytes,
        extras=b"extras",
        form=WeightsForm.NESTED,
        trace_context="00-trace-span-01",
    )
    assert first.said[-1] is other.said[-1]  # the same object, so that links may keep its encoded form
    assert first.takes() == other.takes() == [message]
    assert first.payloads[-1] is sent.buffer
    fleet.receives(0, ack(1))
    fleet.receives(1, ack(1))

    fleet.sends(targets=(0,))
    assert first.takes() == [replace(message, version=2, layout=b"", trace_context="")]
    assert other.takes() == []
    fleet.receives(0, ack(2))
    fleet.sends(packed(OTHER))
    (update,) = first.takes()
    assert isinstance(update, Update)
    assert (update.layout_digest, update.layout, update.nbytes) == (OTHER.digest, OTHER.encode(), OTHER.nbytes)


@pytest.mark.parametrize("delivery", [Delivery.REORDERED, Delivery.AT_LEAST_ONCE, Delivery.BEST_EFFORT])
def test_every_update_carries_its_layout_over_links_without_ordered_delivery(delivery: Delivery) -> None:
    fleet = Fleet(Scripted(delivery))
    for version in (1, 2):
        fleet.sends()
        fleet.receives(0, ack(version))

    assert [message.layout for message in fleet.links[0].said if isinstance(message, Update)] == [LAYOUT.encode()] * 2


def test_only_links_that_may_lose_answers_send_any_number_of_unanswered_updates() -> None:
    fleet = Fleet(Scripted(), Scripted(Delivery.BEST_EFFORT))
    fleet.gives_up(4)

    assert [versions(link) for link in fleet.links] == [[1, 2], [1, 2, 3, 4]]
    fleet.receives(0, ack(1))
    assert versions(fleet.links[0]) == [1, 2, 4]


def test_an_answer_to_an_earlier_sender_releases_no_waiting_update() -> None:
    fleet = plain()
    fleet.gives_up(3)
    fleet.receives(0, ack(1, incarnation=EPOCH - 1))

    assert versions(fleet.links[0]) == [1, 2]


@pytest.mark.parametrize("ending", list(Ending))
def test_a_senders_goodbye_says_how_it_ended(ending: Ending) -> None:
    fleet = both()
    if ending is Ending.FAILED:
        fleet.driver.fail("the bus is gone")
    else:
        fleet.driver.close()

    reason = "the bus is gone" if ending is Ending.FAILED else "the sender closed this link"
    bye = Bye(model_id="policy", incarnation=EPOCH, reason=reason, ending=ending)
    assert [(link.said, link.closed) for link in fleet.links] == [([bye], 1), ([bye], 1)]
    assert (fleet.driver.links(), fleet.driver.machine.state) == ([], State.CLOSED)
    assert fleet.driver.waker.enter() is None


def test_a_link_that_fails_to_send_the_goodbye_is_still_closed() -> None:
    fleet = both()
    fleet.links[0].raises["send"] = ZeroDivisionError()
    fleet.driver.close()

    assert [(len(link.said), link.closed) for link in fleet.links] == [(0, 1), (1, 1)]


# ------------------------------------------------------------------------------- which messages it accepts


def test_an_ack_with_another_digest_than_was_sent_ends_its_link() -> None:
    fleet = plain()
    fleet.sends()
    fleet.receives(0, ack(1, b"\2" * 16))

    text = f"an ack of version 1 names digest {'02' * 16}, which is not that of what was sent ({'01' * 16})."
    assert (fleet.link_state(), fleet.reason().startswith(text)) == (pure.LinkState.LOST, True)
    assert fleet.driver.concluded[1].outstanding.outcomes[0].kind is OutcomeKind.LOST
    assert fleet.links[0].closed == 1


@pytest.mark.parametrize("sent", [b"", DIGEST], ids=["unverified", "of another sender"])
def test_the_digest_of_an_ack_is_compared_only_if_this_sender_sent_one(sent: bytes) -> None:
    fleet = plain()
    fleet.sends(packed(digest=sent))
    fleet.receives(0, ack(1, b"\2" * 16, EPOCH if not sent else EPOCH - 1))

    assert fleet.link_state() is not pure.LinkState.LOST


@pytest.mark.parametrize("verify", [Verify.DIGEST, Verify.AUTO])
def test_an_ack_over_a_link_that_was_sent_nothing_must_name_the_same_digest(verify: Verify) -> None:
    fleet, sent = both(), packed()
    sent.verify = verify
    fleet.sends(sent, targets=(0,))
    fleet.receives(1, ack(1, b"\2" * 16))

    assert fleet.reason(1).startswith(f"an ack of version 1 names digest {'02' * 16}, which is not that of what was ")
    assert fleet.link_state(0) is pure.LinkState.EXPECTED


class Sharing(Scripted, SharesMemory):
    """A link whose worker maps the memory of payloads."""

    def shares(self, payload: Buffer, nbytes: int) -> bool:
        return (payload.segment is not None, nbytes) == (True, LAYOUT.nbytes)


def in_a_segment(verify: Verify) -> Packed:
    buffer = Buffer(INLINE_BELOW_NBYTES, Storage.SEGMENTS)
    return Packed(LAYOUT, buffer, b"extras", b"", WeightsForm.NESTED, verify)


def test_workers_that_map_a_version_ack_its_seal_and_the_others_its_digest() -> None:
    fleet, sent = Fleet(Sharing(), Sharing(), Scripted()), in_a_segment(Verify.AUTO)
    assert not fleet.driver.all_share(sent.buffer, LAYOUT.nbytes)
    assert Fleet(Sharing()).driver.all_share(sent.buffer, LAYOUT.nbytes)
    fleet.sends(sent)
    seal = slot_digest(sent.buffer.sealed(), EPOCH, 1, LAYOUT.digest, b"extras")
    last = [link.said[-1] for link in fleet.links]
    assert [each.digest for each in last] == [b"", b"", sent.digested()]  # type: ignore[union-attr]
    assert last[0] is last[1]

    for worker, named in enumerate((seal, seal, sent.digested())):
        fleet.receives(worker, ack(1, named))
    outcomes = fleet.driver.concluded[1].outstanding.outcomes
    assert [outcomes[worker].kind for worker in range(3)] == [OutcomeKind.APPLIED] * 3


class Exhausted(Sharing):
    """A link that must copy weights on a device to the host, and finds no memory left there."""

    def shares(self, payload: Buffer, nbytes: int) -> bool:
        raise self.raises["shares"]


@pytest.mark.parametrize(
    ("error", "reason"), [(TransportError("no room"), "no room"), (MemoryError(), "MemoryError()")]
)
def test_g10_a_link_that_cannot_make_its_update_is_lost_and_the_other_workers_get_theirs(
    error: Exception, reason: str
) -> None:
    """Regression: the send could neither be waited for nor abandoned, and each further send was refused."""
    fleet = Fleet(Exhausted(), Scripted())
    fleet.links[0].raises["shares"] = error
    fleet.sends(in_a_segment(Verify.AUTO))

    assert (fleet.link_state(0), fleet.reason(0)) == (pure.LinkState.LOST, reason)
    assert versions(fleet.links[1]) == [1]
    assert fleet.driver.data.outstanding is not None
    assert fleet.driver.data.outstanding.owed == {1: 2}


@pytest.mark.parametrize("named", ["seal", "digest", "neither"])
def test_a_worker_with_a_new_link_may_ack_what_it_was_sent_over_either_link(named: str) -> None:
    """The worker serves the version already: its first link shared the memory, the new one carries the bytes."""
    fleet, again, sent = Fleet(Sharing()), Scripted(), in_a_segment(Verify.AUTO)
    fleet.sends(sent)
    names = {
        "seal": slot_digest(sent.buffer.sealed(), EPOCH, 1, LAYOUT.digest, b"extras"),
        "digest": sent.digested(),
        "neither": b"\2" * 16,
    }
    fleet.receives(0, ack(1, names["seal"]))
    fleet.driver.join(0, again)
    again.receives(ack(1, names[named]))
    fleet.driver.pump()

    assert [told.digest for told in again.said if isinstance(told, Update)] == [names["digest"]]
    assert (fleet.link_state() is pure.LinkState.LOST) is (named == "neither")
    if named == "neither":
        assert all(names[each].hex() in fleet.reason() for each in names)


@pytest.mark.parametrize("verify", [Verify.AUTO, Verify.LAYOUT])
def test_an_answer_that_names_another_seal_ends_its_link(verify: Verify) -> None:
    fleet = Fleet(Sharing())
    fleet.sends(in_a_segment(verify))
    fleet.receives(0, ack(1, b"\2" * 16))

    assert fleet.link_state() is pure.LinkState.LOST


@pytest.mark.parametrize("last", [bye, refusal], ids=["a goodbye", "a refusal"])
def test_a_last_message_without_incarnation_loses_the_worker_only_before_the_handshake(last: Any) -> None:
    fleet = both()
    fleet.receives(1, hello())
    for worker in (0, 1):
        fleet.receives(worker, replace(last(0), incarnation=0))

    assert (fleet.link_state(0), fleet.link_state(1)) == (pure.LinkState.LOST, pure.LinkState.UP)
    assert fleet.reason(0).startswith("it ended before it answered the handshake: no")
    assert fleet.driver.data.stale == 2


def test_handshakes_carry_only_a_layout_that_a_worker_has_acked() -> None:
    fleet = both()
    fleet.sends()
    assert fleet.driver.layout is None
    fleet.receives(0, refusal(1))
    assert fleet.driver.layout is None
    fleet.receives(0, ack(1))  # stale: worker 0 owes no answer any more
    assert fleet.driver.layout is None
    fleet.receives(1, ack(1))
    assert fleet.driver.layout is LAYOUT


def test_handshakes_carry_no_layout_of_a_former_model() -> None:
    fleet = both()
    fleet.sends()
    fleet.driver.last_of_former_model = 1
    fleet.receives(0, ack(1))
    fleet.receives(1, ack(1))
    assert fleet.driver.layout is None

    fleet.sends()
    fleet.receives(0, ack(2))
    assert fleet.driver.layout is LAYOUT


def test_a_worker_that_sends_an_update_loses_only_its_own_link() -> None:
    fleet = both()
    fleet.receives(1, Update(model_id="policy", incarnation=EPOCH, version=1, layout_digest=b""))

    sent = "worker 1 sent an Update; only senders send them. Its link is taken down. At its other end is a sender"
    assert fleet.reason(1).startswith(sent)
    assert (fleet.link_state(0), fleet.link_state(1)) == (pure.LinkState.EXPECTED, pure.LinkState.LOST)
    assert fleet.driver.by_worker() == {0: fleet.links[0]}


def test_a_handshake_brings_its_worker_up_and_its_process_is_watched() -> None:
    fleet = plain()
    fleet.receives(0, hello(host=own_host(), pid=77, started=88))

    assert (fleet.link_state(), fleet.links[0].watched) == (pure.LinkState.UP, [(77, 88)])


def test_a_goodbye_removes_its_worker_and_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    fleet = both()
    bye = Bye(model_id="policy", incarnation=EPOCH - 1, reason="enough")
    fleet.receives(1, bye)
    assert (list(fleet.driver.data.workers), caplog.messages) == ([0, 1], [])
    with caplog.at_level(logging.WARNING, "weightsync"):
        fleet.receives(1, replace(bye, incarnation=EPOCH))

    assert (list(fleet.driver.data.workers), fleet.links[1].closed) == ([0], 1)
    assert "'policy': worker 1 said goodbye and left: enough" in caplog.text


def test_messages_after_the_end_of_a_link_are_ignored() -> None:
    fleet = both()
    fleet.sends()
    fleet.receives(0, Bye(model_id="policy", incarnation=EPOCH), ack(1))
    assert 0 not in fleet.driver.data.workers
    assert fleet.driver.data.late == fleet.driver.data.stale == 0

    fleet.receives(1, refusal(0), ack(1))
    assert (fleet.link_state(1), fleet.driver.data.stale) == (pure.LinkState.REFUSED, 0)


def test_a_link_that_cannot_be_written_is_read_before_it_is_lost() -> None:
    fleet = both()
    fleet.sends()
    fleet.links[0].receives(ack(1))
    fleet.links[0].raises["flush"] = TransportError("cut")
    fleet.links[1].raises["flush"] = KeyError("odd")
    fleet.driver.pump()

    outcomes = fleet.driver.concluded[1].outstanding.outcomes
    assert (outcomes[0].kind, outcomes[1].kind) == (OutcomeKind.APPLIED, OutcomeKind.LOST)
    assert (fleet.reason(0), fleet.link_state(0)) == ("cut", pure.LinkState.LOST)
    assert "KeyError('odd')" in fleet.reason(1)


@pytest.mark.parametrize(("error", "reason"), [(TransportError("cut"), "cut"), (MemoryError(), "MemoryError()")])
def test_a_link_that_fails_to_send_an_update_is_lost_and_the_other_workers_get_theirs(
    error: Exception, reason: str
) -> None:
    fleet = both()
    fleet.links[0].raises["send"] = error
    fleet.sends()

    assert (fleet.link_state(0), fleet.reason(0)) == (pure.LinkState.LOST, reason)
    assert versions(fleet.links[1]) == [1]
    assert fleet.driver.data.outstanding is not None
    assert fleet.driver.data.outstanding.owed == {1: 2}


def test_a_link_that_fails_to_send_the_waiting_update_is_lost() -> None:
    fleet = plain()
    fleet.gives_up(3)
    fleet.links[0].raises["send"] = TransportError("cut")
    fleet.receives(0, ack(1))

    assert (fleet.link_state(), fleet.reason(), versions(fleet.links[0])) == (pure.LinkState.LOST, "cut", [1, 2])


@pytest.mark.parametrize(("sent", "taken"), [(0, 0), (1, 0), (1, 1)])
def test_a_joiners_link_that_fails_to_send_its_hello_or_update_is_lost(sent: int, taken: int) -> None:
    fleet, late = plain(), Scripted()
    fleet.gives_up(sent)
    late.takes_at_most, late.raises["send"] = taken, TransportError("cut")
    fleet.driver.join(1, late)

    assert (fleet.link_state(1), fleet.reason(1), len(late.said), late.closed) == (pure.LinkState.LOST, "cut", taken, 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransportError("cut"), "cut"),
        (ProtocolError("nonsense"), "nonsense"),
        (KeyError("odd"), "the adapter of the link to somebody failed: KeyError('odd')"),
    ],
)
def test_a_link_that_cannot_be_read_is_lost_with_the_reason(error: Exception, reason: str) -> None:
    fleet = both()
    fleet.links[1].raises["receive"] = error
    fleet.driver.pump()

    assert (fleet.link_state(1), fleet.reason(1)) == (pure.LinkState.LOST, reason)
    assert fleet.link_state(0) is pure.LinkState.EXPECTED


def test_a_message_that_cannot_be_handled_ends_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = both()
    verify = fleet.driver._verify
    monkeypatch.setattr(
        fleet.driver, "_verify", lambda link, message: verify(link, message) if message.version > 1 else 1 / 0
    )
    fleet.receives(0, ack(1))
    step = fleet.driver._pure_step

    def steps(state: Any, data: Any, event: Any) -> Any:
        if isinstance(event, pure.Answer):
            raise ZeroDivisionError("again")
        return step(state, data, event)

    monkeypatch.setattr(fleet.driver, "_pure_step", steps)
    fleet.receives(1, hello())

    handled = "a message from somebody could not be handled: ZeroDivisionError("
    assert fleet.reason(0) == f"{handled}'division by zero')"
    assert fleet.reason(1) == f"{handled}'again')"
    assert [link.closed for link in fleet.links] == [1, 1]


def test_a_link_that_cannot_be_waited_for_is_lost_and_no_other() -> None:
    fleet = both()
    fleet.driver._lose_link(fleet.links[1], "stuck")

    assert (fleet.link_state(0), fleet.link_state(1)) == (pure.LinkState.EXPECTED, pure.LinkState.LOST)
    assert fleet.reason(1) == "stuck"


# ------------------------------------------------------------------------------------------------ what it keeps


def test_a_version_is_kept_while_it_is_the_latest_sent_to_any_worker() -> None:
    fleet = both()
    first = fleet.sends(targets=(0,))
    assert fleet.driver.packed(1) is first
    assert first.buffer.pinned
    fleet.receives(0, ack(1))
    second = fleet.sends(targets=(1,))
    fleet.receives(1, ack(2))
    assert [fleet.driver.packed(version) for version in (1, 2)] == [first, second]

    third = fleet.sends()
    assert [fleet.driver.packed(version) for version in (1, 2, 3)] == [None, None, third]
    assert [each.buffer.pinned for each in (first, second, third)] == [False, False, True]
    assert fleet.driver._last_sent is not None
    assert fleet.driver._last_sent.update.version == 3
    assert set(fleet.driver._named) == {3}
    fleet.driver.close()
    assert fleet.driver._last_sent is None
    assert fleet.driver.packed(3) is None
    assert not third.buffer.pinned


def test_a_version_whose_only_target_is_removed_is_released_when_it_is_concluded() -> None:
    fleet = both()
    sent = fleet.sends(targets=(0,))
    fleet.driver.remove(0, "not needed")

    assert fleet.driver.concluded[1].outstanding.outcomes[0].kind is OutcomeKind.LOST
    assert (fleet.driver.packed(1), sent.buffer.pinned) == (None, False)


def test_an_async_version_whose_only_target_is_removed_is_kept_until_it_is_waited_for() -> None:
    fleet, sent = both(), packed()
    fleet.driver.dispatch(pure.SendAsync((0,)), sent)
    fleet.driver.remove(0, "not needed")
    assert fleet.driver.packed(1) is sent
    fleet.driver.take(pure.Wait())
    assert fleet.driver.packed(1) is None


def test_a_send_that_is_refused_keeps_nothing_and_uses_no_version() -> None:
    fleet, sent = plain(), packed()
    with pytest.raises(ConfigurationError):
        fleet.driver.dispatch(pure.SendAsync((7,)), sent)
    assert (fleet.driver.data.version, fleet.driver.packed(1), sent.buffer.pinned) == (0, None, False)
    assert fleet.driver.dispatch(pure.SendAsync(None), sent) == 1


def test_a_send_that_is_interrupted_after_its_step_keeps_its_version() -> None:
    fleet, sent = plain(), packed()
    fleet.links[0].raises["send"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        fleet.sends(sent)

    assert (fleet.driver.data.version, fleet.driver.packed(1), sent.buffer.pinned) == (1, sent, True)


def test_a_concluded_update_wakes_waiting_threads() -> None:
    fleet = plain()
    fleet.sends()
    before = fleet.driver.waker.fired
    fleet.receives(0, ack(1))

    assert fleet.driver.waker.fired == before + 1
    assert list(fleet.driver.concluded) == [1]


def test_links_are_not_read_before_connect_or_after_close() -> None:
    driver, link = SenderDriver("policy"), Scripted()
    driver.join(0, link)
    link.receives(hello())
    driver.pump()
    assert (link.flushed, len(link.heard)) == (0, 1)
    driver.take(pure.Connect(EPOCH))
    driver.close()
    driver.pump()
    assert (link.flushed, link.closed) == (0, 1)
