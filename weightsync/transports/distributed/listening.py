"""The worker's ear: every link that a sender announces to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from weightsync._tables import Delivery
from weightsync.errors import ConfigurationError, TransportError
from weightsync.messages import Message
from weightsync.transports.base import Link, Received, Waker
from weightsync.transports.distributed import pulse
from weightsync.transports.distributed.announcing import base_key, taken, worker_link
from weightsync.transports.distributed.c10d import Store
from weightsync.transports.distributed.store import Client, StoreEnd, base_of, keep_in_child
from weightsync.transports.distributed.threads import start
from weightsync.transports.fork import forget_after_fork
from weightsync.transports.memory import Buffer

_NOBODY = "nobody"


class _Listener:
    """A thread that waits under the worker's key for the next link."""

    def __init__(self, meeting: StoreEnd, model_id: str, accept: Callable[[Link], None]) -> None:
        self._meeting = meeting
        self._base = base_key(model_id, meeting.rank)
        self._accept = accept
        self._over = threading.Event()
        self._client: Client | None = None
        #: Wakes the thread from what blocks on the other one.
        self._bell: Client | None = None
        self._next = 0
        self._heart = pulse.join(meeting.store, pulse.Told(self._lose, self._lose))
        forget_after_fork(self)
        start(self, self._listen)

    def forget(self) -> None:
        """In a forked child: listen no longer. The thread is the parent's."""
        self._over.set()
        keep_in_child(self._client, self._bell, self._heart, self._meeting)

    def _listen(self) -> None:
        try:
            self._bell = Client(self._meeting.store)
            client = self._client = Client(self._meeting.store)
            while not self._over.is_set():
                name = client.await_value(f"{self._base}/door/{self._next}").decode("ascii", "replace")
                if not self._over.is_set() and name != _NOBODY and taken(client, name):
                    self._accept(worker_link(self._meeting, name))
                self._next += 1
        except TransportError as error:
            if not self._over.is_set():
                self._accept(LostLink(error))
        finally:
            self._heart.leave()
            for opened in (self._client, self._bell):
                if opened is not None:
                    opened.close()

    def _lose(self, _: str) -> None:
        self.cut()

    def cut(self) -> None:
        """Have the thread end now."""
        if self._client is not None:
            self._client.cut()

    def close(self) -> None:
        """Take no further link. The thread ends soon."""
        if not self._over.is_set():
            self._over.set()
            start(self, self._wake)

    def _wake(self) -> None:
        """Put a link of nobody's where the thread waits; one that has just been announced there wakes it as well."""
        # Without a bell the thread is not waiting yet: it looks first.
        try:
            if self._bell is not None:
                self._bell.claim(f"{self._base}/door/{self._next}", _NOBODY)
        except TransportError:
            self.cut()


class LostLink:
    """A link that never was: it says why, as soon as it is read."""

    delivery = Delivery.ORDERED
    peer = "the sender"

    def __init__(self, error: TransportError) -> None:
        self._error = error
        self._waker = Waker()
        self._waker.fire()

    def send(self, message: Message, payload: Buffer | None = None) -> None:  # noqa: ARG002
        """Fail."""
        raise self._error

    def flush(self) -> bool:
        """Nothing is queued."""
        return True

    def receive(self) -> list[Received]:
        """Fail."""
        raise self._error

    def waitables(self) -> list[int]:
        """Readable until it is closed."""
        return [] if self._waker.fileno() < 0 else [self._waker.fileno()]

    def wants_write(self) -> int | None:
        """Nothing is ever written here."""
        return None

    def watch(self, pid: int, started: int) -> None:
        """There is nobody."""

    def close(self) -> None:
        """Let go of it."""
        self._waker.close()


class _Ears:
    """Who listens in this process: one receiver for a model, a rank and a store."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: nobody listens."""
        self._lock = threading.Lock()
        self._by_place: dict[Hashable, list[Callable[[Link], None]]] = {}
        forget_after_fork(self)

    def open(self, meeting: StoreEnd, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Note that somebody listens; what is returned notes that he listens no longer.

        Raises:
            ConfigurationError: somebody else does. The same may, once more.
        """
        place = _where(meeting.store), meeting.rank, model_id
        with self._lock:
            there = self._by_place.setdefault(place, [])
            if any(other != accept for other in there):
                raise ConfigurationError(
                    f"Model {model_id!r} has a receiver for rank {meeting.rank} in this process: close that first."
                )
            there.append(accept)

        def shut() -> None:
            with self._lock:
                if accept in there:
                    there.remove(accept)
                if not there and self._by_place.get(place) is there:
                    del self._by_place[place]

        return shut


def _where(store: Store) -> Hashable:
    """What two ways to one store have in common. Of a prefix only the object that has it tells."""
    base = base_of(store)
    return (base.host, base.port) if store is base else store


_ears = _Ears()


def listen(meeting: StoreEnd, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
    """Have ``accept`` called, from a thread, with each link that a sender announces to this worker.

    Returns:
        What ends it.

    Raises:
        ConfigurationError: this process has another receiver of that model for that rank.
    """
    shut = _ears.open(meeting, model_id, accept)
    try:
        listener = _Listener(meeting, model_id, accept)
    except BaseException:
        shut()
        raise

    def close() -> None:
        listener.close()
        shut()

    return close
