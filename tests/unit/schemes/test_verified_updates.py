"""Checks of an update by the worker and of its ack by the trainer. Without them, each fault here would be APPLIED."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair, constants, filled, large, small
from local_links import LocalLink, local_pair
from msgspec.structs import replace
from torch import nn

from weightsync import (
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    SharedMemWeightSyncScheme,
    Verify,
    WeightReceiver,
    WeightSender,
    WorkerLostError,
)
from weightsync.engine.receiver_driver import Pending
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.codec import slot_digest
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer, Storage
from weightsync.transports.mapping import Mapping
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.tree_digest import digest


class LocalScheme(MultiProcessWeightSyncScheme):
    """A scheme whose endpoints are links already."""

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Any:
        return endpoint


class Mixed(MultiProcessWeightSyncScheme):
    """A scheme whose endpoints are pipes or links."""

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Any:
        return endpoint if isinstance(endpoint, LocalLink) else super().create_link(endpoint, model_id, peer)


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    with WeightSender(LocalScheme()) as made:
        yield made


@pytest.fixture
def receiver() -> Iterator[WeightReceiver]:
    with WeightReceiver(LocalScheme()) as made:
        yield made


# ------------------------------------------------------------------------------------------------ payloads


@pytest.mark.parametrize("verify", ["auto", "layout", "digest"])
def test_g2_a_worker_that_overwrote_its_weights_serves_the_next_version_whole(verify: str) -> None:
    """Parameters are views of a slot: a worker's writes there must not show when the slot brings a new version."""
    ours, theirs = multiprocessing.Pipe()
    model, trainer = large(0.0), SharedMemWeightSyncScheme(verify=verify)
    trainer.init_on_sender("policy", pipes=[ours], model=large(0.0))
    worker = SharedMemWeightSyncScheme(verify=verify)
    worker.init_on_worker("policy", pipe=theirs, model=model)
    sender, receiver = trainer.get_sender(), worker.get_receiver()
    with ours, theirs, trainer, worker:
        for number in range(1, 6):
            sender.send_async(large(float(number)))
            assert receiver.receive(timeout=0)
            assert sender.wait_async(timeout=PATIENCE).ok

            assert constants(model) == {float(number)}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(-1.0)


class Wired:
    """A trainer and a worker in this process, each on a pipe of its own. The test carries the bytes between them."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.ours, self.trainers_far = multiprocessing.Pipe()
        self.workers_far, self.theirs = multiprocessing.Pipe()
        self.model = model
        self.schemes = [MultiProcessWeightSyncScheme(**options) for _ in range(2)]
        self.schemes[0].init_on_sender("policy", pipes=[self.ours], model=filled(copy.deepcopy(model), 1.0))
        self.schemes[1].init_on_worker("policy", pipe=self.theirs, model=model)

    def carry(self, damage: int = 0) -> None:
        """Carry all written bytes to the worker. ``damage`` changes the last byte, which belongs to a weight."""
        data = bytearray(os.read(self.trainers_far.fileno(), 1 << 20))
        data[-1] ^= damage
        os.write(self.workers_far.fileno(), data)

    def answer(self) -> None:
        """Carry the worker's answers to the trainer."""
        os.write(self.trainers_far.fileno(), os.read(self.workers_far.fileno(), 1 << 20))

    def close(self) -> None:
        for each in (*self.schemes, self.ours, self.trainers_far, self.workers_far, self.theirs):
            each.close()


@pytest.mark.untraced("the test changes a byte between the ends")
@pytest.mark.parametrize(
    ("options", "refused"),
    [({}, True), ({"verify": "auto"}, True), ({"verify": "digest"}, True), ({"verify": "layout"}, False)],
    ids=["default", "auto", "digest", "layout"],
)
def test_g2_an_update_damaged_in_a_pipe_is_refused_unless_only_layouts_are_verified(
    options: dict[str, str], refused: bool
) -> None:
    wired = Wired(small(0.0), **options)
    sender, receiver = wired.schemes[0].get_sender(), wired.schemes[1].get_receiver()
    with contextlib.closing(wired):
        sender.send_async()
        wired.carry(damage=1)
        assert receiver.receive(timeout=0) is not refused
        wired.answer()
        report = sender.wait_async(timeout=PATIENCE, on_failure="report")

        assert report[0].kind is (OutcomeKind.REFUSED if refused else OutcomeKind.APPLIED)
        assert ("damaged on the way" in report[0].reason, constants(wired.model) == {0.0}) == (refused, refused)


# --------------------------------------------------------------------------------------------------- slots


@pytest.fixture(params=["auto", "layout", "digest"])
def mapped(request: pytest.FixtureRequest, scheme_class: Any) -> Iterator[Pair]:
    """A pair whose weights lie in memory that both ends map, for each value of ``verify=``."""
    made = Pair(lambda: scheme_class(verify=request.param), model=large)
    yield made
    made.close()


def pending(pair: Pair) -> Pending:
    """Send a version. Returns the update that is pending in the worker."""
    pair.sender.send_async()
    pair.receiver._driver.pump()
    found = pair.receiver._driver.pending
    assert found is not None
    return found


def test_g2_updates_in_slots_are_identified_by_the_seal_and_hashed_only_on_request(
    mapped: Pair,
) -> None:
    found = pending(mapped)
    slot, update = found.slot, found.update
    assert slot is not None
    assert update.slot is not None
    assert slot.seal == update.slot.seal != bytes(16)
    digested = mapped.scheme._verify is Verify.DIGEST
    assert update.digest == (mapped.sender.digest() if digested else b"")

    assert mapped.receiver.receive(timeout=0)
    assert mapped.sender.wait_async(timeout=PATIENCE).ok
    answer = mapped.receiver._driver.data.answer
    assert isinstance(answer, Ack)
    named = slot_digest(slot.seal, update.incarnation, 1, update.layout_digest, update.extras)
    assert answer.digest == (update.digest if digested else named)


@pytest.mark.parametrize("fault", ["other memory", "written again"])
def test_g2_a_slot_without_the_seal_of_its_update_is_refused(mapped: Pair, fault: str) -> None:
    assert mapped.sync().ok
    filled(mapped.source, 2.0)
    found = pending(mapped)
    packed = mapped.sender._driver.packed(2)
    assert packed is not None
    assert packed.buffer.segment is not None
    if fault == "other memory":
        other = Buffer(packed.layout.nbytes, Storage.SEGMENTS)
        assert other.segment is not None
        other.segment.sealed()
        mapped.receiver._driver.pending = replace(found, slot=Mapping(other.segment.fd))
    else:
        packed.buffer.segment.unseal()
    assert mapped.receiver.receive(timeout=0) is False
    with pytest.raises(RefusedError, match="does not have its seal"):
        mapped.sender.wait_async(timeout=PATIENCE)

    assert (mapped.receiver.version, constants(mapped.model)) == (1, {1.0})
    assert mapped.sync().ok
    assert (mapped.receiver.version, constants(mapped.model)) == (3, {2.0})


def test_g2_weights_changed_in_their_slot_are_refused_with_verify_digest(scheme_class: Any) -> None:
    pair = Pair(lambda: scheme_class(verify="digest"), model=large)
    with contextlib.closing(pair):
        pending(pair)
        packed = pair.sender._driver.packed(1)
        assert packed is not None
        packed.buffer.view[0] ^= 1
        assert pair.receiver.receive(timeout=0) is False
        with pytest.raises(RefusedError, match="damaged on the way"):
            pair.sender.wait_async(timeout=PATIENCE)


@pytest.mark.untraced("an ack is forged")
@pytest.mark.parametrize("digest", [b"", b"\1" * 16], ids=["nothing", "another slot"])
def test_g2_an_ack_that_names_another_slot_ends_its_link(mapped: Pair, digest: bytes) -> None:
    update = pending(mapped).update
    link = mapped.receiver._driver.current_link()
    assert link is not None
    link.send(Ack(model_id="policy", incarnation=update.incarnation, version=update.version, digest=digest))

    with pytest.raises(WorkerLostError, match="names digest"):
        mapped.sender.wait_async(timeout=PATIENCE)


def test_g2_in_one_send_mapped_weights_are_verified_by_seal_and_others_by_digest(
    receiver: WeightReceiver,
) -> None:
    """One worker maps the weights; to the other they travel over its link, so only that one computes their digest."""
    (near, far), model = local_pair(), large(0.0)
    receiver.register_model(model)
    receiver.register_worker_transport(far)
    pair = Pair(Mixed, model=large)
    with contextlib.closing(pair):
        pair.sender.add_worker(1, near)
        pair.sender.send_async()
        assert pair.receiver.receive(timeout=0)
        assert receiver.receive(timeout=0)
        assert pair.sender.wait_async(timeout=PATIENCE).ok

        answers = [each._driver.data.answer for each in (pair.receiver, receiver)]
        named = [answer.digest for answer in answers if isinstance(answer, Ack)]
        assert named[1] == receiver.digest() == pair.receiver.digest()
        assert named[0] not in {named[1], b""}


def test_g2_a_replacement_model_with_the_same_weights_serves_the_same_version(mapped: Pair) -> None:
    assert mapped.sync().ok
    mapped.receiver.register_model(large(1.0))
    assert mapped.receiver.version == 1

    mapped.receiver.register_model(large(4.0))
    assert mapped.receiver.version is None


class DamagingLink(LocalLink):
    """A link that changes one bit of each payload in transit."""

    def send(self, message: Any, payload: Buffer | None = None) -> None:
        if isinstance(message, Update):
            assert payload is not None
            payload.view[message.nbytes - 1] ^= 1
        super().send(message, payload)


@pytest.mark.parametrize(
    "dtypes", [["bfloat16"], ["bfloat16", "float32"], ["float32", "int64"], ["bool"]], ids="-".join
)
def test_g2_a_damaged_payload_is_refused_whatever_its_dtypes(
    sender: WeightSender, receiver: WeightReceiver, dtypes: list[str]
) -> None:
    def weights(number: int) -> dict[str, torch.Tensor]:
        return {f"w{at}": torch.full((8,), number, dtype=getattr(torch, name)) for at, name in enumerate(dtypes)}

    model = weights(0)
    near, far = local_pair()
    sender.add_worker(0, DamagingLink(near.network, near.side, near._payloads))
    receiver.register_model(model)
    receiver.register_worker_transport(far)
    sender.connect()
    sender.send_async(weights(1))
    receiver.receive(timeout=0)

    with pytest.raises(RefusedError, match="damaged on the way"):
        sender.wait_async(timeout=PATIENCE)

    assert all(torch.equal(held, weights(0)[name]) for name, held in model.items())


# ---------------------------------------------------------------------------------------------------- acks


def received_message(link: LocalLink, kind: type[Any]) -> Any:
    """The message of this type that has arrived over the link."""
    arrived: list[Received] = link.receive()
    [found] = [one.message for one in arrived if isinstance(one.message, kind)]
    return found


def test_g2_an_ack_of_a_joiner_that_names_another_digest_ends_its_link(sender: WeightSender) -> None:
    """A joiner's ack of the version that follows its Hello must name the digest, as any other ack must."""
    sender.connect()
    first, _answers = local_pair()
    sender.add_worker(0, first)
    sender.send_async({"w": torch.ones(4)})
    sender.abandon()
    joining, far = local_pair()
    sender.add_worker(1, joining)
    update = received_message(far, Update)
    far.send(Hello(model_id=update.model_id, incarnation=update.incarnation))
    wrong = bytes([update.digest[0] ^ 1]) + update.digest[1:]
    far.send(Ack(model_id=update.model_id, incarnation=update.incarnation, version=update.version, digest=wrong))
    sender.poll()

    report = sender.send({"w": torch.zeros(4)}, timeout=0, on_failure="report")

    assert report[1].kind is OutcomeKind.LOST
    assert "names digest" in report[1].reason


@pytest.mark.untraced("the goodbyes of senders that made no handshake are forged")
def test_g4_the_goodbye_of_another_sender_does_not_end_the_current_link(receiver: WeightReceiver) -> None:
    """Senders may share a connection: only the goodbye of the sender whose handshake was accepted ends the link."""
    near, far = local_pair()
    model = nn.Linear(2, 2)
    receiver.register_model(model)
    receiver.register_worker_transport(far)
    near.send(Hello(model_id="default", incarnation=7))
    receiver.receive(timeout=0)
    assert received_message(near, Hello).incarnation == 7

    for other in (6, 8):
        near.send(Bye(model_id="default", incarnation=other, reason="another sender"))
        receiver.receive(timeout=0)

    assert receiver.state.name == "READY"
    near.send(Bye(model_id="default", incarnation=7, reason="this one"))
    receiver._driver.pump()
    assert receiver.state.name == "UNINITIALIZED"


@pytest.mark.untraced("two senders are forged over one link")
def test_g10_an_older_sender_is_answered_when_a_newer_one_takes_over_on_its_link(receiver: WeightReceiver) -> None:
    """No link closes then, so without an answer the older sender would wait forever for its dropped update."""
    near, far = local_pair()
    model = nn.Linear(2, 2)
    receiver.register_model(model)
    receiver.register_worker_transport(far)
    layout = layout_of(read_weights(model))
    update = Update(
        model_id="default",
        incarnation=7,
        version=1,
        layout_digest=layout.digest,
        layout=layout.encode(),
        nbytes=layout.nbytes,
    )

    near.send(Hello(model_id="default", incarnation=7))
    near.send(update, Buffer(layout.nbytes, Storage.HEAP))
    near.send(Hello(model_id="default", incarnation=8))
    receiver.receive(timeout=0)

    first, refused, second = (received.message for received in near.receive())
    assert [(each.incarnation, type(each)) for each in (first, second)] == [(7, Hello), (8, Hello)]
    assert isinstance(refused, Refusal)
    assert (refused.incarnation, refused.version, refused.kind, refused.fence) == (7, 1, RefusalKind.STALE, 8)


def test_the_senders_digest_is_of_one_version_even_while_another_thread_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the slot was filled again while it was read, so the digest was that of no version."""

    def send_on() -> None:
        for fill in (2.0, 3.0):
            filled(pair.source, fill)
            assert pair.sync().ok

    sending = threading.Thread(target=send_on)

    def late(*given: Any) -> bytes:
        sending.start()
        sending.join(0.1)  # long enough to fill the slot again
        return digest(*given)

    with contextlib.closing(Pair(SharedMemWeightSyncScheme, model=large)) as pair:
        pair.sync()
        sent = pair.receiver.digest()
        monkeypatch.setattr("weightsync.engine.packer.digest", late)

        assert pair.sender.digest() == sent
        sending.join(PATIENCE)
        assert constants(pair.model) == {3.0}
