"""kill -9 and SIGSTOP over torch's RPC, of worker and trainer, at each point (G10).

torch's RPC cannot replace in the place of a rank that died: a killed worker stays lost, and says why; a killed trainer
is succeeded by another rank of the same world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import judging
import pytest
from judging import some
from rpc_fleet import World, command, listen, retire
from striking import At, Field, Place, TrainerAt, add_worker, megabytes

from weightsync.transports import rpc

pytestmark = pytest.mark.slow

Make = Callable[..., World]


class RpcField(Field):
    """Four ranks: the trainer, two workers, and one more."""

    worker_payload = Place(rpc.__name__, "", "_payload_of")
    trainer_payload = Place(rpc.__name__, "", "begin", after=True)

    def __init__(self, world: World) -> None:
        self._world = world
        self.trainer, (self.victim, self.other, self._heir) = world.trainer, world.workers

    def join(self, worker: Any) -> Any:
        return listen, (megabytes,)

    def lead(self) -> Any:
        return command, (["w0", "w1"], megabytes)

    def readmit(self) -> str:
        self.trainer.do(add_worker, 0, w0)
        return "cannot replace a rank that died"

    def successor(self) -> Any:
        return self._heir

    def retire(self) -> None:
        """Leave the world as it was."""
        for process in (self.trainer, self.victim, self.other):
            process.do(retire)


def w0(_: Any) -> str:
    return "w0"


@pytest.fixture
def field(world: World) -> Iterator[RpcField]:
    """In a world in which nobody dies."""
    made = RpcField(world)
    yield made
    made.retire()


@pytest.fixture
def mortal(short_lived: Make) -> RpcField:
    """In a world in which somebody dies."""
    return RpcField(short_lived(3))


@pytest.mark.parametrize("at", some(At, At.PAYLOAD, At.APPLIED, At.OUTSTANDING))
def test_g10_a_killed_worker_is_lost_and_the_others_are_served(mortal: RpcField, at: At) -> None:
    judging.a_killed_worker_is_lost_and_the_others_are_served(mortal, at)


@pytest.mark.parametrize("at", some(At, At.PAYLOAD, At.APPLIED))
def test_g10_a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field: RpcField, at: At) -> None:
    judging.a_stopped_worker_costs_the_deadline_and_its_late_answer_counts(field, at)


@pytest.mark.parametrize("at", some(TrainerAt, TrainerAt.PAYLOAD, TrainerAt.ANSWERED))
def test_g10_a_killed_trainer_leaves_whole_weights_and_room_for_the_next(mortal: RpcField, at: TrainerAt) -> None:
    judging.a_killed_trainer_leaves_whole_weights_and_room_for_the_next(mortal, at)


@pytest.mark.parametrize("at", some([TrainerAt.DISPATCH, TrainerAt.PAYLOAD, TrainerAt.ANSWERED], TrainerAt.PAYLOAD))
def test_g10_a_stopped_trainer_holds_nobody_up_and_goes_on(field: RpcField, at: TrainerAt) -> None:
    judging.a_stopped_trainer_holds_nobody_up_and_goes_on(field, at)


@pytest.mark.parametrize("where", ["worker", "trainer"])
def test_an_adapter_that_raises_loses_its_link_with_the_reason(field: RpcField, where: str) -> None:
    judging.an_adapter_that_raises_loses_its_link_with_the_reason(field, where)
