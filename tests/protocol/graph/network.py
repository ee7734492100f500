"""A model network: it joins the shipped pure halves as AckProtocol.tla joins its machines.

The machines do what `weightsync.protocol` says (see `machines`). The world around them is the model's: links that
close, processes that die, copies. Names here are those of AckProtocol.tla.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from modelcheck.second import Bounds
from modelcheck.second.words import Message, Out, Word

from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import State


class Frozen(dict[Any, Any]):
    """A hashable dict, which must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


class Interned(type):
    """A metaclass that keeps one object for each value, so that values are compared and hashed by identity."""

    known: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012 - shared by all classes

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        key = (cls, *(getattr(made, each.name) for each in fields(made)))
        return cls.known.setdefault(key, made)


def new_data(incarnation: int = 0, version: int = 0) -> sending.SenderData:
    """The data of a new sender; with arguments, what messages of a dead sender still refer to."""
    return sending.SenderData(incarnation, version, workers=Frozen(), not_caught_up=Frozen(), left=Frozen())


@dataclass(frozen=True, eq=False)
class Trainer(metaclass=Interned):
    """A sender, whether it lives, and what only the model remembers of it."""

    #: How many links it has created for each worker.
    created: tuple[int, ...]
    #: The update outstanding, or the last report, as the properties see it.
    last: Out
    life: str = "unborn"
    state: State = State.UNINITIALIZED
    data: sending.SenderData = field(default_factory=new_data)
    blocked: bool = False
    serial: int = 0


@dataclass(frozen=True, eq=False)
class Worker(metaclass=Interned):
    """A receiver, and what only the model remembers of it: serials, and the highest incarnation it has met."""

    state: State = State.UNINITIALIZED
    data: receiving.ReceiverData = field(default_factory=receiving.ReceiverData)
    met: int = 0
    pending_p: int = 0
    decided_p: int = 0
    served_p: int = 0


class World(NamedTuple):
    """The machines and the messages in transit. A node of the graph is a projection of it."""

    trainers: tuple[Trainer, ...]
    workers: tuple[Worker, ...]
    messages: frozenset[Message]
    answers: frozenset[Word]
    #: (sender, worker): the worker's end of the sender's open link is closed.
    gone: frozenset[tuple[int, int]]
    #: The same in all nodes.
    bounds: Bounds

    def trainer(self, s: int) -> Trainer:
        return self.trainers[s - 1]

    def worker(self, w: int) -> Worker:
        return self.workers[w - 1]

    def with_trainer(self, s: int, trainer: Trainer) -> World:
        return self._replace(trainers=(*self.trainers[: s - 1], trainer, *self.trainers[s:]))

    def with_worker(self, w: int, worker: Worker) -> World:
        return self._replace(workers=(*self.workers[: w - 1], worker, *self.workers[w:]))


def no_report(bounds: Bounds) -> Out:
    """The last report of a sender that has never sent anything."""
    return Out(0, (0,) * bounds.workers, ("NONE",) * bounds.workers, frozenset())


def start(bounds: Bounds) -> World:
    """The initial world: sender 1 is alive, and nothing has happened."""
    created, last = (0,) * bounds.workers, no_report(bounds)
    trainers = [Trainer(created, last, "alive" if s == 1 else "unborn") for s in bounds.all_senders]
    nothing: frozenset[Any] = frozenset()
    return World(tuple(trainers), (Worker(),) * bounds.workers, nothing, nothing, nothing, bounds)


# ------------------------------------------------------------------------------------------------ derived


def is_open(world: World, s: int, w: int, k: int) -> bool:
    """Whether the sender's end of a link is open."""
    trainer = world.trainers[s - 1]
    entry = trainer.data.workers.get(w)
    return (
        entry is not None
        and entry.link == k
        and entry.open
        and trainer.data.incarnation != 0
        and trainer.life == "alive"
        and trainer.state is not State.CLOSED
    )


def posted(world: World, word: Word) -> World:
    if not is_open(world, word.s, word.w, word.k):
        return world
    return world._replace(answers=world.answers | {word})


def is_shared(bounds: Bounds) -> bool:
    """Whether all senders use one and the same link to a worker, as in Shared.tla."""
    return "shared" in bounds.features


def number(bounds: Bounds, s: int, k: int) -> int:
    """The receiver's number for a link."""
    return k if is_shared(bounds) else 100 * s + k


def sender_and_link_number(world: World, link: int, incarnation: int) -> tuple[int, int]:
    """The sender of a link, and the link's number for that sender.

    The sender of a shared link is the one that has the given incarnation.
    """
    s, k = divmod(link, 100)
    return (s or owner(world, incarnation), k)


def owner(world: World, incarnation: int) -> int:
    return next(s for s, trainer in enumerate(world.trainers, 1) if trainer.data.incarnation == incarnation)


def link_of(world: World, worker: Worker) -> tuple[int, int]:
    return (0, 0) if worker.data.link is None else sender_and_link_number(world, worker.data.link, worker.data.fence)


def connection(world: World, w: int, s: int, k: int) -> set[tuple[int, int, int]]:
    """The ends (sender, worker, link) that close together when the worker closes a link."""
    return {(t, w, k) for t in world.bounds.all_senders} if is_shared(world.bounds) else {(s, w, k)}


def hung_up(world: World, w: int, s: int, k: int) -> World:
    """Close the worker's end of a link. Messages to the worker on it are lost."""
    ends = connection(world, w, s, k)
    return with_ends_closed(
        world._replace(messages=frozenset(m for m in world.messages if (m.s, m.w, m.k) not in ends)), ends
    )


def with_ends_closed(world: World, ends: set[tuple[int, int, int]]) -> World:
    """Close the worker's ends of these links."""
    more = {(s, w) for s, w, k in ends if s and is_open(world, s, w, k)}
    return world._replace(gone=world.gone | more) if more else world


def all_ends(world: World, w: int) -> set[tuple[int, int, int]]:
    members = ((s, trainer.data.workers) for s, trainer in enumerate(world.trainers, 1))
    return {(s, w, workers[w].link) for s, workers in members if w in workers}


def without_messages_to(world: World, w: int) -> World:
    """Remove all messages to this worker."""
    return world._replace(messages=frozenset(m for m in world.messages if m.w != w))


def emptied(world: World, s: int, workers: set[int]) -> World:
    """Close the sender's links to these workers. What is in transit on them is lost, unless links linger."""
    gone = frozenset(end for end in world.gone if not (end[0] == s and end[1] in workers))
    if "Lingers" in world.bounds.links:
        return world._replace(gone=gone)
    return world._replace(
        messages=frozenset(m for m in world.messages if not (m.s == s and m.w in workers)),
        answers=frozenset(m for m in world.answers if not (m.s == s and m.w in workers)),
        gone=gone,
    )


def first(world: World, messages: frozenset[Any], m: Any) -> bool:
    """Whether a message may be read next: it is the first on its link, or links reorder."""
    if "Reorders" in world.bounds.links:
        return True
    place = m[:3]
    return all(m.p <= n.p for n in messages if n[:3] == place)


def taken(world: World, m: Message | Word) -> World:
    """Remove a message that is read. Where links duplicate, it stays and may be read again."""
    if "Duplicates" in world.bounds.links:
        return world
    if isinstance(m, Message):
        return world._replace(messages=world.messages - {m})
    return world._replace(answers=world.answers - {m})
