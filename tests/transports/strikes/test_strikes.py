"""kill -9 and SIGSTOP of worker and trainer at each point of a send, over each transport (G10).

A typed outcome by the deadline, nothing torn, the others served; nothing is left behind (tests/conftest.py looks).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import judging
import pytest
from fleets import MARKS, Fleet, Wanted
from striking import TrainerPoint, WorkerPoint

#: Each point over one kind of pipe, and over the others where they differ.
OVER_PIPES = {
    "pipe": list(WorkerPoint),
    "inline": [WorkerPoint.AHEAD, WorkerPoint.PAYLOAD, WorkerPoint.APPLIED],
    "shared": [WorkerPoint.PAYLOAD, WorkerPoint.APPLIED, WorkerPoint.ANSWERED],
}
#: Not with every `pytest`: these two are tested there by tests/unit/schemes/test_sending.py.
FROM_WITHOUT = (WorkerPoint.IDLE, WorkerPoint.OUTSTANDING)
EVERYWHERE = ("ray", "rpc", "store")
WORKER = {**OVER_PIPES, **dict.fromkeys(EVERYWHERE, tuple(WorkerPoint))}
TRAINER = dict.fromkeys(EVERYWHERE, tuple(TrainerPoint))
STOPPED_TRAINER = dict.fromkeys(EVERYWHERE, (TrainerPoint.DISPATCH, TrainerPoint.PAYLOAD, TrainerPoint.ANSWERED))
ENDS = dict.fromkeys(EVERYWHERE, ("worker", "trainer"))


def over(points: dict[str, Iterable[Any]], dies: bool = False, led: bool = False) -> Any:
    """A fleet of each transport, and each point that is tested over it."""
    cases = [
        pytest.param(
            Wanted(transport, at, dies, led),
            at,
            id=f"{transport}-{at}",
            marks=(*MARKS.get(transport, ()), *([pytest.mark.slow] if at in FROM_WITHOUT else [])),
        )
        for transport, some in points.items()
        for at in some
    ]
    return pytest.mark.parametrize(("fleet", "at"), cases, indirect=["fleet"])


@over(WORKER, dies=True)
def test_g10_a_killed_worker_is_lost_and_the_others_are_served(fleet: Fleet, at: WorkerPoint) -> None:
    judging.a_killed_worker_is_lost_and_the_others_are_served(fleet, at)


@over(WORKER)
def test_g10_a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(fleet: Fleet, at: WorkerPoint) -> None:
    judging.a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(fleet, at)


@over(TRAINER, dies=True, led=True)
def test_g10_a_killed_trainer_leaves_whole_weights_and_room_for_the_next(fleet: Fleet, at: TrainerPoint) -> None:
    judging.a_killed_trainer_leaves_whole_weights_and_room_for_the_next(fleet, at)


@over(STOPPED_TRAINER, led=True)
def test_g10_a_stopped_trainer_holds_nobody_up_and_goes_on(fleet: Fleet, at: TrainerPoint) -> None:
    judging.a_stopped_trainer_holds_nobody_up_and_goes_on(fleet, at)


@over(dict.fromkeys(OVER_PIPES, (WorkerPoint.PAYLOAD,)))
def test_g10_a_trainer_closes_while_a_worker_is_stopped_in_the_middle(fleet: Fleet, at: WorkerPoint) -> None:
    judging.a_trainer_closes_while_a_worker_is_stopped_in_the_middle(fleet)


@over(ENDS)
def test_an_adapter_that_raises_loses_its_link_with_the_reason(fleet: Fleet, at: str) -> None:
    judging.an_adapter_that_raises_loses_its_link_with_the_reason(fleet, at)
