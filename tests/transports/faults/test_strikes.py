"""kill -9 and SIGSTOP of a worker at each point of a send, over each transport: a typed outcome, by the deadline (G10).

The others are served, and nothing is left behind (tests/conftest.py looks).
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import Any

import pytest
from fleet import PATIENCE, Crew, constants, filled, join, receive, segments, serve, shows
from strikes import PIPES, SIGNALS, STRIKES, join_armed, megabytes, until_stopped

from weightsync import AckTimeoutError, OutcomeKind, State, WorkerLostError

#: Seconds that a send waits for a worker that is stopped.
DEADLINE = 0.4


@pytest.mark.parametrize(("transport", "point"), STRIKES)
def test_g10_a_worker_that_is_killed_is_lost_and_the_others_are_served(crew: Crew, transport: str, point: str) -> None:
    scheme_class = PIPES[transport]
    victim, other = crew.start(scheme_class(), 2)
    source = filled(megabytes(), 3.0)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[victim.pipe, other.pipe], model=source)
        sender = scheme.get_sender()
        other.do(join, megabytes)
        other.tell(receive)
        victim.tell(join_armed, point, SIGNALS["kill"], megabytes)
        begun = time.monotonic()
        if point == "after the ack":
            assert sender.send(timeout=PATIENCE).ok
        else:
            with pytest.raises(WorkerLostError) as lost:
                sender.send(timeout=PATIENCE)
            assert (lost.value.report[0].kind, lost.value.report[1].kind) == (OutcomeKind.LOST, OutcomeKind.APPLIED)

        assert time.monotonic() - begun < PATIENCE / 2
        assert other.answer()
        assert other.do(shows)[1:3] == (1, {3.0})
        victim.process.join(PATIENCE)
        _comes_back(crew, sender, scheme_class, other)


def _comes_back(crew: Crew, sender: Any, scheme_class: Any, other: Any) -> None:
    (again,) = crew.start(scheme_class())
    sender.add_worker(0, again.pipe)
    again.do(join, megabytes)
    again.tell(serve, 2)
    other.tell(serve, 2)
    report = sender.send(timeout=PATIENCE)
    assert (report.ok, again.answer(), other.answer()) == (True, 2, 2)


@pytest.mark.parametrize(("transport", "point"), STRIKES)
def test_g10_a_worker_that_is_stopped_times_out_and_may_still_answer(crew: Crew, transport: str, point: str) -> None:
    scheme_class = PIPES[transport]
    victim, other = crew.start(scheme_class(), 2)
    source = filled(megabytes(), 3.0)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[victim.pipe, other.pipe], model=source)
        sender = scheme.get_sender()
        other.do(join, megabytes)
        other.tell(receive)
        victim.tell(join_armed, point, SIGNALS["stop"], megabytes)
        # The other answers when it comes to it; then only the one that is stopped is waited for.
        sender.send_async()
        while not other.answered():
            sender.poll()
        assert other.answer()
        until_stopped(victim, sender.poll)
        begun = time.monotonic()
        if point == "after the ack":
            assert sender.wait_async(timeout=PATIENCE).ok
        else:
            with pytest.raises(AckTimeoutError) as late:
                sender.wait_async(timeout=DEADLINE)
            assert tuple(late.value.pending) == (0,)
            assert late.value.report[1].kind is OutcomeKind.APPLIED
            assert DEADLINE <= time.monotonic() - begun < DEADLINE + 5
            assert sender.state is State.PENDING_ASYNC
        source.weight.data.fill_(9.0)
        victim.resume()
        while not victim.answered():
            sender.poll()
        victim.answer()
        if sender.state is State.PENDING_ASYNC:
            assert sender.wait_async(timeout=PATIENCE)[0].kind is OutcomeKind.APPLIED

        assert victim.do(shows)[1:3] == other.do(shows)[1:3] == (1, {3.0})
        assert constants(source) == {9.0, 3.0}


@pytest.mark.parametrize("transport", PIPES)
def test_g10_a_trainer_closes_while_a_worker_is_stopped_in_the_middle(crew: Crew, transport: str) -> None:
    scheme_class = PIPES[transport]
    (victim,) = crew.start(scheme_class())
    scheme = scheme_class()
    scheme.init_on_sender("policy", pipes=[victim.pipe], model=filled(megabytes(), 3.0))
    victim.tell(join_armed, "mid-payload", SIGNALS["stop"], megabytes)
    sender = scheme.get_sender()
    sender.send_async()
    until_stopped(victim, sender.poll)
    with pytest.raises(AckTimeoutError):
        sender.wait_async(timeout=0.1)
    begun = time.monotonic()
    scheme.close()

    assert time.monotonic() - begun < 5
    victim.resume()
    # All of the update had left, or none of it is served.
    with contextlib.suppress(ConnectionError):
        victim.answer()
    assert victim.do(shows)[1:3] in [(1, {3.0}), (None, {0.0})]
    victim.end()
    gc.collect()  # errors that tests before this one have caught hold frames, and those hold buffers
    assert segments() == 0
