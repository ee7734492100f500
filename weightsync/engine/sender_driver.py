"""The sender's driver: it takes events, executes their effects over the links, and feeds the results back.

A link may run ahead of its worker by two versions: a worker that does not read costs no more memory than these.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from typing import Final

from weightsync.engine.driver import Driver, Hearing, close, flush, mishandled, read, watch
from weightsync.engine.packer import Packed
from weightsync.engine.refusal_hints import sender_hint
from weightsync.errors import ProtocolError, TransportError
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.machine import SenderMachine
from weightsync.protocol.messages import Ack, Bye, Ending, Hello, Message, Refusal, Update
from weightsync.protocol.report import SyncReport
from weightsync.transports.base import Link, Remarks, TellsWhatIsRead
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import BlockingLink
from weightsync.transports.process import own_host, own_identity
from weightsync.transports.wakeup import AwaitedProcess

#: Updates that a link may carry unanswered: one that is being applied, one behind it.
MAX_UNANSWERED: Final = 2


class Backlog:
    """The versions that one link carries unanswered, and the newest that waits behind them.

    A version that waits and is overtaken is never sent. It was abandoned before the newer one was dispatched, so
    nobody is owed an answer for it.
    """

    def __init__(self) -> None:
        self._unanswered: set[int] = set()
        self._waiting = 0

    @property
    def waits(self) -> bool:
        """Whether a version waits here."""
        return bool(self._waiting)

    def admit(self, version: int) -> bool:
        """Whether a version may leave now; otherwise it waits, in place of an older one."""
        if len(self._unanswered) >= MAX_UNANSWERED:
            self._waiting = version
            return False
        self._unanswered.add(version)
        return True

    def answered(self, version: int) -> int:
        """The worker has answered for a version, and so for all before it; the version to be admitted now, or 0."""
        self._unanswered = {unanswered for unanswered in self._unanswered if unanswered > version}
        if len(self._unanswered) >= MAX_UNANSWERED:
            return 0
        waiting, self._waiting = self._waiting, 0
        return waiting


logger = logging.getLogger("weightsync")


class SenderDriver(Driver[SenderInput, pure.SenderData, pure.Event, pure.Effect]):
    """One sender's machine, data and links.

    All its methods take the lock, never block and never raise for a link's sake: a link that fails is LOST. They
    raise what the pure half raises (a call refused), and then nothing has changed.

    Args:
        model_id: the model whose weights are sent.
    """

    def __init__(self, model_id: str) -> None:
        super().__init__(model_id, SenderMachine(), pure.SenderData(), pure.step)
        #: What became of updates that nobody has asked about since they ended.
        self.concluded: dict[int, pure.Conclude] = {}
        #: When the workers spoke.
        self.hearing = Hearing()
        self._links: dict[int, tuple[int, Link]] = {}
        self._awaited: dict[int, AwaitedProcess] = {}
        self._told: dict[int, bytes] = {}
        self._backlogs: dict[int, Backlog] = defaultdict(Backlog)
        self._packed: dict[int, Packed] = {}
        #: What its goodbyes say, as it has not failed.
        self._parting: tuple[Ending, str] = (Ending.CLOSED, "the sender closed this link")

    # ------------------------------------------------------------------------------------------- events

    def dispatch(self, event: pure.Send | pure.SendAsync, packed: Packed) -> int:
        """Send ``packed`` as the next version; returns the version.

        Raises:
            StateError, ConfigurationError, WorkerLostError: refused; nothing was sent, no version was used.
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
        """Put a worker on the roll on a new link, or give it a new one; its process is watched from the start."""
        with self.lock:
            self._last_link += 1
            events = pure.joining(self.machine.state, self.data, worker, self._last_link)
            self._links[self._last_link] = (worker, link)
            if process is not None:
                self._awaited[self._last_link] = process
            for event in events:
                self.take(event)

    def remove(self, worker: int, reason: str) -> None:
        """Take a worker off the roll; its link is closed."""
        with self.lock:
            for event in pure.removal(self.machine.state, self.data, worker, reason):
                self.take(event)
            self.hearing.forget(worker)

    def close(self) -> None:
        """Close for good: every link says goodbye and closes, a caller who waits is woken."""
        self.take(pure.Close())
        self.waker.close()

    def fail(self, reason: str) -> None:
        """Close for good, since something failed: every worker is told what."""
        with self.lock:
            self._parting = (Ending.FAILED, reason)
            self.close()

    def told(self, report: SyncReport) -> None:
        """A caller is told this. Nothing changes; it is recorded where anybody records."""

    def _hint(self, asked: str) -> str:
        return sender_hint(self.machine.state, self.data, asked)

    # ------------------------------------------------------------------------------------------ effects

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
        # Where answers may be lost, none is proof of anything: a full backlog would never empty.
        if not delivery.loses and not self._backlogs[link].admit(version):
            return
        packed = self._packed[version]
        # Where an update may come before those sent earlier, or without them, each tells its layout.
        in_turn = not (delivery.reorders or delivery.loses)
        told = in_turn and self._told.get(link) == packed.layout.digest
        update = Update(
            model_id=self.model_id,
            incarnation=self.data.incarnation,
            version=version,
            layout_digest=packed.layout.digest,
            layout=b"" if told else packed.layout.encode(),
            digest=packed.digest,
            nbytes=packed.layout.nbytes,
            extras=packed.extras,
            form=packed.form,
        )
        self._write(worker, link, update, packed.buffer)
        self._told[link] = packed.layout.digest

    def _write(self, worker: int, link: int, message: Message, payload: Buffer | None = None) -> None:
        if link not in self._links:
            return
        try:
            self._links[link][1].send(message, payload)
        except Exception as error:  # noqa: BLE001 - however a link fails, the other targets are still dispatched to
            for event in self._last_words(worker, link, str(error) or repr(error)):
                self._step(event)

    def _close_link(self, link: int) -> None:
        """Say Bye as far as it goes at once, and close. A shared connection stays open for its other models."""
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
        except Exception as error:  # noqa: BLE001 - it may be closed because it failed, in whatever way
            logger.debug("no goodbye over a link of %r: %s", self.model_id, error)
        finally:
            close(closing)

    # ------------------------------------------------------------------------------------------ reading

    def links(self) -> list[Link]:
        """The links that are open."""
        with self.lock:
            return [link for _, link in self._links.values()]

    def by_worker(self) -> dict[int, Link]:
        """The links that are open, by worker."""
        with self.lock:
            return dict(sorted(self._links.values(), key=itemgetter(0)))

    def has_read(self, worker: int) -> bool | None:
        """Whether a worker has read all that was sent to it; None: that is not known."""
        with self.lock:
            entry = self.data.workers[worker]
            if entry.link_state is pure.LinkState.EXPECTED or self._backlogs[entry.link].waits:
                return False
            _, link = self._links[entry.link]
            return link.all_read() if isinstance(link, TellsWhatIsRead) else None

    def remark(self, worker: int) -> str:
        """Why a worker does not answer, where its link was told; empty: it was not."""
        with self.lock:
            entry = self.data.workers[worker]
            link = self._links[entry.link][1] if entry.link in self._links else None
            return link.remark if isinstance(link, Remarks) else ""

    def blocking(self, targets: tuple[int, ...] | None) -> list[int]:
        """Those of the targets (None: all) that only a caller who waits can be sent to."""
        with self.lock:
            held = [worker for worker, link in self._links.values() if isinstance(link, BlockingLink)]
            return [worker for worker in held if targets is None or worker in targets]

    def pump(self) -> None:
        """Write what waits to be written, take in all that has arrived."""
        with self.lock:
            if self.machine.state in (State.UNINITIALIZED, State.CLOSED):
                return
            for number, (worker, link) in list(self._links.items()):
                for event in chain(self._look_after(worker, number, link), self._hear(worker, number, link)):
                    self._happen(worker, number, link, event)

    def _happen(self, worker: int, number: int, link: Link, event: pure.Event) -> None:
        """Take what a link says. If that fails it is this link's failure, and nobody else's."""
        try:
            self.take(event)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other links are still served
            self.take(pure.LinkLost(worker, number, mishandled(link, error)))

    @property
    def awaits_processes(self) -> bool:
        """Whether a process that is to be watched has not started yet: nothing wakes us when it does."""
        return bool(self._awaited)

    def _look_after(self, worker: int, number: int, link: Link) -> Iterator[pure.Event]:
        """Watch the worker's process once it has started; its death if it is dead already."""
        process = self._awaited.get(number)
        if process is None:
            return
        identity, end = process.identity, process.end
        if end:
            yield from self._last_words(worker, number, end)
        elif identity is not None:
            del self._awaited[number]
            try:
                link.watch(*identity)
            except TransportError as error:
                yield pure.LinkLost(worker, number, str(error))

    def _hear(self, worker: int, number: int, link: Link) -> Iterator[pure.Event]:
        """The events that a link has for us now, its death last."""
        try:
            flush(link)
        except TransportError as error:
            yield from self._last_words(worker, number, str(error))
            return
        yield from self._heard(worker, number, link)

    def _heard(self, worker: int, number: int, link: Link) -> Iterator[pure.Event]:
        try:
            for received in read(link):
                if self._listens(worker, number):
                    self.hearing.heard(worker, number)
                    yield from self._events(worker, number, link, received.message)
        except (TransportError, ProtocolError) as error:
            yield pure.LinkLost(worker, number, str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other links are still served
            yield pure.LinkLost(worker, number, mishandled(link, error))

    def _give_up(self, link: Link, reason: str) -> None:
        for number, (worker, known) in list(self._links.items()):
            if known is link:
                self._step(pure.LinkLost(worker, number, reason))

    def _listens(self, worker: int, number: int) -> bool:
        """Whether a link is in force. One that is lost amid a step is closed behind it."""
        entry = self.data.workers.get(worker)
        return entry is not None and entry.link == number and entry.open

    def _last_words(self, worker: int, number: int, reason: str) -> Iterator[pure.Event]:
        """The events of a link that cannot be written to any more: what it said before its death, then its death."""
        if number in self._links:
            yield from self._heard(worker, number, self._links[number][1])
        yield pure.LinkLost(worker, number, reason)

    def _events(self, worker: int, number: int, link: Link, message: Message) -> Iterator[pure.Event]:
        match message:
            case Hello():
                watch(link, message)
                yield pure.Answer(worker, number, message)
            case Ack() | Refusal():
                self._verify(message)
                packed, stale = self._packed.get(message.version), self.data.stale
                yield pure.Answer(worker, number, message)
                # Handshakes tell a layout that somebody took, not one that was only sent.
                if isinstance(message, Ack) and packed is not None and self.data.stale == stale:
                    self.layout = packed.layout
                self._catch_up(worker, number, message)
            case Bye():
                yield pure.Answer(worker, number, message)
            case Update():
                raise ProtocolError(f"worker {worker} sent an Update; only senders send them. Its link is taken down.")

    def _catch_up(self, worker: int, link: int, message: Ack | Refusal) -> None:
        """Send what waited for this answer."""
        if link in self._links and message.incarnation == self.data.incarnation:
            waiting = self._backlogs[link].answered(message.version)
            if waiting:
                self._update(worker, link, waiting)
                self._finish()

    def _verify(self, message: Ack | Refusal) -> None:
        """An ack must name the digest of what we sent as that version."""
        packed = self._packed.get(message.version)
        if not isinstance(message, Ack) or packed is None or message.incarnation != self.data.incarnation:
            return
        if packed.digest and message.digest != packed.digest:
            raise ProtocolError(
                f"an ack of version {message.version} names digest {message.digest.hex()}, which is not that of what "
                f"was sent ({packed.digest.hex()}). The link is taken down."
            )

    # ----------------------------------------------------------------------------------------- retained

    def _forget(self) -> None:
        """Release the versions that are due to nobody any more."""
        due = {self.data.due_all, *(entry.due for entry in self.data.workers.values())}
        if self.data.outstanding is not None:
            due.add(self.data.outstanding.version)
        if self.machine.state is State.CLOSED:
            due = set()
        for version in [version for version in self._packed if version not in due]:
            if version <= self.data.version:
                self._release(version)

    def _release(self, version: int) -> None:
        self._packed.pop(version).buffer.unpin(self)

    def packed(self, version: int) -> Packed | None:
        """The version's weights as they travelled, while they are due to anybody."""
        return self._packed.get(version)
