"""`StoreLink`: control messages as values in a store, payloads over a private process group."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weightsync import wire
from weightsync._tables import Delivery
from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.messages import Ack, Message, Update
from weightsync.transports.base import Received, Waker
from weightsync.transports.distributed import pulse
from weightsync.transports.distributed.group import Group
from weightsync.transports.distributed.landing import Landings
from weightsync.transports.distributed.letters import Ended, Inbox, Outbox, Shut, end
from weightsync.transports.distributed.store import Client, StoreEnd
from weightsync.transports.fork import forget_after_fork
from weightsync.transports.liveness import ProcessWatch
from weightsync.transports.memory import Buffer

#: Payloads up to this size travel through the store, behind their message.
INLINE_NBYTES: Final = 64 * 1024
#: TorchRL's keys and words: written as hints for loops that wait on them, never read.
HINT: Final = "update_weights"
ACKED: Final = "updated"


#: In a forked child: never freed, since torch would wait for threads that are not there.
_inherited: list[object] = []


@dataclass(frozen=True, slots=True)
class Role:
    """One end of a link."""

    #: In the process group.
    rank: int
    writes: str
    reads: str


SENDER: Final = Role(0, "down", "up")
WORKER: Final = Role(1, "up", "down")


@dataclass(frozen=True, slots=True)
class _Letter:
    frame: bytes
    payload: memoryview | None
    #: TorchRL's key and word for it.
    hint: tuple[str, str] | None
    #: Called once nobody reads the payload any more.
    done: Callable[[], None]


class StoreLink:
    """A link over a store. See `weightsync.transports.base.Link` for its contract.

    Two threads of its own block so that its driver need not: one writes, one reads. Both end soon after `close`.

    Args:
        meeting: the store, and the worker's rank.
        name: of the link, the same at both ends and used for no other.
        role: which end this is.
        begin: called by the writing thread first of all.
        leave: called by it last of all.
        peer: who is at the other end, for messages to people.
    """

    delivery = Delivery.ORDERED

    def __init__(
        self,
        meeting: StoreEnd,
        name: str,
        role: Role,
        peer: str,
        *,
        begin: Callable[[Client], None],
        leave: Callable[[Client], None],
    ) -> None:
        self._peer = peer
        self._meeting = meeting
        self._name = name
        self._role = role
        self._begin, self._leave = begin, leave
        self._condition = threading.Condition()
        self._queue: deque[_Letter] = deque()
        self._arrived: deque[Received] = deque()
        self._landings = Landings()
        self._waker = Waker()
        self._watch: ProcessWatch | None = None
        self._met = threading.Event()
        self._failed: TransportError | ProtocolError | None = None
        #: Why the reading thread is to end behind what has been written to it; empty: it is not.
        self._ending = ""
        self._closed = False
        self._group = Group(meeting.backend, role.rank, self._key)
        self._reader: Client | None = None
        self._inbox: Inbox | None = None
        self._heart = pulse.join(meeting.store, self._lose)
        forget_after_fork(self)
        for body in (self._write, self._read):
            threading.Thread(target=body, name=f"weightsync-{body.__name__[1:]}", daemon=True).start()

    @property
    def _key(self) -> str:
        return f"weightsync/link/{self._name}"

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages to people."""
        return self._peer

    # ------------------------------------------------------------------------------- called by the driver

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queue a message for the writing thread: see `Link.send`."""
        self._require_open()
        if self._failed is not None:
            raise TransportError(str(self._failed)) from self._failed
        frame, carried = wire.encode(message), None
        if isinstance(message, Update) and message.nbytes:
            if payload is None or payload.nbytes < message.nbytes:
                raise ConfigurationError(f"Version {message.version} comes without its {message.nbytes} bytes.")
            carried = payload.view[: message.nbytes]
        token = object()
        if payload is not None:
            payload.pin(token)
        done = _nothing if payload is None else lambda: payload.unpin(token)
        with self._condition:
            self._queue.append(_Letter(frame, carried, self._hint(message), done))
            self._condition.notify_all()

    def _hint(self, message: Message) -> tuple[str, str] | None:
        if isinstance(message, Update):
            return f"NODE_{self._meeting.rank}_in", HINT
        return (f"NODE_{self._meeting.rank}_out", ACKED) if isinstance(message, Ack) else None

    def flush(self) -> bool:
        """What is queued is the writing thread's business: see `Link.flush`."""
        self._require_open()
        return True

    def receive(self) -> list[Received]:
        """Everything that has arrived whole: see `Link.receive`."""
        self._require_open()
        self._waker.clear()
        if self._watch is not None and not self._ending and self._watch.dead:
            self._end_reading(f"process {self._watch.pid} is dead")
        with self._condition:
            arrived, failed = list(self._arrived), self._failed
            self._arrived.clear()
        if failed is not None:
            if not arrived:
                raise failed
            # What came before is delivered now, the error at the next call: the wait before it must end.
            self._waker.fire()
        return arrived

    def waitables(self) -> list[int]:
        """Readable once something has arrived, or the peer is dead: see `Link.waitables`."""
        if self._closed:
            return []
        watched = self._watch is not None and not self._ending and self._watch.fileno() >= 0
        return [self._waker.fileno(), *([self._watch.fileno()] if watched and self._watch is not None else [])]

    def wants_write(self) -> int | None:
        """Nothing is ever written by the driver's thread."""
        return None

    def watch(self, pid: int, started: int) -> None:
        """Notice the death of the peer's process: see `Link.watch`."""
        if not pid or self._closed or (self._watch is not None and self._watch.names(pid, started)):
            return
        if self._watch is not None:
            self._watch.close()
        self._watch = ProcessWatch(pid, started)
        if self._watch.dead:
            self._waker.fire()

    def close(self) -> None:
        """Give the link up: see `Link.close`. Control messages that are queued still leave; payloads do not."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._drop_payloads()
            self._condition.notify_all()
        self._release()
        self._waker.close()
        if self._watch is not None:
            self._watch.close()

    def forget(self) -> None:
        """In a forked child: be closed. The threads are the parent's, and so is what torch would take apart with us."""
        _inherited.append((self._group, self._reader, self._heart))
        self._condition = threading.Condition()
        self._closed = True
        self._queue.clear()
        self._arrived.clear()

    # --------------------------------------------------------------------------------- the writing thread

    def _write(self) -> None:
        try:
            client = Client(self._meeting.store)
        except TransportError as error:
            self._fail(error)
            self._cut_reader()
            return
        try:
            outbox = Outbox(client, f"{self._key}/{self._role.writes}")
            self._begin(client)
            outbox.put(pulse.process_name().encode())
            while (letter := self._next(client)) is not None:
                self._post(letter, client, outbox)
        except TransportError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a thread that ends must say so
            self._fail(_unforeseen(error))
        finally:
            self._finish(client, outbox)

    def _next(self, client: Client) -> _Letter | None:
        """What to write next; None: nothing more."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closed or self._failed or self._ending)
                if self._queue and self._failed is None:
                    return self._queue.popleft()
                if self._closed or self._failed is not None:
                    return None
            # The peer is dead: what it wrote before is read to its end.
            self._end_inbox(client)
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._failed)

    def _post(self, letter: _Letter, client: Client, outbox: Outbox) -> None:
        try:
            if letter.hint is not None:
                client.set(letter.hint[0], letter.hint[1].encode())
            if letter.payload is None or len(letter.payload) <= INLINE_NBYTES:
                outbox.put(letter.frame if letter.payload is None else letter.frame + letter.payload)
                return
            outbox.put(letter.frame)
            self._met.wait()
            self._transfer(letter.payload, client)
        finally:
            letter.done()

    def _transfer(self, payload: memoryview, client: Client) -> None:
        try:
            self._group.send(client, payload, self._meeting.in_flight)
        except TransportError as error:
            self._end_reading(str(error))

    def _finish(self, client: Client, outbox: Outbox) -> None:
        """Say that nothing more comes, and have the reading thread end."""
        try:
            outbox.shut()
            self._leave(client)
            self._end_inbox(client)
        except TransportError:
            self._cut_reader()
        finally:
            client.close()

    def _end_inbox(self, client: Client) -> None:
        with self._condition:
            if self._inbox is not None and self._reader is None:
                return
            number = 0 if self._inbox is None else self._inbox.number
        end(client, f"{self._key}/{self._role.reads}", number)

    def _cut_reader(self) -> None:
        with self._condition:
            reader = self._reader
        if reader is not None:
            reader.cut()

    # --------------------------------------------------------------------------------- the reading thread

    def _read(self) -> None:
        try:
            client = Client(self._meeting.store)
        except TransportError as error:
            self._fail(error)
            return
        try:
            with self._condition:
                self._reader = client
                self._inbox = Inbox(client, f"{self._key}/{self._role.reads}")
            self._take_in(self._inbox, client)
        except Shut:
            self._fail(TransportError(f"{self._peer} has closed this link."))
        except Ended:
            self._fail(TransportError(f"{self._peer} has ended: {self._ending or 'the link was closed'}."))
        except (TransportError, ProtocolError) as error:
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

    def _take_in(self, inbox: Inbox, client: Client) -> None:
        self._heart.follow(inbox.take().decode("ascii", "replace"))
        self._met.set()
        while True:
            inbox.forget()
            received = self._opened(memoryview(bytearray(inbox.take())), client)
            with self._condition:
                self._arrived.append(received)
            self._waker.fire()

    def _opened(self, letter: memoryview, client: Client) -> Received:
        """A message, whole, with its payload in memory of ours."""
        control = wire.peek(letter).control_nbytes
        message, inline = wire.decode(letter[:control]), letter[control:]
        nbytes = message.nbytes if isinstance(message, Update) else 0
        if len(inline) != (nbytes if nbytes <= INLINE_NBYTES else 0):
            raise wire.malformed(f"{nbytes} bytes were announced, and {len(inline)} came", letter)
        if nbytes <= INLINE_NBYTES:
            return Received(message, inline if nbytes else None)
        landing = self._landings.find(nbytes)
        self._group.receive(client, landing, self._meeting.in_flight)
        return Received(message, landing)

    # ------------------------------------------------------------------------------------------- the end

    def _end_reading(self, reason: str) -> None:
        """Nothing reaches the peer any more: deliver what it wrote before, then fail."""
        with self._condition:
            self._ending = self._ending or reason
            self._drop_payloads()
            self._condition.notify_all()
        self._group.abort()
        self._met.set()

    def _lose(self, reason: str) -> None:
        """Called by the pulse: the peer, or the store, is silent."""
        self._fail(TransportError(f"{self._peer} is lost: {reason}."))

    def _fail(self, error: TransportError | ProtocolError) -> None:
        with self._condition:
            if self._failed is None:
                self._failed = error
            self._drop_payloads()
            self._queue.clear()
            self._condition.notify_all()
        self._release()
        self._waker.fire()

    def _drop_payloads(self) -> None:
        """With the lock held: what is queued and has a payload will not leave."""
        for letter in self._queue:
            letter.done()
        self._queue = deque(letter for letter in self._queue if letter.payload is None)

    def _release(self) -> None:
        self._heart.leave()
        self._met.set()
        self._group.abort()

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"The link to {self._peer} is closed.")


def _nothing() -> None:
    return None


def _unforeseen(error: Exception) -> TransportError:
    failed = TransportError(f"A link's thread failed: {error!r}")
    failed.__cause__ = error
    return failed


def base_key(model_id: str, rank: int) -> str:
    """Where links to the worker of that rank are announced."""
    return f"weightsync/{model_id}/{rank}"


def sender_link(meeting: StoreEnd, model_id: str, peer: str) -> StoreLink:
    """The sender's end of a new link, announced to the worker.

    Raises:
        ConfigurationError: the backend is not to be had here.
    """
    name = uuid.uuid4().hex
    base = base_key(model_id, meeting.rank)

    def announce(client: Client) -> None:
        # No counter: between counting and writing a sender may die, and the worker would wait for ever.
        number = int(client.value(f"{base}/newest") or b"0")
        while client.claim(f"{base}/door/{number}", name) != name:
            number += 1
        client.set(f"{base}/newest", str(number).encode())

    def withdraw(client: Client) -> None:
        client.claim(f"weightsync/link/{name}/taken", "closed")

    return StoreLink(meeting, name, SENDER, peer, begin=announce, leave=withdraw)


def worker_link(meeting: StoreEnd, name: str) -> StoreLink:
    """The worker's end of a link that it has taken."""
    return StoreLink(meeting, name, WORKER, "the sender", begin=lambda _: None, leave=lambda _: None)


def taken(client: Client, name: str) -> bool:
    """Whether a link that was announced is ours now: each is taken once."""
    mine = f"{pulse.process_name()} {os.getpid()} {uuid.uuid4().hex}"
    return client.claim(f"weightsync/link/{name}/taken", mine) == mine
