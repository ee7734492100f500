"""CUDA devices: their memory by the driver, their kernels by torch."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from weightsync.protocol.messages import SEAL_NBYTES
from weightsync.weights.device.base import STAGING_NBYTES, DeviceError, DeviceMemory, Piece
from weightsync.weights.device.captures import Captures, KeepsAddresses
from weightsync.weights.device.driver import Driver
from weightsync.weights.tensors import (
    BITS,
    Group,
    SlotViews,
    address_of,
    borrowed,
    copy_groups,
    groups_of,
    is_lazily_changed,
)

logger = logging.getLogger("weightsync")


class _Mapping:
    """Memory that is mapped here until the last tensor that views it is gone.

    torch keeps this object for as long as a tensor made of it lives.
    """

    def __init__(self, driver: Driver, ordinal: int, address: int, nbytes: int) -> None:
        self._driver, self._ordinal, self._address, self._nbytes = driver, ordinal, address, nbytes
        self._pid = os.getpid()
        captures().know()  # which may be under way when this goes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch needs to view it as a tensor."""
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 2}

    def __del__(self) -> None:
        # At the end of the process the driver frees it; in a forked child it is the parent's, and there is no CUDA.
        if not sys.is_finalizing() and self._pid == os.getpid():
            _release(self._ordinal, partial(self._driver.unmap, self._address, self._nbytes))


class _Pinned:
    """Memory of the host that is pinned until this is gone. It keeps the memory mapped."""

    def __init__(self, driver: Driver, ordinal: int, view: memoryview, read_only: bool) -> None:
        self._driver, self._ordinal, self._view = driver, ordinal, view
        self._address, self._pid = address_of(view), -1
        captures().know()
        with torch.cuda.device(ordinal):
            torch.cuda.synchronize()  # makes the context the current one of this thread
            driver.pin(self._address, -(-view.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, read_only)
        self._pid = os.getpid()

    def __del__(self) -> None:
        # As in `_Mapping`. Memory that was unmapped while pinned would be taken for what is mapped there next.
        if not sys.is_finalizing() and self._pid == os.getpid():
            _release(self._ordinal, partial(_unpin, self._driver, self._address, self._view))


def _unpin(driver: Driver, address: int, _view: memoryview) -> None:
    driver.unpin(address)


#: What is to be released, each with its device.
_unreleased: Final[deque[tuple[int, Callable[[], None]]]] = deque()


def _release(ordinal: int, undo: Callable[[], None]) -> None:
    """Unmap or unpin memory once no kernel uses it. The garbage collector may call this anywhere, in any thread."""
    _unreleased.append((ordinal, undo))
    release_pending()


def release_pending() -> None:
    """Release what is to be released, unless a graph is being captured, which waiting for the device would end."""
    try:
        while _unreleased and not is_capturing():
            ordinal, undo = _unreleased.popleft()
            with torch.cuda.device(ordinal):
                torch.cuda.synchronize()
                undo()
    except IndexError:  # another thread has taken the last
        pass
    except Exception as error:  # noqa: BLE001 - a device that failed fails every call; its process can only end
        logger.debug("memory of a GPU, or pinned for one, could not be released: %s", error)


class Bounce:
    """Pinned memory through which bytes that are not pinned cross to a device, a part at a time.

    The driver would copy them through pinned memory of its own, on one thread, while nothing else of ours crosses.

    Args:
        areas: the memory, of `STAGING_NBYTES` bytes each, used in turn.
    """

    def __init__(self, areas: tuple[Tensor, Tensor]) -> None:
        self._areas = areas
        self._crossed: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy of bytes of the host in the current stream, which is ``stream``."""
        for start in range(0, source.numel(), STAGING_NBYTES):
            part, before = source[start : start + STAGING_NBYTES], self._crossed[self._turn]
            if before is not None:
                before.synchronize()  # what was in this area before has left it
            area = self._areas[self._turn][: part.numel()]
            area.copy_(part)
            target[start : start + STAGING_NBYTES].copy_(area, non_blocking=True)
            self._crossed[self._turn] = stream.record_event()
            self._turn = 1 - self._turn


class _CopyPlan:
    """How tensors that stay in place are copied to and from slots, again and again."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self._as_they_are = all(group.bits is None for group in groups)
        self._bits: list[Tensor] | None = None

    def bound(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors, with their views as what they are copied bit for bit, which are made once."""
        if self._as_they_are:
            return tensors
        if self._bits is None:
            with torch.inference_mode():
                bits = list(map(_place_of, tensors))
            # Managed memory may count as another device's: torch then views a copy.
            self._as_they_are = list(map(Tensor.data_ptr, bits)) != list(map(Tensor.data_ptr, tensors))
            if self._as_they_are:
                return tensors
            self._bits = bits
        found = SlotViews(tensors)
        found.bits = self._bits
        return found


def _place_of(tensor: Tensor) -> Tensor:
    """View where a tensor's elements are as what they are copied bit for bit. Its memory is not kept."""
    kind = BITS.get(tensor.dtype, tensor.dtype)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel():
        return torch.empty_like(tensor, dtype=kind)
    elements = viewed(tensor.data_ptr(), span * tensor.itemsize, tensor.device).view(kind)
    return elements.as_strided(tensor.shape, tensor.stride())


def viewed(address: int, nbytes: int, place: torch.device) -> Tensor:
    """View memory of a device, or of the host, that somebody else keeps."""
    if place.type == "cpu":
        return borrowed(address, nbytes)
    found = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=found), device=place)


class CudaDevice:
    """A CUDA device of this process: see `Device`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        #: Held while pieces cross: there is one staging area.
        self._crossing = threading.Lock()
        self._warned_unpinned = False
        self._planned: WeakKeyDictionary[object, _CopyPlan] = WeakKeyDictionary()

    @cached_property
    def identity(self) -> bytes:
        """See `Device.identity`."""
        return self._driver.identity(self._ordinal)

    @cached_property
    def _peers(self) -> list[int]:
        others = [peer for peer in range(torch.cuda.device_count()) if peer != self._ordinal]
        return [peer for peer in others if self._driver.reaches(self._ordinal, peer)]

    def opens(self) -> tuple[bytes, ...]:
        """See `Device.opens`."""
        return self.identity, *(self._driver.identity(peer) for peer in self._peers)

    def allocate(self, nbytes: int) -> DeviceMemory:
        """See `Device.allocate`."""
        release_pending()
        torch.cuda.synchronize(self._ordinal)  # also makes the device's context
        try:
            handle, size = self._driver.create(self._ordinal, nbytes + SEAL_NBYTES)
        except DeviceError:
            torch.cuda.empty_cache()  # torch may keep what it does not use
            handle, size = self._driver.create(self._ordinal, nbytes + SEAL_NBYTES)
        try:
            fd = self._driver.export(handle)
            try:
                return DeviceMemory(self, self._mapped(handle, size, [self._ordinal]), fd)
            except BaseException:
                os.close(fd)
                raise
        finally:
            self._driver.release(handle)

    def open(self, fd: int, nbytes: int) -> DeviceMemory:
        """See `Device.open`."""
        release_pending()
        try:
            torch.cuda.synchronize(self._ordinal)
        except RuntimeError as error:  # no context there: it is full, or only one process at a time may use it
            raise DeviceError(f"This process cannot use cuda:{self._ordinal}: {error}.") from error
        handle = self._driver.take(fd)
        try:
            readers = [peer for peer in self._peers if self._driver.reaches(peer, self._ordinal)]
            return DeviceMemory(self, self._mapped(handle, nbytes + SEAL_NBYTES, [self._ordinal, *readers]))
        finally:
            self._driver.release(handle)

    def _mapped(self, handle: int, nbytes: int, ordinals: Sequence[int]) -> Tensor:
        with torch.cuda.device(self._ordinal):
            address = self._driver.map(handle, nbytes, ordinals)
            mapping = _Mapping(self._driver, self._ordinal, address, nbytes)
            return torch.as_tensor(mapping, device=f"cuda:{self._ordinal}")

    def copy(self, into: Sequence[Tensor], tensors: Sequence[Tensor], form_key: object | None = None) -> None:
        """See `Device.copy`."""
        planned = None if form_key is None else self._planned.get(form_key)
        if planned is not None:
            if isinstance(into, SlotViews):
                tensors = planned.bound(tensors)
            elif isinstance(tensors, SlotViews):
                into = planned.bound(into)
        else:
            planned = _CopyPlan(groups_of(into, tensors))
            if form_key is not None:
                self._planned[form_key] = planned
        copy_groups(planned.groups, into, tensors)

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._ordinal)  # type: ignore[no-untyped-call]

    @cached_property
    def _staging(self) -> tuple[Tensor, Tensor] | None:
        """Memory in which pieces are gathered; None: there is none, and each tensor crosses by itself."""
        try:
            with torch.inference_mode(False):
                first, second = torch.empty((2, STAGING_NBYTES), dtype=torch.uint8, device=f"cuda:{self._ordinal}")
        except torch.cuda.OutOfMemoryError:
            text = "weights cross between cuda:%d and the host one by one: it has no memory to gather them in"
            logger.warning(text, self._ordinal)
            return None
        return first, second

    @cached_property
    def _bounce(self) -> Bounce:
        with torch.inference_mode(False):
            first, second = torch.empty((2, STAGING_NBYTES), dtype=torch.uint8, device="cpu", pin_memory=True)
        return Bounce((first, second))

    def to_host(self, pieces: Sequence[Piece]) -> None:
        """See `Device.to_host`."""
        current_stream = torch.cuda.current_stream(self._ordinal)
        with self._synchronize_streams(current_stream), torch.inference_mode():
            free_events: list[torch.cuda.Event | None] = [None, None]
            areas = self._staging
            for turn, piece in enumerate(pieces):
                if areas is None or piece.host.numel() > STAGING_NBYTES:
                    with torch.cuda.stream(self._beside):
                        self.copy(piece.among(piece.host), piece.tensors, piece.form_key)
                    continue
                staged = areas[turn % 2][: piece.host.numel()]
                free_event = free_events[turn % 2]
                if free_event is not None:
                    current_stream.wait_event(free_event)
                with torch.cuda.stream(current_stream):
                    self.copy(piece.among(staged), piece.tensors, piece.form_key)
                self._beside.wait_event(current_stream.record_event())
                with torch.cuda.stream(self._beside):
                    piece.host.copy_(staged, non_blocking=True)
                free_events[turn % 2] = self._beside.record_event()

    def from_host(self, pieces: Sequence[Piece]) -> None:
        """See `Device.from_host`."""
        current_stream = torch.cuda.current_stream(self._ordinal)
        with self._synchronize_streams(current_stream), torch.inference_mode():
            free_events: list[torch.cuda.Event | None] = [None, None]
            areas = self._staging
            for turn, piece in enumerate(pieces):
                if areas is None or piece.host.numel() > STAGING_NBYTES:
                    self._send_one_by_one(piece)
                    continue
                staged = areas[turn % 2][: piece.host.numel()]
                free_event = free_events[turn % 2]
                if free_event is not None:
                    self._beside.wait_event(free_event)
                self._send(staged, piece.host)
                current_stream.wait_event(self._beside.record_event())
                with torch.cuda.stream(current_stream):
                    self.copy(piece.tensors, piece.among(staged), piece.form_key)
                free_events[turn % 2] = current_stream.record_event()

    def _send_one_by_one(self, piece: Piece) -> None:
        """Queue the copies of tensors for which there is no room in a staging area, one by one."""
        for target, source in zip(piece.tensors, piece.among(piece.host), strict=True):
            plain = target.is_contiguous() and source.is_contiguous() and not is_lazily_changed(target)
            if plain and target.dtype is source.dtype:
                self._send(target.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8))
            else:
                with torch.cuda.stream(self._beside):
                    self.copy([target], [source])

    def _send(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of bytes of the host in the stream beside."""
        with torch.cuda.stream(self._beside):
            if source.is_pinned():
                target.copy_(source, non_blocking=True)
            else:
                self._bounce.send(target, source, self._beside)

    @contextlib.contextmanager
    def _synchronize_streams(self, current_stream: torch.cuda.Stream) -> Iterator[None]:
        """A block whose kernels in both streams begin behind those of ``current_stream``, and end with the block."""
        with self._crossing, torch.cuda.device(self._ordinal):
            self._beside.wait_stream(current_stream)
            try:
                yield
            finally:
                current_stream.synchronize()
                self._beside.synchronize()

    def register(self, view: memoryview, read_only: bool) -> object | None:
        """See `Device.register`."""
        if read_only and not self._driver.pins_read_only(self._ordinal):
            return None
        try:
            return _Pinned(self._driver, self._ordinal, view, read_only)
        except DeviceError as error:
            if not self._warned_unpinned:
                text = (
                    "weights cross between cuda:%d and the host with one more copy: shared memory cannot be pinned: %s"
                )
                logger.warning(text, self._ordinal, error)
                self._warned_unpinned = True
            return None

    def watch_captures(self, watcher: KeepsAddresses) -> bool:
        """See `Device.watch_captures`."""
        return captures().watch(watcher)

    def finish(self) -> None:
        """See `Device.finish`."""
        torch.cuda.current_stream(self._ordinal).synchronize()

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.cuda.synchronize(self._ordinal)


class CudaBackend:
    """The CUDA devices of this process: see `Backend`."""

    def device(self, place: torch.device) -> CudaDevice | None:
        """See `Backend.device`."""
        return _device(torch.cuda.current_device() if place.index is None else place.index)

    def named(self, identity: bytes) -> CudaDevice | None:
        """See `Backend.named`."""
        known = (_device(ordinal) for ordinal in range(torch.cuda.device_count()))
        return next((device for device in known if device is not None and device.identity == identity), None)


@lru_cache(maxsize=1)
def captures() -> Captures:
    """The captures of graphs in this process."""
    return Captures(torch.cuda.CUDAGraph, after=release_pending)


def is_capturing() -> bool:
    """Whether a graph is being captured, as far as is known of other threads."""
    return captures().under_way or torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=64)
def _device(ordinal: int) -> CudaDevice | None:
    try:
        driver = Driver()
        shares = driver.shares(ordinal)
    except DeviceError as error:
        logger.warning("weights on cuda:%d are copied through host memory: %s", ordinal, error)
        return None
    if not shares:
        logger.warning("weights on cuda:%d are copied through host memory: its own memory cannot be shared", ordinal)
        return None
    return CudaDevice(driver, ordinal)
