"""How worker processes start: Ctrl-C does not reach them meanwhile, and a failed start names its cause."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import signal
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import group_workers as workers
import pytest
from descriptor_limit import limit_descriptors
from fleet import descriptors, opened_since
from group_worlds import Make
from torch import nn

from weightsync import (
    OnStale,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
    TransportError,
    Worker,
    WorkerFailedError,
    WorkerGroup,
)
from weightsync.group import process as group_process
from weightsync.group.actors import ActorLauncher
from weightsync.group.launcher import AtExit, GroupArguments
from weightsync.group.process import ProcessLauncher
from weightsync.group.steps import Staleness


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


def test_a_running_worker_ignores_ctrl_c_and_blocks_no_signals(make: Make) -> None:
    with make(put_mask) as group:
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
def test_the_error_for_a_worker_that_cannot_import_the_program_advises_a_module(
    make: Make, file: str | None, spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("__main__")
    if file is not None:
        program.__file__ = file
    if spec is not None:
        program.__spec__ = ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    with (
        make(workers.act, make_model=workers.exit_at_once) as group,
        pytest.raises(
            WorkerFailedError,
            match=r"before it had started.*a notebook or at a prompt, or in the __main__\.py .*: put run=.*module",
        ),
    ):
        list(group.results())


def model_of_the_program(monkeypatch: pytest.MonkeyPatch, program: str) -> nn.Module:
    """A model whose class is defined in a program that no other process can import."""
    monkeypatch.setitem(sys.modules, program, module := ModuleType(program))
    exec("from torch import nn\n\nclass Policy(nn.Linear): ...", vars(module))
    made: nn.Module = vars(module)["Policy"](1, 1, bias=False)
    return made


def test_a_model_whose_class_a_worker_cannot_import_fails_with_advice_to_use_a_module(
    forkserver: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = r"No module named 'notebook_of_weightsync'\): put the model's class into a module"
    model = model_of_the_program(monkeypatch, "notebook_of_weightsync")
    with (
        WorkerGroup(workers.act, model, 1, ctx=forkserver) as group,
        pytest.raises(WorkerFailedError, match=told),
    ):
        list(group.results())


def test_actors_get_a_model_whose_class_is_defined_in_the_main_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of_the_program(monkeypatch, "__main__")
    asked = GroupArguments(workers.act, model, 1, None, "policy", 2, 0, Staleness(None, OnStale.BLOCK), None, None)
    plan = ActorLauncher(RayWeightSyncScheme(), asked)._plan
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # as in an actor, a program of Ray's

    made = pickle.loads(pickle.dumps(plan)).make_model()
    assert (type(made).__name__, made.weight.is_meta) == ("Policy", True)


def test_a_forked_child_closes_its_copies_of_the_trainers_ends_of_the_pipes(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a forked worker would hold its own pipe open, and not notice that the trainer has died."""
    asked = GroupArguments(workers.act, model, 1, None, "policy", 2, 0, Staleness(None, OnStale.BLOCK), None, None)
    launcher = ProcessLauncher(SharedMemWeightSyncScheme(), asked)
    monkeypatch.setattr(group_process, "WorkerProcess", lambda _context, _job, dumps: SimpleNamespace(handle=dumps))
    launcher.open()
    launched = launcher.launch(0, 0)
    launched.watched.close()
    launched.running.channel.close()
    assert not launched.endpoint.closed

    launcher.forget()

    assert launched.endpoint.closed


def test_start_does_not_wait_for_workers_to_read_their_function(make: Make, tmp_path: Path) -> None:
    """Regression: with a function larger than a pipe, each start waited, deaf to Ctrl-C, for the import of torch."""
    path = tmp_path / "the group has started"
    with make(partial(workers.act_with, (workers.Late(str(path)), bytes(1 << 20)))) as group:
        path.touch()
        assert next(group.results()).value == 1.0


@pytest.mark.untraced("counts descriptors, and a recording has one")
@pytest.mark.parametrize(("left", "worker"), [(0, 0), (12, 0), (26, 1)])
def test_start_without_free_descriptors_names_the_limit_to_raise_and_leaks_nothing(
    make: Make, left: int, worker: int
) -> None:
    with make(workers.act) as group:  # open what is opened only once
        group.close(timeout=0)
    gc.collect()
    before = descriptors()
    group = make(workers.act, 3)
    said = rf"^worker {worker} cannot be started: too few are left of the \d+ file descriptors .* \(`ulimit -n`\)"
    with pytest.raises(TransportError, match=said) as caught, limit_descriptors(left):
        group.start()

    assert isinstance(caught.value.__cause__, OSError)
    assert opened_since(before) == {}
    assert not group.processes


@pytest.mark.untraced("counts descriptors, and a recording has one")
@pytest.mark.parametrize("left", [3, 5, 7])
def test_descriptors_opened_for_a_worker_are_closed_if_they_run_out_during_its_start(
    make: Make, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may take the last descriptors."""
    monkeypatch.setattr(group_process, "_require_descriptors", lambda *_: None)
    with make(workers.act) as group:
        group.close(timeout=0)
    gc.collect()
    before = descriptors()
    group = make(workers.act)
    with pytest.raises(TransportError, match="worker 0 cannot be started"), limit_descriptors(left):
        group.start()
    gc.collect()

    assert opened_since(before) == {}


@pytest.mark.untraced("counts descriptors, and a recording has one")
def test_an_interrupt_during_the_check_for_free_descriptors_leaks_none(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    def interrupted() -> tuple[int, int]:
        monkeypatch.setattr(os, "pipe", pipe)
        found = pipe()
        signal.raise_signal(signal.SIGUSR1)
        return found

    with make(workers.act) as group:  # open what is opened only once
        group.close(timeout=0)
    gc.collect()
    descriptors_before, pipe = descriptors(), os.pipe
    monkeypatch.setattr(os, "pipe", interrupted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            make(workers.act).start()
    finally:
        signal.signal(signal.SIGUSR1, before)
    gc.collect()

    assert opened_since(descriptors_before) == {}


def test_a_process_that_cannot_be_watched_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def unwatched(pid: int, _: int) -> NoReturn:
        started.append(pid)
        raise TransportError(f"Process {pid} cannot be watched: Too many open files.")

    monkeypatch.setattr(group_process, "watching", unwatched)
    with pytest.raises(TransportError, match="cannot be watched"):
        make(workers.act).start()

    assert not Path(f"/proc/{started[0]}").exists()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EAGAIN, r"Resource temporarily unavailable\. Allow more processes and threads \(`ulimit -u`"),
        (errno.ENOMEM, r"Cannot allocate memory\. Free memory"),
        (errno.ENFILE, "Too many open files in"),
    ],
)
def test_a_process_that_the_system_refuses_to_start_raises_transport_error(
    make: Make, number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(group_process, "WorkerProcess", refused)
    with pytest.raises(TransportError, match=f"^worker 0 cannot be started: {said}"):
        make(workers.act).start()


def test_what_a_group_does_at_exit_is_also_a_finalizer_of_multiprocessing_until_it_is_cancelled() -> None:
    at_exit = AtExit(lambda: None)
    at_exit.cancel()  # nothing is registered yet
    at_exit.register()
    finalizer = at_exit._finalizer
    assert finalizer is not None
    assert finalizer.still_active()
    at_exit.cancel()
    assert not finalizer.still_active()
