"""A call ends by its deadline, counted from its start, even while the model is in use or a signal arrives."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clocks import advancing_clock
from fleet import PATIENCE, Pair, constants, small
from torch import nn

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    Loader,
    ModelBusyError,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    ProtocolError,
    SenderClosed,
    State,
)
from weightsync.clock import MAX_FENCE, new_incarnation
from weightsync.engine import background
from weightsync.engine.background import Background
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol.codec import decode, encode
from weightsync.protocol.messages import Hello
from weightsync.testing import FakeClock


class Slow(nn.Module):
    """A model whose extra state takes three seconds of a fake clock to read."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self._clock = clock

    def get_extra_state(self) -> int:
        if self._clock is not None:
            self._clock.advance(3)
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def test_g10_a_deadline_counts_from_the_call_and_not_from_the_end_of_packing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeClock() as clock:
        monkeypatch.setattr(SenderDriver, "wait", lambda *_: clock.advance(1))
        pair.scheme.model = Slow(clock)
        begun = clock.monotonic()
        report = pair.sender.send(timeout=2, on_failure="report")
        took = clock.monotonic() - begun

    assert report[0].kind is OutcomeKind.TIMED_OUT
    assert report.pack_s >= 3
    assert took == pytest.approx(report.pack_s)


# ----------------------------------------------------------------------------------- other threads serve the model


@pytest.fixture
def served(pair: Pair) -> Iterator[Pair]:
    """A pair whose model is served by another thread."""
    pair.sync()
    entered, done = threading.Event(), threading.Event()

    def serve() -> None:
        with pair.receiver.serving():
            entered.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=serve)
    thread.start()
    assert entered.wait(PATIENCE)
    yield pair
    done.set()
    thread.join(PATIENCE)


def test_g10_apply_weights_times_out_while_another_thread_serves_the_model(served: Pair) -> None:
    weights = small(5.0).state_dict()
    with advancing_clock(60), pytest.raises(ModelBusyError, match=r"^apply_weights\(\): other threads used the model"):
        served.receiver.apply_weights(weights)
    with pytest.raises(TimeoutError):
        served.receiver.apply_weights(weights, timeout=0)

    assert (served.receiver.version, constants(served.model)) == (1, {1.0})


def test_g10_ack_and_nack_time_out_while_the_model_is_served_and_the_update_stays_pending(served: Pair) -> None:
    served.sender.send_async()
    assert served.receiver.take_update(timeout=PATIENCE) is not None
    with pytest.raises(ModelBusyError):
        served.receiver.ack(timeout=0)
    with pytest.raises(ModelBusyError):
        served.receiver.nack(ValueError("no"), timeout=0)

    assert served.receiver.owes_ack


def test_an_ack_or_nack_of_a_wrong_type_leaves_the_update_unanswered(served: Pair) -> None:
    served.sender.send_async()
    assert served.receiver.take_update(timeout=PATIENCE) is not None
    for call in (lambda: served.receiver.ack(b"updated"), lambda: served.receiver.nack("no")):
        with pytest.raises(ConfigurationError, match="still to be answered"):
            call()

    assert served.receiver.owes_ack


def test_g10_register_model_times_out_while_the_model_is_served_and_keeps_it(served: Pair) -> None:
    with advancing_clock(60), pytest.raises(ModelBusyError, match=r"^register_model\(\): other threads used the model"):
        served.receiver.register_model(small())

    assert served.receiver.model is served.model


def test_g10_close_does_not_wait_forever_for_a_relay_that_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "JOIN_SECONDS", 0.01)
    inside, done = threading.Event(), threading.Event()

    def relay() -> None:
        inside.set()
        done.wait(PATIENCE)

    reader = Background(pair.receiver, lambda: relay)
    reader.start()
    pair.sender.send_async()
    assert inside.wait(PATIENCE)
    thread = reader._thread
    assert thread is not None
    pair.receiver.close()

    assert pair.receiver.state is State.CLOSED
    assert thread.is_alive()
    assert "still runs your own code" in caplog.text
    done.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert "stopped" not in caplog.text


def test_a_close_waits_for_a_swap_that_has_begun(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, gave_up, done, ended = threading.Event(), threading.Event(), threading.Event(), list[str]()
    monkeypatch.setattr(background, "JOIN_SECONDS", 0.01)
    monkeypatch.setattr(background.logger, "warning", lambda *_: gave_up.set())

    def load(weights: Iterator[object], version: int) -> None:
        assert len(list(weights)) > version > 0
        inside.set()
        done.wait(PATIENCE)
        ended.append("load")

    def close() -> None:
        pair.receiver.close()
        ended.append("close")

    pair.receiver.register_model(Loader(load))
    Background(pair.receiver, lambda: None).start()
    pair.sender.send_async()
    assert inside.wait(PATIENCE)
    closing = threading.Thread(target=close)
    closing.start()
    assert gave_up.wait(PATIENCE)  # close() waits for the thread that holds the swap
    done.set()
    closing.join(PATIENCE)

    assert ended == ["load", "close"]


def test_g11_an_error_that_ends_the_background_thread_reaches_sender_and_receiver(pair: Pair) -> None:
    def relay() -> None:
        raise SystemExit(3)

    reader = Background(pair.receiver, lambda: relay)
    reader.start()
    report = pair.sender.send(timeout=PATIENCE, on_failure="report")

    assert report[0].kind is OutcomeKind.LOST
    assert "SystemExit: 3" in report[0].reason
    assert not reader.running
    with pytest.raises(SystemExit):
        reader.receive(timeout=PATIENCE)
    reader.stop()


class LogHandlerFailingInReaders(logging.Handler):
    """A user's log handler that fails in background readers."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.threadName and record.threadName.startswith("weightsync receiver of"):
            raise OSError("the log is full")


@pytest.fixture
def reader_cannot_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    log, handler = logging.getLogger("weightsync"), LogHandlerFailingInReaders()
    caplog.set_level(logging.INFO, "weightsync")
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    log.addHandler(handler)
    yield
    for thread in threading.enumerate():  # these end by raising the handler's error
        if thread.name.startswith("weightsync receiver of"):
            thread.join(PATIENCE)
    log.removeHandler(handler)


@pytest.mark.usefixtures("reader_cannot_log")
def test_receive_raises_sender_closed_even_if_the_workers_log_handler_raises(pair: Pair) -> None:
    reader = Background(pair.receiver, lambda: None)
    reader.start()
    assert pair.sender.send(timeout=PATIENCE).ok
    reader.mark_seen()
    pair.sender.close()

    with pytest.raises(SenderClosed):
        reader.receive(timeout=PATIENCE / 2)


@pytest.mark.parametrize(
    ("error", "told"), [(SystemExit(3), "SystemExit: 3"), (ProtocolError("odd"), "OSError: the log is full")]
)
@pytest.mark.usefixtures("reader_cannot_log")
def test_g11_the_end_of_the_background_thread_reaches_both_sides_even_if_the_log_handler_raises(
    pair: Pair, error: BaseException, told: str
) -> None:
    def relay() -> None:
        raise error

    reader = Background(pair.receiver, lambda: relay)
    reader.start()
    report = pair.sender.send(timeout=PATIENCE / 2, on_failure="report")

    assert report[0].kind is OutcomeKind.LOST
    assert told in report[0].reason
    with pytest.raises((SystemExit, OSError)):
        reader.receive(timeout=PATIENCE / 2)


# ---------------------------------------------------------------------------------------- signals end a wait at once


class Interrupted(Exception):
    """Raised by a signal handler."""


def interrupt(*_: Any) -> None:
    raise Interrupted


def waits(pair: Pair) -> dict[str, tuple[Callable[[], Any], Callable[[], bool]]]:
    """Calls that wait forever, each with a function that tells whether its wait has begun."""
    return {
        "send": (lambda: pair.sender.send(timeout=None), lambda: pair.sender.state is State.AWAITING_ACK),
        "receive": (lambda: pair.receiver.receive(timeout=None), lambda: pair.receiver.state is State.READY),
    }


@pytest.mark.parametrize("call", ["send", "receive"])
def test_g10_a_signal_handler_that_raises_ends_a_wait_without_a_deadline(pair: Pair, call: str) -> None:
    pair.sync()
    waiting, under_way = waits(pair)[call]
    waker = (pair.sender if call == "send" else pair.receiver)._driver.waker
    over, late = threading.Event(), threading.Event()

    def send_signal() -> None:
        while not (under_way() and waker._waiting):
            over.wait(0.001)
        os.kill(os.getpid(), signal.SIGUSR1)
        if not over.wait(PATIENCE / 3):
            late.set()
            waker.fire()

    before = signal.signal(signal.SIGUSR1, interrupt)
    signalling = threading.Thread(target=send_signal)
    signalling.start()
    with pytest.raises(Interrupted):
        waiting()
    over.set()
    signalling.join(PATIENCE)
    signal.signal(signal.SIGUSR1, before)

    assert not late.is_set()


# --------------------------------------------------------------------------------------- a successor and its fence


def test_g4_an_incarnation_is_above_its_fence_whatever_the_clock_says() -> None:
    with FakeClock() as clock:
        for ahead in (0, 1, 10**9, 10**12):
            # The low 32 bits are all ones: no random bits lift an incarnation of the same nanosecond above the fence.
            fence = ((clock.time_ns() + ahead) << 32) | 0xFFFFFFFF
            assert all(new_incarnation(fence) > fence for _ in range(3))


def test_g4_an_incarnation_above_the_highest_fence_can_be_encoded_and_decoded() -> None:
    above = new_incarnation(MAX_FENCE)

    assert above > MAX_FENCE
    assert decode(encode(Hello(model_id="policy", incarnation=above))).incarnation == above


def test_g4_the_incarnation_at_connect_is_above_a_fence_given_at_init() -> None:
    fence = new_incarnation(0) + (3600 * 10**9 << 32)
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", num_workers=1, fence=fence)
        with pytest.raises(AckTimeoutError, match=r"workers \[0\] of 'policy' have not connected"):
            scheme.connect(timeout=0)

        assert scheme.get_sender().incarnation > fence


def test_g4_the_incarnation_is_above_the_given_fence_if_init_creates_the_links() -> None:
    fence, (end, _other) = new_incarnation(0) + (3600 * 10**9 << 32), multiprocessing.Pipe()
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[end], model=small(), fence=fence)

        assert scheme.get_sender().incarnation > fence


# --------------------------------------------------------------------------------------------- a child of a child


def states_after_two_forks(sender: Any, connect: Callable[[], None]) -> str:
    """The states of an inherited sender: in a child, in the child after a new connect, and in the child's child."""
    reading_end, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            inherited = sender.state
            connect()
            connected = sender.state
            grandchild = os.fork()
            if grandchild == 0:
                os.write(telling, f"{inherited.value} {connected.value} {sender.state.value}".encode())
            else:
                os.waitpid(grandchild, 0)
        finally:
            os._exit(0)
    os.close(telling)
    os.waitpid(child, 0)
    with open(reading_end, encoding="ascii") as reading:
        return reading.read()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_g8_a_sender_inherited_by_a_grandchild_process_is_a_copy(pair: Pair) -> None:
    pair.sync()

    assert states_after_two_forks(pair.sender, pair.sender.connect) == "uninitialized ready uninitialized"
