"""The trainer makes its two slots when it connects, if weights of a known size need them, so that no send has to."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import numpy
import pytest
import torch
from fake_device import FakeDevice, fake_device
from fleet import PATIENCE, Pair, constants, large, pair, scheme_class, small
from pools import statistics
from torch import nn

from weightsync import LayoutError, TransportError
from weightsync.schemes.none import NoWeightSyncScheme
from weightsync.transports import buffers
from weightsync.transports.buffers import INLINE_BELOW_NBYTES, Buffer, Pool, Segment
from weightsync.weights.tensors import address_of

__all__ = ["pair", "scheme_class"]

#: The payload size of `large`, in bytes.
NBYTES = sum(tensor.nbytes for tensor in large().state_dict().values())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the segments that this process allocates."""
    sizes: list[int] = []
    allocate = Segment._allocate

    def counted(segment: Segment) -> None:
        allocate(segment)
        sizes.append(segment.nbytes)

    monkeypatch.setattr(Segment, "_allocate", counted)
    return sizes


@pytest.fixture
def one(made: list[int], scheme_class: Any) -> Iterator[Pair]:
    """A trainer that has connected, and one worker: over pipes or over shared memory."""
    connected = Pair(scheme_class, model=large)
    yield connected
    connected.close()


def pool_of(one: Pair) -> Pool:
    return one.sender._packer._pool


def slots_of(one: Pair) -> list[Segment]:
    """The trainer's slots."""
    return [buffer.segment for buffer in pool_of(one)._buffers if buffer.segment is not None]


def pages_mapped(segment: Segment) -> bool:
    """Whether all pages of a segment are mapped in this process, so that a write makes no page fault."""
    first, count = address_of(segment.view) // 4096, -(-segment.nbytes // 4096)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = numpy.frombuffer(os.pread(pagemap.fileno(), count * 8, first * 8), dtype=numpy.uint64)
    return bool((entries >> numpy.uint64(63)).all())


def test_sends_make_no_slots_beyond_those_of_connect(one: Pair, made: list[int]) -> None:
    assert made == [NBYTES] * 2

    for _ in range(4):
        assert one.sync().ok
    assert made == [NBYTES] * 2
    assert constants(one.model) == {1.0}
    assert statistics(pool_of(one)).buffers == 2


def test_all_pages_of_the_slots_are_mapped_before_the_first_send(one: Pair) -> None:
    assert list(map(pages_mapped, slots_of(one))) == [True, True]


def test_adding_a_worker_later_makes_no_further_slot(one: Pair, made: list[int], scheme_class: Any) -> None:
    one.sync()
    ours, theirs = multiprocessing.Pipe()
    one.sender.add_worker(1, ours)
    late = scheme_class()
    late.init_on_worker("policy", pipe=theirs, model=large())
    receiver = late.get_receiver()
    assert receiver.receive(timeout=PATIENCE)
    one.receivers.append(receiver)

    assert one.sync().ok
    assert made == [NBYTES] * 2
    late.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("width", [100, 400])
def test_another_model_gets_new_slots_only_if_it_is_larger_and_two_slots_remain(
    one: Pair, made: list[int], width: int
) -> None:
    one.sync()
    other = nn.Linear(200, width)
    one.scheme.model = other
    one.receiver.register_model(nn.Linear(200, width))

    for _ in range(3):
        assert one.sync().ok
    nbytes = sum(tensor.nbytes for tensor in other.state_dict().values())
    assert torch.equal(one.receiver.model.weight, other.weight)
    assert made == [NBYTES] * 2 + ([nbytes] * 2 if nbytes > NBYTES else [])
    assert statistics(pool_of(one)).buffers == 2


def test_the_slots_have_the_size_of_the_weights_given_to_connect(made: list[int], scheme_class: Any) -> None:
    scheme = scheme_class()
    scheme.init_on_sender("policy", num_workers=1, model=small())
    scheme.get_sender().connect(weights=large())

    assert made == [NBYTES] * 2
    scheme.close()


def test_slots_for_cast_weights_have_the_size_in_the_wire_dtype(made: list[int], scheme_class: Any) -> None:
    pair = Pair(lambda: scheme_class(wire_dtype="bfloat16"), model=large)

    assert made == [NBYTES // 2] * 2
    pair.close()


def test_payloads_that_travel_in_the_pipe_get_no_slots(made: list[int], pair: Pair) -> None:
    assert pair.sync().ok
    assert made == []


@pytest.mark.parametrize(("nbytes", "count"), [(INLINE_BELOW_NBYTES - 1, 0), (INLINE_BELOW_NBYTES, 2)])
def test_slots_are_reserved_only_for_payloads_of_at_least_the_inline_limit(nbytes: int, count: int) -> None:
    pool = Pool()
    for _ in range(2):
        pool.reserve(nbytes)

    assert statistics(pool) == (count, 0, count, count * nbytes)


def complete_handshakes(pair: Pair) -> None:
    """Make all workers answer the handshake, and the trainer wait for the answers."""
    for receiver in pair.receivers:
        receiver.receive(timeout=0)
    pair.sender.await_workers(PATIENCE)


@pytest.mark.parametrize("reaches", [True, False], ids=["the worker opens them there", "it does not"])
def test_slots_for_device_weights_are_made_after_the_handshake_where_workers_open_them(
    made: list[int], scheme_class: Any, reaches: bool
) -> None:
    with fake_device() as device:
        pair = Pair(scheme_class, model=large)
        if not reaches:
            pair.receiver.driver.devices = b""
        allocated, before = [], device.allocate
        device.allocate = lambda nbytes: (allocated.append(nbytes), before(nbytes))[1]  # type: ignore[method-assign]
        assert made == []

        complete_handshakes(pair)
        slots = ([NBYTES] * 2, []) if reaches else ([], [NBYTES] * 2)
        assert (allocated, made) == slots

        for _ in range(4):
            assert pair.sync().ok
        assert (allocated, made) == slots
        assert constants(pair.model) == {1.0}
        pair.close()


def test_device_slots_exist_once_connect_has_sent_the_first_version(scheme_class: Any) -> None:
    with fake_device() as device, ThreadPoolExecutor(1) as beside:
        pair = Pair(scheme_class, model=large)
        received = beside.submit(pair.receiver.receive, timeout=PATIENCE)
        pair.scheme.connect(timeout=PATIENCE)
        assert received.result()

        device.allocate = None  # type: ignore[method-assign, assignment]
        assert all(pair.sync().ok for _ in range(4))
        pair.close()


def test_sends_succeed_although_the_device_has_memory_for_one_slot_only(made: list[int], scheme_class: Any) -> None:
    with fake_device(FakeDevice(capacity=NBYTES)):
        pair = Pair(scheme_class, model=large)
        complete_handshakes(pair)
        assert made == []

        assert all(pair.sync().ok for _ in range(4))
        assert made == [NBYTES] * 2  # the slots are on the host
        assert constants(pair.model) == {1.0}
        pair.close()


@pytest.mark.parametrize("model", [None, {"w": torch.zeros(2**20, device="meta")}])
def test_connect_without_a_sendable_model_makes_no_slots(made: list[int], scheme_class: Any, model: Any) -> None:
    scheme = scheme_class()
    scheme.init_on_sender("policy", num_workers=1, model=model)
    scheme.get_sender().connect()

    assert made == []
    with pytest.raises(LayoutError, match="meta"):
        scheme.get_sender().send({"w": torch.zeros(2**20, device="meta")})
    scheme.close()


def test_a_scheme_that_sends_nothing_makes_no_slots(made: list[int]) -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender("policy", model=large())
    scheme.get_sender().send(large())

    assert made == []
    scheme.close()


@pytest.mark.parametrize("fits", [0, 1])
def test_connect_succeeds_without_memory_for_slots_and_sends_raise_until_memory_is_free(
    made: list[int], scheme_class: Any, fits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nbytes: int) -> None:
        if len(made) >= fits:
            raise OSError(0, "only 5 kB are available")

    with monkeypatch.context() as patch:
        patch.setattr(buffers, "require_memory", refuse)
        pair = Pair(scheme_class, model=large)
        for _ in range(fits):
            assert pair.sync().ok
        with pytest.raises(
            TransportError, match=rf"^No shared memory for {NBYTES} bytes: only 5 kB are available\. Free"
        ):
            pair.sender.send()

    assert pair.sync().ok
    assert pair.sync().ok
    assert made == [NBYTES] * 2
    pair.close()


def test_a_child_that_is_forked_before_the_first_send_has_no_slot(one: Pair) -> None:
    slots = slots_of(one)
    child = os.fork()
    if child == 0:
        os._exit(sum(slot.fd >= 0 or slot._view is not None for slot in slots))

    assert (len(slots), os.waitpid(child, 0)[1]) == (2, 0)
    assert one.sync().ok


def test_close_releases_the_slots(one: Pair) -> None:
    slots = list(map(ref, slots_of(one)))
    one.scheme.close()
    gc.collect()

    assert [slot() for slot in slots] == [None, None]


def test_a_pickled_scheme_carries_no_slot_and_makes_its_own_when_it_connects(one: Pair, made: list[int]) -> None:
    copy = pickle.loads(pickle.dumps(one.scheme))
    assert made == [NBYTES] * 2

    ours, theirs = multiprocessing.Pipe()
    copy.init_on_sender("policy", pipes=[ours], model=large())
    assert made == [NBYTES] * 4
    copy.close()
    ours.close()
    theirs.close()


def test_the_kernel_is_asked_for_huge_pages_for_slots_and_for_heap_buffers() -> None:
    segment, heap = Segment(2**22), Pool(Buffer).acquire(2**22)
    asked, address = {}, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            address, end = (int(each, 16) for each in head.split("-"))
        elif head == "VmFlags:":
            asked[range(address, end)] = "hg" in line.split()
    places = [address_of(segment.view), address_of(heap.view)]
    has_huge_pages = Path("/sys/kernel/mm/transparent_hugepage").exists()

    assert [flag for span, flag in asked.items() for place in places if place in span] == [has_huge_pages] * 2


def test_all_memory_is_allocated_on_a_kernel_without_populate_write_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_MADV_POPULATE_WRITE", 9999)
    segment = Segment(NBYTES)

    assert os.fstat(segment.fd).st_blocks * 512 >= NBYTES


class RecordingMmap(mmap.mmap):
    """A mapping that records its calls of `madvise`."""

    asked: list[tuple[int, ...]]

    def madvise(self, *given: int) -> None:
        self.asked.append(given)
        super().madvise(*given)


def test_pages_are_populated_in_pieces_up_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 8 * mmap.PAGESIZE
    monkeypatch.setattr(buffers, "_PIECE_NBYTES", piece)
    mapping = RecordingMmap(-1, 20 * mmap.PAGESIZE)
    mapping.asked = []
    buffers._populate(mapping)

    populated = [(buffers._MADV_POPULATE_WRITE, start, piece) for start in (0, piece, 2 * piece)]
    assert mapping.asked == [(mmap.MADV_HUGEPAGE,), *populated]
    assert pages_mapped(Segment(20 * mmap.PAGESIZE))
