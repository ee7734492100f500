"""Links whose calls are recorded."""

from __future__ import annotations

import contextlib

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol.messages import Message, Update, version_of
from weightsync.testing.link_pair import End, EventKind, LinkPair, LogEntry, MessageInFlight, Watch, words
from weightsync.transports.base import Link, Received
from weightsync.transports.buffers import Buffer


class LinkRecorder:
    """One end of a connection: a link that records every call. See `weightsync.transports.base.Link`."""

    def __init__(self, link: Link, link_pair: LinkPair, end: End) -> None:
        self.link = link
        self.link_pair = link_pair
        link_pair.met = link_pair.met or end is End.RECEIVER
        self.end = end
        self.delivery = link.delivery
        #: The messages that were given to `send`, as (kind, incarnation, version).
        self.attempts: list[tuple[str, int, int]] = []
        #: Which of these failed, or were the last before writing failed: the link ended there, and messages that had
        #: arrived by then were not handled any more.
        self.failures: set[int] = set()
        #: The updates that were sent.
        self.updates: list[Update] = []
        #: The messages that have not been fully written yet, as far as `flush` has reported.
        self._queued: list[MessageInFlight] = []
        self.dead = False

    @property
    def _watch(self) -> Watch:
        return self.link_pair.watch

    def _calling(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._watch.calling(f"{what} at {self.link_pair.name}, {self.end.value},")

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self.link.peer

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """See `Link.send`."""
        number = len(self.attempts)
        self.attempts.append((type(message).__name__, message.incarnation, version_of(message)))
        if isinstance(message, Update):
            self.updates.append(message)
        # Recorded before it is sent: where both ends share a process, it may arrive inside the call.
        entry = self.link_pair.sent(self.end, message, payload)
        self._queued.append(entry)
        try:
            with self._calling(f"send({words(message)})"):
                self.link.send(message, payload)
        except (TransportError, ConfigurationError):
            self.failures.add(number)
            self._watch.log.append(LogEntry(EventKind.FAILED, self))
            self.link_pair.unsent(self.end, entry)
            raise

    def flush(self) -> bool:
        """See `Link.flush`."""
        try:
            with self._calling("flush()"):
                written = self.link.flush()
        except TransportError:
            self.failures.add(len(self.attempts) - 1)
            self._watch.log.append(LogEntry(EventKind.FAILED, self))
            raise
        return self._note_written(written)

    def write(self) -> None:
        """Write what the link can; reading finds its death."""
        with contextlib.suppress(TransportError):
            self._note_written(self.link.flush())

    @property
    def queued(self) -> bool:
        """Whether something has not been fully written yet, as far as writing has reported."""
        return bool(self._queued)

    def _note_written(self, written: bool) -> bool:
        if written:
            self._queued.clear()
        return written

    def receive(self) -> list[Received]:
        """See `Link.receive`."""
        try:
            with self._calling("receive()"):
                arrived = self.link.receive()
        except (TransportError, ProtocolError) as error:
            self.dead = True
            self._watch.log.append(LogEntry(EventKind.ENDED, self))
            self.link_pair.ended(self.end, error)
            raise
        for received in arrived:
            self.link_pair.came(self.end, received)
            self._watch.log.append(LogEntry(EventKind.CAME, self, received.message))
        return arrived

    def waitables(self) -> list[int]:
        """See `Link.waitables`."""
        with self._calling("waitables()"):
            return self.link.waitables()

    def wants_write(self) -> int | None:
        """See `Link.wants_write`."""
        with self._calling("wants_write()"):
            return self.link.wants_write()

    def watch(self, pid: int, started: int) -> None:
        """See `Link.watch`."""
        with self._calling("watch()"):
            self.link.watch(pid, started)

    def close(self) -> None:
        """See `Link.close`."""
        for entry in self._queued:
            entry.given_up = True
        self.link_pair.closed.add(self.end)
        self.dead = True
        with self._calling("close()"):
            self.link.close()
