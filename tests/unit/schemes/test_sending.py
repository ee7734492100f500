"""A caller's view of sends: deadlines, abandoning, late and returning workers, closing, threads."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from clocks import advancing_clock
from fleet import PATIENCE, Crew, Pair, constants, filled, join, large, leave, receive, serve, shows, small

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    MultiProcessWeightSyncScheme,
    OnFailure,
    OnPending,
    OutcomeKind,
    RefusedError,
    SenderClosed,
    State,
    StateError,
    SyncError,
    Timeout,
    TransportError,
    WorkerLostError,
)
from weightsync.clock import Deadline
from weightsync.engine.reporter import Reporter
from weightsync.engine.sender_driver import SenderDriver
from weightsync.engine.sequential import SequentialSends
from weightsync.options import Option
from weightsync.protocol.sender import LinkState
from weightsync.schemes.engines.sglang import SGLangPause
from weightsync.schemes.engines.vllm import VLLMPause
from weightsync.schemes.peers.ray_actors import Backend, TensorTransport
from weightsync.testing import FakeClock
from weightsync.transports.process import started_at


class Thread(threading.Thread):
    """A thread that keeps the result or the error of its call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def done(self) -> Thread:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self


def reach(sender: Any, state: State) -> threading.Event:
    """An event that is set once the sender has reached this state."""
    reached = threading.Event()
    sender._driver.machine.observe(lambda _before, _input, after: after is state and reached.set())
    return reached


# -------------------------------------------------------------------------------------- either side first


def test_a_sender_that_starts_before_its_worker_delivers_weights(scheme_class: Any, crew: Crew) -> None:
    (worker,) = crew.start(scheme_class())
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=small(2.0))
        scheme.get_sender().send_async()
        worker.do(join)

        assert worker.do(receive)
        assert scheme.get_sender().wait_async().ok
        assert worker.do(shows)[2] == {2.0}


def test_a_worker_that_starts_before_its_sender_gets_weights(scheme_class: Any, crew: Crew) -> None:
    (worker,) = crew.start(scheme_class())
    worker.do(join)
    assert worker.do(receive, 0) is False
    worker.tell(receive)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=small(2.0))

        assert scheme.get_sender().send().ok
        assert worker.answer()


def test_init_never_waits_for_a_worker(scheme_class: Any) -> None:
    ours, _theirs = multiprocessing.Pipe()
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[ours], model=small())

        assert scheme.get_sender().state is State.READY
        assert scheme.get_sender().workers[0].link_state is LinkState.EXPECTED


def test_a_worker_that_connects_after_many_sends_gets_the_newest_version(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    source = large(0.0)
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours], model=source)
        sender = a.get_sender()
        for version in range(1, 50):
            filled(source, float(version))
            sender.send_async(on_pending="supersede")
        b.init_on_worker("policy", pipe=theirs, model=large())
        receiver = b.get_receiver()
        while receiver.version != 49:
            receiver.receive(timeout=0)
            sender.poll()

        assert sender.wait_async().ok
        assert constants(receiver.model) == {49.0}


def test_a_send_to_a_worker_that_never_connects_times_out(scheme_class: Any) -> None:
    ours, _theirs = multiprocessing.Pipe()
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[ours], model=small())
        sender = scheme.get_sender()
        with advancing_clock(60), pytest.raises(AckTimeoutError) as timed_out:
            sender.send(timeout=60)

        assert timed_out.value.pending == (0,)
        assert timed_out.value.report[0].kind is OutcomeKind.TIMED_OUT
        assert "never connected" in timed_out.value.report[0].reason
        assert "never connected" in str(timed_out.value)
        assert isinstance(timed_out.value, TimeoutError)
        assert sender.state is State.PENDING_ASYNC
        with advancing_clock(60), pytest.raises(AckTimeoutError):
            sender.wait_async(timeout=60)
        assert sender.state is State.PENDING_ASYNC


def test_an_update_can_be_awaited_again_after_its_deadline(pair: Pair) -> None:
    with pytest.raises(AckTimeoutError):
        pair.sender.send(timeout=0)
    pair.receiver.receive(timeout=0)

    assert pair.sender.wait_async().ok
    assert pair.sender.state is State.READY


def test_the_timeout_of_a_connected_silent_worker_says_it_has_not_answered(pair: Pair) -> None:
    pair.sync()
    with pytest.raises(AckTimeoutError, match="has not answered") as timed_out:
        pair.sender.send(timeout=0)

    assert "never connected" not in str(timed_out.value)


def test_an_answer_after_the_deadline_still_counts(pair: Pair) -> None:
    report = pair.sender.send(timeout=0, on_failure="report")
    assert report[0].kind is OutcomeKind.TIMED_OUT
    pair.receiver.receive(timeout=0)

    assert pair.sender.poll()[0].kind is OutcomeKind.APPLIED
    assert pair.sender.state is State.PENDING_ASYNC
    assert pair.sender.wait_async(timeout=0).ok


@pytest.mark.parametrize("timeout", [0, 0.0])
def test_timeout_zero_does_not_wait(pair: Pair, timeout: float) -> None:
    with pytest.raises(AckTimeoutError):
        pair.sender.send(timeout=timeout)
    with pytest.raises(AckTimeoutError):
        pair.sender.wait_async(timeout=timeout)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", [1]])
def test_an_invalid_timeout_is_refused(pair: Pair, timeout: Any) -> None:
    for call in (pair.sender.send, pair.sender.send_async, pair.receiver.receive):
        with pytest.raises(ConfigurationError, match="timeout"):
            call(timeout=timeout)
    assert pair.sender.version == 0


@pytest.mark.parametrize("timeout", [None, float("inf"), 1e12, 3e6, Timeout.DEFAULT])
def test_long_and_infinite_timeouts_are_accepted(pair: Pair, timeout: Any) -> None:
    waiting = Thread(lambda: pair.sender.send(timeout=timeout))
    waiting.start()
    assert pair.receiver.receive(timeout=None if timeout is Timeout.DEFAULT else timeout)

    assert waiting.done().error is None
    assert waiting.result.ok


def test_the_default_timeout_comes_from_the_environment(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "0.01")
    with pytest.raises(AckTimeoutError):
        pair.sender.send()
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "a while")
    with pytest.raises(ConfigurationError, match="WEIGHTSYNC_TIMEOUT"):
        pair.sender.wait_async()
    pair.receiver.receive(timeout=0)

    assert pair.sender.wait_async(timeout=1).ok


# ------------------------------------------------------------------------------- what is outstanding


def test_the_next_send_overtakes_an_abandoned_update(pair: Pair) -> None:
    pair.sender.send_async(small(1.0))
    report = pair.sender.abandon()

    assert report[0].kind is OutcomeKind.ABANDONED
    assert pair.sender.state is State.READY
    pair.sender.send_async(small(2.0))
    assert pair.receiver.receive(timeout=0)
    assert pair.sender.wait_async().version == 2
    assert constants(pair.model) == {2.0}


def test_the_report_of_abandon_keeps_the_outcomes_of_workers_that_have_answered(three: Pair) -> None:
    three.sender.send_async()
    three.receivers[1].receive(timeout=0)
    report = three.sender.abandon()

    assert [report[i].kind.name for i in range(3)] == ["ABANDONED", "APPLIED", "ABANDONED"]


def test_on_pending_raise_is_the_default(pair: Pair) -> None:
    pair.sender.send_async()
    for call in (pair.sender.send, pair.sender.send_async):
        with pytest.raises(StateError):
            call()
    pair.receiver.receive(timeout=0)

    assert pair.sender.wait_async().version == 1


def test_on_pending_wait_sends_once_the_outstanding_update_is_answered(pair: Pair) -> None:
    pair.sender.send_async()
    pair.receiver.receive(timeout=0)
    pair.sender.send_async(on_pending=OnPending.WAIT)
    pair.receiver.receive(timeout=0)

    assert pair.sender.wait_async().version == 2


def test_on_pending_wait_is_bounded_by_the_same_timeout(pair: Pair) -> None:
    pair.sender.send_async()
    with advancing_clock(60), pytest.raises(AckTimeoutError):
        pair.sender.send(on_pending="wait", timeout=60)

    assert pair.sender.version == 1


def test_on_pending_supersede_lists_the_versions_that_each_worker_skipped(pair: Pair) -> None:
    for _ in range(3):
        pair.sender.send_async(on_pending="supersede")
    while pair.receiver.version != 3:
        pair.receiver.receive(timeout=0)
        pair.sender.poll()
    report = pair.sender.wait_async()

    assert report.version == 3
    assert report.superseded == {0: (1, 2)}
    assert pair.sync().superseded == {}


def test_a_goodbye_during_an_update_that_is_superseded_is_in_the_next_report(three: Pair) -> None:
    three.sync()
    three.sender.send_async()
    three.receivers[1].receive(timeout=0)
    three.receivers[1].close()
    so_far = three.sender.send_async(on_pending="supersede")
    for index in (0, 2):
        three.receivers[index].receive(timeout=0)
    report = three.sender.wait_async()

    assert (list(so_far.left), list(report.left), list(report)) == ([1], [1], [0, 2])


@pytest.mark.parametrize("answering", [(1,), (0, 1, 2)], ids=["abandoned", "answered"])
def test_a_goodbye_during_an_update_is_in_the_report_of_the_schemes_next_send(
    three: Pair, answering: tuple[int, ...]
) -> None:
    sends, time = SequentialSends(three.sender), Deadline(PATIENCE)
    if answering == (1,):
        sends.send(None, None, Deadline(0), OnFailure.REPORT)  # a timeout is reported
    else:
        sends.dispatch(None, None, time, OnFailure.REPORT)
    for index in answering:
        three.receivers[index].receive(timeout=0)
    three.receivers[1].close()
    report = sends.dispatch(None, None, time, OnFailure.REPORT)

    assert (list(report.left), list(report)) == ([1], [0, 2])


OTHER_WEIGHTS = [{"weights": object()}, {"weights": {"a": "text"}}]
OTHER_WORKERS = [{"worker_ids": [9]}, {"worker_ids": []}]


@pytest.mark.parametrize(
    ("on_pending", "bad"),
    [("wait", bad) for bad in OTHER_WORKERS] + [("supersede", bad) for bad in OTHER_WORKERS + OTHER_WEIGHTS],
)
def test_a_refused_send_leaves_the_outstanding_update_pending(pair: Pair, on_pending: str, bad: dict[str, Any]) -> None:
    pair.sender.send_async()
    pair.sender.poll()
    with pytest.raises(ConfigurationError):
        pair.sender.send(on_pending=on_pending, **bad)

    assert pair.sender.state is State.PENDING_ASYNC
    pair.receiver.receive(timeout=0)
    assert pair.sender.wait_async().version == 1


@pytest.mark.parametrize("bad", OTHER_WEIGHTS)
def test_the_report_of_an_update_that_a_refused_send_waited_for_is_in_the_next_one(
    pair: Pair, bad: dict[str, Any]
) -> None:
    """The wait comes before the weights are read, and by then the refused send cannot return its report."""
    pair.sender.send_async()
    pair.receiver.receive(timeout=0)
    with pytest.raises(ConfigurationError):
        pair.sender.send(on_pending="wait", **bad)

    assert (pair.sender.state, pair.sender.version) == (State.READY, 1)
    report = pair.sender.send_async()
    assert report.previous is not None
    assert (report.version, report.previous.version, report.previous[0].kind) == (2, 1, OutcomeKind.APPLIED)


@pytest.mark.parametrize("option", ["on_pending", "on_failure"])
def test_an_unknown_option_is_refused(pair: Pair, option: str) -> None:
    with pytest.raises(ConfigurationError, match="is unknown: choose one of"):
        pair.sender.send(**{option: "shrug"})

    assert pair.sender.version == 0


@pytest.mark.parametrize(
    ("option", "argument"),
    [(Backend, "backend"), (TensorTransport, "tensor_transport"), (SGLangPause, "pause"), (VLLMPause, "pause")],
)
def test_the_error_for_an_unknown_option_value_names_its_argument(option: type[Option], argument: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{argument}='shrug' is unknown: choose one of"):
        option("shrug")


def test_poll_reads_answers_and_reports_the_outcomes_so_far(three: Pair) -> None:
    assert three.sender.poll() is None
    three.sender.send_async()
    three.receivers[2].receive(timeout=0)
    report = three.sender.poll()

    assert [report[i].kind.name for i in range(3)] == ["PENDING", "PENDING", "APPLIED"]


def test_on_failure_report_returns_failures_instead_of_raising(three: Pair) -> None:
    three.receivers[0].model.extra = small()
    three.sender.send_async()
    for receiver in three.receivers[:2]:
        receiver.receive(timeout=0)
    with advancing_clock(60):
        report = three.sender.wait_async(timeout=60, on_failure=OnFailure.REPORT)

    assert [report[i].kind.name for i in range(3)] == ["REFUSED", "APPLIED", "TIMED_OUT"]
    assert not report.ok
    assert report.failed == (0, 2)


def test_failures_of_several_kinds_raise_sync_error_and_no_subclass(three: Pair) -> None:
    three.receivers[0].model.extra = small()
    three.sender.send_async()
    three.receivers[0].receive(timeout=0)
    three.receivers[1].receive(timeout=0)
    with advancing_clock(60), pytest.raises(SyncError) as failed:
        three.sender.wait_async(timeout=60)

    assert type(failed.value) is SyncError
    assert failed.value.report[1].kind is OutcomeKind.APPLIED


def test_a_refusal_carries_the_workers_own_traceback(three: Pair) -> None:
    three.receivers[1].model.extra = small()
    three.sender.send_async()
    for receiver in three.receivers:
        receiver.receive(timeout=0)
    with pytest.raises(RefusedError) as refused:
        three.sender.wait_async()

    assert "extra.0.weight" in refused.value.refused[1]
    assert "Traceback" in refused.value.refused[1]
    assert three.sender.state is State.READY
    assert constants(three.models[0]) == {1.0}


# -------------------------------------------------------------------------------------------- workers


def test_a_late_joiner_catches_up(pair: Pair, scheme_class: Any) -> None:
    pair.sync()
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as late:
        late.init_on_worker("policy", pipe=theirs, model=small())
        pair.sender.add_worker(1, ours)
        receiver = late.get_receiver()

        assert receiver.version is None
        assert receiver.receive(timeout=0)
        assert (receiver.version, constants(receiver.model)) == (1, {1.0})
        pair.sender.poll()
        assert pair.sender.workers[1].served == 1


def test_a_joiner_gets_no_update_that_was_not_addressed_to_it(pair: Pair, scheme_class: Any) -> None:
    pair.sync(worker_ids=[0])
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as late:
        late.init_on_worker("policy", pipe=theirs, model=small())
        pair.sender.add_worker(1, ours)

        assert late.get_receiver().receive(timeout=0) is False
        assert late.get_receiver().version is None


def test_g12_a_joiner_gets_the_latest_version_sent_to_all_not_a_newer_one_sent_to_some(
    pair: Pair, scheme_class: Any
) -> None:
    pair.sync()
    pair.sync(small(2.0), worker_ids=[0])
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as late:
        late.init_on_worker("policy", pipe=theirs, model=small())
        pair.sender.add_worker(1, ours)
        receiver = late.get_receiver()

        assert receiver.receive(timeout=0)
        assert (receiver.version, constants(receiver.model)) == (1, {1.0})


def test_a_joiner_that_refuses_is_reported_in_the_next_report(pair: Pair, scheme_class: Any) -> None:
    pair.sync()
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as late:
        destination = small()
        late.init_on_worker("policy", pipe=theirs, model=destination)
        destination.extra = small()
        pair.sender.add_worker(1, ours)
        assert late.get_receiver().receive(timeout=0) is False
        report = pair.sync(worker_ids=[0])

    assert report.ok
    assert report.not_caught_up[1].kind is OutcomeKind.REFUSED


def test_a_killed_worker_rejoins_on_a_new_link(scheme_class: Any, crew: Crew) -> None:
    first, second = crew.start(scheme_class(), 2)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[first.pipe, second.pipe], model=small(3.0))
        sender = scheme.get_sender()
        for worker in (first, second):
            worker.do(join)
            worker.tell(receive)
        sender.send()
        assert first.answer()
        assert second.answer()
        first.kill()
        second.tell(receive)
        with pytest.raises(WorkerLostError) as lost:
            sender.send()
        assert second.answer()
        assert set(lost.value.lost) == {0}
        assert lost.value.report[1].kind is OutcomeKind.APPLIED
        (third,) = crew.start(scheme_class())
        sender.add_worker(0, third.pipe)
        third.do(join)

        assert third.do(receive)
        assert third.do(shows)[1:3] == (2, {3.0})
        for worker in (second, third):
            worker.tell(receive)
        assert sender.send().ok
        assert second.answer()
        assert third.answer()


def test_a_lost_worker_is_reported_lost_at_each_send_until_removed(three: Pair) -> None:
    three.pipes[1][1].close()
    three.schemes[1].close()
    for _ in range(2):
        three.sender.send_async()
        for index in (0, 2):
            three.receivers[index].receive(timeout=0)
        report = three.sender.wait_async(on_failure="report")
        assert report[1].kind is OutcomeKind.LOST
    three.sender.remove_worker(1)

    assert three.sender.worker_ids == (0, 2)


def test_a_worker_that_closes_is_removed(scheme_class: Any, crew: Crew) -> None:
    (worker,) = crew.start(scheme_class())
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=small())
        sender = scheme.get_sender()
        worker.do(join)
        worker.tell(receive)
        sender.send()
        worker.answer()
        worker.do(leave)
        sender.poll()

        assert sender.worker_ids == ()
        with pytest.raises(ConfigurationError, match="Worker 0 left: the receiver was closed"):
            sender.send()
        assert dict(sender.send(allow_empty=True).outcomes) == {}


def test_a_send_whose_targets_are_all_lost_raises_without_using_a_version(scheme_class: Any, crew: Crew) -> None:
    (worker,) = crew.start(scheme_class())
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=small())
        sender = scheme.get_sender()
        worker.do(join)
        worker.tell(receive)
        sender.send()
        worker.kill()
        for call in (sender.send, sender.send_async, sender.send):
            with pytest.raises(WorkerLostError) as lost:
                call()
            assert set(lost.value.lost) == {0}

        assert sender.version == 1
        assert sender.state is State.READY


def test_a_worker_removed_before_it_answers_is_reported_lost(three: Pair) -> None:
    three.sender.send_async()
    three.sender.remove_worker(1)
    for index in (0, 2):
        three.receivers[index].receive(timeout=0)
    report = three.sender.wait_async(on_failure="report")

    assert report[1].kind is OutcomeKind.LOST
    assert "removed" in report[1].reason
    with pytest.raises(TransportError, match="no sender any more"):
        three.receivers[1].receive(timeout=PATIENCE)


def test_close_during_add_worker_closes_the_new_workers_link(pair: Pair) -> None:
    ours, theirs = multiprocessing.Pipe()

    class Context:
        """A context that closes the sender when its pipe is looked up."""

        @property
        def pipe(self) -> Any:
            pair.sender.close()
            return ours

    with pytest.raises(StateError, match="add_worker"):
        pair.sender.add_worker(1, Context())

    assert (ours.closed, pair.sender.transports(), pair.sender._workers.endpoints) == (True, {}, {})
    theirs.close()


@pytest.mark.parametrize("worker_id", [-1, True, "1", 1.0, None])
def test_add_worker_refuses_invalid_worker_ids(pair: Pair, worker_id: Any) -> None:
    ours, _theirs = multiprocessing.Pipe()
    with pytest.raises(ConfigurationError, match="worker's id"):
        pair.sender.add_worker(worker_id, ours)

    assert pair.sender.worker_ids == (0,)


@pytest.mark.parametrize("pipe", [None, 3, "pipe", object()])
def test_add_worker_refuses_objects_that_are_not_pipes(pair: Pair, pipe: Any) -> None:
    with pytest.raises(ConfigurationError):
        pair.sender.add_worker(1, pipe)

    assert pair.sender.worker_ids == (0,)


def test_removing_an_unknown_worker_is_refused(pair: Pair) -> None:
    with pytest.raises(ConfigurationError, match="7"):
        pair.sender.remove_worker(7)


def test_a_send_without_workers_raises_unless_allow_empty_is_given(scheme_class: Any) -> None:
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[], model=small())
        with pytest.raises(ConfigurationError, match="there are no workers to send to"):
            scheme.get_sender().send()
        report = scheme.get_sender().send(allow_empty=True)

        assert (dict(report.outcomes), report.version) == ({}, None)
        assert scheme.get_sender().version == 0


def test_a_sender_initialized_without_workers_sends_to_workers_added_later(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as scheme, scheme_class() as worker:
        scheme.init_on_sender("policy", num_workers=0, model=filled(small(), 4.0))
        worker.init_on_worker("policy", pipe=theirs, model=small())
        scheme.get_sender().add_worker(0, ours)
        scheme.get_sender().send_async()
        assert worker.get_receiver().receive(timeout=PATIENCE)
        assert scheme.get_sender().wait_async().ok


# --------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("on_pending", ["wait", "supersede"])
def test_a_send_without_workers_settles_the_outstanding_update_and_reports_it(pair: Pair, on_pending: str) -> None:
    pair.sync()
    pair.sender.send_async()
    pair.receiver.close()
    report = pair.sender.send(allow_empty=True, on_pending=on_pending, on_failure="report")

    assert (dict(report.outcomes), report.version, pair.sender.state) == ({}, None, State.READY)
    if on_pending == "wait":
        assert report.previous is not None
        assert (report.previous[0].kind, list(report.previous.left)) == (OutcomeKind.LOST, [0])
    else:
        assert (report.previous, list(report.left)) == (None, [0])


def test_a_send_without_workers_raises_the_failure_of_the_update_it_waited_for(pair: Pair) -> None:
    pair.sync()
    pair.sender.send_async()
    pair.receiver.close()
    said = "there was no worker to send 'policy' to, but an earlier update did not reach every worker:\nversion 2"
    with pytest.raises(WorkerLostError, match=said):
        pair.sender.send_async(allow_empty=True, on_pending="wait")

    assert pair.sender.state is State.READY


@pytest.mark.parametrize("allow_empty", [True, False])
@pytest.mark.parametrize("verb", ["send", "send_async"])
def test_a_send_whose_last_worker_leaves_during_packing_raises_unless_allow_empty_is_given(
    pair: Pair, verb: str, allow_empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.sync()
    pack = pair.sender._outgoing.pack

    def slowly(*arguments: Any) -> Any:
        pair.receiver.close()
        pair.sender.progress()  # as another thread that polls does
        return pack(*arguments)

    monkeypatch.setattr(pair.sender._outgoing, "pack", slowly)
    send = getattr(pair.sender, verb)
    if allow_empty:
        report = send(allow_empty=True)
        assert (dict(report.outcomes), report.version) == ({}, None)
    else:
        with pytest.raises(ConfigurationError, match="there are no workers to send to"):
            send()
    assert (pair.sender.state, pair.sender.version) == (State.READY, 1)


@pytest.mark.parametrize("on_failure", OnFailure)
def test_close_wakes_a_thread_that_waits_in_send(pair: Pair, on_failure: OnFailure) -> None:
    waiting_now = reach(pair.sender, State.AWAITING_ACK)
    waiting = Thread(lambda: pair.sender.send(timeout=None, on_failure=on_failure))
    waiting.start()
    assert waiting_now.wait(PATIENCE)
    pair.sender.close()
    error = waiting.done().error

    assert isinstance(error, SyncError)
    assert error.report[0].kind is OutcomeKind.ABANDONED


def test_close_wakes_a_thread_that_waits_in_receive(pair: Pair) -> None:
    waiting = Thread(lambda: pair.receiver.receive(timeout=None))
    waiting.start()
    pair.receiver.close()
    error = waiting.done().error

    assert isinstance(error, StateError)


def test_a_second_threads_send_is_refused_while_the_first_waits(pair: Pair) -> None:
    waiting_now = reach(pair.sender, State.AWAITING_ACK)
    waiting = Thread(lambda: pair.sender.send(timeout=None))
    waiting.start()
    assert waiting_now.wait(PATIENCE)
    for call in (
        pair.sender.send,
        pair.sender.send_async,
        pair.sender.wait_async,
        pair.sender.abandon,
        lambda: pair.sender.send(on_pending="supersede"),
        lambda: pair.sender.send(on_pending="wait"),
    ):
        with pytest.raises(StateError):
            call()
    pair.receiver.receive(timeout=PATIENCE)

    assert waiting.done().result.version == 1
    assert pair.sender.version == 1


@pytest.mark.parametrize("ask", ["send_async", "poll"])
def test_a_close_by_another_thread_takes_effect_after_a_running_send_async_or_poll(
    pair: Pair, ask: str, monkeypatch: Any
) -> None:
    """Otherwise the call would get a report without a version, although one was sent (found by frontrun)."""
    if ask == "poll":
        pair.sender.send_async()
    before, closing = Reporter.so_far, Thread(pair.sender.close)

    def close_meanwhile(self: Reporter, owing: OutcomeKind) -> Any:
        closing.start()
        closing.join(0.2)
        return before(self, owing)

    monkeypatch.setattr(Reporter, "so_far", close_meanwhile)
    report = getattr(pair.sender, ask)()

    assert (report.version, report[0].kind) == (1, OutcomeKind.PENDING)
    assert closing.done().result is None
    assert pair.sender.state is State.CLOSED


def test_concurrent_sends_of_many_threads_each_report_their_own_version(scheme_class: Any, crew: Crew) -> None:
    (worker,) = crew.start(scheme_class())
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=small(3.0))
        sender = scheme.get_sender()
        worker.do(join)
        worker.tell(serve, 40)

        def ten() -> list[int]:
            versions: list[int] = []
            while len(versions) < 10:
                try:
                    versions.append(sender.send(timeout=PATIENCE).version)
                except StateError:
                    time.sleep(0.001)  # a spinning thread would keep the interpreter from the waiting one
            return versions

        threads = [Thread(ten) for _ in range(4)]
        for thread in threads:
            thread.start()
        found = [version for thread in threads for version in thread.done().result or [thread.error]]
        assert worker.answer() == 40

    assert sorted(found) == list(range(1, 41))


def test_another_threads_serving_block_delays_the_swap_without_a_deadlock(pair: Pair) -> None:
    inside, enough = threading.Event(), threading.Event()

    def act() -> list[Any]:
        with pair.receiver.serving() as version:
            inside.set()
            assert enough.wait(PATIENCE)
            seen = [version, pair.receiver.receive(timeout=0), pair.receiver.version]
        return seen

    pair.sync()
    acting = Thread(act)
    acting.start()
    assert inside.wait(PATIENCE)
    filled(pair.source, 2.0)
    pair.sender.send_async()
    learning = Thread(lambda: pair.receiver.receive(timeout=PATIENCE))
    learning.start()
    enough.set()

    assert acting.done().result == [1, False, 1]
    assert learning.done().result is True
    assert pair.sender.wait_async().version == 2


def test_receive_keeps_its_deadline_while_another_thread_serves(pair: Pair) -> None:
    inside, enough = threading.Event(), threading.Event()

    def act() -> None:
        with pair.receiver.serving():
            inside.set()
            assert enough.wait(PATIENCE)

    acting = Thread(act)
    acting.start()
    assert inside.wait(PATIENCE)
    pair.sender.send_async()
    try:
        assert pair.receiver.receive(timeout=0.01) is False
        assert pair.receiver.state is State.PENDING_ASYNC
    finally:
        enough.set()
    acting.done()

    assert pair.receiver.receive(timeout=0) is True


def test_no_version_is_applied_inside_the_threads_own_serving_block(pair: Pair) -> None:
    pair.sync()
    filled(pair.source, 2.0)
    pair.sender.send_async()
    with pair.receiver.serving() as version:
        assert pair.receiver.receive(timeout=0) is False
        assert (pair.receiver.version, constants(pair.model)) == (version, {1.0})

    assert pair.receiver.receive(timeout=0)
    assert pair.receiver.version == 2


# ------------------------------------------------------ with on_pending="wait", the earlier update is reported too


def lose_one_worker(three: Pair) -> None:
    """Leave version 1 outstanding: worker 1 is lost, and the others have applied it."""
    three.sender.send_async()
    three.receivers[1]._driver._links[1].close()
    for index in (0, 2):
        three.receivers[index].receive(timeout=0)


def serve_the_survivors(three: Pair) -> list[Any]:
    return [three.receivers[index].receive(timeout=0) for index in (0, 2)]


def test_g11_a_send_after_a_wait_serves_the_survivors_and_reports_both_versions(three: Pair) -> None:
    lose_one_worker(three)
    report = three.sender.send(on_pending="wait", on_failure="report", timeout=0)

    assert (report.version, three.sender.version) == (2, 2)
    assert report.previous is not None
    assert [report.previous[i].kind.name for i in range(3)] == ["APPLIED", "LOST", "APPLIED"]
    assert [report[i].kind.name for i in range(3)] == ["TIMED_OUT", "LOST", "TIMED_OUT"]
    assert serve_the_survivors(three) == [True, True]
    assert three.sender.wait_async(on_failure="report").previous is None


def test_g11_a_send_after_a_wait_raises_for_both_versions_once_survivors_are_served(three: Pair) -> None:
    lose_one_worker(three)
    with ThreadPoolExecutor(2) as beside:
        serving = [beside.submit(three.receivers[index].receive, PATIENCE) for index in (0, 2)]
        with pytest.raises(WorkerLostError) as lost:
            three.sender.send(on_pending="wait", timeout=PATIENCE)

        assert [each.result(PATIENCE) for each in serving] == [True, True]
    assert lost.value.report.version == 2
    assert "version 1 of 'policy' did not reach 1 of 3" in str(lost.value)
    assert "version 2 of 'policy' did not reach 1 of 3" in str(lost.value)


def test_g11_send_async_after_a_wait_dispatches_then_raises_the_earlier_updates_failure(three: Pair) -> None:
    three.receivers[1].model.more = small()
    three.sender.send_async()
    for receiver in three.receivers:
        receiver.receive(timeout=0)
    with pytest.raises(RefusedError, match="version 2 of 'policy' was sent, but an earlier update did not"):
        three.sender.send_async(on_pending="wait", timeout=PATIENCE)

    assert serve_the_survivors(three) == [True, True]


def test_g11_progress_reads_answers_without_marking_outcomes_as_reported(pair: Pair) -> None:
    pair.sender.send_async()
    unreported = pair.sender._reporter._previous = pair.sender._reporter.so_far(OutcomeKind.PENDING)
    pair.receiver.receive(timeout=0)
    pair.sender.progress()

    assert pair.sender.workers[0].served == 1
    assert pair.sender.wait_async(timeout=0, on_failure="report").previous is unreported


def test_g5_a_send_whose_deadline_passes_while_it_waits_reports_that_nothing_was_sent(pair: Pair) -> None:
    pair.sender.send_async()
    report = pair.sender.send(on_pending="wait", on_failure="report", timeout=0)

    assert (report.version, report.ok, pair.sender.version) == (None, False, 1)
    assert report[0].reason == "not sent: time was up while version 1 still awaited worker 0"
    assert report.previous is not None
    assert report.previous[0].kind is OutcomeKind.TIMED_OUT


# ------------------------------------------------------------------------------------ what reports say of waits


def test_the_time_until_a_worker_connects_is_reported_separately(pair: Pair) -> None:
    with FakeClock() as clock:
        pair.sender.send_async()
        clock.advance(17)
        pair.receiver.receive(timeout=0)
        pair.sender.poll()
        clock.advance(1)
        report = pair.sender.wait_async()
        pair.sender.send_async()
        clock.advance(2)
        pair.receiver.receive(timeout=0)
        later = pair.sender.wait_async()

    assert (report.connect_s, report.transfer_s) == (pytest.approx(17), pytest.approx(1))
    assert "in 1.000 s, after waiting 17.000 s for workers to connect" in str(report)
    assert (later.connect_s, later.transfer_s) == (0, pytest.approx(2))


def test_the_time_to_write_an_update_counts_as_transfer_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.sync()
    (link,) = pair.sender.transports().values()
    with FakeClock() as clock:

        def write(*sent: Any, send: Callable[..., None] = link.send) -> None:
            clock.advance(3)
            send(*sent)

        monkeypatch.setattr(link, "send", write)
        pair.sender.send_async()
        clock.advance(2)
        pair.receiver.receive(timeout=0)
        report = pair.sender.wait_async()

    assert (report.pack_s, report.connect_s, report.transfer_s) == (0, 0, pytest.approx(5))


def test_the_wait_for_an_earlier_update_does_not_count_as_packing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.sync()
    pair.sender.send_async()
    with FakeClock() as clock:

        def wait(*_: Any) -> None:
            clock.advance(3)
            pair.receiver.receive(timeout=0)

        monkeypatch.setattr(SenderDriver, "wait", wait)
        report = pair.sender.send(on_pending="wait")

    assert report.version == 3
    assert (report.pack_s, report.transfer_s) == (0, pytest.approx(3))


def test_the_repr_of_sender_and_receiver_shows_state_and_version(pair: Pair) -> None:
    assert repr(pair.receiver) == "<WeightReceiver of 'policy': uninitialized, no version yet>"
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=PATIENCE)

    assert repr(pair.sender) == "<WeightSender of 'policy': pending_async, version 1>"
    assert repr(pair.receiver) == "<WeightReceiver of 'policy': ready, version 1>"
    assert repr(copy.copy(pair.sender)) == "<WeightSender of 'policy': uninitialized, no version yet>"


def test_the_reason_of_a_timeout_says_whether_the_worker_has_connected_and_read_the_update(pair: Pair) -> None:
    with FakeClock() as clock:
        never = pair.sender.send(timeout=0, on_failure="report")[0].reason
        pair.receiver.receive(timeout=0)
        assert pair.sender.wait_async().ok
        clock.advance(5)
        unread = pair.sender.send(timeout=0, on_failure="report")[0].reason
        with pair.receiver.serving():
            pair.receiver.receive(timeout=0)
            read = pair.sender.wait_async(timeout=0, on_failure="report")[0].reason

    assert never == (
        "never connected; is its process running, has it called init_on_worker() or init_on_receiver() "
        "(each worker with its own worker_idx=), and does it call receive() (which raises there as long as it finds no "
        "model)?"
    )
    answered = "connected, but has not answered; it last served version 1; it was last heard from 5.0 s ago; "
    assert unread == answered + "it has not read all that was sent to it"
    assert read == answered + "it has read the update, and has not applied it yet: a step or a loader may be running"


def test_the_reason_of_a_timeout_says_that_the_workers_process_was_not_started(scheme_class: Any) -> None:
    (ours, theirs), process = multiprocessing.Pipe(), multiprocessing.Process(target=print)
    with ours, theirs, scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[ours], processes=[process], model=small(1.0))
        report = scheme.get_sender().send(timeout=0, on_failure="report")

    assert report[0].reason.endswith("; its process was not started: call start() on it")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only waits."""
    waiting = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield waiting
    waiting.kill()
    waiting.communicate()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process by SIGSTOP, and wait until it is stopped."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_a_timeout_says_that_the_workers_process_is_stopped(
    pair: Pair, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = process.pid, started_at(process.pid)  # the identity that the handshake names
    monkeypatch.setattr("weightsync.engine.receiver_driver.own_identity", lambda: named)
    pair.sync()
    runs = pair.sender.send(timeout=0, on_failure="report")[0].reason
    stop(process)
    stopped = pair.sender.wait_async(timeout=0, on_failure="report")[0].reason

    assert "stopped" not in runs
    assert stopped.endswith(f"; its process {process.pid} is stopped, by SIGSTOP or a debugger")


def test_a_timeout_says_that_a_process_was_stopped_before_it_connected(
    scheme_class: Any, process: subprocess.Popen[bytes]
) -> None:
    ours, theirs = multiprocessing.Pipe()
    stop(process)
    with ours, theirs, scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[ours], processes=[process], model=small(1.0))
        report = scheme.get_sender().send(timeout=0, on_failure="report")

    assert report[0].reason == f"never connected; its process {process.pid} is stopped, by SIGSTOP or a debugger"


# ------------------------------------------------------- a worker that dies before it has connected is noticed


def process_of(code: str) -> subprocess.Popen[bytes]:
    """A process that has no end of any pipe, so that nothing else shows its death."""
    return subprocess.Popen([sys.executable, "-c", code])


def unconnected(scheme_class: Any, processes: Any) -> Any:
    """A scheme whose worker never connects, and the worker's end of the pipe, which this process holds."""
    scheme, (ours, theirs) = scheme_class(), multiprocessing.Pipe()
    scheme.init_on_sender("policy", pipes=[ours], model=small(), processes=processes)
    return scheme, theirs


@pytest.mark.parametrize("by", [lambda process: [process], lambda process: {0: process.pid}], ids=["object", "pid"])
def test_g10_a_worker_that_dies_before_it_has_connected_ends_the_send(scheme_class: Any, by: Any) -> None:
    with process_of("import time; time.sleep(3600)") as process:
        scheme, theirs = unconnected(scheme_class, by(process))
        scheme.get_sender().send_async()
        process.kill()
        report = scheme.get_sender().wait_async(timeout=None, on_failure="report")

    assert report[0].kind is OutcomeKind.LOST
    assert f"process {process.pid}" in report[0].reason
    scheme.close()
    theirs.close()


def test_g10_a_process_started_after_the_send_and_dead_before_the_wait_is_noticed(scheme_class: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    scheme, theirs = unconnected(scheme_class, [process])
    scheme.get_sender().send_async()
    assert scheme.get_sender().poll()[0].kind is OutcomeKind.PENDING
    process.start()
    process.join()
    report = scheme.get_sender().wait_async(timeout=None, on_failure="report")

    assert report[0].reason == f"its process {process.pid} has ended with exit code 3"
    scheme.close()
    theirs.close()


def test_the_await_workers_error_for_a_lost_worker_has_a_single_full_stop() -> None:
    sender = MultiProcessWeightSyncScheme().create_sender()
    ours, theirs = multiprocessing.Pipe()
    sender.add_worker(0, ours)
    theirs.close()
    sender.connect()

    with pytest.raises(WorkerLostError, match=r"closed by the other end\. add_worker\(\) brings one back"):
        sender.await_workers(PATIENCE)
    sender.close()


def test_g10_a_process_that_starts_and_dies_while_workers_are_awaited_is_noticed(scheme_class: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    scheme, theirs = unconnected(scheme_class, [process])
    later = threading.Timer(0.1, process.start)
    later.start()
    # The end of its pipe may be noticed before that of the process: "is dead: it ended with exit code 3".
    with pytest.raises(WorkerLostError, match="ended with exit code 3"):
        scheme.get_sender().await_workers(timeout=None)
    later.join()
    process.join()
    scheme.close()
    theirs.close()


def test_g10_a_process_that_starts_and_dies_during_a_wait_is_noticed(scheme_class: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    scheme, theirs = unconnected(scheme_class, [process])
    machine, waiting = scheme.get_sender()._driver.machine, threading.Event()
    machine.observe(lambda _before, _taken, after: after is State.AWAITING_ACK and waiting.set())
    starting = threading.Thread(target=lambda: waiting.wait(PATIENCE) and process.start())
    starting.start()
    report = scheme.get_sender().send(timeout=None, on_failure="report")
    starting.join(PATIENCE)
    process.join(PATIENCE)

    assert report[0].kind is OutcomeKind.LOST
    scheme.close()
    theirs.close()


@pytest.mark.parametrize("processes", [5, "0", [], [None], [0], [True], {3: 1}, ["pid"], [1, 2]])
def test_init_refuses_invalid_processes_and_processes_of_unknown_workers(scheme_class: Any, processes: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme = scheme_class()
    with pytest.raises(ConfigurationError, match="process"):
        scheme.init_on_sender("policy", pipes=[ours], model=small(), processes=processes)

    scheme.init_on_sender("policy", pipes=[ours], model=small())
    scheme.close()
    theirs.close()


# ------------------------------------------------------------------------ a worker learns how its trainer ended


def end_of(receiver: Any) -> TransportError:
    with pytest.raises(TransportError) as ended:
        receiver.receive(timeout=PATIENCE)
    return ended.value


def test_a_clean_end_of_the_trainer_is_distinguished_from_a_crash(pair: Pair, scheme_class: Any) -> None:
    pair.sync()
    pair.sender.close()
    closed = end_of(pair.receiver)
    crashed_pair = Pair(scheme_class)
    crashed_pair.sync()
    crashed_pair.sender._driver._links[1].link.close()
    crashed = end_of(crashed_pair.receiver)
    crashed_pair.close()

    assert isinstance(closed, SenderClosed)
    assert not isinstance(crashed, SenderClosed)
    assert "version 1" in str(closed)


def test_a_receiver_with_a_new_link_forgets_how_the_last_sender_ended(pair: Pair) -> None:
    pair.sender.close()
    assert isinstance(end_of(pair.receiver), SenderClosed)
    ours, theirs = multiprocessing.Pipe()
    pair.receiver.register_worker_transport(theirs)
    ours.close()

    assert not isinstance(end_of(pair.receiver), SenderClosed)


# --------------------------------------------------------- a refused call is named as the public method


def refused(call: Callable[[], Any]) -> StateError:
    with pytest.raises(StateError) as caught:
        call()
    return caught.value


def test_g5_the_error_of_a_second_send_names_the_awaited_workers_and_the_allowed_calls(three: Pair) -> None:
    three.sync()
    three.sender.send_async()
    three.receivers[1].receive(timeout=0)
    error = refused(three.sender.send)
    three.receivers[0].receive(timeout=0)
    three.receivers[2].receive(timeout=0)
    settled = refused(three.sender.send_async)

    assert str(error) == (
        "send(): version 2 still awaits workers 0, 2. Call wait_async() or abandon(), or pass on_pending='supersede' "
        "(or 'wait'). Nothing has changed: the sender is pending_async and allows wait_async(), abandon(), "
        "add_worker(), remove_worker(), close(), poll()."
    )
    assert "send_async(): version 2 has been answered, but not reported yet. Call wait_async()" in str(settled)
    assert error.steps[-2:] == (
        ("SEND_ASYNC", "ready", "pending_async"),
        ("REPLY", "pending_async", "pending_async"),
    )
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


@pytest.mark.parametrize(
    "call",
    [
        lambda pair: (pair.sender.poll, "poll"),
        lambda pair: (pair.sender.send, "send"),
        lambda pair: (lambda: pair.sender.pipe(0), "pipe"),
        lambda pair: (lambda: pair.sender.remove_worker(0), "remove_worker"),
        lambda pair: (pair.sender.abandon, "abandon"),
        lambda pair: (pair.receiver.receive, "receive"),
        lambda pair: (lambda: pair.receiver.apply_weights({}), "apply_weights"),
    ],
)
def test_g9_a_method_of_a_closed_sender_or_receiver_raises_an_error_that_names_it(pair: Pair, call: Any) -> None:
    pair.sync()
    pair.sender.close()
    pair.receiver.close()
    method, name = call(pair)
    error = refused(method)

    assert str(error).startswith(f"{name}(): this ")
    assert "is closed for good" in str(error)
    assert (error.asked, error.allowed) == (name, ("close",))
    assert error.steps[-1][2] == "closed"


@pytest.mark.parametrize("name", ["await_workers", "update_weights"])
def test_errors_of_await_workers_and_update_weights_name_the_called_method(pair: Pair, name: str) -> None:
    call = {
        "await_workers": lambda: pair.sender.await_workers(0),
        "update_weights": lambda: pair.sender.update_weights(small()),
    }[name]
    pair.sender.send_async()
    pending = refused(call)
    pair.sender.close()
    closed = refused(call)

    assert str(pending).startswith(
        f"{name}(): version 1 still awaits worker 0. Call wait_async() or abandon(). Nothing"
    )
    assert str(closed).startswith(f"{name}(): this sender is closed for good.")


def test_errors_of_a_scheme_closed_before_connect_name_the_called_method(pair: Pair) -> None:
    pair.scheme.close()
    pair.schemes[0].close()
    worker = pair.schemes[0]
    for method in (pair.scheme.connect, pair.scheme.send, worker.connect, worker.receive):
        error = refused(method)

        assert str(error).startswith(f"{method.__name__}(): this ")
        assert "is closed for good" in str(error)
        assert error.allowed == ("close",)


def test_the_error_of_a_call_during_another_threads_wait_names_that_wait(pair: Pair) -> None:
    waiting = Thread(lambda: pair.sender.send(timeout=PATIENCE))
    waiting.start()
    while pair.sender.state is not State.AWAITING_ACK:
        time.sleep(0.001)
    error = refused(pair.sender.wait_async)
    pair.receiver.receive(timeout=PATIENCE)
    waiting.join(PATIENCE)

    assert "wait_async(): another call waits for version 1, which still awaits worker 0." in str(error)


def test_the_error_of_a_send_in_a_signal_handler_names_the_interrupted_wait(pair: Pair) -> None:
    refusals: list[StateError] = []

    def handler(*_: Any) -> None:
        refusals.append(refused(pair.sender.send))
        raise InterruptedError

    def interrupt() -> None:
        while pair.sender.state is not State.AWAITING_ACK:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    try:
        with pytest.raises(InterruptedError):
            pair.sender.send(timeout=PATIENCE)
    finally:
        interrupting.join(PATIENCE)
        signal.signal(signal.SIGUSR1, before)

    assert "or is the call that a signal handler has interrupted to make this one." in str(refusals[0])


@pytest.mark.parametrize(("remark", "told"), [("did it start?", "did it start? They"), ("it ended", "it ended. They")])
def test_a_remark_about_an_unconnected_worker_ends_with_one_punctuation_mark(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, remark: str, told: str
) -> None:
    monkeypatch.setattr(pair.sender._driver, "remark", lambda _: remark)

    with pytest.raises(AckTimeoutError, match=re.escape(f"Worker 0: {told}")):
        pair.sender.await_workers(timeout=0)


# ------------------------------------------------------------------- arguments of a wrong type are named and refused

WRONG_CALLS: list[tuple[str, Callable[[Pair], Any]]] = [
    ("timeout", lambda pair: pair.sender.send(timeout="10")),
    ("timeout", lambda pair: pair.sender.send(timeout=True)),
    ("timeout", lambda pair: pair.sender.send_async(timeout=[1])),
    ("timeout", lambda pair: pair.sender.wait_async(timeout="1")),
    ("timeout", lambda pair: pair.receiver.receive(timeout="1")),
    ("timeout", lambda pair: pair.scheme.connect(timeout="1")),
    ("worker_ids", lambda pair: pair.sender.send(worker_ids="0")),
    ("worker_ids", lambda pair: pair.sender.send(worker_ids=b"0")),
    ("worker_ids", lambda pair: pair.sender.send(worker_ids=[0.5])),
    ("worker_ids", lambda pair: pair.sender.send(worker_ids=torch.tensor(0.5))),
    ("allow_empty", lambda pair: pair.sender.send(allow_empty="no")),
    ("allow_empty", lambda pair: pair.sender.send_async(allow_empty=None)),
    ("inplace", lambda pair: pair.receiver.apply_weights(small(), inplace="no")),
    ("inplace", lambda pair: pair.scheme.strategy.apply_weights(small(), small(), inplace="no")),
    ("expected_workers", lambda pair: pair.sender.send(expected_workers="2")),
    ("expected_workers", lambda pair: pair.sender.send_async(expected_workers=-1)),
    ("worker_id", lambda pair: pair.sender.add_worker("0", multiprocessing.Pipe()[0])),
    ("worker_id", lambda pair: pair.sender.remove_worker(False)),
    ("worker_id", lambda pair: pair.sender.remove_worker(0.0)),
    ("worker_id", lambda pair: pair.sender.remove_worker([0])),
    ("worker_id", lambda pair: pair.sender.pipe(False)),
    ("process", lambda pair: pair.sender.add_worker(0, multiprocessing.Pipe()[0], process="1")),
    ("process", lambda pair: pair.sender.add_worker(0, multiprocessing.Pipe()[0], process=multiprocessing.Process)),
    ("process", lambda pair: pair.sender.add_worker(0, multiprocessing.Pipe()[0], process=lambda: "1")),
    ("on_failure", lambda pair: pair.sender.send(on_failure=5)),
    ("on_pending", lambda pair: pair.sender.send(on_pending=None)),
    ("fence", lambda pair: type(pair.scheme)().create_sender().connect(fence="5")),
    ("fence", lambda pair: type(pair.scheme)().create_sender().connect(fence=2**128 - 1)),
    ("message", lambda pair: pair.receiver.ack(b"updated")),
    ("error", lambda pair: pair.receiver.nack("why")),
    ("error", lambda pair: pair.receiver.nack(None)),
]
WRONG_INITS: list[tuple[str, Any]] = [
    ("pipes", multiprocessing.Pipe()[0]),
    ("pipes", [5]),
    ("pipes", [multiprocessing.Pipe()[0], "1"]),
    ("num_workers", "2"),
    ("num_workers", 10**30),
    ("model_id", 5),
    ("model_id", "x" * 2**16),
    ("model_id", "\ud800"),
    ("fence", 1.5),
    ("fence", 2**128),
    ("expected_workers", True),
    ("devices", "cpu"),
    ("ctx", 5),
]


@pytest.mark.parametrize(("argument", "call"), WRONG_CALLS)
def test_errors_for_arguments_of_a_wrong_type_name_the_argument(
    pair: Pair, argument: str, call: Callable[[Pair], Any]
) -> None:
    before = pair.sender._driver.data
    with pytest.raises(ConfigurationError, match=rf"^{argument}="):
        call(pair)

    assert pair.sender._driver.data == before


@pytest.mark.parametrize("zero", [torch.tensor(0), numpy.array(0), numpy.int64(0)])
def test_worker_ids_may_be_integers_of_torch_or_numpy(pair: Pair, zero: Any) -> None:
    pair.sender.send_async(worker_ids=zero)

    assert pair.sender.owing == (0,)


@pytest.mark.parametrize(("argument", "value"), WRONG_INITS)
def test_errors_for_invalid_arguments_of_init_name_the_argument(scheme_class: Any, argument: str, value: Any) -> None:
    given: dict[str, Any] = {"model_id": "policy", "model": small(), argument: value}
    if argument == "ctx":
        given["num_workers"] = 1
    scheme = scheme_class()
    with pytest.raises(ConfigurationError, match=rf"^{argument}="):
        scheme.init_on_sender(**given)

    assert not scheme.initialized_on_sender


@pytest.mark.parametrize("argument", ["sync", "per_worker_weights"])
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_errors_for_scheme_switches_that_are_not_bool_name_the_argument(
    scheme_class: Any, argument: str, value: Any
) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{argument}="):
        scheme_class(**{argument: value})


def test_a_report_polled_by_another_thread_during_dispatch_is_of_the_dispatched_version(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the report had the bytes of the version before, and times that counted from its dispatch."""
    dispatched, polls = Reporter.dispatched, list[Thread]()

    def late(reporter: Reporter, *given: Any) -> None:
        polls.append(Thread(pair.sender.poll))
        polls[0].start()
        polls[0].join(0.05)  # long enough to make a report
        dispatched(reporter, *given)

    monkeypatch.setattr(Reporter, "dispatched", late)
    report = pair.sender.send(timeout=0, on_failure="report")
    polls[0].done()

    assert report.nbytes == polls[0].result.nbytes > 0
    assert report.version == polls[0].result.version == 1
