"""The sender's pure half: its data, its events, its guards and its effects.

`step` does three things in order: *name* the input (all guards are in `name`), *look up* its row in the table,
*return* the next data and the effects. It modifies none of its arguments. If it raises, there are no effects.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from weightsync.errors import ConfigurationError, RefusedError, WorkerLostError, sentence
from weightsync.protocol import machine
from weightsync.protocol._tables import SENDER_ROWS, RefusalKind, SenderInput, State
from weightsync.protocol.by_worker import drop, put
from weightsync.protocol.machine import next_state
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal
from weightsync.protocol.report import Outcome, OutcomeKind, advice_for_lost


class LinkState(enum.Enum):
    """The state of a worker's link."""

    #: The worker has not answered over it yet.
    EXPECTED = "expected"
    #: The worker has answered.
    UP = "up"
    #: The link is closed; the version its worker serves is unknown.
    LOST = "lost"
    #: The link is closed because its worker refused the handshake.
    REFUSED = "refused"


#: The states of a link that is neither lost nor refused. A tuple: hashing a member of an enum is a call of Python.
OPEN: Final = (LinkState.UP, LinkState.EXPECTED)


class Entry(Struct, frozen=True):
    """One of the workers."""

    #: The number of its newest link; one sender never uses a number twice.
    link: int
    link_state: LinkState = LinkState.EXPECTED
    #: Why the link is lost or was refused.
    reason: str = ""
    #: The worker's own traceback, if it reported that it failed and raised.
    remote_traceback: str = ""
    #: The fence the worker reported, if a newer sender took it over.
    fence: int = 0
    #: The version it last acked over this link; 0: none.
    served: int = 0
    #: The newest version addressed to this worker, by a send to all or to it; 0: none.
    due: int = 0
    #: The version that followed the Hello on this link and is not answered yet; 0: none.
    catching: int = 0

    @property
    def open(self) -> bool:
        """Whether its link is neither lost nor refused."""
        return self.link_state in OPEN


class Outstanding(Struct, frozen=True):
    """The version being sent: which workers owe an answer, over which link, and the outcomes of the others."""

    version: int
    owed: Mapping[int, int]
    outcomes: Mapping[int, Outcome]


class SenderData(Struct, frozen=True):
    """Everything a sender stores besides its state."""

    #: 0 until CONNECT.
    incarnation: int = 0
    #: The newest version dispatched; a version number is never used twice.
    version: int = 0
    #: The newest version dispatched to all.
    due_all: int = 0
    workers: Mapping[int, Entry] = field(default_factory=dict)
    outstanding: Outstanding | None = None
    #: Late joiners that refused the version sent to them, for the next report.
    not_caught_up: Mapping[int, Outcome] = field(default_factory=dict)
    #: Workers that said goodbye and why, for the next report.
    left: Mapping[int, str] = field(default_factory=dict)
    #: How many answers arrived that were not owed.
    stale: int = 0
    #: How many of the driver's own events arrived after they had become obsolete.
    late: int = 0


class Connect(Struct, frozen=True):
    """The user opened the links, under this incarnation."""

    incarnation: int


class Send(Struct, frozen=True):
    """The user sends to ``targets`` (None: to all) and blocks."""

    targets: tuple[int, ...] | None


class SendAsync(Struct, frozen=True):
    """The user sends to ``targets`` (None: to all) and continues."""

    targets: tuple[int, ...] | None


class Wait(Struct, frozen=True):
    """The user waits for the outstanding update."""


class Deadline(Struct, frozen=True):
    """The wait for ``version`` timed out."""

    version: int


class Interrupted(Struct, frozen=True):
    """An exception ended the wait for ``version``."""

    version: int


class Abandon(Struct, frozen=True):
    """The user gives up the outstanding update."""

    reason: str = "given up by the caller"


class Join(Struct, frozen=True):
    """A worker joins on a new link. If its old link is still open, that is lost first: see `joining`."""

    worker: int
    link: int


class Remove(Struct, frozen=True):
    """The user removes a worker. Its link is lost first: see `removal`."""

    worker: int


class Close(Struct, frozen=True):
    """The user closes the sender."""


class Answer(Struct, frozen=True):
    """A message from ``worker`` over ``link``."""

    worker: int
    link: int
    message: Hello | Ack | Refusal | Bye


class LinkLost(Struct, frozen=True):
    """A link died or was given up."""

    worker: int
    link: int
    reason: str


Event = Connect | Send | SendAsync | Wait | Deadline | Interrupted | Abandon | Join | Remove | Close | Answer | LinkLost


class Greet(Struct, frozen=True):
    """Send a Hello over the link, followed by version ``due`` if that is not 0."""

    worker: int
    link: int
    due: int


class Dispatch(Struct, frozen=True):
    """Send the version over the link."""

    worker: int
    link: int
    version: int


class CloseLink(Struct, frozen=True):
    """Close the link."""

    worker: int
    link: int


class Farewell(Struct, frozen=True):
    """A worker said goodbye and was removed: report why to the user."""

    worker: int
    reason: str


class Conclude(Struct, frozen=True):
    """The outstanding update has ended: report its outcomes to the caller that asks or waits."""

    outstanding: Outstanding
    not_caught_up: Mapping[int, Outcome]
    left: Mapping[int, str]


Effect = Greet | Dispatch | CloseLink | Farewell | Conclude


def name(state: State, data: SenderData, event: Event) -> SenderInput | None:
    """The input that the event is in this state; None for a result of the driver's own that is no longer current."""
    match event:
        case Answer():
            return _name_answer(state, data, event)
        case LinkLost():
            return _name_loss(state, data, event)
        case Wait():
            settled = data.outstanding is not None and not data.outstanding.owed
            return SenderInput.WAIT_SETTLED if settled else SenderInput.WAIT
        case Deadline(version) | Interrupted(version):
            waited = state is State.AWAITING_ACK and data.outstanding is not None
            if not waited or data.version != version:
                return None
            return SenderInput.DEADLINE if isinstance(event, Deadline) else SenderInput.INTERRUPTED
        case _:
            return _INPUT_OF_CALL[type(event)]


_INPUT_OF_CALL = {
    Connect: SenderInput.CONNECT,
    Send: SenderInput.SEND,
    SendAsync: SenderInput.SEND_ASYNC,
    Abandon: SenderInput.ABANDON,
    Join: SenderInput.JOIN,
    Remove: SenderInput.REMOVE,
    Close: SenderInput.CLOSE,
}


def _name_loss(state: State, data: SenderData, event: LinkLost) -> SenderInput | None:
    entry, outstanding = data.workers.get(event.worker), data.outstanding
    if entry is None or entry.link != event.link or not entry.open or state in (State.UNINITIALIZED, State.CLOSED):
        return None
    last = outstanding is not None and len(outstanding.owed) == 1 and outstanding.owed.get(event.worker) == event.link
    # A caller waits, and this worker is the last that owes an answer.
    return SenderInput.SETTLED if last and state is State.AWAITING_ACK else SenderInput.LOST


def _name_answer(state: State, data: SenderData, event: Answer) -> SenderInput | None:
    if state is State.CLOSED:
        return None
    message, entry = event.message, data.workers.get(event.worker)
    current = entry is not None and entry.link == event.link and entry.link_state in OPEN
    if entry is None or not current or message.incarnation != data.incarnation:
        return SenderInput.STALE
    owed = data.outstanding.owed if data.outstanding is not None else _NONE_OWED
    owes = owed.get(event.worker) == event.link
    last = owes and len(owed) == 1 and state is State.AWAITING_ACK
    match message:
        case Hello():
            return SenderInput.ARRIVED if entry.link_state is LinkState.EXPECTED else SenderInput.STALE
        case Bye():
            return SenderInput.SETTLED if last else SenderInput.LEFT
        case Refusal() if ends_link(message):
            return SenderInput.SETTLED if last else SenderInput.LOST
        case _ if owes and message.version == data.version:
            return SenderInput.SETTLED if last else SenderInput.REPLY
        case _ if message.version == entry.catching != 0:
            return SenderInput.CAUGHT_UP
        case _:
            return SenderInput.STALE


_NONE_OWED: Final[Mapping[int, int]] = {}


def ends_link(refusal: Refusal) -> bool:
    """Whether the worker accepts nothing more over this link after this refusal.

    It refused the handshake, something failed there, or it has seen a newer sender.
    """
    return refusal.version == 0 or refusal.fence > refusal.incarnation


def known(data: SenderData, worker: int) -> Entry:
    """Return the worker's entry.

    Raises:
        ConfigurationError: it is not among the workers.
    """
    if worker not in data.workers:
        raise ConfigurationError(
            f"worker {worker!r} is not among the workers {sorted(data.workers)}. Nothing was sent or changed; "
            "add_worker() adds it."
        )
    return data.workers[worker]


def targets_of(data: SenderData, targets: tuple[int, ...] | None) -> dict[int, Entry]:
    """Return the entries of the targets; None means all workers.

    Raises:
        ConfigurationError: a target is not among the workers, or there are no targets.
        WorkerLostError: every target is lost already.
        RefusedError: every target has refused the handshake.
    """
    entries = dict(data.workers.items()) if targets is None else {worker: known(data, worker) for worker in targets}
    if not entries:
        raise _no_targets_error(data, targets)
    for entry in entries.values():
        if entry.link_state in OPEN:
            return entries
    raise _all_ended_error(entries)


def _no_targets_error(data: SenderData, targets: tuple[int, ...] | None) -> ConfigurationError:
    if targets is not None:
        return ConfigurationError("worker_ids is empty: name at least one worker. Nothing was sent or changed.")
    left = "".join(f" Worker {worker} left: {goodbye}." for worker, goodbye in data.left.items())
    return ConfigurationError(
        f"there are no workers to send to.{left} Nothing was sent and no version was used. add_worker() adds a worker; "
        "WeightSender.send(allow_empty=True) accepts that there are none."
    )


def _all_ended_error(ended: Mapping[int, Entry]) -> WorkerLostError | RefusedError:
    reasons = {worker: entry.reason for worker, entry in ended.items()}
    if all(entry.link_state is LinkState.REFUSED for entry in ended.values()):
        return RefusedError(
            f"every target has refused the handshake: {_by_worker(reasons)} Nothing was sent and no version was used. "
            "Correct the workers' model or the trainer's, then add the workers again with add_worker().",
            None,
            reasons,
        )
    fences = [entry.fence for entry in ended.values()]
    usual = "add_worker() reconnects a worker on a new link, remove_worker() removes it."
    return WorkerLostError(
        f"every target is lost already: {_by_worker(reasons)} Nothing was sent and no version was used. "
        f"{advice_for_lost(usual, fences)}",
        None,
        reasons,
        max(fences) or None,
    )


def _by_worker(reasons: Mapping[int, str]) -> str:
    return sentence("; ".join(f"worker {worker}: {reason.rstrip('.')}" for worker, reason in reasons.items()))


class Step(machine.Step[SenderInput, SenderData, Effect], frozen=True):
    """The result of an event of the sender."""


def step(state: State, data: SenderData, event: Event) -> Step:
    """Name the event's input, look up its row, return the next data and the effects.

    Raises:
        StateError: the table has no row for it.
        ConfigurationError: a target is not among the workers, or there are no targets.
        WorkerLostError, RefusedError: every target is lost already, or has refused the handshake.
        In each case nothing has changed.
    """
    named = name(state, data, event)
    if named is None:
        return Step(None, state, replace(data, late=data.late + 1))
    to = SENDER_ROWS.get((state, named)) or next_state(SENDER_ROWS, state, named)
    after, effects = _advance(named, data, event)
    if named in _CONCLUDING and after.outstanding is not None:
        effects = (*effects, Conclude(after.outstanding, after.not_caught_up, after.left))
        after = replace(after, outstanding=None, not_caught_up={}, left={})
    return Step(named, to, after, effects)


_CONCLUDING = frozenset({SenderInput.SETTLED, SenderInput.WAIT_SETTLED, SenderInput.ABANDON, SenderInput.CLOSE})


def _advance(named: SenderInput, data: SenderData, event: Event) -> tuple[SenderData, tuple[Effect, ...]]:
    match event:
        case Connect(incarnation):
            greetings = tuple(Greet(worker, entry.link, 0) for worker, entry in data.workers.items())
            return replace(data, incarnation=incarnation), greetings
        case Send(targets) | SendAsync(targets):
            return _dispatch(data, targets)
        case Join(worker, link):
            return _join(data, worker, link)
        case Remove(worker):
            closing = _closing(worker, known(data, worker))
            return replace(data, workers=drop(data.workers, worker)), closing
        case Close():
            links = [CloseLink(w, e.link) for w, e in data.workers.items() if e.open]
            return _abandon(data, "the sender was closed"), tuple(links)
        case Abandon(reason):
            return _abandon(data, reason), ()
        case LinkLost(worker, link, reason):
            return _lose_link(
                data, worker, link, replace(data.workers[worker], link_state=LinkState.LOST, reason=reason)
            )
        case Answer() if named is SenderInput.STALE:
            return replace(data, stale=data.stale + 1), ()
        case Answer():
            return _receive_answer(named, data, event)
        case _:
            return data, ()


def _dispatch(data: SenderData, targets: tuple[int, ...] | None) -> tuple[SenderData, tuple[Effect, ...]]:
    version, workers = data.version + 1, dict(data.workers.items())
    owed: dict[int, int] = {}
    outcomes: dict[int, Outcome] = {}
    effects: list[Effect] = []
    for worker, e in targets_of(data, targets).items():
        workers[worker] = replace(e, due=version)
        if e.link_state in OPEN:
            owed[worker] = e.link
            effects.append(Dispatch(worker, e.link, version))
        else:
            outcomes[worker] = ended(e)
    due_all = version if targets is None else data.due_all
    outstanding = Outstanding(version, owed, outcomes)
    after = replace(data, version=version, due_all=due_all, workers=workers, outstanding=outstanding)
    return after, tuple(effects)


def ended(entry: Entry) -> Outcome:
    """The outcome of a worker whose link is lost or was refused."""
    return Outcome(
        kind=OutcomeKind.REFUSED if entry.link_state is LinkState.REFUSED else OutcomeKind.LOST,
        reason=entry.reason,
        remote_traceback=entry.remote_traceback,
        fence=entry.fence,
    )


def _join(data: SenderData, worker: int, link: int) -> tuple[SenderData, tuple[Effect, ...]]:
    before = data.workers.get(worker)
    due = max(data.due_all, before.due if before else 0)
    entry = Entry(link, due=due, catching=due)
    after = replace(data, workers=put(data.workers, worker, entry))
    return after, (Greet(worker, link, due),) if data.incarnation else _closing(worker, before)


def _closing(worker: int, entry: Entry | None) -> tuple[Effect, ...]:
    """Close a link that is replaced or given up before CONNECT, when there is no LOST."""
    return () if entry is None or not entry.open else (CloseLink(worker, entry.link),)


def _abandon(data: SenderData, reason: str) -> SenderData:
    if data.outstanding is None:
        return data
    given_up = {w: Outcome(kind=OutcomeKind.ABANDONED, reason=reason) for w in data.outstanding.owed}
    return replace(data, outstanding=Outstanding(data.version, {}, {**data.outstanding.outcomes, **given_up}))


def _lose_link(data: SenderData, worker: int, link: int, entry: Entry) -> tuple[SenderData, tuple[Effect, ...]]:
    workers = put(data.workers, worker, replace(entry, catching=0))
    outstanding = _settle(data.outstanding, worker, link, ended(entry))
    return replace(data, workers=workers, outstanding=outstanding), (CloseLink(worker, link),)


def _settle(outstanding: Outstanding | None, worker: int, link: int, outcome: Outcome) -> Outstanding | None:
    """What is outstanding once a worker's outcome is known; unchanged if the worker owes nothing over this link."""
    if outstanding is None or outstanding.owed.get(worker) != link:
        return outstanding
    outcomes = put(outstanding.outcomes, worker, outcome)
    return replace(outstanding, owed=drop(outstanding.owed, worker), outcomes=outcomes)


def _receive_answer(named: SenderInput, data: SenderData, event: Answer) -> tuple[SenderData, tuple[Effect, ...]]:
    message, worker, link = event.message, event.worker, event.link
    if isinstance(message, Bye):
        return _remove_after_goodbye(data, worker, link, message.reason or "it gave no reason")
    if isinstance(message, Refusal) and ends_link(message):
        return _lose_link(data, worker, link, _fenced_by(data.workers[worker], message))
    e = data.workers[worker]
    if isinstance(message, Hello):
        return replace(data, workers=put(data.workers, worker, replace(e, link_state=LinkState.UP))), ()
    served = message.version if isinstance(message, Ack) else e.served
    catching = 0 if message.version >= e.catching else e.catching
    entry = replace(e, link_state=LinkState.UP, served=served, catching=catching)
    workers, outcome, not_caught_up = put(data.workers, worker, entry), _outcome(message), data.not_caught_up
    outstanding = data.outstanding
    if named is not SenderInput.CAUGHT_UP:
        outstanding = _settle(outstanding, worker, link, outcome)
    elif isinstance(message, Refusal) and message.kind is RefusalKind.REFUSED:
        not_caught_up = put(not_caught_up, worker, outcome)
    return replace(data, workers=workers, outstanding=outstanding, not_caught_up=not_caught_up), ()


def _remove_after_goodbye(
    data: SenderData, worker: int, link: int, goodbye: str
) -> tuple[SenderData, tuple[Effect, ...]]:
    """Handle a worker's goodbye: its link is lost, and the worker is removed."""
    lost = replace(data.workers[worker], link_state=LinkState.LOST, reason=f"said goodbye: {goodbye}")
    after, effects = _lose_link(data, worker, link, lost)
    after = replace(after, workers=drop(after.workers, worker), left=put(data.left, worker, goodbye))
    return after, (*effects, Farewell(worker, goodbye))


def _fenced_by(entry: Entry, message: Refusal) -> Entry:
    """The entry of a worker whose refusal ended the link."""
    newer = message.fence if message.fence > message.incarnation else 0
    refused = message.kind is RefusalKind.REFUSED and not newer
    reason = message.reason or message.kind.name
    return replace(
        entry,
        link_state=LinkState.REFUSED if refused else LinkState.LOST,
        reason=_REASONS[message.kind].format(reason),
        remote_traceback=message.remote_traceback,
        fence=newer,
    )


_REASONS = {
    RefusalKind.REFUSED: "it refused the handshake: {}",
    RefusalKind.SUPERSEDED: "SUPERSEDED: {}",
    RefusalKind.STALE: "STALE: {}",
    RefusalKind.FENCED: "FENCED: {}",
    RefusalKind.FAILED: "it failed: {}",
}


def _outcome(message: Ack | Refusal) -> Outcome:
    if isinstance(message, Ack):
        return Outcome(
            kind=OutcomeKind.APPLIED, evidence=message.evidence, apply_s=message.seconds, nested=message.nested
        )
    return Outcome(
        kind=OutcomeKind.REFUSED,
        reason=message.reason or message.kind.name,
        remote_traceback=message.remote_traceback,
        evidence=message.evidence,
        fence=message.fence,
    )


def joining(state: State, data: SenderData, worker: int, link: int) -> tuple[Event, ...]:
    """The events when a worker joins on a new link: if its old link is open, that is lost first."""
    return (*_loss_if_open(state, data, worker, "replaced by a new link"), Join(worker, link))


def removal(state: State, data: SenderData, worker: int, reason: str) -> tuple[Event, ...]:
    """The events when a worker is removed: if its link is open, that is lost first.

    Raises:
        StateError: the sender is closed.
        ConfigurationError: it is not among the workers.
    """
    next_state(SENDER_ROWS, state, SenderInput.REMOVE)
    known(data, worker)
    return (*_loss_if_open(state, data, worker, reason), Remove(worker))


def _loss_if_open(state: State, data: SenderData, worker: int, reason: str) -> tuple[Event, ...]:
    entry = data.workers.get(worker)
    if entry is None or not entry.open or state in (State.UNINITIALIZED, State.CLOSED):
        return ()
    return (LinkLost(worker, entry.link, reason),)
