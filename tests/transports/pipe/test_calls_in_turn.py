"""Calls of which each is begun once the one before it has ended."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from weightsync import TransportError
from weightsync.transports.calls.waiting import CallsInTurn


def _refused() -> Future[Any]:
    raise TransportError("no call was accepted")


def _answered() -> Future[Any]:
    answers: Future[Any] = Future()
    answers.set_result([])
    return answers


@pytest.mark.parametrize("call", [_refused, _answered])
def test_a_thousand_calls_that_waited_for_one_and_end_at_once_all_end(call: Any) -> None:
    in_turn, first = CallsInTurn("worker 0"), Future[Any]()
    in_turn.begin(lambda: first)
    waiting = [in_turn.begin(call) for _ in range(1000)]

    first.set_exception(TransportError("the worker is dead"))

    assert all(answers.done() for answers in waiting)
    last: Future[Any] = Future()
    assert in_turn.begin(lambda: last) is last


def test_a_call_that_was_not_accepted_keeps_no_other_waiting() -> None:
    in_turn = CallsInTurn("worker 0")
    with pytest.raises(TransportError, match="no call was accepted"):
        in_turn.begin(_refused)

    assert in_turn.begin(_answered).done()


def test_a_call_that_waits_when_its_link_is_closed_is_never_begun() -> None:
    """A newer link may have brought a newer version meanwhile."""
    in_turn, first, begun = CallsInTurn("worker 0"), Future[Any](), []
    in_turn.begin(lambda: first)
    waiting = in_turn.begin(lambda: begun.append("an older version") or _answered())

    in_turn.close()
    first.set_result([])

    assert not begun
    with pytest.raises(TransportError, match="link to worker 0 is closed"):
        waiting.result(timeout=0)


def test_nor_is_a_call_that_comes_after_the_close() -> None:
    """As one does that has waited for the worker to say whether our receiver listens there."""
    in_turn = CallsInTurn("worker 0")
    in_turn.close()

    with pytest.raises(TransportError, match="link to worker 0 is closed"):
        in_turn.begin(_answered)
