"""In a forked child each holder forgets what it holds: once, and again in the child's own children."""

from __future__ import annotations

import gc
import os
from weakref import WeakSet

import pytest

from weightsync.engine import copies
from weightsync.transports import process, sealing
from weightsync.transports.pipe import connection
from weightsync.transports.process import PerProcess


class Holder:
    """Registers itself again, as what lives on in the child does."""

    def __init__(self, again: bool) -> None:
        self.again, self.forgotten = again, 0
        process.forget_after_fork(self)

    def forget(self) -> None:
        self.forgotten += 1
        if self.again:
            process.forget_after_fork(self)


def test_each_holder_forgets_once_a_fork_and_again_if_it_registers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    once, always, gone = Holder(again=False), Holder(again=True), Holder(again=True)
    del gone
    gc.collect()

    process._forget_all()
    assert (once.forgotten, always.forgotten, len(process._inherited)) == (1, 1, 1)
    process._forget_all()
    assert (once.forgotten, always.forgotten) == (1, 2)


def test_what_a_process_has_begins_anew_in_a_child_and_in_its_own_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    begun: list[PerProcess] = []

    class Kept(PerProcess):
        def _begin(self) -> None:
            begun.append(self)

    kept = Kept()
    for times in (2, 3):
        process._forget_all()
        assert begun == [kept] * times


def test_it_is_the_child_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    holder = Holder(again=False)
    child = os.fork()
    if child == 0:
        os._exit(holder.forgotten)
    _, status = os.waitpid(child, 0)

    assert (os.waitstatus_to_exitcode(status), holder.forgotten) == (1, 0)


@pytest.mark.parametrize(
    "kept", [connection._channels, sealing._known, copies._open_at_exit], ids=lambda kept: type(kept).__name__
)
def test_a_child_that_is_forked_while_another_thread_looks_something_up_waits_for_nobody(kept: PerProcess) -> None:
    with kept._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if kept._lock.acquire(blocking=False) else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
