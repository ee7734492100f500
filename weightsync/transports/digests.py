"""The SHA-256 of payloads, computed once a version however many links carry it."""

from __future__ import annotations

import hashlib
import threading
from weakref import WeakKeyDictionary

from weightsync.messages import Update
from weightsync.transports.memory import Buffer


class _Computed:
    """What one buffer held last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.key: tuple[int, int] | None = None
        self.digest = b""


_lock = threading.Lock()
_known: WeakKeyDictionary[Buffer, _Computed] = WeakKeyDictionary()


def digest_of(payload: memoryview) -> bytes:
    """The SHA-256 of a payload."""
    return hashlib.sha256(payload).digest()


def sent_digest(update: Update, payload: Buffer) -> bytes:
    """The SHA-256 of an update's payload, while its buffer is pinned. Whoever comes second waits for the first."""
    with _lock:
        computed = _known.setdefault(payload, _Computed())
    with computed.lock:
        key = update.incarnation, update.version
        if computed.key != key:
            computed.digest = digest_of(payload.view[: update.nbytes])
            computed.key = key
        return computed.digest
