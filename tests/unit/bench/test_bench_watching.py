"""A step of the bench that waits forever for a worker is ended, with an error that names the worker."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from skipping import require_modules

from weightsync import TransportError
from weightsync.bench import BenchError, SchemeName, Settings, torchrl_schemes, watching
from weightsync.bench.floors import FloorWorkers
from weightsync.bench.running import run
from weightsync.bench.settings import PAYLOADS
from weightsync.bench.watching import Watchdog, forget, watch


class Silent:
    """An observer of a run that ignores everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture(autouse=True)
def notice_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice the end of a worker at the first look, and give each step unlimited time."""
    monkeypatch.setattr(watching, "TICK", 0.01)
    monkeypatch.setattr(watching, "NOTICE_TIMEOUT", 0.0)
    monkeypatch.setattr(watching, "STEP_TIMEOUT", float("inf"))


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        watch(process.pid, "a scheme: worker 0")
        yield process
        forget(process.pid)
        process.kill()


def stop(worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)


def kill(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker, and wait until it is dead: on a busy machine that takes a while."""
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def fail(error: BaseException) -> None:
    raise error


def test_a_step_that_waits_for_a_killed_worker_ends_and_names_the_worker(
    worker: subprocess.Popen[bytes],
) -> None:
    answers = multiprocessing.get_context("spawn").Queue()
    worker.kill()
    said = rf"^a scheme: a worker has ended: a scheme: worker 0 \(process {worker.pid}\)$"
    with Watchdog() as watchdog, pytest.raises(BenchError, match=said):
        watchdog.do("a scheme", answers.get)


def test_a_step_that_times_out_names_the_stopped_worker_and_kills_it(
    worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(worker)
    monkeypatch.setattr(watching, "STEP_TIMEOUT", 0)
    said = rf"^a scheme: no end within 0 s; a worker is stopped: a scheme: worker 0 \(process {worker.pid}\)$"
    with Watchdog() as watchdog, pytest.raises(BenchError, match=said):
        watchdog.do("a scheme", queue.Queue[None]().get)

    assert worker.wait() == -signal.SIGKILL


def test_errors_about_workers_that_the_watchdog_killed_do_not_hide_the_timeout(
    worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def send() -> None:
        with contextlib.suppress(watching._Interrupted):
            queue.Queue[None]().get()
        raise TransportError("the worker is lost")

    monkeypatch.setattr(watching, "STEP_TIMEOUT", 0)
    with Watchdog() as watchdog, pytest.raises(BenchError, match=r"^a scheme: no end within 0 s$"):
        watchdog.do("a scheme", send)


@pytest.mark.parametrize("error", [EOFError("the pipe"), KeyError("the actor")])
def test_an_error_of_a_step_names_the_worker_that_has_ended(error: Exception, worker: subprocess.Popen[bytes]) -> None:
    kill(worker)
    with Watchdog() as watchdog, pytest.raises(BenchError) as raised:
        watchdog.do("ping", lambda: fail(error))

    assert str(raised.value) == f"ping: a worker has ended: a scheme: worker 0 (process {worker.pid})"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TransportError("no answer"), "a step: no answer"),
        (OSError("too many files"), "a step: OSError: too many files"),
        (BenchError("worker 0 failed"), "worker 0 failed"),
    ],
)
def test_other_errors_of_a_step_get_its_name_unless_they_are_bench_errors(error: Exception, said: str) -> None:
    with Watchdog() as watchdog, pytest.raises(BenchError) as raised:
        watchdog.do("a step", lambda: fail(error))

    assert str(raised.value) == said


def test_a_programming_error_in_a_step_is_raised_unchanged() -> None:
    with Watchdog() as watchdog, pytest.raises(ZeroDivisionError):
        watchdog.do("a step", lambda: fail(ZeroDivisionError()))


def test_a_stopped_worker_is_killed_when_a_step_is_interrupted(worker: subprocess.Popen[bytes]) -> None:
    stop(worker)
    with Watchdog() as watchdog, pytest.raises(KeyboardInterrupt):
        watchdog.do("a step", lambda: fail(KeyboardInterrupt()))

    assert worker.wait() == -signal.SIGKILL


def test_the_end_of_a_forgotten_worker_and_a_foreign_signal_disturb_no_step(
    worker: subprocess.Popen[bytes],
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with Watchdog() as watchdog:
        assert watchdog.do("one", lambda: 1) == 1
        forget(worker.pid)
        worker.kill()
        worker.wait()
        watchdog.do("two", lambda: signal.raise_signal(signal.SIGUSR2))

    assert signal.getsignal(signal.SIGUSR2) is before


# ------------------------------------------------------------------------------------------------------ whole runs


def test_a_run_ends_when_a_worker_of_the_floors_is_stopped(monkeypatch: pytest.MonkeyPatch, forkserver: object) -> None:
    stopped: list[Any] = []
    honest = FloorWorkers.copy_out

    def stopping(floors: FloorWorkers) -> None:
        for process in floors.workers.processes:
            os.kill(process.pid, signal.SIGSTOP)
            stopped.append(process.pid)
            while watching._state(process.pid) != "T":
                time.sleep(0.01)
        monkeypatch.setattr(watching, "STEP_TIMEOUT", 0)
        honest(floors)

    monkeypatch.setattr(FloorWorkers, "copy_out", stopping)
    with pytest.raises(BenchError, match=r"memcpy \+ copy-out: no end within 0 s; .* floors: worker 0 \(process \d+\)"):
        run(Settings((PAYLOADS["E"],), (1,), (SchemeName.PROCESS,), ("layout",), rounds=1), Silent())

    assert all(watching._state(pid) == "X" for pid in stopped)


@pytest.mark.torchrl
@pytest.mark.filterwarnings("ignore:Creating .* is deprecated:DeprecationWarning")  # a warning of TorchRL's own
def test_a_run_ends_when_a_worker_of_torchrl_is_killed(monkeypatch: pytest.MonkeyPatch, forkserver: object) -> None:
    require_modules("torchrl", what="A KILLED WORKER OF TORCHRL IN THE BENCH", extra="torchrl")
    honest = torchrl_schemes.TorchRLScheme.send

    def killing(scheme: torchrl_schemes.TorchRLScheme) -> None:
        honest(scheme)  # starts the threads of its queues: one that is interrupted at its start never ends
        for process in scheme._workers.processes:
            process.kill()
            process.join()
        honest(scheme)

    monkeypatch.setattr(torchrl_schemes.TorchRLScheme, "send", killing)
    said = r"^torchrl-shared: a worker has ended: torchrl-shared: worker 0 \(process \d+\)$"
    with pytest.raises(BenchError, match=said):
        run(Settings((PAYLOADS["E"],), (1,), (SchemeName.TORCHRL_SHARED,), rounds=1), Silent())
    gc.collect()  # the error held the scheme, and thereby the thread of its queue
