"""How worker processes start: Ctrl-C does not reach them meanwhile, and what a failed start says."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import group_workers as workers
import pytest
from group_worlds import Make
from torch import nn

from weightsync import TransportError, Worker, WorkerFailedError, WorkerGroup
from weightsync.group import process as group_process


def blocks_sigint(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, mask = line.partition(":")
        if name == "SigBlk":
            return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)
    raise AssertionError(f"process {pid} has no SigBlk")


def put_mask(worker: Worker) -> None:
    worker.put((signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGINT)))


def test_ctrl_c_does_not_reach_workers_that_still_import(model: nn.Module) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with WorkerGroup(workers.act, model, 1, ctx=multiprocessing.get_context("spawn")) as group:
        (process,) = group.processes.values()
        blocked = blocks_sigint(process.pid)
        group.close(timeout=0)

    assert blocked
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_worker_whose_function_runs_ignores_ctrl_c_and_blocks_nothing(model: nn.Module) -> None:
    with WorkerGroup(put_mask, model, 1, ctx=multiprocessing.get_context("fork")) as group:
        (result,) = group.results()

    assert result.value == (set(), signal.SIG_IGN)


def test_a_users_own_fork_server_keeps_its_signals(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_process, "without_interrupts", lambda: pytest.fail("the fork server may start in there"))
    with make(workers.act) as group:
        group.close(timeout=0)


@pytest.mark.parametrize(
    ("file", "spec"),
    [(None, None), ("<stdin>", None), (__file__, "__main__"), (__file__, "a_package.__main__")],
    ids=["notebook", "stdin", "folder or zip file", "package"],
)
def test_a_worker_that_cannot_import_the_program_is_told_where_to_put_what_it_needs(
    make: Make, file: str | None, spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("__main__")
    if file is not None:
        program.__file__ = file
    if spec is not None:
        program.__spec__ = ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    with (
        make(workers.act, make_model=workers.ends_at_once) as group,
        pytest.raises(
            WorkerFailedError,
            match=r"before it had started.*a notebook or at a prompt, or in the __main__\.py .*: put run=.*module",
        ),
    ):
        list(group.results())


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EAGAIN, "ulimit -u"), (errno.EMFILE, "ulimit -n 4096"), (errno.ENOMEM, "Free memory")],
    ids=["processes", "descriptors", "memory"],
)
@pytest.mark.parametrize("call", ["fork", "memfd_create"])
def test_a_start_that_the_system_refuses_names_the_limit(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, call: str, number: int, remedy: str
) -> None:
    what = {"fork": "Worker 0", "memfd_create": "The group"}[call]

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    group = WorkerGroup(workers.act, model, 1, ctx=multiprocessing.get_context("fork"))
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(TransportError) as caught:
        group.start()

    assert str(caught.value).startswith(f"{what} cannot be started: {os.strerror(number)}. ")
    assert remedy in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)


def test_another_error_of_the_start_stays_as_it_is(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(PermissionError, match="not here"):
        WorkerGroup(workers.act, model, 1, ctx=multiprocessing.get_context("fork")).start()


def test_a_process_that_cannot_be_watched_is_ended(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def refuse(pid: int, _started: int) -> None:
        pids.append(pid)
        raise TransportError(f"Process {pid} cannot be watched: Operation not permitted.")

    monkeypatch.setattr(group_process, "watching", refuse)
    with pytest.raises(TransportError, match="cannot be watched"):
        WorkerGroup(workers.act, model, 1, ctx=multiprocessing.get_context("spawn")).start()

    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
