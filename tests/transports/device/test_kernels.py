"""G3 on devices: a slot is rewritten only after every kernel that reads it has ended."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fake_device import FakeDevice, acting_as, fake_device
from fleet import PATIENCE, Pair, constants
from torch import nn

from weightsync import OutcomeKind, SharedMemWeightSyncScheme
from weightsync.engine import packer
from weightsync.engine.packer import Packer
from weightsync.weights import target
from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.meta_device import unshare
from weightsync.weights.target import Mode


class Odd(torch.Tensor):
    """A tensor subclass, whose data may be anywhere."""


def policy(fill: float = 0.0) -> nn.Module:
    """A model of a few hundred bytes, with parameters and buffers of one dtype."""
    model = nn.BatchNorm1d(32)
    model.num_batches_tracked = None  # an int64 would leave a gap in the layout
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(fill)
    return model


def mapped() -> Any:
    return SharedMemWeightSyncScheme("state_dict", map_on_device=True)


def copied() -> Any:
    return SharedMemWeightSyncScheme("state_dict")


class Bench:
    """A trainer and a worker on one device. The worker's calls count as those of another process."""

    def __init__(self, device: FakeDevice, scheme: Callable[[], Any]) -> None:
        self.device = device
        self.pair = Pair(scheme, model=policy)
        self.gate = threading.Event()
        self.seen: list[set[float]] = []
        self._beside = ThreadPoolExecutor(2)

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        self.device.waited.clear()
        return self._beside.submit(call)

    def receive(self, timeout: float = PATIENCE) -> bool:
        with acting_as("worker"):
            return bool(self.pair.receiver.receive(timeout=timeout))

    def send(self, fill: float) -> None:
        policy_ = policy(fill)
        self.pair.sender.send_async(policy_)

    def serve(self, *fills: float) -> None:
        """Send the model with each of these fills, and wait until the worker serves it."""
        for fill in fills:
            self.send(fill)
            assert self.receive()
            self.pair.sender.wait_async(timeout=PATIENCE)

    def forward(self, stream: str = "default") -> None:
        """Launch a kernel that reads one parameter, waits at the gate, and reads the others."""
        reads, met = [tensor.detach() for tensor in self.pair.model.state_dict().values()], threading.Event()

        def kernel() -> None:
            seen = set(reads[0].tolist())
            met.set()
            assert self.gate.wait(PATIENCE)
            self.seen.append(seen.union(*(read.tolist() for read in reads[1:])))

        with acting_as("worker", stream):
            self.device.launch(kernel)
        assert met.wait(PATIENCE)

    def values(self) -> set[float]:
        """The distinct values of the worker's model."""
        return {value for tensor in self.pair.model.state_dict().values() for value in tensor.tolist()}

    def hold_up(self) -> threading.Event:
        """Make each copy stop halfway, at the gate. Returns an event that is set once a copy has come there."""
        halfway = threading.Event()

        def between() -> None:
            halfway.set()
            assert self.gate.wait(PATIENCE)

        self.device.between = between
        return halfway

    def waits(self, call: Future[Any]) -> bool:
        """Whether a call waits for kernels before it ends."""
        while not (call.done() or self.device.waited.is_set()):
            time.sleep(0)
        return not call.done()

    def close(self) -> None:
        self.gate.set()
        self._beside.shutdown()
        self.pair.close()


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device() as made:
        yield made


@pytest.fixture(params=[mapped, copied])
def bench(request: pytest.FixtureRequest, device: FakeDevice) -> Iterator[Bench]:
    made = Bench(device, request.param)
    made.serve(1.0, 2.0)
    yield made
    made.close()


@pytest.mark.parametrize("scheme", [mapped, copied])
def test_later_versions_stay_on_the_device(device: FakeDevice, scheme: Any) -> None:
    with contextlib.closing(Bench(device, scheme)) as bench:
        bench.serve(1.0)
        driver = bench.pair.receiver.driver
        for fill in (2.0, 3.0, 4.0):
            bench.send(fill)
            with acting_as("worker"):
                driver.pump()
            slot = driver.pending.payload
            assert isinstance(slot, DeviceMemory)
            assert bench.receive()
            assert bench.pair.sender.wait_async(timeout=PATIENCE).outcomes[0].kind is OutcomeKind.APPLIED
            start, weight = slot.flat.data_ptr(), bench.pair.model.weight.data_ptr()
            is_mapped = bench.pair.schemes[0].apply_mode is Mode.MAP_ON_DEVICE
            assert (start <= weight < start + slot.nbytes) is is_mapped
            assert bench.values() == {fill}


@pytest.mark.parametrize("stream", ["default", "another"])
def test_g3_no_ack_is_sent_while_a_kernel_reads_the_served_weights(bench: Bench, stream: str) -> None:
    bench.forward(stream)
    bench.send(3.0)
    receiving = bench.begin(bench.receive)

    assert bench.waits(receiving)
    assert bench.pair.sender.poll().outcomes[0].kind is OutcomeKind.PENDING

    bench.gate.set()
    assert receiving.result(PATIENCE)
    bench.pair.sender.wait_async(timeout=PATIENCE)
    bench.serve(4.0)
    assert bench.seen == [{2.0}]


def test_without_the_wait_before_the_ack_a_kernel_reads_two_versions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.device, "synchronize", lambda: None)
    bench.forward("another")
    bench.serve(3.0, 4.0)  # version 4.0 is written into the slot that the worker's kernel still reads
    bench.gate.set()
    monkeypatch.undo()
    with acting_as("worker"):
        bench.device.synchronize()
    assert len(bench.seen[0]) == 2


def test_g3_no_update_is_sent_while_its_slot_is_written(bench: Bench) -> None:
    halfway = bench.hold_up()
    sending = bench.begin(lambda: bench.send(3.0))
    assert halfway.wait(PATIENCE)

    assert bench.waits(sending)
    assert not bench.receive(0.0)

    bench.gate.set()
    sending.result(PATIENCE)
    assert bench.receive()
    assert bench.values() == {3.0}


def test_without_the_wait_before_the_update_a_worker_reads_half_a_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    halfway = bench.hold_up()
    monkeypatch.setattr(bench.device, "finish", lambda: None)
    bench.send(3.0)
    assert halfway.wait(PATIENCE)
    driver = bench.pair.receiver.driver
    with acting_as("worker"):
        driver.pump()
    seen = {value for view in driver.pending.payload.views(driver.pending.layout) for value in view.tolist()}
    bench.gate.set()
    assert seen != {3.0}


def test_g3_a_snapshot_is_complete_before_send_async_returns(bench: Bench) -> None:
    model, halfway = policy(3.0), bench.hold_up()

    def step() -> None:
        bench.pair.sender.send_async(model)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(9.0)

    stepping = bench.begin(step)
    assert halfway.wait(PATIENCE)
    assert bench.waits(stepping)
    bench.gate.set()
    stepping.result(PATIENCE)
    assert bench.receive()
    assert bench.values() == {3.0}


def test_g3_weights_in_several_places_are_packed_after_the_kernels_of_the_current_stream(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packer, "device_of", lambda tensors: None)
    weights = {"weight": torch.zeros(8), "odd": torch.zeros(8).as_subclass(Odd)}

    def kernel() -> None:
        time.sleep(0.2)
        for tensor in weights.values():
            tensor.fill_(3.0)

    device.launch(kernel)
    packed = Packer().pack(weights)

    assert set(packed.buffer.view[: packed.layout.nbytes].cast("f")) == {3.0}


def test_g3_a_swap_of_tensors_in_several_places_waits_for_the_kernels_of_all_streams(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "device_of", lambda tensors: None)
    scatter = target.scatter

    def in_another_stream(*given: Any) -> None:
        def kernel() -> None:
            time.sleep(0.2)
            scatter(*given)

        with acting_as("this process", "of a thread that helps"):
            device.launch(kernel)

    monkeypatch.setattr(target, "scatter", in_another_stream)
    model = policy()
    target.Target(model).apply(policy(3.0))

    assert constants(model) == {3.0}


def test_g3_a_device_that_cannot_share_its_memory_is_synchronized_before_and_after_a_swap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, model, read, waits = FakeDevice(), policy(1.0), threading.Event(), []
    seen, tensors = set[float](), list(model.state_dict().values())

    def wait(place: torch.device) -> None:
        waits.append((place, constants(model)))
        read.set()
        fake.synchronize()

    def kernel() -> None:
        seen.update(tensors[0].tolist())
        assert read.wait(PATIENCE)
        for tensor in tensors[1:]:
            seen.update(tensor.tolist())

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    with contextlib.closing(fake):
        with acting_as("this process", "of a forward"):
            fake.launch(kernel)
        target.Target(model).apply(policy(2.0))
        read.set()

    assert (seen, constants(model)) == ({1.0}, {2.0})
    assert {place.type for place, _ in waits} == {"cpu"}
    assert (waits[0][1], waits[-1][1]) == ({1.0}, {2.0})


def test_g3_a_model_that_leaves_its_slot_waits_for_the_kernels_that_read_it(device: FakeDevice) -> None:
    def register() -> None:
        with acting_as("worker"):
            bench.pair.receiver.register_model(policy(0.0))

    with contextlib.closing(Bench(device, mapped)) as bench:
        bench.serve(1.0, 2.0)
        bench.forward("another")
        registering = bench.begin(register)
        assert bench.waits(registering)
        bench.gate.set()
        registering.result(PATIENCE)
        bench.serve(3.0, 4.0)
        assert bench.seen == [{2.0}]


def test_g3_a_model_that_was_moved_off_the_device_waits_for_the_kernels_that_read_its_slot(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Bench(device, mapped)) as bench:
        bench.serve(1.0, 2.0)
        bench.forward("another")
        monkeypatch.setattr(target, "devices_of", lambda tensors: ())
        for parameter in bench.pair.model.parameters():
            parameter.data = parameter.data.clone()
        bench.send(3.0)
        receiving = bench.begin(bench.receive)
        assert bench.waits(receiving)
        bench.gate.set()
        assert receiving.result(PATIENCE)
        assert (bench.seen, bench.values()) == ([{2.0}], {3.0})


@pytest.mark.parametrize("anew", [False, True])
def test_g3_a_model_moved_off_the_device_after_a_capture_waits_for_the_kernels_that_read_its_slot(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    def receive() -> bool:
        if anew:
            with acting_as("worker"):
                bench.pair.receiver.register_model(bench.pair.model)
        return bench.receive()

    with contextlib.closing(Bench(device, mapped)) as bench:
        bench.serve(1.0, 2.0)
        bench.forward("another")
        with acting_as("worker"):
            device.capture()
        monkeypatch.setattr(target, "devices_of", lambda tensors: ())
        for parameter in bench.pair.model.parameters():
            parameter.data = parameter.data.clone()
        bench.send(3.0)
        receiving = bench.begin(receive)
        assert bench.waits(receiving)
        bench.gate.set()
        assert receiving.result(PATIENCE)
        assert (bench.seen, bench.values()) == ([{2.0}], {3.0})


def test_memory_passed_to_a_worker_is_released_only_after_it_is_copied(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch unmaps another process's GPU memory with the last tensor over it, even while a kernel reads it."""

    def clone(shared: torch.UntypedStorage) -> torch.UntypedStorage:
        def kernel() -> None:
            time.sleep(0.2)
            copy.copy_(shared)

        copy = torch.UntypedStorage(shared.nbytes())
        device.launch(kernel)
        return copy

    model = policy(3.0).share_memory()
    monkeypatch.setattr(torch.UntypedStorage, "clone", clone)
    assert unshare([*model.parameters(), *model.buffers()])
    assert constants(model) == {3.0}


def test_a_swap_is_complete_before_the_next_forward_in_any_stream(device: FakeDevice) -> None:
    with contextlib.closing(Bench(device, copied)) as bench:
        bench.serve(1.0, 2.0)
        bench.send(3.0)
        halfway = bench.hold_up()
        receiving = bench.begin(bench.receive)
        assert halfway.wait(PATIENCE)

        assert bench.waits(receiving)
        assert bench.pair.receiver.version == 2

        bench.gate.set()
        assert receiving.result(PATIENCE)
        bench.forward("another")
        with acting_as("worker"):
            device.synchronize()
        assert bench.seen == [{3.0}]


def test_without_the_wait_at_the_end_of_a_swap_the_next_forward_reads_half_a_version(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Bench(device, copied)) as bench:
        bench.serve(1.0, 2.0)
        bench.send(3.0)
        halfway = bench.hold_up()
        monkeypatch.setattr(device, "finish", lambda: None)
        assert bench.receive()
        assert halfway.wait(PATIENCE)
        seen = bench.values()
        bench.gate.set()
        assert seen != {3.0}
