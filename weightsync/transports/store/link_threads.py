"""The writing and the reading thread of a `StoreLink`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from weightsync.errors import ProtocolError, TransportError
from weightsync.protocol.messages import Bye
from weightsync.transports.base import Received, Waker
from weightsync.transports.process import own_network
from weightsync.transports.store import heartbeat
from weightsync.transports.store.arriving import make_arrivals
from weightsync.transports.store.blocking_threads import WriteQueue, notify_later, start_threads, unforeseen
from weightsync.transports.store.fanout import Branch, Fanout
from weightsync.transports.store.group import make_group
from weightsync.transports.store.mailbox import NO_ANSWER, Ended, Inbox, Outbox, PeerClosed, QueuedMessage, Side
from weightsync.transports.store.seals import Guard, Opened
from weightsync.transports.store.store import Client, StoreEndpoint, keep_in_child
from weightsync.transports.store.stream import Acceptor, EndOfStream, Stream, dial, own_address

logger = logging.getLogger("weightsync")

#: Seconds for a closed link to write queued messages, and for the other end to read them.
_LINGER: Final = 1.0
#: How often a closed link finds no room for a message before it gives up: each time after a pause.
_BLOCKED: Final = 20


class LinkThreads:
    """The two threads of one end of a link: they introduce it in the store, then write and read over a connection.

    Its methods never block; its threads end soon after `close`, or when it fails.

    Raises:
        ConfigurationError: the backend is not available here.
        TransportError: no more threads can be started.
    """

    owner: Callable[[], object] = object  #: Gives the link, and None once that was dropped.
    #: Called once the peer is known to be authentic, or lost before that.
    _admitted: Callable[[], None] | None = None
    #: Called once the reading thread has ended; None if it has, or if no callback is needed.
    _over: Callable[[], None] | None = None
    _failed: TransportError | ProtocolError | None = None
    #: Why the reading thread must end after what was written to it; empty if it need not.
    _ending = ""
    _closed = False
    _introduced = False
    #: The threads that may still use the connection.
    _users = 2
    _acceptor: Acceptor | None = None
    _stream: Stream | None = None
    _writer: Client | None = None
    _reader: Client | None = None
    _inbox: Inbox | None = None

    def __init__(
        self, endpoint: StoreEndpoint, name: str, side: Side, guard: Guard, waker: Waker, *, fanout: Fanout | None
    ) -> None:
        self._endpoint, self._waker = endpoint, waker
        self._name, self._key = name, f"weightsync/link/{name}"
        self._side, self._guard = side, guard
        self._condition = threading.Condition()
        self._outgoing = WriteQueue()
        self._arrived: deque[Received] = deque()
        #: Messages from a sender that has not proved yet that it is not a recording.
        self._held: list[Received] = []
        #: Set once the worker listens, and once there is a connection; both also when there never will be.
        self._listening, self._connected = threading.Event(), threading.Event()
        self._read_all, self._cut = threading.Event(), threading.Event()
        self._group = make_group(endpoint, side.rank, self._key)
        #: The link's part in a fan-out, at the trainer's end; None: it has none.
        self.branch = None if fanout is None else Branch(fanout, self.post, side.peer, guard.keyed)
        self._arrivals = make_arrivals(self, side, guard, self._group, self.branch)
        self._remark, callbacks = heartbeat.Remark(), heartbeat.Callbacks(self._lose, self._lose_store, self._on_beat)
        with self._condition:  # a loss of the store, which a callback reports at any time from here on, waits for it
            self._heartbeat_member = heartbeat.join(endpoint.store, callbacks)
        try:
            start_threads(self, {"weightsync-link-writer": self._write, "weightsync-link-reader": self._read})
        except TransportError as error:
            self._fail(error)
            raise

    def require_link(self) -> None:
        """Raise TransportError if the link has ended."""
        if self._failed is not None or self._closed:
            raise TransportError(f"The link to {self._side.peer} has ended.")

    def own_host(self) -> str:
        """Where the trainer has connected to this worker, and other workers can."""
        assert self._acceptor is not None
        return self._acceptor.address.rpartition(":")[0]

    @property
    def failed(self) -> TransportError | ProtocolError | None:
        """Why nothing more will be read or written."""
        return self._failed

    def flushed(self) -> bool:
        """Whether all messages are written; if not, the waker is fired later.

        Raises TransportError: some messages never will be written.
        """
        with self._condition:
            if not self._outgoing.cut_short:
                return self._outgoing.empty()
            if self._failed is None:
                return False  # the peer's messages before its end are read first
            raise TransportError(str(self._failed)) from self._failed

    def post(self, queued: QueuedMessage) -> None:
        """Queue a message to be written, or write it at once if it is small and nothing is before it."""
        with self._condition:
            stream = self._stream if self._introduced and not (self._closed or self._failed or self._ending) else None
            if stream is None or not self._outgoing.begin(queued, stream, self._guard):
                self._outgoing.add(queued)
            if self._failed is not None:
                self._outgoing.drop()
            if self._outgoing:
                self._condition.notify_all()

    def when_admitted(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, once the peer is known to be authentic or has failed."""
        with self._condition:
            if not self._guard.admits and self._failed is None:
                self._admitted = callback
                return
        callback()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, once nothing is read any more: after `close`, when the peer has ended."""
        with self._condition:
            if not self._read_all.is_set():
                self._over = callback
                return
        callback()

    @property
    def admits(self) -> bool:
        """Whether the peer is known to be authentic, as far as a key shows that."""
        return self._guard.admits

    @property
    def remark(self) -> str:
        """Why the peer may never connect; empty if nothing is known, or it has."""
        if self._stream is not None:
            return ""
        return self._remark.text or (NO_ANSWER if self._writer is None else self._side.untaken)

    def collect(self) -> tuple[list[Received], TransportError | ProtocolError | None]:
        """The messages that have arrived, and the failure after them, if any."""
        with self._condition:
            arrived, self._arrived = list(self._arrived), deque()
            return arrived, self._failed

    def end_reading(self, reason: str) -> None:
        """The peer can no longer be reached: deliver the messages that it wrote before, then fail."""
        with self._condition:
            self._ending = self._ending or reason
            self._outgoing.shorten()
            self._condition.notify_all()
            if self._stream is not None:
                self._stream.end_reading()
        self._end_rendezvous()

    def close(self) -> None:
        """Write what is queued, up to the first payload that does not fit into a message, and end."""
        self._arrivals.end()  # first: what it queues is dropped below
        with self._condition:
            self._closed = True
            self._outgoing.shorten()
            self._condition.notify_all()
        self._listening.set()
        self._heartbeat_member.leave()
        self._group.abort()

    def forget(self) -> None:
        """In a forked child: do nothing more. The threads and torch's objects are the parent's."""
        self._condition = threading.Condition()
        if self._stream is not None:
            self._stream.forget()
        if self._acceptor is not None:
            self._acceptor.close()
        self._arrivals.forget()
        keep_in_child(self._group, self._writer, self._reader, self._heartbeat_member, self._endpoint)

    def _write(self) -> None:
        try:
            client = self._writer = Client(self._endpoint.store)
        except TransportError as error:
            self._fail(error)
            self._cut_clients()
            notify_later(self._endpoint.store, f"{self._key}/{self._side.writes}", self._side, self._cut)
            self._leave_stream()
            return
        outbox = Outbox(client, f"{self._key}/{self._side.writes}")
        try:
            self._introduce(client, outbox)
            self._introduced = True
            while (queued := self._next_message(client)) is not None:
                self._write_message(queued, client)
                with self._condition:
                    awaited = self._outgoing.written()
                    self._condition.notify_all()
                if awaited:
                    self._waker.fire()
                self._write_hint(queued, client)
                del queued  # it keeps its payload, and all that the payload's sender has
        except TransportError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a thread that ends must say so
            with self._condition:
                self._outgoing.lose()
            self._fail(unforeseen(error))
        finally:
            self._finish_writing(client, outbox)

    def _introduce(self, client: Client, outbox: Outbox) -> None:
        """Write our name to the store, and the worker its address."""
        for challenge in self._guard.first():
            outbox.put(challenge)
        name = f"{self._heartbeat_member.await_name()} {own_network()}"
        if self._side.listens:
            self._listening.wait()
            if self._acceptor is None:
                return
            name += f" {self._acceptor.address}"
        outbox.put(self._guard.seal(name.encode()))
        self._side.introduced(client)

    def _next_message(self, client: Client) -> QueuedMessage | None:
        """The next message to write, or None."""
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closed or self._failed or self._ending or (self._outgoing and self._stream)
                )
                if self._outgoing and self._closed and not self._connected.is_set():
                    self._condition.wait_for(lambda: self._connected.is_set() or self._failed, _LINGER)
                if self._outgoing and self._stream is not None and self._failed is None:
                    return self._outgoing.take()
                if self._closed or self._failed is not None:
                    return None
            # The peer is dead: what it wrote before is read to the end.
            self._end_inbox(client)
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._failed)

    def _write_message(self, queued: QueuedMessage, client: Client) -> None:
        assert self._stream is not None
        try:
            queued.before()
            self._transfer(queued, self._stream, client)
        finally:
            queued.done()

    def _write_hint(self, queued: QueuedMessage, client: Client) -> None:
        """Write TorchRL's key. The message is written already: a store that does not answer holds up no ack."""
        try:
            queued.write_hint(client)
        except TransportError:
            if not self._closed:  # a goodbye needs no store
                raise

    def _transfer(self, queued: QueuedMessage, stream: Stream, client: Client) -> None:
        blocked = iter(range(_BLOCKED))

        def go_on() -> None:
            if self._failed is not None or (self._closed and next(blocked, None) is None):
                raise TransportError(f"{self._side.peer} accepts no more messages.")

        try:
            if queued.begun:
                stream.finish(queued.frame, go_on)
            else:
                behind = queued.payload if queued.has_payload_behind else None
                self._group.write(stream, client, queued.sealed(self._guard), behind, go_on)
        except TransportError as error:
            self.end_reading(str(error))
            with self._condition:
                self._outgoing.lose()
            self._group.notify_aborted(client)

    def _finish_writing(self, client: Client, outbox: Outbox) -> None:
        """Tell the peer that nothing more will be sent, and end the reading thread."""
        try:
            if self._closed and self._failed is None:
                self._side.before_goodbye()
            if self._stream is None:
                outbox.shut()
            elif self._failed is None:
                self._stream.end_writing()
            self._side.leave(client)
            if self._stream is not None and self._failed is None:
                self._read_all.wait(_LINGER)
                return
            self._end_inbox(client)
            self._end_rendezvous()
        except TransportError:
            self.cut()
        finally:
            client.close()
            self._leave_stream()

    def _leave_stream(self) -> None:
        """A thread has ended: the other cannot continue either, and the last closes the connection."""
        if self._closed:
            self._side.before_goodbye()
        with self._condition:
            self._users -= 1
            if self._stream is not None:
                self._stream.cut() if self._users else self._stream.close()

    def _end_inbox(self, client: Client) -> None:
        with self._condition:
            if self._stream is not None or (self._inbox is not None and self._reader is None):
                return
        Inbox.end(client, f"{self._key}/{self._side.reads}", 0 if self._inbox is None else self._inbox.number)

    def cut(self) -> None:
        """Make both threads' calls fail. What a closed link has queued is written first, without the store."""
        self._cut.set()
        self._cut_clients()
        with self._condition:
            linger = 0.0 if self._writer is None else _LINGER
            self._condition.wait_for(lambda: not self._closed or self._failed or self._outgoing.idle, linger)
        self._end_rendezvous()
        if self._stream is not None:
            self._stream.cut()

    def _cut_clients(self) -> None:
        for client in (self._reader, self._writer):
            if client is not None:
                client.cut()

    def _read(self) -> None:
        client: Client | None = None
        try:
            if not self._closed:
                client = Client(self._endpoint.store)
                self._receive_all(client)
        except (PeerClosed, EndOfStream, Ended):
            if client is not None and not self._closed:
                self._before_end(client)
            self._fail(TransportError(self._side.end_reason(self._ending)))
        except (TransportError, ProtocolError) as error:
            # Once the link is closed, earlier messages are still written.
            if not self._closed:
                self._fail(TransportError(self._side.end_reason(self._ending)) if self._ending else error)
        except Exception as error:  # noqa: BLE001 - a thread that ends must say so
            self._fail(unforeseen(error))
        finally:
            self._finish_reading(client)

    def _finish_reading(self, client: Client | None) -> None:
        with self._condition:
            self._reader = None
        if self._inbox is not None:
            with contextlib.suppress(TransportError):
                self._inbox.delete_read()
        if self._stream is not None and self._closed and self._failed is None:
            self._stream.drain()
        if client is not None:
            if self._over is not None:
                self._before_end(client)
            client.close()
        self._end_rendezvous()
        with self._condition:
            self._read_all.set()
            callback, self._over = self._over, None
        if callback is not None:
            callback()
        self._leave_stream()

    def _receive_all(self, client: Client) -> None:
        with self._condition:
            self._reader = client  # first: `cut` either finds it, or is found here
            if self._failed is not None or self._cut.is_set():
                return
            inbox = self._inbox = Inbox(client, f"{self._key}/{self._side.reads}")
        stream = self._open_stream(inbox, client)
        inbox.delete_read()
        while True:
            self.deliver()
            if (opened := self._guard.open(memoryview(stream.read()))) is not None:
                self._take(opened, stream, client)

    def _take(self, opened: Opened, stream: Stream, client: Client) -> None:
        # A payload that was delivered is not kept here: its memory may be needed for the next.
        for received in self._arrivals.take(opened, stream, client):
            self._held.append(received)
            if isinstance(received.message, Bye) and self._guard.admits:
                self._side.peer_left()
                self._before_end(client)
            del received

    def _open_stream(self, inbox: Inbox, client: Client) -> Stream:
        """The connection to the peer, once it has introduced itself in the store."""
        words = bytes(self._next_text(inbox).text).decode("ascii", "replace").split(" ")
        process, network, address = (*words, "", "")[:3]
        self._heartbeat_member.follow(process)
        if not self._side.listens:
            return self._adopt(dial(address, self._name))
        listener = self._acceptor = Acceptor(own_address(network == own_network(), client.own_address))
        try:
            self._listening.set()
            return self._adopt(listener.accept(self._name, lambda: self._go_on_waiting(inbox, client)))
        finally:
            listener.close()

    def _go_on_waiting(self, inbox: Inbox, client: Client) -> None:
        if self._failed is not None or self._closed or self._ending:
            raise Ended
        if client.present(inbox.next_key):
            inbox.take()
            raise PeerClosed

    def _adopt(self, stream: Stream) -> Stream:
        with self._condition:
            self._stream = stream
            self._connected.set()
            self._condition.notify_all()
            if self._failed is not None or self._users < 2:
                stream.cut()
            elif self._ending:
                stream.end_reading()
        return stream

    def _next_text(self, inbox: Inbox) -> Opened:
        """The next message in the store that is not for the guard alone."""
        while True:
            opened = self._guard.open(memoryview(bytearray(inbox.take())))
            if opened is not None:
                return opened
            if self._guard.replies:
                self.post(QueuedMessage(b"", None))

    def deliver(self) -> None:
        """Deliver the messages held back, once their sender has proved that it is alive."""
        if not self._guard.admits:
            return
        with self._condition:
            self._arrived.extend(self._held)
            # Not kept until the next message: the memory of its payload may be needed for that.
            self._held.clear()
            callback, self._admitted = self._admitted, None
            arrived = bool(self._arrived)
        if callback is not None:
            callback()
        if arrived:
            self._waker.fire()

    def _before_end(self, client: Client) -> None:
        with contextlib.suppress(TransportError):
            self._side.before_end(client)

    def _lose(self, reason: str) -> None:
        """Called by the heartbeat: the peer or the store is silent."""
        self._fail(TransportError(f"{self._side.peer} is lost: {reason}."))

    def _on_beat(self, client: Client, follow: heartbeat.Follow) -> None:
        """Called by the heartbeat with each beat."""
        if self.owner() is None:
            self.close()
        if self._stream is None and self._remark.is_due(self._side.remark(client, follow)):
            logger.warning("%s did not accept this link: %s", self._side.peer, self._remark.text)

    def _lose_store(self, reason: str) -> None:
        self._fail(TransportError(f"{self._side.peer} is lost with the store: {reason}."))
        self.cut()

    def _fail(self, error: TransportError | ProtocolError) -> None:
        with self._condition:
            if self._failed is None:
                self._failed = error
            self._outgoing.drop()
            # A goodbye counts although the store ended with its sender.
            self._arrived.extend(self._held if self._guard.admits else ())
            self._held.clear()
            callback, self._admitted = self._admitted, None
            self._condition.notify_all()
            if self._stream is not None and not self._closed:
                self._stream.cut()
        self._arrivals.end()
        self._heartbeat_member.leave()
        self._end_rendezvous()
        if callback is not None:
            callback()
        self._waker.fire()

    def _end_rendezvous(self) -> None:
        """Release threads that wait for the peer to connect. The wait for a connection ends on its own."""
        self._listening.set()
        self._connected.set()
        self._group.abort()
