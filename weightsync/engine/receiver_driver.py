"""The receiver's driver: reads the links, keeps the pending update, and sends every answer that the table requires."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from weightsync.engine.delta import HeldBase
from weightsync.engine.driver import Driver, close, flush, handler_failed, read, watch
from weightsync.engine.parts import IncomingParts
from weightsync.engine.refusal_hints import receiver_hint
from weightsync.errors import ProtocolError, SenderClosed, StateError, TransportError
from weightsync.protocol import receiver as pure
from weightsync.protocol._tables import ReceiverInput, RefusalKind, State
from weightsync.protocol.machine import ReceiverMachine
from weightsync.protocol.messages import Ack, Bye, Ending, Hello, Message, NoBase, Part, Refusal, Update
from weightsync.transports.base import Link, Outlet, Received, Steady
from weightsync.transports.device import CarriesDevices, Slot
from weightsync.transports.process import own_host, own_identity
from weightsync.weights.device.base import DeviceMemory, on_host
from weightsync.weights.layout import Layout
from weightsync.weights.tree_digest import ChunkHashes

logger = logging.getLogger("weightsync")


class Pending(Struct, frozen=True):
    """The version that has arrived and is not applied yet."""

    update: Update
    layout: Layout
    payload: memoryview | DeviceMemory
    #: The slot that it lies in; None if it travelled.
    slot: Slot | None = None
    #: Why this process could not receive the payload; empty if it could.
    untaken: str = ""
    #: The hashes of the parts that were hashed on arrival; None: none were.
    hashes: ChunkHashes | None = None

    def on_host(self) -> memoryview:
        """The payload in the host's memory: a copy, if it lies on a device."""
        return self.payload if isinstance(self.payload, memoryview) else on_host(self.payload, self.layout.nbytes)


class ReceiverDriver(Driver[ReceiverInput, pure.ReceiverData, pure.Event, pure.Effect]):
    """One receiver's machine, data and links.

    Its methods take the lock and never block. A link whose peer breaks the protocol goes down, and the
    `ProtocolError` is raised unless another link is the current one.
    """

    def __init__(self, model_id: str) -> None:
        super().__init__(model_id, ReceiverMachine(), pure.ReceiverData(), pure.step)
        self.pending: Pending | None = None
        #: Why the last link ended; empty if no link has.
        self.ended = ""
        #: The error that a caller gets then.
        self.ended_error: type[TransportError] = TransportError
        #: Why the last refused handshake was refused; empty if none was.
        self.handshake_refusal = ""
        #: The link that failed most recently when it was written to.
        self._unwritable = 0
        #: The Hello of the sender whose handshake was accepted last; None if none was.
        self.greeting: Hello | None = None
        self._devices = b""
        #: The base of deltas; empty unless the sender may send some.
        self.held = HeldBase()
        #: The delta that came last without its base, and the number of its link.
        self._baseless_delta: tuple[int, Update] | None = None
        self._parts = IncomingParts()
        self._links: dict[int, Link] = {}
        #: The links' queues of unwritten messages, for links that have one: to see if they are empty.
        self._outlets: dict[int, Outlet] = {}
        self._layouts: dict[bytes, Layout] = {}

    @property
    def devices(self) -> bytes:
        """The devices on which the model can use slots, as the Hello names them; empty: it is on the host."""
        return self._devices

    @devices.setter
    def devices(self, devices: bytes) -> None:
        self._devices = devices
        for link in self._open if devices else ():
            _announce_copies(link)

    def add_link(self, link: Link) -> None:
        """Listen on one more link; the handshake decides which link is current."""
        with self.lock:
            if self.machine.state is State.CLOSED:
                link.close()
                return
            self._last_link += 1
            self._links[self._last_link] = link
            if isinstance(link, Steady):
                self._outlets[self._last_link] = link.outlet
            self._open = (*self._open, link)
            if self._devices:
                _announce_copies(link)
            self.ended = ""
            self.waker.fire()

    @contextlib.contextmanager
    def expecting_sender(self) -> Iterator[None]:
        """Forget how the last link ended, unless the block fails: a sender may link again."""
        ended, self.ended = self.ended, ""
        try:
            yield
        except BaseException:
            self.ended = ended
            raise

    def close(self) -> None:
        """Close for good: send Bye over every link, close them, wake callers that wait."""
        with self.lock:
            self.take(pure.Close())
            for number in list(self._links):
                self._leave(number, _NO_INCARNATION, _CLOSED)
            self._drop_all()

    def fail(self, reason: str, remote_traceback: str) -> None:
        """Close for good because of an error: the sender keeps this worker, LOST, with the reason."""
        self._end(pure.Fail(reason, remote_traceback))

    def break_down(self, reason: str, remote_traceback: str) -> None:
        """Close for good because the model holds no whole version: LOST to the sender, with the reason."""
        self._end(pure.Broken(reason, remote_traceback))

    def _end(self, event: pure.Fail | pure.Broken) -> None:
        with self.lock:
            self.take(event)
            for number in list(self._links):
                self._leave(number, _NO_INCARNATION, event.reason, Ending.FAILED)
            self._drop_all()

    def _drop_all(self) -> None:
        self.pending = None
        self._parts.forget()
        self.held.drop()
        self.waker.close()

    @property
    def deferring(self) -> bool:
        """Whether the ack of the version applied last is deferred until it has been passed on to other workers."""
        return isinstance(self.data.answer, pure.Deferred)

    def _hint(self, method: str) -> str:  # noqa: ARG002 - the hint is the same for every method
        return receiver_hint(self.machine.state, self.data)

    def _execute(self, effect: pure.Effect) -> None:
        match effect:
            case pure.Greet(link):
                self._write(link, self._hello(link))
            case pure.Reject(link, incarnation, kind, reason):
                self.ended, self.ended_error = f"its handshake was refused: {reason}", TransportError
                self.handshake_refusal = reason
                self._write(link, self._refusal((incarnation, 0), kind, reason))
                logger.warning("model %r: a handshake was refused: %s", self.model_id, reason)
            case pure.Disown(link, incarnation, kind, reason, trace):
                said = self._refusal((incarnation, 0), kind, reason)
                self._send_last(link, replace(said, remote_traceback=trace))
            case pure.Tell(link, key, kind):
                self._write(link, self._refusal(key, kind, _REASONS[kind]))
            case pure.Reply(link, answer):
                self._write(link, answer)
                self.flush()
            case pure.CloseLink(link):
                self._close_link(link)
            case pure.Leave(link):
                self._leave(link, self.data.fence, _CLOSED)

    def _hello(self, link: int) -> Hello:
        pid, started = own_identity()
        served, adapter = self.data.served, self._links.get(link)
        return Hello(
            model_id=self.model_id,
            incarnation=self.data.fence,
            version=served[1] if served and served[0] == self.data.fence else 0,
            layout_digest=self.layout.digest if self.layout else b"",
            host=own_host(),
            pid=pid,
            started=started,
            fence=self.data.fence,
            link=link,
            devices=self.devices if isinstance(adapter, CarriesDevices) and adapter.opens else b"",
        )

    def _refusal(self, key: pure.Key, kind: RefusalKind, reason: str) -> Refusal:
        return Refusal(
            model_id=self.model_id,
            incarnation=key[0],
            version=key[1],
            kind=kind,
            reason=reason,
            fence=self.data.fence,
        )

    def _write(self, link: int, message: Message) -> None:
        if link not in self._links:
            return
        outlet = self._outlets.get(link)
        open_link = self._links[link]
        try:
            open_link.send(message)
            if outlet is None or not outlet.idle:
                self._waitables_changed(open_link)
        except Exception as error:  # noqa: BLE001 - any error is a failure of this link; the others continue
            self._handle_write_failure(link, open_link, str(error) or repr(error))

    def _handle_write_failure(self, number: int, link: Link, reason: str) -> None:
        """A link failed when it was written to. A goodbye that had arrived before says how it ended."""
        if number == self._unwritable:  # it is about to be closed, and the goodbye has been read
            return
        self._unwritable, unread = number, _read_remaining(link)
        self._take_link_down(number, reason)
        for message in unread:
            self._note_goodbye(message)

    def _note_goodbye(self, message: Message) -> None:
        if isinstance(message, Bye) and message.incarnation == self.data.fence:
            self.ended, self.ended_error = _describe_goodbye(message)

    def _send_last(self, link: int, message: Message) -> None:
        """Send the last message over a link that closes next, if it can still be sent."""
        if link not in self._links:
            return
        try:
            self._links[link].send(message)
        except Exception as error:  # noqa: BLE001 - it may be closing because it failed
            logger.debug("the last message over a link of %r could not be sent: %s", self.model_id, error)

    def _take_link_down(self, link: int, reason: str) -> None:
        """The link has failed."""
        self.ended, self.ended_error = reason, TransportError
        self._step(pure.LinkDown(link, reason))

    def _take_goodbye(self, link: int, bye: Bye) -> None:
        """Take a sender's goodbye: its link ends, unless another sender uses it now."""
        step = self._step(pure.Goodbye(link, bye.incarnation))
        if step.effects:
            self.ended, self.ended_error = _describe_goodbye(bye)

    def _lose_link(self, link: Link, reason: str) -> None:
        for number, known in list(self._links.items()):
            if known is link:
                self._take_link_down(number, reason)

    def _leave(self, link: int, incarnation: int, reason: str, ending: Ending = Ending.CLOSED) -> None:
        """Send a goodbye to the sender of this incarnation over a link, and close it."""
        self._send_last(link, Bye(model_id=self.model_id, incarnation=incarnation, reason=reason, ending=ending))
        self._close_link(link)

    def _close_link(self, link: int) -> None:
        if link in self._links:
            closing = self._links.pop(link)
            self._parts.forget()
            self._outlets.pop(link, None)
            self._open = tuple(self._links.values())
            close(closing)

    def current_link(self) -> Link | None:
        """The current link: the one whose handshake was accepted last, or None."""
        with self.lock:
            return None if self.data.link is None else self._links.get(self.data.link)

    def flush(self) -> None:
        """Write what is waiting to be written. An answer that was written is ANSWERED."""
        for number, link in tuple(self._links.items()):
            outlet, written = self._outlets.get(number), True
            if outlet is None or not outlet.idle:
                self._waitables_changed(link)
                try:
                    written = flush(link)
                except TransportError as error:
                    self._handle_write_failure(number, link, str(error))
                    continue
            answered = written and number == self.data.link and not isinstance(self.data.answer, pure.Deferred)
            if answered and self.machine.state is State.AWAITING_ACK:
                self._step(_ANSWERED)

    def pump(self) -> None:
        """Write what is waiting, read what has arrived. The current link is not read while its answer is unwritten.

        Raises ProtocolError: the peer of the current link, or of the only one, broke the protocol; its link is down.
        """
        with self.lock:
            if self.machine.state is State.CLOSED:
                return
            self.flush()
            if self._todo:
                self._finish()
            for number, link in tuple(self._links.items()):
                owing = self.machine.state is State.AWAITING_ACK and number == self.data.link
                if not owing and number in self._links:
                    self._read(number, link)

    def _read(self, number: int, link: Link) -> None:
        try:
            for received in read(link):
                message = received.message
                aside = message.base if isinstance(message, Update) else isinstance(message, Part)
                if aside and self._bypasses_machine(number, link, received):
                    continue
                if number in self._links:
                    self._handle(number, link, received)
                    if self._todo:
                        self._finish()
                elif number == self._unwritable:
                    self._note_goodbye(received.message)
        except TransportError as error:
            self._take_link_down(number, str(error))
        except (ProtocolError, StateError) as error:
            beside = number != self.data.link and len(self._links) > 1
            self._take_link_down(number, str(error))
            if beside:
                logger.error("a link of %r to %s broke the protocol: %s", self.model_id, link.peer, error)
                return
            unread = error.unread if isinstance(error, ProtocolError) else b""
            raise ProtocolError(str(error), unread) from error
        except Exception as error:  # noqa: BLE001 - any error here is a failure of this link only
            self._take_link_down(number, handler_failed(link, error))
        finally:
            if self._todo:
                self._finish()

    def _bypasses_machine(self, number: int, link: Link, received: Received) -> bool:
        """Whether a message is not for the machine: a part of a payload, or a delta whose base is not held."""
        message = received.message
        if isinstance(message, Part):
            self._parts.arrived(message, received)
            return True
        return isinstance(message, Update) and self._waits_for_whole(number, link, message)

    def _waits_for_whole(self, number: int, link: Link, update: Update) -> bool:
        """Whether an update is the delta of a version that is wanted, against a base that is not held.

        Its sender gets a NoBase, and sends the version whole. For the protocol the update arrives then, or when a newer
        one supersedes it: until then nothing of it is recorded.
        """
        waiting, self._baseless_delta = self._baseless_delta, None
        if waiting is not None and waiting[0] == number and _overtakes(update, waiting[1]):
            self._handle(number, link, Received(waiting[1], untaken="The base of its delta is not held."))
            self._finish()
        if number not in self._links or not _is_delta(update) or self.held.holds(update):
            return False
        event = pure.UpdateArrived(number, update.incarnation, update.version)
        if pure.name(self.machine.state, self.data, event) not in _WANTED:
            return False
        self._layout_of(update)
        self._baseless_delta = number, update
        answer = NoBase(model_id=self.model_id, incarnation=update.incarnation, version=update.version)
        ReceiverDriver._write(self, number, answer)
        return True

    def _forget(self) -> None:
        if self.data.pending is None:
            if self.pending is not None and self.pending.update.base is not None:
                self._keep_base(self.pending)
            self.pending = None

    def _keep_base(self, decided: Pending) -> None:
        """Keep the payload of a version that was applied: the next may be a delta against it."""
        update = decided.update
        if self.data.served == (update.incarnation, update.version) and isinstance(decided.payload, memoryview):
            self.held.keep(update, decided.payload)

    def _handle(self, number: int, link: Link, received: Received) -> None:
        message = received.message
        match message:
            case Hello():
                event = pure.HelloArrived(number, message.incarnation, self._misfit(message), message.link)
                if self.take(event).input not in _NOT_ACCEPTED:
                    self.greeting = message
                if number in self._links:
                    # After the handshake: a sender that cannot be watched learns why its link ends.
                    watch(link, message)
                    self._waitables_changed(link)
            case Update():
                self._take_update(number, message, received)
            case Bye():
                self._take_goodbye(number, message)
            case Ack() | Refusal() | NoBase():
                raise ProtocolError(f"a sender sent {type(message).__name__}; only receivers send it.")

    def _misfit(self, hello: Hello) -> str:
        if self.layout is None or not hello.layout or hello.layout_digest == self.layout.digest:
            return ""
        misfit = self.layout.misfit(Layout.decode(hello.layout))
        return str(misfit) if misfit else ""

    def _take_update(self, number: int, update: Update, received: Received) -> None:
        event = pure.UpdateArrived(number, update.incarnation, update.version)
        if update.incarnation < self.data.fence:
            self.take(event)  # STALE in any case: the layouts of an older sender are forgotten
            return
        layout = self._layout_of(update)
        before = self.data.pending
        self.take(event)
        if self.data.pending not in (None, before):
            travelled = memoryview(b"") if received.payload is None else received.payload
            if update.base is not None and not received.untaken:
                travelled = self.held.whole(update, layout, travelled)
            payload = received.on_device if isinstance(received.on_device, DeviceMemory) else travelled
            hashes = None if self._parts.hashes is None else self._parts.hashes_of(update)
            self.pending = Pending(update, layout, payload, received.slot, received.untaken, hashes)

    def _layout_of(self, update: Update) -> Layout:
        if update.layout:
            carried = Layout.decode(update.layout)
            # One object for equal layouts: comparing them then takes no time.
            own = self.layout
            self._layouts = {carried.digest: own if own is not None and own == carried else carried}
        layout = self._layouts.get(update.layout_digest)
        if layout is None or (layout.nbytes != update.nbytes and not _is_delta(update)):
            raise ProtocolError(
                f"version {update.version} names a layout or a size that this link has not carried. If two workers "
                "share a connection, each gets only some of the messages: give each its own."
            )
        return layout


def _announce_copies(link: Link) -> None:
    """Tell a link that what it receives is copied to a device."""
    if isinstance(link, CarriesDevices):
        link.copied_to_device()


def _read_remaining(link: Link) -> list[Message]:
    """What has arrived over a link that has failed."""
    try:
        return [received.message for received in read(link)]
    except (TransportError, ProtocolError):
        return []


def _describe_goodbye(bye: Bye) -> tuple[str, type[TransportError]]:
    """How a sender's end is reported, and the type of the error."""
    if bye.ending is Ending.FAILED:
        return f"the sender failed: {bye.reason}", TransportError
    return f"the sender said goodbye: {bye.reason}", SenderClosed


def _is_delta(update: Update) -> bool:
    return update.base is not None and update.base.version > 0


def _overtakes(update: Update, waiting: Update) -> bool:
    """Whether an update is newer than one that waits for its whole weights, of the same sender."""
    return update.incarnation == waiting.incarnation and update.version > waiting.version


#: The incarnation that a last message over a link without a handshake names: no sender has said who it is.
_NO_INCARNATION = 0
_CLOSED = "the receiver was closed"
#: A handshake was refused, or came too late.
_NOT_ACCEPTED = frozenset({ReceiverInput.REJECTED, None})
_WANTED = frozenset({ReceiverInput.UPDATE, ReceiverInput.NEWER})
_ANSWERED = pure.Answered()

_REASONS = {
    RefusalKind.SUPERSEDED: "a newer version arrived before this one was applied",
    RefusalKind.STALE: "this worker has already seen a newer version or a newer sender",
}
