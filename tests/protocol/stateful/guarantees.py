"""Checks of the guarantees against what was really sent, served and reported, without the reference model.

There is a function for each guarantee. G8 and G11 concern a single call: `world` checks them at each such call.
"""

from __future__ import annotations

import itertools

from world import Trainer, Worker, World

from weightsync.protocol._tables import State
from weightsync.protocol.report import OutcomeKind, SyncReport


def check_all(world: World) -> None:
    """Check all guarantees on everything that is new since the last call."""
    for trainer in world.trainers:
        check_g5(trainer)
        check_g9_sender(trainer)
    for trainer, report in world.reported:
        check_g1(world, trainer, report)
        check_g2(world, trainer, report)
    world.reported.clear()
    for worker in world.workers.values():
        check_g3_and_g6(world, worker)
        check_g4(worker)
        check_g9_receiver(worker)
        check_g12(world, worker)
    check_g7(world)


def check_g1(world: World, trainer: Trainer, report: SyncReport) -> None:
    """G1: each APPLIED rests on an ack of that incarnation and version, over a link to that worker."""
    for id in report.of(OutcomeKind.APPLIED):
        assert (trainer, id, (report.incarnation, report.version)) in world.acked


def check_g2(world: World, trainer: Trainer, report: SyncReport) -> None:
    """G2: a worker that is reported APPLIED served that version, with the weights that were sent as it."""
    for id in report.of(OutcomeKind.APPLIED):
        key = report.incarnation, report.version
        lives = [worker for worker in (*world.gone, *world.workers.values()) if worker.id == id]
        assert any((key, world.sent[key].code) in worker.served for worker in lives)


def check_g3_and_g6(world: World, worker: Worker) -> None:
    """G3, G6: a model that serves a version holds all of its weights and no others.

    This holds whatever has arrived, was refused or was lost.
    """
    if worker.real.version is not None:
        key = worker.real.incarnation, worker.real.version
        assert worker.policy.codes == {world.sent[key].code}


def check_g4(worker: Worker) -> None:
    """G4: the versions of a worker only rise, and its fence is not below the incarnation that it serves.

    A version that was written over by hand may be served again.
    """
    keys = [key for key, _ in worker.served]
    for count, (one, next) in enumerate(itertools.pairwise(keys), 1):
        assert one < next or (one == next and count in worker.overwritten)
    assert not keys or keys[-1][0] <= worker.real._driver.data.fence


def check_g5(trainer: Trainer) -> None:
    """G5: at most one update is outstanding, and it is the newest."""
    outstanding = trainer.real._driver.data.outstanding
    assert (outstanding is not None) == (trainer.real.state in (State.PENDING_ASYNC, State.AWAITING_ACK))
    assert outstanding is None or outstanding.version == trainer.real.version


def check_g7(world: World) -> None:
    """G7: no update was sent to a worker that was not its target."""
    for key, id in world.left:
        targets = world.targets[key]
        assert targets is None or id in targets
    world.left.clear()


def check_g9_sender(trainer: Trainer) -> None:
    """G9: a closed sender stays closed and has no links."""
    trainer.closed = trainer.closed or trainer.real.state is State.CLOSED
    assert not trainer.closed or (trainer.real.state is State.CLOSED and not trainer.real._driver.links())


def check_g9_receiver(worker: Worker) -> None:
    """G9: a closed receiver stays closed and applies nothing."""
    if worker.real.state is State.CLOSED and worker.at_close is None:
        worker.at_close = len(worker.served)
    assert worker.at_close is None or (worker.real.state is State.CLOSED and len(worker.served) == worker.at_close)


def check_g12(world: World, worker: Worker) -> None:
    """G12: a worker has no version before its first.

    The version that it serves was addressed to it: sent to all workers, or to targets that include it.
    """
    if not worker.served:
        assert worker.real.version is None
    for key, _ in worker.served[-1:]:
        targets = world.targets[key]
        assert targets is None or worker.id in targets
