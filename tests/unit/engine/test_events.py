"""`on_event`: each event is reported once, and no callback can delay or break a sync, or outlive a close."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import multiprocessing
import os
import pickle
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleet import PATIENCE, Pair, pair, scheme_class  # noqa: F401 - fixtures
from scripted import EPOCH, Fleet, Scripted, ack, hello, refusal
from torch import nn

from weightsync import (
    ConfigurationError,
    EventKind,
    MultiProcessWeightSyncScheme,
    Outcome,
    OutcomeKind,
    SyncEvent,
    SyncPhase,
    SyncReport,
    SyncRole,
    WeightReceiver,
    WeightSender,
    WireDtype,
)
from weightsync.engine import events as module
from weightsync.engine.events import Events
from weightsync.engine.observing import SenderObserver
from weightsync.protocol import sender as pure


class Listener:
    """A callback that keeps its events, and for which a test can wait."""

    def __init__(self) -> None:
        self.events: list[SyncEvent] = []
        self._more = threading.Condition()

    def __call__(self, event: SyncEvent) -> None:
        with self._more:
            self.events.append(event)
            self._more.notify_all()

    def until(self, count: int) -> list[SyncEvent]:
        """Wait for this many events, and return them."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.events) >= count, PATIENCE), self.events
            return list(self.events)


class Recorded(Events):
    """Events that are kept at once, without a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[SyncEvent] = []
        self.subscribe(print)

    def emit(self, event: SyncEvent) -> None:
        self.found.append(event)

    def takes(self) -> list[tuple[EventKind, int | None, int | None, OutcomeKind | None]]:
        """Kind, worker, version and outcome of the events since the last call."""
        found, self.found = self.found, []
        return [(event.kind, event.worker, event.version, event.outcome) for event in found]


# ------------------------------------------------------------------------------------------------ what is reported


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Scripted(), Scripted())


@pytest.fixture
def seen(fleet: Fleet) -> Recorded:
    events = Recorded()
    SenderObserver(fleet.driver, events)
    return events


@pytest.mark.untraced("its links are scripted")
def test_a_dispatch_a_handshake_and_an_answer_are_reported_once_with_their_seconds(
    fleet: Fleet, seen: Recorded
) -> None:
    sent = fleet.sends()
    assert seen.found[0].nbytes == sent.nbytes
    assert seen.takes() == [(EventKind.DISPATCH, 0, 1, None), (EventKind.DISPATCH, 1, 1, None)]

    fleet.receives(0, hello(), ack(1))
    assert set(seen.found[1].seconds) == {SyncPhase.CONNECT, SyncPhase.TRANSFER, SyncPhase.APPLY}
    assert seen.takes() == [(EventKind.JOINED, 0, None, None), (EventKind.REPLY, 0, 1, OutcomeKind.APPLIED)]

    fleet.receives(1, refusal(1))
    assert seen.found[-1].reason == "no"
    assert seen.takes()[-1] == (EventKind.REFUSED, 1, 1, OutcomeKind.REFUSED)


@pytest.mark.untraced("its links are scripted")
def test_a_deadline_a_late_answer_and_a_stale_answer_are_reported(fleet: Fleet, seen: Recorded) -> None:
    fleet.sends()
    fleet.receives(0, ack(1))
    seen.takes()

    fleet.driver.take(pure.Deadline(1))
    assert seen.takes() == [(EventKind.TIMED_OUT, 1, 1, OutcomeKind.TIMED_OUT)]
    fleet.receives(1, ack(1))
    assert seen.takes()[-1] == (EventKind.REPLY, 1, 1, OutcomeKind.APPLIED)
    fleet.receives(1, ack(1))
    assert seen.takes() == [(EventKind.STALE, 1, 1, None)]


@pytest.mark.untraced("its links are scripted")
def test_a_loss_is_reported_once_whether_or_not_an_answer_was_owed(fleet: Fleet, seen: Recorded) -> None:
    fleet.sends(targets=(0,))
    seen.takes()

    for worker in (0, 1):
        fleet.driver.take(pure.LinkLost(worker, worker + 1, "it died"))
    assert [event.reason for event in seen.found] == ["it died", "it died"]
    assert seen.takes() == [(EventKind.LOST, 0, 1, OutcomeKind.LOST), (EventKind.LOST, 1, None, None)]


@pytest.mark.untraced("its links are scripted")
def test_an_abandoned_update_an_earlier_loss_and_the_close_are_reported(fleet: Fleet, seen: Recorded) -> None:
    fleet.driver.take(pure.LinkLost(1, 2, "it died"))
    fleet.gives_up(1)
    assert seen.takes()[1:] == [
        (EventKind.DISPATCH, 0, 1, None),
        (EventKind.LOST, 1, 1, OutcomeKind.LOST),
        (EventKind.ABANDONED, 0, 1, OutcomeKind.ABANDONED),
    ]
    fleet.driver.close()
    assert seen.takes() == [(EventKind.CLOSED, None, None, None)]


@pytest.mark.untraced("its links are scripted")
def test_the_dispatch_to_a_joiner_and_its_answer_are_reported(fleet: Fleet, seen: Recorded) -> None:
    fleet.sends()
    fleet.receives(0, ack(1))
    fleet.receives(1, ack(1))
    seen.takes()

    for worker in (2, 3):
        fleet.driver.join(worker, Scripted())
    late = fleet.driver.by_worker()
    late[2].receives(ack(1))
    late[3].receives(refusal(1))
    fleet.driver.pump()

    assert [found for found in seen.takes() if found[0] is not EventKind.JOINED] == [
        (EventKind.DISPATCH, 2, 1, None),
        (EventKind.DISPATCH, 3, 1, None),
        (EventKind.REPLY, 2, 1, None),
        (EventKind.REFUSED, 3, 1, None),
    ]


def test_a_superseded_version_is_reported_with_the_number_of_the_newer_one(pair: Pair) -> None:  # noqa: F811
    trainer = Listener()
    pair.scheme.on_event(trainer)
    pair.sender.send_async()
    pair.sender.send_async(on_pending="supersede")
    pair.sender.abandon()
    pair.scheme.close()
    events = [event for event in trainer.until(5) if event.kind is EventKind.ABANDONED]
    reasons = [(event.version, event.reason) for event in events]
    assert reasons == [(1, "superseded by version 2"), (2, "given up by the caller")]


def test_both_sides_report_a_sync_over_real_pipes(pair: Pair) -> None:  # noqa: F811
    trainer, worker = Listener(), Listener()
    pair.schemes[0].worker_idx = 7
    pair.scheme.on_event(trainer)
    pair.schemes[0].on_event(worker)

    pair.sync()
    pair.close()

    seen = [(event.kind, event.version) for event in worker.until(3)]
    assert seen == [(EventKind.JOINED, None), (EventKind.REPLY, 1), (EventKind.CLOSED, None)]
    assert {event.worker for event in worker.events} == {7}
    assert {event.role for event in worker.events} == {SyncRole.WORKER}
    kinds = [event.kind for event in trainer.until(4)]
    assert kinds == [EventKind.DISPATCH, EventKind.JOINED, EventKind.REPLY, EventKind.CLOSED]
    [applied] = {event.incarnation for event in (*trainer.events, *worker.events)}
    assert applied == pair.sender.incarnation


# ------------------------------------------------------------------------------------- what a callback cannot do


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "weightsync"):
        yield caplog


def test_a_blocked_callback_delays_no_sync_and_no_close_and_dropped_events_are_counted(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_CLOSING_S", 0.01)
    monkeypatch.setattr(module, "CAPACITY", 3)
    stuck, seen = threading.Event(), threading.Event()

    def callback(event: SyncEvent) -> None:
        seen.set()
        stuck.wait(PATIENCE)

    subscription = pair.scheme.on_event(callback)
    try:
        assert all(pair.sync().ok for _ in range(4))
        assert seen.wait(PATIENCE)
        dropped = subscription.dropped
        # Each update makes two events and the handshake one. The callback holds at most one event, and three wait.
        assert dropped >= 2 * 4 + 1 - 4
        pair.scheme.close()
        assert subscription.dropped > dropped
    finally:
        stuck.set()
    assert "events were dropped" in logged.text
    assert "its thread ends when it returns" in logged.text


def test_errors_of_a_callback_are_logged_and_counted_and_other_callbacks_are_called(
    pair: Pair,  # noqa: F811
    logged: pytest.LogCaptureFixture,
) -> None:
    def callback(event: SyncEvent) -> None:
        if event.kind is EventKind.REPLY:
            raise SystemExit(3)
        raise ValueError("no")

    failing, listener = pair.scheme.on_event(callback), Listener()
    pair.scheme.on_event(listener)

    assert pair.sync().ok
    pair.scheme.close()

    assert failing.failures == len(listener.until(4)) == 4
    assert "a callback of on_event() failed on dispatch" in logged.text


@pytest.mark.untraced("its links are scripted")
def test_an_error_while_an_event_is_emitted_is_logged_and_the_step_is_taken(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    broken = Recorded()
    monkeypatch.setattr(broken, "emit", lambda event: 1 / 0)
    SenderObserver(fleet.driver, broken)

    fleet.sends()

    assert fleet.driver.data.version == 1
    assert "the sync is not affected" in logged.text


@pytest.mark.parametrize("context", [None, 3, b"", object()])
@pytest.mark.untraced("its links are scripted")
def test_a_tracer_that_returns_no_text_loses_no_events(fleet: Fleet, seen: Recorded, context: Any) -> None:
    seen.subscribe(print, SimpleNamespace(begin=lambda *_: context))

    fleet.sends()

    assert seen.takes() == [(EventKind.DISPATCH, 0, 1, None), (EventKind.DISPATCH, 1, 1, None)]


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_copying_a_subscription_raises_with_a_remedy(copied: Any) -> None:
    """The subscription may be an attribute of a user's object that travels to a worker."""
    holder = SimpleNamespace(subscription=Events().subscribe(print))

    with pytest.raises(ConfigurationError, match="leave it out"):
        copied(holder.subscription if copied is copy.copy else holder)


def test_a_callback_may_close_the_scheme(pair: Pair) -> None:  # noqa: F811
    closed = threading.Event()

    def callback(event: SyncEvent) -> None:
        if event.kind is EventKind.REPLY:
            pair.scheme.close()
            closed.set()

    pair.scheme.on_event(callback)
    pair.sync()

    assert closed.wait(PATIENCE)


# --------------------------------------------------------------------------------------------------- its thread


def events_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weightsync-events"]


def test_without_callbacks_no_thread_runs_and_no_step_is_watched(pair: Pair) -> None:  # noqa: F811
    pair.sync()

    assert events_threads() == []
    assert pair.sender._driver._pure_step is pure.step


def test_the_events_thread_ends_when_only_the_sender_is_closed(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 2 * PATIENCE)  # the thread must not end because it is idle
    listener = Listener()
    pair.scheme.on_event(listener)
    pair.sync()
    running = events_threads()

    pair.sender.close()

    listener.until(4)
    for thread in running:
        thread.join(PATIENCE)
    assert running
    assert not any(thread.is_alive() for thread in running)


def test_an_idle_events_thread_ends_and_the_next_event_starts_another(
    pair: Pair,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.001)
    listener = Listener()
    pair.scheme.on_event(listener)
    pair.sync()
    for thread in events_threads():
        thread.join(PATIENCE)

    pair.sync()

    assert [event.version for event in listener.until(5) if event.kind is EventKind.REPLY] == [1, 2]


def test_a_forked_child_and_a_copy_have_no_callbacks_and_the_parent_keeps_its_own(pair: Pair) -> None:  # noqa: F811
    listener = Listener()
    pair.scheme.on_event(listener)
    events = pair.scheme._events._events
    assert events is not None
    pair.sync()
    listener.until(3)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child == 0:
        os._exit(int(pair.scheme._events._events is not None or events.have_callbacks or events._thread is not None))
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    for other in (copy.copy(pair.scheme), pickle.loads(pickle.dumps(pair.scheme))):
        assert other._events._events is None
    pair.sync()
    assert listener.until(5)[-1].version == 2


def test_a_subscription_that_was_cancelled_is_not_called_again(pair: Pair) -> None:  # noqa: F811
    cancelled, listener = Listener(), Listener()
    subscription = pair.scheme.on_event(cancelled)
    pair.scheme.on_event(listener)
    pair.sync()
    listener.until(3)

    subscription.cancel()
    subscription.cancel()
    pair.sync()
    listener.until(5)

    assert len(cancelled.events) == 3


def test_a_callback_gets_only_the_events_between_its_registration_and_its_cancellation(
    pair: Pair,  # noqa: F811
) -> None:
    busy, free, late, cancelled, listener = threading.Event(), threading.Event(), Listener(), Listener(), Listener()

    def callback(event: SyncEvent) -> None:
        busy.set()
        assert free.wait(PATIENCE)

    pair.scheme.on_event(callback)
    subscription = pair.scheme.on_event(cancelled)
    pair.scheme.on_event(listener)
    pair.sync()
    assert busy.wait(PATIENCE)
    pair.scheme.on_event(late)
    subscription.cancel()  # while the callback before it still runs
    free.set()
    pair.sync()
    listener.until(5)
    pair.scheme.close()

    assert [event.version for event in late.events] == [2, 2, None]
    assert cancelled.events == []


def test_a_callback_that_is_not_callable_is_refused() -> None:
    callback: Any = "print"
    with pytest.raises(ConfigurationError, match="'print'"):
        MultiProcessWeightSyncScheme().on_event(callback)


class AsyncListener:
    """A callback whose body would never run, since its coroutine is not awaited."""

    async def __call__(self, event: SyncEvent) -> None:
        raise AssertionError(event)


@pytest.mark.parametrize("callback", [AsyncListener(), AsyncListener().__call__], ids=["object", "function"])
def test_an_async_callback_is_refused(callback: Any) -> None:
    with pytest.raises(ConfigurationError, match="an async function: a call of it does not run its body"):
        MultiProcessWeightSyncScheme().on_event(callback)


async def _never(*_: Any) -> str:
    raise AssertionError


@pytest.mark.parametrize("tracer", ["tracer", SimpleNamespace(begin=_never)])
def test_a_tracer_without_a_synchronous_begin_method_is_refused(tracer: Any) -> None:
    scheme = MultiProcessWeightSyncScheme()
    with pytest.raises(ConfigurationError, match=r"^on_event\(tracer=\) was given .*: give an object with a Tracer's"):
        scheme.on_event(print, tracer=tracer)

    assert scheme._events._events is None


# ---------------------------------------------------------------------------------------- a report as plain data


def test_a_report_as_a_dict_survives_json_and_has_every_field() -> None:
    nested = SyncReport(model_id="policy", version=3, incarnation=2**90, outcomes={})
    outcome = Outcome(kind=OutcomeKind.APPLIED, nested=nested, apply_s=0.5)
    report = SyncReport(
        model_id="policy",
        version=4,
        incarnation=2**90,
        outcomes={0: outcome, 1: Outcome(kind=OutcomeKind.LOST, reason="it died")},
        wire_dtype=WireDtype.BFLOAT16,
        superseded={0: (2, 3)},
        left={5: "it was closed"},
        previous=nested,
    )
    plain = report.to_dict()

    assert json.loads(json.dumps(plain)) == plain
    assert plain.keys() == {*SyncReport.__struct_fields__, "ok"}
    assert plain["outcomes"]["0"].keys() == set(Outcome.__struct_fields__)
    assert (plain["ok"], plain["incarnation"], plain["wire_dtype"]) == (False, 2**90, "bfloat16")
    assert plain["outcomes"]["1"] == {**Outcome(kind=OutcomeKind.LOST).to_dict(), "reason": "it died"}
    assert (plain["superseded"], plain["left"]) == ({"0": [2, 3]}, {"5": "it was closed"})
    assert plain["outcomes"]["0"]["nested"] == plain["previous"] == nested.to_dict()
    page = Path(__file__).parents[3].joinpath("docs", "observability.md").read_text(encoding="utf-8")
    described = page.partition("## Reports as plain data")[2].partition("\n## ")[0]
    assert {*plain, *plain["outcomes"]["0"]} <= set(re.findall(r"`(\w+)`", described))


@pytest.mark.untraced("its links are scripted")
def test_events_carry_the_incarnation_of_their_sender(fleet: Fleet, seen: Recorded) -> None:
    fleet.sends()

    assert {event.incarnation for event in seen.found} == {EPOCH}


def test_first_callbacks_registered_by_two_threads_at_once_are_both_called(monkeypatch: pytest.MonkeyPatch) -> None:
    both_in = threading.Barrier(2)

    class Slow(Events):
        """Events whose constructor waits for a second thread in it, or for half a second if none comes."""

        def __init__(self) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                both_in.wait(0.5)
            super().__init__()

    monkeypatch.setattr(module, "Events", Slow)
    listeners = Listener(), Listener()
    with MultiProcessWeightSyncScheme() as scheme:
        threads = [threading.Thread(target=scheme.on_event, args=(each,)) for each in listeners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        scheme.init_on_sender("policy", pipes=[], model=nn.Linear(1, 1))
    assert [[event.kind for event in each.until(1)] for each in listeners] == [[EventKind.CLOSED]] * 2


@pytest.mark.parametrize("side", [WeightSender, WeightReceiver])
def test_a_callback_registered_while_a_sender_or_receiver_is_created_gets_its_events(
    side: type[WeightSender | WeightReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, scheme, set_context = Listener(), MultiProcessWeightSyncScheme(), side.set_context

    def register_first(made: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=scheme.on_event, args=(listener,))
        thread.start()
        thread.join(PATIENCE)
        set_context(made, *arguments)

    monkeypatch.setattr(side, "set_context", register_first)
    ours, theirs = multiprocessing.Pipe()
    with scheme, contextlib.closing(ours), contextlib.closing(theirs):
        if side is WeightSender:
            scheme.init_on_sender("policy", pipes=[ours], model=nn.Linear(1, 1))
        else:
            scheme.init_on_worker("policy", pipe=theirs, model=nn.Linear(1, 1))
    assert [event.kind for event in listener.until(1)][-1] is EventKind.CLOSED
