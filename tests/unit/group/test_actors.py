"""The end of a worker that is a Ray actor, which Ray reports over another connection than that of the results."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from weightsync.clock import Deadline
from weightsync.group.actors import ActorProcess
from weightsync.group.channel import Finished, Started, TrainerEnd, WorkerEnd
from weightsync.group.members import Member, Members, Rules, Running
from weightsync.testing import FakeClock
from weightsync.transports.base import Waker


class Life:
    """One life of an actor, whose last messages arrive when a test delivers them."""

    def __init__(self) -> None:
        near, self.far = socket.socketpair()
        self._outlet, inlet = socket.socketpair()
        self._worker = WorkerEnd(inlet, capacity=2)
        self.actor = object.__new__(ActorProcess)
        self.actor._channel, self.actor._life, self.actor._ends = TrainerEnd(near), Future(), None
        self.actor._waker = Waker()
        self.actor.handle = None
        member = Member(0, Rules(2, 0, 1.0, None), lambda *_: self._running)
        member.start()
        self.members = Members({0: member}, lambda: None)
        self._worker.say(Started())

    @property
    def _running(self) -> Running:
        return Running(self.actor, self.actor._channel, lambda _: None)

    def ends(self) -> bytes:
        """Put a result, finish, and have Ray report the end. Returns the bytes in transit to the trainer."""
        self._worker.put("the last", lambda: (3,))
        self._worker.say(Finished())
        self.actor._life.set_result(None)
        self.actor._waker.fire()
        return self._outlet.recv(1 << 20)

    def close(self) -> None:
        self.members.by_index[0].release()
        for end in (self.far, self._outlet, self._worker):
            end.close()


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(ActorProcess, "kill", lambda _: None)
    life = Life()
    yield life
    life.close()


def test_an_actors_last_result_counts_even_if_ray_reports_its_end_first(life: Life) -> None:
    """Regression: the result was lost, and the worker counted as failed ('its actor has ended')."""
    said = life.ends()
    life.far.sendall(said[:-40])
    life.members.pump()
    assert not life.actor.dead

    life.far.sendall(said[-40:])
    life.far.close()
    life.members.wait(Deadline(60.0))
    for _ in range(2):
        life.members.pump()

    assert life.members.take_first()[1] == "the last"
    assert (life.members.over, life.members.failures) == (True, [])
    assert life.members.by_index[0].running is None


def test_an_ended_actor_whose_last_messages_do_not_arrive_counts_as_failed(life: Life) -> None:
    with FakeClock() as clock:
        life.ends()
        life.members.pump()
        assert not life.members.failures

        clock.advance(6.0)
        life.members.pump()

    assert "its actor has ended" in str(life.members.failures[0])
