"""Calls that each begin only after the previous one has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet import constants, filled, small

from weightsync import RPCWeightSyncScheme, TransportError
from weightsync.schemes.peers import collectors
from weightsync.transports import rpc
from weightsync.transports.calls.waiting import CallsInTurn


def _refused() -> Future[Any]:
    raise TransportError("no call was accepted")


def _answered() -> Future[Any]:
    answers: Future[Any] = Future()
    answers.set_result([])
    return answers


@pytest.mark.parametrize("call", [_refused, _answered])
def test_a_thousand_waiting_calls_that_end_immediately_all_end(call: Any) -> None:
    in_turn, first = CallsInTurn("worker 0"), Future[Any]()
    in_turn.begin(lambda: first)
    waiting = [in_turn.begin(call) for _ in range(1000)]

    first.set_exception(TransportError("the worker is dead"))

    assert all(answers.done() for answers in waiting)
    last: Future[Any] = Future()
    assert in_turn.begin(lambda: last) is last


def test_a_call_that_could_not_begin_does_not_block_the_next() -> None:
    in_turn = CallsInTurn("worker 0")
    with pytest.raises(TransportError, match="no call was accepted"):
        in_turn.begin(_refused)

    assert in_turn.begin(_answered).done()


def test_a_waiting_call_is_never_begun_once_its_link_is_closed() -> None:
    """A newer link may have delivered a newer version in the meantime."""
    in_turn, first, begun = CallsInTurn("worker 0"), Future[Any](), []
    in_turn.begin(lambda: first)
    waiting = in_turn.begin(lambda: begun.append("an older version") or _answered())

    in_turn.close()
    first.set_result([])

    assert not begun
    with pytest.raises(TransportError, match="link to worker 0 is closed"):
        waiting.result(timeout=0)


def test_a_call_begun_after_the_close_raises_transport_error() -> None:
    """Such a call has waited until the worker said whether it has a weightsync receiver."""
    in_turn = CallsInTurn("worker 0")
    in_turn.close()

    with pytest.raises(TransportError, match="link to worker 0 is closed"):
        in_turn.begin(_answered)


@pytest.mark.parametrize("end", [lambda call: call.set_result([]), lambda call: call.set_exception(TransportError(""))])
def test_a_call_waits_for_the_call_of_an_earlier_link_to_the_same_worker(end: Any) -> None:
    """In an async or threaded worker, the former link's call could overwrite the newer version with the older one."""
    former, others, newer, newest = (CallsInTurn("worker 0", worker) for worker in "wvww")
    slow, last = Future[Any](), Future[Any]()
    former.begin(lambda: slow)
    former.close()
    replaced = newer.begin(_refused)
    newer.close()
    answers = newest.begin(lambda: last)
    following = newest.begin(_answered)
    assert others.begin(_answered).done(), "a call to another worker must not wait"
    with pytest.raises(TransportError, match="link to worker 0 is closed"):
        replaced.result(timeout=0)

    end(slow)
    assert [answers.done(), following.done()] == [False, False]
    last.set_result(["applied"])
    assert (answers.result(timeout=0), following.result(timeout=0)) == (["applied"], [])


def test_a_newer_links_call_waits_for_a_call_that_itself_waited_for_an_older_link() -> None:
    former, newer, newest = (CallsInTurn("worker 0", "w") for _ in range(3))
    slow, begun = Future[Any](), []
    former.begin(lambda: slow)

    def begin_another() -> Future[Any]:
        newer.close()
        newest.begin(lambda: begun.append("after it") or _answered())
        begun.append("it")  # an error that is raised here would only fail this call
        return _answered()

    newer.begin(begin_another)
    slow.set_result([])
    assert begun == ["it", "after it"]


def test_a_slow_call_of_a_replaced_link_does_not_leave_a_collector_with_an_older_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, calls = small(), list[Callable[[], None]]()

    class Plain:
        """A collector without a weightsync receiver."""

        @staticmethod
        def update_policy_weights_(_: Any, weights: Any) -> None:
            model.load_state_dict(weights)

    def call(worker: Any, function: Any, *, args: tuple[Any, ...], timeout: float) -> Any:
        del worker, timeout
        over: torch.futures.Future[Any] = torch.futures.Future()
        if function is rpc._listening:
            over.set_result([])
        else:
            calls.append(lambda: over.set_result(function(*args)))
        return over

    monkeypatch.setattr(rpc.rpc, "rpc_async", call)
    monkeypatch.setattr(rpc, "require_rpc", lambda peer: None)
    monkeypatch.setattr(collectors, "worker_named", lambda worker, peer: SimpleNamespace(name=worker))
    endpoint = "worker", SimpleNamespace(owner=lambda: "worker"), Plain
    with RPCWeightSyncScheme() as scheme, scheme.create_sender() as sender:
        sender.add_worker(0, endpoint)
        sender.connect()
        sender.send_async(filled(small(), 1.0))
        sender.abandon()
        sender.add_worker(0, endpoint)
        sender.send_async(filled(small(), 2.0))
        (slow,) = calls
        calls.clear()
        slow()
        while calls:
            calls.pop(0)()
        assert sender.wait_async(timeout=30).ok
    assert constants(model) == {2.0}
