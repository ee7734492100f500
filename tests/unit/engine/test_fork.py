"""In a forked child each holder forgets what it holds: once, and again in the child's own children."""

from __future__ import annotations

import gc
import os
from weakref import WeakSet

import pytest

from weightsync.transports import process


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


def test_it_is_the_child_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    holder = Holder(again=False)
    child = os.fork()
    if child == 0:
        os._exit(holder.forgotten)
    _, status = os.waitpid(child, 0)

    assert (os.waitstatus_to_exitcode(status), holder.forgotten) == (1, 0)
