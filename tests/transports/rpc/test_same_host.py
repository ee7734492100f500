"""Calls to a worker on the same host, which maps payloads in place: their seals, refusals, and reuse of buffers."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from descriptor_limit import limit_descriptors
from fleet import PATIENCE
from rpc_fleet import World, attempt, send
from torch import nn

from weightsync import ProtocolError, TransportError
from weightsync.keys import SharedKey
from weightsync.protocol import codec
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Hello, Message, Refusal, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer, Segment, Storage
from weightsync.transports.calls import same_host
from weightsync.transports.calls.same_host import REACHES, MappedPlaces, SegmentPlace, SharedPayloads
from weightsync.transports.calls.server import CallServer, Parcel
from weightsync.transports.process import own_host, own_identity

NBYTES = 100_000
UPDATE = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=NBYTES)


def hello(**changed: Any) -> bytes:
    """The Hello of a trainer in this process, with changes."""
    pid, started = own_identity()
    fields = {"host": own_host(), "pid": pid, "started": started, **changed}
    return codec.encode(Hello(model_id="m", incarnation=1, **fields))


class Ends(NamedTuple):
    """Both ends of a link after its handshake."""

    server: CallServer
    shared: SharedPayloads
    link: Any
    buffer: Buffer

    def place(self, version: int = 1) -> SegmentPlace | None:
        return self.placed(version)[1]

    def placed(self, version: int = 1) -> tuple[Update, SegmentPlace | None]:
        """The update that a link sends, and the place of its payload, if the worker maps it."""
        update = Update(model_id="m", incarnation=1, version=version, layout_digest=b"", nbytes=NBYTES)
        self.shared.shares(self.buffer)
        return self.shared.place(update, self.buffer)

    def arrived(self, place: SegmentPlace, update: Update = UPDATE) -> Any:
        """The message that the worker's link delivers for an update with its payload at this place."""
        self.server.submit(Parcel("a", 1, codec.encode(update), place=place))
        (received,) = self.link.receive()
        return received

    def hear(self, message: Message) -> None:
        self.shared.heard([message])


@pytest.fixture
def ends() -> Iterator[Ends]:
    server, links, shared = CallServer("m"), [], SharedPayloads()
    stop = server.open(links.append)
    answer = server.submit(Parcel("a", 0, hello()))
    (link,) = links
    link.receive()
    link.send(Hello(model_id="m", incarnation=1, fence=1))
    shared.strip_mark(answer.result(timeout=0))
    buffer = Buffer(NBYTES, Storage.SEGMENTS)
    buffer.view[:NBYTES] = os.urandom(NBYTES)
    yield Ends(server, shared, link, buffer)
    link.close()
    stop()


def test_g2_an_update_whose_payload_is_mapped_names_the_seal_of_its_memory(ends: Ends) -> None:
    update, place = ends.placed()
    assert place is not None
    assert ends.arrived(place, update).message.slot.seal == ends.buffer.sealed() != bytes(16)


def test_g2_a_promise_to_map_or_carry_a_payload_holds_if_an_answer_arrives_meanwhile(ends: Ends) -> None:
    refused = Refusal(model_id="m", incarnation=1, version=1, kind=RefusalKind.REFUSED, reason="no room")
    assert ends.shared.shares(ends.buffer)
    ends.hear(refused)
    assert ends.shared.shares(ends.buffer)
    assert ends.shared.place(UPDATE, ends.buffer)[1] is not None
    assert not ends.shared.shares(ends.buffer)
    ends.hear(Ack(model_id="m", incarnation=1, version=1))
    assert ends.shared.place(UPDATE, ends.buffer) == (UPDATE, None)


def test_a_promise_to_map_a_payload_holds_if_the_next_one_is_packed_meanwhile(ends: Ends) -> None:
    """Another thread of the trainer packs the next payload, between the two steps of this one's send."""
    following = Buffer(NBYTES, Storage.SEGMENTS)
    assert ends.shared.shares(ends.buffer)
    assert ends.shared.shares(following)
    assert ends.shared.place(UPDATE, ends.buffer)[1] is not None
    assert ends.shared.place(UPDATE, following)[1] is not None


def test_a_promise_for_an_unsent_payload_does_not_hold_for_the_next_in_its_buffer(
    ends: Ends,
) -> None:
    """The payload of the promise went only to other workers."""
    assert ends.shared.shares(ends.buffer)
    ends.hear(Refusal(model_id="m", incarnation=1, version=1, kind=RefusalKind.REFUSED, reason="no room"))
    ends.buffer.unseal()
    assert ends.shared.place(UPDATE, ends.buffer) == (UPDATE, None)
    ends.hear(Ack(model_id="m", incarnation=1, version=1))
    assert ends.shared.shares(ends.buffer)
    ends.buffer.unseal()
    ends.hear(Refusal(model_id="m", incarnation=1, version=2, kind=RefusalKind.REFUSED, reason="no room"))
    assert not ends.shared.shares(ends.buffer)


def test_g3_a_mapped_payload_is_the_trainers_memory_and_a_workers_writes_stay_private(ends: Ends) -> None:
    place = ends.place()
    assert place is not None

    received = ends.arrived(place)

    assert received.slot.seal == ends.buffer.sealed()
    assert received.payload == ends.buffer.view[:NBYTES]
    ends.buffer.view[5] = before = (ends.buffer.view[5] + 1) % 256
    assert received.payload[5] == before, "the payload is a copy of the trainer's memory"
    received.payload[5] = (before + 1) % 256
    assert ends.buffer.view[5] == before


def test_g3_a_buffer_is_pinned_until_the_worker_has_acked_a_newer_version(ends: Ends) -> None:
    assert ends.place(1) is not None
    assert ends.buffer.pinned
    ends.hear(Ack(model_id="m", incarnation=1, version=1))
    assert ends.buffer.pinned
    other, ends = ends.buffer, ends._replace(buffer=Buffer(NBYTES, Storage.SEGMENTS))
    assert ends.place(2) is not None
    ends.hear(Ack(model_id="m", incarnation=1, version=2))
    assert not other.pinned
    assert ends.buffer.pinned


def test_g3_a_buffer_that_a_lost_worker_may_still_read_is_retired(ends: Ends) -> None:
    ends.place()
    ends.shared.close()
    assert ends.buffer.retired
    assert ends.place(2) is None


def test_after_a_refusal_payloads_are_carried_until_an_ack_and_then_mapped_again(ends: Ends) -> None:
    ends.place(1)
    ends.hear(Refusal(model_id="m", incarnation=1, version=1, kind=RefusalKind.REFUSED, reason="no room"))
    assert not ends.buffer.pinned
    assert ends.place(2) is None
    ends.hear(Ack(model_id="m", incarnation=1, version=2))
    assert ends.place(3) is not None


@pytest.mark.parametrize("changed", [{"host": bytes(16)}, {"pid": 0, "started": 0}, {"started": 1}])
def test_a_worker_that_cannot_open_the_trainers_memory_does_not_offer_to_map_it(changed: dict[str, Any]) -> None:
    server, links, shared = CallServer("m"), [], SharedPayloads()
    stop = server.open(links.append)
    answer = server.submit(Parcel("a", 0, hello(**changed)))
    links[0].send(Hello(model_id="m", incarnation=1, fence=1))

    assert REACHES not in answer.result(timeout=0)
    shared.strip_mark(answer.result(timeout=0))
    assert not shared.shares(Buffer(NBYTES, Storage.SEGMENTS))

    links[0].close()
    stop()


@pytest.mark.parametrize("gone", ["descriptor", "inode", "process", "other file"])
def test_a_payload_that_cannot_be_mapped_is_untaken_and_the_link_stays_open(
    ends: Ends, gone: str, tmp_path: Any
) -> None:
    place = ends.place()
    assert place is not None
    with (tmp_path / "file").open("wb") as file:
        wrong = {
            "descriptor": place._replace(descriptor=2**20),
            "inode": place._replace(inode=place.inode + 1),
            "process": place._replace(started=place.started + 1),
            "other file": place._replace(descriptor=file.fileno()),
        }[gone]
        received = ends.arrived(wrong)
    assert received.payload is None
    assert f"rocess {place.pid}" in received.untaken
    assert not ends.link.is_closed


@pytest.mark.parametrize("left", [0, 1])
def test_g11_a_payload_without_a_free_descriptor_is_untaken_with_that_reason(ends: Ends, left: int) -> None:
    place = ends.place()
    assert place is not None
    with limit_descriptors(left):
        received = ends.arrived(place)
    assert received.payload is None
    assert "Too many open files" in received.untaken


def test_a_payload_of_a_process_with_a_reused_pid_is_untaken(ends: Ends) -> None:
    place = ends.place()
    assert place is not None
    received = ends.arrived(place._replace(started=place.started + 1))
    assert received.untaken == f"Process {place.pid} no longer has the memory that its call named."


@pytest.mark.parametrize("carried", [(1, 2, 3), (1, 2, 3, "4"), (1, 2, 3, True), [1, 2, 3, 4], "1234"])
def test_a_malformed_segment_place_is_a_protocol_error(carried: object) -> None:
    with pytest.raises(ProtocolError, match="place in memory"):
        SegmentPlace.read(carried)


def test_a_closed_link_maps_and_keeps_no_payload(ends: Ends) -> None:
    """A mapping that stayed would keep the trainer's memory for as long as the worker lives."""
    other = Buffer(NBYTES, Storage.SEGMENTS)
    first, second = ends.place(), SegmentPlace.of(segment_of(other))
    assert first is not None
    assert ends.arrived(first).payload is not None
    ends.link.close()
    with pytest.raises(TransportError, match="closed"):
        ends.server.submit(Parcel("a", 2, codec.encode(UPDATE), place=second))

    assert ends.link._places._mappings == {}


def test_a_payload_that_is_no_longer_mapped_holds_no_descriptor(ends: Ends) -> None:
    place = ends.place()
    assert place is not None
    gc.collect()  # what earlier tests left
    before = open_segments()
    assert ends.arrived(place).payload is not None
    ends.link.close()

    assert open_segments() == before


def open_segments() -> int:
    """How many of this process's descriptors are of segments."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed them
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum("memfd:weightsync" in target for target in targets)


def test_a_worker_keeps_only_the_last_mapped_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host, "MAX_SEGMENTS", 2)
    buffers = [Buffer(NBYTES, Storage.SEGMENTS) for _ in range(3)]
    places, mapped = [SegmentPlace.of(segment_of(buffer)) for buffer in buffers], MappedPlaces()
    for place in places:
        assert mapped.received(UPDATE, place).payload is not None

    assert list(mapped._mappings) == places[1:]


def segment_of(buffer: Buffer) -> Segment:
    """The segment of a buffer."""
    assert buffer.segment is not None
    return buffer.segment


def test_an_update_larger_than_its_segment_is_a_protocol_error(ends: Ends) -> None:
    place = ends.place()
    assert place is not None
    nbytes = ends.buffer.nbytes + 1
    with pytest.raises(ProtocolError, match=f"{nbytes} bytes in a segment"):
        ends.arrived(place, Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=nbytes))


def test_with_a_key_a_call_that_names_memory_is_a_protocol_error(ends: Ends) -> None:
    place, server, links = ends.place(), CallServer("m"), []
    stop = server.open(links.append, SharedKey("a secret that both ends have"))
    with pytest.raises(ProtocolError, match="under a key"):
        server.submit(Parcel("b", 1, codec.encode(UPDATE), place=place))
    assert links == []
    stop()


def wide(fill: float = 0.0) -> nn.Module:
    """A model too large for a small message."""
    model = nn.Linear(200, 200)
    for parameter in model.parameters():
        nn.init.constant_(parameter, fill)
    return model


def _counting(setup: Any) -> None:
    """Record in the trainer, for each payload, whether its place was sent."""
    setup.kept["places"] = counted = _Counted()
    counted.begin()


class _Counted:
    def __init__(self) -> None:
        self.found: list[bool] = []
        self._real = SharedPayloads.place

    def begin(self) -> None:
        real, found = self._real, self.found

        def place(shared: SharedPayloads, update: Update, payload: Buffer | None) -> tuple[Update, SegmentPlace | None]:
            named = real(shared, update, payload)
            found.append(named[1] is not None)
            assert found[-1] != bool(update.digest), "a carried payload has a digest, and a mapped one has none"
            return named

        SharedPayloads.place = place  # type: ignore[method-assign]

    def close(self) -> None:
        SharedPayloads.place = self._real  # type: ignore[method-assign]


def _counted(setup: Any) -> list[bool]:
    return list(setup.kept["places"].found)


def _shows(setup: Any) -> set[float]:
    setup.receiver.receive(timeout=PATIENCE)
    return {value for tensor in setup.model.state_dict().values() for value in tensor.flatten().tolist()}


def _unreachable(setup: Any) -> None:
    """Make this worker find no memory at the trainer's places from now on."""
    setup.kept["blind"] = _Blind()


class _Blind:
    def __init__(self) -> None:
        self._real = real = MappedPlaces.received

        def received(places: MappedPlaces, update: Update, place: SegmentPlace) -> Received:
            places.clear()
            return real(places, update, place._replace(pid=0))

        MappedPlaces.received = received  # type: ignore[method-assign]

    def close(self) -> None:
        MappedPlaces.received = self._real  # type: ignore[method-assign]


def test_over_rpc_a_payload_that_cannot_be_mapped_is_refused_then_carried_and_later_mapped(world: World) -> None:
    with world.syncing([0], wide) as trainer:
        worker = world.workers[0]
        # The handshake may or may not be answered before this update is sent, so it is not counted.
        trainer.tell(send, 1.0)
        assert worker.do(_shows) == {1.0}
        assert trainer.answer().ok
        trainer.do(_counting)
        worker.do(_unreachable)
        for fill, shown in ((2.0, {1.0}), (3.0, {3.0}), (4.0, {4.0}), (5.0, {5.0})):
            if fill == 4.0:
                worker.do(_reachable_again)
            trainer.tell(attempt, send, fill)
            assert worker.do(_shows) == shown
            error = trainer.answer()
            assert (error is None) == (shown == {fill})
            assert error is None or "The memory of process 0 cannot be opened" in str(error)
        assert trainer.do(_counted) == [True, False, True, True]


def _reachable_again(setup: Any) -> None:
    setup.kept.pop("blind").close()
