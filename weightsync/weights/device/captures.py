"""CUDA graphs that are captured in this process: they keep the addresses that were read while they were captured."""

from __future__ import annotations

import functools
import gc
import threading
from typing import Any, Final, Protocol
from weakref import WeakSet

from torch import nn

#: The log message once parameters may no longer move to a slot on a device.
CAPTURED: Final = (
    "map_on_device: this process has captured a CUDA graph, which keeps addresses; so parameters stay where they are "
    "from now on, and each version is copied into them"
)


class KeepsAddresses(Protocol):
    """An object that moves parameters to other memory, unless a CUDA graph may read them at their address."""

    def keep_addresses(self) -> None:
        """Move the parameters to memory of their own before this returns, and never move them again."""


class Captures:
    """Tells its watchers before a graph is captured, by whatever means: each way of torch's calls `capture_begin`.

    Args:
        graph_class: torch's class of graphs. Its `capture_begin` is wrapped once somebody watches.
    """

    def __init__(self, graph_class: Any) -> None:
        self._class = graph_class
        self._watchers: WeakSet[KeepsAddresses] = WeakSet()
        self._lock = threading.Lock()
        self._wrapped = False

    def watch(self, watcher: KeepsAddresses) -> bool:
        """Call the watcher's `keep_addresses` before each capture; whether there are graphs already."""
        with self._lock:
            self._watchers.add(watcher)
            if not self._wrapped:
                self._wrap()
                self._wrapped = True
        # By their types: `isinstance` would ask each object for its class, and some warn when they are asked anything.
        return any(issubclass(type(each), self._class) for each in _tracked())

    def _wrap(self) -> None:
        begin = self._class.capture_begin

        @functools.wraps(begin)
        def capture_begin(graph: Any, *arguments: Any, **options: Any) -> Any:
            with self._lock:
                watchers = list(self._watchers)
            for watcher in watchers:
                watcher.keep_addresses()
            return begin(graph, *arguments, **options)

        self._class.capture_begin = capture_begin


def _tracked() -> list[Any]:
    """All objects that the garbage collector tracks, frozen ones too: engines call `gc.freeze` after capturing."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        gc.collect()  # garbage that is frozen is never freed, and may hold shared memory
        return gc.get_objects()
    finally:
        gc.freeze()


def is_compiled(destination: object) -> bool:
    """Whether torch has compiled a module of the destination: its graphs may keep the addresses of parameters."""
    # Asked at each swap: to go through `destination.modules()` takes more than twice as long.
    left: list[nn.Module | None] = [destination] if isinstance(destination, nn.Module) else []
    seen: set[nn.Module | None] = {None}
    for each in left:
        if each is None or each in seen:
            continue
        if each._compiled_call_impl is not None or type(each).__module__ == "torch._dynamo.eval_frame":
            return True
        seen.add(each)
        left += each._modules.values()
    return False
