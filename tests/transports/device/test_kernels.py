"""G3 where reads outlast their call: a slot on a device is written again once every kernel that reads it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair
from torch import nn

from weightsync import OutcomeKind, SharedMemWeightSyncScheme
from weightsync.testing.fake_device import FakeDevice, fake_device, on_lane
from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.target import Mode


def policy(fill: float = 0.0) -> nn.Module:
    """Two parameters and a buffer, of a few hundred bytes."""
    model = nn.BatchNorm1d(32)
    model.num_batches_tracked = None  # an int64 would open a gap
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(fill)
    return model


def mapped() -> Any:
    return SharedMemWeightSyncScheme("state_dict", verify="layout", map_on_device=True)


def copied() -> Any:
    return SharedMemWeightSyncScheme("state_dict", verify="layout")


class Bench:
    """A trainer and a worker on one device. The worker's calls are made as another process's."""

    def __init__(self, device: FakeDevice, scheme: Callable[[], Any]) -> None:
        self.device = device
        self.pair = Pair(scheme, model=policy)
        self.gate = threading.Event()
        self.seen: list[set[float]] = []
        self._beside = ThreadPoolExecutor(2)

    def begin(self, call: Callable[[], Any]) -> Any:
        return self._beside.submit(call)

    def receive(self, timeout: float = PATIENCE) -> bool:
        with on_lane("worker"):
            return bool(self.pair.receiver.receive(timeout=timeout))

    def send(self, fill: float) -> None:
        policy_ = policy(fill)
        self.pair.sender.send_async(policy_)

    def serve(self, *fills: float) -> None:
        """Whole sends, one after another."""
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

        with on_lane("worker", stream):
            self.device.launch(kernel)
        assert met.wait(PATIENCE)

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


def test_the_second_version_stays_on_the_device(bench: Bench) -> None:
    driver = bench.pair.receiver.driver
    bench.send(3.0)
    with on_lane("worker"):
        driver.pump()
    slot = driver.pending.payload
    assert isinstance(slot, DeviceMemory)
    assert bench.receive()
    assert bench.pair.sender.wait_async(timeout=PATIENCE).outcomes[0].kind is OutcomeKind.APPLIED
    start, weight = slot.flat.data_ptr(), bench.pair.model.weight.data_ptr()
    is_mapped = bench.pair.schemes[0].apply_mode is Mode.MAP_ON_DEVICE
    assert (start <= weight < start + slot.nbytes) is is_mapped


@pytest.mark.parametrize("stream", ["default", "another"])
def test_g3_no_ack_leaves_while_a_kernel_reads_what_the_worker_served(bench: Bench, stream: str) -> None:
    bench.forward(stream)
    bench.send(3.0)
    receiving = bench.begin(bench.receive)

    assert bench.device.waited.wait(PATIENCE)
    assert bench.pair.sender.poll().outcomes[0].kind is OutcomeKind.PENDING

    bench.gate.set()
    assert receiving.result(PATIENCE)
    bench.pair.sender.wait_async(timeout=PATIENCE)
    bench.serve(4.0)
    assert bench.seen == [{2.0}]


def test_without_that_wait_the_kernel_reads_two_versions(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.device, "synchronize", lambda: None)
    bench.forward("another")
    bench.serve(3.0, 4.0)  # the second is written where the worker's kernel still reads
    bench.gate.set()
    monkeypatch.undo()
    with on_lane("worker"):
        bench.device.synchronize()
    assert len(bench.seen[0]) == 2


def test_g3_no_update_leaves_while_its_slot_is_written(bench: Bench) -> None:
    halfway = threading.Event()
    bench.device.between = lambda: (halfway.set(), bench.gate.wait(PATIENCE))  # type: ignore[assignment, return-value]
    sending = bench.begin(lambda: bench.send(3.0))
    assert halfway.wait(PATIENCE)

    assert not bench.receive(0.0)

    bench.gate.set()
    sending.result(PATIENCE)
    bench.forward()
    assert bench.receive()
    bench.forward()
    with on_lane("worker"):
        bench.device.synchronize()
    assert bench.seen == [{2.0}, {3.0}]


def test_without_that_wait_a_worker_reads_half_a_version(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    halfway = threading.Event()
    bench.device.between = lambda: (halfway.set(), bench.gate.wait(PATIENCE))  # type: ignore[assignment, return-value]
    monkeypatch.setattr(bench.device, "finish", lambda: None)
    bench.send(3.0)
    assert halfway.wait(PATIENCE)
    found = bench.pair.receiver.driver
    with on_lane("worker"):
        found.pump()
    values = {value for view in found.pending.payload.views(found.pending.layout) for value in view.tolist()}
    bench.gate.set()
    assert values != {3.0}


def test_g3_the_optimizer_goes_on_once_the_snapshot_is_taken(bench: Bench) -> None:
    model = policy(3.0)
    bench.pair.sender.send_async(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(9.0)
    assert bench.receive()
    bench.gate.set()
    bench.forward()
    with on_lane("worker"):
        bench.device.synchronize()
    assert bench.seen == [{3.0}]


def test_a_swap_is_whole_before_the_next_forward_whatever_its_stream(device: FakeDevice) -> None:
    bench = Bench(device, copied)
    try:
        bench.serve(1.0, 2.0)
        bench.send(3.0)
        halfway = threading.Event()
        device.between = lambda: (halfway.set(), bench.gate.wait(PATIENCE))  # type: ignore[assignment, return-value]
        receiving = bench.begin(bench.receive)
        assert halfway.wait(PATIENCE)
        assert device.waited.wait(PATIENCE)
        assert bench.pair.receiver.version == 2
        bench.gate.set()
        assert receiving.result(PATIENCE)
        bench.forward("another")
        with on_lane("worker"):
            device.synchronize()
        assert bench.seen == [{3.0}]
    finally:
        bench.close()


def test_without_that_wait_the_next_forward_reads_half_a_version(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device, copied)
    try:
        bench.serve(1.0, 2.0)
        bench.send(3.0)
        device.between = lambda: (bench.gate.wait(PATIENCE), None)[1]
        monkeypatch.setattr(device, "finish", lambda: None)
        assert bench.receive()
        found = {value for tensor in bench.pair.model.state_dict().values() for value in tensor.tolist()}
        bench.gate.set()
        assert found != {3.0}
    finally:
        bench.close()
