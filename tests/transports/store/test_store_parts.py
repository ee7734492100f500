"""Payloads in parts over torch.distributed: whole when their update arrives, and unused before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import store_fleet
from fleet import PATIENCE, constants, filled
from store_fleet import StorePair
from torch import nn

from weightsync import ConfigurationError, DistributedWeightSyncScheme, ProtocolError, Verify
from weightsync.engine import applier, parts
from weightsync.engine.parts import OutgoingParts
from weightsync.protocol import codec
from weightsync.protocol.messages import Message, Part, Update
from weightsync.protocol.report import OutcomeKind
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer, NoRoom
from weightsync.transports.pipe import framing
from weightsync.transports.store.arriving import Arrivals
from weightsync.transports.store.group import NoGroup
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.seals import NoGuard, Opened
from weightsync.transports.store.stream import Stream
from weightsync.weights import packing
from weightsync.weights.tree_digest import CHUNK

Given = list[tuple[str, Part]]


def model(fill: float = 0.0) -> nn.Module:
    """A model of 5 MiB in one tensor, which is ten chunks."""
    return filled(nn.Linear(1024, 1280, bias=False), fill)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """A list of the parts that links get. Payloads of two chunks or more travel in parts of one chunk."""
    for name, nbytes in (("LEAST_PART", CHUNK), ("LEAST_NBYTES", 2 * CHUNK), ("LEAST_IF_BUSY", 2 * CHUNK)):
        monkeypatch.setattr(parts, name, nbytes)
    found: Given = []
    real = StoreLink.send_part

    def send_part(link: StoreLink, part: Part, payload: Buffer) -> None:
        found.append((link.peer, part))
        real(link, part, payload)

    monkeypatch.setattr(StoreLink, "send_part", send_part)
    return found


@pytest.fixture
def pair(store: Any, given: Given) -> Iterator[StorePair]:
    made = StorePair(store, model=model)
    with closing(made):
        made.sync()
        yield made


def test_g2_a_payload_hashed_in_parts_is_acked_and_served_without_being_hashed_again(
    pair: StorePair, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier, "digest", None)  # fails if anything is hashed after the update has arrived

    for value in (2.0, 3.0, 4.0):
        given.clear()
        filled(pair.source, value)
        assert pair.sync().ok
        assert len(given) == 10
        assert constants(pair.model) == {value}


def test_parts_under_a_key_are_sealed_and_an_altered_part_is_rejected(
    store: Any, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is sealed: one that was altered in transit is rejected as it arrives."""
    monkeypatch.setenv("WEIGHTSYNC_KEY", "a secret")
    read, arrived = Stream.read_into, list[int]()

    def read_into(stream: Stream, room: memoryview) -> None:
        read(stream, room)
        room[-1] ^= len(arrived) == 4
        arrived.append(len(room))

    pair = StorePair(store, model=model)
    with closing(pair):
        pair.sync()
        for value in (2.0, 3.0):
            given.clear()
            filled(pair.source, value)
            assert pair.sync().ok
            assert len(given) == 10
            assert constants(pair.model) == {value}

        monkeypatch.setattr(Stream, "read_into", read_into)
        pair.sender.send_async(filled(pair.source, 4.0))
        with pytest.raises(ConnectionError, match="rejected"):
            pair.receiver.receive(timeout=PATIENCE)
        assert arrived == [CHUNK] * 5
        assert constants(pair.model) == {3.0}


def test_parts_whose_digest_is_not_compared_are_not_hashed(pair: StorePair, given: Given) -> None:
    pair.sender._packer._verify = Verify.LAYOUT

    filled(pair.source, 2.0)
    assert pair.sync().ok

    assert len(given) == 10
    assert not any(part.hashed for _, part in given)
    assert constants(pair.model) == {2.0}


def test_g6_a_payload_that_could_not_be_packed_changes_nothing_and_the_next_is_served(
    pair: StorePair, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = packing.Pieces.fill

    def half(self: packing.Pieces, tensors: Any, base: int, hashes: Any, behind: Any) -> None:
        real(self, tensors, base, hashes, lambda start, end: behind(start, end) if behind and start < 3 * CHUNK else 0)
        raise ConfigurationError("A tensor cannot be copied.")

    for value in (2.0, 3.0):
        given.clear()
        with monkeypatch.context() as patch:
            patch.setattr(packing.Pieces, "fill", half)
            filled(pair.source, -value)
            for _ in range(3):
                with pytest.raises(ConfigurationError, match="cannot be copied"):
                    pair.sender.send()
        assert len(given) == 3  # parts that no update has named would pile up, so no further parts are sent
        filled(pair.source, value)
        assert pair.sync().ok
        assert constants(pair.model) == {value}


def test_a_send_from_another_thread_between_the_parts_of_a_version_fails_neither(
    pair: StorePair, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OutgoingParts.finish

    def between(self: OutgoingParts) -> None:
        monkeypatch.setattr(OutgoingParts, "finish", real)
        assert len(given) == 10
        other = threading.Thread(target=lambda: reports.append(pair.sync(model(5.0).state_dict())))
        other.start()
        other.join(PATIENCE)
        real(self)

    reports: list[Any] = []
    monkeypatch.setattr(OutgoingParts, "finish", between)

    filled(pair.source, 2.0)
    reports.append(pair.sync())

    assert [report.ok for report in reports] == [True, True]
    assert constants(pair.model) == {2.0}


def test_a_worker_without_memory_for_a_payload_refuses_it_and_applies_the_next(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> memoryview:
        raise NoRoom("No memory for a payload.")

    with monkeypatch.context() as patch:
        patch.setattr(framing.ReceiveBuffers, "find", none)
        pair.sender.send_async()
        assert not pair.receiver.receive(timeout=PATIENCE)
    report = pair.sender.wait_async(timeout=PATIENCE, on_failure="report")
    assert report[0].kind is OutcomeKind.REFUSED
    assert "No memory for a payload" in report[0].reason

    filled(pair.source, 2.0)
    assert pair.sync().ok
    assert constants(pair.model) == {2.0}


def test_payloads_of_a_fan_out_are_not_sent_in_parts(store: Any, given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_fleet, "DistributedWeightSyncScheme", partial(DistributedWeightSyncScheme, fanout=1))
    pair = StorePair(store, model=model)
    with closing(pair):
        for _ in range(3):
            assert pair.sync().ok
    assert given == []


# ------------------------------------------------------------------------------------------- valid sequences


class Bytes:
    """A fake stream of payloads that records the sizes of those skipped."""

    def __init__(self, *payloads: bytes) -> None:
        self._payloads = list(payloads)
        self.skipped: list[int] = []

    def read_into(self, room: memoryview) -> None:
        room[:] = self._payloads.pop(0)

    def skip(self, nbytes: int) -> None:
        self.skipped.append(nbytes)


ID, OTHER = b"1" * 16, b"2" * 16
NBYTES = 200_000
HALF = 100_000


def part(start: int, end: int, nbytes: int = NBYTES, payload_id: bytes = ID, segment: int = 0) -> Part:
    ends: Any = {"start": start, "end": end, "nbytes": nbytes, "segment": segment}
    return Part(model_id="policy", incarnation=5, payload_id=payload_id, **ends)


def update(payload_id: bytes = ID, nbytes: int = NBYTES) -> Update:
    return Update(model_id="policy", incarnation=5, version=1, layout_digest=b"", nbytes=nbytes, payload_id=payload_id)


@pytest.fixture
def take() -> Callable[..., Received]:
    """A function that passes a message to `Arrivals`, with the bytes in its text or behind it."""
    arrivals = Arrivals(NoGuard("the trainer"), NoGroup())

    def one(message: Message, inline: bytes = b"", stream: Bytes | None = None) -> Received:
        opened = Opened(memoryview(codec.encode(message) + inline), b"")
        connection: Any = Bytes() if stream is None else stream
        no_client: Any = None
        (received,) = arrivals.take(opened, connection, no_client)
        return received

    return one


def test_parts_may_arrive_in_any_order_inside_or_behind_their_message(take: Callable[..., Received]) -> None:
    payload = bytes(range(250)) * (NBYTES // 250)

    take(part(HALF, NBYTES), stream=Bytes(payload[HALF:]))
    first = take(part(0, 1000), payload[:1000])
    take(part(1000, HALF), stream=Bytes(payload[1000:HALF]))
    received = take(update())

    assert first.payload is not None
    assert received.payload is not None
    assert bytes(received.payload) == payload


@pytest.mark.parametrize(
    ("before", "message", "error"),
    [
        ([], update(), "names a payload of which no part has come"),
        ([part(0, HALF, payload_id=OTHER)], update(), "names a payload of which no part has come"),
        ([part(0, HALF)], update(), f"of which {HALF} of {NBYTES} bytes have come"),
        ([part(0, HALF, nbytes=HALF)], update(), f"of which {HALF} of {NBYTES} bytes have come"),
        ([part(0, HALF)], part(HALF, NBYTES, nbytes=NBYTES + 1), "of a payload of 200001 bytes came for one of 200000"),
        ([part(0, HALF)], part(HALF, NBYTES, segment=3), "names a segment of shared memory"),
        ([part(0, HALF)], part(0, HALF), "Bytes 0 to 100000 of a payload came in part before"),
        ([part(HALF, NBYTES)], part(0, HALF + 1), "Bytes 0 to 100001 of a payload"),
        ([part(0, HALF), update(b"", 0), part(HALF, NBYTES)], update(), f"of which {HALF} of {NBYTES} bytes"),
    ],
)
def test_missing_or_inconsistent_parts_raise_protocol_error(
    take: Callable[..., Received], before: list[Message], message: Message, error: str
) -> None:
    for each in before:
        take(each, stream=Bytes(bytes(HALF)))

    with pytest.raises(ProtocolError, match=error):
        take(message, stream=Bytes(bytes(HALF)))


def test_parts_without_memory_are_skipped_and_the_update_has_the_reason(
    take: Callable[..., Received], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> memoryview:
        raise NoRoom("There is none.")

    monkeypatch.setattr(framing.ReceiveBuffers, "find", none)
    stream = Bytes()

    assert take(part(0, HALF), stream=stream).untaken == "There is none."
    take(part(HALF, HALF + 10), bytes(10), stream)
    take(part(HALF + 10, NBYTES), stream=stream)
    with pytest.raises(ProtocolError, match="names a segment of shared memory"):
        take(part(0, HALF, segment=3), stream=stream)

    assert take(update()) == Received(update(), untaken="There is none.")
    assert stream.skipped == [HALF, 0, NBYTES - HALF - 10]
