"""Only a clean close removes a worker from its sender. After a failure the worker remains a member, reported LOST."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import PATIENCE, Pair, large, small

from weightsync import ConfigurationError, OutcomeKind, RefusedError, SenderClosed, TransportError, WorkerLostError
from weightsync.engine import workers
from weightsync.protocol import receiver as receiver_pure
from weightsync.transports.base import Link
from weightsync.weights.target import Staged


def leave_by(side: Any, error: BaseException) -> None:
    """Leave the ``with`` block of a sender or receiver by this exception."""
    with pytest.raises(type(error)), side:
        raise error


@pytest.mark.parametrize("error", [ValueError("out of cheese"), KeyboardInterrupt("out of cheese"), SystemExit(3)])
@pytest.mark.parametrize("side", ["receiver", "scheme"])
def test_g11_a_worker_whose_with_block_raised_is_lost_in_every_report(
    pair: Pair, side: str, error: BaseException
) -> None:
    pair.sync()
    leave_by(pair.receiver if side == "receiver" else pair.schemes[0], error)

    for _ in range(2):
        with pytest.raises(WorkerLostError) as caught:
            pair.sender.send(timeout=PATIENCE)
        assert type(error).__name__ in caught.value.lost[0]
        assert str(error) in caught.value.lost[0]
    assert pair.sender.worker_ids == (0,)
    assert "leave_by" in caught.value.report[0].remote_traceback


@pytest.fixture(params=[False, True], ids=["", "the trainer holds both ends"])
def held(pair: Pair, request: pytest.FixtureRequest) -> Iterator[None]:
    """With True, the trainer keeps a copy of the worker's end of the pipe, and so never reads the end of the pipe."""
    kept = os.dup(pair.pipes[0][1].fileno()) if request.param else -1
    yield
    if request.param:
        os.close(kept)


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("side", ["receiver", "scheme"])
def test_g11_a_worker_that_fails_before_it_reads_its_handshake_is_lost_with_the_reason(pair: Pair, side: str) -> None:
    pair.sender.send_async()
    leave_by(pair.receiver if side == "receiver" else pair.schemes[0], ValueError("out of cheese"))

    for _ in range(2):
        with pytest.raises(WorkerLostError, match="ValueError: out of cheese"):
            pair.sender.send(timeout=PATIENCE, on_pending="wait")
    assert pair.sender.worker_ids == (0,)


@pytest.mark.usefixtures("held")
def test_g11_a_worker_that_is_closed_before_it_reads_its_handshake_is_lost_with_the_reason(pair: Pair) -> None:
    pair.sender.send_async()
    pair.receiver.close()

    with pytest.raises(WorkerLostError, match="before it answered the handshake: the receiver was closed"):
        pair.sender.wait_async(timeout=PATIENCE)
    assert pair.sender.worker_ids == (0,)


@pytest.mark.parametrize("fails", [True, False])
def test_g11_a_worker_that_ended_before_it_was_sent_a_handshake_is_lost_with_the_reason(
    pair: Pair, scheme_class: Any, fails: bool
) -> None:
    ours, theirs = multiprocessing.Pipe()
    pair.pipes.append((ours, theirs))
    with scheme_class() as scheme, scheme_class() as trainer:
        scheme.init_on_worker("policy", pipe=theirs, model=small(0.0))
        receiver = scheme.get_receiver()
        kept = os.dup(theirs.fileno())
        if fails:
            leave_by(receiver, ValueError("out of cheese"))
        else:
            receiver.close()
        trainer.init_on_sender("policy", pipes=[ours], model=pair.source)
        with pytest.raises(WorkerLostError) as caught:
            trainer.get_sender().send(timeout=PATIENCE)
        os.close(kept)

    reason = "ValueError: out of cheese" if fails else "the receiver was closed"
    assert caught.value.lost == {0: f"it ended before it answered the handshake: {reason}"}


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0)])
def test_a_worker_that_exits_with_status_0_says_goodbye(pair: Pair, error: SystemExit) -> None:
    pair.sync()
    leave_by(pair.receiver, error)
    pair.sender.poll()

    assert pair.sender.worker_ids == ()


@pytest.mark.parametrize("side", ["sender", "scheme"])
def test_a_trainer_whose_with_block_raised_reports_the_exception_to_its_workers(three: Pair, side: str) -> None:
    three.sync()
    leave_by(three.sender if side == "sender" else three.scheme, ValueError("out of cheese"))

    for receiver in three.receivers:
        with pytest.raises(TransportError, match="the sender failed: ValueError: out of cheese") as caught:
            receiver.receive(timeout=PATIENCE)
        assert not isinstance(caught.value, SenderClosed)


@pytest.mark.parametrize("error", [None, SystemExit(0)])
def test_a_trainer_whose_with_block_ends_without_a_failure_says_goodbye(
    pair: Pair, error: BaseException | None
) -> None:
    pair.sync()
    if error is None:
        with pair.sender:
            pass
    else:
        leave_by(pair.sender, error)

    with pytest.raises(SenderClosed, match="said goodbye"):
        pair.receiver.receive(timeout=PATIENCE)


def test_a_trainer_that_closes_while_its_worker_applies_a_version_says_goodbye(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.sync()
    target = pair.receiver.target()
    swap = target.swap

    def closed_amid(staged: Staged) -> None:
        swap(staged)
        pair.sender.close()

    monkeypatch.setattr(target, "swap", closed_amid)
    pair.sender.send_async(small(7.0))

    assert pair.receiver.receive(timeout=PATIENCE)
    with pytest.raises(SenderClosed, match="said goodbye"):
        pair.receiver.receive(timeout=PATIENCE)


#: A program whose forks are trainers. Each ends with an open sender while its worker, which is not a daemon process,
#: waits for the next version. A trainer and its worker write their output to a file.
LEFT_OPEN = """
import multiprocessing, os, sys
from fleet import small
from weightsync import MultiProcessWeightSyncScheme as Scheme, TransportError

def serve(pipe):
    scheme = Scheme()
    scheme.init_on_worker("policy", pipe=pipe, model=small())
    try:
        while True:
            scheme.get_receiver().receive()
    except TransportError as error:
        print(type(error).__name__, error, flush=True)

for number, end in enumerate(sys.argv[1:]):
    trainer = os.fork()
    if trainer:
        print(os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1]), flush=True)
        continue
    os.dup2(os.open(str(number), os.O_WRONLY | os.O_CREAT), 1)
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=serve, args=(theirs,)).start()
    scheme = Scheme()
    scheme.init_on_sender("policy", pipes=[ours], model=small())
    scheme.connect()
    exec(end)
    break
"""
#: For each way in which a trainer's program ends: its exit code, and a pattern of its worker's output.
ENDS = {
    "": (0, "SenderClosed .*the sender said goodbye"),
    "sys.exit(3)": (3, "SenderClosed .*the sender said goodbye"),
    "1 / 0": (1, "TransportError .*the sender failed: ZeroDivisionError"),
}


def test_a_trainer_whose_program_ends_says_goodbye_and_does_not_wait_for_its_workers_forever(tmp_path: Path) -> None:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", LEFT_OPEN, *ENDS]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(program, cwd=tmp_path, env=path, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all processes have ended, unless one hung
                os.killpg(process.pid, signal.SIGKILL)

    assert output.split() == [str(code) for code, _ in ENDS.values()], errors
    for number, (_, said) in enumerate(ENDS.values()):
        assert re.match(said, (tmp_path / str(number)).read_text(encoding="utf-8"))


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO], ids=["unexpected", "expected"])
def test_g11_a_goodbye_is_in_the_next_report_and_in_the_log(
    three: Pair, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(logging.INFO, "weightsync")
    three.sync()
    if level == logging.INFO:
        three.sender.expect_goodbyes()
    three.receivers[2].close()
    three.sender.send_async()
    for receiver in three.receivers[:2]:
        receiver.receive(timeout=0)
    report = three.sender.wait_async(timeout=PATIENCE, on_failure="report")

    assert "2" in str(dict(report.left))
    assert "left" in str(report)
    goodbyes = [record.levelno for record in caplog.records if "worker 2 said goodbye" in record.getMessage()]
    assert goodbyes == [level]
    three.sender.send_async()
    for receiver in three.receivers[:2]:
        receiver.receive(timeout=0)
    assert three.sender.wait_async(timeout=PATIENCE).left == {}


def test_g11_a_goodbye_is_in_the_report_of_a_send_that_times_out_too(three: Pair) -> None:
    three.sync()
    three.sender.send_async()
    three.receivers[2].close()
    early = three.sender.wait_async(timeout=0, on_failure="report")

    assert "the receiver was closed" in early.left[2]


def test_g11_a_send_after_all_workers_left_raises_with_their_ids(three: Pair) -> None:
    three.sync()
    for receiver in three.receivers:
        receiver.close()

    with pytest.raises(ConfigurationError, match=r"no workers to send to.*Worker 0 left.*Worker 2 left"):
        three.sender.send()
    empty = three.sender.send(allow_empty=True)
    assert (dict(empty.outcomes), empty.version, three.sender.version) == ({}, None, 1)


def test_g11_fewer_workers_than_expected_are_an_error_before_anything_is_sent(three: Pair) -> None:
    three.sync()
    three.receivers[1].close()
    with pytest.raises(ConfigurationError, match="3 workers are expected, and 2 have been added"):
        three.sender.send_async(expected_workers=3)
    three.sender.expected_workers = 3
    with pytest.raises(ConfigurationError, match="Worker 1 left"):
        three.sender.send_async()

    assert three.sender.version == 1
    assert three.sender.send_async(expected_workers=2).version == 2


@pytest.mark.untraced("a link that is wrong on purpose")
def test_g11_a_worker_whose_link_fails_while_it_lives_stays_a_member(pair: Pair) -> None:
    pair.sync()
    link: Link = pair.receiver._driver.links()[0]

    def starved() -> Any:
        raise OSError(24, "Too many open files")

    link.receive = starved  # type: ignore[method-assign]
    pair.receiver._driver.pump()

    for _ in range(2):
        with pytest.raises(WorkerLostError, match="Too many open files"):
            pair.sender.send(timeout=PATIENCE)
    report = pair.sender.send(timeout=PATIENCE, on_failure="report")
    assert (report.version, report.of(OutcomeKind.LOST)) == (None, (0,))
    ours, theirs = multiprocessing.Pipe()
    pair.pipes.append((ours, theirs))
    pair.sender.add_worker(0, ours)
    pair.receiver.register_worker_transport(theirs)
    assert pair.sync().ok


@pytest.mark.parametrize(("make", "kind"), [(large, OutcomeKind.APPLIED), (small, OutcomeKind.REFUSED)])
def test_g12_one_receive_answers_on_the_newest_link_even_if_a_replaced_link_remains(
    scheme_class: Any, make: Any, kind: OutcomeKind
) -> None:
    (replaced, first), (newest, second) = multiprocessing.Pipe(), multiprocessing.Pipe()
    trainer, worker = scheme_class(), scheme_class()
    with contextlib.ExitStack() as opened:
        for each in (replaced, first, newest, second, trainer, worker):
            opened.enter_context(each)
        trainer.init_on_sender("policy", pipes=[replaced], model=large(1.0))
        worker.init_on_worker("policy", pipe=first, model=make())
        sender, receiver = trainer.get_sender(), worker.get_receiver()
        sender.add_worker(0, newest)
        receiver.register_worker_transport(second)
        sender.send_async()
        with (
            pytest.raises(TransportError, match=r"refused: .* serves no version")
            if make is small
            else contextlib.nullcontext()
        ):
            assert receiver.receive(timeout=PATIENCE)

        assert sender.wait_async(timeout=PATIENCE, on_failure="report")[0].kind is kind


def test_g11_a_model_that_misfits_at_the_handshake_is_refused_in_every_send(scheme_class: Any) -> None:
    pair = Pair(scheme_class)
    pair.receiver.register_model(small()[0])
    try:
        pair.sender.send_async()
        pair.receiver._driver.pump()
        with pytest.raises(RefusedError, match="it refused the handshake") as caught:
            pair.sender.wait_async(timeout=PATIENCE)
        assert caught.value.report[0].kind is OutcomeKind.REFUSED
        with pytest.raises(RefusedError) as again:
            pair.sender.send(timeout=PATIENCE)
        assert "add_worker() brings" not in str(caught.value)
        assert again.value.report[0].kind is OutcomeKind.REFUSED
    finally:
        pair.close()


class NotingReader:
    """A background reader that notes the calls of its methods; `prepare_relay` raises the error, if one is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._error = error

    def prepare_relay(self) -> bool:
        self.calls.append("prepare_relay")
        if self._error is not None:
            raise self._error
        return False

    def version_decided(self) -> None:
        self.calls.append("version_decided")

    def link_added(self) -> None:
        """Do nothing."""

    def model_set(self, model: Any) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing, since there is no thread."""


def receive_with(pair: Pair, reader: NotingReader, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Receive version 2 with this background reader, which also notes the swap and the ack."""
    pair.sync()
    pair.sender.send_async(small(7.0))
    target, driver = pair.receiver.target(), pair.receiver.driver
    swap, take = target.swap, driver.take

    def noting_swap(staged: Staged) -> None:
        reader.calls.append("swap")
        swap(staged)

    def noting_take(event: Any) -> Any:
        if isinstance(event, receiver_pure.Applied):
            reader.calls.append("ack")
        return take(event)

    monkeypatch.setattr(target, "swap", noting_swap)
    monkeypatch.setattr(driver, "take", noting_take)
    pair.receiver.set_background_reader(reader)  # type: ignore[arg-type]
    applied = pair.receiver.receive_and_apply_here()
    pair.receiver.set_background_reader(None)
    return applied


def test_g6_an_error_in_prepare_relay_refuses_the_update_before_the_swap(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = NotingReader(RuntimeError("do not ask"))
    assert receive_with(pair, reader, monkeypatch) is False

    with pytest.raises(RefusedError, match="do not ask"):
        pair.sender.wait_async(timeout=PATIENCE)
    assert (pair.receiver.version, pair.model[0].bias.tolist()) == (1, [1.0, 1.0, 1.0])
    assert reader.calls == ["prepare_relay", "version_decided"]


def test_g6_a_background_reader_is_called_before_the_swap_and_after_the_ack_but_not_between(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = NotingReader()
    assert receive_with(pair, reader, monkeypatch) is True

    assert pair.sender.wait_async(timeout=PATIENCE).ok
    assert reader.calls == ["prepare_relay", "swap", "ack", "version_decided"]


def test_the_pipe_of_a_worker_that_is_removed_meanwhile_is_found_or_unknown(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread removes the worker while `pipe` looks it up."""
    known, leaving = workers.pure.known, threading.Thread(target=pair.sender.remove_worker, args=(0,))

    def leave_then(*asked: Any) -> Any:
        monkeypatch.undo()
        found = known(*asked)
        leaving.start()
        leaving.join(0.05)
        return found

    monkeypatch.setattr(workers.pure, "known", leave_then)
    assert not pair.sender.pipe(0).poll()
    leaving.join(PATIENCE)

    with pytest.raises(ConfigurationError, match="worker 0 is not among the workers"):
        pair.sender.pipe(0)
