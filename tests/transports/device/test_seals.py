"""Seals and digests of versions that stay on a device, and casts on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, fake_device
from fleet import PATIENCE, Pair, constants, filled, large
from test_kernels import mapped, policy
from torch import nn

from weightsync import LayoutError, OutcomeKind, SharedMemWeightSyncScheme
from weightsync.protocol.codec import slot_digest
from weightsync.weights.device.base import DeviceMemory


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device() as made:
        yield made


@pytest.fixture
def pair(device: FakeDevice) -> Iterator[Pair]:
    made = Pair(mapped, model=policy)
    made.sync()
    yield made
    made.close()


def sent(pair: Pair) -> Any:
    """Send, and return the pending update of the first worker."""
    pair.sender.send_async()
    pair.receiver.driver.pump()
    pending = pair.receiver.driver.pending
    assert isinstance(pending.payload, DeviceMemory)
    return pending


def outcome(pair: Pair) -> Any:
    pair.receiver.receive(timeout=PATIENCE)
    return pair.sender.wait_async(timeout=PATIENCE, on_failure="report").outcomes[0]


def test_a_slot_is_verified_by_its_seal_without_being_copied_to_the_host(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMemory, "read", None)
    update = sent(pair).update
    assert (update.digest, update.slot.seal) == (b"", sent_seal(pair))
    named = slot_digest(update.slot.seal, update.incarnation, update.version, update.layout_digest, update.extras)
    assert outcome(pair).kind is OutcomeKind.APPLIED
    assert pair.receiver.driver.data.answer.digest == named


def sent_seal(pair: Pair) -> bytes:
    """The seal in the slot of the pending update."""
    return bytes(pair.receiver.driver.pending.payload.seal)


def test_each_filling_of_a_slot_has_a_new_seal(pair: Pair) -> None:
    seals, segments = [], set()
    for _ in range(5):
        pending = sent(pair)
        seals.append(pending.update.slot.seal)
        segments.add(pending.update.slot.segment)
        assert outcome(pair).kind is OutcomeKind.APPLIED
    assert (len(set(seals)), len(segments)) == (5, 2)


@pytest.mark.parametrize("verify", ["auto", "layout", "digest"])
def test_g4_a_slot_that_is_being_written_again_is_refused(device: FakeDevice, verify: str) -> None:
    with contextlib.closing(Pair(lambda: SharedMemWeightSyncScheme("state_dict", verify=verify), model=policy)) as pair:
        pair.sync()
        sent(pair).payload.unseal()
        refused = outcome(pair)
        assert (refused.kind, "does not have its seal" in refused.reason) == (OutcomeKind.REFUSED, True)
        assert constants(pair.model) == {1.0}
        assert pair.sync().outcomes[0].kind is OutcomeKind.APPLIED


def test_bytes_changed_on_the_device_are_refused_if_digests_are_compared(device: FakeDevice) -> None:
    with contextlib.closing(
        Pair(lambda: SharedMemWeightSyncScheme("state_dict", verify="digest"), model=policy)
    ) as pair:
        pair.sync()
        sent(pair).payload.flat[0] ^= 1
        refused = outcome(pair)
        assert (refused.kind, "damaged on the way" in refused.reason) == (OutcomeKind.REFUSED, True)


def test_an_ack_of_a_slot_is_accepted_although_the_next_version_goes_through_host_memory(pair: Pair) -> None:
    sent(pair)
    (link,) = pair.sender._driver.links()
    link._reach.devices = frozenset()  # as a Hello or a refusal that arrives before the ack would do
    assert outcome(pair).kind is OutcomeKind.APPLIED
    assert pair.sync().outcomes[0].kind is OutcomeKind.APPLIED


def test_the_host_copy_of_a_slot_has_its_seal(device: FakeDevice) -> None:
    with contextlib.closing(Pair(mapped, workers=2, model=large)) as pair:
        pair.sync()
        pair.receivers[1].driver.devices = b""
        pair.sender._driver.links()[1]._reach.devices = frozenset()
        pair.sender.send_async()
        for receiver in pair.receivers:
            receiver.driver.pump()
        there, here = (receiver.driver.pending for receiver in pair.receivers)
        assert (bool(there.update.slot.device), bool(here.update.slot.device)) == (True, False)
        assert there.update.slot.seal == here.update.slot.seal == here.slot.seal
        for receiver in pair.receivers:
            assert receiver.receive(timeout=PATIENCE)
        assert pair.sender.wait_async(timeout=PATIENCE).ok


def cast(dtype: str, fill: float = 0.0) -> nn.Module:
    return filled(nn.Linear(8, 8).to(getattr(torch, dtype)), fill)


@pytest.fixture
def narrowed(device: FakeDevice) -> Iterator[Pair]:
    """A float32 trainer that sends float16 to a float16 worker."""
    fills = iter([cast("float32", 1.0), cast("float16")])
    made = Pair(
        lambda: SharedMemWeightSyncScheme("state_dict", map_on_device=True, wire_dtype="float16"),
        model=lambda _fill=0.0: next(fills),
    )
    made.sync()
    yield made
    made.close()


def test_weights_are_cast_on_the_device(narrowed: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "read", None)
    filled(narrowed.source, 1 / 3)
    assert {view.dtype for view in sent(narrowed).payload.views(narrowed.receiver.driver.pending.layout)} == {
        torch.float16
    }
    assert outcome(narrowed).kind is OutcomeKind.APPLIED
    assert constants(narrowed.model) == {torch.tensor(1 / 3).half().item()}


def test_a_value_that_would_become_infinite_on_the_device_stops_the_send(narrowed: Pair) -> None:
    with torch.no_grad():
        narrowed.source.weight[3, 3] = 1e6
    with pytest.raises(LayoutError, match="'weight' has 1 value, such as 1e\\+06"):
        narrowed.sender.send_async()
    filled(narrowed.source, 2.0)
    assert narrowed.sync().outcomes[0].kind is OutcomeKind.APPLIED
    assert constants(narrowed.model) == {2.0}
