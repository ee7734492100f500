"""Weights copied between a device and the host: shared memory is pinned on both sides, and no copy is torn."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator

import pytest
import torch
from fake_device import FakeDevice, fake_device
from fleet import PATIENCE, Pair, constants, filled, large
from pools import statistics
from test_kernels import Bench, copied, policy
from test_slots import paired
from torch import nn

from weightsync import OutcomeKind, SharedMemWeightSyncScheme
from weightsync.transports.buffers import Segment
from weightsync.transports.device import DeviceSlot
from weightsync.transports.mapping import Mapping
from weightsync.weights.device import base, transfer
from weightsync.weights.device.transfer import pack_from
from weightsync.weights.packing import pack
from weightsync.weights.reading import layout_of, read_weights


@pytest.fixture
def full() -> Iterator[FakeDevice]:
    """A device without memory for slots, so that everything is copied through host memory."""
    with fake_device(FakeDevice(capacity=0)) as made:
        yield made


def test_shared_memory_is_pinned_on_both_sides_for_as_long_as_it_is_used(full: FakeDevice) -> None:
    with paired(copied, model=large) as pair:
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
            assert constants(pair.model) == {fill}
        assert sorted(each.view.readonly for each in full.pinned) == [False, False, True, True]
    del pair
    gc.collect()
    assert len(full.pinned) == 0


def test_weights_arrive_where_nothing_can_be_pinned(full: FakeDevice) -> None:
    full.can_pin = False
    with paired(copied, model=large) as pair:
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
            assert constants(pair.model) == {fill}
    assert len(full.pinned) == 0


def test_workers_on_the_host_pin_nothing_and_map_no_memory_twice() -> None:
    with contextlib.closing(Pair(copied, model=large)) as pair:
        pair.sync()
        (mapping,) = pair.receiver.driver._links[1]._mapped._mappings.values()
        assert not mapping.pinnable


def test_pinned_memory_shows_the_trainers_bytes_and_no_private_writes() -> None:
    segment = Segment(8192)
    mapping = Mapping(segment.fd, pinnable=True)
    mapping.lend(8)[:] = bytes(8)
    segment.view[:8] = b"12345678"
    pinned = mapping.pinned(8, lambda view: object())
    assert pinned is not None
    assert (bytes(pinned), pinned.readonly) == (b"12345678", True)


@pytest.fixture
def crossing(full: FakeDevice) -> Iterator[Bench]:
    made = Bench(full, copied)
    made.serve(1.0, 2.0)
    yield made
    made.close()


def test_g3_no_update_is_sent_while_its_host_memory_is_written(crossing: Bench) -> None:
    halfway = crossing.hold_up()
    sending = crossing.begin(lambda: crossing.send(3.0))
    assert halfway.wait(PATIENCE)

    assert crossing.waits(sending)
    assert not crossing.receive(0.0)

    crossing.gate.set()
    sending.result(PATIENCE)
    assert crossing.receive()
    assert crossing.values() == {3.0}


def test_g3_a_swap_from_the_host_is_complete_before_its_ack(crossing: Bench) -> None:
    crossing.send(3.0)
    halfway = crossing.hold_up()
    receiving = crossing.begin(crossing.receive)
    assert halfway.wait(PATIENCE)

    assert crossing.waits(receiving)
    assert crossing.pair.sender.poll().outcomes[0].kind.value == "pending"

    crossing.gate.set()
    assert receiving.result(PATIENCE)
    assert crossing.values() == {3.0}


def test_g3_kernels_that_read_the_old_weights_end_before_the_new_ones_are_copied_in(crossing: Bench) -> None:
    crossing.forward("another")
    crossing.send(3.0)
    receiving = crossing.begin(crossing.receive)
    assert crossing.waits(receiving)
    crossing.gate.set()
    assert receiving.result(PATIENCE)
    assert crossing.seen == [{2.0}]


def odd() -> dict[str, torch.Tensor]:
    """Weights of several dtypes with gaps between them, a non-contiguous tensor, and one larger than a piece."""
    return {
        "a": torch.arange(60, dtype=torch.float32).view(6, 10).t(),
        "b": torch.arange(7, dtype=torch.int64),
        "c": torch.tensor([True, False, True]),
        "d": torch.arange(5, dtype=torch.float32).to(torch.bfloat16),
        "e": torch.arange(100, dtype=torch.float32),
        "f": torch.tensor(3.5),
        "g": torch.arange(9, dtype=torch.uint8),
    }


@pytest.mark.parametrize("limit", [16, 64, 16 << 20])
def test_copies_to_and_from_the_host_are_bit_identical_with_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(transfer, "STAGING_NBYTES", limit)
    transfer._runs.cache_clear()
    source = read_weights(odd())
    layout = layout_of(source)
    expected, found = bytearray(layout.nbytes), bytearray(b"\xff" * layout.nbytes)
    pack(source, layout, memoryview(expected))
    with fake_device() as device:
        pack_from(device, source, layout, memoryview(found))
        assert found == expected
        into = {name: torch.zeros_like(tensor) for name, tensor in odd().items()}
        tensors = [into[entry.name] for entry in layout.entries]
        chosen = range(1, len(tensors))
        transfer.scatter_onto(device, layout, tensors, chosen, memoryview(found))
    transfer._runs.cache_clear()
    same = [torch.equal(into[entry.name], odd()[entry.name]) for entry in layout.entries]
    assert same == [False] + [True] * len(chosen)
    assert base.STAGING_NBYTES == 16 << 20


def test_a_tensor_that_cannot_be_copied_to_the_host_is_named(full: FakeDevice) -> None:
    with paired(copied, model=policy) as pair:
        pair.sync()
        bad = dict(pair.source.state_dict(), weight=torch.ones(32).to_sparse())
        with pytest.raises(Exception, match="'weight'"):
            pair.sender.send_async(bad)
        assert pair.sync().ok
    assert full is not None


def test_no_host_memory_is_kept_once_weights_stay_on_the_device() -> None:
    with fake_device() as device, paired(copied, model=large) as pair:
        pair.sync()
        pool = pair.sender._packer._pool
        assert statistics(pool).buffers == 1
        for _ in range(3):
            pair.sync()
        assert statistics(pool).buffers == 0
        gc.collect()
        assert [each for each in device.pinned if not each.view.readonly] == []


def test_a_forked_child_closes_the_descriptors_of_slots() -> None:
    with fake_device() as device:
        slot = DeviceSlot(device.allocate(100))
        fd, memory = slot.fd, os.fstat(slot.fd)
        child = os.fork()
        if child == 0:
            # Compare the files: another file may have this number by now, as the recorder opens one in each process.
            found = os.fstat(fd) if os.path.exists(f"/proc/self/fd/{fd}") else None
            os._exit(1 if found is not None and os.path.samestat(found, memory) else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.fstat(fd).st_size


# ---------------------------------------------------------------------------------------------- CUDA graphs


class Tied(nn.Module):
    """A module with two parameters over the same memory."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        memory = torch.full((8, 8), fill)
        self.one, self.other = nn.Parameter(memory), nn.Parameter(memory)


@pytest.mark.parametrize("sends_before", [0, 1, 3])
def test_parameters_keep_their_addresses_once_a_graph_is_captured(
    sends_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_device() as device, paired(model=large) as pair:
        for fill in range(1, sends_before + 1):
            filled(pair.source, float(fill))
            pair.sync()
        with caplog.at_level(logging.WARNING):
            device.capture()
            places = [parameter.data_ptr() for parameter in pair.model.parameters()]
            for fill in (7.0, 8.0, 9.0):
                filled(pair.source, fill)
                pair.sync()
        assert [parameter.data_ptr() for parameter in pair.model.parameters()] == places
        assert constants(pair.model) == {9.0}
        assert caplog.text.count("has captured a CUDA graph") == 1


def test_a_capture_moves_parameters_out_of_the_slot_with_their_values() -> None:
    with fake_device() as device, paired(workers=2, model=Tied) as pair:
        for fill in (1.0, 2.0):
            filled(pair.source, fill)
            pair.sync()
        slot = pair.models[1].one.data_ptr()
        device._watchers.remove(pair.receivers[1]._served.target)
        device.capture()
        captured, other = pair.models
        assert (constants(captured), captured.one.data_ptr() == captured.other.data_ptr()) == ({2.0}, True)
        assert other.one.data_ptr() == slot
        filled(pair.source, 3.0)
        pair.sync()
        assert [constants(model) for model in pair.models] == [{3.0}, {3.0}]


def test_g3_a_capture_also_moves_a_parameter_created_over_anothers_memory_out_of_the_slot() -> None:
    with fake_device() as device, paired(workers=2, model=large) as pair:
        for fill in (1.0, 2.0):
            filled(pair.source, fill)
            pair.sync()
        pair.model[0].weight = nn.Parameter(pair.model[0].weight.data)
        device._watchers.remove(pair.receivers[1]._served.target)
        device.capture()
        filled(pair.source, 3.0)
        pair.sender.send_async()
        assert pair.receivers[0].receive(timeout=PATIENCE)
        assert [constants(model) for model in pair.models] == [{3.0}, {2.0}]
        assert pair.receivers[1].receive(timeout=PATIENCE)
        pair.sender.wait_async(timeout=PATIENCE)


@pytest.mark.parametrize("captures", [False, True])
def test_g2_a_model_cast_to_another_dtype_refuses_the_next_version_even_after_a_capture(captures: bool) -> None:
    with fake_device() as device, paired(model=large) as pair:
        pair.sync()
        pair.sync()
        pair.model.half()
        if captures:
            device.capture()
        pair.sender.send_async()
        assert not pair.receiver.receive(timeout=PATIENCE)
        (outcome,) = pair.sender.wait_async(timeout=PATIENCE, on_failure="report").outcomes.values()
        assert (outcome.kind, "float16" in outcome.reason) == (OutcomeKind.REFUSED, True)


@pytest.mark.parametrize("stand_in", [True, False])
def test_a_capture_moves_parameters_out_of_the_slot_even_if_the_model_cannot_be_read(stand_in: bool) -> None:
    with fake_device() as device, paired(model=large) as pair:
        pair.sync()
        pair.sync()
        parameters = list(pair.model.parameters())
        slot = [parameter.data_ptr() for parameter in parameters]
        if stand_in:
            others = {name: torch.zeros_like(value) for name, value in pair.model.named_parameters()}
            handle = pair.model.register_forward_pre_hook(lambda *_: device.capture())
            torch.func.functional_call(pair.model, others, torch.ones(1, 200))
            handle.remove()
        else:
            pair.model.odd = nn.Parameter(torch.zeros(2, device="meta"))
            device.capture()
            del pair.model.odd
        assert not {parameter.data_ptr() for parameter in parameters} & set(slot)
        filled(pair.source, 3.0)
        pair.sync()
        assert constants(pair.model) == {3.0}


@pytest.mark.usefixtures("full")
def test_tied_parameters_stay_tied_when_they_leave_a_slot() -> None:
    with fake_device(), paired(model=Tied) as pair:
        pair.sync()
        pair.sync()
        pair.receiver.apply_weights({"one": torch.full((8, 8), 5.0), "other": torch.full((8, 8), 5.0)})
        assert pair.model.one.data_ptr() == pair.model.other.data_ptr()
        assert constants(pair.model) == {5.0}


def test_g3_a_replaced_model_has_left_its_slot_before_the_slot_is_written_again() -> None:
    with fake_device() as device, paired(model=large) as pair:
        pair.sync()
        pair.sync()
        ended: list[bool] = []

        def kernel() -> None:
            time.sleep(0.2)
            ended.append(True)

        device.launch(kernel)  # on a device, the copies into the model are queued behind this kernel
        pair.receiver.register_model(large())
        assert ended == [True]


def test_g3_a_replaced_model_keeps_the_values_of_a_parameter_created_over_anothers_memory() -> None:
    with contextlib.closing(Pair(SharedMemWeightSyncScheme, model=large)) as pair:
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
        before = pair.model
        before[0].weight = nn.Parameter(before[0].weight.data)
        pair.receiver.register_model(large())
        for fill in (4.0, 5.0):
            filled(pair.source, fill)
            pair.sync()
        assert constants(before) == {3.0}


def test_a_worker_in_inference_mode_maps_slots_and_its_parameters_stay_trainable() -> None:
    with fake_device(), paired(model=large) as pair:
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            with torch.inference_mode():
                pair.sync()
        assert constants(pair.model) == {3.0}
        assert not any(parameter.is_inference() for parameter in pair.model.parameters())
        pair.model(torch.ones(1, 200)).sum().backward()


def test_a_trainer_may_send_from_inference_mode_and_then_from_outside_it() -> None:
    with fake_device(), paired(model=large) as pair:
        pair.sync()
        with torch.inference_mode():
            pair.sync()
        pair.sync()
        assert constants(pair.model) == {1.0}


class ModelThatMayRefuse(nn.Linear):
    """A model that refuses versions while ``refuses`` is set."""

    refuses = False

    def get_extra_state(self) -> bool:
        return False

    def set_extra_state(self, state: bool) -> None:
        if self.refuses:
            raise ValueError("not this one")


def test_a_worker_still_gets_slots_after_a_refusal_unrelated_to_its_slot() -> None:
    with fake_device(), paired(copied, model=lambda fill=0.0: ModelThatMayRefuse(64, 64)) as pair:
        for _ in range(3):
            pair.sync()
        for _ in range(2):
            pair.model.refuses = True
            pair.sender.send_async()
            assert not pair.receiver.receive(timeout=PATIENCE)
            assert pair.sender.wait_async(timeout=PATIENCE, on_failure="report").outcomes[0].kind is OutcomeKind.REFUSED
            pair.model.refuses = False
            assert list(pair.sender._driver.reached()) == [frozenset({FakeDevice.identity})]
            pair.sync()
            pair.sync()


def test_a_worker_that_can_no_longer_read_its_slots_gets_later_versions_through_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_device(), paired() as pair:
        for _ in range(3):
            pair.sync()
        refused = 0
        monkeypatch.setattr("weightsync.weights.device.base.DeviceMemory.seal", bytes(16))
        for _ in range(6):
            pair.sender.send_async()
            pair.receiver.receive(timeout=PATIENCE)
            outcome = pair.sender.wait_async(timeout=PATIENCE, on_failure="report").outcomes[0].kind
            refused += outcome is OutcomeKind.REFUSED
        assert (refused, outcome) == (2, OutcomeKind.APPLIED)
