"""CUDA graphs that are captured in this process: they keep the addresses that were read while they were captured."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, Protocol
from weakref import WeakSet

from torch import nn

#: The log message once parameters may no longer move to a slot on a device.
CAPTURED: Final = (
    "map_on_device: this process has captured a CUDA graph, which keeps addresses; so parameters stay where they are "
    "from now on, and each version is copied into them"
)

#: The most seconds that a capture and a thread that receives wait for each other.
PATIENCE: Final = 5.0


class KeepsAddresses(Protocol):
    """An object that moves parameters to other memory, unless a CUDA graph may read them at their address."""

    def keep_addresses(self) -> None:
        """Move the parameters to memory of their own before this returns, and never move them again."""


class Captures:
    """Notifies its watchers before a graph is captured. Each of torch's ways to capture calls `capture_begin`.

    Captures also wait for threads that use the device `apart` from them. During a capture a wait for a whole device is
    an error, in every thread, and ends the capture; by default so are many other calls.

    Args:
        graph_class: torch's class of graphs. Its methods are wrapped once somebody asks to know of captures, watches,
            or is `apart`.
        after: called after the end of a capture, if no other is under way.
    """

    def __init__(self, graph_class: Any, after: Callable[[], None] = lambda: None) -> None:
        self._class = graph_class
        self._after = after
        self._watchers: WeakSet[KeepsAddresses] = WeakSet()
        self._lock = threading.Lock()
        self._wrapped = False
        self._changed = threading.Condition()
        #: The captures that are under way, by the id of the graph, and the threads that are `apart` from them.
        self._under_way: set[int] = set()
        self._apart: list[int] = []

    def know(self) -> None:
        """Have `under_way` include each capture that begins from now on."""
        with self._lock:
            self._wrap()

    def watch(self, watcher: KeepsAddresses) -> bool:
        """Call the watcher's `keep_addresses` before each capture; whether there are graphs already."""
        with self._lock:
            self._watchers.add(watcher)
            self._wrap()
        # By their types: `isinstance` would ask each object for its class, and some warn when they are asked anything.
        return any(issubclass(each, self._class) for each in _tracked_types())

    @property
    def under_way(self) -> bool:
        """Whether some thread captures a graph, as known from the first `know`, `watch` or `apart` on."""
        return bool(self._under_way)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A block during which no other thread captures. Of two threads the later one waits, up to `PATIENCE`."""
        ident = threading.get_ident()
        self.know()
        with self._changed:
            self._apart.append(ident)  # no further capture begins, also if one is under way
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._under_way, PATIENCE):
                    self._under_way.clear()  # the thread that began it has given it up
            yield
        finally:
            with self._changed:
                self._apart.remove(ident)
                self._changed.notify_all()

    def _on_capture_begin(self, graph: object) -> None:
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: all(each == own for each in self._apart), PATIENCE)
            self._under_way.add(id(graph))

    def _on_capture_end(self, graph: object) -> None:
        with self._changed:
            self._under_way.discard(id(graph))
            self._changed.notify_all()
        if not self._under_way:
            self._after()

    def _wrap(self) -> None:
        """Wrap the class, once. The caller holds the lock."""
        if self._wrapped:
            return
        self._wrapped = True
        original = self._class.capture_begin

        @functools.wraps(original)
        def capture_begin(graph: Any, *arguments: Any, **options: Any) -> Any:
            self._on_capture_begin(graph)
            try:
                with self._lock:
                    watchers = list(self._watchers)
                for watcher in watchers:
                    watcher.keep_addresses()
                return original(graph, *arguments, **options)
            except BaseException:
                self._on_capture_end(graph)
                raise

        self._class.capture_begin = capture_begin
        # torch 2.15 ends a capture with the second, which the first calls, and so does code that looks at the graph.
        for name in {"capture_end", "capture_end_pre"}.intersection(dir(self._class)):
            setattr(self._class, name, self._wrap_capture_end(getattr(self._class, name)))

    def _wrap_capture_end(self, end: Callable[..., Any]) -> Callable[..., Any]:
        """A method that ends a capture, wrapped."""

        @functools.wraps(end)
        def capture_end(graph: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return end(graph, *arguments, **options)
            finally:
                self._on_capture_end(graph)

        return capture_end


def _tracked_types() -> list[type]:
    """The types of all objects that the garbage collector tracks, frozen ones too: engines freeze after capturing."""
    if not gc.get_freeze_count():
        return _types_now()
    gc.unfreeze()
    try:
        gc.collect()  # garbage that is frozen is never freed, and may hold shared memory
        return _types_now()
    finally:
        gc.freeze()


def _types_now() -> list[type]:
    # One C call, during which no other thread runs: one that is making a tuple from an iterator would find another
    # reference to the tuple, and raise SystemError.
    return list(map(type, chain.from_iterable(map(gc.get_objects, (None,)))))


def must_not_move(destination: object) -> bool:
    """Whether a module of the destination needs its parameters where they are.

    That is one that torch has compiled, since its graphs may keep addresses; or an RNN: cuDNN needs its parameters in
    one chunk, in cuDNN's own order, or copies them into one at each forward.
    """
    # Called at each swap: going through `destination.modules()` takes more than twice as long.
    to_visit: list[nn.Module | None] = [destination] if isinstance(destination, nn.Module) else []
    seen: set[nn.Module | None] = {None}
    for module in to_visit:
        if module is None or module in seen:
            continue
        if module._compiled_call_impl is not None or type(module).__module__ == "torch._dynamo.eval_frame":
            return True
        if isinstance(module, nn.RNNBase):
            return True
        seen.add(module)
        to_visit += module._modules.values()
    return False
