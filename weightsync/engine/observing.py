"""Turns the steps of a sender or a receiver into its events: a step is where every outcome is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weightsync.clock import Stopwatch
from weightsync.engine.events import EventKind, Events, SyncEvent, SyncPhase, SyncRole
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import ReceiverInput, RefusalKind, SenderInput, State
from weightsync.protocol.codec import is_trace_context
from weightsync.protocol.machine import Step
from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.report import Outcome, OutcomeKind

logger = logging.getLogger("weightsync")

SenderStep = Step[SenderInput, sending.SenderData, sending.Effect]
ReceiverStep = Step[ReceiverInput, receiving.ReceiverData, receiving.Effect]

_KINDS = {
    OutcomeKind.APPLIED: EventKind.REPLY,
    OutcomeKind.REFUSED: EventKind.REFUSED,
    OutcomeKind.LOST: EventKind.LOST,
    OutcomeKind.ABANDONED: EventKind.ABANDONED,
}


class SenderObserver:
    """Emits the events of one sender.

    Args:
        driver: the sender's driver.
        events: takes them.
    """

    def __init__(self, driver: SenderDriver, events: Events) -> None:
        self._driver = driver
        self._events = events
        #: For each worker, the version that was sent to it last, and when.
        self._sent: dict[int, tuple[int, Stopwatch]] = {}
        driver.watch_steps(self._on_step)

    def _on_step(self, _: State, data: sending.SenderData, event: sending.Event, step: SenderStep) -> None:
        if not self._events.have_callbacks:
            return
        try:
            if isinstance(event, sending.Send | sending.SendAsync):
                self._set_trace_context(step.data.version)
            for found in self._events_of_step(data, event, step):
                self._events.emit(found)
        except Exception:  # whatever it is, the sync must continue
            logger.exception("the events of a step of %r were lost; the sync is not affected", self._driver.model_id)

    def _set_trace_context(self, version: int) -> None:
        """Give a version that is about to be sent its trace context."""
        packed, tracer = self._driver.packed(version), self._events.tracer
        if packed is None or tracer is None:
            return
        try:
            context = tracer.begin(self._driver.model_id, version, packed.pack_s)
        except Exception:  # a tracer is user code: whatever it raises, the sync continues
            logger.exception("version %d of %r is sent without a trace context", version, self._driver.model_id)
            return
        packed.trace_context = context if isinstance(context, str) and is_trace_context(context) else ""

    def _event(self, kind: EventKind, worker: int | None, version: int | None, **more: Any) -> SyncEvent:
        packed = None if version is None else self._driver.packed(version)
        return SyncEvent(
            kind=kind,
            role=SyncRole.TRAINER,
            model_id=self._driver.model_id,
            incarnation=self._driver.data.incarnation,
            worker=worker,
            version=version,
            trace_context="" if packed is None else packed.trace_context,
            **more,
        )

    def _events_of_step(self, data: sending.SenderData, event: sending.Event, step: SenderStep) -> Iterator[SyncEvent]:
        """What a step changed, in the order of the events."""
        yield from self._join_events(data, step)
        yield from self._dispatch_events(step)
        outcomes = _new_outcomes(data, step)
        for (worker, version), outcome in outcomes.items():
            yield self._outcome_event(worker, version, outcome)
        yield from self._answer_events(event, step)
        reported = {worker for worker, _ in outcomes}
        yield from (self._loss_event(*each) for each in _ended_links(data, step) if each[0] not in reported)
        if step.input is SenderInput.DEADLINE and data.outstanding is not None:
            for worker in data.outstanding.owed:
                yield self._timeout_event(worker, data.outstanding.version)
        if step.input is SenderInput.CLOSE:
            yield self._event(EventKind.CLOSED, None, None)

    def _join_events(self, data: sending.SenderData, step: SenderStep) -> Iterator[SyncEvent]:
        if step.data.workers is data.workers:
            return
        for worker, entry in step.data.workers.items():
            before = data.workers.get(worker)
            was = None if before is None or before.link != entry.link else before.link_state
            if entry.link_state is sending.LinkState.UP and was is not sending.LinkState.UP:
                yield self._event(EventKind.JOINED, worker, None)

    def _dispatch_events(self, step: SenderStep) -> Iterator[SyncEvent]:
        for effect in step.effects:
            match effect:
                case sending.Dispatch(worker, _, version) | sending.Greet(worker, _, version) if version:
                    self._sent[worker] = version, Stopwatch()
                    packed = self._driver.packed(version)
                    spent = {} if packed is None else {SyncPhase.PACK: packed.pack_s}
                    nbytes = 0 if packed is None else packed.nbytes
                    yield self._event(EventKind.DISPATCH, worker, version, seconds=spent, nbytes=nbytes)

    def _outcome_event(self, worker: int, version: int, outcome: Outcome) -> SyncEvent:
        seconds = self._seconds(worker, version)
        if outcome.kind is OutcomeKind.APPLIED:
            seconds[SyncPhase.APPLY] = outcome.apply_s
        kind, reason = _KINDS[outcome.kind], outcome.reason
        return self._event(kind, worker, version, outcome=outcome.kind, reason=reason, seconds=seconds)

    def _seconds(self, worker: int, version: int) -> dict[SyncPhase, float]:
        sent, stopwatch = self._sent.get(worker, (0, None))
        entry = self._driver.data.workers.get(worker)
        if stopwatch is None or sent != version or entry is None:
            return {}
        took = stopwatch.seconds
        connect = min(self._driver.hearing.connected_after(entry.link, stopwatch), took)
        return {SyncPhase.CONNECT: connect, SyncPhase.TRANSFER: took - connect}

    def _answer_events(self, event: sending.Event, step: SenderStep) -> Iterator[SyncEvent]:
        """An answer that settles no outcome: from a late joiner, or unexpected."""
        if not isinstance(event, sending.Answer):
            return
        message = event.message
        version = message.version if isinstance(message, Ack | Refusal) else None
        if step.input is SenderInput.STALE:
            yield self._event(EventKind.STALE, event.worker, version, reason="this answer is no longer awaited")
        elif step.input is SenderInput.CAUGHT_UP and isinstance(message, Ack):
            seconds = {**self._seconds(event.worker, message.version), SyncPhase.APPLY: message.seconds}
            yield self._event(EventKind.REPLY, event.worker, version, seconds=seconds)
        elif step.input is SenderInput.CAUGHT_UP and isinstance(message, Refusal):
            yield self._event(EventKind.REFUSED, event.worker, version, reason=message.reason)

    def _loss_event(self, worker: int, link_state: sending.LinkState, reason: str) -> SyncEvent:
        kind = EventKind.REFUSED if link_state is sending.LinkState.REFUSED else EventKind.LOST
        return self._event(kind, worker, None, reason=reason)

    def _timeout_event(self, worker: int, version: int) -> SyncEvent:
        reason = "no answer by the deadline; the version is still outstanding"
        seconds = self._seconds(worker, version)
        return self._event(
            EventKind.TIMED_OUT, worker, version, outcome=OutcomeKind.TIMED_OUT, reason=reason, seconds=seconds
        )


def _new_outcomes(data: sending.SenderData, step: SenderStep) -> Mapping[tuple[int, int], Outcome]:
    """The outcomes that a step decided, by worker and version."""
    after = step.data.outstanding
    for effect in step.effects:
        if isinstance(effect, sending.Conclude):
            after = effect.outstanding
    before = data.outstanding
    if after is None or after is before:
        return {}
    known = before.outcomes if before is not None and before.version == after.version else {}
    return {(w, after.version): outcome for w, outcome in after.outcomes.items() if w not in known}


def _ended_links(data: sending.SenderData, step: SenderStep) -> Iterator[tuple[int, sending.LinkState, str]]:
    """The workers whose open link a step ended, how, and why. Closing the sender does not count as losing them."""
    if step.data.workers is data.workers:
        return
    goodbyes = {
        effect.worker: f"it left: {effect.reason}" for effect in step.effects if isinstance(effect, sending.Farewell)
    }
    for worker, entry in data.workers.items():
        after = step.data.workers.get(worker)
        if entry.open and after is None:
            yield worker, sending.LinkState.LOST, goodbyes.get(worker, "it was removed")
        elif entry.open and after is not None and after.link == entry.link and not after.open:
            yield worker, after.link_state, after.reason


class ReceiverObserver:
    """Emits the events of one receiver.

    Args:
        driver: the receiver's driver.
        events: takes them.
        worker: gives this worker's id; None if it is not known.
    """

    def __init__(self, driver: ReceiverDriver, events: Events, worker: Callable[[], int | None]) -> None:
        self._driver = driver
        self._events = events
        self._worker = worker
        driver.watch_steps(self._on_step)

    def _on_step(self, state: State, data: receiving.ReceiverData, event: receiving.Event, step: ReceiverStep) -> None:
        if not self._events.have_callbacks:
            return
        try:
            for found in self._events_of_step(state, data, event, step):
                self._events.emit(found)
        except Exception:  # whatever it is, the sync must continue
            logger.exception("the events of a step of %r were lost; the sync is not affected", self._driver.model_id)

    def _events_of_step(
        self, state: State, data: receiving.ReceiverData, event: receiving.Event, step: ReceiverStep
    ) -> Iterator[SyncEvent]:
        match event:
            case receiving.HelloArrived(_, incarnation) if step.input is ReceiverInput.REJECTED:
                reason = event.misfit or "a newer sender is known"
                yield self._event(EventKind.REFUSED, (incarnation, None), reason=reason)
            case receiving.HelloArrived(_, incarnation) if step.data.link is not None and step.data.link != data.link:
                yield self._event(EventKind.JOINED, (incarnation, None))
            case receiving.Applied(answer) | receiving.Defer(answer):
                key, seconds = (answer.incarnation, answer.version), {SyncPhase.APPLY: answer.seconds}
                yield self._event(EventKind.REPLY, key, outcome=OutcomeKind.APPLIED, seconds=seconds)
            case receiving.Refused(answer):
                key = answer.incarnation, answer.version
                yield self._event(EventKind.REFUSED, key, outcome=OutcomeKind.REFUSED, reason=answer.reason)
            case receiving.LinkDown() | receiving.Goodbye() if data.link is not None and step.data.link is None:
                reason = event.failure if isinstance(event, receiving.LinkDown) else "the sender said goodbye"
                yield self._event(EventKind.LOST, (data.fence, None), reason=reason)
        yield from (self._event(EventKind.STALE, key, reason=kind.value) for key, kind in _outdated_versions(step))
        if step.to is State.CLOSED and state is not State.CLOSED:
            reason = event.reason if isinstance(event, receiving.Fail | receiving.Broken) else ""
            yield self._event(EventKind.CLOSED, (data.fence, None), reason=reason)

    def _event(self, kind: EventKind, key: tuple[int, int | None], **more: Any) -> SyncEvent:
        pending = self._driver.pending
        is_pending = pending is not None and (pending.update.incarnation, pending.update.version) == key
        return SyncEvent(
            kind=kind,
            role=SyncRole.WORKER,
            model_id=self._driver.model_id,
            incarnation=key[0],
            worker=self._worker(),
            version=key[1],
            trace_context=pending.update.trace_context if is_pending and pending is not None else "",
            **more,
        )


def _outdated_versions(step: ReceiverStep) -> Iterator[tuple[receiving.Key, RefusalKind]]:
    """The versions that a step turned away because a newer one, or a newer sender, is known."""
    for effect in step.effects:
        if isinstance(effect, receiving.Tell):
            yield effect.key, effect.kind
