"""The sender's driver: takes events, executes their effects over the links, and feeds the results back.

A link carries at most two unanswered versions, so that a worker that does not read costs no more memory than these.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from operator import attrgetter, itemgetter
from typing import Final

from weightsync.engine.driver import Driver, Hearing, close, flush, mishandled, read, watch
from weightsync.engine.packer import Packed
from weightsync.engine.refusal_hints import sender_hint
from weightsync.errors import ProtocolError, TransportError
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import Delivery, SenderInput, State
from weightsync.protocol.codec import slot_digest
from weightsync.protocol.machine import SenderMachine
from weightsync.protocol.messages import Ack, Bye, Ending, Hello, Message, Refusal, Update
from weightsync.protocol.report import SyncReport
from weightsync.transports.base import Link, Remarks, SharesMemory, TellsWhatIsRead, Waits
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import BlockingLink
from weightsync.transports.device import CarriesDevices
from weightsync.transports.process import own_host, own_identity
from weightsync.transports.wakeup import AwaitedProcess

#: Takes an event of a link.
Taking = Callable[[pure.Event], object]

_UNLINKED: Final = frozenset({State.UNINITIALIZED, State.CLOSED})
_LOSING: Final = frozenset(delivery for delivery in Delivery if delivery.loses)
_IN_TURN: Final = frozenset(delivery for delivery in Delivery if not (delivery.reorders or delivery.loses))
_DUE: Final = attrgetter("due")
_LINK: Final = itemgetter(1)

#: Unanswered updates that a link may carry: one that is being applied, one behind it.
MAX_UNANSWERED: Final = 2


class Backlog:
    """The unanswered versions on one link, and the newest one that waits behind them.

    A waiting version that is superseded is never sent. It was abandoned before the newer one was dispatched, so no
    answer for it is awaited.
    """

    def __init__(self) -> None:
        self._unanswered: set[int] = set()
        self._waiting = 0

    @property
    def waits(self) -> bool:
        """Whether a version waits here."""
        return bool(self._waiting)

    def admit(self, version: int) -> bool:
        """Whether a version may be sent now; otherwise it waits, and replaces an older one that waits."""
        if len(self._unanswered) >= MAX_UNANSWERED:
            self._waiting = version
            return False
        self._unanswered.add(version)
        return True

    def answered(self, version: int) -> int:
        """Take the answer to a version, and so to all before it. Returns the version to be sent now, or 0."""
        self._unanswered = {unanswered for unanswered in self._unanswered if unanswered > version}
        if len(self._unanswered) >= MAX_UNANSWERED:
            return 0
        waiting, self._waiting = self._waiting, 0
        return waiting


logger = logging.getLogger("weightsync")


def _shares(link: Link, payload: Buffer, nbytes: int) -> bool:
    return isinstance(link, SharesMemory) and link.shares(payload, nbytes)


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
        self._links: dict[int, tuple[int, Link]] = {}
        #: Of callers that wait now.
        self._waits: list[Waits[Link]] = []
        self._awaited: dict[int, AwaitedProcess] = {}
        self._told: dict[int, bytes] = {}
        self._backlogs: dict[int, Backlog] = defaultdict(Backlog)
        self._packed: dict[int, Packed] = {}
        #: The update that was sent last; None: none was, or its version is no longer due.
        self._said: Update | None = None
        #: The ending and the reason that its goodbyes carry: it has not failed.
        self._parting: tuple[Ending, str] = (Ending.CLOSED, "the sender closed this link")

    def dispatch(self, event: pure.Send | pure.SendAsync, packed: Packed) -> int:
        """Send ``packed`` as the next version; returns the version.

        Raises StateError, ConfigurationError, WorkerLostError: refused; nothing was sent, no version was used.
        """
        with self.lock:
            version = self.data.version + 1
            self._packed[version] = packed
            packed.buffer.pin(self)
            try:
                self.take(event)
            except BaseException:
                if self.data.version < version:
                    self._release(version)
                raise
            return version

    def join(self, worker: int, link: Link, process: AwaitedProcess | None = None) -> None:
        """Add a worker with a link, or give it a new one. Its process is watched from the start."""
        with self.lock:
            self._last_link += 1
            events = pure.joining(self.machine.state, self.data, worker, self._last_link)
            self._links[self._last_link] = (worker, link)
            if process is not None:
                self._awaited[self._last_link] = process
            for event in events:
                self.take(event)

    def remove(self, worker: int, reason: str) -> None:
        """Remove a worker and close its link."""
        with self.lock:
            for event in pure.removal(self.machine.state, self.data, worker, reason):
                self.take(event)
            self.hearing.forget(worker)

    def close(self) -> None:
        """Close for good: send a goodbye over every link, close them, wake callers that wait."""
        self.take(pure.Close())
        self.waker.close()

    def fail(self, reason: str) -> None:
        """Close for good because of an error, which every goodbye carries."""
        with self.lock:
            self._parting = (Ending.FAILED, reason)
            self.close()

    def told(self, report: SyncReport) -> None:
        """A report was returned to a caller, or raised. Does nothing; a recorded driver writes it to the trace."""

    def _hint(self, asked: str) -> str:
        return sender_hint(self.machine.state, self.data, asked)

    def _execute(self, effect: pure.Effect) -> None:
        match effect:
            case pure.Greet(worker, link, due):
                self._write(worker, link, self._hello(link, due))
                if due:
                    self._update(worker, link, due)
            case pure.Dispatch(worker, link, version):
                self._update(worker, link, version)
            case pure.CloseLink(_, link):
                self._close_link(link)
            case pure.Farewell(worker, reason):
                logger.warning("model %r: worker %d said goodbye and left: %s", self.model_id, worker, reason)
            case pure.Conclude():
                self.concluded[effect.outstanding.version] = effect
                self.waker.fire()

    def _hello(self, link: int, due: int) -> Hello:
        pid, started = own_identity()
        layout = self.layout
        return Hello(
            model_id=self.model_id,
            incarnation=self.data.incarnation,
            version=due,
            layout_digest=layout.digest if layout else b"",
            layout=layout.encode() if layout else b"",
            host=own_host(),
            pid=pid,
            started=started,
            link=link,
        )

    def _update(self, worker: int, link: int, version: int) -> None:
        if link not in self._links:
            return
        delivery = self._links[link][1].delivery
        # Where answers may be lost, a full backlog might never empty.
        if delivery not in _LOSING and not self._backlogs[link].admit(version):
            return
        packed = self._packed[version]
        # Where updates may be reordered or lost, each carries its layout.
        told = delivery in _IN_TURN and self._told.get(link) == packed.layout.digest
        # What its worker can map may have changed when its ack arrives.
        shared = _shares(self._links[link][1], packed.buffer, packed.layout.nbytes)
        (packed.shared.add if shared else packed.shared.discard)(link)
        digest = packed.digest_to_send(shared)
        update = self._said
        if update is None or update.version != version or bool(update.layout) == told or update.digest != digest:
            # One message for all workers that get the same: a link may keep how it is encoded.
            update = self._said = Update(
                model_id=self.model_id,
                incarnation=self.data.incarnation,
                version=version,
                layout_digest=packed.layout.digest,
                layout=b"" if told else packed.layout.encode(),
                digest=digest,
                nbytes=packed.layout.nbytes,
                extras=packed.extras,
                form=packed.form,
                trace_context=packed.trace_context,
            )
        self._write(worker, link, update, packed.buffer)
        self._told[link] = packed.layout.digest

    def _write(self, worker: int, link: int, message: Message, payload: Buffer | None = None) -> None:
        if link not in self._links:
            return
        for waits in self._waits:
            waits.changed.add(id(self._links[link][1]))
        try:
            self._links[link][1].send(message, payload)
        except Exception as error:  # noqa: BLE001 - any error is a failure of this link; the other targets get the update
            self._last_words(worker, link, str(error) or repr(error), self._step)

    def _close_link(self, link: int) -> None:
        """Send Bye if it can be sent at once, and close. A shared connection stays open for its other models."""
        if link not in self._links:
            return
        _, closing = self._links.pop(link)
        self._told.pop(link, None)
        self._backlogs.pop(link, None)
        self.hearing.closed(link)
        self._awaited.pop(link, None)
        ending, reason = self._parting
        try:
            closing.send(Bye(model_id=self.model_id, incarnation=self.data.incarnation, reason=reason, ending=ending))
        except Exception as error:  # noqa: BLE001 - it may be closing because it failed
            logger.debug("no goodbye over a link of %r: %s", self.model_id, error)
        finally:
            close(closing)

    def links(self) -> list[Link]:
        """The links that are open."""
        with self.lock:
            return list(map(_LINK, self._links.values()))

    def reached(self) -> list[frozenset[bytes]]:
        """For each open link, the devices whose slots its worker can open."""
        return [link.reached if isinstance(link, CarriesDevices) else frozenset() for link in self.links()]

    def by_worker(self) -> dict[int, Link]:
        """The links that are open, by worker."""
        with self.lock:
            return dict(sorted(self._links.values(), key=itemgetter(0)))

    def has_read(self, worker: int) -> bool | None:
        """Whether a worker has read everything that was sent to it; None: unknown."""
        with self.lock:
            entry = self.data.workers[worker]
            if entry.link_state is pure.LinkState.EXPECTED or self._backlogs[entry.link].waits:
                return False
            _, link = self._links[entry.link]
            return link.all_read() if isinstance(link, TellsWhatIsRead) else None

    def remark(self, worker: int) -> str:
        """Why a worker does not answer, as far as its link knows; empty: it does not know."""
        with self.lock:
            entry = self.data.workers[worker]
            link = self._links[entry.link][1] if entry.link in self._links else None
            return link.remark if isinstance(link, Remarks) else ""

    def blocking(self, targets: tuple[int, ...] | None) -> list[int]:
        """The targets (None: all workers) whose links block until the worker has answered."""
        with self.lock:
            held = [worker for worker, link in self._links.values() if isinstance(link, BlockingLink)]
            return [worker for worker in held if targets is None or worker in targets]

    def begin_waits(self) -> Waits[Link]:
        """The waits of a caller that waits for links again and again, until `end_waits`."""
        waits = Waits[Link](self.waker)
        with self.lock:
            self._waits.append(waits)
        return waits

    def end_waits(self, waits: Waits[Link]) -> None:
        """The caller waits no more."""
        with self.lock:
            self._waits.remove(waits)

    def pump(self, ready: Collection[Link] | None = None) -> None:
        """Write what is waiting to be written, read all that has arrived.

        Args:
            ready: the links that can be read or written, as `wait` returned them; None: it is not known which can.
        """
        with self.lock:
            if self.machine.state in _UNLINKED:
                return
            chosen = None if ready is None else set(map(id, ready))
            for number, (worker, link) in list(self._links.items()):
                if number in self._awaited:
                    self._look_after(worker, number, link)
                elif chosen is not None and id(link) not in chosen:
                    continue
                self._hear(worker, number, link, self.take)

    def look(self) -> None:
        """Pump the links that have something to read or can be written. One poll finds them, and never blocks."""
        self.pump(self.wait(0.0, self.waker.fired))

    @property
    def awaits_processes(self) -> bool:
        """Whether a process to be watched has not started yet. Nothing wakes us when it starts."""
        return bool(self._awaited)

    def _look_after(self, worker: int, number: int, link: Link) -> None:
        """Start to watch the worker's process once it has started. Takes its death if it is dead already."""
        process = self._awaited[number]
        identity, end = process.identity, process.end
        if end:
            self._last_words(worker, number, end, self.take)
        elif identity is not None:
            del self._awaited[number]
            try:
                link.watch(*identity)
            except TransportError as error:
                self.take(pure.LinkLost(worker, number, str(error)))

    def _hear(self, worker: int, number: int, link: Link, take: Taking) -> None:
        """Take the events that a link has now; the loss of the link is the last."""
        for waits in self._waits:
            waits.changed.add(id(link))
        try:
            flush(link)
        except TransportError as error:
            self._last_words(worker, number, str(error), take)
        else:
            self._heard(worker, number, link, take)

    def _heard(self, worker: int, number: int, link: Link, take: Taking) -> None:
        try:
            for received in read(link):
                entry = self.data.workers.get(worker)
                # A link that was lost within a step is closed after it.
                if entry is not None and entry.link == number and entry.open:
                    self.hearing.heard(worker, number)
                    self._message(worker, number, link, received.message, take)
        except (TransportError, ProtocolError) as error:
            take(pure.LinkLost(worker, number, str(error)))
        except Exception as error:  # noqa: BLE001 - any error is a failure of this link; the others go on
            take(pure.LinkLost(worker, number, mishandled(link, error)))

    def _give_up(self, link: Link, reason: str) -> None:
        for number, (worker, known) in list(self._links.items()):
            if known is link:
                self._step(pure.LinkLost(worker, number, reason))

    def _last_words(self, worker: int, number: int, reason: str, take: Taking) -> None:
        """Take the events of a link that can no longer be written to: what arrived before its loss, then the loss."""
        if number in self._links:
            self._heard(worker, number, self._links[number][1], take)
        take(pure.LinkLost(worker, number, reason))

    def _message(self, worker: int, number: int, link: Link, message: Message, take: Taking) -> None:
        match message:
            case Ack() | Refusal():
                self._verify(number, message)
                packed, stale = self._packed.get(message.version), self.data.stale
                take(pure.Answer(worker, number, message))
                # Handshakes carry a layout that a worker has accepted, not one that was only sent.
                if isinstance(message, Ack) and packed is not None and self.data.stale == stale:
                    self.layout = packed.layout
                if number in self._links and message.incarnation == self.data.incarnation:
                    self._catch_up(worker, number, message.version)
            case Hello():
                watch(link, message)
                take(pure.Answer(worker, number, message))
            case Bye():
                take(pure.Answer(worker, number, message))
            case Update():
                raise ProtocolError(f"worker {worker} sent an Update; only senders send them. Its link is taken down.")

    def _catch_up(self, worker: int, link: int, version: int) -> None:
        """Send what waited for the answer to a version."""
        waiting = self._backlogs[link].answered(version)
        if waiting:
            self._update(worker, link, waiting)
            self._finish()

    def all_share(self, payload: Buffer, nbytes: int) -> bool:
        """Whether every worker that has a link maps a payload's buffer, so that no byte of it travels."""
        return all(_shares(link, payload, nbytes) for link in self.links())

    def _names(self, link: int, version: int, packed: Packed) -> bytes:
        """What an ack over a link must name: the digest that was sent, or the slot. Empty: neither was."""
        shared = link in packed.shared
        found = packed.digest_to_send(shared)
        if found or not shared:
            return found
        return slot_digest(packed.buffer.sealed(), self.data.incarnation, version, packed.layout.digest, packed.extras)

    def _verify(self, link: int, message: Ack | Refusal) -> None:
        """Check that an ack names what was sent over its link."""
        packed = self._packed.get(message.version)
        if not isinstance(message, Ack) or packed is None or message.incarnation != self.data.incarnation:
            return
        sent = self._names(link, message.version, packed)
        if sent and message.digest != sent:
            raise ProtocolError(
                f"an ack of version {message.version} names digest {message.digest.hex()}, which is not that of what "
                f"was sent ({sent.hex()}). The link is taken down."
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
        if self._said is not None and self._said.version == version:
            self._said = None
        self._packed.pop(version).buffer.unpin(self)

    def packed(self, version: int) -> Packed | None:
        """The version's weights as they were sent, while they are due to any worker; None: they were released."""
        return self._packed.get(version)
