"""After a fork, the child tells each inherited holder once to forget its resources, as do the child's own children."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from fleet import PATIENCE, SCHEMES, Pair, constants, filled, large, small
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, TransportError
from weightsync.engine import copies, forks
from weightsync.engine.background import Background
from weightsync.transports import process, sealing
from weightsync.transports.calls import client, server_link
from weightsync.transports.pipe import connection
from weightsync.transports.process import PerProcess
from weightsync.transports.store import link as store_link


class Holder:
    """A holder that counts calls of `forget`, and may register itself again, as an object that the child uses does."""

    def __init__(self, again: bool) -> None:
        self.again, self.forgotten = again, 0
        process.forget_after_fork(self)

    def forget(self) -> None:
        self.forgotten += 1
        if self.again:
            process.forget_after_fork(self)


def test_each_holder_forgets_once_per_fork_and_again_only_if_it_registers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    once, always, gone = Holder(again=False), Holder(again=True), Holder(again=True)
    del gone
    gc.collect()

    process._forget_all()
    assert (once.forgotten, always.forgotten, len(process._inherited)) == (1, 1, 1)
    process._forget_all()
    assert (once.forgotten, always.forgotten) == (1, 2)


class FailsAtFirst(Holder):
    """A holder whose first `forget` fails: no descriptor is free until the other holders have closed theirs."""

    def forget(self) -> None:
        super().forget()
        if self.forgotten == 1:
            raise TransportError("No file descriptor to wait on: Too many open files.")


def test_all_holders_forget_although_one_finds_no_descriptor_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    holders = [Holder(again=False), FailsAtFirst(again=False), Holder(again=False)]

    process._forget_all()

    assert [holder.forgotten for holder in holders] == [1, 2, 1]


def test_per_process_state_begins_anew_in_a_child_and_in_a_grandchild(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    begun: list[PerProcess] = []

    class Kept(PerProcess):
        def _begin(self) -> None:
            begun.append(self)

    kept = Kept()
    for times in (2, 3):
        process._forget_all()
        assert begun == [kept] * times


def test_holders_forget_in_the_child_and_not_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    holder = Holder(again=False)
    child = os.fork()
    if child == 0:
        os._exit(holder.forgotten)
    _, status = os.waitpid(child, 0)

    assert (os.waitstatus_to_exitcode(status), holder.forgotten) == (1, 0)


def _fails(*_: object, **__: object) -> None:
    raise TransportError("no descriptor is left")


#: Incomplete links: a module, the name in it that fails when called, and a function that makes the link.
UNFINISHED: dict[str, tuple[object, str, Callable[[], object]]] = {
    "over a store": (
        store_link,
        "LinkThreads",
        lambda: store_link.StoreLink(STORE, "0", WORKER, GUARD),
    ),
    "of calls": (client, "LinkPosition", lambda: client.CallLink(CALLS, "worker 0")),
    "of a call server": (server_link, "MappedPlaces", lambda: server_link.CallServerLink("the trainer")),
}
STORE: Any = SimpleNamespace(rank=1, hints=None, backend="gloo")
WORKER: Any = SimpleNamespace(peer="worker 0")
CALLS: Any = None
GUARD: Any = None


@pytest.mark.parametrize(("module", "name", "make"), UNFINISHED.values(), ids=UNFINISHED)
def test_a_child_forgets_all_holders_although_a_link_was_incomplete_at_the_fork(
    module: object, name: str, make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread was constructing the link, or the construction failed and the kept error refers to the link."""
    monkeypatch.setattr(process, "_inherited", WeakSet())
    monkeypatch.setattr(module, name, _fails)
    holders = [Holder(again=False) for _ in range(8)]
    with pytest.raises(TransportError) as caught:
        make()

    process._forget_all()

    assert caught.traceback  # the frames of the traceback hold the link
    assert [holder.forgotten for holder in holders] == [1] * len(holders)


@pytest.mark.parametrize(
    "kept", [connection._channels, sealing._digest_cache, copies._closed_at_exit], ids=lambda kept: type(kept).__name__
)
def test_locks_held_by_another_thread_at_the_fork_are_free_in_the_child(kept: PerProcess) -> None:
    with kept._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if kept._lock.acquire(blocking=False) else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


class Child:
    """A forked child that reports the weights of its copy of a model when it is asked."""

    def __init__(self, model: nn.Module) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if theirs.poll(PATIENCE):
                    theirs.recv()
                    theirs.send(constants(model))
            finally:
                os._exit(0)

    def weights(self) -> set[float]:
        self._ours.send("tell")
        found: set[float] = self._ours.recv() if self._ours.poll(PATIENCE) else set()
        os.waitpid(self.pid, 0)
        return found


@pytest.mark.parametrize("scheme_class", SCHEMES.values(), ids=SCHEMES)
def test_g3_a_forked_child_keeps_the_version_that_was_served(scheme_class: type) -> None:
    """The trainer refills a slot once the parent has acked a newer version; it does not ask the child."""
    pair = Pair(scheme_class, model=large)
    pair.sync(filled(pair.source, 1.0))
    child = Child(pair.model)
    for fill in (2.0, 3.0, 4.0):
        assert pair.sync(filled(pair.source, fill)).ok

    assert child.weights() == {1.0}
    assert constants(pair.model) == {4.0}
    pair.close()


@pytest.mark.parametrize(("model", "moves"), [(small, False), (large, True)], ids=["inline", "slot"])
def test_a_fork_moves_parameters_out_of_a_slot_and_no_others(model: Callable[[float], nn.Module], moves: bool) -> None:
    pair = Pair(SharedMemWeightSyncScheme, model=model)
    for fill in (1.0, 2.0):
        assert pair.sync(filled(pair.source, fill)).ok
    before = next(pair.model.parameters()).data_ptr()

    assert forked(lambda: None) == 0
    assert (next(pair.model.parameters()).data_ptr() != before) is moves
    assert pair.sync(filled(pair.source, 3.0)).ok
    assert constants(pair.model) == {3.0}
    pair.close()


def test_a_fork_without_memory_for_one_model_logs_a_remedy_and_keeps_the_other_models(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Pair(SharedMemWeightSyncScheme, model=large) for _ in range(2))
    for pair in (first, second):
        pair.sync(filled(pair.source, 1.0))

    def full() -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(first.receiver.target(), "leave", full)
        child = Child(second.model)
    for fill in (2.0, 3.0, 4.0):
        assert second.sync(filled(second.source, fill)).ok

    assert child.weights() == {1.0}
    assert "In the child, load its weights again before you use it" in caplog.text
    assert first.sync(filled(first.source, 2.0)).ok
    first.close()
    second.close()


class Waiting(nn.Module):
    """A model whose swap stops halfway, where its extra state is set, until the test lets it go on."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.layers = large(fill)
        self.swapping, self.go_on = threading.Event(), threading.Event()

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        self.swapping.set()
        assert self.go_on.wait(PATIENCE)


def test_g3_a_process_forks_before_or_after_a_swap_but_not_during_one() -> None:
    pair = Pair(MultiProcessWeightSyncScheme, model=Waiting)
    pair.sender.send_async(filled(pair.source, 2.0))
    with ThreadPoolExecutor(2) as pool:
        receiving = pool.submit(pair.receiver.receive, PATIENCE)
        assert pair.model.swapping.wait(PATIENCE)
        forking = pool.submit(Child, pair.model.layers)
        with pytest.raises(TimeoutError):
            forking.result(0.2)
        pair.model.go_on.set()
        assert receiving.result(PATIENCE)
        assert forking.result(PATIENCE).weights() == {2.0}
    pair.close()


def test_g3_a_model_leaves_its_slot_before_a_fork_once_forwards_in_other_threads_have_ended() -> None:
    """Forwards read the parameters' addresses, shapes and storages, which change one by one as the model leaves."""
    pair = Pair(SharedMemWeightSyncScheme, model=large)
    pair.sync(filled(pair.source, 1.0))
    with ThreadPoolExecutor(1) as pool:
        with pair.receiver.serving():
            forking = pool.submit(Child, pair.model)
            with pytest.raises(TimeoutError):
                forking.result(0.2)
            assert pair.receiver.target().in_slot
        child = forking.result(PATIENCE)
    for fill in (2.0, 3.0, 4.0):
        assert pair.sync(filled(pair.source, fill)).ok

    assert child.weights() == {1.0}
    pair.close()


def test_a_fork_that_a_forward_waits_for_leaves_its_parameters_in_place_and_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forks, "FORK_PATIENCE", 0.1)
    pair = Pair(SharedMemWeightSyncScheme, model=large)
    pair.sync(filled(pair.source, 1.0))
    with pair.receiver.serving():
        assert in_a_thread(lambda: forked(lambda: None)) == [0]
        assert pair.receiver.target().in_slot
    assert "In the child, load its weights again before you use it" in caplog.text
    assert pair.sync(filled(pair.source, 2.0)).ok
    pair.close()


def test_a_fork_does_not_shorten_how_long_forwards_give_way_to_the_next_version() -> None:
    pair = Pair(SharedMemWeightSyncScheme, model=large)
    pair.sync(filled(pair.source, 1.0))
    lock = pair.receiver._served.serving
    lock.patience()  # as a forward does that gives way

    assert forked(lambda: None) == 0
    assert lock._queued_since is None
    pair.close()


def test_g10_a_version_that_a_background_reader_gets_during_a_fork_goes_live_after_it() -> None:
    """No forward follows that would swap the version in."""
    pair = Pair(MultiProcessWeightSyncScheme)
    reader = Background(pair.receiver, lambda: None)
    forks.forks.before()
    reader.start()
    pair.sender.send_async(filled(pair.source, 2.0))
    while pair.receiver._served.staged is None:
        time.sleep(0.01)
    time.sleep(0.1)  # give the reader time to start waiting
    forks.forks.after()

    report = pair.sender.wait_async(timeout=PATIENCE / 2, on_failure="report")
    reader.stop()
    pair.close()
    assert report.ok


def ended(child: int) -> int | None:
    """Wait for a child. Returns its exit code, or None if it hung and was killed."""
    watch = process.ProcessWatch(child, 0)
    hung = not watch._dies_within(int(PATIENCE * 1000))
    watch.close()
    if hung:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if hung else os.waitstatus_to_exitcode(status)


def forked(work: Callable[[], object]) -> int | None:
    """Fork a child that calls ``work``. Returns what `ended` does."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return ended(child)


def in_a_thread(work: Callable[[], object]) -> list[object]:
    """Call ``work`` in a thread. Returns a list with its result, or an empty list if it did not return."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found


def test_a_swap_whose_hook_waits_for_a_fork_in_another_thread_does_not_deadlock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(forks, "FORK_PATIENCE", 0.1)
    found: list[object] = []

    class Forking(Waiting):
        def set_extra_state(self, state: int) -> None:
            found.extend(in_a_thread(lambda: forked(lambda: None)))

    pair = Pair(SharedMemWeightSyncScheme, model=Forking)
    assert in_a_thread(lambda: pair.sync(filled(pair.source, 2.0)).ok) == [True]
    assert found == [0]
    assert "may hold parts of two versions" in caplog.text
    pair.close()


def test_a_signal_handler_can_fork_while_its_thread_begins_or_ends_a_forward() -> None:
    pair = Pair(SharedMemWeightSyncScheme, model=large)
    pair.sync(filled(pair.source, 1.0))

    def interrupted() -> int | None:
        with pair.receiver._served.serving._lock:  # held when the signal handler interrupts the thread
            return forked(lambda: None)

    assert in_a_thread(interrupted) == [0]
    assert not pair.receiver._served.serving._serving
    assert pair.sync(filled(pair.source, 2.0)).ok
    pair.close()


def test_a_forked_child_can_use_torch_threads_without_hanging() -> None:
    """With GNU OpenMP, a child that uses several threads hangs if the thread that forked it had done so before."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    pair = Pair(SharedMemWeightSyncScheme, model=lambda fill: filled(nn.Linear(1000, 1000), fill))
    pair.arrival = PATIENCE
    try:
        pair.sync(filled(pair.source, 1.0))
        assert in_a_thread(lambda: forked(lambda: torch.ones(1 << 20))) == [0]
    finally:
        torch.set_num_threads(before)
    pair.close()
