"""Random interleavings: seeded walks over everything that a sender and its workers may do."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from weightsync.clock import new_incarnation
from weightsync.protocol._tables import State
from weightsync.protocol.sender import LinkState
from weightsync.testing.bench import Bench
from weightsync.testing.link_setup import LinkSetup, Scenario

#: How many walks there are, and how many steps each has.
COUNT = 12
STEPS = 40
_WORKERS = 2

_Step = Callable[[], object]


def walk(link_setup: LinkSetup, seed: int) -> None:
    """Take allowed steps at random; the same steps for the same seed."""
    draw = random.Random(seed)
    bench = Bench(link_setup, nbytes=draw.choice((1, 1000, 70_001)))
    for worker in range(_WORKERS):
        bench.join(worker)
    bench.connect()
    for _ in range(STEPS):
        draw.choice(list(_allowed_steps(bench, draw)))()
    bench.finish()


def _allowed_steps(bench: Bench, draw: random.Random) -> list[_Step]:
    steps: list[_Step] = [bench.hear, *_sender_steps(bench, draw)]
    for worker in range(_WORKERS):
        steps += _worker_steps(bench, worker, draw)
    return steps


def _sender_steps(bench: Bench, draw: random.Random) -> list[_Step]:
    driver = bench.sender.driver
    alive = [worker for worker, entry in driver.data.workers.items() if entry.link_state is not LinkState.LOST]
    if driver.machine.state is State.CLOSED:
        return [partial(_newer_sender, bench)]
    steps: list[_Step] = []
    if driver.machine.state is State.READY and alive:
        steps += [bench.send] * 3 + [partial(bench.send, (draw.choice(alive),))]
    if driver.machine.state is State.PENDING_ASYNC:
        steps += [bench.abandon, bench.wait]
    if driver.machine.state is State.AWAITING_ACK:
        steps += [bench.deadline]
    if draw.random() < 0.1:
        steps += [partial(_newer_sender, bench), bench.close_sender]
    return steps


def _newer_sender(bench: Bench) -> None:
    older = bench.sender
    bench.new_sender()
    for worker in range(_WORKERS):
        bench.join(worker)
    bench.connect(incarnation=new_incarnation(older.driver.data.incarnation))


def _worker_steps(bench: Bench, worker: int, draw: random.Random) -> list[_Step]:
    receiver = bench.receivers[worker]
    rejoin: _Step = partial(bench.join, worker)
    joinable = bench.sender.driver.machine.state is not State.CLOSED
    if receiver.over:
        return [rejoin] if joinable else []
    steps: list[_Step] = [partial(bench.receive, worker)] * 2
    if receiver.driver.pending is not None:
        steps += [partial(bench.apply, worker)] * 2 + [partial(bench.refuse, worker)]
    if draw.random() < 0.15:
        steps += [partial(bench.lose_receiver, worker), partial(bench.close_receiver, worker)]
        steps += [rejoin] if joinable else []
        steps += [partial(bench.remove, worker)] if joinable and worker in bench.sender.driver.data.workers else []
    return steps


WALKS = tuple(Scenario(f"walk {seed}", partial(walk, seed=seed), over_losses=True) for seed in range(COUNT))
