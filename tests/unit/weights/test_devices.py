"""Weights on a device are gathered there and cross in large pieces. The same paths run with the CPU as the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from data_samples import bits, packed, sample, sampled_dicts, snapshot, trained
from fake_device import FakeDevice, fake_device
from hypothesis import given
from msgspec.structs import replace
from torch import Tensor, nn

from weightsync.engine.packer import Packer, nobody
from weightsync.transports.device import DeviceBuffer
from weightsync.weights import packing
from weightsync.weights.aliasing import same_bits
from weightsync.weights.device.base import DeviceMemory
from weightsync.weights.device.captures import must_not_move
from weightsync.weights.device.registry import backends, device_at
from weightsync.weights.layout import Layout
from weightsync.weights.packing import digest_of
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import Mode, Target
from weightsync.weights.tensors import DTYPE_NAMES, DTYPES, borrowed, copy_groups, groups_of
from weightsync.weights.tree_digest import digest


@pytest.fixture(scope="module")
def everything_is_on_a_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_on_one_device", bool)
        patch.setattr(packing, "CHUNK", 48)
        patch.setattr(torch, "_foreach_copy_", foreach_copy_of_a_gpu)
        packing._chunks.cache_clear()
        yield
    packing._chunks.cache_clear()


UNSUPPORTED_BY_FOREACH = {"uint16", "uint32", "uint64", "complex32", "float8_e8m0fnu"}
CONVERTED_THROUGH_FLOAT = {"float16", "bfloat16", *(name for name in DTYPES if name.startswith("float8"))}


def foreach_copy_of_a_gpu(into: Sequence[Tensor], tensors: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy as torch's CUDA kernel does: some dtypes fail, others are converted to float and back, which changes NaNs.

    Tensors of several dtypes or strides are copied one by one, unchanged.
    """
    alike = len({(t.dtype, s.dtype) for t, s in zip(into, tensors, strict=True)}) == 1
    fast = alike and all(t.stride() == s.stride() for t, s in zip(into, tensors, strict=True))
    for target, source in zip(into, tensors, strict=True):
        name = DTYPE_NAMES[target.dtype]
        if fast and name in UNSUPPORTED_BY_FOREACH:
            raise NotImplementedError(f"'foreach_tensor_copy' not implemented for '{name}'")
        as_float = source.float() if fast and name in CONVERTED_THROUGH_FLOAT else None
        target.copy_(source if as_float is None else torch.where(as_float.isnan(), float("nan"), as_float))


class CopiesInGroups(FakeDevice):
    """A device that copies as a GPU does: many tensors by one kernel, and as integers if torch would convert them."""

    def __init__(self) -> None:
        super().__init__()
        #: The sources of each copy, and the key that it was given.
        self.copied: list[tuple[Sequence[Tensor], object]] = []

    def copy(self, into: Sequence[Tensor], tensors: Sequence[Tensor], known: object | None = None) -> None:
        """Copy immediately."""
        self.copied.append((tensors, known))
        copy_groups(groups_of(into, tensors), into, tensors)


class DeviceReader(type(nobody)):  # type: ignore[misc]
    """A worker that can open slots on a device."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity

    def reached(self) -> Sequence[frozenset[bytes]]:
        """The worker's one device."""
        return [frozenset({self.identity})]


@pytest.mark.usefixtures("everything_is_on_a_device")
@given(sampled_dicts)
def test_weights_on_a_device_travel_to_the_host_and_back_bit_identical(found: dict[str, tuple[Tensor, bytes]]) -> None:
    source = {name: tensor for name, (tensor, _) in found.items()}
    destination = {name: sample(DTYPE_NAMES[t.dtype], tuple(t.shape), 7)[0] for name, t in source.items()}
    layout, payload, extras = packed(source)
    target = Target(destination)

    target.swap(target.stage(layout, payload, extras))

    assert all(bits(destination[name]) == expected for name, (_, expected) in found.items())
    weights = read_weights(source)
    assert digest_of(weights, layout_of(weights), extras) == digest(payload, extras) == target.digest()


def in_a_slot(device: FakeDevice, layout: Layout, payload: memoryview) -> DeviceMemory:
    memory = device.allocate(layout.nbytes)
    borrowed(memory.flat.data_ptr(), layout.nbytes).copy_(torch.frombuffer(payload, dtype=torch.uint8))
    return memory


@pytest.mark.parametrize("way", ["through the host", "in a slot", "where no memory can be shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_through_weights_overwritten_on_a_device_raises(
    way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "where no memory can be shared":
        monkeypatch.setattr(packing, "_on_one_device", bool)
    device = contextlib.nullcontext() if way == "where no memory can be shared" else fake_device(CopiesInGroups())
    with device as made:
        model = nn.Linear(4, 4).to(dtype)
        layout, payload, extras = packed(nn.Linear(4, 4).to(dtype))
        target = Target(model)
        slot = in_a_slot(made, layout, payload) if way == "in a slot" else payload
        loss = (model(model(torch.ones(4, dtype=dtype))) ** 2).sum()

        target.swap(target.stage(layout, slot, extras))

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_copying_a_slot_into_tied_weights_reuses_the_copy_plan() -> None:
    with fake_device(CopiesInGroups()) as device:
        source, destination = trained(1), trained(2)
        layout, payload, extras = packed(source)
        target, slot = Target(destination), in_a_slot(device, layout, payload)
        for _ in range(2):
            target.swap(target.stage(layout, slot, extras))

        (first, known), (second, again) = device.copied
        assert first is second
        assert known is again is not None
        assert len(first) < len(layout.entries)
        assert snapshot(destination) == snapshot(source)


def test_a_target_lists_the_devices_whose_slots_it_can_open(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(nn.Linear(2, 1))
    assert target.devices == b""
    with fake_device() as device:
        monkeypatch.setattr(device, "opens", lambda: [b"a" * 16, b"b" * 16])
        assert target.devices == b"a" * 16 + b"b" * 16


def test_compiled_modules_and_rnns_and_modules_that_contain_them_must_not_move() -> None:
    optimized = type("OptimizedModule", (nn.Module,), {"__module__": "torch._dynamo.eval_frame"})
    compiled = nn.Linear(2, 1)
    compiled.compile(backend="eager")
    for plain in ({"a": torch.ones(1)}, nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1)), nn.LSTMCell(2, 2)):
        assert not must_not_move(plain)
    for each in (optimized(), compiled, nn.LSTM(2, 2), nn.GRU(2, 2), nn.RNN(2, 2)):
        assert must_not_move(each)
        assert must_not_move(nn.Sequential(nn.Linear(2, 1), each))
        behind = nn.Sequential(twice := nn.Linear(2, 1), twice)
        behind.register_module("none", None)
        behind.register_module("last", each)
        assert must_not_move(behind)


def test_parameters_on_a_device_that_cannot_share_memory_are_not_mapped() -> None:
    target = Target(nn.Linear(2, 1), Mode.MAP)
    there = replace(target._plan, tensors=[tensor.to("meta") for tensor in target._plan.tensors])

    assert target._may_map(target._plan, memoryview(b""))
    assert not target._may_map(there, memoryview(b""))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUS WERE NOT TESTED: there is no CUDA device")
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("trainer", "worker"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_policy_is_applied_from_device_to_device(mode: Mode, trainer: str, worker: str) -> None:
    source, destination = trained(1).to(trainer), trained(2).to(worker)
    layout, payload, extras = packed(source)
    target = Target(destination, mode)

    target.swap(target.stage(layout, payload, extras))

    assert snapshot(destination) == snapshot(source)
    assert target.digest() == digest(payload, extras)
    assert destination.head.weight is destination.embedding.weight
    assert all(parameter.device.type == worker for parameter in destination.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUS WERE NOT TESTED: there is no CUDA device")
@pytest.mark.parametrize("mode", Mode)
def test_a_policy_stays_on_a_gpu_whose_memory_cannot_be_shared(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(backends, "cuda")
    source, destination = trained(1), trained(2).cuda()
    layout, payload, extras = packed(source)
    target = Target(destination, mode)

    target.swap(target.stage(layout, payload, extras))

    assert snapshot(destination) == snapshot(source)
    assert all(parameter.is_cuda for parameter in destination.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUS WERE NOT TESTED: there is no CUDA device")
def test_comparing_tied_weights_on_a_gpu_needs_at_most_half_of_their_memory() -> None:
    one, other = (torch.zeros(160 << 20, dtype=torch.uint8, device="cuda").view(torch.bfloat16) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    assert same_bits(one, other)
    assert torch.cuda.max_memory_allocated() - before <= one.nbytes // 2
    other[-1] = 1.0
    assert not same_bits(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUS WERE NOT TESTED: there is no CUDA device")
def test_moving_the_model_off_the_gpu_between_two_sends_frees_its_gpu_memory() -> None:
    model = nn.Linear(4096, 1024).bfloat16().cuda()
    device = device_at(model.weight.device)
    assert device is not None
    packer, readers = Packer(), DeviceReader(device.identity)
    for _ in range(3):
        packed = packer.pack(model, readers=readers)
        assert isinstance(packed.buffer, DeviceBuffer)
        packer.release_packed(packed)
    before = torch.cuda.memory_allocated()
    model.cpu()
    assert before - torch.cuda.memory_allocated() >= model.weight.nbytes
    packer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPUS WERE NOT TESTED: there is no CUDA device")
def test_bfloat16_weights_in_a_gpu_slot_are_copied_into_a_model_moved_off_the_gpu() -> None:
    model = nn.Linear(64, 64).bfloat16().cuda()
    device = device_at(model.weight.device)
    assert device is not None
    weights = read_weights({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    layout, target = layout_of(weights), Target(model, Mode.MAP_ON_DEVICE)
    memory = device.allocate(layout.nbytes)
    for fill in (1.0, 2.0, 3.0, 4.0):
        if fill == 2.0:
            model.cpu()
        for tensor in weights.tensors.values():
            tensor.fill_(fill)
        memory.write(weights, layout)
        device.finish()
        target.swap(target.stage(layout, memory))
        assert {value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()} == {fill}
