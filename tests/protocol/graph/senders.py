"""The actions of senders, and of answers to them, with the names and arguments of AckProtocol.tla."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from machines import did, executed, took
from modelcheck.second import Bounds, Label
from modelcheck.second.words import Word
from network import Trainer, World, emptied, first, is_open, is_shared, new_data, no_report, taken

from weightsync.protocol import sender as sending
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal

MODEL = "policy"
#: An action, and a function that returns the world after it, or None if the action cannot happen.
Attempt = tuple[Label, Any]


def attempts(world: World) -> Iterator[Attempt]:
    """Every action that senders may take in a world."""
    bounds = world.bounds
    for s in bounds.all_senders:
        if "copy" in bounds.features:
            yield from (((Action.COPY, u, s), lambda u=u, s=s: _copy(world, u, s)) for u in bounds.all_senders)
        if world.trainer(s).life == "alive":
            yield from _calls(world, bounds, s)
            yield from _losses(world, bounds, s)
    for m in world.answers:
        if first(world, world.answers, m):
            yield from _answer(world, m)
        if "stray" in bounds.features:
            yield from _unclaimed(world, bounds, m)
        if "Loses" in bounds.links:
            lost = world._replace(answers=world.answers - {m})
            yield (Action.LOSE_ANSWER, m.s, m.w, m.k, m.v, m.kind), lambda lost=lost: lost
    if "cut" in bounds.features:
        yield from _cuts(world, bounds)


def _copy(world: World, s: int, t: int) -> World | None:
    born = all(world.trainer(u).life != "unborn" for u in range(1, t))
    if s == t or world.trainer(s).life == "unborn" or world.trainer(t).life != "unborn" or not born:
        return None
    return world.with_trainer(t, replace(world.trainer(t), life="alive"))


def _calls(world: World, bounds: Bounds, s: int) -> Iterator[Attempt]:
    may = bounds.features.__contains__
    if may("death"):
        yield (Action.DIE, s), lambda: _die(world, s)
    for clock in range(1, bounds.max_clock + 1):
        yield (Action.CONNECT, s, clock), lambda clock=clock: _connect(world, s, clock)
    for w in bounds.all_workers:
        yield (Action.JOIN, s, w), lambda w=w: _join(world, bounds, s, w)
        if may("remove"):
            yield (Action.REMOVE, s, w), lambda w=w: _remove(world, s, w)
    yield from _sends(world, bounds, s)
    yield from _waits(world, bounds, s)
    if may("close"):
        yield (Action.CLOSE_SENDER, s), lambda: _close_sender(world, bounds, s)


def _sends(world: World, bounds: Bounds, s: int) -> Iterator[Attempt]:
    some = [*_subsets(bounds.workers)] if "subset" in bounds.features else []
    yield (Action.SEND_ALL, s), lambda: _dispatch(world, s, sending.Send(None))
    for to in some:
        yield (Action.SEND_TO, s, frozenset(to)), lambda to=to: _dispatch(world, s, sending.Send(to))
    if "async" in bounds.features:
        yield (Action.SEND_ASYNC_ALL, s), lambda: _dispatch(world, s, sending.SendAsync(None))
        for to in some:
            yield (Action.SEND_ASYNC_TO, s, frozenset(to)), lambda to=to: _dispatch(world, s, sending.SendAsync(to))


def _waits(world: World, bounds: Bounds, s: int) -> Iterator[Attempt]:
    may, version = bounds.features.__contains__, world.trainer(s).data.version
    yield (Action.WAIT, s), lambda: did(world, s, sending.Wait())
    if may("deadline"):
        yield (Action.DEADLINE, s), lambda: _timely(world, s, sending.Deadline(version))
    if may("interrupt"):
        yield (Action.INTERRUPTED, s), lambda: _timely(world, s, sending.Interrupted(version))
    if may("abandon"):
        yield (Action.ABANDON, s), lambda: did(world, s, sending.Abandon())


def _subsets(workers: int) -> Iterator[tuple[int, ...]]:
    every = range(1, workers + 1)
    return chain.from_iterable(combinations(every, size) for size in range(workers + 1))


def _die(world: World, s: int) -> World:
    trainer, bounds = world.trainer(s), world.bounds
    data = new_data(trainer.data.incarnation, trainer.data.version)
    created = (0,) * bounds.workers
    dead = Trainer(created, no_report(bounds), "dead", State.UNINITIALIZED, data, serial=trainer.serial)
    return _silenced(emptied(world.with_trainer(s, dead), s, set(bounds.all_workers)), s)


def _silenced(world: World, s: int) -> World:
    """Remove all answers to a sender that is closed or dead."""
    return world._replace(answers=frozenset(m for m in world.answers if m.s != s))


def _connect(world: World, s: int, clock: int) -> World | None:
    fences = [entry.fence for t in world.trainers if t.state is State.CLOSED for entry in t.data.workers.values()]
    incarnation = max(clock, max(fences, default=0) + 1)
    used = {trainer.data.incarnation for trainer in world.trainers}
    if not world.trainer(s).data.workers or incarnation in used:
        return None
    return did(world, s, sending.Connect(incarnation))


def _join(world: World, bounds: Bounds, s: int, w: int) -> World | None:
    trainer = world.trainer(s)
    entry, k = trainer.data.workers.get(w), trainer.created[w - 1] + 1
    if k > bounds.max_link or (entry is not None and entry.open):
        return None  # a link still open is lost first: that step is GiveUp
    created = (*trainer.created[: w - 1], k, *trainer.created[w:])
    return did(world.with_trainer(s, replace(trainer, created=created)), s, sending.Join(w, k))


def _remove(world: World, s: int, w: int) -> World | None:
    data = world.trainer(s).data
    entry = data.workers.get(w)
    if entry is None or (entry.open and data.incarnation):
        return None  # a link still open is lost first: that step is GiveUp
    return did(world, s, sending.Remove(w))


def _dispatch(world: World, s: int, event: sending.Send | sending.SendAsync) -> World | None:
    if world.trainer(s).serial >= world.bounds.max_version:
        return None
    world, step = took(world, s, event)
    trainer = world.trainer(s)
    return executed(world.with_trainer(s, replace(trainer, serial=trainer.serial + 1)), s, step)


def _timely(world: World, s: int, event: sending.Event) -> World | None:
    after, step = took(world, s, event)
    return None if step.input is None else executed(after, s, step)


def _close_sender(world: World, bounds: Bounds, s: int) -> World:
    return _silenced(emptied(did(world, s, sending.Close()), s, set(bounds.all_workers)), s)


def _losses(world: World, bounds: Bounds, s: int) -> Iterator[Attempt]:
    ordered = "Reorders" not in bounds.links
    for w, entry in world.trainer(s).data.workers.items():
        if not is_open(world, s, w, entry.link):
            continue
        lost = sending.LinkLost(w, entry.link, "")
        if (s, w) not in world.gone:
            if "wrong" in bounds.features:
                yield (Action.GIVE_UP, s, w), lambda lost=lost: did(world, s, lost)
        elif not (ordered and any((m.s, m.w, m.k) == (s, w, entry.link) for m in world.answers)):
            yield (Action.NOTICE, s, w), lambda lost=lost: did(world, s, lost)


def _answer(world: World, m: Word) -> Iterator[Attempt]:
    place = (m.s, m.w, m.k)
    match m.kind:
        case "HELLO":
            message = Hello(model_id=MODEL, incarnation=m.inc)
            yield (Action.ANSWER_HELLO, *place), lambda: _answered(world, m, message)
        case "ACK":
            ack = Ack(model_id=MODEL, incarnation=m.inc, version=m.v)
            yield (Action.ANSWER_ACK, *place, m.v), lambda: _answered(world, m, ack)
        case "BYE":
            if is_open(world, *place):
                bye = Bye(model_id=MODEL, incarnation=m.inc)
                yield (Action.ANSWER_BYE, *place), lambda: _answered(world, m, bye)
        case kind:
            refusal = Refusal(model_id=MODEL, incarnation=m.inc, version=m.v, kind=RefusalKind[kind], fence=m.fence)
            refused = "SharedRefusal" if is_shared(world.bounds) else Action.ANSWER_REFUSAL
            label = (refused, *place, m.v, kind) if m.v else (Action.ANSWER_REJECTED, *place, kind)
            yield label, lambda: _answered(world, m, refusal)


def _answered(world: World, m: Word, message: Hello | Ack | Refusal | Bye) -> World:
    open_before = is_open(world, m.s, m.w, m.k)
    world = did(taken(world, m), m.s, sending.Answer(m.w, m.k, message))
    ended = open_before and not is_open(world, m.s, m.w, m.k)
    return world._replace(answers=world.answers - {m}) if ended else world


def _cuts(world: World, bounds: Bounds) -> Iterator[Attempt]:
    for s, w, k in {(m.s, m.w, m.k) for m in world.answers}:
        if is_open(world, s, w, k) and ((s, w) in world.gone or "wrong" in bounds.features):
            on = frozenset(m for m in world.answers if (m.s, m.w, m.k) == (s, w, k))
            for lost in chain.from_iterable(combinations(sorted(on), size) for size in range(1, len(on) + 1)):
                after = world._replace(answers=world.answers - set(lost))
                yield (Action.CUT_ANSWERS, s, w, k, frozenset(m.p for m in lost)), lambda after=after: after


def _unclaimed(world: World, bounds: Bounds, m: Word) -> Iterator[Attempt]:
    for t in bounds.all_senders:
        if t != m.s and is_open(world, t, m.w, m.k) and m.inc == world.trainer(m.s).data.incarnation:
            yield (Action.STRAY, m.s, t, m.w, m.k), lambda t=t: _stray(world, m, t)


def _stray(world: World, m: Word, t: int) -> World:
    world = taken(world, m)
    return world._replace(answers=world.answers | {m._replace(s=t)})
