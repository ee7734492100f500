"""Payloads in parts: only written bytes are named, the hashed bytes are applied, and parts alone change nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from fleet import PATIENCE, Pair, constants, filled
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightsync import LayoutError, MultiProcessWeightSyncScheme, NonFiniteError, SharedMemWeightSyncScheme, Verify
from weightsync.engine import applier, parts
from weightsync.engine.driver import Lane
from weightsync.engine.parts import IncomingParts, OutgoingParts, whole_part
from weightsync.errors import ProtocolError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Part, SlotRef, Update
from weightsync.protocol.report import OutcomeKind
from weightsync.transports.base import Received, TakesParts
from weightsync.transports.buffers import Buffer
from weightsync.transports.pipe.link import PipeLink
from weightsync.weights import division, packing
from weightsync.weights.tree_digest import CHUNK, digest

ID, OTHER = b"1" * 16, b"2" * 16


def model(fill: float = 0.0) -> nn.Module:
    """A model of 5 MiB in two tensors: ten chunks."""
    return filled(nn.Sequential(nn.Linear(1024, 640, bias=False), nn.Linear(640, 1024, bias=False)), fill)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send payloads of two chunks or more in parts, each of one chunk or more."""
    for name, nbytes in (("LEAST_PART", CHUNK), ("LEAST_NBYTES", 2 * CHUNK), ("LEAST_IF_BUSY", 2 * CHUNK)):
        monkeypatch.setattr(parts, name, nbytes)


class RecordingLink(TakesParts):
    """A link that records the parts that it is given, and fails after ``lasts`` of them."""

    def __init__(self, lasts: int = 1000) -> None:
        self.sent: list[Part] = []
        self._lasts = lasts

    def takes_parts(self, payload: Buffer, nbytes: int, hashed: bool) -> bool:
        return True

    def send_part(self, part: Part, payload: Buffer) -> None:
        if len(self.sent) == self._lasts:
            raise TransportError("It is gone.")
        self.sent.append(part)


def outgoing(nbytes: int, *links: RecordingLink) -> OutgoingParts:
    chosen: dict[TakesParts, bool] = dict.fromkeys(links, True)
    return OutgoingParts(threading.RLock(), chosen, Buffer(1), whole_part(ID, nbytes, "policy", 5))


# --------------------------------------------------------------------------------------------- what is sent


@given(st.integers(1, 60), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_byte_is_sent_exactly_once_and_only_after_it_is_written(
    chunks: int, threads: int, order: random.Random
) -> None:
    nbytes, link = chunks * CHUNK - 1, RecordingLink()
    sending = outgoing(nbytes, link)
    cuts = [0, *sorted(order.sample(range(1, chunks), min(threads, chunks) - 1)), chunks]
    ranges = [iter(range(*share)) for share in pairwise(cuts)]
    written: set[int] = set()
    while ranges:
        share = order.choice(ranges)
        index = next(share, None)
        if index is None:
            ranges.remove(share)
            continue
        written.add(index)
        sending.reach(index * CHUNK, min(nbytes, (index + 1) * CHUNK))
        assert all(set(range(part.start // CHUNK, -(-part.end // CHUNK))) <= written for part in link.sent)
    assert all(part.end - part.start >= parts.LEAST_PART for part in link.sent)

    sending.finish()

    assert sorted((part.start, part.end) for part in link.sent)[0][0] == 0
    assert sum(part.end - part.start for part in link.sent) == nbytes
    covered = sorted((part.start, part.end) for part in link.sent)
    assert all(end == start for (_, end), (start, _) in pairwise(covered))
    assert {(part.payload_id, part.nbytes, part.incarnation, part.hashed) for part in link.sent} == {
        (ID, nbytes, 5, True)
    }


def test_a_large_payload_is_sent_in_at_most_32_parts() -> None:
    link = RecordingLink()
    sending = outgoing(640 * parts.LEAST_PART, link)

    for start in range(0, 640 * parts.LEAST_PART, CHUNK):
        sending.reach(start, start + CHUNK)
    sending.finish()

    assert len(link.sent) == parts.MOST_PARTS


def test_parts_end_at_chunk_boundaries_although_writes_do_not() -> None:
    link, nbytes = RecordingLink(), 3 * parts.LEAST_PART + 100
    sending = outgoing(nbytes, link)
    written = 0
    while written < nbytes:
        sending.reach(written, min(written + CHUNK - 7, nbytes))
        written += CHUNK - 7
    sending.finish()

    assert [part.start for part in link.sent] == [0, *(part.end for part in link.sent[:-1])]
    assert all(part.end % CHUNK == 0 for part in link.sent[:-1])
    assert link.sent[-1].end == nbytes


def test_a_failed_link_gets_no_more_parts_and_the_other_links_get_all() -> None:
    fails, lasts = RecordingLink(lasts=1), RecordingLink()
    sending = outgoing(3 * parts.LEAST_PART, fails, lasts)

    for start in range(3):
        sending.reach(start * parts.LEAST_PART, (start + 1) * parts.LEAST_PART)
    sending.finish()

    assert (len(fails.sent), len(lasts.sent)) == (1, 3)


def test_small_payloads_and_medium_payloads_on_busy_machines_are_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})

    assert not parts.worth_parts(parts.LEAST_NBYTES - 1)
    assert [parts.worth_parts(parts.LEAST_NBYTES, links) for links in (0, 1, 2, 3)] == [True, True, False, False]
    assert parts.worth_parts(parts.LEAST_IF_BUSY, 3)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert parts.worth_parts(parts.LEAST_NBYTES)


class ProbedLink(RecordingLink):
    """A link that takes parts or not, and records for which payloads it is asked."""

    def __init__(self, takes: bool) -> None:
        super().__init__()
        self.asked: list[tuple[int, bool]] = []
        self._takes = takes

    def takes_parts(self, payload: Buffer, nbytes: int, hashed: bool) -> bool:
        self.asked.append((nbytes, hashed))
        return self._takes


@pytest.mark.parametrize(("verify", "hashed"), [(Verify.AUTO, [False, True]), (Verify.DIGEST, [True, True])])
def test_parts_go_to_accepting_links_that_owe_no_answer_hashed_if_a_digest_is_compared(
    verify: Verify, hashed: list[bool]
) -> None:
    def lane(link: RecordingLink | None, shares: bool = True, owes: bool = False) -> Any:
        return SimpleNamespace(parts=link, backlog=SimpleNamespace(empty=not owes), shares=lambda *_: shares)

    nbytes, payload = parts.LEAST_IF_BUSY, Buffer(1)
    mapped, sent, declines, owes = ProbedLink(True), ProbedLink(True), ProbedLink(False), ProbedLink(True)
    lanes = [lane(mapped), lane(sent, shares=False), lane(declines), lane(owes, owes=True), lane(None)]

    def to(chosen: list[Any], size: int = nbytes) -> OutgoingParts | None:
        return parts.outgoing_parts(threading.RLock(), chosen, payload, verify, whole_part(ID, size, "policy", 5))

    sending = to(lanes)
    assert sending is not None
    sending.finish()

    assert mapped.asked + sent.asked == [(nbytes, each) for each in hashed]
    assert [len(link.sent) for link in (mapped, sent, declines, owes)] == [1, 1, 0, 0]
    assert [link.sent[0].hashed for link in (mapped, sent)] == hashed
    assert to(lanes[2:]) is None
    assert to(lanes, size=parts.LEAST_NBYTES - 1) is None


def test_a_link_that_cannot_carry_parts_is_given_no_parts() -> None:
    plain: Any = SimpleNamespace(delivery=Delivery.ORDERED)
    able: Any = ProbedLink(True)
    able.delivery = Delivery.ORDERED

    assert [Lane(0, link, None).parts for link in (plain, able)] == [None, able]


def test_a_payload_that_lies_in_no_segment_is_sent_whole(make: Callable[..., SlotPair]) -> None:
    driver = make().sender._driver

    assert driver.in_parts(Buffer(4), parts.LEAST_IF_BUSY, Verify.DIGEST, None) is None


def test_a_payload_for_as_many_workers_as_cores_is_sent_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    links = [ProbedLink(True), ProbedLink(True)]
    lanes: list[Any] = [
        SimpleNamespace(parts=link, backlog=SimpleNamespace(empty=True), shares=lambda *_: True) for link in links
    ]
    whole = whole_part(ID, parts.LEAST_NBYTES, "policy", 5)

    found = [parts.outgoing_parts(threading.RLock(), lanes[:n], Buffer(1), Verify.DIGEST, whole) for n in (1, 2)]

    assert [each is not None for each in found] == [True, False]


# ------------------------------------------------------------------------------------------- what is hashed


def part(start: int, end: int, nbytes: int, payload_id: bytes = ID, hashed: bool = True) -> Part:
    ends: Any = {"start": start, "end": end, "nbytes": nbytes}
    return Part(model_id="policy", incarnation=5, payload_id=payload_id, hashed=hashed, **ends)


def update(**where: Any) -> Update:
    return Update(model_id="policy", incarnation=5, version=1, layout_digest=b"", **where)


def test_hashes_of_parts_combine_to_the_digest_of_the_whole_payload() -> None:
    payload = memoryview(bytearray(random.Random(1).randbytes(3 * CHUNK + 5)))
    incoming = IncomingParts()

    for start, end in ((CHUNK, 2 * CHUNK), (0, CHUNK), (2 * CHUNK, len(payload))):
        incoming.arrived(part(start, end, len(payload)), Received(part(start, end, len(payload)), payload))
    hashes = incoming.hashes_of(update(nbytes=len(payload), payload_id=ID))

    assert hashes is not None
    assert hashes.combined(b"e") == digest(payload, b"e")
    assert incoming.hashes_of(update(nbytes=len(payload), payload_id=ID)) is None  # the hashes were handed out already


def test_an_update_uses_only_the_hashes_of_the_payload_that_it_names() -> None:
    old, new = memoryview(bytearray(b"o" * 2 * CHUNK)), memoryview(bytearray(b"n" * 2 * CHUNK))
    incoming = IncomingParts()

    incoming.arrived(part(0, CHUNK, len(old)), Received(part(0, CHUNK, len(old)), old))
    assert incoming.hashes_of(update(nbytes=len(new))) is None
    incoming.arrived(part(0, CHUNK, len(old)), Received(part(0, CHUNK, len(old)), old))
    assert incoming.hashes_of(update(nbytes=len(new), slot=SlotRef(segment=1, seal=OTHER))) is None
    for whole, payload_id in ((old, ID), (new, OTHER)):
        incoming.arrived(part(0, CHUNK, len(new), payload_id), Received(part(0, CHUNK, len(new), payload_id), whole))
    hashes = incoming.hashes_of(update(nbytes=len(new), slot=SlotRef(segment=1, seal=OTHER)))

    assert hashes is not None
    assert hashes.combined(b"") == digest(new, b"")


def test_a_part_with_another_payload_size_raises_protocol_error() -> None:
    payload = memoryview(bytearray(2 * CHUNK))
    incoming = IncomingParts()
    incoming.arrived(part(0, CHUNK, 2 * CHUNK), Received(part(0, CHUNK, 2 * CHUNK), payload))

    with pytest.raises(ProtocolError, match=f"of a payload of {3 * CHUNK} bytes came for one of {2 * CHUNK}"):
        incoming.arrived(part(CHUNK, 3 * CHUNK, 3 * CHUNK), Received(part(CHUNK, 3 * CHUNK, 3 * CHUNK), payload))


@pytest.mark.parametrize("whole", [None, memoryview(bytearray(CHUNK))])
def test_parts_without_a_digest_or_without_memory_are_not_hashed(whole: memoryview | None) -> None:
    incoming = IncomingParts()

    incoming.arrived(part(0, CHUNK, CHUNK, hashed=whole is None), Received(part(0, CHUNK, CHUNK), whole))

    assert incoming.hashes_of(update(nbytes=CHUNK, payload_id=ID)) is None


# ------------------------------------------------------------------------------------- whole sends over slots


class SlotPair(Pair):
    """A pair whose two slots have been passed to the workers already. It records the parts that each link is given.

    One thread drives both ends, so a worker hashes only when it is asked to receive: the parts packed by then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scheme: Any, workers: int = 1, **options: Any) -> None:
        super().__init__(lambda: scheme(verify="digest", **options), workers, model)
        self.given: list[tuple[str, Part]] = []
        real = PipeLink.send_part

        def send_part(link: PipeLink, part: Part, payload: Buffer) -> None:
            self.given.append((link.peer, part))
            real(link, part, payload)

        monkeypatch.setattr(PipeLink, "send_part", send_part)
        for _ in range(2):  # each slot is passed with the first version in it
            assert self.sync().ok
        assert self.given == []


@pytest.fixture(params=[SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme], ids=["shared", "pipe"])
def make(
    request: pytest.FixtureRequest, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., SlotPair]]:
    """A function that makes pairs over slots, which the worker maps or copies out."""
    made: list[SlotPair] = []

    def one(workers: int = 1, **options: Any) -> SlotPair:
        made.append(SlotPair(monkeypatch, request.param, workers, **options))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_g2_bytes_hashed_in_parts_are_the_bytes_acked_and_served(
    make: Callable[..., SlotPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make()
    monkeypatch.setattr(applier, "digest", None)  # nothing may be hashed once the update has arrived

    for value in (2.0, 3.0, 4.0):
        slots.given.clear()
        filled(slots.source, value)
        report = slots.sync()
        assert report.ok
        assert len(slots.given) == 10
        assert constants(slots.model) == {value}
        assert slots.sender.digest() == slots.receiver.digest()


def test_several_threads_pack_and_name_their_parts(
    make: Callable[..., SlotPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make()
    monkeypatch.setattr(division, "_parts", lambda *_: ((0, 3 * CHUNK), (3 * CHUNK, 10 * CHUNK)))
    monkeypatch.setattr(division, "threads_for", lambda _: 2)
    monkeypatch.setattr(parts, "LEAST_PART", 2 * CHUNK)
    slots.source[0] = nn.Linear(1024, 640, bias=False)  # so that the send plan is made anew

    filled(slots.source, 5.0)
    assert slots.sync().ok

    named = sorted((part.start // CHUNK, part.end // CHUNK) for _, part in slots.given)
    assert len(named) >= 4
    assert [start for start, _ in named] == [0, *(end for _, end in named[:-1])]
    assert constants(slots.model) == {5.0}


def test_only_targets_that_owe_no_answer_get_parts(make: Callable[..., SlotPair]) -> None:
    slots = make(workers=3)

    slots.sync(worker_ids=[0, 2])
    assert {peer for peer, _ in slots.given} == {"worker 0", "worker 2"}
    slots.given.clear()
    slots.sender.send_async(worker_ids=[0])
    slots.given.clear()
    slots.sender.send_async(on_pending="supersede")  # worker 0 owes an answer
    assert {peer for peer, _ in slots.given} <= {"worker 1", "worker 2"}
    for receiver in slots.receivers:
        while receiver.receive(timeout=0.0):
            pass
    assert slots.sender.wait_async().ok


def test_g6_a_payload_that_cannot_be_packed_changes_nothing_and_the_next_one_is_served(
    make: Callable[..., SlotPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make()
    real = packing.Pieces.fill

    def half(self: packing.Pieces, tensors: Any, base: int, hashes: Any, on_written: Any) -> None:
        real(self, tensors, base, hashes, lambda start, end: on_written(start, end) if start == 0 else None)
        raise LayoutError("A tensor cannot be copied.", mismatched={})

    filled(slots.source, 7.0)
    with monkeypatch.context() as patch:
        patch.setattr(packing.Pieces, "fill", half)
        with pytest.raises(LayoutError, match="cannot be copied"):
            slots.sender.send()
    assert len(slots.given) == 1
    assert not slots.receiver.receive(timeout=0.0)
    assert constants(slots.model) == {1.0}

    filled(slots.source, 8.0)
    assert slots.sync().ok
    assert constants(slots.model) == {8.0}


def test_nonfinite_weights_refused_after_being_sent_in_parts_are_never_served(make: Callable[..., SlotPair]) -> None:
    slots = make()
    slots.sender._packer._finite_model_id = "policy"  # as a worker group sets it for check_finite=True

    filled(slots.source, float("nan"))
    with pytest.raises(NonFiniteError):
        slots.sender.send()
    assert len(slots.given) == 10
    assert not slots.receiver.receive(timeout=0.0)
    filled(slots.source, 2.0)
    assert slots.sync().ok
    assert constants(slots.model) == {2.0}


def test_a_payload_damaged_in_transit_is_refused(
    make: Callable[..., SlotPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make()
    real = OutgoingParts._send

    def damaged(self: OutgoingParts, start: int, end: int) -> None:
        self._payload.view[start : start + 1] = bytes([self._payload.view[start] ^ 1])
        real(self, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(OutgoingParts, "_send", damaged)
        slots.sender.send_async()
    assert not slots.receiver.receive(timeout=0.0)
    report = slots.sender.wait_async(on_failure="report")

    assert report[0].kind is OutcomeKind.REFUSED
    assert "damaged on the way" in report[0].reason
    assert slots.sync().ok


def test_versions_sent_in_parts_are_served_after_the_worker_overwrote_its_weights(
    make: Callable[..., SlotPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are hashed as the trainer wrote them, not as the worker has left the slot: so they are hashed once."""
    slots = make()
    monkeypatch.setattr(applier, "digest", None)  # nothing may be hashed once the update has arrived

    for value in range(2, 8):
        filled(slots.source, float(value))
        slots.given.clear()
        assert slots.sync().ok
        assert len(slots.given) == 10
        assert constants(slots.model) == {float(value)}
        filled(slots.model, -1.0)


def test_parts_overwritten_by_the_worker_before_the_update_are_hashed_again(
    make: Callable[..., SlotPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, real = make(), OutgoingParts._send
    kept = [parameter.detach() for parameter in slots.model.parameters()]
    filled(slots.source, 2.0)
    assert slots.sync().ok

    def amid(self: OutgoingParts, start: int, end: int) -> None:
        real(self, start, end)
        if start in (0, 5 * CHUNK):
            slots.receiver.receive(timeout=0.0)
            for tensor in kept:
                tensor.add_(1.0)

    monkeypatch.setattr(OutgoingParts, "_send", amid)
    filled(slots.source, 3.0)
    report = slots.sync()

    assert len(slots.given) == 20
    assert report.ok
    assert constants(slots.model) == {3.0}


@pytest.mark.parametrize("end", ["the trainer closes", "the worker closes"])
def test_hashes_of_parts_are_dropped_when_their_link_ends(make: Callable[..., SlotPair], end: str) -> None:
    slots = make()
    slots.sender._packer._finite_model_id = "policy"
    filled(slots.source, float("nan"))
    with pytest.raises(NonFiniteError):
        slots.sender.send()
    assert not slots.receiver.receive(timeout=0.0)
    incoming = slots.receiver._driver._parts
    assert incoming.hashes is not None

    if end == "the trainer closes":
        slots.scheme.close()
        with pytest.raises(ConnectionError):
            slots.receiver.receive(timeout=PATIENCE)
    else:
        slots.receiver.close()

    assert incoming.hashes is None


def test_a_worker_that_does_not_read_gets_no_parts(
    make: Callable[..., SlotPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make()
    (link,) = slots.sender.transports().values()
    with monkeypatch.context() as patch:
        patch.setattr(link, "outlet", SimpleNamespace(idle=False))
        slots.sender.send_async()
    assert slots.given == []
    assert slots.receiver.receive(timeout=PATIENCE)
    assert slots.sender.wait_async(timeout=PATIENCE).ok


@pytest.mark.parametrize("verify", [Verify.AUTO, Verify.LAYOUT])
def test_no_parts_are_sent_for_slots_whose_digest_is_not_compared(
    verify: Verify, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PipeLink, "send_part", None)
    pair = Pair(lambda: SharedMemWeightSyncScheme(verify=verify), model=model)
    with closing(pair):
        for _ in range(4):
            assert pair.sync().ok
