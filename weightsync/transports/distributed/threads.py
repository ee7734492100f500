"""Threads that block in torch, and their end before the interpreter's.

A daemon thread that comes back from C++ while the interpreter is being taken down aborts the process.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from weightsync.errors import TransportError
from weightsync.transports.fork import forget_after_fork

_PATIENCE: Final = 1.0


class Owner(Protocol):
    """Whose threads these are."""

    def close(self) -> None:
        """Have them end as soon as all is said."""

    def cut(self) -> None:
        """Have them end now."""


class _Running:
    """The threads of this process."""

    def __init__(self) -> None:
        self.forget()
        atexit.register(self.end)

    def forget(self) -> None:
        """In a forked child: there are none."""
        self._threads: dict[threading.Thread, Owner] = {}
        self._lock = threading.Lock()
        forget_after_fork(self)

    def add(self, name: str, body: Callable[[], None], owner: Owner) -> None:
        thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        with self._lock:
            self._threads[thread] = owner
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._threads.pop(thread, None)
            raise TransportError(f"No thread for {name}: {error}.") from error

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)

    def end(self) -> None:
        """Before the interpreter ends: end them all."""
        with self._lock:
            running = dict(self._threads)
        for owner in running.values():
            owner.close()
        _join(running)
        for thread, owner in running.items():
            if thread.is_alive():
                owner.cut()
        _join(running)


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        if thread.is_alive():
            thread.join(_PATIENCE)


_running = _Running()


def start(owner: Owner, *bodies: Callable[[], None]) -> None:
    """Run each of ``bodies`` in a thread.

    Raises:
        TransportError: there can be no more threads.
    """
    for body in bodies:
        name = f"weightsync-{type(owner).__name__.strip('_').lower()}-{body.__name__.strip('_')}"
        _running.add(name, body, owner)
