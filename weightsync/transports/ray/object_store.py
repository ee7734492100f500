"""Senders' payloads in Ray's object store: each version is there once, for all workers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from weightsync.protocol.messages import Update
from weightsync.transports.buffers import Buffer
from weightsync.transports.ray.session import require_ray

#: Converts an update and its payload into the object to store.
Present = Callable[[Update, memoryview], Any]


class CachedObject:
    """One sender's newest version in the object store."""

    def __init__(self, present: Present, **options: Any) -> None:
        self._present = present
        self._options = options
        self._lock = threading.Lock()
        self._version = 0
        self._ref: Any = None

    def put(self, update: Update, payload: Buffer | None) -> Any:
        """The reference of a version, which is put now unless it is the newest and was put before."""
        with self._lock:
            if self._ref is not None and self._version == update.version:
                return self._ref
            if update.version > self._version:
                self._ref = None  # otherwise a store that holds one version only would never take the next
            view = memoryview(b"") if payload is None else payload.view[: update.nbytes]
            ref = require_ray("RayWeightSyncScheme").put(self._present(update, view), **self._options)
            # Only late joiners need older versions, and the calls that carry them keep them alive.
            if update.version >= self._version:
                self._version, self._ref = update.version, ref
            return ref

    def forget(self, version: int) -> None:
        """Forget a version whose object was lost. It is put again when it is next needed."""
        with self._lock:
            if self._version == version:
                self._ref = None


class ObjectCache:
    """The cached objects of all senders of one scheme. Each lives while a call client of its sender is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: weakref.WeakValueDictionary[tuple[str, int], CachedObject] = weakref.WeakValueDictionary()

    def cached(self, kind: str, incarnation: int, make: Callable[[], CachedObject]) -> CachedObject:
        """The cached object of one kind for the sender with that incarnation."""
        with self._lock:
            found = self._objects.get((kind, incarnation))
            if found is None:
                found = self._objects[kind, incarnation] = make()
            return found


class ObjectCaches:
    """One kind of cached object in an object cache, for the call clients of a scheme."""

    def __init__(self, cache: ObjectCache, kind: str, present: Present, **options: Any) -> None:
        self._cache = cache
        self._kind = kind
        self._make = lambda: CachedObject(present, **options)

    def of(self, incarnation: int) -> CachedObject:
        """The cached object of one sender."""
        return self._cache.cached(self._kind, incarnation, self._make)
