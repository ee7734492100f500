"""The background reader: versions go live between forwards, or at once in an idle worker, and none is lost."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
from typing import Any

import pytest
import torch
from clocks import advancing_clock
from duo import Duo, Reader, beside, reader
from fleet import PATIENCE, constants, filled, small
from torch import nn

from weightsync import (
    AckTimeoutError,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    State,
    StateError,
    TransportError,
    WeightReceiver,
    WeightSyncError,
    WorkerLostError,
)
from weightsync.engine.background import Background

# ------------------------------------------------------------------------------------------------ torn reads


class Oops(Exception):
    pass


def serve_while(duo: Duo, ended: threading.Event, raising: bool) -> list[set[float]]:
    """Run forwards without a pause until the event is set. Returns the values that each of them read."""
    seen = []
    while not ended.is_set():
        seen.append(duo.model())
        if raising:
            with pytest.raises(Oops):
                fail(duo)
    return seen


def fail(duo: Duo) -> None:
    """Run a forward that raises, of a module that calls our model."""
    outer = nn.Sequential()
    outer.forward = lambda: (duo.model(), _raise())  # type: ignore[method-assign]
    outer()


def _raise() -> None:
    raise Oops


@pytest.mark.parametrize(("threads", "raising"), [(1, False), (1, True), (2, False)], ids=["one", "raising", "two"])
def test_g3_no_forward_sees_two_versions_and_a_busy_worker_still_swaps(duo: Duo, threads: int, raising: bool) -> None:
    ended = threading.Event()
    everything: list[list[set[float]]] = []

    def serve() -> None:
        everything.append(serve_while(duo, ended, raising))

    workers = [threading.Thread(target=serve) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        reports = [duo.send(float(fill), timeout=PATIENCE) for fill in range(2, 102)]
    finally:
        ended.set()
        for worker in workers:
            worker.join(PATIENCE)

    assert all(report.ok for report in reports)
    seen = [values for forwards in everything for values in forwards]
    assert all(len(values) == 1 for values in seen)
    assert [values for forwards in everything for values in forwards if values == {101.0}] or duo.model() == {101.0}
    assert len(set(map(tuple, seen))) > 1


def test_a_failed_connect_whose_cleanup_was_interrupted_leaves_no_background_reader(
    scheme_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reader would have acked versions that the second had to pass on."""
    duo, readers, joined = Duo(scheme_class), list[threading.Thread](), threading.Event()
    run_once = Background._run_once
    duo.arrive()

    def read_once_joined(background: Background) -> bool:
        assert joined.wait(PATIENCE)  # a reader that has ended before is not joined
        return run_once(background)

    def interrupt(thread: threading.Thread, timeout: float) -> None:
        readers.append(thread)
        joined.set()
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Background, "_run_once", read_once_joined)
        interrupted.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            duo.receiving.connect(worker_idx=0, timeout=0.0)
    [first] = readers
    first.join(PATIENCE)

    assert not first.is_alive()
    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        duo.receiving.connect(worker_idx=0, timeout=PATIENCE)
    assert duo.send(2.0, timeout=PATIENCE).ok
    duo.end()


def test_a_version_that_arrives_during_a_forward_goes_live_after_it(duo: Duo) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def meanwhile() -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    duo.model.meanwhile = meanwhile
    with beside(duo.model) as seen:
        assert inside.wait(PATIENCE)
        with advancing_clock(60), pytest.raises(AckTimeoutError):
            duo.send(2.0, timeout=60)
        assert duo.receiving.get_receiver().version == 1
        go_on.set()
    duo.model.meanwhile = lambda: None

    assert seen == [{1.0}]
    assert duo.sending.get_sender().wait_async(timeout=PATIENCE).ok
    assert duo.model() == {2.0}


def test_the_outermost_forward_swaps_a_staged_version_in_its_own_thread(duo: Duo) -> None:
    """In a worker that is never idle, the next forward begins before the reader can swap."""
    receiver = duo.receiving.get_receiver()
    swapped: list[str] = []
    shipped = receiver.target().swap
    receiver.target().swap = lambda staged: (swapped.append(threading.current_thread().name), shipped(staged))  # type: ignore[method-assign]
    with receiver.serving():
        duo.sending.sync = False
        duo.send(2.0)
        while receiver._served.staged is None:
            os.sched_yield()
        receiver.driver.lock.acquire()  # keeps the reader from swapping first
    try:
        assert duo.model() == {2.0}
    finally:
        receiver.driver.lock.release()

    assert swapped == [threading.current_thread().name]


def test_an_idle_worker_applies_and_acks_a_version(duo: Duo) -> None:
    assert duo.send(2.0, timeout=PATIENCE).ok
    assert duo.receiving.get_receiver().version == 2


def test_nested_forwards_serve_one_version(duo: Duo) -> None:
    seen: list[set[float]] = []
    depth = 0

    def meanwhile() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            duo.sending.sync = False
            duo.send(2.0)
            seen.append(duo.model())

    duo.model.meanwhile = meanwhile
    seen.append(duo.model())
    duo.sending.get_sender().wait_async(timeout=PATIENCE)

    assert seen == [{1.0}, {1.0}]
    assert duo.model() == {2.0}


@pytest.mark.parametrize("captures", [True, False])
def test_a_forward_captured_as_a_cuda_graph_swaps_no_staged_version(
    duo: Duo, captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, swaps = duo.receiving.get_receiver(), list[float]()
    out_of_the_way = threading.Event()  # set by the reader, which then no longer handles staged versions
    monkeypatch.setattr(receiver, "receive_and_apply_here", out_of_the_way.set)
    receiver.driver.waker.fire()
    assert out_of_the_way.wait(PATIENCE)
    monkeypatch.setattr("weightsync.engine.receiver.capturing", lambda: captures)
    monkeypatch.setattr(receiver._applier, "swap_staged", swaps.append)
    monkeypatch.setattr(receiver._served, "staged", object())
    duo.model()
    assert bool(swaps) is not captures
    monkeypatch.undo()


@pytest.mark.parametrize("error", [Oops(), KeyboardInterrupt()], ids=repr)
def test_a_forward_that_raises_does_not_block_the_next_swap(duo: Duo, error: BaseException) -> None:
    """torch calls no hooks after a KeyboardInterrupt."""
    duo.model.fails = error
    with pytest.raises(type(error)):
        duo.model()
    duo.model.fails = None

    assert duo.send(2.0, timeout=PATIENCE).ok
    assert duo.model() == {2.0}


def test_a_serving_block_holds_the_version_for_direct_calls_of_forward(duo: Duo) -> None:
    receiver = duo.receiving.get_receiver()
    with receiver.serving() as version:
        with advancing_clock(60), pytest.raises(AckTimeoutError):
            duo.send(2.0, timeout=60)
        assert (version, receiver.version, duo.model.forward()) == (1, 1, {1.0})

    assert duo.sending.get_sender().wait_async(timeout=PATIENCE).ok
    assert (receiver.version, duo.model.forward()) == (2, {2.0})


def test_back_to_back_serving_blocks_do_not_starve_swaps(duo: Duo) -> None:
    receiver, ended = duo.receiving.get_receiver(), threading.Event()
    seen: set[tuple[int | None, float]] = set()

    def serve() -> None:
        while not ended.is_set():
            with receiver.serving() as version:
                seen.update({(version, value) for value in duo.model.forward()})

    with beside(serve):
        try:
            for fill in range(2, 60):
                assert duo.send(float(fill), timeout=PATIENCE).ok
                patience = time.monotonic() + PATIENCE
                while (fill, float(fill)) not in seen:  # a busy machine may run the other thread rarely
                    assert time.monotonic() < patience
                    time.sleep(0.0001)
        finally:
            ended.set()

    assert all(version == value for version, value in seen)


def test_a_dict_of_tensors_is_served_in_serving_blocks(scheme_class: Any) -> None:
    made = Duo(scheme_class, make=lambda fill: nn.ParameterDict({"a": torch.full((3,), fill)}))
    made.model = {"a": torch.zeros(3)}
    made.connect()
    with made.receiving.get_receiver().serving():
        assert made.model["a"].tolist() == [1.0] * 3
    assert made.send(2.0, timeout=PATIENCE).ok
    assert made.model["a"].tolist() == [2.0] * 3
    made.end()


# --------------------------------------------------------------------------------------------------- receive


def test_receive_gives_the_weights_of_each_new_version_once(duo: Duo) -> None:
    assert duo.receiving.receive(timeout=0) is None
    duo.send(2.0)

    weights = duo.receiving.receive(timeout=PATIENCE)

    assert weights["mark"].tolist() == [2.0] * 64
    assert duo.receiving.receive(timeout=0) is None


def test_receive_waits_for_the_next_version(duo: Duo) -> None:
    with beside(duo.receiving.receive) as received:
        duo.send(2.0)

    assert received[0]["mark"].tolist() == [2.0] * 64


def test_receiver_receive_waits_for_the_background_reader(duo: Duo) -> None:
    duo.send(2.0)

    assert duo.receiving.get_receiver().receive(timeout=PATIENCE) is True
    assert duo.receiving.get_receiver().receive(timeout=0) is False


def test_an_interrupt_at_the_start_of_receive_does_not_stop_the_background_reader(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt used to leave the lock held, so that the reader stopped answering."""

    def enter_interrupted(condition: Any) -> None:
        condition._lock.acquire()
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt  # as from a signal handler, which runs after a C function has returned

    with monkeypatch.context() as patched:
        patched.setattr(threading.Condition, "__enter__", enter_interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            duo.receiving.get_receiver().receive(timeout=0.0)

    for fill in (2.0, 3.0):
        assert duo.send(fill, timeout=PATIENCE).ok


def test_a_refused_version_makes_receive_return_none_and_is_reported_to_the_sender(duo: Duo) -> None:
    duo.sending.model = None  # or the trainer would refuse the weights itself
    with pytest.raises(RefusedError):
        duo.sending.send({"another": torch.zeros(3)})

    assert duo.receiving.receive(timeout=PATIENCE) is None
    assert "another" in duo.receiving.get_receiver().last_refusal
    assert duo.model() == {1.0}


def test_receive_returns_the_applied_version_although_a_later_one_was_refused(duo: Duo) -> None:
    duo.send(2.0)
    duo.sending.model = None
    with pytest.raises(RefusedError):
        duo.sending.send({"another": torch.zeros(3)})

    assert duo.receiving.receive(timeout=PATIENCE)["mark"].tolist() == [2.0] * 64
    assert duo.receiving.receive(timeout=0) is None


def test_weights_applied_by_hand_are_not_a_version(duo: Duo) -> None:
    duo.receiving.apply_weights(reader(7.0).state_dict())

    assert duo.model() == {7.0}
    assert duo.receiving.get_receiver().version is None
    assert duo.send(2.0).ok
    assert duo.model() == {2.0}


def test_apply_weights_with_inplace_false_creates_new_tensors(scheme_class: Any) -> None:
    made = Duo(scheme_class, make=lambda fill: nn.ParameterDict({"a": torch.full((3,), fill)}))
    made.model = {"a": torch.zeros(3)}
    made.connect()
    old = made.model["a"]

    made.receiving.apply_weights({"a": torch.full((3,), 5.0)}, inplace=False)

    assert (old.tolist(), made.model["a"].tolist()) == ([1.0] * 3, [5.0] * 3)
    made.end()


# -------------------------------------------------------------------------------------- how it ends and begins


def weightsync_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weightsync")]


def test_shutdown_ends_the_background_reader_and_removes_the_forward_hooks(duo: Duo) -> None:
    assert weightsync_threads() == ["weightsync receiver of 'policy'"]

    duo.receiving.shutdown()
    duo.receiving.shutdown()

    assert weightsync_threads() == []
    assert not duo.model._forward_pre_hooks
    assert not duo.model._forward_hooks
    assert duo.receiving.get_receiver().state is State.CLOSED
    with pytest.raises(StateError):
        duo.receiving.receive(timeout=0)


def test_the_background_reader_ends_with_its_sender_and_each_receive_raises(duo: Duo) -> None:
    duo.sending.shutdown()

    for _ in range(2):
        with pytest.raises(TransportError, match="no sender any more"):
            duo.receiving.receive(timeout=PATIENCE)
    while weightsync_threads():
        os.sched_yield()
    assert duo.model() == {1.0}


def test_receive_returns_the_applied_version_before_it_raises_that_the_sender_is_gone(duo: Duo) -> None:
    duo.send(2.0)
    duo.sending.shutdown()
    while weightsync_threads():
        os.sched_yield()

    assert duo.receiving.receive(timeout=0)["mark"].tolist() == [2.0] * 64
    with pytest.raises(TransportError, match="no sender any more"):
        duo.receiving.receive(timeout=0)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_new_link_restarts_the_background_reader_and_clears_the_lost_link_error(duo: Duo, noticed: bool) -> None:
    duo.sending.shutdown()
    while weightsync_threads():
        os.sched_yield()
    if noticed:
        with pytest.raises(TransportError):
            duo.receiving.receive(timeout=PATIENCE)
    ours, theirs = multiprocessing.Pipe()

    duo.receiving.get_receiver().register_worker_transport(theirs)
    with type(duo.sending)() as another:
        another.init_on_sender(model_id="policy", model=reader(9.0), pipes=[ours])
        another.connect(timeout=PATIENCE)

        assert duo.receiving.receive(timeout=PATIENCE)["mark"].tolist() == [9.0] * 64
        assert duo.model() == {9.0}
        duo.receiving.shutdown()  # before this, the reader may be closing the pipe that its sender has left
    ours.close()
    theirs.close()


def test_an_interrupt_while_connect_starts_the_reader_is_raised_and_connect_can_be_retried(
    scheme_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    duo, start = Duo(scheme_class), threading.Thread.start

    def start_interrupted(thread: threading.Thread) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        start(thread)

    duo.arrive()
    monkeypatch.setattr(threading.Thread, "start", start_interrupted)

    with pytest.raises(KeyboardInterrupt):
        duo.receiving.connect(worker_idx=0, timeout=PATIENCE)

    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        duo.receiving.connect(worker_idx=0, timeout=PATIENCE)
    assert duo.send(2.0, timeout=PATIENCE).ok
    duo.end()


def test_a_link_added_while_the_background_reader_is_ending_is_read(duo: Duo, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, ended, go_on, called = duo.receiving.get_receiver(), *(threading.Event() for _ in range(3))
    shipped = receiver.receive_and_apply_here

    def delayed() -> bool | None:
        called.set()
        try:
            return shipped()
        except TransportError:
            ended.set()
            assert go_on.wait(PATIENCE)
            raise

    monkeypatch.setattr(receiver, "receive_and_apply_here", delayed)
    receiver.driver.waker.fire()
    assert called.wait(PATIENCE), "the reader must be inside the delayed call"
    duo.sending.shutdown()
    assert ended.wait(PATIENCE)
    monkeypatch.undo()
    ours, theirs = multiprocessing.Pipe()
    receiver.register_worker_transport(theirs)
    go_on.set()
    with type(duo.sending)() as another:
        another.init_on_sender(model_id="policy", model=reader(9.0), pipes=[ours])
        another.connect(timeout=PATIENCE)

        assert duo.receiving.receive(timeout=PATIENCE)["mark"].tolist() == [9.0] * 64
        duo.receiving.shutdown()
    ours.close()
    theirs.close()


def test_a_waiting_receive_reads_the_next_version_itself_after_the_reader_is_stopped(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `connect` that fails stops the reader, for which a `receive` in another thread may be waiting."""
    receiver, waits = duo.receiving.get_receiver(), threading.Event()
    background, shipped = receiver._listening.background_reader, Background.wait_until
    assert isinstance(background, Background)

    def wait_until(*given: Any) -> bool:
        waits.set()
        return shipped(*given)

    monkeypatch.setattr(Background, "wait_until", wait_until)
    with beside(lambda: receiver.receive(PATIENCE)) as received:
        assert waits.wait(PATIENCE)
        background.stop()
        assert duo.send(2.0, timeout=PATIENCE).ok

    assert received == [True]
    assert duo.model() == {2.0}


def test_an_interrupted_stop_does_not_undo_a_concurrent_stop(
    duo: Duo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, joins, busy, go_on = duo.receiving.get_receiver(), *(threading.Event() for _ in range(3))
    background, shipped, join = (
        receiver._listening.background_reader,
        receiver.receive_and_apply_here,
        threading.Thread.join,
    )
    assert isinstance(background, Background)
    reading = background._thread

    def in_user_code() -> bool | None:
        busy.set()
        assert go_on.wait(PATIENCE)
        return shipped()

    def join_or_interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread is reading and threading.current_thread() is threading.main_thread():
            assert joins.wait(PATIENCE)
            raise KeyboardInterrupt
        if thread is reading:
            joins.set()
        join(thread, timeout)

    monkeypatch.setattr(receiver, "receive_and_apply_here", in_user_code)
    receiver.driver.waker.fire()
    assert busy.wait(PATIENCE)
    monkeypatch.setattr(threading.Thread, "join", join_or_interrupt)
    with beside(background.stop):
        with pytest.raises(KeyboardInterrupt):
            background.stop()
        go_on.set()

    assert not background.running
    assert "still runs your own code" not in caplog.text


def test_an_unexpected_reader_error_is_raised_by_receive_and_reported_to_the_trainer(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(self: Background) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Background, "_receive_once", attend)
        duo.receiving.get_receiver().driver.waker.fire()
        with pytest.raises(ZeroDivisionError, match="planted"):
            duo.receiving.receive(timeout=PATIENCE)

    with pytest.raises(WorkerLostError, match="ZeroDivisionError: planted"):
        duo.send(2.0, timeout=PATIENCE)


def test_an_unexpected_error_in_the_readers_wait_is_raised_by_receive(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(timeout: float | None, since: int) -> Any:
        raise ZeroDivisionError("planted")

    driver = duo.receiving.get_receiver().driver
    monkeypatch.setattr(driver, "wait", wait)
    driver.waker.fire()
    with pytest.raises(ZeroDivisionError, match="planted"):
        duo.receiving.receive(timeout=PATIENCE)


def test_a_transport_error_from_user_code_ends_the_background_reader_but_not_its_link(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(self: Background) -> None:
        raise TransportError("of a relay of the user's")

    receiver = duo.receiving.get_receiver()
    monkeypatch.setattr(Background, "_receive_once", attend)
    receiver.driver.waker.fire()
    with pytest.raises(TransportError, match="of a relay of the user's"):
        duo.receiving.receive(timeout=PATIENCE)

    while weightsync_threads():
        os.sched_yield()
    assert receiver.links()


def test_an_error_in_a_users_property_refuses_the_version_and_later_versions_are_applied(duo: Duo) -> None:
    receiver, model = duo.receiving.get_receiver(), duo.receiving.model

    class Holder:
        broken = True

        @property
        def policy(self) -> Any:
            if self.broken:
                raise RuntimeError("not now")
            return model

    holder = Holder()
    holder.broken = False
    receiver.set_context(holder, "policy")
    receiver.register_model("policy")
    duo.send(1.0, timeout=PATIENCE)
    holder.broken = True
    with pytest.raises(RefusedError, match="RuntimeError: not now"):
        duo.send(2.0, timeout=PATIENCE)

    holder.broken = False
    duo.send(3.0, timeout=PATIENCE)
    assert duo.model() == {3.0}


class Fragile(nn.Module):
    """A module whose extra state, once it is worn out, can be neither set nor restored."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), fill))
        self.extra, self.worn = fill, False

    def get_extra_state(self) -> float:
        return self.extra

    def set_extra_state(self, state: float) -> None:
        self.extra = state if not self.worn else -1.0
        if self.worn:
            raise RuntimeError("worn out")

    def forward(self) -> float:
        return self.extra


def test_a_swap_that_broke_half_way_makes_guarded_forwards_raise(scheme_class: Any) -> None:
    made = Duo(scheme_class, make=Fragile)
    made.connect()
    made.model.worn = True
    made.source.extra = 2.0

    report = made.sending.send(on_failure="report")

    assert report[0].kind is OutcomeKind.LOST
    with pytest.raises(WeightSyncError, match="serves nothing"):
        made.model()
    with pytest.raises(WeightSyncError, match="could not be undone"):
        made.receiving.receive(timeout=PATIENCE)
    assert made.receiving.get_receiver().version is None
    made.end()


def test_a_forked_child_has_no_background_reader_and_no_forward_hooks(duo: Duo) -> None:
    child = os.fork()
    if child == 0:
        fine = not duo.model._forward_hooks and duo.model() == {1.0} and weightsync_threads() == []
        os._exit(0 if fine and not duo.receiving.initialized_on_receiver else 1)
    _, status = os.waitpid(child, 0)

    assert status == 0
    assert duo.send(2.0).ok


# ----------------------------------------------------------------------------------------------- the model


def test_setting_an_equal_model_moves_the_forward_hooks_and_keeps_the_version(duo: Duo) -> None:
    another = copy.deepcopy(duo.model)

    duo.receiving.model = another

    assert not duo.model._forward_hooks
    assert len(another._forward_hooks) == 2  # the inert hook of the copy, and ours
    assert duo.receiving.get_receiver().version == 1
    assert duo.send(2.0).ok
    assert (duo.model(), another()) == ({1.0}, {2.0})


class RaisesSignalAtHook(Reader):
    """A model that raises SIGUSR1 while a hook is registered."""

    receiver: WeightReceiver

    def register_forward_pre_hook(self, *given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        assert self.receiver.state is not State.CLOSED, "the handler would wait for its own thread forever"
        return super().register_forward_pre_hook(*given, **named)


def test_a_signal_handler_may_close_the_receiver_while_register_model_moves_the_hooks(duo: Duo) -> None:
    receiver = duo.receiving.get_receiver()
    another, before = RaisesSignalAtHook(), signal.signal(signal.SIGUSR1, lambda *_: receiver.close())
    another.receiver = receiver
    try:
        receiver.register_model(another)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert receiver.state is State.CLOSED
    assert [len(model._forward_hooks) for model in (duo.model, another)] == [0, 0]
    assert not another._forward_pre_hooks


def test_a_newly_set_model_with_other_weights_serves_no_version_until_the_next_send(duo: Duo) -> None:
    duo.receiving.model = reader(5.0)

    assert duo.receiving.get_receiver().version is None
    assert duo.send(2.0).ok
    assert duo.receiving.get_receiver().version == 2


def test_a_copy_of_a_guarded_model_is_not_guarded() -> None:
    made = Duo(MultiProcessWeightSyncScheme, make=small)
    made.connect()
    for another in (copy.deepcopy(made.model), pickle.loads(pickle.dumps(made.model))):
        receiver = made.receiving.get_receiver()
        with receiver.serving():
            another.eval()(torch.zeros(1, 4))
        assert constants(another) == {1.0}
    assert filled(made.source, 2.0) is made.source
    assert made.sending.send().ok
    made.end()


def test_take_update_and_has_update_raise_while_the_background_reader_runs(duo: Duo) -> None:
    receiver = duo.receiving.get_receiver()
    for asked in (lambda: receiver.take_update(0.0), receiver.has_update):
        with pytest.raises(StateError, match="in the background and applies updates"):
            asked()

    assert duo.send(2.0).ok
    assert receiver.version == 2
