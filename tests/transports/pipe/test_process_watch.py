"""The identity of a process on its host, and the detection of its death."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transport_workers import in_a_fork

from weightsync.errors import TransportError
from weightsync.transports import process as processes
from weightsync.transports.base import Waker
from weightsync.transports.buffers import Segment
from weightsync.transports.process import (
    ProcessWatch,
    is_stopped,
    own_host,
    own_identity,
    own_network,
    started_at,
    watching,
)

FORK = multiprocessing.get_context("fork")


def test_a_process_knows_its_own_identity():
    pid, started = own_identity()

    assert (os.getpid(), started_at(os.getpid())) == (pid, started)
    in_a_fork(lambda: None if own_identity() != (pid, started) else pytest.fail("the parent's"))


def test_a_watch_with_another_start_time_is_dead_though_the_pid_is_alive():
    pid, started = own_identity()
    living, reused, unknown = ProcessWatch(pid, started), ProcessWatch(pid, started + 1), ProcessWatch(pid, 0)

    assert [watch.dead for watch in (living, reused, unknown)] == [False, True, False]


def test_is_stopped_is_true_for_a_process_stopped_by_a_signal_or_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int) -> list[bytes]:
        raise ProcessLookupError

    found: list[list[bool]] = []
    for state in (b"T", b"t", b"S"):
        monkeypatch.setattr(processes, "_status", lambda pid, state=state: [state, *[b"0"] * 18, b"7"])
        # With an unknown start time, with its own, and with that of another process of the same pid.
        found.append([is_stopped(2), is_stopped(2, 7), is_stopped(2, 8)])
    monkeypatch.setattr(processes, "_status", gone)

    assert found == [[True, True, False], [True, True, False], [False, False, False]]
    assert not is_stopped(2)


@pytest.mark.parametrize("make", [lambda: ProcessWatch(os.getpid(), 0), lambda: Segment(10), Waker])
def test_g3_a_descriptor_whose_close_was_interrupted_is_not_closed_twice(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(fd: int) -> None:
        close(fd)
        if fd == number:  # ignore descriptors that other threads or the garbage collector close
            raise KeyboardInterrupt

    owner, close = make(), os.close
    number, end = owner.fd, owner.forget if isinstance(owner, Segment) else owner.close
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            end()
    other = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(other, number)
        end()
        del owner, end
        os.fstat(number)
    finally:
        for fd in {other, number}:
            os.close(fd)


@pytest.mark.parametrize(("process", "milliseconds"), [(os.getpid, 0), (os.getppid, 100)])
def test_dies_waits_briefly_for_another_process_and_not_for_this_one(process: Any, milliseconds: int) -> None:
    asked: list[int] = []
    watch = ProcessWatch(process(), 0)
    watch._poller = SimpleNamespace(poll=asked.append)  # type: ignore[assignment]

    assert not watch.dies()
    assert asked == [milliseconds]


def test_a_watch_of_an_ended_process_is_dead():
    process = FORK.Process(target=int)
    process.start()
    watch = ProcessWatch(process.pid, 0)
    process.join()

    assert watch.dead
    late = ProcessWatch(process.pid, 0)
    assert (late.dead, late.fileno()) == (True, -1)
    process.close()


@pytest.mark.parametrize(
    ("program", "how"),
    [
        (["true"], ": it ended with exit code 0"),
        (["sh", "-c", "exit 3"], ": it ended with exit code 3"),
        (["sh", "-c", "kill -9 $$"], ": it was ended by SIGKILL"),
        (["sh", "-c", "kill -40 $$"], ": it was ended by signal 40"),  # a real-time signal, which has no name
    ],
)
def test_the_exit_status_of_a_child_is_known_until_its_parent_reaps_it(program, how):
    process = subprocess.Popen(program)
    watch = ProcessWatch(process.pid, 0)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert watch.dead
    assert watch.ending == watch.ending == f"process {process.pid} is dead{how}"
    process.wait()
    assert watch.ending == f"process {process.pid} is dead"


def test_the_exit_status_of_another_process_with_a_reused_pid_is_not_reported():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        reused = ProcessWatch(process.pid, 1)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (reused.dead, reused.ending, reused.fileno()) == (True, f"process {process.pid} is dead", -1)


def test_a_watch_matches_exactly_one_process_and_close_closes_its_descriptor():
    pid, started = own_identity()
    watch = watching(pid, started)
    assert watch.names(pid, started)
    assert not watch.names(pid, started + 1)
    assert not watch.names(pid + 1, started)

    descriptor = watch.fileno()
    os.fstat(descriptor)
    watch.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    watch.close()
    assert watch.fileno() == -1


@pytest.mark.parametrize(("pid", "why"), [(-1, "Invalid argument"), (2**40, ".*(integer|int ).*")])
def test_watching_an_invalid_pid_raises_transport_error_with_the_reason(pid, why):
    with pytest.raises(TransportError, match=rf"^Process {pid} cannot be watched: {why}\.$"):
        watching(pid, 0)


def test_an_unreadable_start_time_is_0_and_is_read_again_the_next_time(monkeypatch):
    here = own_identity()
    processes._own_start.cache_clear()
    monkeypatch.setattr(processes, "started_at", lambda pid: None)
    assert own_identity() == (os.getpid(), 0)
    monkeypatch.undo()

    assert own_identity() == here


def test_an_unreadable_host_identity_raises_and_is_read_again_the_next_time(monkeypatch):
    def raise_it(path: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    here = own_host()
    own_host.cache_clear()
    monkeypatch.setattr(processes.os, "readlink", raise_it)
    with pytest.raises(TransportError, match=r"^This host's identity cannot be read: Too many open files\.$"):
        own_host()
    monkeypatch.undo()

    assert own_host() == here


def test_own_host_without_proc_raises_with_advice_to_mount_it(monkeypatch):
    path = "/proc/sys/kernel/random/boot_id"

    def no_file() -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(processes, "clock_id", no_file)
    own_host.cache_clear()
    with pytest.raises(TransportError, match=rf"cannot be read: No such file.* Mount /proc here: .* read {path}\."):
        own_host()


@pytest.mark.parametrize("identity", [own_host, own_network])
@pytest.mark.parametrize("part", ["boot", "namespace"])
def test_g10_another_boot_or_namespace_is_another_host_and_another_network(identity, part, monkeypatch):
    here = identity()
    assert identity() is here
    identity.cache_clear()
    if part == "boot":
        monkeypatch.setattr(processes.Path, "read_text", lambda path, **_: "of another boot")
    else:
        monkeypatch.setattr(processes.os, "readlink", lambda path: f"{path} of another")
    there = identity()
    identity.cache_clear()
    monkeypatch.undo()

    assert here != there
    assert here == identity()


def test_the_start_time_is_read_despite_spaces_and_parentheses_in_the_program_name(tmp_path: Path):
    name = b"a b) (c \xff"
    program = tmp_path / os.fsdecode(name)
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "30"])  # returns once the process has the program's name
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_bytes().replace(name, b"name").split()
        assert fields[1] == b"(name)"
        assert started_at(process.pid) == int(fields[21]) >= own_identity()[1]
    finally:
        process.kill()
        process.wait()
