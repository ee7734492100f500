"""A model network: it joins the shipped pure halves as AckProtocol.tla joins its machines.

What a machine does is what `weightsync.protocol` says: each action builds an event, has the shipped `step` name it and
look it up, and executes its effects over letters and answers. The rest, the world around the machines (links that
close, processes that die, copies), is the model's; its names are those of AckProtocol.tla.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from weightsync._tables import State
from weightsync.errors import ConfigurationError, ProtocolError, StateError, WorkerLostError
from weightsync.messages import Ack, Refusal
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.report import Outcome, OutcomeKind


class Frozen(dict[Any, Any]):
    """A dict as a value: nobody changes it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def new_data(incarnation: int = 0, version: int = 0) -> sending.SenderData:
    """What a new sender remembers, or a dead one's messages still name."""
    return sending.SenderData(incarnation, version, roll=Frozen(), not_caught_up=Frozen())


@dataclass(frozen=True)
class Bounds:
    """The constants of a configuration."""

    senders: int
    workers: int
    max_version: int
    max_link: int
    max_clock: int
    features: frozenset[str]
    #: How links misbehave: "Reorders", "Duplicates", "Loses", "Lingers".
    links: frozenset[str] = frozenset()


@dataclass(frozen=True, order=True)
class Letter:
    """A message on its way to a worker; version 0: a Hello."""

    s: int
    w: int
    k: int
    v: int
    p: int


@dataclass(frozen=True, order=True)
class Word:
    """A message on its way to a sender."""

    s: int
    w: int
    k: int
    inc: int
    v: int
    p: int
    kind: str
    fence: int


@dataclass(frozen=True)
class Last:
    """The update outstanding, or the last report, as the properties see it."""

    version: int = 0
    owed: tuple[tuple[int, int], ...] = ()
    outcomes: tuple[tuple[int, str], ...] = ()
    did: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Trainer:
    """A sender, its life, and what only the model remembers of it."""

    life: str = "unborn"
    state: State = State.UNINITIALIZED
    data: sending.SenderData = field(default_factory=new_data)
    blocked: bool = False
    serial: int = 0
    #: How many links it has laid to each worker.
    laid: tuple[int, ...] = ()
    last: Last = Last()


@dataclass(frozen=True)
class Worker:
    """A receiver, and what only the model remembers of it: serials, and the highest incarnation it has met."""

    state: State = State.UNINITIALIZED
    data: receiving.ReceiverData = field(default_factory=receiving.ReceiverData)
    met: int = 0
    pending_p: int = 0
    decided_p: int = 0
    served_p: int = 0


@dataclass(frozen=True)
class World:
    """One node of the graph."""

    trainers: tuple[Trainer, ...]
    workers: tuple[Worker, ...]
    letters: frozenset[Letter] = frozenset()
    answers: frozenset[Word] = frozenset()
    #: (sender, worker): the worker's end of the sender's open link is closed.
    gone: frozenset[tuple[int, int]] = frozenset()
    #: `Bounds.links`, the same in all nodes.
    links: frozenset[str] = frozenset()

    def trainer(self, s: int) -> Trainer:
        return self.trainers[s - 1]

    def worker(self, w: int) -> Worker:
        return self.workers[w - 1]

    def with_trainer(self, s: int, trainer: Trainer) -> World:
        return replace(self, trainers=(*self.trainers[: s - 1], trainer, *self.trainers[s:]))

    def with_worker(self, w: int, worker: Worker) -> World:
        return replace(self, workers=(*self.workers[: w - 1], worker, *self.workers[w:]))


REFUSED_BY_THE_CODE = (StateError, ConfigurationError, WorkerLostError, ProtocolError)

# ------------------------------------------------------------------------------------------------ derived


def is_open(world: World, s: int, w: int, k: int) -> bool:
    """The sender's end of this link is open."""
    trainer = world.trainer(s)
    entry = trainer.data.roll.get(w)
    usable = trainer.life == "alive" and trainer.state is not State.CLOSED and trainer.data.incarnation != 0
    return usable and entry is not None and entry.link == k and entry.standing is not sending.Standing.LOST


def posted(world: World, word: Word) -> World:
    if not is_open(world, word.s, word.w, word.k):
        return world
    return replace(world, answers=world.answers | {word})


def number(s: int, k: int) -> int:
    """The receiver's number for a link."""
    return 100 * s + k


def link_of(worker: Worker) -> tuple[int, int]:
    return (0, 0) if worker.data.link is None else divmod(worker.data.link, 100)


def closing_ends(world: World, ends: set[tuple[int, int, int]]) -> World:
    """The worker's ends of these links close."""
    more = {(s, w) for s, w, k in ends if s and is_open(world, s, w, k)}
    return replace(world, gone=world.gone | more)


def all_ends(world: World, w: int) -> set[tuple[int, int, int]]:
    found = set()
    for s, trainer in enumerate(world.trainers, 1):
        if w in trainer.data.roll:
            found.add((s, w, trainer.data.roll[w].link))
    return found


def without_letters(world: World, w: int, s: int, k: int) -> World:
    return replace(world, letters=frozenset(m for m in world.letters if (m.w, m.s, m.k) != (w, s, k)))


def emptied(world: World, s: int, workers: set[int]) -> World:
    """The sender closes its links to these workers: unless it lingers, what is on them is gone."""
    kept = "Lingers" in world.links
    return replace(
        world,
        letters=frozenset(m for m in world.letters if kept or not (m.s == s and m.w in workers)),
        answers=frozenset(m for m in world.answers if kept or not (m.s == s and m.w in workers)),
        gone=frozenset(end for end in world.gone if not (end[0] == s and end[1] in workers)),
    )


def first(world: World, messages: frozenset[Any], m: Any) -> bool:
    """First on its ordered link."""
    return "Reorders" in world.links or all(m.p <= n.p for n in messages if (n.s, n.w, n.k) == (m.s, m.w, m.k))


def taken(world: World, m: Letter | Word) -> World:
    """The message is handed over; where links duplicate it may be so again."""
    if "Duplicates" in world.links:
        return world
    return replace(world, letters=world.letters - {m}, answers=world.answers - {m})  # type: ignore[operator]


# -------------------------------------------------------------------------------------- the sender's steps


def took(world: World, s: int, event: sending.Event) -> tuple[World, sending.Step]:
    """The shipped step of sender ``s``, and the model's notes of it; its effects are still to be executed."""
    trainer = world.trainer(s)
    step = sending.step(trainer.state, trainer.data, event)
    concluded = [effect for effect in step.effects if isinstance(effect, sending.Conclude)]
    last = trainer.last
    if concluded:
        last = _noted(concluded[0].outstanding, frozenset())
    elif step.data.outstanding is not None:
        new = trainer.data.outstanding is None
        last = _noted(step.data.outstanding, frozenset() if new else last.did)
    blocked = step.to is State.AWAITING_ACK
    after = replace(trainer, state=step.to, data=_told(step.data), last=last, blocked=blocked)
    return world.with_trainer(s, after), step


def _told(data: sending.SenderData) -> sending.SenderData:
    """The data without what is only told to people: counters, reasons, who did not catch up."""
    roll = {w: replace(entry, reason="") for w, entry in sorted(data.roll.items())}
    outstanding = data.outstanding
    if outstanding is not None:
        outcomes = {w: Outcome(kind=outcome.kind) for w, outcome in sorted(outstanding.outcomes.items())}
        outstanding = replace(outstanding, owed=Frozen(sorted(outstanding.owed.items())), outcomes=Frozen(outcomes))
    return replace(data, roll=Frozen(roll), outstanding=outstanding, not_caught_up=Frozen(), stale=0, late=0)


def _noted(outstanding: sending.Outstanding, did: frozenset[int]) -> Last:
    outcomes = {w: outcome.kind.name for w, outcome in outstanding.outcomes.items()}
    outcomes |= dict.fromkeys(outstanding.owed, OutcomeKind.PENDING.name)
    return Last(outstanding.version, tuple(sorted(outstanding.owed.items())), tuple(sorted(outcomes.items())), did)


def executed(world: World, s: int, step: sending.Step) -> World:
    """The step's effects."""
    for effect in step.effects:
        match effect:
            case sending.Greet(worker, link, due):
                world = _greeted(world, s, worker, link, due)
            case sending.Dispatch(worker, link, version):
                if (s, worker) not in world.gone:
                    letter = Letter(s, worker, link, version, world.trainer(s).serial)
                    world = replace(world, letters=world.letters | {letter})
            case sending.CloseLink(worker, _):
                world = emptied(world, s, {worker})
            case sending.Conclude():
                pass  # noted by `took`
    return world


def _greeted(world: World, s: int, w: int, k: int, due: int) -> World:
    if world.worker(w).state is State.CLOSED:
        return replace(world, gone=world.gone | {(s, w)})
    greeting = {Letter(s, w, k, 0, 0)} | ({Letter(s, w, k, due, due)} if due else set())
    return replace(world, letters=world.letters | greeting)


def did(world: World, s: int, event: sending.Event) -> World:
    """A whole step of a sender."""
    world, step = took(world, s, event)
    return executed(world, s, step)


# ------------------------------------------------------------------------------------ the receiver's steps


def heard(world: World, w: int, event: receiving.Event) -> World:
    """A whole step of a receiver: the shipped step, and its effects over answers and links."""
    worker = world.worker(w)
    step = receiving.step(worker.state, worker.data, event)
    old = link_of(worker)
    world = world.with_worker(w, replace(worker, state=step.to, data=step.data))
    for effect in step.effects:
        world = _executed(world, w, effect, worker, old)
    return world


def _executed(world: World, w: int, effect: receiving.Effect, before: Worker, old: tuple[int, int]) -> World:
    match effect:
        case receiving.Greet(link):
            s, k = divmod(link, 100)
            return posted(world, Word(s, w, k, world.worker(w).data.fence, 0, 0, "HELLO", 0))
        case receiving.Reject(link, incarnation, kind, _):
            s, k = divmod(link, 100)
            return posted(world, Word(s, w, k, incarnation, 0, 0, kind.name, before.data.fence))
        case receiving.Tell(link, key, kind):
            s, k = divmod(link, 100)
            serial = before.pending_p if key == before.data.pending else key[1]
            return posted(world, Word(s, w, k, *key, serial, kind.name, before.data.fence))
        case receiving.Reply(link, answer) if world.worker(w).state is not State.AWAITING_ACK:
            return posted(world, _word(link, w, answer, before))
        case receiving.CloseLink(link):
            s, k = divmod(link, 100)
            world = without_letters(world, w, s, k)
            return closing_ends(world, {(s, w, k)})
        case _:
            return world  # the answer to what was just decided leaves in Answered


def _word(link: int, w: int, answer: Ack | Refusal, worker: Worker) -> Word:
    s, k = divmod(link, 100)
    kind = "ACK" if isinstance(answer, Ack) else answer.kind.name
    fence = 0 if isinstance(answer, Ack) else answer.fence
    return Word(s, w, k, answer.incarnation, answer.version, worker.decided_p, kind, fence)
