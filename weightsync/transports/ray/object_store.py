"""What senders keep in Ray's object store: a version's payload lies there once, for all its workers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from weightsync.protocol.messages import Update
from weightsync.transports.buffers import Buffer
from weightsync.transports.ray.session import require_ray

#: Makes of an update and its payload what goes into the object store.
Present = Callable[[Update, memoryview], Any]


class CachedObject:
    """What one sender keeps in the object store: its newest version.

    Args:
        present: makes of an update and its payload what is put.
        options: for `ray.put`.
    """

    def __init__(self, present: Present, **options: Any) -> None:
        self._present = present
        self._options = options
        self._lock = threading.Lock()
        self._version = 0
        self._ref: Any = None

    def put(self, update: Update, payload: Buffer | None) -> Any:
        """The reference of a version, put now unless it is the newest and was put before."""
        with self._lock:
            if self._ref is not None and self._version == update.version:
                return self._ref
            view = memoryview(b"") if payload is None else payload.view[: update.nbytes]
            ref = require_ray("RayWeightSyncScheme").put(self._present(update, view), **self._options)
            # Older versions are for late joiners alone; the calls that bring them keep them.
            if update.version > self._version:
                self._version, self._ref = update.version, ref
            return ref

    def forget(self, version: int) -> None:
        """A version's object was lost: it is put anew if it is asked for again."""
        with self._lock:
            if self._version == version:
                self._ref = None


class ObjectCache:
    """The rows of all senders of one scheme. A row lives while a courier of its sender is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: weakref.WeakValueDictionary[tuple[str, int], CachedObject] = weakref.WeakValueDictionary()

    def row(self, kind: str, incarnation: int, make: Callable[[], CachedObject]) -> CachedObject:
        """The row for one kind of object of the sender with that incarnation."""
        with self._lock:
            found = self._rows.get((kind, incarnation))
            if found is None:
                found = self._rows[kind, incarnation] = make()
            return found


class ObjectCaches:
    """One kind of row on a shelf: what the couriers of a scheme are given.

    Args:
        shelf: shared by the scheme's couriers.
        kind: a name for what ``present`` makes.
        present: makes of an update and its payload what is put.
        options: for `ray.put`.
    """

    def __init__(self, shelf: ObjectCache, kind: str, present: Present, **options: Any) -> None:
        self._shelf = shelf
        self._kind = kind
        self._make = lambda: CachedObject(present, **options)

    def of(self, incarnation: int) -> CachedObject:
        """The row of one sender."""
        return self._shelf.row(self._kind, incarnation, self._make)
