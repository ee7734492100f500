"""A fake GPU: its kernels run in threads, on shared memory of the host.

A launch returns at once, and its kernel runs later, in the order of its stream. So a missing wait shows as a torn read,
as it would on a GPU. While the device is installed, it counts as the device of all CPU tensors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from queue import SimpleQueue
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from weightsync.protocol.messages import SEAL_NBYTES
from weightsync.weights.device.base import Device, DeviceError, DeviceMemory, Piece
from weightsync.weights.device.captures import KeepsAddresses
from weightsync.weights.device.registry import installed
from weightsync.weights.tensors import SlotViews

Kernel = Callable[[], None]


class Lane(NamedTuple):
    """One stream of one process. A test may simulate several processes in one."""

    process: str = "this process"
    stream: str = "default"


_lane: ContextVar[Lane] = ContextVar("lane", default=Lane())  # noqa: B039 - a tuple


@contextlib.contextmanager
def acting_as(process: str, stream: str = "default") -> Iterator[None]:
    """Inside the block, act as this process with this current stream."""
    token = _lane.set(Lane(process, stream))
    try:
        yield
    finally:
        _lane.reset(token)


class _Stream:
    """Runs kernels in order, on a thread of its own."""

    def __init__(self) -> None:
        self._kernels: SimpleQueue[Kernel | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake device", daemon=True)
        self._thread.start()

    def launch(self, kernel: Kernel) -> None:
        with self._changed:
            self._unfinished += 1
        self._kernels.put(kernel)

    def _run(self) -> None:
        while (kernel := self._kernels.get()) is not None:
            try:
                kernel()
            except BaseException as error:  # noqa: BLE001 - the next wait raises it, as on a GPU
                self._error = error
            del kernel  # or this thread would keep its tensors alive
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    @property
    def busy(self) -> bool:
        return self._unfinished > 0

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)
            error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"A kernel failed: {error!r}.") from error

    def close(self) -> None:
        self._kernels.put(None)
        self._thread.join()


class Pinned:
    """Marks host memory as pinned for as long as this object exists."""

    def __init__(self, view: memoryview) -> None:
        self.view = view


class FakeDevice:
    """A `weightsync.weights.device.base.Device`. Close it to end its threads.

    Args:
        capacity: the size of the device's memory, in bytes.
    """

    identity = b"fake device 0001"

    def __init__(self, capacity: int = 2**30) -> None:
        self._free = capacity
        self._streams: dict[Lane, _Stream] = {}
        self._watchers: WeakSet[KeepsAddresses] = WeakSet()
        self._captured = False
        self._forms: WeakKeyDictionary[object, list[object]] = WeakKeyDictionary()
        #: Called between two tensors of a copy, on the stream of the copy.
        self.between: Kernel = lambda: None
        #: Set when a call waits for kernels that have not ended.
        self.waited = threading.Event()
        #: Whether host memory can be pinned, and which memory is.
        self.can_pin = True
        self.pinned: WeakSet[Pinned] = WeakSet()

    def opens(self) -> tuple[bytes, ...]:
        """The identity of this device: it cannot open the memory of any other."""
        return (self.identity,)

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Allocate shared memory of the host."""
        if nbytes > self._free:
            raise DeviceError(f"The fake device has {self._free} bytes left, {nbytes} were wanted.")
        fd = os.memfd_create("weightsync fake device", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes + SEAL_NBYTES)
        self._free -= nbytes
        return DeviceMemory(self, _flat(fd, nbytes), fd)

    def open(self, fd: int, nbytes: int) -> DeviceMemory:
        """Map the memory of an allocation again."""
        try:
            return DeviceMemory(self, _flat(fd, nbytes))
        except (OSError, ValueError) as error:
            raise DeviceError(f"The fake device cannot open a slot of {nbytes} bytes: {error}.") from error

    def launch(self, kernel: Kernel) -> None:
        """Queue a kernel on the current stream, and return at once."""
        lane = _lane.get()
        if lane not in self._streams:
            self._streams[lane] = _Stream()
        self._streams[lane].launch(kernel)

    def copy(self, into: Sequence[Tensor], tensors: Sequence[Tensor], form_key: object | None = None) -> None:
        """Launch a kernel that copies tensor by tensor, and check that equal keys mean equal forms of the tensors."""
        pairs = list(zip(into, tensors, strict=True))

        def kernel() -> None:
            if form_key is not None:
                form = [_form_of(each, isinstance(some, SlotViews)) for some in (into, tensors) for each in some]
                assert self._forms.setdefault(form_key, form) == form
            with torch.inference_mode():
                for index, (target, source) in enumerate(pairs):
                    if index:
                        self.between()
                    target.copy_(source)

        self.launch(kernel)

    def to_host(self, pieces: Sequence[Piece]) -> None:
        """Copy to the host, with one kernel for each piece."""
        with torch.inference_mode():
            for piece in pieces:
                self.copy(piece.among(piece.host), piece.tensors, piece.form_key)
        self.finish()

    def from_host(self, pieces: Sequence[Piece]) -> None:
        """Copy from the host, with one kernel for each piece."""
        with torch.inference_mode():
            for piece in pieces:
                self.copy(piece.tensors, piece.among(piece.host), piece.form_key)
        self.finish()

    def register(self, view: memoryview, read_only: bool) -> object | None:
        """Note the memory as pinned, without changing it. Returns None if it cannot be pinned."""
        if not self.can_pin or view.readonly is not read_only:
            return None
        made = Pinned(view)
        self.pinned.add(made)
        return made

    def watch_captures(self, watcher: KeepsAddresses) -> bool:
        """Register a watcher for `FakeDevice.capture`. Returns whether a graph was captured already."""
        self._watchers.add(watcher)
        return self._captured

    def capture(self) -> None:
        """Tell all watchers that a graph, which keeps addresses, is being captured."""
        for watcher in list(self._watchers):
            watcher.keep_addresses()
        self._captured = True

    def finish(self) -> None:
        """Wait for the current stream."""
        self._drain(stream for lane, stream in self._streams.items() if lane == _lane.get())

    def synchronize(self) -> None:
        """Wait for all streams of the current process."""
        self._drain(stream for lane, stream in self._streams.items() if lane.process == _lane.get().process)

    def _drain(self, streams: Iterator[_Stream]) -> None:
        for stream in list(streams):
            if stream.busy:
                self.waited.set()
            stream.drain()

    def close(self) -> None:
        """End the threads of all streams, once their kernels have ended."""
        for stream in self._streams.values():
            stream.close()


def _form_of(tensor: Tensor, in_slot: bool) -> object:
    """What a device may cache about a tensor that it copies repeatedly: the address too, except for a slot's views."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, 0 if in_slot else tensor.data_ptr()


def _flat(fd: int, nbytes: int) -> Tensor:
    if os.fstat(fd).st_size < nbytes + SEAL_NBYTES:
        raise ValueError("it is smaller")
    return torch.frombuffer(mmap.mmap(fd, nbytes + SEAL_NBYTES), dtype=torch.uint8)


class _Backend:
    def __init__(self, fake: FakeDevice) -> None:
        self._fake = fake

    def device(self, place: torch.device) -> Device | None:
        return self._fake

    def named(self, identity: bytes) -> Device | None:
        return self._fake if identity == self._fake.identity else None


@contextlib.contextmanager
def fake_device(device: FakeDevice | None = None) -> Iterator[FakeDevice]:
    """Make a fake device the device of all CPU tensors in this process."""
    made = device or FakeDevice()
    with installed("cpu", _Backend(made)):
        try:
            yield made
        finally:
            made.close()
