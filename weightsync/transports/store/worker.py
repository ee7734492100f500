"""The writing and the reading thread of a `StoreLink`, and the memory for payloads."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from weightsync.errors import AuthenticationError, ProtocolError, TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Bye, Update
from weightsync.transports.base import Received, Waker
from weightsync.transports.buffers import NoRoom, anonymous, digest_of
from weightsync.transports.process import own_network
from weightsync.transports.store import heartbeat
from weightsync.transports.store.group import Group
from weightsync.transports.store.mailbox import INLINE_NBYTES, Ended, Inbox, Outbox, Shut, Side, StoreMessage, end
from weightsync.transports.store.seals import Guard, Opened
from weightsync.transports.store.store import Client, StoreEnd, keep_in_child
from weightsync.transports.store.worker_threads import Outgoing, start

_SPARE: Final = 2


class ReceiveBuffers:
    """Memory for payloads: pages used before, once nothing refers to them."""

    def __init__(self) -> None:
        self._known: list[mmap.mmap] = []

    def find(self, nbytes: int) -> memoryview:
        """Memory for a payload, writable, and valid as long as something refers to it.

        Raises:
            TransportError: there is not enough.
        """
        buffer = next((known for known in self._known if len(known) >= nbytes and _unused(known)), None)
        if buffer is None:
            buffer = anonymous(nbytes)
            self._known = [*self._known, buffer][-_SPARE:]
        return memoryview(buffer)[:nbytes]


def _unused(memory: mmap.mmap) -> bool:
    """Whether no view of it is left: only then can it be resized, here to its own size."""
    try:
        memory.resize(len(memory))
    except BufferError:
        return False
    return True


#: The pauses, in seconds, between attempts at a connection that could not be made at once.
_TRIES = 120
_LOOK = 0.25


class StoreWorker:
    """Writes and reads store messages. Its methods never block; its threads end soon after `close`, or when it fails.

    Args:
        rendezvous: the store, and the worker's rank.
        name: the link's name, the same at both ends and used for no other link.
        side: which end this is.
        guard: seals and opens its messages.
        waker: fired when a message has arrived, or the worker has failed.

    Raises:
        ConfigurationError: the backend is not available here.
        TransportError: no more threads can be started.
    """

    def __init__(self, rendezvous: StoreEnd, name: str, side: Side, guard: Guard, waker: Waker) -> None:
        self._rendezvous = rendezvous
        self._side = side
        self._guard = guard
        self._key = f"weightsync/link/{name}"
        self._waker = waker
        self._condition = threading.Condition()
        self._outgoing = Outgoing()
        self._arrived: deque[Received] = deque()
        #: Messages from a sender that has not proved yet that it is not a recording.
        self._held: list[Received] = []
        #: Called once the peer is known to be authentic, or lost before that.
        self._admitted: Callable[[], None] | None = None
        self._receive_buffers = ReceiveBuffers()
        self._met = threading.Event()
        self._cut = threading.Event()
        self._failed: TransportError | ProtocolError | None = None
        #: Why the reading thread must end after what was written to it; empty: it need not.
        self._ending = ""
        self._closed = False
        self._group = Group(rendezvous.backend, side.rank, self._key)
        self._writer: Client | None = None
        self._reader: Client | None = None
        self._inbox: Inbox | None = None
        self._heartbeat_member = heartbeat.join(
            rendezvous.store, heartbeat.Callbacks(self._lose, self._lose_store, self._look)
        )
        try:
            start(self, self._write, self._read)
        except TransportError as error:
            self._fail(error)
            raise

    # ----------------------------------------------------------------------------- called by other threads

    @property
    def failed(self) -> TransportError | ProtocolError | None:
        """Why nothing more will be read or written."""
        return self._failed

    @property
    def ending(self) -> bool:
        """Whether it is known that the peer will write nothing more."""
        return bool(self._ending)

    def flushed(self) -> bool:
        """Whether all messages are written; if not, the waker is fired later.

        Raises:
            TransportError: some messages never will be written.
        """
        with self._condition:
            if not self._outgoing.cut_short:
                return self._outgoing.empty()
            if self._failed is None:
                return False  # the peer's messages before its end are read first
            raise TransportError(str(self._failed)) from self._failed

    def post(self, store_message: StoreMessage) -> None:
        """Queue a message to be written."""
        with self._condition:
            self._outgoing.add(store_message)
            if self._failed is not None:
                self._outgoing.drop()
            self._condition.notify_all()

    def when_admitted(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, once the peer is known to be authentic or has failed."""
        with self._condition:
            if not self._guard.admits and self._failed is None:
                self._admitted = callback
                return
        callback()

    @property
    def admits(self) -> bool:
        """Whether the peer is known to be authentic, as far as a key shows that."""
        return self._guard.admits

    def collect(self) -> tuple[list[Received], TransportError | ProtocolError | None]:
        """The messages that have arrived, and the failure after them, if any."""
        with self._condition:
            arrived = list(self._arrived)
            self._arrived.clear()
            return arrived, self._failed

    def end_reading(self, reason: str) -> None:
        """The peer can no longer be reached: deliver what it wrote before, then fail."""
        with self._condition:
            self._ending = self._ending or reason
            self._outgoing.shorten()
            self._condition.notify_all()
        self._met.set()
        self._group.abort()

    def close(self) -> None:
        """Write what is queued, up to the first payload that the peer must receive from us, and end."""
        with self._condition:
            self._closed = True
            self._outgoing.shorten()
            self._condition.notify_all()
        self._release()

    def forget(self) -> None:
        """In a forked child: do nothing more. The threads and torch's objects are the parent's."""
        self._condition = threading.Condition()
        keep_in_child(self._group, self._writer, self._reader, self._heartbeat_member, self._rendezvous)

    # --------------------------------------------------------------------------------- the writing thread

    def _write(self) -> None:
        try:
            client = self._writer = Client(self._rendezvous.store)
        except TransportError as error:
            self._fail(error)
            self._cut_clients()
            self._notify_later()
            return
        try:
            outbox = Outbox(client, f"{self._key}/{self._side.writes}")
            self._side.begin(client)
            for challenge in self._guard.first():
                outbox.put(challenge)
            outbox.put(self._guard.seal(f"{heartbeat.process_name()} {own_network()}".encode()))
            while (store_message := self._next(client)) is not None:
                self._post(store_message, client, outbox)
                self._written()
        except TransportError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a thread that ends must say so
            self._fail(_unforeseen(error))
        finally:
            self._finish(client, outbox)

    def _notify_later(self) -> None:
        """There was no connection: notify the peer, which waits for us, once there is one."""
        for _ in range(_TRIES):
            if self._cut.wait(_LOOK):
                return
            try:
                client = Client(self._rendezvous.store)
            except TransportError as error:
                if isinstance(error.__cause__, OSError):
                    continue  # still no descriptor
                return
            with contextlib.suppress(TransportError):
                Outbox(client, f"{self._key}/{self._side.writes}").shut()
                self._side.leave(client)
            client.close()
            return

    def _next(self, client: Client) -> StoreMessage | None:
        """The next message to write; None: there is none."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._outgoing or self._closed or self._failed or self._ending)
                if self._outgoing and self._failed is None:
                    return self._outgoing.take()
                if self._closed or self._failed is not None:
                    return None
            # The peer is dead: what it wrote before is read to the end.
            self._end_inbox(client)
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._failed)

    def _post(self, store_message: StoreMessage, client: Client, outbox: Outbox) -> None:
        try:
            store_message.before(client)
            if store_message.hint is not None:
                client.set(store_message.hint[0], store_message.hint[1].encode())
            if not store_message.needs_the_peer:
                text = (
                    store_message.frame
                    if store_message.payload is None
                    else store_message.frame + store_message.payload
                )
                outbox.put(self._guard.seal(text))
                return
            assert store_message.payload is not None
            outbox.put(self._guard.seal(store_message.frame, store_message.digest() if self._guard.keyed else b""))
            self._met.wait()
            self._transfer(store_message.payload, client)
        finally:
            store_message.done()

    def _written(self) -> None:
        with self._condition:
            awaited = self._outgoing.written()
        if awaited:
            self._waker.fire()

    def _transfer(self, payload: memoryview, client: Client) -> None:
        try:
            self._group.send(client, payload, self._rendezvous.in_flight)
        except TransportError as error:
            self.end_reading(str(error))
            with self._condition:
                self._outgoing.drop()  # later messages would overtake it
            self._group.notify_aborted(client)

    def _finish(self, client: Client, outbox: Outbox) -> None:
        """Tell the peer that nothing more comes, and end the reading thread."""
        try:
            outbox.shut()
            self._side.leave(client)
            self._end_inbox(client)
        except TransportError:
            self.cut()
        finally:
            client.close()

    def _end_inbox(self, client: Client) -> None:
        with self._condition:
            if self._inbox is not None and self._reader is None:
                return
            number = 0 if self._inbox is None else self._inbox.number
        end(client, f"{self._key}/{self._side.reads}", number)

    def cut(self) -> None:
        """Make both threads' calls to the store fail."""
        self._cut.set()
        self._cut_clients()

    def _cut_clients(self) -> None:
        with self._condition:
            clients = self._reader, self._writer
        for client in clients:
            if client is not None:
                client.cut()

    # --------------------------------------------------------------------------------- the reading thread

    def _read(self) -> None:
        if self._closed:
            return
        try:
            client = Client(self._rendezvous.store)
        except TransportError as error:
            self._fail(error)
            return
        try:
            with self._condition:
                if self._failed is not None:
                    return
                self._reader = client
                self._inbox = Inbox(client, f"{self._key}/{self._side.reads}")
            self._receive_all(self._inbox, client)
        except Shut:
            self._before_end(client)
            self._fail(TransportError(f"{self._side.peer} has closed this link."))
        except Ended:
            self._fail(TransportError(f"{self._side.peer} has ended: {self._ending or 'the link was closed'}."))
        except (TransportError, ProtocolError) as error:
            # Once the link is closed, we have ended the payload that was arriving: earlier messages are still written.
            if not self._closed:
                self._fail(error)
        except Exception as error:  # noqa: BLE001 - a thread that ends must say so
            self._fail(_unforeseen(error))
        finally:
            with self._condition:
                self._reader = None
            if self._inbox is not None:
                with contextlib.suppress(TransportError):
                    self._inbox.forget()
            client.close()
            self._group.close()

    def _receive_all(self, inbox: Inbox, client: Client) -> None:
        process, _, network = bytes(self._next_text(inbox).text).decode("ascii", "replace").partition(" ")
        self._heartbeat_member.follow(process)
        self._group.stays_on_host = network == own_network()
        self._met.set()
        while True:
            self._admit()
            inbox.forget()
            opened = self._guard.open(memoryview(bytearray(inbox.take())))
            if opened is not None:
                received = self._opened(opened, client)
                if isinstance(received.message, Bye) and self._guard.admits:
                    self._before_end(client)
                self._held.append(received)
                del received

    def _next_text(self, inbox: Inbox) -> Opened:
        """The next message that is not for the guard alone."""
        while True:
            opened = self._guard.open(memoryview(bytearray(inbox.take())))
            if opened is not None:
                return opened
            if self._guard.replies:
                self.post(StoreMessage(b"", None, None, _nothing))

    def _admit(self) -> None:
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

    def _opened(self, opened: Opened, client: Client) -> Received:
        """A whole message with its payload in our own memory."""
        store_message = opened.text
        control = codec.peek(store_message).control_nbytes
        message, inline = codec.decode(store_message[:control]), store_message[control:]
        nbytes = message.nbytes if isinstance(message, Update) else 0
        if len(inline) != (nbytes if nbytes <= INLINE_NBYTES else 0):
            raise codec.malformed(f"{nbytes} bytes were announced, but {len(inline)} arrived", store_message)
        if nbytes <= INLINE_NBYTES:
            return Received(message, inline if nbytes else None)
        try:
            buffer = self._receive_buffers.find(nbytes)
        except NoRoom as error:
            # Later messages are for us all the same.
            self._group.skip(client, nbytes, self._rendezvous.in_flight)
            return Received(message, untaken=str(error))
        self._group.receive(client, buffer, self._rendezvous.in_flight)
        if self._guard.keyed and digest_of(buffer) != opened.digest:
            raise AuthenticationError("A payload is not the one that its sender sealed: it was rejected.")
        return Received(message, buffer)

    # ------------------------------------------------------------------------------------------- the end

    def _lose(self, reason: str) -> None:
        """Called by the heartbeat: the peer or the store is silent."""
        self._fail(TransportError(f"{self._side.peer} is lost: {reason}."))

    def _look(self) -> None:
        """Called by the heartbeat with each beat."""
        if self._group.stuck():
            self._lose("the connection of the process group has ended in the middle of a payload")

    def _lose_store(self, reason: str) -> None:
        self._fail(TransportError(f"{self._side.peer} is lost with the store: {reason}."))
        self.cut()

    def _fail(self, error: TransportError | ProtocolError) -> None:
        with self._condition:
            if self._failed is None:
                self._failed = error
            self._outgoing.drop()
            self._held.clear()
            callback, self._admitted = self._admitted, None
            self._condition.notify_all()
        self._release()
        if callback is not None:
            callback()
        self._waker.fire()

    def _release(self) -> None:
        self._heartbeat_member.leave()
        self._met.set()
        self._group.abort()


def _nothing() -> None:
    return None


def _unforeseen(error: Exception) -> TransportError:
    failed = TransportError(f"A link's thread failed: {error!r}")
    failed.__cause__ = error
    return failed
