"""Threads that block in torch, what they have still to write, and their end before the interpreter's.

A daemon thread that comes back from C++ while the interpreter is being taken down aborts the process.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from weightsync.errors import TransportError
from weightsync.transports.process import forget_after_fork
from weightsync.transports.store.mailbox import StoreMessage

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


class Outgoing:
    """Letters in the order in which they leave. All its methods are called under the lock of its exchange."""

    def __init__(self) -> None:
        self._queue: deque[StoreMessage] = deque()
        self._writing = False
        self._awaited = False
        #: Whether a letter was given up: nobody may be told that all have left.
        self.cut_short = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, store_message: StoreMessage) -> None:
        """One more letter."""
        self._queue.append(store_message)

    def take(self) -> StoreMessage:
        """The next letter, which is being written until `written`."""
        self._writing = True
        return self._queue.popleft()

    def written(self) -> bool:
        """The letter taken last has left; whether somebody waits for that, and all have."""
        self._writing = False
        return self._awaited and not self._queue

    def empty(self) -> bool:
        """Whether all letters have left; if not, `written` says so once they have."""
        self._awaited = bool(self._queue) or self._writing
        return not self._awaited

    def shorten(self) -> None:
        """Give up the first letter that the peer has to take from us, and all behind it, which would overtake it.

        Those before it get bytes of their own: nobody waits for them.
        """
        leaving = [
            each.alone()
            for each in itertools.takewhile(lambda store_message: not store_message.needs_the_peer, self._queue)
        ]
        self.cut_short |= self._writing or len(leaving) < len(self._queue)
        self._let_go()
        self._queue.extend(leaving)

    def drop(self) -> None:
        """Give up all that has not left."""
        self.cut_short |= self._writing or bool(self._queue)
        self._let_go()

    def _let_go(self) -> None:
        for store_message in self._queue:
            store_message.done()
        self._queue.clear()
