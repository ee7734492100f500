"""Slots on a device: which workers get them, how long they live, and which weights go through host memory instead."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import fake_device as fake_device_module
import pytest
import torch
from fake_device import FakeDevice, fake_device
from fleet import (
    PATIENCE,
    Crew,
    Pair,
    WorkerSetup,
    constants,
    filled,
    functions_called,
    join,
    large,
    serve,
    serve_until_gone,
)
from msgspec.structs import replace
from test_kernels import copied, mapped, policy
from torch import nn

from weightsync import (
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    ProtocolError,
    SharedMemWeightSyncScheme,
    WeightReceiver,
)
from weightsync.engine.device_slots import open_slot
from weightsync.protocol import codec
from weightsync.protocol.messages import Hello, SlotRef, Update
from weightsync.transports.buffers import NoRoom
from weightsync.transports.device import DeviceBuffer
from weightsync.weights.device.base import DeviceError, DeviceMemory
from weightsync.weights.device.captures import must_not_move
from weightsync.weights.device.registry import device_of

#: The maximum number of calls of Python functions in a small send, in the trainer and in the worker.
TRAINER_CALLS, WORKER_CALLS = 202, 132


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_device() as made:
        yield made


@contextlib.contextmanager
def paired(scheme: Any = mapped, workers: int = 1, model: Any = policy) -> Iterator[Pair]:
    pair = Pair(scheme, workers, model)
    try:
        yield pair
    finally:
        pair.close()


def slots(pid: int | str = "self") -> int:
    """The number of slots on fake devices that a process has open."""
    gc.collect()
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "fake device" in os.readlink(entry):
                found.add(entry.stat().st_ino)
    return len(found)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("verify", ["auto", "digest"])
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_versions_arrive_whole_in_two_slots_that_are_reused(scheme: Any, verify: str) -> None:
    with paired(lambda: scheme("state_dict", verify=verify), workers=2, model=large) as pair:
        for fill in range(1, 8):
            with torch.no_grad():
                filled(pair.source, float(fill))
            assert {each.kind for each in pair.sync().outcomes.values()} == {OutcomeKind.APPLIED}
            assert [constants(model) for model in pair.models] == [{float(fill)}] * 2
        assert slots() == 2
    del pair
    assert slots() == 0


@pytest.mark.usefixtures("device")
def test_a_worker_that_cannot_open_slots_gets_the_same_versions_through_host_memory() -> None:
    with paired(workers=2, model=large) as pair:
        pair.receivers[1].driver.devices = b""
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
        assert [constants(model) for model in pair.models] == [{3.0}, {3.0}]
        assert pair.receivers[1].driver.devices == b""


def test_a_worker_that_refuses_a_slot_gets_the_next_version_through_host_memory(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(fd: int, nbytes: int) -> Any:
        raise DeviceError("the device is full.")

    with paired() as pair:
        pair.sync()
        monkeypatch.setattr(device, "open", no_room)
        pair.sender.send_async()
        assert not pair.receiver.receive(timeout=PATIENCE)
        with caplog.at_level(logging.WARNING):
            report = pair.sender.wait_async(timeout=PATIENCE, on_failure="report")
        assert report.outcomes[0].kind is OutcomeKind.REFUSED
        assert "the device is full" in report.outcomes[0].reason
        assert "the next one goes through host memory" in caplog.text
        assert pair.sync().outcomes[0].kind is OutcomeKind.APPLIED


def test_a_trainer_whose_device_is_full_sends_through_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    with fake_device(FakeDevice(capacity=0)), paired() as pair, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert pair.sync().outcomes[0].kind is OutcomeKind.APPLIED
        assert caplog.text.count("copied through host memory from now on") == 1


@pytest.mark.parametrize("way", ["mapped", "copied out"])
def test_a_device_with_room_for_a_single_slot_keeps_none(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held: WeakSet[DeviceMemory] = WeakSet()
    nbytes = sum(each.nbytes for each in large().parameters())
    with fake_device(FakeDevice(capacity=nbytes * 3 // 2)) as device:
        monkeypatch.setattr(FakeDevice, "allocate", noting(FakeDevice.allocate, held))
        monkeypatch.setattr(FakeDevice, "open", noting(FakeDevice.open, held))
        with paired(mapped if way == "mapped" else copied, model=large) as pair:
            for fill in (1.0, 2.0, 3.0, 4.0):
                filled(pair.source, fill)
                assert pair.sync().ok
                assert constants(pair.model) == {fill}
            gc.collect()
            assert len(held) == 0
            assert device is not None


def noting(make: Callable[..., DeviceMemory], held: WeakSet[DeviceMemory]) -> Callable[..., DeviceMemory]:
    """Wrap a function that makes device memory, so that what it makes is added to ``held``."""

    def noted(*arguments: object) -> DeviceMemory:
        made = make(*arguments)
        held.add(made)
        return made

    return noted


@pytest.mark.usefixtures("device")
def test_a_tensor_that_cannot_be_copied_is_named() -> None:
    with paired() as pair:
        pair.sync()
        bad = dict(pair.source.state_dict(), weight=torch.ones(32).to_sparse())
        with pytest.raises(Exception, match="'weight'"):
            pair.sender.send_async(bad)
        assert pair.sync().outcomes[0].kind is OutcomeKind.APPLIED


@pytest.mark.usefixtures("device")
def test_weights_applied_by_hand_are_not_written_into_a_slot() -> None:
    with paired(workers=2) as pair:
        pair.sync()
        pair.sync()
        slot = pair.models[1].weight.data_ptr()
        pair.receivers[0].apply_weights({name: value * 7 for name, value in pair.source.state_dict().items()})
        assert constants(pair.models[0]) == {7.0}
        assert not pair.models[0].weight.data.is_inference()
        assert (constants(pair.models[1]), pair.models[1].weight.data_ptr()) == ({1.0}, slot)
        filled(pair.source, 2.0)
        pair.sync()
        assert [constants(model) for model in pair.models] == [{2.0}, {2.0}]


def register_again(pair: Pair) -> WeightReceiver:
    pair.receiver.register_model(pair.model)
    return pair.receiver


def set_as_the_schemes_model(pair: Pair) -> WeightReceiver:
    pair.schemes[0].model = pair.model
    return pair.receiver


def close_and_join_again(pair: Pair) -> WeightReceiver:
    pair.schemes[0].close()
    pair.schemes[0] = mapped()
    pair.schemes[0].init_on_worker("policy", pipe=multiprocessing.Pipe()[1], model=pair.model)
    return pair.schemes[0].get_receiver()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("again", [register_again, set_as_the_schemes_model, close_and_join_again])
def test_g2_a_model_that_is_registered_again_is_moved_out_of_its_slot(again: Callable[[Pair], WeightReceiver]) -> None:
    with paired(workers=2, model=large) as pair:
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
        again(pair).apply_weights({name: value * 7 for name, value in pair.source.state_dict().items()})
        assert [constants(model) for model in pair.models] == [{21.0}, {3.0}]
        assert pair.receivers[1].version == 3


def test_a_worker_can_close_although_its_device_has_no_memory_for_the_model(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with paired() as pair:
        pair.sync()
        pair.sync()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(device, "finish", fail)
            pair.receiver.close()
        assert "stays in a slot that other workers read" in caplog.text
        assert constants(pair.model) == {1.0}


class ParameterSubclass(nn.Parameter):
    """A subclass of Parameter, which is never mapped."""


@pytest.mark.usefixtures("device")
def test_g3_a_parameter_that_can_no_longer_be_mapped_is_not_copied_into_a_shared_slot() -> None:
    with paired(workers=2, model=large) as pair:
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
        pair.model[0].weight = ParameterSubclass(pair.model[0].weight.data)
        filled(pair.source, 4.0)
        pair.sender.send_async()
        assert pair.receivers[0].receive(timeout=PATIENCE)
        assert [constants(model) for model in pair.models] == [{4.0}, {3.0}]
        assert pair.receivers[1].receive(timeout=PATIENCE)
        pair.sender.wait_async(timeout=PATIENCE)


@pytest.mark.usefixtures("device")
def test_the_parameters_of_a_compiled_module_keep_their_addresses() -> None:
    with paired() as pair:
        pair.model.compile(backend="eager")
        before = pair.model.weight.data_ptr()
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
        assert (pair.model.weight.data_ptr(), constants(pair.model)) == (before, {3.0})


@pytest.mark.usefixtures("device")
def test_the_parameters_of_an_rnn_keep_their_addresses() -> None:
    with paired(model=lambda fill=0.0: filled(nn.LSTM(8, 8), fill)) as pair:
        before = [parameter.data_ptr() for parameter in pair.model.parameters()]
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
        assert [parameter.data_ptr() for parameter in pair.model.parameters()] == before
        assert constants(pair.model) == {3.0}


@pytest.mark.usefixtures("device")
def test_a_model_of_several_dtypes_that_is_served_from_a_slot_can_be_saved() -> None:
    def model(fill: float = 0.0) -> nn.Module:
        return filled(nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.LayerNorm(64)), fill)

    with paired(model=model) as pair:
        for fill in (1.0, 2.0, 3.0):
            filled(pair.source, fill)
            pair.sync()
        saved = io.BytesIO()
        torch.save(pair.model.state_dict(), saved)
        saved.seek(0)
        assert {value for each in torch.load(saved).values() for value in each.unique().tolist()} == {3.0}


@pytest.mark.usefixtures("device")
def test_an_update_taken_by_hand_is_a_copy_on_the_host() -> None:
    with paired() as pair:
        pair.sync()
        filled(pair.source, 4.0)
        pair.sender.send_async()
        taken = pair.receiver.take_update(PATIENCE)
        assert set(taken["weight"].tolist()) == {4.0}
        pair.receiver.apply_weights(taken)
        assert pair.sender.wait_async(timeout=PATIENCE).outcomes[0].kind is OutcomeKind.APPLIED


# -------------------------------------------------------------------------------------------------- kills


def join_on_device(setup: WorkerSetup) -> None:
    """Join with a model on a fake device of this process."""
    setup.kept["stack"] = contextlib.ExitStack()
    setup.kept["device"] = setup.kept["stack"].enter_context(fake_device())
    join(setup, large)


def command_on_device(setup: WorkerSetup) -> None:
    """Initialise the trainer's side on a fake device of this process."""
    setup.kept["stack"] = contextlib.ExitStack()
    setup.kept["device"] = setup.kept["stack"].enter_context(fake_device())
    setup.model = large(1.0)
    setup.scheme.init_on_sender("policy", pipes=setup.pipe, model=setup.model)
    setup.kept["sender"] = setup.scheme.get_sender()


def send_twice(setup: WorkerSetup) -> int:
    sender = setup.kept["sender"]
    sender.await_workers(PATIENCE)
    return [sender.send(timeout=PATIENCE).version for _ in range(2)][-1]


def receive_during_a_kernel(setup: WorkerSetup) -> None:
    """Receive while a kernel that never ends reads the model."""
    setup.kept["device"].launch(threading.Event().wait)
    setup.receiver.receive(timeout=PATIENCE)


def is_on_device(setup: WorkerSetup) -> bool:
    """Whether the model's first parameter lies in a mapping of the fake device."""
    address = setup.model[0].weight.data_ptr()
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end:
            return "fake device" in line
    return False


def values(setup: WorkerSetup) -> set[float]:
    return constants(setup.model)


@pytest.mark.usefixtures("device")
def test_a_worker_killed_during_a_kernel_is_lost_and_its_slot_is_reused(crew: Crew) -> None:
    first, second = crew.start(mapped(), 2)
    scheme = mapped()
    scheme.init_on_sender("policy", pipes=[first.pipe, second.pipe], model=large(1.0))
    with contextlib.closing(scheme):
        sender = scheme.get_sender()
        for worker in (first, second):
            worker.do(join_on_device)
        for version in (1, 2):
            for worker in (first, second):
                worker.tell(serve, version)
            sender.send(timeout=PATIENCE)
            assert [worker.answer() for worker in (first, second)] == [version, version]
        assert first.do(is_on_device)
        first.tell(receive_during_a_kernel)
        second.tell(serve, 3)
        sender.send_async()
        while sender.poll().outcomes[1].kind is OutcomeKind.PENDING:
            pass
        first.kill()
        report = sender.wait_async(timeout=PATIENCE, on_failure="report")
        assert {worker: each.kind for worker, each in report.outcomes.items()} == {
            0: OutcomeKind.LOST,
            1: OutcomeKind.APPLIED,
        }
        second.answer()
        sender.remove_worker(0)  # its payload is dropped with it
        for version in (4, 5, 6):
            second.tell(serve, version)
            sender.send(timeout=PATIENCE)
            second.answer()
        assert slots() == 2  # no slot was retired, since the dead worker no longer reads
    assert second.do(values) == {1.0}
    assert slots(second.pid) == 2


def test_workers_keep_their_served_weights_after_the_trainer_is_killed(crew: Crew) -> None:
    (worker,) = crew.start(mapped())
    trainer = crew.lead(mapped(), [worker])
    worker.do(join_on_device)
    trainer.do(command_on_device)
    worker.tell(serve, 2)
    assert trainer.do(send_twice) == 2
    assert worker.answer() == 2
    trainer.kill()
    worker.do(serve_until_gone)
    assert worker.do(is_on_device)
    assert worker.do(values) == {1.0}
    assert slots(worker.pid) == 1


# ------------------------------------------------------------------------------------------------ the wire

UPDATE = Update(model_id="policy", incarnation=1, version=1, layout_digest=b"", nbytes=64, slot=SlotRef(segment=1))
HELLO = Hello(model_id="policy", incarnation=1, devices=bytes(range(32)))


def test_slots_and_devices_survive_encoding_and_decoding() -> None:
    placed = replace(UPDATE, slot=SlotRef(segment=1, device=bytes(range(16)), nbytes=64))
    assert codec.decode(codec.encode(placed)) == placed
    assert codec.decode(codec.encode(HELLO)) == HELLO


@pytest.mark.untraced("forges frames")
@pytest.mark.parametrize(
    "forged",
    [
        replace(UPDATE, slot=SlotRef(segment=1, device=bytes(15), nbytes=64)),
        replace(UPDATE, slot=SlotRef(segment=1, device=bytes(16), nbytes=63)),
        replace(UPDATE, slot=SlotRef(segment=1, device=bytes(16), nbytes=2**63)),
        replace(UPDATE, slot=SlotRef(segment=1, nbytes=1)),
        replace(HELLO, devices=bytes(15)),
        replace(HELLO, devices=bytes(16 * 65)),
    ],
)
def test_invalid_slots_and_devices_raise_protocol_error(forged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_require_ranges", lambda *_: None)
        frame = codec.encode(forged)
    with pytest.raises(ProtocolError):
        codec.decode(frame)


def test_a_slot_on_an_unknown_device_raises_protocol_error(device: FakeDevice) -> None:
    with pytest.raises(ProtocolError, match="which this process does not have"):
        open_slot(SlotRef(segment=1, device=bytes(16), nbytes=64), 0)
    memory = device.allocate(64)
    with pytest.raises(NoRoom, match="cannot open a slot of 65 bytes"):
        open_slot(SlotRef(segment=1, device=device.identity, nbytes=65), memory.fd)


def test_the_device_of_tensors_in_several_places_is_none(device: FakeDevice) -> None:
    here, nowhere = torch.ones(2), torch.ones(2, device="meta")
    assert device_of([here, here]) is device
    assert (device_of([here, nowhere]), device_of([nowhere]), device_of([])) == (None, None, None)


def test_the_host_copy_of_a_slot_is_made_once_per_version_and_only_of_the_payload(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, read = DeviceBuffer(device.allocate(2**20)), []
    real = buffer.slot.memory.read
    monkeypatch.setattr(buffer.slot.memory, "read", lambda view: (read.append(view.nbytes), real(view)))
    for nbytes in (8, 100):
        buffer.slot.memory.flat.fill_(nbytes)
        buffer.seal(nbytes)
        assert [bytes(buffer.view[:nbytes]), bytes(buffer.view[:nbytes])] == [bytes([nbytes]) * nbytes] * 2
        buffer.unseal()
    assert read == [8, 100]


def calls(call: Callable[[], object]) -> int:
    """The number of Python functions that a call runs in this thread, except for the fake device's and its locks'."""
    beside = (fake_device_module.__file__, threading.__file__)
    return sum(code.co_filename not in beside for code in functions_called(call))


@pytest.mark.untraced("a recorded driver calls more")
@pytest.mark.usefixtures("device")
def test_a_small_send_makes_few_python_calls() -> None:
    found = []
    with paired() as pair:
        for _ in range(8):
            in_trainer = calls(pair.sender.send_async)
            in_worker = calls(lambda: pair.receiver.receive(timeout=0.0))
            found.append((in_trainer + calls(pair.sender.wait_async), in_worker))
    in_trainer, in_worker = map(min, zip(*found[3:], strict=True))
    assert (in_trainer <= TRAINER_CALLS, in_worker <= WORKER_CALLS) == (True, True), (in_trainer, in_worker)


@pytest.mark.usefixtures("device")
def test_the_search_for_compiled_modules_makes_no_python_call_for_each_module() -> None:
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(2, 1), nn.ReLU()) for _ in range(50)))
    deep.register_module("absent", None)
    deep[0].register_module("itself", deep)

    assert calls(lambda: must_not_move(deep)) == 2


def test_sends_from_host_memory_do_not_ask_links_for_their_devices() -> None:
    with paired(scheme=mapped, model=lambda fill=0.0: filled(nn.Linear(4, 4), fill)) as pair:
        pair.sender._driver.reached = None  # calling it would fail
        assert [pair.sync().outcomes[0].kind for _ in range(2)] == [OutcomeKind.APPLIED] * 2
