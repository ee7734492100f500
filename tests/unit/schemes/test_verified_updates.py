"""What a worker and a trainer verify of an update and of its ack: the faults here would each be APPLIED silently."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, constants, large
from torch import nn

from weightsync import (
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    SharedMemWeightSyncScheme,
    WeightReceiver,
    WeightSender,
)
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer, Storage
from weightsync.transports.local import LocalLink, local_pair
from weightsync.weights.reading import layout_of, read_weights


class LocalScheme(MultiProcessWeightSyncScheme):
    """Its endpoints are links already."""

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Any:
        return endpoint


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    with WeightSender(LocalScheme()) as made:
        yield made


@pytest.fixture
def receiver() -> Iterator[WeightReceiver]:
    with WeightReceiver(LocalScheme()) as made:
        yield made


# ------------------------------------------------------------------------------------------------ payloads


@pytest.mark.parametrize("verify", ["layout", "digest"])
def test_g2_a_worker_that_wrote_over_its_pages_serves_the_next_version_whole(verify: str) -> None:
    """Parameters are views of a slot: what a worker wrote there must not show when that slot brings a new version."""
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


class DamagingLink(LocalLink):
    """Changes one bit of each payload on its way."""

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


def spoken(link: LocalLink, kind: type[Any]) -> Any:
    """What came over a link of that kind."""
    arrived: list[Received] = link.receive()
    [found] = [one.message for one in arrived if isinstance(one.message, kind)]
    return found


def test_g2_an_ack_of_a_joiner_that_names_another_digest_ends_its_link(sender: WeightSender) -> None:
    """A joiner's answer to the version behind its Hello is held to the digest as any other ack is."""
    sender.connect()
    first, _answers = local_pair()
    sender.add_worker(0, first)
    sender.send_async({"w": torch.ones(4)})
    sender.abandon()
    joining, far = local_pair()
    sender.add_worker(1, joining)
    update = spoken(far, Update)
    far.send(Hello(model_id=update.model_id, incarnation=update.incarnation))
    wrong = bytes([update.digest[0] ^ 1]) + update.digest[1:]
    far.send(Ack(model_id=update.model_id, incarnation=update.incarnation, version=update.version, digest=wrong))
    sender.poll()

    report = sender.send({"w": torch.zeros(4)}, timeout=0, on_failure="report")

    assert report[1].kind is OutcomeKind.LOST
    assert "names digest" in report[1].reason


@pytest.mark.untraced("the goodbyes of senders that made no handshake are forged")
def test_g4_the_goodbye_of_another_sender_does_not_end_the_link_in_force(receiver: WeightReceiver) -> None:
    """Two senders may share a connection: only the newer one's own goodbye ends its link."""
    near, far = local_pair()
    model = nn.Linear(2, 2)
    receiver.register_model(model)
    receiver.register_worker_transport(far)
    near.send(Hello(model_id="default", incarnation=7))
    receiver.receive(timeout=0)
    assert spoken(near, Hello).incarnation == 7

    for other in (6, 8):
        near.send(Bye(model_id="default", incarnation=other, reason="another sender"))
        receiver.receive(timeout=0)

    assert receiver.state.name == "READY"
    near.send(Bye(model_id="default", incarnation=7, reason="this one"))
    receiver._driver.pump()
    assert receiver.state.name == "UNINITIALIZED"


@pytest.mark.untraced("two senders are forged over one link")
def test_g10_an_older_sender_is_answered_when_a_newer_one_takes_over_on_its_link(receiver: WeightReceiver) -> None:
    """No link closes then, so nothing else would tell it that its update was dropped: it would wait for ever."""
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

    first, told, second = (received.message for received in near.receive())
    assert [(each.incarnation, type(each)) for each in (first, second)] == [(7, Hello), (8, Hello)]
    assert isinstance(told, Refusal)
    assert (told.incarnation, told.version, told.kind, told.fence) == (7, 1, RefusalKind.STALE, 8)
