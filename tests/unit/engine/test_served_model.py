"""The model that a worker serves: when another model replaces it, and whether that model serves the version too."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair, constants, filled, large, small

from weightsync import (
    ConfigurationError,
    LayoutError,
    Loader,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    SharedMemWeightSyncScheme,
    StateError,
)
from weightsync.clock import Deadline
from weightsync.engine import background, serving_lock
from weightsync.engine.background import Background
from weightsync.engine.serving_lock import ServingLock, compiled_frame
from weightsync.weights.relay import Relay
from weightsync.weights.target import Target


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(partial(MultiProcessWeightSyncScheme, verify="digest"))
    yield made
    made.close()


def test_g2_a_model_with_the_workers_own_changes_does_not_serve_the_version_that_was_sent(pair: Pair) -> None:
    pair.sync()
    with torch.no_grad():
        pair.model[0].weight.fill_(7.0)
    pair.receiver.register_model(copy.deepcopy(pair.model))

    assert pair.receiver.version is None


def with_transposed_weight(fill: float = 0.0) -> torch.nn.Module:
    """A model with one weight whose dimensions lie in another order in memory."""
    model = large(fill)
    weight = model[0].weight
    weight.data = torch.rand(weight.shape).t().contiguous().t()
    return model


@pytest.mark.parametrize("verify", ["digest", "layout"])
def test_g2_a_copy_of_the_served_model_serves_the_version_in_any_memory_order(
    verify: str,
) -> None:
    pair = Pair(partial(MultiProcessWeightSyncScheme, verify=verify), model=with_transposed_weight)
    pair.receiver.register_model(large())
    pair.sync(pair.source)
    pair.receiver.register_model(copy.deepcopy(pair.receiver.model))
    assert pair.receiver.version == 1

    pair.receiver.register_model(torch.nn.Linear(5, 2))
    assert pair.receiver.version is None
    pair.close()


def test_a_relay_holds_the_tensors_as_they_were_sent_and_only_one_version(pair: Pair) -> None:
    relay = Relay()
    pair.receiver.register_model(relay)
    pair.sync(filled(pair.source, 2.0))

    assert {name: tensor.dtype for name, tensor in relay.items()} == {
        name: tensor.dtype for name, tensor in pair.source.state_dict().items()
    }
    assert set(relay["0.weight"].flatten().tolist()) == {2.0}

    before = weakref.ref(relay["0.weight"])
    pair.receiver.digest()
    pair.sync(filled(pair.source, 3.0))
    assert set(relay["0.weight"].flatten().tolist()) == {3.0}
    assert before() is None, "a relay keeps one version in memory"


def rejoined(pair: Pair, fill: float) -> Any:
    """Register another model in the worker, and give the worker a new link. Returns the model."""
    model = small(fill)
    pair.receiver.register_model(model)
    pair.pipes.append(multiprocessing.Pipe())
    ours, theirs = pair.pipes[-1]
    pair.sender.add_worker(0, ours)
    pair.receiver.register_worker_transport(theirs)
    return model


def test_g2_a_worker_that_rejoins_with_another_model_is_sent_the_latest_version_and_applies_it(pair: Pair) -> None:
    pair.sync()
    model = rejoined(pair, 7.0)
    pair.receiver.receive(timeout=PATIENCE)
    pair.sender.progress()

    assert (constants(model), pair.receiver.version, pair.sender.workers[0].served) == ({1.0}, 1, 1)


def test_g2_a_background_receive_reports_a_version_that_is_applied_again_after_a_rejoin(pair: Pair) -> None:
    pair.sync()
    pair.schemes[0].connect()
    model = rejoined(pair, 7.0)

    assert pair.receiver.receive(timeout=PATIENCE)
    assert constants(model) == {1.0}


def test_g2_a_model_replaced_before_its_version_was_passed_on_gets_the_version_again_on_rejoin(
    pair: Pair,
) -> None:
    passed_on: list[set[float]] = []
    beside = Background(pair.receiver, lambda: lambda: passed_on.append(constants(pair.receiver.model)))
    with pair.receiver.serving():
        beside.start()
        pair.sender.send_async()
        assert beside.wait_until(lambda: pair.receiver._served.staged is not None, Deadline(PATIENCE))
        pair.receiver.driver.lock.acquire()  # keeps the reader from passing on what the next forward swaps in
    pair.model(torch.ones(2, 4))
    assert (pair.receiver.version, pair.receiver.driver.deferring) == (1, True)
    model = rejoined(pair, 7.0)
    beside.mark_seen()
    pair.receiver.driver.lock.release()

    assert beside.receive(timeout=PATIENCE)
    assert beside.wait_until(lambda: bool(passed_on), Deadline(PATIENCE))
    assert (constants(model), passed_on) == ({1.0}, [{1.0}])


def test_a_version_that_a_forward_makes_live_while_the_reader_is_stopped_is_passed_on_and_acked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is stopped in this way when `connect` fails."""
    passed_on: list[int | None] = []
    reader = Background(pair.receiver, lambda: lambda: passed_on.append(pair.receiver.version))
    forwards_wait = contextlib.ExitStack()
    forwards_wait.enter_context(pair.receiver.serving())
    reader.start()
    thread = reader._thread
    assert thread is not None
    pair.sender.send_async()
    assert reader.wait_until(lambda: pair.receiver._served.staged is not None, Deadline(PATIENCE))
    shipped = thread.join

    def join(timeout: float) -> None:
        shipped(timeout)
        forwards_wait.close()
        pair.model(torch.ones(2, 4))
        assert (pair.receiver.version, pair.receiver.driver.deferring) == (1, True)

    monkeypatch.setattr(thread, "join", join)
    reader.stop()

    assert pair.sender.wait_async(timeout=PATIENCE).ok
    assert passed_on == [1]
    assert pair.sync().ok
    assert pair.receiver.version == 2


@pytest.mark.parametrize("before", [small(1.0), Loader(lambda weights, version: list(weights))])
def test_g2_a_loader_that_replaces_a_model_or_a_loader_serves_no_version(pair: Pair, before: Any) -> None:
    pair.receiver.register_model(before)
    pair.sync()
    loaded: list[int] = []
    pair.receiver.register_model(Loader(lambda weights, version: loaded.extend(version for _ in weights)))

    assert pair.receiver.version is None
    assert pair.sync().ok
    assert set(loaded) == {2}


@pytest.mark.parametrize("error", [ConfigurationError, LayoutError])
def test_g2_a_model_that_replaces_an_unreadable_model_serves_no_version(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(self: Target, layout: object) -> bytes:
        raise error("it is gone")

    pair = Pair(partial(MultiProcessWeightSyncScheme, verify="layout"))
    pair.sync()
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Target, "digest", digest)
        pair.receiver.register_model(small(1.0))
    assert pair.receiver.version is None
    assert pair.sync().ok
    pair.close()


@pytest.mark.parametrize(
    ("scheme", "mapped"), [(MultiProcessWeightSyncScheme, False), (SharedMemWeightSyncScheme, True)]
)
def test_a_model_keeps_its_memory_unless_its_scheme_maps_the_weights_into_it(scheme: Any, mapped: bool) -> None:
    pair = Pair(scheme, model=large)
    before, destination = pair.model[0].weight.data_ptr(), pair.receiver._served.destination()
    pair.sync()

    assert (pair.model[0].weight.data_ptr() != before) is mapped
    assert pair.receiver._served.destination() is destination
    pair.close()


def overwrite(weights: Iterator[tuple[str, torch.Tensor]], _: int) -> None:
    for _, tensor in weights:
        tensor.fill_(-99.0)


@pytest.mark.parametrize("scheme", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_g2_a_model_that_replaces_a_loader_serves_none_of_the_loaders_writes(scheme: Any) -> None:
    pair = Pair(scheme, model=large)
    pair.receiver.register_model(Loader(overwrite))
    for _ in range(4):
        pair.sync()
    model = large()
    pair.receiver.register_model(model)
    for fill in (5.0, 6.0, 7.0):
        filled(pair.source, fill)
        pair.sync()
        assert constants(model) == {fill}
    pair.close()


class Holder:
    """A worker's own object, which later gets the model as an attribute."""

    policy: Any


def test_concurrent_threads_get_the_same_target_of_a_model_by_path(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, begun, goes_on = Holder(), threading.Event(), threading.Event()
    pair.receiver.set_context(holder)
    pair.receiver.register_model("policy")
    holder.policy = small(0.0)
    made = Target.__init__

    def slow(self: Target, *args: Any) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)
        made(self, *args)

    with monkeypatch.context() as slowed, ThreadPoolExecutor(2) as threads:
        slowed.setattr(Target, "__init__", slow)
        first = threads.submit(pair.receiver.target)
        assert begun.wait(PATIENCE)
        second = threads.submit(pair.receiver.target)
        goes_on.set()

        assert first.result(PATIENCE) is second.result(PATIENCE)


def test_a_model_is_found_at_its_path_while_another_thread_is_inside_serving(pair: Pair) -> None:
    holder = Holder()
    pair.receiver.set_context(holder)
    pair.receiver.register_model("policy")
    holder.policy = small(0.0)
    with ThreadPoolExecutor(1) as thread, pair.receiver.serving():
        assert thread.submit(pair.receiver.target).result(PATIENCE).destination is holder.policy
        thread.submit(pair.sender.send_async).result(PATIENCE)
        assert not thread.submit(pair.receiver.receive).result(PATIENCE)  # the swap waits for this serving block to end

    assert pair.receiver.receive()
    assert pair.sender.wait_async(timeout=PATIENCE).ok


def test_g3_a_forward_that_began_unguarded_ends_no_serving_block_around_it(pair: Pair) -> None:
    receiver = pair.receiver
    receiver.begin_serving(None)
    receiver.end_forward()
    assert receiver.serves_here
    receiver.end_serving()
    assert not receiver.serves_here
    receiver.end_forward()


class Guarding:
    """A background reader that only records the models that it is to guard."""

    def __init__(self) -> None:
        self.guarded: list[Any] = []

    def model_set(self, model: Any) -> None:
        self.guarded.append(model)


def test_g3_a_background_reader_guards_each_newly_served_model(pair: Pair) -> None:
    guarding, holder, first = Guarding(), Holder(), small(0.0)
    pair.receiver.set_background_reader(guarding)  # type: ignore[arg-type]
    pair.receiver.set_context(holder)
    pair.receiver.register_model(first)
    pair.receiver.register_model("policy")
    holder.policy = small(0.0)
    pair.receiver.target()

    assert guarding.guarded == [first, "policy", holder.policy]
    pair.receiver.set_background_reader(None)


def test_receive_without_a_registered_model_raises_before_anything_is_read() -> None:
    ours, theirs = multiprocessing.Pipe()
    with MultiProcessWeightSyncScheme() as worker, ours, theirs:
        receiver = worker.create_receiver()
        receiver.register_worker_transport(theirs)

        with pytest.raises(ConfigurationError, match="no model is registered for"):
            receiver.receive()


def test_the_frame_of_a_compiled_call_is_the_first_outside_the_callers_module() -> None:
    elsewhere: dict[str, Any] = {}  # code without a module
    exec("import sys\ndef call(function): return function(), sys._getframe()", elsewhere)

    def hook() -> FrameType:
        return compiled_frame()

    found, called_from = elsewhere["call"](hook)

    assert found is called_from


def test_threads_that_serve_without_a_pause_do_not_starve_receive(pair: Pair) -> None:
    inside, ended = threading.Barrier(3), threading.Event()

    def serve() -> list[set[float]]:
        seen = []
        inside.wait(PATIENCE)
        while not ended.is_set():
            with pair.receiver.serving():
                before = constants(pair.model)
                ended.wait(0.005)
                seen.append(before | constants(pair.model))
        return seen

    pair.sync()
    with ThreadPoolExecutor(2) as pool:
        serving = [pool.submit(serve) for _ in range(2)]
        inside.wait(PATIENCE)
        try:
            for fill in range(2, 12):
                pair.sender.send_async(filled(pair.source, float(fill)))
                assert pair.receiver.receive(PATIENCE)
                assert pair.sender.wait_async(timeout=PATIENCE).ok
        finally:
            ended.set()

    assert all(len(values) == 1 for each in serving for values in each.result())


def test_a_long_serving_block_delays_forwards_of_other_threads_only_for_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    shipped = ServingLock.patience

    def patience(lock: ServingLock) -> float:
        waits.append(shipped(lock))
        return waits[-1]

    monkeypatch.setattr(serving_lock, "PATIENCE", 0.2)
    monkeypatch.setattr(serving_lock, "_PERIOD", float("inf"))
    monkeypatch.setattr(ServingLock, "patience", patience)
    ours, theirs = multiprocessing.Pipe()
    model = small(0.0)
    with MultiProcessWeightSyncScheme() as trainer, MultiProcessWeightSyncScheme() as worker:
        trainer.init_on_sender("policy", pipes=[ours], model=small(1.0))
        worker.init_on_worker("policy", pipe=theirs, model=model)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(worker.connect)
            trainer.connect()
            connecting.result(PATIENCE)
            receiver = worker.get_receiver()
            block = receiver.serving()
            pool.submit(block.__enter__).result(PATIENCE)
            trainer.get_sender().send_async(small(2.0))
            while receiver._served.staged is None:
                time.sleep(0.001)
            for _ in range(20):
                model(torch.ones(2, 4))
            block.__exit__(None, None, None)
            assert trainer.get_sender().wait_async(timeout=PATIENCE).ok

    assert waits[0] > 0
    assert waits[4:20] == [0.0] * 16
    assert constants(model) >= {2.0}


class Hooked(torch.nn.Linear):
    """A model that calls a function once, where its extra state is set."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__(2, 2)
        filled(self, fill)
        self.call: Callable[[], None] | None = None

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        call, self.call = self.call, None
        if call is not None:
            call()


@pytest.mark.parametrize("asked", ["apply_weights", "register_model"])
def test_a_hook_that_applies_weights_or_registers_a_model_during_an_apply_is_refused(asked: str) -> None:
    pair = Pair(MultiProcessWeightSyncScheme, model=Hooked)
    assert pair.sync().ok
    pair.model.call = lambda: getattr(pair.receiver, asked)(Hooked(7.0))

    pair.sender.send_async(Hooked(2.0))
    pair.receiver.receive()
    report = pair.sender.wait_async(on_failure="report")

    assert report[0].kind is OutcomeKind.REFUSED
    assert f"{asked}(): this thread is applying weights" in report[0].reason
    assert (constants(pair.model), pair.receiver.version) == ({1.0}, 1)
    assert pair.sync(Hooked(3.0)).ok
    assert constants(pair.model) == {3.0}
    pair.close()


def test_a_serving_block_whose_exit_is_interrupted_holds_back_no_version(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(self: ServingLock, entry: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(ServingLock, "leave", leave)
        with contextlib.suppress(KeyboardInterrupt), pair.receiver.serving():
            pass

    assert pair.sync().ok
    assert not pair.receiver.serves_here


def test_an_interrupted_forward_holds_back_no_version_of_a_background_reader(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch calls no forward hook after an interrupt, so no hook wakes the reader."""
    monkeypatch.setattr(background, "PATIENCE", 0.01)
    reader = Background(pair.receiver, lambda: None)
    reader.start()

    def interrupt(*_: object) -> None:
        pair.sender.send_async()
        assert reader.wait_until(lambda: pair.receiver._served.staged is not None, Deadline(PATIENCE))
        raise KeyboardInterrupt

    pair.model[1].register_forward_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        pair.model(torch.ones(2, 4))

    assert pair.sender.wait_async(timeout=PATIENCE / 2).ok


def test_a_receiver_whose_close_was_interrupted_during_a_hook_keeps_receiving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: sends to such a receiver timed out without a reason."""

    class Slow(torch.nn.Linear):
        begun, may_end = threading.Event(), threading.Event()

        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)

    def interrupt(timeout: float) -> None:
        raise KeyboardInterrupt

    pair = Pair(MultiProcessWeightSyncScheme, model=lambda _=0.0: Slow(4, 2))
    reader = Background(pair.receiver, lambda: None)
    reader.start()
    pair.sender.send_async()
    assert Slow.begun.wait(PATIENCE)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(reader._thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.receiver.close()
    Slow.may_end.set()

    for _ in range(2):
        assert pair.sender.wait_async(timeout=PATIENCE / 2).ok
        pair.sender.send_async()
    pair.close()


@pytest.mark.parametrize("where", ["the same thread", "another thread"])
def test_g3_a_serving_block_keeps_its_version_although_an_earlier_block_ends_first(pair: Pair, where: str) -> None:
    """Serving blocks need not be nested: tasks of asyncio overlap, and another thread may end a generator."""
    pair.sync(filled(pair.source, 1.0))
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as first:
        if where == "the same thread":
            first.enter_context(pair.receiver.serving())
        else:
            pool.submit(first.enter_context, pair.receiver.serving()).result(PATIENCE)
        with pair.receiver.serving():
            first.close()
            pair.sender.send_async(filled(pair.source, 2.0))
            assert not pool.submit(pair.receiver.receive, 0.1).result(PATIENCE)
            assert constants(pair.model) == {1.0}
        assert pair.receiver.receive(PATIENCE)
        assert pair.sender.wait_async().ok
    assert constants(pair.model) == {2.0}


def test_a_receive_that_waits_for_a_serving_block_raises_when_the_receiver_is_closed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.engine.receiver.PATIENCE", 10 * PATIENCE)
    pair.sync()
    pair.sender.send_async(filled(pair.source, 2.0))
    with ThreadPoolExecutor(1) as pool, pair.receiver.serving():
        receiving = pool.submit(pair.receiver.receive, None)
        while not pair.receiver._served.serving._queued:
            time.sleep(0.001)
        pair.receiver.close()
        with pytest.raises(StateError):
            receiving.result(PATIENCE)

    assert pair.receiver._served.serving._queued == 0


@pytest.mark.parametrize("by_hand", [False, True])
def test_weights_that_wait_for_a_serving_block_go_into_the_newly_registered_model(pair: Pair, by_hand: bool) -> None:
    """Otherwise the receiver would claim that the new model serves a version which it does not hold."""
    pair.sender.send_async()
    taken = pair.receiver.take_update(PATIENCE)
    weights, expected = (large(7.0).state_dict(), {7.0}) if by_hand else (taken, {1.0})
    model = large(3.0) if by_hand else small(3.0)
    with ThreadPoolExecutor() as pool, pair.receiver.serving():
        applying = pool.submit(pair.receiver.apply_weights, weights)
        while not pair.receiver._served.serving._queued:
            assert not applying.done()
            time.sleep(0.001)
        pair.receiver.register_model(model)
    applying.result()

    assert constants(model) == expected
    assert pair.receiver.version == (None if by_hand else 1)


def test_a_version_that_fits_only_a_concurrently_registered_model_is_applied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = pair.receiver._served
    find, model = served.destination, large()

    def find_and_register() -> Target:
        monkeypatch.undo()
        found = find()
        pair.receiver.register_model(model)
        return found

    assert pair.sync().ok
    pair.scheme.model = large(2.0)
    pair.sender.send_async()
    monkeypatch.setattr(served, "destination", find_and_register)

    assert pair.receiver.receive(PATIENCE)
    assert pair.sender.wait_async().ok
    assert constants(model) == {2.0}
