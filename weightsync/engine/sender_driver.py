"""The sender's driver: takes events, executes their effects over the links, and feeds the results back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, Final

from weightsync.engine.delta import VersionPayloads, version_payloads
from weightsync.engine.driver import Driver, Hearing, Lane, close, flush, handler_failed, read, watch
from weightsync.engine.packer import Packed, SentUpdate
from weightsync.engine.parts import OutgoingParts, outgoing_parts, whole_part, worth_parts
from weightsync.engine.refusal_hints import sender_hint, sender_message_error
from weightsync.errors import ProtocolError, TransportError
from weightsync.options import Verify
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.codec import slot_digest
from weightsync.protocol.machine import SenderMachine
from weightsync.protocol.messages import Ack, BaseRef, Bye, Ending, Hello, Message, NoBase, Refusal, Update
from weightsync.protocol.report import SyncReport
from weightsync.transports.base import CarriesDeltas, Gathering, Gathers, Link, TellsWhatIsRead
from weightsync.transports.buffers import Buffer
from weightsync.transports.device import CarriesDevices
from weightsync.transports.process import own_host, own_identity
from weightsync.transports.wakeup import AwaitedProcess

#: Takes an event of a link.
TakeEvent = Callable[[pure.Event], object]

_UNLINKED: Final = frozenset({State.UNINITIALIZED, State.CLOSED})
_DUE: Final = attrgetter("due")
_WORKER: Final = attrgetter("worker")

logger = logging.getLogger("weightsync")


class SenderDriver(Driver[SenderInput, pure.SenderData, pure.Event, pure.Effect]):
    """One sender's machine, data and links.

    Its methods take the lock, never block, and never raise because a link fails: that worker is LOST. They raise what
    the pure half raises (the call is refused), and then nothing has changed.
    """

    def __init__(self, model_id: str) -> None:
        super().__init__(model_id, SenderMachine(), pure.SenderData(), pure.step)
        #: The outcomes of updates that have ended and were not reported yet.
        self.concluded: dict[int, pure.Conclude] = {}
        #: When the workers were last heard from.
        self.hearing = Hearing()
        #: What others keep for each worker, by its id, until it says goodbye or is removed.
        self.kept: list[dict[int, Any]] = []
        self._links: dict[int, Lane] = {}
        #: How many processes that are to be watched have not started yet. Their start wakes no wait.
        self.awaited = 0
        self._packed: dict[int, Packed] = {}
        self._pin = object()  #: Pins their buffers. Not this driver: its links' threads may hold them in queues.
        #: For each version that is kept: worker id to the hashes that an ack may name, over any of the worker's links.
        self._named: dict[int, dict[int, set[bytes]]] = {}
        #: The update that was sent last; None if none was, or its version is no longer due.
        self._last_sent: SentUpdate | None = None
        #: Shared by links that send their updates together (a fan-out); None: each link sends on its own.
        self._gathering: Gathering | None = None
        #: The ending and the reason in this sender's goodbyes; here: it has not failed.
        self._goodbye: tuple[Ending, str] = (Ending.CLOSED, "the sender closed this link")
        #: The newest version that is not of the trainer's present model; 0: all are.
        self.last_of_former_model = 0
        #: The level at which a worker's goodbye is logged.
        self.goodbye_level = logging.WARNING

    def dispatch(self, event: pure.Send | pure.SendAsync, packed: Packed) -> int:
        """Send ``packed`` as the next version; returns the version.

        Raises StateError, ConfigurationError, WorkerLostError: refused; nothing was sent, no version was used.
        """
        with self.lock:
            version = self.data.version + 1
            self._packed[version] = packed
            packed.buffer.pins.add(self._pin)
            try:
                if self._gathering is None:
                    self.take(event)
                else:
                    self._take_gathered(self._gathering, event)
            except BaseException:
                if self.data.version < version:
                    self._release(version)
                raise
            return version

    def _take_gathered(self, gathering: Gathering, event: pure.Send | pure.SendAsync) -> None:
        """Take a dispatch whose updates leave their links together."""
        gathering.begin()
        try:
            self.take(event)
        finally:
            gathering.end()

    def join(self, worker: int, link: Link, process: AwaitedProcess | None = None) -> None:
        """Add a worker with a link, or give it a new one. Its process is watched from the start."""
        with self.lock:
            self._last_link += 1
            events = pure.joining(self.machine.state, self.data, worker, self._last_link)
            self._links[self._last_link] = Lane(worker, link, process)
            self.awaited += process is not None
            if isinstance(link, Gathers):
                self._gathering = link.gathering
            self._open = (*self._open, link)
            for event in events:
                self.take(event)
            self.waker.nudge()  # a caller that waits takes part in the link

    def remove(self, worker: int, reason: str) -> None:
        """Remove a worker and close its link."""
        with self.lock:
            for event in pure.removal(self.machine.state, self.data, worker, reason):
                self.take(event)
            self._forget_worker(worker)

    def _forget_worker(self, worker: int) -> None:
        """Forget what is known of a worker that is no longer a member: if it is added again, it counts as new."""
        self.hearing.forget(worker)
        for kept in self.kept:
            kept.pop(worker, None)

    def close(self) -> None:
        """Close for good: send a goodbye over every link, close them, wake callers that wait."""
        self.take(pure.Close())
        self.waker.close()
        self._idle.clear()  # what the links reach may end with the last reference to it, as Ray's actors do
        self._waits.clear()

    def fail(self, reason: str) -> None:
        """Close for good because of an error, which every goodbye carries."""
        with self.lock:
            self._goodbye = (Ending.FAILED, reason)
            self.close()

    def reported(self, report: SyncReport) -> None:
        """A report was returned to a caller, or raised. Does nothing; a recorded driver writes it to the trace."""

    def _hint(self, method: str) -> str:
        return sender_hint(self.machine.state, self.data, method)

    def _execute(self, effect: pure.Effect) -> None:
        match effect:
            case pure.Greet(worker, link, due):
                self._write(worker, link, self._hello(link, due))
                if due:
                    self._send_update(worker, link, due)
            case pure.Dispatch(worker, link, version):
                self._send_update(worker, link, version)
            case pure.CloseLink(_, link):
                self._close_link(link)
            case pure.Farewell(worker, reason):
                words = "model %r: worker %d said goodbye and left: %s"
                logger.log(self.goodbye_level, words, self.model_id, worker, reason)
                self._forget_worker(worker)
            case pure.Conclude():
                self.concluded[effect.outstanding.version] = effect
                self.waker.nudge()

    def _hello(self, link: int, due_version: int) -> Hello:
        pid, started = own_identity()
        layout = self.layout
        return Hello(
            model_id=self.model_id,
            incarnation=self.data.incarnation,
            version=due_version,
            layout_digest=layout.digest if layout else b"",
            layout=layout.encode() if layout else b"",
            host=own_host(),
            pid=pid,
            started=started,
            link=link,
        )

    def _send_update(self, worker: int, link: int, version: int) -> None:
        lane = self._links.get(link)
        if lane is None or not (lane.loses or lane.backlog.admit(version)):
            return
        packed = self._packed[version]
        # Where updates may be reordered or lost, each carries its layout.
        layout_known = lane.orders and lane.known_layout == packed.layout.digest
        try:
            # Determined now: by the time the ack arrives, the memory that the worker can map may have changed.
            shared = packed.buffer.mappable and lane.shares(packed.buffer, packed.layout.nbytes)
            sent = self._last_sent
            if sent is None or (sent.update.version, sent.layout_known, sent.shared) != (version, layout_known, shared):
                # One object for all workers that get the same message, so that a link can reuse its encoding.
                sent = self._last_sent = self._message_of(version, packed, layout_known, shared)
        except Exception as error:  # noqa: BLE001 - as in `_write`; weights on a device may lack memory on the host
            self._read_then_lose(worker, link, str(error) or repr(error), self._step)
            return
        self._named.setdefault(version, {}).setdefault(worker, set()).add(sent.named)
        update, payload = sent.update, packed.buffer
        if packed.payloads is not None and isinstance(lane.link, CarriesDeltas) and lane.link.carries_deltas:
            update, payload = packed.payloads.to(worker, link, self.data.workers[worker].served, update, payload)
        self._write(worker, link, update, payload)
        lane.known_layout = packed.layout.digest

    def _message_of(self, version: int, packed: Packed, layout_known: bool, shared: bool) -> SentUpdate:
        """The message with a version, and what an ack of it must name."""
        layout, digest = packed.layout, packed.digest_to_send(shared)
        update = Update(
            model_id=self.model_id,
            incarnation=self.data.incarnation,
            version=version,
            layout_digest=layout.digest,
            layout=b"" if layout_known else layout.encode(),
            digest=digest,
            nbytes=layout.nbytes,
            extras=packed.extras,
            form=packed.form,
            trace_context=packed.trace_context,
        )
        if digest or not shared:
            return SentUpdate(update, layout_known, shared, digest)
        seal = packed.buffer.sealed()
        named = slot_digest(seal, update.incarnation, version, layout.digest, packed.extras)
        return SentUpdate(update, layout_known, shared, named)

    def _write(self, worker: int, link: int, message: Message, payload: Buffer | None = None) -> None:
        lane = self._links.get(link)
        if lane is None:
            return
        try:
            lane.link.send(message, payload)
        except Exception as error:  # noqa: BLE001 - any error is a failure of this link; the other targets get the update
            self._read_then_lose(worker, link, str(error) or repr(error), self._step)
        if lane.outlet is None or not lane.outlet.idle:
            self._waitables_changed(lane.link)

    def _close_link(self, link: int) -> None:
        """Send Bye if it can be sent at once, and close. A shared connection stays open for its other models."""
        if link not in self._links:
            return
        lane = self._links.pop(link)
        closing, self.awaited = lane.link, self.awaited - (lane.awaited is not None)
        self._open = tuple(each.link for each in self._links.values())
        self.hearing.closed(link)
        ending, reason = self._goodbye
        try:
            closing.send(Bye(model_id=self.model_id, incarnation=self.data.incarnation, reason=reason, ending=ending))
        except Exception as error:  # noqa: BLE001 - it may be closing because it failed
            logger.debug("a goodbye over a link of %r could not be sent: %s", self.model_id, error)
        finally:
            close(closing)

    def reached(self) -> list[frozenset[bytes]]:
        """For each open link, the devices whose slots its worker can open."""
        return [link.reached if isinstance(link, CarriesDevices) else frozenset() for link in self._open]

    def by_worker(self) -> dict[int, Link]:
        """The links that are open, by worker."""
        with self.lock:
            return {lane.worker: lane.link for lane in sorted(self._links.values(), key=_WORKER)}

    def has_read(self, worker: int) -> bool | None:
        """Whether a worker has read everything that was sent to it; None: unknown."""
        with self.lock:
            entry = self.data.workers[worker]
            lane = self._links[entry.link]
            if entry.link_state is pure.LinkState.EXPECTED or lane.backlog.waits:
                return False
            return lane.link.all_read() if isinstance(lane.link, TellsWhatIsRead) else None

    def remark(self, worker: int) -> str:
        """Why a worker does not answer, as far as is known; empty if it is not or the worker is gone."""
        with self.lock:
            entry = self.data.workers.get(worker)
            lane = None if entry is None else self._links.get(entry.link)
            return "" if lane is None else lane.remark()

    def blocking(self, targets: tuple[int, ...] | None) -> list[int]:
        """The targets (None: all workers) whose links block until the worker has answered."""
        with self.lock:
            workers: list[int] = []
            for lane in self._links.values():
                if lane.blocks and (targets is None or lane.worker in targets):
                    workers.append(lane.worker)
            return workers

    def pump(self, ready: Collection[Link] | None = None) -> None:
        """Write what is waiting to be written, read all that has arrived.

        Args:
            ready: the links that can be read or written, as `wait` returned them; None if it is not known which can.
        """
        with self.lock:
            if self.machine.state in _UNLINKED:
                return
            ready_ids = None if ready is None else set(map(id, ready))
            for number, lane in tuple(self._links.items()):
                if lane.awaited is not None:
                    self._watch_process(number, lane, lane.awaited)
                elif ready_ids is not None and id(lane.link) not in ready_ids:
                    continue
                # The events of the link; its loss is the last.
                if (lane.outlet is not None and lane.outlet.idle) or self._flush(number, lane):
                    self._read(number, lane, self.take)

    def look(self) -> None:
        """Pump the links that can be read or written. One poll finds them. Never blocks."""
        ready = self.wait(0.0, self.waker.fired)
        if ready or self.awaited:
            self.pump(ready)

    def _watch_process(self, number: int, lane: Lane, process: AwaitedProcess) -> None:
        """Start to watch the worker's process once it has started. Takes its death if it is dead already."""
        identity, end = process.identity, process.end
        if end:
            self._read_then_lose(lane.worker, number, end, self.take)
        elif identity is not None:
            lane.awaited, lane.watched = None, identity
            self.awaited -= 1
            try:
                lane.link.watch(*identity)
            except TransportError as error:
                self.take(pure.LinkLost(lane.worker, number, str(error)))
            self._waitables_changed(lane.link)

    def _flush(self, number: int, lane: Lane) -> bool:
        """Write what is waiting to be written; False: the link is lost."""
        self._waitables_changed(lane.link)
        try:
            flush(lane.link)
        except TransportError as error:
            self._read_then_lose(lane.worker, number, str(error), self.take)
            return False
        return True

    def _read(self, number: int, lane: Lane, take: TakeEvent) -> None:
        """Read a link, and handle what has arrived; first the messages that an outer call has read, but not handled."""
        worker, link, unread, failure = lane.worker, lane.link, lane.unread, None
        try:
            try:
                unread.extend(read(link))
            except (TransportError, ProtocolError) as error:
                failure = error
            while unread:
                message = unread.popleft().message
                entry = self.data.workers.get(worker)
                # A link that was lost within a step is closed after it.
                if entry is not None and entry.link == number and entry.link_state in pure.OPEN:
                    self.hearing.heard(worker, number)
                    if isinstance(message, NoBase):
                        self._send_whole(worker, number, message)
                    else:
                        self._handle(worker, number, link, message, take)
            if failure is not None:
                raise failure
        except (TransportError, ProtocolError) as error:
            take(pure.LinkLost(worker, number, str(error)))
        except Exception as error:  # noqa: BLE001 - any error is a failure of this link; the others continue
            take(pure.LinkLost(worker, number, handler_failed(link, error)))

    def _lose_link(self, link: Link, reason: str) -> None:
        for number, lane in tuple(self._links.items()):
            if lane.link is link:
                self._step(pure.LinkLost(lane.worker, number, reason))

    def _read_then_lose(self, worker: int, number: int, reason: str, take: TakeEvent) -> None:
        """Take the events of a link that can no longer be written to: what arrived before its loss, then the loss."""
        if number in self._links:
            self._read(number, self._links[number], take)
        take(pure.LinkLost(worker, number, reason))

    def _handle(self, worker: int, number: int, link: Link, message: Message, take: TakeEvent) -> None:
        match message:
            case Bye(incarnation=0) | Refusal(incarnation=0):
                take(pure.Answer(worker, number, message))  # STALE: it names no sender
                self._require_handshake(worker, message)
            case Ack() | Refusal():
                if isinstance(message, Ack):
                    self._verify(worker, message)
                packed, stale = self._packed.get(message.version), self.data.stale
                take(pure.Answer(worker, number, message))
                current = message.version > self.last_of_former_model and self.data.stale == stale
                # Handshakes carry a layout that a worker has accepted, not one that was only sent.
                if isinstance(message, Ack) and packed is not None and current:
                    self.layout = packed.layout
                lane = self._links.get(number)
                if lane is not None and message.incarnation == self.data.incarnation:
                    waiting = lane.backlog.answered(message.version)
                    if waiting:
                        self._send_update(worker, number, waiting)
                        self._finish()
            case _ if reason := sender_message_error(worker, message):
                raise ProtocolError(reason)
            case Hello():
                self._links[number].watched = watch(link, message)
                self._waitables_changed(link)
                take(pure.Answer(worker, number, message))
            case Bye():
                take(pure.Answer(worker, number, message))

    def _require_handshake(self, worker: int, message: Bye | Refusal) -> None:
        """Check that a last message without an incarnation does not come from a worker that we still expect.

        Raises TransportError: that worker ended before it answered the handshake, so its link is lost.
        """
        if self.data.workers[worker].link_state is pure.LinkState.EXPECTED:
            raise TransportError(f"it ended before it answered the handshake: {message.reason}")

    def _send_whole(self, worker: int, link: int, answer: NoBase) -> None:
        """A worker does not hold the base of a delta: send the version whole, unless a newer one was sent to it since.

        A newer one supersedes it there. To the protocol nothing has happened, and nothing is recorded.
        """
        packed, newest = self._packed.get(answer.version), self.data.workers[worker].due == answer.version
        if packed is None or packed.payloads is None or not newest or answer.incarnation != self.data.incarnation:
            return
        whole = packed.payloads.again(worker, link, packed.buffer)
        if whole is not None:
            SenderDriver._write(self, worker, link, *whole)
            self._finish()

    def in_parts(
        self, payload: Buffer, nbytes: int, verify: Verify, targets: tuple[int, ...] | None
    ) -> OutgoingParts | None:
        """Prepare to send a payload in parts, to workers that owe no answer; None: it is sent whole to all."""
        if payload.segment is None or not worth_parts(nbytes):
            return None
        with self.lock:
            lanes = [lane for lane in self._links.values() if targets is None or lane.worker in targets]
            up = [lane for lane in lanes if self.data.workers[lane.worker].link_state is pure.LinkState.UP]
            payload_id, names = payload.segment.next_seal, (self.model_id, self.data.incarnation)
            return outgoing_parts(self.lock, up, payload, verify, whole_part(payload_id, nbytes, *names))

    def all_share(self, payload: Buffer, nbytes: int) -> bool:
        """Whether every worker that has a link maps a payload's buffer, so that no byte of it travels."""
        for lane in tuple(self._links.values()):  # noqa: SIM110 - each step of a generator is one more call
            if not lane.shares(payload, nbytes):
                return False
        return True

    def _verify(self, worker: int, message: Ack) -> None:
        """Check that an ack names what was sent to its worker.

        A worker that serves the version already names what it was sent over an earlier link.
        """
        packed = self._packed.get(message.version)
        if packed is None or message.incarnation != self.data.incarnation:
            return
        named = self._named.get(message.version, {})
        digests = named.get(worker) or {packed.digest_to_send(False)}  # if it was not sent to this worker
        if message.digest not in digests and b"" not in digests:
            raise ProtocolError(
                f"an ack of version {message.version} names digest {message.digest.hex()}, which is not that of what "
                f"was sent ({', '.join(sorted(each.hex() for each in digests))}). The link is taken down."
            )

    def _forget(self) -> None:
        """Release the versions that are due to no worker any more."""
        if len(self._packed) == 1 and self.data.due_all in self._packed and self.machine.state is not State.CLOSED:
            return
        due = {self.data.due_all, *map(_DUE, self.data.workers.values())}
        if self.data.outstanding is not None:
            due.add(self.data.outstanding.version)
        if self.machine.state is State.CLOSED:
            due = set()
        for version in self._packed.keys() - due:
            if version <= self.data.version:
                self._release(version)

    def _release(self, version: int) -> None:
        if self._last_sent is not None and self._last_sent.update.version == version:
            self._last_sent = None
        self._named.pop(version, None)
        self._packed.pop(version).buffer.pins.discard(self._pin)

    def payloads_of(self, packed: Packed) -> VersionPayloads:
        """The payloads of the next version: a delta for workers that have acked the version before."""
        with self.lock:
            version, workers = self.data.version, self.data.workers.values()
            base = self._packed.get(version)
            if base is None or base.layout.digest != packed.layout.digest or all(e.served != version for e in workers):
                return VersionPayloads()
            base.buffer.pin(packed.buffer)
        try:
            ref = BaseRef(version=version, digest=base.digested())
            return version_payloads(packed.layout, packed.buffer.view, ref, base.buffer.view)
        finally:
            base.buffer.unpin(packed.buffer)

    def packed(self, version: int) -> Packed | None:
        """The version's weights as they were sent, while they are due to any worker; None if they were released."""
        return self._packed.get(version)
