"""Threads that block in torch, their unwritten messages, and how they end before the interpreter does.

A daemon thread that returns from C++ while the interpreter shuts down aborts the process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.util import Finalize
from typing import Final, Protocol

from weightsync.errors import TransportError, thread_not_started
from weightsync.transports.process import PerProcess
from weightsync.transports.store.mailbox import Outbox, QueuedMessage, Side
from weightsync.transports.store.seals import Guard
from weightsync.transports.store.store import Client, Store
from weightsync.transports.store.stream import Stream

logger = logging.getLogger("weightsync")

#: Seconds that one thread may take to end as the process ends.
_PATIENCE: Final = 1.0
#: How many threads may each take that long before no other is waited for: as many as one link and its heartbeat have.
_MAX_HUNG: Final = 4
#: Other finalizers come first: they may still close links.
_EXIT_PRIORITY: Final = 0


class Owner(Protocol):
    """The owner of the threads."""

    def close(self) -> None:
        """End the threads once everything is written."""

    def cut(self) -> None:
        """End the threads now."""


class _Running(PerProcess):
    """The threads of this process."""

    def _begin(self) -> None:
        self._threads: dict[threading.Thread, Owner] = {}
        self._at_exit: Finalize | None = None

    def add(self, name: str, body: Callable[[], None], owner: Owner) -> None:
        thread = threading.Thread(target=self._run, args=(body,), name=name, daemon=True)
        with self._lock:
            self._threads[thread] = owner
            if self._at_exit is None:
                # Processes of `multiprocessing` run its finalizers at their end, and no function of `atexit`.
                self._at_exit = Finalize(None, self.end, exitpriority=_EXIT_PRIORITY)
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._threads.pop(thread, None)
            raise thread_not_started(name, error) from error

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)

    def end(self) -> None:
        """End all threads before the interpreter ends. Closing an owner may start one more: it is ended too."""
        self._tell_owners("close", lambda owner: owner.close())
        _join(self._owners_by_thread())
        self._tell_owners("cut", lambda owner: owner.cut())
        _join(self._owners_by_thread())

    def _tell_owners(self, what: str, tell: Callable[[Owner], None]) -> None:
        for owner in self._owners_by_thread().values():
            try:
                tell(owner)
            except Exception:
                logger.exception("a thread could not be ended as the process ends: %s() of %r failed", what, owner)

    def _owners_by_thread(self) -> dict[threading.Thread, Owner]:
        with self._lock:
            return dict(self._threads)


def _join(threads: Iterable[threading.Thread]) -> None:
    """Wait until they have ended, or a few have taken too long: with a store that was stopped, all of them hang."""
    hung = 0
    for thread in threads:
        if thread.is_alive():
            thread.join(_PATIENCE if hung < _MAX_HUNG else 0.0)
            hung += thread.is_alive()


_running = _Running()


def start_threads(owner: Owner, bodies: Mapping[str, Callable[[], None]]) -> None:
    """Run each of ``bodies`` in a thread, by the thread's name.

    Raises TransportError: no more threads can be started.
    """
    for name, body in bodies.items():
        _running.add(name, body, owner)


class WriteQueue:
    """Store messages in the order in which they are written. Called under the lock of the link's threads."""

    def __init__(self) -> None:
        self._queue: deque[QueuedMessage] = deque()
        self._writing = False
        self._awaited = False
        #: Whether a message was dropped, so that not all are written.
        self.cut_short = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, queued: QueuedMessage) -> None:
        """Add a message."""
        self._queue.append(queued)

    def begin(self, queued: QueuedMessage, stream: Stream, guard: Guard) -> bool:
        """Write a plain message at once if none is queued before it. Returns whether it was; the rest is taken next."""
        if not queued.is_plain or not self.idle:
            return False
        self._writing = True  # a signal handler may send meanwhile: that is behind this
        rest = stream.begin(queued.sealed(guard))
        self._writing = False
        queued.done()
        if rest or queued.hint is not None:
            self._queue.appendleft(QueuedMessage(rest, None, queued.hint, begun=True))
        return True

    def take(self) -> QueuedMessage:
        """The next message, which is being written until `written`."""
        self._writing = True
        return self._queue.popleft()

    def written(self) -> bool:
        """Record that the last message was written. Returns whether all are written and a thread waits for that."""
        self._writing = False
        return self._awaited and not self._queue

    @property
    def idle(self) -> bool:
        """Whether all messages are written."""
        return not self._queue and not self._writing

    def empty(self) -> bool:
        """Whether all messages are written; if not, `written` reports it later."""
        self._awaited = not self.idle
        return self.idle

    def shorten(self) -> None:
        """Drop the first message that the peer has to receive from us, and all later ones, which would overtake it.

        The messages before it get their own copies of payloads, since no caller waits for them. Parts of a payload are
        dropped too, but the messages behind them stay, up to the update that names those parts.
        """
        left = (queued for queued in self._queue if not queued.is_part)
        leaving = [each.alone() for each in itertools.takewhile(lambda queued: not queued.needs_peer, left)]
        self.cut_short |= len(leaving) < len(self._queue)
        self._clear()
        self._queue.extend(leaving)

    def drop(self) -> None:
        """Drop everything that is not being written."""
        self.cut_short |= bool(self._queue)
        self._clear()

    def lose(self) -> None:
        """The message that was being written could not be, and later ones would overtake it: drop them too."""
        self.cut_short, self._writing = True, False
        self._clear()

    def _clear(self) -> None:
        for queued in self._queue:
            queued.done()
        self._queue.clear()


#: Attempts at a connection that could not be made at once, and the pause between them in seconds.
_TRIES: Final = 120
_LOOK_SECONDS: Final = 0.25


def notify_later(store: Store, key: str, side: Side, over: threading.Event) -> None:
    """There was no connection to the store: notify the peer, which waits for us, once there is one."""
    side.unconnected()
    for _ in range(_TRIES):
        if over.wait(_LOOK_SECONDS):
            return
        try:
            client = Client(store)
        except TransportError as error:
            if isinstance(error.__cause__, OSError):
                continue  # still no descriptor
            return
        with contextlib.suppress(TransportError):
            Outbox(client, key).shut()
            side.leave(client)
        client.close()
        return


def unforeseen(error: Exception) -> TransportError:
    """The error for an unexpected exception in a link's thread."""
    failed = TransportError(f"A link's thread failed: {error!r}")
    failed.__cause__ = error
    return failed
