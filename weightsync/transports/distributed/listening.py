"""The worker's ear: every link that a sender announces to it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weightsync._tables import Delivery
from weightsync.errors import TransportError
from weightsync.messages import Message
from weightsync.transports.base import Link, Received, Waker
from weightsync.transports.distributed import pulse
from weightsync.transports.distributed.announcing import Announced, base_key, taken, worker_link
from weightsync.transports.distributed.link import StoreLink
from weightsync.transports.distributed.store import Client, StoreEnd, keep_in_child
from weightsync.transports.distributed.threads import start
from weightsync.transports.fork import forget_after_fork
from weightsync.transports.memory import Buffer
from weightsync.transports.sealing import TURNED_AWAY

logger = logging.getLogger("weightsync")

_NOBODY = "nobody"


class _Listener:
    """A thread that waits under the worker's key for the next link."""

    def __init__(self, meeting: StoreEnd, model_id: str, accept: Callable[[Link], None]) -> None:
        self._meeting = meeting
        self._model_id = model_id
        self._base = base_key(model_id, meeting.rank)
        self._accept = accept
        self._over = threading.Event()
        self._client: Client | None = None
        #: Wakes the thread from what blocks on the other one.
        self._bell: Client | None = None
        self._next = 0
        #: Links whose senders have not proved yet that they have the key.
        self._unproven: set[StoreLink] = set()
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
                written = client.await_value(f"{self._base}/door/{self._next}").decode("ascii", "replace")
                announced = Announced.of(written)
                if not self._over.is_set() and announced is not None:
                    self._meet(client, announced)
                self._next += 1
        except TransportError as error:
            if not self._over.is_set():
                self._accept(LostLink(error))
        finally:
            self._heart.leave()
            for opened in (self._client, self._bell):
                if opened is not None:
                    opened.close()

    def _meet(self, client: Client, announced: Announced) -> None:
        """Take a link, or turn it away: then no receiver ever hears of it."""
        refused = announced.why_refused(self._meeting, self._model_id)
        if refused is not None:
            logger.warning("model %r: a sender was turned away: %s.", self._model_id, TURNED_AWAY[refused])
            announced.refuse(client, refused)
        elif taken(client, announced.name):
            link = worker_link(self._meeting, self._model_id, announced.name)
            self._unproven.add(link)
            link.when_admitted(self._let_in, self._turn_away)
            if self._over.is_set() and link in self._unproven:
                link.close()

    def _let_in(self, link: StoreLink) -> None:
        self._unproven.discard(link)
        self._accept(link)

    def _turn_away(self, link: StoreLink) -> None:
        self._unproven.discard(link)
        if not self._over.is_set():
            logger.warning("model %r: a sender was turned away before it was heard: %s", self._model_id, link.failure)
        link.close()

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
            for link in tuple(self._unproven):
                link.close()
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


def listen(meeting: StoreEnd, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
    """Have ``accept`` called, from a thread, with each link that a sender announces to this worker.

    Returns:
        What ends it.
    """
    meeting.tell_if_exposed()
    return _Listener(meeting, model_id, accept).close
