"""The CUDA backend as far as it runs without a GPU: the groups of copies, and clean-up after failures."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import re
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from weightsync.engine.device_slots import open_slot
from weightsync.protocol.messages import SlotRef
from weightsync.transports.buffers import NoRoom
from weightsync.weights.device import cuda, transfer
from weightsync.weights.device.base import DeviceError, Piece
from weightsync.weights.device.captures import Captures
from weightsync.weights.device.cuda import Bounce, CudaDevice
from weightsync.weights.device.registry import installed
from weightsync.weights.device.transfer import pack_from, scatter_onto
from weightsync.weights.reading import layout_of, ordered, read_weights
from weightsync.weights.tensors import BITS, SlotViews, bits_of, borrowed, groups_of


def copied(into: list[Tensor], tensors: list[Tensor]) -> int:
    """Copy as the device does. Returns the number of groups."""
    groups = groups_of(into, tensors)
    with torch.inference_mode():
        for group in groups:
            torch._foreach_copy_(*group.chosen(into, tensors))
    return len(groups)


def test_tensors_of_one_dtype_are_copied_in_one_group() -> None:
    tensors = [torch.rand(3), torch.rand(2, 2), torch.rand(())]
    into = [torch.empty_like(tensor) for tensor in tensors]
    assert copied(into, tensors) == 1
    assert all(map(torch.equal, into, tensors))


def test_tensors_that_need_copies_of_their_own_leave_the_others_in_one_group() -> None:
    tensors = [torch.rand(3), torch.tensor(7), torch.rand(4, 3).t(), torch.rand(5)]
    into = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    groups = groups_of(into, tensors)
    assert sorted(len(group.chosen(into, tensors)[0]) for group in groups) == [1, 1, 2]
    copied(into, tensors)
    assert all(map(torch.equal, into, tensors))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(str(dtype).removeprefix("torch.") for dtype in BITS))
def test_dtypes_that_torch_would_convert_are_copied_bitwise(name: str) -> None:
    dtype = getattr(torch, name)
    every = torch.arange(256, dtype=torch.uint8).repeat(2).view(dtype)  # signalling NaNs among them
    (group,) = groups_of([torch.zeros_like(every)], [every])
    targets, sources = group.chosen([torch.zeros_like(every)], [every])
    assert not targets[0].dtype.is_floating_point
    assert not targets[0].dtype.is_complex
    into = torch.zeros(512, dtype=torch.uint8).view(dtype)
    copied([into], [every])
    assert bytes(bits_of(into).tolist()) == bytes(bits_of(every).tolist())
    assert sources[0].data_ptr() == every.data_ptr()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("names", [["bfloat16"], sorted(str(dtype).removeprefix("torch.") for dtype in BITS)])
def test_bit_views_of_a_slot_are_made_once_for_copies_into_and_out_of_it(names: list[str]) -> None:
    every = torch.arange(256, dtype=torch.uint8).repeat(2)  # signalling NaNs among them
    tensors = [torch.arange(3.0), *(every.clone().view(getattr(torch, name)) for name in names)]
    slot = SlotViews(torch.zeros_like(each.view(torch.uint8)).view(each.dtype) for each in tensors)
    out = [torch.zeros_like(each.view(torch.uint8)).view(each.dtype) for each in tensors]
    copied(slot, tensors)
    made = slot.bits
    copied(out, slot)

    assert slot.bits is made is not None
    assert [bytes(bits_of(each).tolist()) for each in out] == [bytes(bits_of(each).tolist()) for each in tensors]
    assert [each.data_ptr() for each in made] == [each.data_ptr() for each in slot]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    ("dtype", "view"),
    [(torch.float16, torch._neg_view), (torch.bfloat16, torch._neg_view), (torch.complex32, torch.conj)],
)
def test_lazily_negated_and_conjugated_tensors_are_copied_by_value(dtype: torch.dtype, view: Any) -> None:
    plain = torch.complex(torch.arange(4.0), torch.ones(4)).to(dtype) if dtype.is_complex else torch.ones(4).to(dtype)
    into = torch.zeros(4, dtype=dtype)
    copied([into], [view(plain)])
    assert into.tolist() == view(plain).tolist() != plain.tolist()


@pytest.mark.parametrize("kind", [list, SlotViews])
def test_a_copy_to_another_dtype_casts_the_values(kind: Any) -> None:
    into = torch.zeros(2, dtype=torch.bfloat16)
    assert copied(kind([into]), [torch.tensor([1.5, -2.0])]) == 1
    assert into.tolist() == [1.5, -2.0]


class Driver:
    """A fake driver that records its calls."""

    def __init__(self, fails: bool = False, read_only: bool = True) -> None:
        self.fails, self.read_only = fails, read_only
        self.calls: list[str] = []

    def pin(self, address: int, nbytes: int, read_only: bool) -> None:
        if self.fails:
            raise DeviceError("it cannot.")
        self.calls.append(f"pin {nbytes} {read_only}")

    def pins_read_only(self, ordinal: int) -> bool:
        return self.read_only

    def unpin(self, address: int) -> None:
        self.calls.append("unpin")

    def unmap(self, address: int, nbytes: int) -> None:
        self.calls.append(f"unmap {nbytes}")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_whole_pages_are_pinned_and_unpinned_when_they_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are unpinned before they are unmapped."""
    driver: Any = Driver()
    memory = mmap.mmap(-1, 5000)
    mapped = weakref.ref(memory)
    monkeypatch.setattr(driver, "unpin", lambda address: driver.calls.append(f"unpin {mapped() is not None}"))
    pinned = CudaDevice(driver, 0).register(memoryview(memory), read_only=True)
    del memory
    assert driver.calls == ["pin 8192 True"]
    del pinned
    assert driver.calls == ["pin 8192 True", "unpin True"]
    assert mapped() is None


def test_memory_dropped_while_a_graph_is_captured_is_released_after_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver: Any = Driver()
    monkeypatch.setattr(cuda, "_unreleased", deque())
    memory = mmap.mmap(-1, 10)
    still_mapped = weakref.ref(memory)
    pinned = CudaDevice(driver, 0).register(memoryview(memory), read_only=False)
    mapped = cuda._Mapping(driver, 0, 4096, 100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: driver.calls.append("wait"))
    del memory, pinned, mapped
    assert driver.calls == ["pin 4096 False"]
    assert still_mapped() is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda.release_pending()
    assert driver.calls == ["pin 4096 False", "wait", "unpin", "wait", "unmap 100"]
    assert still_mapped() is None


def test_a_forked_child_releases_nothing_of_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = Driver()
    pinned = CudaDevice(driver, 0).register(memoryview(bytearray(10)), read_only=False)
    monkeypatch.setattr(os, "getpid", lambda: -2)
    del pinned
    assert driver.calls == ["pin 4096 False"]


def test_memory_that_cannot_be_pinned_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    driver: Any = Driver(fails=True)
    device = CudaDevice(driver, 0)
    for _ in range(2):
        assert device.register(memoryview(bytearray(10)), read_only=False) is None
    assert caplog.text.count("shared memory cannot be pinned: it cannot") == 1


def test_read_only_memory_is_not_pinned_for_a_device_that_cannot_pin_it_read_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver: Any = Driver(read_only=False)
    assert CudaDevice(driver, 0).register(memoryview(bytearray(10)).toreadonly(), read_only=True) is None
    assert (driver.calls, caplog.text) == ([], "")
    assert CudaDevice(driver, 0).register(memoryview(bytearray(10)), read_only=False) is not None


class FakeStream:
    """A fake stream that records which stream waits for which, and whose copies end at once."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        return Event(f"an event of {self.name}", self.log)

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, list[str]]:
    """A fake device in host memory with staging areas of 16 bytes, and the log of the waits on it."""
    log: list[str] = []
    made, here, beside = CudaDevice(cast(Any, Driver()), 0), FakeStream("here", log), FakeStream("beside", log)
    monkeypatch.setattr(cuda, "STAGING_NBYTES", 16)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    staging, bounce = torch.zeros((2, 2, 16), dtype=torch.uint8)
    made.__dict__.update(_beside=beside, _staging=tuple(staging), _bounce=Bounce((bounce[0], bounce[1])))
    return made, log


def pieces_of(host: Tensor, tensors: list[Tensor]) -> Iterator[Piece]:
    """One piece for each tensor; their bytes are contiguous in ``host``."""
    start = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize

        def among(flat: Tensor, like: Tensor = tensor) -> list[Tensor]:
            return [flat.view(like.dtype).view(like.shape)]

        yield Piece(host[start : start + nbytes], [tensor], among)
        start += nbytes


@pytest.mark.parametrize("pinned", [True, False])
def test_pieces_of_every_size_arrive_from_pinned_and_unpinned_memory(
    device: tuple[CudaDevice, list[str]], pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_device, log = device
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: pinned)
    tensors = [torch.zeros(n, dtype=torch.float32) for n in (4, 1, 3, 13, 4)]
    tensors += [torch.zeros(6, 2, dtype=torch.int16).t(), torch.zeros(21, dtype=torch.bool)]
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    host = torch.arange(nbytes, dtype=torch.uint8).remainder_(2)
    cuda_device.from_host(list(pieces_of(host, tensors)))

    assert bytes(torch.cat([bits_of(tensor) for tensor in tensors]).tolist()) == bytes(host.tolist())
    assert ("the host waits for an event of beside" in log) is not pinned
    assert log[-2:] == ["the host waits for here", "the host waits for beside"]


def test_weights_are_copied_one_by_one_if_there_is_no_memory_for_staging(
    device: tuple[CudaDevice, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, empty = device[0], torch.empty
    del made.__dict__["_staging"]

    def full(*arguments: Any, device: object = None, **options: Any) -> Tensor:
        if "cuda" in str(device):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return empty(*arguments, device=device, **options)

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: False)
    given = {"a": torch.rand(2, 3).t(), "b": torch.tensor(2.5), "c": torch.rand(0, 2), "d": torch.rand(40).bfloat16()}
    source = read_weights(given)
    layout = layout_of(source)
    into = [torch.zeros_like(each) for each in ordered(source, layout)]
    view = memoryview(bytearray(layout.nbytes))
    for _ in range(2):
        pack_from(made, source, layout, view)
        scatter_onto(made, layout, into, range(len(into)), view)

    assert all(map(torch.equal, into, ordered(source, layout)))
    assert caplog.text.count("one by one: it has no memory") == 1


@pytest.mark.parametrize("chosen", [range(6), [0, 2, 3, 5]], ids=["all", "without those that are tied"])
def test_repeated_copies_through_the_host_group_and_view_tensors_only_once(
    device: tuple[CudaDevice, list[str]], chosen: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, planned, sent, form = device[0], [], Captures(object), Captures(object)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(transfer, "STAGING_NBYTES", 16)
    monkeypatch.setattr(cuda, "groups_of", lambda *pair: planned.append("grouped") or groups_of(*pair))
    monkeypatch.setattr(cuda, "viewed", lambda start, n, _: planned.append("viewed") or borrowed(start, n))
    source = read_weights({f"{i}": torch.full((3,), float(i)).bfloat16() for i in range(6)})
    layout, into = layout_of(source), [torch.zeros(3, dtype=torch.bfloat16) for _ in range(6)]
    seen = []
    for _ in range(3):
        planned.clear()
        view = memoryview(bytearray(layout.nbytes))
        pack_from(made, source, layout, view, sent)
        scatter_onto(made, layout, into, chosen, view, form_key=form)
        seen.append(sorted(set(planned)))
        assert all(torch.equal(into[index], source.tensors[f"{index}"]) for index in chosen)
        torch._foreach_add_(list(source.tensors.values()), 10)

    assert seen == [["grouped"], ["viewed"], []]


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA-capable device(s) is/are busy")]
)
def test_a_slot_on_a_gpu_that_this_process_cannot_use_raises_no_room(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ordinal: int) -> None:
        raise error

    class Backend:
        def named(self, identity: bytes) -> CudaDevice:
            return CudaDevice(cast(Any, Driver()), 1)

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    text = f"cannot use cuda:1: {re.escape(str(error))}"
    with installed("cuda", cast(Any, Backend())), pytest.raises(NoRoom, match=text):
        open_slot(SlotRef(segment=1, seal=bytes(16), device=bytes(16), nbytes=8), -1)


class Watcher:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def keep_addresses(self) -> None:
        self.calls.append("keep")


class Capturing:
    """A class of graphs. Each test makes a subclass, since its methods are wrapped."""

    def capture_end(self) -> None:
        """Do nothing."""


def test_watchers_are_told_before_each_capture() -> None:
    class Graph(Capturing):
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> str:
            watcher.calls.append(f"begin {pool} {capture_error_mode}")
            return "begun"

    watcher = Watcher()
    captures = Captures(Graph)
    assert not captures.watch(watcher)
    assert not captures.watch(watcher)
    assert Graph().capture_begin(3, capture_error_mode="relaxed") == "begun"
    assert watcher.calls == ["keep", "begin 3 relaxed"]


def test_a_graph_captured_before_the_watch_is_found() -> None:
    class Graph(Capturing):
        def capture_begin(self) -> None:
            """Do nothing."""

    graph = Graph()
    assert Captures(Graph).watch(Watcher())
    del graph


def test_g3_a_graph_is_found_among_frozen_objects_which_stay_frozen() -> None:
    class Graph(Capturing):
        def capture_begin(self) -> None:
            """Do nothing."""

    frozen, graph = gc.get_freeze_count() > 0, Graph()
    gc.collect()
    gc.freeze()
    try:
        assert Captures(Graph).watch(Watcher())
        assert not any(each is graph for each in gc.get_objects())
    finally:
        if not frozen:
            gc.unfreeze()
    assert Captures(Graph).watch(Watcher())
    assert (gc.get_freeze_count() > 0) is frozen
    del graph


def test_the_search_among_frozen_objects_freezes_no_garbage() -> None:
    frozen, garbage = gc.get_freeze_count() > 0, Watcher()
    dropped = weakref.ref(garbage)
    garbage.itself = garbage  # type: ignore[attr-defined]
    gc.freeze()
    del garbage
    try:
        Captures(type("Graph", (Capturing,), {"capture_begin": None})).watch(Watcher())
        assert dropped() is None
    finally:
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()


def test_the_search_for_graphs_reads_no_attribute_of_other_objects() -> None:
    class Graph(Capturing):
        def capture_begin(self) -> None:
            """Do nothing."""

    class Deprecated:
        """Resembles an object of torch's that warns at every use."""

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            raise AssertionError("it was asked for its class")

    bystander = Deprecated()
    assert not Captures(Graph).watch(Watcher())
    del bystander


def test_a_plan_of_copies_lasts_as_long_as_its_key() -> None:
    class Form:
        """An object that supports weak references."""

    device, form = CudaDevice(cast(Any, Driver()), 0), Form()
    into, tensors = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    device.copy(into, tensors, form)
    planned = device._planned[form]
    device.copy(into, [torch.full((2,), 2.0), torch.full((3,), 2.0)], form)
    assert device._planned[form] is planned
    assert [each.tolist() for each in into] == [[2.0, 2.0], [2.0, 2.0, 2.0]]
    del form
    assert len(device._planned) == 0


@pytest.mark.parametrize("way", ["into a slot", "out of it"])
def test_a_plan_views_tensors_copied_bitwise_only_once_and_does_not_keep_their_memory(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed: list[int] = []

    def view(address: int, nbytes: int, place: torch.device) -> Tensor:
        viewed.append(address)
        return borrowed(address, nbytes)

    monkeypatch.setattr(cuda, "viewed", view)
    device, form = CudaDevice(cast(Any, Driver()), 0), Captures(object)
    every = torch.arange(256, dtype=torch.uint8).repeat(2).view(torch.bfloat16)  # signalling NaNs among them
    models = [every.clone().view(16, 16).t(), every[:0], every[7].clone(), torch.arange(3.0)]
    for fill in range(4):
        slot = SlotViews(torch.zeros_like(tensor) for tensor in models)
        into, tensors = (slot, models) if way == "into a slot" else (models, slot)
        for tensor in tensors:
            tensor[...] = fill
        if fill == 3:
            tensors[0].copy_(every.view(16, 16))
        device.copy(into, tensors, form)
        assert [bytes(bits_of(each).tolist()) for each in into] == [bytes(bits_of(each).tolist()) for each in tensors]
    assert viewed == [tensor.data_ptr() for tensor in models if tensor.numel()]
    memory = weakref.ref(models[2])
    del models, into, tensors, slot, tensor
    assert memory() is None


def test_memory_that_torch_can_view_only_by_copying_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "viewed", lambda address, nbytes, place: borrowed(address, nbytes).clone())
    device, form, model = CudaDevice(cast(Any, Driver()), 0), Captures(object), [torch.zeros(4).half()]
    slot = SlotViews([torch.zeros(4).half()])
    for fill in (1.0, 2.0, 3.0):
        model[0].fill_(fill)
        device.copy(slot, model, form)
        assert slot[0].tolist() == [fill] * 4


def test_half_precision_is_copied_out_of_a_slot_into_a_model_that_was_moved_to_the_host() -> None:
    device, form, model = CudaDevice(cast(Any, Driver()), 0), Captures(object), [torch.zeros(4).half(), torch.zeros(0)]
    slot = SlotViews([torch.zeros(4).half(), torch.zeros(0)])
    for fill in (1.0, 2.0, 3.0):
        slot[0].fill_(fill)
        device.copy(model, slot, form)
        assert model[0].tolist() == [fill] * 4


def test_a_capture_does_not_keep_its_watchers() -> None:
    class Graph(Capturing):
        def capture_begin(self) -> None:
            """Do nothing."""

    captures, watcher = Captures(Graph), Watcher()
    captures.watch(watcher)
    calls = watcher.calls
    del watcher
    Graph().capture_begin()
    assert calls == []
