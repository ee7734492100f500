"""The actions of AckProtocol.tla over the model network, under the same names and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from network import (
    REFUSED_BY_THE_CODE,
    Bounds,
    Frozen,
    Last,
    Letter,
    Trainer,
    Word,
    Worker,
    World,
    _word,
    all_ends,
    closing_ends,
    did,
    emptied,
    executed,
    first,
    heard,
    is_open,
    link_of,
    new_data,
    number,
    posted,
    taken,
    took,
    without_letters,
)

from weightsync._tables import RefusalKind, State
from weightsync.messages import Ack, Hello, Refusal
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending

MODEL = "policy"
Label = tuple[Any, ...]
Edge = tuple[Label, World]


def successors(world: World, bounds: Bounds) -> Iterator[Edge]:
    """Every action that can happen, with its arguments, and the world after it.

    What the shipped code refuses does not happen; that it then changes nothing is `test_refusals`' business.
    """
    for label, attempt in _attempts(world, bounds):
        try:
            after = attempt()
        except REFUSED_BY_THE_CODE:
            continue
        if after is not None:
            yield label, after


def _attempts(world: World, bounds: Bounds) -> Iterator[tuple[Label, Any]]:
    may = bounds.features.__contains__
    for s in range(1, bounds.senders + 1):
        if may("copy"):
            yield from ((("Copy", u, s), lambda u=u, s=s: _copy(world, u, s)) for u in range(1, bounds.senders + 1))
        if world.trainer(s).life == "alive":
            yield from _calls(world, bounds, s)
            yield from _losses(world, bounds, s)
    for m in world.answers:
        if first(world, world.answers, m):
            yield from _answer(world, m)
        if may("stray"):
            yield from _strays(world, bounds, m)
    if "Loses" in world.links:
        for letter in world.letters:
            yield _lost_letter(world, letter)
        for word in world.answers:
            yield _lost_answer(world, word)
    if may("cut"):
        yield from _cuts(world, bounds)
    for w in range(1, bounds.workers + 1):
        yield from _reads(world, bounds, w)
        yield from _results(world, bounds, w)


# ------------------------------------------------------------------------------------------------ senders


def _copy(world: World, s: int, t: int) -> World | None:
    born = all(world.trainer(u).life != "unborn" for u in range(1, t))
    if s == t or world.trainer(s).life == "unborn" or world.trainer(t).life != "unborn" or not born:
        return None
    return world.with_trainer(t, replace(world.trainer(t), life="alive"))


def _calls(world: World, bounds: Bounds, s: int) -> Iterator[tuple[Label, Any]]:
    may, version = bounds.features.__contains__, world.trainer(s).data.version
    if may("death"):
        yield ("Die", s), lambda: _die(world, s)
    for clock in range(1, bounds.max_clock + 1):
        yield ("Connect", s, clock), lambda clock=clock: _connect(world, s, clock)
    for w in range(1, bounds.workers + 1):
        yield ("Join", s, w), lambda w=w: _join(world, bounds, s, w)
        if may("remove"):
            yield ("Remove", s, w), lambda w=w: _remove(world, s, w)
    yield ("SendAll", s), lambda: _dispatch(world, bounds, s, sending.Send(None))
    if may("async"):
        yield ("SendAsyncAll", s), lambda: _dispatch(world, bounds, s, sending.SendAsync(None))
    for some in _subsets(bounds.workers) if may("subset") else ():
        yield ("SendTo", s, frozenset(some)), lambda some=some: _dispatch(world, bounds, s, sending.Send(some))
        if may("async"):
            event = sending.SendAsync(some)
            yield ("SendAsyncTo", s, frozenset(some)), lambda event=event: _dispatch(world, bounds, s, event)
    yield ("Wait", s), lambda: did(world, s, sending.Wait())
    if may("deadline"):
        yield ("Deadline", s), lambda: _timely(world, s, sending.Deadline(version))
    if may("interrupt"):
        yield ("Interrupted", s), lambda: _timely(world, s, sending.Interrupted(version))
    if may("abandon"):
        yield ("Abandon", s), lambda: did(world, s, sending.Abandon())
    if may("close"):
        yield ("CloseSender", s), lambda: _close_sender(world, bounds, s)


def _subsets(workers: int) -> Iterator[tuple[int, ...]]:
    every = range(1, workers + 1)
    return chain.from_iterable(combinations(every, size) for size in range(workers + 1))


def _die(world: World, s: int) -> World:
    trainer = world.trainer(s)
    everybody = set(range(1, len(world.workers) + 1))
    dead = Trainer("dead", State.UNINITIALIZED, new_data(trainer.data.incarnation, trainer.data.version),
                   serial=trainer.serial, laid=(0,) * len(world.workers))  # fmt: skip
    return _silenced(emptied(world.with_trainer(s, dead), s, everybody), s)


def _silenced(world: World, s: int) -> World:
    """Nothing reaches a sender that is closed or dead."""
    return replace(world, answers=frozenset(m for m in world.answers if m.s != s))


def _connect(world: World, s: int, clock: int) -> World | None:
    told = [entry.fence for t in world.trainers if t.state is State.CLOSED for entry in t.data.roll.values()]
    incarnation = max(clock, max(told, default=0) + 1)
    taken = {trainer.data.incarnation for trainer in world.trainers}
    if not world.trainer(s).data.roll or incarnation in taken:
        return None
    return did(world, s, sending.Connect(incarnation))


def _join(world: World, bounds: Bounds, s: int, w: int) -> World | None:
    trainer = world.trainer(s)
    entry, k = trainer.data.roll.get(w), trainer.laid[w - 1] + 1
    if k > bounds.max_link or (entry is not None and entry.standing is not sending.Standing.LOST):
        return None
    laid = (*trainer.laid[: w - 1], k, *trainer.laid[w:])
    return did(world.with_trainer(s, replace(trainer, laid=laid)), s, sending.Join(w, k))


def _remove(world: World, s: int, w: int) -> World | None:
    data = world.trainer(s).data
    entry = data.roll.get(w)
    if entry is None or (entry.standing is not sending.Standing.LOST and data.incarnation):
        return None  # a link still open is lost first: that step is GiveUp
    return did(world, s, sending.Remove(w))


def _dispatch(world: World, bounds: Bounds, s: int, event: sending.Send | sending.SendAsync) -> World | None:
    if world.trainer(s).serial >= bounds.max_version:
        return None
    world, step = took(world, s, event)
    trainer = world.trainer(s)
    return executed(world.with_trainer(s, replace(trainer, serial=trainer.serial + 1)), s, step)


def _timely(world: World, s: int, event: sending.Event) -> World | None:
    after, step = took(world, s, event)
    return None if step.input is None else executed(after, s, step)


def _close_sender(world: World, bounds: Bounds, s: int) -> World:
    return _silenced(emptied(did(world, s, sending.Close()), s, set(range(1, bounds.workers + 1))), s)


def _losses(world: World, bounds: Bounds, s: int) -> Iterator[tuple[Label, Any]]:
    for w, entry in world.trainer(s).data.roll.items():
        if not is_open(world, s, w, entry.link):
            continue
        lost = sending.LinkLost(w, entry.link, "")
        if (s, w) not in world.gone:
            if "wrong" in bounds.features:
                yield ("GiveUp", s, w), lambda lost=lost: did(world, s, lost)
        elif not any((m.s, m.w, m.k) == (s, w, entry.link) for m in world.answers):
            yield ("Notice", s, w), lambda lost=lost: did(world, s, lost)


def _answer(world: World, m: Word) -> Iterator[tuple[Label, Any]]:
    place = (m.s, m.w, m.k)
    match m.kind:
        case "HELLO":
            message = Hello(model_id=MODEL, incarnation=m.inc)
            yield ("AnswerHello", *place), lambda: _told(world, m, message)
        case "ACK":
            ack = Ack(model_id=MODEL, incarnation=m.inc, version=m.v)
            yield ("AnswerAck", *place, m.v), lambda: _told(world, m, ack)
        case "BYE":
            if is_open(world, *place):
                yield ("AnswerBye", *place), lambda: _bye(world, m)
        case kind:
            refusal = Refusal(model_id=MODEL, incarnation=m.inc, version=m.v, kind=RefusalKind[kind], fence=m.fence)
            label = ("AnswerRefusal", *place, m.v, kind) if m.v else ("AnswerRejected", *place, kind)
            yield label, lambda: _told(world, m, refusal)


def _strays(world: World, bounds: Bounds, m: Word) -> Iterator[tuple[Label, Any]]:
    for t in range(1, bounds.senders + 1):
        if t != m.s and is_open(world, t, m.w, m.k) and m.inc == world.trainer(m.s).data.incarnation:
            yield ("Stray", m.s, t, m.w, m.k), lambda t=t: _stray(world, m, t)


def _cuts(world: World, bounds: Bounds) -> Iterator[tuple[Label, Any]]:
    for s, w, k in {(m.s, m.w, m.k) for m in world.answers}:
        if is_open(world, s, w, k) and ((s, w) in world.gone or "wrong" in bounds.features):
            on = frozenset(m for m in world.answers if (m.s, m.w, m.k) == (s, w, k))
            for lost in chain.from_iterable(combinations(sorted(on), size) for size in range(1, len(on) + 1)):
                places = frozenset(min(m.p, bounds.max_version + 1) for m in lost)
                yield (
                    ("CutAnswers", s, w, k, places),
                    lambda lost=lost: replace(world, answers=world.answers - set(lost)),
                )


def _told(world: World, m: Word, message: Hello | Ack | Refusal) -> World:
    open_before = is_open(world, m.s, m.w, m.k)
    world = did(taken(world, m), m.s, sending.Answer(m.w, m.k, message))
    ended = open_before and not is_open(world, m.s, m.w, m.k)
    return replace(world, answers=world.answers - {m}) if ended else world


def _bye(world: World, m: Word) -> World:
    world = replace(world, answers=world.answers - {m})
    trainer = world.trainer(m.s)
    for event in sending.removal(trainer.state, trainer.data, m.w, ""):
        world = did(world, m.s, event)
    return world


def _lost_letter(world: World, m: Letter) -> tuple[Label, Any]:
    return ("LoseLetter", m.s, m.w, m.k, m.v), lambda: replace(world, letters=world.letters - {m})


def _lost_answer(world: World, m: Word) -> tuple[Label, Any]:
    return ("LoseAnswer", m.s, m.w, m.k, m.v, m.kind), lambda: replace(world, answers=world.answers - {m})


def _stray(world: World, m: Word, t: int) -> World:
    world = taken(world, m)
    return replace(world, answers=world.answers | {replace(m, s=t)})


# ---------------------------------------------------------------------------------------------- receivers


def _reads(world: World, bounds: Bounds, w: int) -> Iterator[tuple[Label, Any]]:
    worker = world.worker(w)
    for m in world.letters:
        if m.w != w:
            continue
        place = (w, m.s, m.k)
        if m.v == 0:
            yield ("HelloArrived", *place), lambda m=m: _hello(world, m, "")
            if "misfit" in bounds.features and link_of(worker) != (m.s, m.k):
                yield ("Misfit", *place), lambda m=m: _hello(world, m, "another layout")
        elif link_of(worker) == (m.s, m.k) and first(world, world.letters, m):
            yield ("UpdateArrived", *place, m.v), lambda m=m: _update(world, m)
    links = {(m.s, m.k) for m in world.letters if m.w == w} | ({link_of(worker)} - {(0, 0)})
    for s, k in links:
        broke = "break" in bounds.features and (s, w) not in world.gone
        if broke or not is_open(world, s, w, k):
            yield ("LinkDown", w, s, k), lambda s=s, k=k: _link_down(world, w, s, k)


def _hello(world: World, m: Letter, misfit: str) -> World:
    world = taken(world, m)
    incarnation = world.trainer(m.s).data.incarnation
    before = world.worker(m.w)
    world = heard(world, m.w, receiving.HelloArrived(number(m.s, m.k), incarnation, misfit))
    worker = world.worker(m.w)
    if worker.data.link is not None and (worker.data.link, worker.data.fence) != (before.data.link, before.data.fence):
        world = world.with_worker(m.w, replace(worker, met=max(worker.met, incarnation), pending_p=0))
    return world


def _update(world: World, m: Letter) -> World:
    world = taken(world, m)
    before = world.worker(m.w)
    event = receiving.UpdateArrived(number(m.s, m.k), world.trainer(m.s).data.incarnation, m.v)
    world = heard(world, m.w, event)
    worker = world.worker(m.w)
    arrived = worker.data.pending != before.data.pending
    return world.with_worker(m.w, replace(worker, pending_p=m.p)) if arrived else world


def _link_down(world: World, w: int, s: int, k: int) -> World:
    worker = world.worker(w)
    event = receiving.LinkDown(number(s, k))
    if receiving.name(worker.state, worker.data, event) is not None:
        world = heard(world, w, event)
        world = world.with_worker(w, replace(world.worker(w), pending_p=0))
    # Never ours, or replaced: only what was on it is lost.
    return closing_ends(without_letters(world, w, s, k), {(s, w, k)})


def _results(world: World, bounds: Bounds, w: int) -> Iterator[tuple[Label, Any]]:
    worker, may = world.worker(w), bounds.features.__contains__
    yield ("Applied", w), lambda: _applied(world, w)
    if may("refuse"):
        yield ("Refused", w), lambda: _refused(world, w)
    if may("broken"):
        yield ("Broken", w), lambda: _ended(world, w, receiving.Broken())
    yield ("Answered", w), lambda: _answered(world, w)
    if may("bye"):
        yield ("CloseReceiver", w), lambda: _close_receiver(world, w)
    if may("crash") and (worker.data, worker.met) != (receiving.ReceiverData(), 0):
        yield ("CrashReceiver", w), lambda: _crash(world, w)


def _applied(world: World, w: int) -> World:
    worker = world.worker(w)
    incarnation, version = worker.data.pending or (0, 0)
    ack = Ack(model_id=MODEL, incarnation=incarnation, version=version)
    world = heard(world, w, receiving.Applied(ack))
    serial = worker.pending_p
    world = world.with_worker(w, replace(world.worker(w), pending_p=0, decided_p=serial, served_p=serial))
    for s, trainer in enumerate(world.trainers, 1):
        outstanding = trainer.state in (State.PENDING_ASYNC, State.AWAITING_ACK)
        if outstanding and (trainer.data.incarnation, trainer.serial) == (incarnation, serial):
            last = replace(trainer.last, did=trainer.last.did | {w})
            world = world.with_trainer(s, replace(trainer, last=last))
    return world


def _refused(world: World, w: int) -> World:
    worker = world.worker(w)
    incarnation, version = worker.data.pending or (0, 0)
    refusal = Refusal(
        model_id=MODEL, incarnation=incarnation, version=version, kind=RefusalKind.REFUSED, fence=worker.data.fence
    )
    world = heard(world, w, receiving.Refused(refusal))
    return world.with_worker(w, replace(world.worker(w), pending_p=0, decided_p=worker.pending_p))


def _answered(world: World, w: int) -> World:
    worker = world.worker(w)
    world = heard(world, w, receiving.Answered())
    assert worker.data.link is not None
    assert worker.data.answer is not None
    return posted(world, _word(worker.data.link, w, worker.data.answer, worker))


def _ended(world: World, w: int, event: receiving.Event) -> World:
    ends = all_ends(world, w)
    world = heard(world, w, event)
    served = world.worker(w).served_p if world.worker(w).data.served else 0
    world = world.with_worker(w, replace(world.worker(w), pending_p=0, served_p=served))
    return closing_ends(replace(world, letters=frozenset(m for m in world.letters if m.w != w)), ends)


def _close_receiver(world: World, w: int) -> World:
    worker = world.worker(w)
    s, k = link_of(worker)
    bye = Word(s, w, k, worker.data.fence, 0, _MAX_P, "BYE", 0)
    return _ended(posted(world, bye) if s else world, w, receiving.Close())


#: Behind all else on its link; the projection says MaxVersion + 1.
_MAX_P = 10**6


def _crash(world: World, w: int) -> World:
    ends = all_ends(world, w)
    world = world.with_worker(w, Worker())
    return closing_ends(replace(world, letters=frozenset(m for m in world.letters if m.w != w)), ends)


def start(bounds: Bounds) -> World:
    """Sender 1 alive, nothing else yet."""
    trainers = [
        Trainer("alive" if s == 1 else "unborn", laid=(0,) * bounds.workers) for s in range(1, bounds.senders + 1)
    ]
    return World(tuple(trainers), tuple(Worker() for _ in range(bounds.workers)), links=bounds.links)


# --------------------------------------------------------------------------------------------- projection


def projected(world: World, bounds: Bounds) -> tuple[Any, ...]:
    """The world as the value that AckProtocol.tla's variables have."""
    trainers, workers = world.trainers, world.workers
    ids = range(1, bounds.workers + 1)
    return (
        tuple(t.state.value for t in trainers),
        tuple(_sdata(t, ids) for t in trainers),
        tuple(t.life for t in trainers),
        tuple(t.blocked for t in trainers),
        tuple(w.state.value for w in workers),
        tuple(_rdata(w) for w in workers),
        frozenset(_record(s=m.s, w=m.w, k=m.k, v=m.v, p=m.p) for m in world.letters),
        frozenset(_word_value(m, bounds) for m in world.answers),
        tuple(tuple((s, w) in world.gone for w in ids) for s in range(1, bounds.senders + 1)),
    )


def _record(**fields: Any) -> frozenset[tuple[str, Any]]:
    return frozenset(fields.items())


def _word_value(m: Word, bounds: Bounds) -> Any:
    p = bounds.max_version + 1 if m.p == _MAX_P else m.p
    return _record(s=m.s, w=m.w, k=m.k, inc=m.inc, v=m.v, p=p, kind=m.kind, fence=m.fence)


def _sdata(t: Trainer, ids: range) -> Any:
    return _record(
        incarnation=t.data.incarnation,
        version=t.data.version,
        serial=t.serial,
        dueAll=t.data.due_all,
        roll=tuple(_entry(t, w) for w in ids),
        out=_out(t.last, ids),
    )


def _entry(t: Trainer, w: int) -> Any:
    entry = t.data.roll.get(w)
    if entry is None:
        return _record(link=t.laid[w - 1], standing="NONE", served=0, due=0, catching=0, fence=0)
    return _record(
        link=entry.link, standing=entry.standing.name, served=entry.served, due=entry.due, catching=entry.catching,
        fence=entry.fence,
    )  # fmt: skip


def _out(last: Last, ids: range) -> Any:
    owed, outcomes = dict(last.owed), dict(last.outcomes)
    return _record(
        version=last.version,
        owed=tuple(owed.get(w, 0) for w in ids),
        outcomes=tuple(outcomes.get(w, "NONE") for w in ids),
        did=last.did,
    )


def _rdata(worker: Worker) -> Any:
    data = worker.data
    served = (*(data.served or (0, 0)), worker.served_p)
    answer = "NONE" if data.answer is None else "ACK" if isinstance(data.answer, Ack) else data.answer.kind.name
    return _record(
        link=link_of(worker),
        fence=data.fence,
        met=worker.met,
        decided=(*(data.decided or (0, 0)), worker.decided_p),
        answer=answer,
        pending=(*(data.pending or (0, 0)), worker.pending_p),
        served=served,
        live=(served, served),
    )


assert Frozen  # re-exported for the tests
