"""Segments, buffers, pools, and the pins that prevent writes to a payload that is being read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import stat

import pytest
import torch
from fleet import descriptors_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from pools import statistics
from torch import Tensor

from weightsync.errors import ProtocolError, TransportError
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Refusal, SlotRef, Update
from weightsync.transports import mapping as mappings
from weightsync.transports.buffers import (
    KEPT_PAYLOADS,
    SPARE_BUFFERS,
    Buffer,
    NoRoom,
    Pins,
    Pool,
    Segment,
    Storage,
)
from weightsync.transports.mapping import Mapping
from weightsync.transports.pipe.link import MAX_SEGMENTS, MappedSegments, NamedSegments
from weightsync.weights.tensors import address_of, owning

LARGE = 100_000


def update(version: int, incarnation: int = 1) -> Update:
    return Update(model_id="m", incarnation=incarnation, version=version, layout_digest=b"", nbytes=LARGE)


def ack(version: int, incarnation: int = 1) -> Ack:
    return Ack(model_id="m", incarnation=incarnation, version=version)


def refusal(version: int, kind: RefusalKind = RefusalKind.REFUSED, incarnation: int = 1) -> Refusal:
    return Refusal(model_id="m", incarnation=incarnation, version=version, kind=kind)


# ---------------------------------------------------------------------------------------------- segments


def test_a_segment_is_anonymous_and_cannot_be_resized_or_mapped_writable():
    segment = Segment(LARGE)

    assert "/memfd:" in os.readlink(f"/proc/self/fd/{segment.fd}")
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 10)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 2 * LARGE)
    with pytest.raises(PermissionError):
        mmap.mmap(segment.fd, LARGE, flags=mmap.MAP_SHARED)
    assert not os.get_inheritable(segment.fd)
    assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600


def test_a_segments_pages_are_allocated_before_the_first_write():
    segment = Segment(64 * 4096)

    assert os.fstat(segment.fd).st_blocks * 512 >= 64 * 4096


@pytest.mark.parametrize("nbytes", [2**50, 2**62])
def test_too_little_memory_raises_transport_error_and_no_signal(nbytes):
    with pytest.raises(TransportError, match="shared memory") as caught:
        Segment(nbytes)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_mapping_shows_the_peers_writes_and_keeps_its_own_private():
    segment = Segment(3 * 4096)
    mapping = Mapping(segment.fd)
    segment.view[:5] = b"first"
    assert mapping.view[:5] == b"first"
    mapping.view[:5] = b"wrong"
    mapping.view[2 * 4096 : 2 * 4096 + 3] = b"own"

    assert segment.view[:5] == b"first"
    segment.view[4096:4100] = b"next"
    assert mapping.view[4096:4100] == b"next"
    mapping.remap()
    assert bytes(segment.view) == bytes(mapping.view)


def test_a_mapping_reads_its_segments_seal_which_is_new_for_each_filling():
    segment, other = Segment(LARGE), Segment(LARGE)
    mapping = Mapping(segment.fd)
    assert mapping.seal == bytes(16)
    first = segment.sealed()
    assert first == segment.sealed() == mapping.seal != bytes(16)
    assert other.sealed() != first
    segment.unseal()
    assert mapping.seal == bytes(16)
    segment.view[:] = b"x" * LARGE

    assert segment.sealed() == mapping.seal != first
    assert (len(segment.view), mapping.nbytes, len(mapping.view)) == (LARGE, LARGE, LARGE)


def test_acquiring_a_buffer_again_clears_its_seal():
    pool = Pool()
    buffer = pool.acquire(LARGE)
    mapping = Mapping(buffer.segment.fd)
    buffer.segment.sealed()
    assert pool.acquire(LARGE) is buffer

    assert mapping.seal == bytes(16)


@pytest.fixture(params=[0, LARGE], ids=["a large segment", "a small one"])
def few(request, monkeypatch):
    """Set the size up to which a segment counts as small."""
    monkeypatch.setattr(mappings, "FEW_PAGES_NBYTES", request.param)


def no_other_views(_: memoryview) -> bool:
    """An argument of `Mapping.tidy` for a worker that keeps no views of received payloads."""
    return False


@pytest.mark.parametrize("few_nbytes", [0, LARGE - 1, LARGE])
def test_pages_of_a_small_segment_are_dropped_without_checking_for_own_pages(monkeypatch, few_nbytes):
    monkeypatch.setattr(mappings, "FEW_PAGES_NBYTES", few_nbytes)
    monkeypatch.setattr(mappings, "_has_own_pages", lambda *_: False)
    segment = Segment(LARGE)
    mapping = Mapping(segment.fd)
    mapping.view[:1] = b"x"
    mapping.remap()

    assert mapping.view[:1] == (b"\0" if few_nbytes == LARGE else b"x")


def test_pages_stay_mapped_unless_this_process_has_written_one(monkeypatch, few):
    def own():
        return mappings._has_own_pages(address_of(mapping.view), LARGE)

    segment = Segment(LARGE)
    mapping = Mapping(segment.fd)
    assert bytes(mapping.view) == bytes(LARGE)
    assert not own()
    looked = mappings.FEW_PAGES_NBYTES < LARGE
    assert mapping.remap() == (not looked)
    mapping.view[-1:] = b"x"
    assert own()
    assert mapping.remap()
    assert not own()
    mapping.view[:1] = b"x"
    monkeypatch.setattr(mappings, "_PAGEMAP", "/proc/self/nothing")
    assert own(), "without the kernel's page map, all pages count as written"
    mapping.remap()
    assert mapping.view[:1] == b"\0"


def test_tidy_drops_own_pages_of_a_slot_without_views_before_its_next_use(monkeypatch, few):
    segment = Segment(LARGE)
    mapping = Mapping(segment.fd)
    parameter = owning(mapping.lend(LARGE))[:4096].view(torch.int32)
    mapping.remap()
    parameter.fill_(7)
    del parameter
    mapping.tidy(no_other_views)

    assert bytes(mapping.view) == bytes(LARGE)
    monkeypatch.setattr(mappings, "_has_own_pages", None)
    payload = mapping.lend(LARGE)
    mapping.tidy(no_other_views)
    mapping.remap()
    assert bytes(payload) == bytes(LARGE)


@pytest.mark.parametrize("keep", [Tensor.numpy, Tensor.detach, lambda tensor: tensor[8:].view(torch.int32).view(2, -1)])
def test_a_slot_with_a_remaining_writable_view_is_checked_again_after_tidy(keep, few):
    segment = Segment(LARGE)
    mapping = Mapping(segment.fd)
    kept = keep(owning(mapping.lend(LARGE)))
    mapping.remap()
    mapping.tidy(no_other_views)
    kept[0:1] = 9
    mapping.lend(LARGE)
    mapping.remap()

    assert bytes(mapping.view) == bytes(LARGE)


def test_tidy_drops_own_pages_of_a_slot_whose_remaining_views_do_not_write(monkeypatch, few):
    segment = Segment(LARGE)
    mapping = Mapping(segment.fd)
    lent = mapping.lend(LARGE)
    mapping.remap()
    lent[:1] = b"x"
    mapping.tidy(lambda payload: payload is not lent)
    assert lent[:1] == b"x"

    mapping.tidy(lambda payload: payload is lent)
    monkeypatch.setattr(mappings, "_has_own_pages", None)
    mapping.remap()
    assert bytes(lent) == bytes(LARGE)


def test_own_pages_written_after_tidy_and_remap_are_dropped_by_the_next_remap(few):
    segment = Segment(LARGE)
    mapping = Mapping(segment.fd)
    mapping.tidy(no_other_views)
    mapping.remap()
    mapping.view[:1] = b"x"
    mapping.remap()

    assert bytes(mapping.view) == bytes(LARGE)


def test_memory_without_room_for_a_seal_is_not_mapped():
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 15)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(TransportError, match="no room for a seal"):
        Mapping(fd)
    os.close(fd)


def test_an_empty_segment_is_mapped_and_a_heap_buffer_has_no_seal():
    segment = Segment(0)

    assert Mapping(segment.fd).nbytes == 0
    assert Buffer(10).sealed() == b""


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOMEM, NoRoom), (errno.EMFILE, NoRoom), (errno.EACCES, TransportError), (None, TransportError)],
)
def test_a_mapping_that_fails_for_lack_of_resources_raises_no_room_else_transport_error(number, kind, monkeypatch):
    def mmap(*_, **__):
        raise OSError(number, "the reason") if number else ValueError("the reason")

    segment = Segment(LARGE)
    monkeypatch.setattr(mappings.mmap, "mmap", mmap)
    with pytest.raises(TransportError, match=r"cannot be mapped: .*the reason") as caught:
        Mapping(segment.fd)
    assert type(caught.value) is kind


def test_a_segment_is_mapped_on_a_kernel_without_madv_populate_read(monkeypatch):
    monkeypatch.setattr(mappings, "_MADV_POPULATE_READ", 9999)
    segment = Segment(LARGE)
    segment.view[:3] = b"abc"

    assert bytes(Mapping(segment.fd).view[:3]) == b"abc"


def test_unsealed_memory_and_pipes_are_not_mapped():
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(TransportError, match="not sealed"):
        Mapping(fd)
    os.close(fd)
    reading, writing = os.pipe()
    with pytest.raises(TransportError, match="cannot be mapped"):
        Mapping(reading)
    os.close(reading)
    os.close(writing)


def test_views_stay_valid_after_their_buffer_mapping_and_pool_are_freed():
    pool = Pool()
    buffer = pool.acquire(LARGE)
    mapping = Mapping(buffer.segment.fd)
    written, read = buffer.view[10:20], mapping.view[10:20]
    pool.close()
    del buffer, mapping, pool
    gc.collect()
    written[:] = b"still here"

    assert read == b"still here"


def test_a_segment_is_freed_with_its_last_view():
    buffer = Buffer(LARGE, Storage.SEGMENTS)
    view, inode = buffer.view, os.fstat(buffer.segment.fd).st_ino
    assert descriptors_of(inode) != []
    del buffer, view

    assert descriptors_of(inode) == []


@pytest.mark.parametrize("nbytes", [0, 1, 4096, LARGE])
def test_a_heap_buffer_has_exactly_the_requested_size(nbytes):
    buffer = Buffer(nbytes)

    assert (nbytes, nbytes, None) == (buffer.nbytes, len(buffer.view), buffer.segment)


# -------------------------------------------------------------------------------------------------- pool


@settings(max_examples=60, stateful_step_count=40)
class Pools(RuleBasedStateMachine):
    """A random test of a pool: it never returns a buffer that may still be read, and keeps few that are not."""

    buffers = Bundle("buffers")
    pins = Bundle("pins")
    sizes = st.integers(0, 5000)

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(Buffer)
        self.pinned: dict[int, set[int]] = {}
        self.retired: set[int] = set()
        #: Kept, so that no two buffers have the same id.
        self.known: list[Buffer] = []
        #: How many buffers of the pool were pinned when one was acquired last.
        self.pinned_then = 0

    @rule(target=buffers, nbytes=sizes)
    def acquire(self, nbytes):
        return self.acquired(nbytes)

    @rule(target=pins, nbytes=sizes, token=st.integers(0, 5))
    def acquire_and_pin(self, nbytes, token):
        return self.pin_with(self.acquired(nbytes), token)

    def acquired(self, nbytes):
        self.pinned_then = statistics(self.pool).pinned
        buffer = self.pool.acquire(nbytes)
        assert not self.pinned.get(id(buffer))
        assert id(buffer) not in self.retired
        assert buffer.nbytes >= nbytes
        self.known.append(buffer)
        return buffer

    @rule(target=pins, buffer=buffers, token=st.integers(0, 5))
    def pin(self, buffer, token):
        return self.pin_with(buffer, token)

    def pin_with(self, buffer, token):
        buffer.pin(token)
        self.pinned.setdefault(id(buffer), set()).add(token)
        return (buffer, token)

    @rule(pin=consumes(pins))
    def unpin(self, pin):
        buffer, token = pin
        buffer.unpin(token)
        self.pinned.get(id(buffer), set()).discard(token)

    @rule()
    def unpin_all(self):
        for buffer in self.known:
            for token in self.pinned.pop(id(buffer), set()):
                buffer.unpin(token)

    @rule(buffer=buffers)
    def retire(self, buffer):
        buffer.retire()
        self.retired.add(id(buffer))

    @rule(target=buffers)
    def close(self):
        self.pool.close()
        return multiple()

    @invariant()
    def holds_little_more_than_what_is_pinned(self):
        held = statistics(self.pool)
        pinned = [key for key, tokens in self.pinned.items() if tokens and key not in self.retired]
        assert held.pinned <= len(pinned)
        assert held.buffers <= self.pinned_then + 1 + SPARE_BUFFERS


TestPools = Pools.TestCase


def test_a_pool_prefers_the_smallest_buffer_that_fits_and_keeps_one_spare():
    pool = Pool(Buffer)
    made = [pool.acquire(size) for size in (300, 100, 200)]
    kept = []
    for size in (300, 100, 200, 400):
        buffer = pool.acquire(size)
        buffer.pin("held")
        kept.append(buffer)
    for buffer in kept:
        buffer.unpin("held")

    assert kept[1] is pool.acquire(90)
    assert statistics(pool).buffers == 1 + SPARE_BUFFERS
    assert made


def test_a_pool_drops_a_third_buffer_that_is_no_longer_needed_after_some_payloads():
    """Otherwise a worker that was slow once would cost the memory of one more payload forever."""
    pool, in_use = Pool(Buffer), []
    for _ in range(3):  # one is served, one is unanswered, and one is being filled
        in_use.append(pool.acquire(100))
        in_use[-1].pin("a worker")
    numbers = []
    for _ in range(KEPT_PAYLOADS + 1):
        for buffer in in_use[:-1]:  # the worker acks the newest
            buffer.unpin("a worker")
        in_use = [in_use[-1], pool.acquire(100)]
        in_use[-1].pin("a worker")
        numbers.append(statistics(pool).buffers)

    assert numbers == [3] * (KEPT_PAYLOADS - 1) + [2] * 2


def test_a_retired_buffer_is_never_acquired_again():
    pool = Pool()
    first = pool.acquire(LARGE)
    first.retire()

    assert first is not pool.acquire(LARGE)
    assert statistics(pool).segments == 1


def test_a_buffer_retired_by_another_thread_during_acquire_is_not_acquired():
    """A worker that cannot be reached may still map the buffer, and would serve parts of two versions."""
    link, pool = Pins(), Pool(Buffer)

    class LastPins(set):
        def __len__(self):
            link.retire()  # as another thread may do at any time
            return super().__len__()

    buffer = pool.acquire(10)
    buffer.pins = LastPins()
    link.hold(update(1), buffer)
    assert pool.acquire(10) is not buffer
    assert (len(buffer.pins), buffer.retired) == (0, True)


def test_a_pool_takes_the_smaller_of_two_buffers_and_skips_a_retired_one():
    pool = Pool(Buffer)
    large = pool.acquire(300)
    large.pin("held")
    small = pool.acquire(100)
    large.unpin("held")
    assert pool.acquire(90) is small
    small.pin("held")
    assert pool.acquire(90) is large

    small.retire()
    assert pool.acquire(90) is large


# -------------------------------------------------------------------------------------------------- pins


def test_a_payload_stays_pinned_until_a_newer_version_is_acked():
    pins, old, new = Pins(), Buffer(1), Buffer(1)
    pins.hold(update(1), old)
    pins.answered(ack(1))
    assert old.pinned
    pins.hold(update(2), new)
    assert old.pinned
    pins.answered(ack(2))

    assert (old.pinned, new.pinned) == (False, True)


def test_pins_compare_incarnations_before_versions():
    pins, old, new = Pins(), Buffer(1), Buffer(1)
    pins.hold(update(9, incarnation=1), old)
    pins.hold(update(1, incarnation=2), new)
    pins.answered(ack(1, incarnation=2))

    assert (old.pinned, new.pinned) == (False, True)


@pytest.mark.parametrize("kind", RefusalKind)
def test_a_refusal_unpins_only_the_version_that_it_names(kind):
    pins, served, refused = Pins(), Buffer(1), Buffer(1)
    pins.hold(update(1), served)
    pins.answered(ack(1))
    pins.hold(update(2), refused)
    pins.answered(refusal(2, kind))

    assert (served.pinned, refused.pinned) == (True, False)


def test_a_refusal_of_an_acked_version_unpins_nothing():
    pins, served = Pins(), Buffer(1)
    pins.hold(update(1), served)
    pins.answered(ack(1))
    pins.answered(refusal(1, RefusalKind.STALE))

    assert served.pinned


def test_two_links_pin_one_buffer_independently():
    first, second, buffer = Pins(), Pins(), Buffer(1)
    for pins in (first, second):
        pins.hold(update(1), buffer)
    first.release()
    assert buffer.pinned
    second.release()

    assert not buffer.pinned


def test_buffers_of_an_unreachable_worker_are_retired():
    pins, pool = Pins(), Pool(Buffer)
    buffer = pool.acquire(10)
    pins.hold(update(1), buffer)
    pins.retire()

    assert (buffer.pinned, buffer.retired) == (False, True)
    assert buffer is not pool.acquire(10)


# ----------------------------------------------------------------------------------------------- sharing


@settings(max_examples=60, stateful_step_count=40)
class Sharing(RuleBasedStateMachine):
    """A random test of both ends' lists of segments: they stay equal, and lost segments are passed again."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.mapped = NamedSegments(), MappedSegments()
        self.version = 0
        self.segments = [Segment(4096) for _ in range(MAX_SEGMENTS + 3)]
        for segment in self.segments:
            segment.view[:8] = segment.number.to_bytes(8, "big")

    @rule(index=st.integers(0, MAX_SEGMENTS + 2), fate=st.sampled_from(["taken", "refused", "dropped"]))
    def name(self, index, fate):
        segment = self.segments[index]
        self.version += 1
        passed = self.named.missing(segment)
        self.named.name(segment, update(self.version))
        slot = SlotRef(segment=segment.number)
        if passed and fate == "dropped":
            with contextlib.suppress(NoRoom):
                self.mapped.find(slot, (), "no descriptor")
        else:
            mapping = self.mapped.find(slot, tuple(map(os.dup, passed)))
            assert segment.number.to_bytes(8, "big") == mapping.view[:8]
        if fate != "taken":
            self.named.answered(refusal(self.version, RefusalKind.REFUSED))

    @invariant()
    def bounded(self):
        assert len(self.named._keys) <= MAX_SEGMENTS
        assert self.named._to_pass_again <= set(self.named._keys)
        assert list(self.named._keys) == list(self.mapped._mappings)


TestSharing = Sharing.TestCase


def test_a_segment_passed_again_replaces_the_mapping_with_its_number():
    mapped, right, wrong = MappedSegments(), Segment(4096), Segment(4096)
    slot = SlotRef(segment=7)
    assert mapped.find(slot, (os.dup(wrong.fd),)).seal == bytes(16)
    seal = right.sealed()
    assert mapped.find(slot, (os.dup(right.fd),)).seal == seal

    assert mapped.find(slot, (), "no descriptor").seal == seal


def test_a_segment_that_was_never_passed_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="segment 7"):
        MappedSegments().find(SlotRef(segment=7), ())


def test_a_segment_has_the_kernels_shrink_and_seal_seals():
    segment = Segment(4096)
    seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS)

    assert fcntl.F_SEAL_SHRINK & seals
    assert fcntl.F_SEAL_SEAL & seals


def test_an_ack_of_a_version_that_was_never_sent_unpins_nothing():
    pins, buffer = Pins(), Buffer(1)
    pins.hold(update(1), buffer)
    pins.answered(ack(9))
    assert buffer.pinned
    pins.hold(update(9), None)
    pins.answered(ack(9))

    assert not buffer.pinned


def test_views_kept_from_an_earlier_update_are_still_tracked_after_a_later_one():
    segment = Segment(LARGE)
    mapping = Mapping(segment.fd)
    kept = owning(mapping.lend(LARGE))
    mapping.remap()
    mapping.lend(LARGE)
    mapping.tidy(no_other_views)
    kept[0:1] = 9
    mapping.remap()

    assert bytes(mapping.view) == bytes(LARGE)
