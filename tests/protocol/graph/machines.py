"""Steps of the shipped machines in the model network.

A pure half is a function of a machine's value and an event, so each of its answers is computed once and cached. For a
sender, `took` calls the shipped step, `executed` executes its effects, and `did` does both. For a receiver, `heard`
does both.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from modelcheck.second.words import Message, Out, Word
from msgspec.structs import replace as changed
from network import (
    Frozen,
    Interned,
    Trainer,
    Worker,
    World,
    emptied,
    hung_up,
    posted,
    sender_and_link_number,
)

from weightsync.errors import ConfigurationError, ProtocolError, StateError, SyncError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import State
from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.report import Outcome, OutcomeKind

#: The errors by which the shipped code refuses an event.
REFUSED_BY_THE_CODE = (StateError, ConfigurationError, SyncError, ProtocolError)


#: The rows that steps have taken since `forget`, as (state, input).
ROWS_TAKEN: set[tuple[State, sending.SenderInput | receiving.ReceiverInput | None]] = set()


class RefusedError(Exception):
    """Raised when the shipped code refuses an event."""


def forget() -> None:
    """Clear the cached answers, since the shipped code may have been patched."""
    Interned.known.clear()
    ROWS_TAKEN.clear()
    for remembered in (_took, _heard, named):
        remembered.cache_clear()


# -------------------------------------------------------------------------------------- the sender's steps


@cache
def _took(trainer: Trainer, event: sending.Event) -> tuple[Trainer, sending.Step] | None:
    try:
        step = sending.step(trainer.state, trainer.data, event)
    except REFUSED_BY_THE_CODE:
        return None
    ROWS_TAKEN.add((trainer.state, step.input))
    concluded = [effect for effect in step.effects if isinstance(effect, sending.Conclude)]
    last = trainer.last
    if concluded:
        last = _noted(concluded[0].outstanding, frozenset(), len(trainer.created))
    elif step.data.outstanding is not None:
        new = trainer.data.outstanding is None
        last = _noted(step.data.outstanding, frozenset() if new else last.did, len(trainer.created))
    blocked = step.to is State.AWAITING_ACK
    return replace(trainer, state=step.to, data=_compared(step.data), last=last, blocked=blocked), step


def _compared(data: sending.SenderData) -> sending.SenderData:
    """The data without what is only reported to people: counters, reasons, workers that left or did not catch up."""
    workers = {w: changed(entry, reason="", remote_traceback="") for w, entry in sorted(data.workers.items())}
    outstanding = data.outstanding
    if outstanding is not None:
        outcomes = {w: Outcome(kind=outcome.kind) for w, outcome in sorted(outstanding.outcomes.items())}
        outstanding = changed(outstanding, owed=Frozen(sorted(outstanding.owed.items())), outcomes=Frozen(outcomes))
    dropped = {"not_caught_up": Frozen(), "left": Frozen(), "stale": 0, "late": 0}
    return changed(data, workers=Frozen(workers), outstanding=outstanding, **dropped)


def _noted(outstanding: sending.Outstanding, did: frozenset[int], workers: int) -> Out:
    outcomes = {w: outcome.kind.name for w, outcome in outstanding.outcomes.items()}
    outcomes |= dict.fromkeys(outstanding.owed, OutcomeKind.PENDING.name)
    every = range(1, workers + 1)
    owed = tuple(outstanding.owed.get(w, 0) for w in every)
    return Out(outstanding.version, owed, tuple(outcomes.get(w, "NONE") for w in every), did)


def took(world: World, s: int, event: sending.Event) -> tuple[World, sending.Step]:
    """Take the shipped step of sender ``s``, and note what the model remembers of it. Effects are not executed.

    Raises:
        RefusedError: the shipped code refuses the event.
    """
    taken = _took(world.trainers[s - 1], event)
    if taken is None:
        raise RefusedError
    trainer, step = taken
    return world.with_trainer(s, trainer), step


def executed(world: World, s: int, step: sending.Step) -> World:
    """Execute the effects of a sender's step."""
    for effect in step.effects:
        match effect:
            case sending.Greet(worker, link, due):
                world = _greeted(world, s, worker, link, due)
            case sending.Dispatch(worker, link, version):
                if (s, worker) not in world.gone:
                    message = Message(s, worker, link, version, world.trainer(s).serial)
                    world = world._replace(messages=world.messages | {message})
            case sending.CloseLink(worker, _):
                world = emptied(world, s, {worker})
            case sending.Conclude() | sending.Farewell():
                pass  # noted by `took`, or reported to people
    return world


def _greeted(world: World, s: int, w: int, k: int, due: int) -> World:
    if world.worker(w).state is State.CLOSED:
        return world._replace(gone=world.gone | {(s, w)})
    greeting = {Message(s, w, k, 0, 0)} | ({Message(s, w, k, due, due)} if due else set())
    return world._replace(messages=world.messages | greeting)


def did(world: World, s: int, event: sending.Event) -> World:
    """Take a step of sender ``s`` and execute its effects.

    Raises:
        RefusedError: the shipped code refuses the event.
    """
    world, step = took(world, s, event)
    return executed(world, s, step)


# ------------------------------------------------------------------------------------ the receiver's steps


@cache
def _heard(worker: Worker, event: receiving.Event) -> tuple[Worker, receiving.Step] | None:
    try:
        step = receiving.step(worker.state, worker.data, event)
    except REFUSED_BY_THE_CODE:
        return None
    ROWS_TAKEN.add((worker.state, step.input))
    return replace(worker, state=step.to, data=step.data), step


@cache
def named(worker: Worker, event: receiving.LinkDown | receiving.HelloArrived) -> bool:
    """Whether the shipped code has an input for the event. If not, its link ends beside the current one."""
    return receiving.name(worker.state, worker.data, event) is not None


def heard(world: World, w: int, event: receiving.Event) -> World:
    """Take a step of receiver ``w`` and execute its effects on answers and links.

    Raises:
        RefusedError: the shipped code refuses the event.
    """
    worker = world.worker(w)
    taken = _heard(worker, event)
    if taken is None:
        raise RefusedError
    after, step = taken
    world = world.with_worker(w, after)
    for effect in step.effects:
        world = _executed(world, w, effect, worker)
    return world


def _executed(world: World, w: int, effect: receiving.Effect, before: Worker) -> World:
    last = world.bounds.max_version + 1

    def said(incarnation: int, version: int, serial: int, kind: str, fence: int) -> World:
        s, k = sender_and_link_number(world, effect.link, incarnation)
        return posted(world, Word(s, w, k, incarnation, version, serial, kind, fence))

    match effect:
        case receiving.Greet():
            return said(world.worker(w).data.fence, 0, 0, "HELLO", 0)
        case receiving.Reject(_, incarnation, kind, _):
            return said(incarnation, 0, 0, kind.name, before.data.fence)
        case receiving.Disown(_, incarnation, kind):
            return said(incarnation, 0, last, kind.name, world.worker(w).data.fence)
        case receiving.Leave():
            return hung_up(said(before.data.fence, 0, last, "BYE", 0), w, *divmod(effect.link, 100))
        case receiving.Tell(_, key, kind):
            serial = before.pending_p if key == before.data.pending else key[1]
            return said(*key, serial, kind.name, world.worker(w).data.fence)
        case receiving.Reply(_, answer) if world.worker(w).state is not State.AWAITING_ACK:
            return posted(world, word_of(world, effect.link, w, answer, before))
        case receiving.CloseLink():
            return hung_up(world, w, *divmod(effect.link, 100))
        case _:
            return world  # the answer to the update just decided leaves with the event Answered


def word_of(world: World, link: int, w: int, answer: Ack | Refusal, worker: Worker) -> Word:
    """A worker's answer, as a message in transit."""
    s, k = sender_and_link_number(world, link, answer.incarnation)
    kind = "ACK" if isinstance(answer, Ack) else answer.kind.name
    fence = 0 if isinstance(answer, Ack) else answer.fence
    return Word(s, w, k, answer.incarnation, answer.version, worker.decided_p, kind, fence)


__all__ = ["RefusedError", "did", "executed", "forget", "heard", "named", "took", "word_of"]
