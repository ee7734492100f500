"""The sender's pure half: what happens to it, which input that is, and what follows.

`step` does three things in order: *name* the input (its guards are in `sender_guards`), *look up* its row in the table,
*return* the next value and the effects. It changes nothing it is given and raises before anything follows.
"""

from __future__ import annotations

from dataclasses import replace

from weightsync._tables import SENDER_ROWS, RefusalKind, SenderInput, State
from weightsync.machine import next_state
from weightsync.messages import Ack, Bye, Hello, Refusal
from weightsync.protocol import steps
from weightsync.protocol.sender_guards import ends_link, known, name, owes, targets_of
from weightsync.protocol.sender_values import (
    Abandon,
    Answer,
    Close,
    CloseLink,
    Conclude,
    Connect,
    Deadline,
    Dispatch,
    Effect,
    Entry,
    Event,
    Farewell,
    Greet,
    Interrupted,
    Join,
    LinkLost,
    Outstanding,
    Remove,
    Send,
    SendAsync,
    SenderData,
    Standing,
    Wait,
)
from weightsync.report import Outcome, OutcomeKind

__all__ = [
    "Abandon",
    "Answer",
    "Close",
    "CloseLink",
    "Conclude",
    "Connect",
    "Deadline",
    "Dispatch",
    "Effect",
    "Entry",
    "Event",
    "Farewell",
    "Greet",
    "Interrupted",
    "Join",
    "LinkLost",
    "Outstanding",
    "Remove",
    "Send",
    "SendAsync",
    "SenderData",
    "Standing",
    "Step",
    "Wait",
    "ended",
    "joining",
    "known",
    "name",
    "removal",
    "step",
    "targets_of",
]


class Step(steps.Step[SenderInput, SenderData, Effect]):
    """What follows from an event of the sender's."""

    __slots__ = ()


# --------------------------------------------------------------------------------------------------- step


def step(state: State, data: SenderData, event: Event) -> Step:
    """Name the event's input, look up its row, return the next value and the effects.

    Raises:
        StateError: the table has no row for it.
        ConfigurationError: a worker id that is not on the roll, or none.
        WorkerLostError, RefusedError: every target is lost already, or has refused the handshake.
        In each case nothing has changed.
    """
    named = name(state, data, event)
    if named is None:
        return Step(None, state, replace(data, late=data.late + 1))
    to = next_state(SENDER_ROWS, state, named)
    after, effects = _advance(named, data, event)
    if named in _ENDS and after.outstanding is not None:
        effects = (*effects, Conclude(after.outstanding, after.not_caught_up, after.left))
        after = replace(after, outstanding=None, not_caught_up={}, left={})
    return Step(named, to, after, effects)


_ENDS = frozenset({SenderInput.SETTLED, SenderInput.WAIT_SETTLED, SenderInput.ABANDON, SenderInput.CLOSE})


def _advance(named: SenderInput, data: SenderData, event: Event) -> tuple[SenderData, tuple[Effect, ...]]:
    match event:
        case Connect(incarnation):
            greetings = tuple(Greet(worker, entry.link, 0) for worker, entry in data.roll.items())
            return replace(data, incarnation=incarnation), greetings
        case Send(targets) | SendAsync(targets):
            return _dispatch(data, targets)
        case Join(worker, link):
            return _join(data, worker, link)
        case Remove(worker):
            rest = {w: e for w, e in data.roll.items() if w != worker}
            return replace(data, roll=rest), _closing(worker, known(data, worker))
        case Close():
            links = [CloseLink(w, e.link) for w, e in data.roll.items() if e.open]
            return _abandon(data, "the sender was closed"), tuple(links)
        case Abandon():
            return _abandon(data, "given up by the caller"), ()
        case LinkLost(worker, link, reason):
            return _lose(data, worker, link, replace(data.roll[worker], standing=Standing.LOST, reason=reason))
        case Answer() if named is SenderInput.STALE:
            return replace(data, stale=data.stale + 1), ()
        case Answer():
            return _answered(named, data, event)
        case _:
            return data, ()


def _dispatch(data: SenderData, targets: tuple[int, ...] | None) -> tuple[SenderData, tuple[Effect, ...]]:
    entries = targets_of(data, targets)
    closed = {worker: entry for worker, entry in entries.items() if not entry.open}
    version = data.version + 1
    owed = {worker: entry.link for worker, entry in entries.items() if worker not in closed}
    roll = {w: replace(e, due=version) if w in entries else e for w, e in data.roll.items()}
    after = replace(
        data,
        version=version,
        due_all=version if targets is None else data.due_all,
        roll=roll,
        outstanding=Outstanding(version, owed, {worker: ended(entry) for worker, entry in closed.items()}),
    )
    return after, tuple(Dispatch(worker, link, version) for worker, link in owed.items())


def ended(entry: Entry) -> Outcome:
    """What a report says of a worker whose link is lost or was refused."""
    return Outcome(
        kind=OutcomeKind.REFUSED if entry.standing is Standing.REFUSED else OutcomeKind.LOST,
        reason=entry.reason,
        remote_traceback=entry.remote_traceback,
        fence=entry.fence,
    )


def _join(data: SenderData, worker: int, link: int) -> tuple[SenderData, tuple[Effect, ...]]:
    before = data.roll.get(worker)
    due = max(data.due_all, before.due if before else 0)
    entry = Entry(link, due=due, catching=due)
    after = replace(data, roll={**data.roll, worker: entry})
    return after, (Greet(worker, link, due),) if data.incarnation else _closing(worker, before)


def _closing(worker: int, entry: Entry | None) -> tuple[Effect, ...]:
    """Before CONNECT a link that is replaced or given up cannot be LOST, but it closes all the same."""
    return () if entry is None or not entry.open else (CloseLink(worker, entry.link),)


def _abandon(data: SenderData, reason: str) -> SenderData:
    if data.outstanding is None:
        return data
    given_up = {w: Outcome(kind=OutcomeKind.ABANDONED, reason=reason) for w in data.outstanding.owed}
    return replace(data, outstanding=Outstanding(data.version, {}, {**data.outstanding.outcomes, **given_up}))


def _lose(data: SenderData, worker: int, link: int, entry: Entry) -> tuple[SenderData, tuple[Effect, ...]]:
    after = replace(data, roll={**data.roll, worker: replace(entry, catching=0)})
    return _settle(after, worker, link, ended(entry)), (CloseLink(worker, link),)


def _settle(data: SenderData, worker: int, link: int, outcome: Outcome) -> SenderData:
    if not owes(data, worker, link) or data.outstanding is None:
        return data
    owed = {w: over for w, over in data.outstanding.owed.items() if w != worker}
    outcomes = {**data.outstanding.outcomes, worker: outcome}
    return replace(data, outstanding=Outstanding(data.outstanding.version, owed, outcomes))


def _answered(named: SenderInput, data: SenderData, event: Answer) -> tuple[SenderData, tuple[Effect, ...]]:
    message, worker, link = event.message, event.worker, event.link
    if isinstance(message, Bye):
        return _left(data, worker, link, message.reason or "it gave no reason")
    if isinstance(message, Refusal) and ends_link(message):
        return _lose(data, worker, link, _told_to_go(data.roll[worker], message))
    entry = replace(data.roll[worker], standing=Standing.UP)
    if isinstance(message, Hello):
        return replace(data, roll={**data.roll, worker: entry}), ()
    if message.version >= entry.catching:
        entry = replace(entry, catching=0)
    if isinstance(message, Ack):
        entry = replace(entry, served=message.version)
    after = replace(data, roll={**data.roll, worker: entry})
    outcome = _outcome(message)
    if named is not SenderInput.CAUGHT_UP:
        return _settle(after, worker, link, outcome), ()
    if isinstance(message, Refusal) and message.kind is RefusalKind.REFUSED:
        after = replace(after, not_caught_up={**after.not_caught_up, worker: outcome})
    return after, ()


def _left(data: SenderData, worker: int, link: int, goodbye: str) -> tuple[SenderData, tuple[Effect, ...]]:
    """A worker's goodbye: its link is lost, and the worker leaves the roll."""
    lost = replace(data.roll[worker], standing=Standing.LOST, reason=f"said goodbye: {goodbye}")
    after, effects = _lose(data, worker, link, lost)
    roll = {w: entry for w, entry in after.roll.items() if w != worker}
    return replace(after, roll=roll, left={**data.left, worker: goodbye}), (*effects, Farewell(worker, goodbye))


def _told_to_go(entry: Entry, message: Refusal) -> Entry:
    """The entry of a worker that takes nothing more over this link, by its own word."""
    newer = message.fence if message.fence > message.incarnation else 0
    refused = message.kind is RefusalKind.REFUSED and not newer
    reason = message.reason or message.kind.name
    return replace(
        entry,
        standing=Standing.REFUSED if refused else Standing.LOST,
        reason=_WORDS[message.kind].format(reason),
        remote_traceback=message.remote_traceback,
        fence=newer,
    )


_WORDS = {
    RefusalKind.REFUSED: "it refused the handshake: {}",
    RefusalKind.SUPERSEDED: "SUPERSEDED: {}",
    RefusalKind.STALE: "STALE: {}",
    RefusalKind.FENCED: "FENCED: {}",
    RefusalKind.FAILED: "it failed: {}",
}


def _outcome(message: Ack | Refusal) -> Outcome:
    if isinstance(message, Ack):
        return Outcome(
            kind=OutcomeKind.APPLIED, evidence=message.evidence, seconds=message.seconds, nested=message.nested
        )
    return Outcome(
        kind=OutcomeKind.REFUSED,
        reason=message.reason or message.kind.name,
        remote_traceback=message.remote_traceback,
        evidence=message.evidence,
        fence=message.fence,
    )


# ----------------------------------------------------------------------------------------------- compounds


def joining(state: State, data: SenderData, worker: int, link: int) -> tuple[Event, ...]:
    """The events of a worker that joins on a new link: its old one, where it is not lost yet, is lost first."""
    return (*_losing(state, data, worker, "replaced by a new link"), Join(worker, link))


def removal(state: State, data: SenderData, worker: int, reason: str) -> tuple[Event, ...]:
    """The events of a worker that leaves the roll: its link, where it is not lost yet, is lost first.

    Raises:
        StateError: the sender is closed.
        ConfigurationError: it is not on the roll.
    """
    next_state(SENDER_ROWS, state, SenderInput.REMOVE)
    known(data, worker)
    return (*_losing(state, data, worker, reason), Remove(worker))


def _losing(state: State, data: SenderData, worker: int, reason: str) -> tuple[Event, ...]:
    entry = data.roll.get(worker)
    if entry is None or not entry.open or state in (State.UNINITIALIZED, State.CLOSED):
        return ()
    return (LinkLost(worker, entry.link, reason),)
