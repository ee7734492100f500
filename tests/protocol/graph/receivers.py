"""The actions of receivers, and of messages to them, with the names and arguments of AckProtocol.tla."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from machines import heard, named, word_of
from modelcheck.second.words import Message
from network import (
    Worker,
    World,
    all_ends,
    first,
    hung_up,
    is_open,
    is_shared,
    link_of,
    number,
    posted,
    taken,
    with_ends_closed,
    without_messages_to,
)
from senders import MODEL, Attempt

from weightsync.protocol import receiver as receiving
from weightsync.protocol._actions import Action
from weightsync.protocol._tables import RefusalKind, State
from weightsync.protocol.messages import Ack, Refusal

_NEW = receiving.ReceiverData()


def attempts(world: World) -> Iterator[Attempt]:
    """Every action that receivers may take in a world."""
    if "Loses" in world.bounds.links:
        for m in world.messages:
            lost = world._replace(messages=world.messages - {m})
            yield (Action.LOSE_MESSAGE, m.s, m.w, m.k, m.v), lambda lost=lost: lost
    for w in world.bounds.all_workers:
        yield from _reads(world, w)
        yield from _downs(world, w)
        yield from _results(world, w)


def _reads(world: World, w: int) -> Iterator[Attempt]:
    if is_shared(world.bounds):
        yield from _shared_reads(world, w)
        return
    link = link_of(world, world.worker(w))
    for m in world.messages:
        if m.w != w:
            continue
        place = (w, m.s, m.k)
        if m.v == 0:
            if not named(world.worker(w), _greeting(world, m, "")):  # its link has ended: see `_downs`
                continue
            yield (Action.HELLO_ARRIVED, *place), lambda m=m: _hello(world, m, "")
            if "misfit" in world.bounds.features and link != (m.s, m.k):
                yield (Action.MISFIT, *place), lambda m=m: _hello(world, m, "another layout")
        elif link == (m.s, m.k) and first(world, world.messages, m):
            yield (Action.UPDATE_ARRIVED, *place, m.v), lambda m=m: _update(world, m)


def _shared_reads(world: World, w: int) -> Iterator[Attempt]:
    """Reads from the link that all senders share. Nothing is read while the worker owes an answer over it."""
    data = world.worker(w).data
    for m in world.messages:
        if m.w != w or world.worker(w).state is State.AWAITING_ACK:
            continue
        place = (w, m.s, m.k)
        if m.v == 0:
            yield ("SharedHello", *place), lambda m=m: _hello(world, m, "")
            if "misfit" in world.bounds.features:
                yield ("SharedMisfit", *place), lambda m=m: _hello(world, m, "another layout")
            continue
        greeted = (
            data.link == m.k and world.trainer(m.s).data.incarnation <= data.fence
        )  # otherwise the link holds the update back until that sender's Hello is accepted
        if greeted and first(world, world.messages, m):
            yield ("SharedUpdate", *place, m.v), lambda m=m: _update(world, m)


def _downs(world: World, w: int) -> Iterator[Attempt]:
    ours = link_of(world, world.worker(w))
    links = {(m.s, m.k) for m in world.messages if m.w == w} | ({ours} - {(0, 0)})
    if is_shared(world.bounds) and ours != (0, 0):
        links = {ours}  # an older sender's goodbye ends nothing
    label = "SharedLinkDown" if is_shared(world.bounds) else Action.LINK_DOWN
    for s, k in links:
        broke = "break" in world.bounds.features and (s, w) not in world.gone
        if broke or not is_open(world, s, w, k):
            yield (label, w, s, k), lambda s=s, k=k: _link_down(world, w, s, k)
        if "fail" in world.bounds.features and ours == (s, k) and is_open(world, s, w, k):
            yield (Action.LINK_FAILED, w, s, k), lambda s=s, k=k: _link_down(world, w, s, k, "no memory")


def _greeting(world: World, m: Message, misfit: str) -> receiving.HelloArrived:
    incarnation = world.trainer(m.s).data.incarnation
    return receiving.HelloArrived(number(world.bounds, m.s, m.k), incarnation, misfit, m.k)


def _hello(world: World, m: Message, misfit: str) -> World:
    world = taken(world, m)
    before, event = world.worker(m.w), _greeting(world, m, misfit)
    world = heard(world, m.w, event)
    worker = world.worker(m.w)
    if worker.data.link is not None and (worker.data.link, worker.data.fence) != (before.data.link, before.data.fence):
        decided = worker.decided_p if worker.data.decided else 0
        met = max(worker.met, event.incarnation)
        world = world.with_worker(m.w, replace(worker, met=met, pending_p=0, decided_p=decided))
    return world


def _update(world: World, m: Message) -> World:
    world = taken(world, m)
    before = world.worker(m.w)
    event = receiving.UpdateArrived(number(world.bounds, m.s, m.k), world.trainer(m.s).data.incarnation, m.v)
    world = heard(world, m.w, event)
    worker = world.worker(m.w)
    arrived = worker.data.pending != before.data.pending
    return world.with_worker(m.w, replace(worker, pending_p=m.p)) if arrived else world


def _link_down(world: World, w: int, s: int, k: int, failure: str = "") -> World:
    event = receiving.LinkDown(number(world.bounds, s, k), failure)
    if named(world.worker(w), event):
        world = heard(world, w, event)
        world = world.with_worker(w, replace(world.worker(w), pending_p=0))
    # If the link was not the current one, only the messages on it are lost.
    return hung_up(world, w, s, k)


def _results(world: World, w: int) -> Iterator[Attempt]:
    worker, may = world.worker(w), world.bounds.features.__contains__
    yield (Action.APPLIED, w), lambda: _applied(world, w, receiving.Applied)
    if may("refuse"):
        yield (Action.REFUSED, w), lambda: _refused(world, w)
    if may("broken"):
        yield (Action.BROKEN, w), lambda: _ended(world, w, receiving.Broken())
    yield (Action.ANSWERED, w), lambda: _answered(world, w)
    if may("defer"):
        yield (Action.DEFER, w), lambda: _applied(world, w, receiving.Defer)
        if isinstance(worker.data.answer, receiving.Deferred):
            yield (Action.SEND_ACK, w), lambda: _ack_sent(world, w)
    if may("invalidate"):
        yield (Action.INVALIDATE, w), lambda: _invalidated(world, w)
    if may("bye"):
        yield (Action.CLOSE_RECEIVER, w), lambda: _ended(world, w, receiving.Close())
    if may("fail"):
        yield (Action.FAIL_RECEIVER, w), lambda: _ended(world, w, receiving.Fail("an exception"))
    if may("crash") and (worker.data, worker.met) != (_NEW, 0):
        yield (Action.CRASH_RECEIVER, w), lambda: _crash(world, w)


def _applied(world: World, w: int, event: type[receiving.Applied | receiving.Defer]) -> World:
    worker = world.worker(w)
    incarnation, version = worker.data.pending or (0, 0)
    ack = Ack(model_id=MODEL, incarnation=incarnation, version=version)
    world = heard(world, w, event(ack))
    serial = worker.pending_p
    world = world.with_worker(w, replace(world.worker(w), pending_p=0, decided_p=serial, served_p=serial))
    for s, trainer in enumerate(world.trainers, 1):
        outstanding = trainer.state in (State.PENDING_ASYNC, State.AWAITING_ACK)
        if outstanding and (trainer.data.incarnation, trainer.serial) == (incarnation, serial):
            last = trainer.last._replace(did=trainer.last.did | {w})
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


def _ack_sent(world: World, w: int) -> World | None:
    if world.worker(w).state is State.CLOSED:
        return None  # the event is LATE
    return heard(world, w, receiving.SendAck())


def _invalidated(world: World, w: int) -> World:
    world = heard(world, w, receiving.Invalidate())
    return world.with_worker(w, replace(world.worker(w), served_p=0))


def _answered(world: World, w: int) -> World:
    worker = world.worker(w)
    world = heard(world, w, receiving.Answered())
    assert worker.data.link is not None
    assert isinstance(worker.data.answer, Ack | Refusal)
    return posted(world, word_of(world, worker.data.link, w, worker.data.answer, worker))


def _ended(world: World, w: int, event: receiving.Event) -> World:
    ends = all_ends(world, w)
    world = heard(world, w, event)
    served = world.worker(w).served_p if world.worker(w).data.served else 0
    world = world.with_worker(w, replace(world.worker(w), pending_p=0, served_p=served))
    return with_ends_closed(without_messages_to(world, w), ends)


def _crash(world: World, w: int) -> World:
    ends = all_ends(world, w)
    return with_ends_closed(without_messages_to(world.with_worker(w, Worker()), w), ends)
