"""A segment owns one descriptor, and never closes it again after its release. Missing memory is reported."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
from pathlib import Path

import pytest
from descriptor_limit import limit_descriptors

from weightsync.errors import TransportError
from weightsync.transports import buffers
from weightsync.transports.buffers import INLINE_BELOW_NBYTES, Buffer, Pool, Segment, Storage, anonymous
from weightsync.transports.mapping import Mapping
from weightsync.transports.memory_limit import require_memory

LARGE = 128 * 1024


def test_a_forgotten_segment_has_no_memory_and_never_closes_its_descriptor_again() -> None:
    segment = Segment(LARGE)
    number = segment.fd
    assert os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:weightsync ")
    with open(os.devnull, "rb") as null:
        segment.forget()
        # Take the same number if it is free, even if objects of other tests release lower numbers now.
        other = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, number)
    assert (other, segment.fd) == (number, -1)

    segment.forget()
    with pytest.raises(TransportError, match="belongs to the process that this one was forked from"):
        _ = segment.view
    del segment
    gc.collect()
    os.fstat(other)
    os.close(other)


def test_a_segment_that_could_not_be_allocated_closes_no_descriptor() -> None:
    with pytest.raises(
        TransportError, match=r"^No shared memory for \d+ bytes: only \d+ kB are available\. Free memory"
    ):
        Segment(2**50)
    gc.collect()

    for number in (0, 1, 2):
        os.fstat(number)


def test_a_segment_without_a_free_descriptor_raises_with_the_ulimit_command() -> None:
    with limit_descriptors(0), pytest.raises(TransportError, match=r"Too many open files\. Run `ulimit -n 4096`"):
        Segment(LARGE)


def test_a_segment_above_the_file_size_limit_raises_with_the_ulimit_command() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, limits[1]))
    try:
        with pytest.raises(TransportError, match=r"File too large\. Run `ulimit -f unlimited`"):
            Segment(LARGE)  # the seal comes on top
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Segment(LARGE).nbytes == LARGE


def machine(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """The paths of a machine's cgroups and of its ``/proc``, which have these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="ascii")
    return folder / "cgroup", folder / "proc"


@pytest.mark.parametrize("lines", ["MemTotal: 1 kB\nMemAvailable:   100 kB\nMemFree: 1 kB\n", "MemAvailable: 100 kB\n"])
def test_memory_beyond_what_the_machine_has_available_is_refused_to_the_byte(tmp_path: Path, lines: str) -> None:
    seen = machine(tmp_path, {"proc/meminfo": lines, "proc/self/cgroup": ""})
    require_memory(102_400, *seen)
    with pytest.raises(OSError, match=r"^\[Errno 0\] only 100 kB are available"):
        require_memory(102_401, *seen)


#: A pod is limited to 1,000,000 bytes and uses 400,000, besides caches. Its container has no limit.
POD = {
    "proc/self/cgroup": "0::/pod/container\n",
    "cgroup/pod/memory.max": "1000000\n",
    "cgroup/pod/memory.stat": "anon 300000\nfile 700000\nshmem 100000\n",
    "cgroup/pod/container/memory.max": "max\n",
}
#: The same with cgroups of version 1, seen from inside a container, whose own cgroup is mounted as the root.
DOCKER = {
    "proc/self/cgroup": "5:cpu:/docker/1\n4:memory:/docker/1\n0::/\n",
    "cgroup/memory/memory.limit_in_bytes": "1000000\n",
    "cgroup/memory/memory.stat": "cache 800000\nrss 1\ntotal_rss 300000\ntotal_shmem 100000\n",
}


@pytest.mark.parametrize("files", [POD, DOCKER])
def test_memory_beyond_the_limit_of_a_container_is_refused_to_the_byte(tmp_path: Path, files: dict[str, str]) -> None:
    seen = machine(tmp_path, files)
    require_memory(600_000, *seen)
    with pytest.raises(OSError, match=r"^\[Errno 0\] the memory limit of its container \(cgroup\) leaves 585 kB"):
        require_memory(600_001, *seen)

    machine(tmp_path, {"proc/meminfo": "SwapTotal: 9 kB\nSwapFree: 1 kB\n"})
    require_memory(601_024, *seen)


@pytest.mark.parametrize("own", ["0::/\n", "0::/../../elsewhere\n", "4:memory:/docker/1\n", ""])
def test_any_amount_of_memory_is_accepted_without_a_visible_limit(tmp_path: Path, own: str) -> None:
    seen = machine(tmp_path, {"proc/self/cgroup": own} if own else {})

    require_memory(2**62, *seen)


def test_a_segment_beyond_the_limit_of_a_container_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise OSError(0, f"its limit leaves less than {nbytes}")

    monkeypatch.setattr(buffers, "require_memory", refuse)
    told = rf"^No shared memory for {LARGE} bytes: its limit leaves less than {LARGE}\. Free memory"
    with pytest.raises(TransportError, match=told):
        Segment(LARGE)


def test_buffers_below_the_inline_limit_or_on_the_heap_have_no_segment() -> None:
    assert Buffer(INLINE_BELOW_NBYTES - 1, Storage.SEGMENTS).segment is None
    assert Buffer(INLINE_BELOW_NBYTES, Storage.SEGMENTS).segment is not None
    assert Buffer(INLINE_BELOW_NBYTES, Storage.HEAP).segment is None
    assert Pool().acquire(INLINE_BELOW_NBYTES).segment is not None


def test_anonymous_memory_that_cannot_be_allocated_raises_transport_error() -> None:
    with pytest.raises(TransportError, match=r"^No memory for a payload of \d+ bytes: "):
        anonymous(2**62)


def test_a_forked_childs_writes_into_a_heap_buffer_do_not_reach_the_parent() -> None:
    heap = anonymous(1)
    child = os.fork()
    if child == 0:
        heap[:1] = b"x"
        os._exit(0)
    os.waitpid(child, 0)

    assert heap[:1] == b"\0"


class RecordingPinner:
    """A function that pins memory for copies from a device, or returns None if it cannot."""

    def __init__(self, pins: bool) -> None:
        self.pins = pins
        self.asked: list[tuple[int, bool]] = []

    def __call__(self, view: memoryview) -> object | None:
        self.asked.append((view.nbytes, view.readonly))
        return object() if self.pins else None


@pytest.mark.parametrize("pins", [True, False])
def test_pinning_is_tried_once_whether_it_succeeds_or_not(pins: bool) -> None:
    segment, written, read = Segment(LARGE), RecordingPinner(pins), RecordingPinner(pins)
    mapping = Mapping(segment.fd, pinnable=True)
    for _ in range(2):
        segment.pin(written)
        pinned = mapping.pinned(8, read)
        assert (pinned is not None, mapping.pinnable) == (pins, pins)

    assert (written.asked, read.asked) == ([(LARGE + 16, False)], [(LARGE + 16, True)])


def test_a_mapping_that_is_not_pinnable_is_not_pinned() -> None:
    segment, read = Segment(LARGE), RecordingPinner(True)
    mapping = Mapping(segment.fd)

    assert (mapping.pinnable, mapping.pinned(8, read), read.asked) == (False, None, [])
