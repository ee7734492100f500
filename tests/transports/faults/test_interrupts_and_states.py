"""Interrupts in the middle of calls, copies of every kind in every state, and every call in every wrong state."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import PATIENCE, Pair, constants, filled, small
from pools import statistics
from torch import nn

from weightsync import ConfigurationError, OutcomeKind, RefusedError, State, StateError, TransportError
from weightsync.engine.packer import Packed
from weightsync.protocol._tables import ReceiverInput, SenderInput
from weightsync.transports.pipe.connection import Channel
from weightsync.weights.unpacking import present_as


class Alarm(Exception):
    """The exception that a user's signal handler raises."""


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM, signal.SIGUSR1])
def signum(request: pytest.FixtureRequest) -> Iterator[int]:
    def handler(*_: Any) -> None:
        raise KeyboardInterrupt if request.param == signal.SIGINT else Alarm

    before = signal.signal(request.param, handler)
    yield request.param
    signal.signal(request.param, before)


def interrupt_at(machine: Any, at: Any, signum: int, times: int = 1) -> None:
    """Send this process a signal while its machine takes the input ``at``."""
    left = [times]

    def listener(_before: Any, taken: Any, _after: Any) -> None:
        if taken is at and left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signum)

    machine.observe(listener)


# ----------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_in_a_wait_is_re_raised_and_the_update_stays_outstanding(three: Pair, signum: int) -> None:
    waiting = threading.Event()
    three.sender._driver.machine.observe(lambda _b, _i, after: after is State.AWAITING_ACK and waiting.set())
    striking = threading.Thread(target=lambda: waiting.wait(PATIENCE) and os.kill(os.getpid(), signum))
    striking.start()
    with pytest.raises((KeyboardInterrupt, Alarm)):
        three.sender.send(timeout=PATIENCE)
    striking.join(PATIENCE)

    assert three.sender.state is State.PENDING_ASYNC
    for receiver in three.receivers:
        assert receiver.receive(timeout=0)
    assert three.sender.wait_async().ok


def test_g11_a_failure_that_an_interrupted_send_did_not_report_is_raised_by_the_next(three: Pair, signum: int) -> None:
    three.receivers[1].model.more = nn.Linear(1, 1)
    three.sender.send_async()
    assert [receiver.receive(timeout=0) for receiver in three.receivers] == [True, False, True]
    sent = threading.Event()
    three.sender._driver.machine.observe(lambda _b, event, _a: event is SenderInput.SEND and sent.set())
    striking = threading.Thread(target=lambda: sent.wait(PATIENCE) and os.kill(os.getpid(), signum))
    striking.start()
    with pytest.raises((KeyboardInterrupt, Alarm)):
        three.sender.send(on_pending="wait", timeout=PATIENCE)
    striking.join(PATIENCE)
    del three.receivers[1].model.more
    assert all(receiver.receive(timeout=0) for receiver in three.receivers)

    with pytest.raises(RefusedError, match="version 1 of 'policy' did not reach 1 of 3"):
        three.sender.send_async(on_pending="wait", timeout=PATIENCE)


def test_a_signal_that_interrupts_another_thread_ends_the_wait(
    three: Pair, signum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.transports.base.SLICE", 0.05)  # a poll ends by itself after this time
    waiting = threading.Event()

    def strike() -> None:
        waiting.wait(PATIENCE)
        # The signal interrupts this thread, not the one that polls.
        signal.pthread_kill(threading.get_ident(), signum)

    three.sender._driver.machine.observe(lambda _b, _i, after: after is State.AWAITING_ACK and waiting.set())
    striking = threading.Thread(target=strike)
    striking.start()
    with pytest.raises((KeyboardInterrupt, Alarm)):
        three.sender.send(timeout=None)
    striking.join(PATIENCE)

    assert three.sender.state is State.PENDING_ASYNC


def test_g11_a_failure_is_raised_by_the_next_send_if_a_signal_came_with_the_last_answer(
    three: Pair, signum: int
) -> None:
    three.receivers[1].model.more = nn.Linear(1, 1)
    sent = threading.Event()

    def listener(_before: Any, taken: Any, after: Any) -> None:
        if taken is SenderInput.SEND:
            sent.set()
        elif sent.is_set() and after is State.READY:
            os.kill(os.getpid(), signum)

    def answer() -> None:
        sent.wait(PATIENCE)
        for receiver in three.receivers:
            receiver.receive(timeout=PATIENCE)

    three.sender._driver.machine.observe(listener)
    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises((KeyboardInterrupt, Alarm)):
        three.sender.send(timeout=PATIENCE)
    answering.join(PATIENCE)

    assert three.sender.state is State.READY
    with pytest.raises(RefusedError, match="version 1 of 'policy' did not reach 1 of 3"):
        three.sender.send_async()


def test_an_interrupt_in_a_dispatch_is_deferred_until_every_worker_is_dispatched_to(three: Pair, signum: int) -> None:
    interrupt_at(three.sender._driver.machine, SenderInput.SEND, signum)
    with pytest.raises((KeyboardInterrupt, Alarm)):
        three.sender.send(timeout=PATIENCE)

    assert three.sender.state is State.PENDING_ASYNC
    assert [receiver.receive(timeout=0) for receiver in three.receivers] == [True] * 3
    assert three.sender.wait_async().ok


@pytest.mark.parametrize("call", ["send", "send_async"])
def test_an_interrupt_between_packing_and_dispatch_leaves_no_buffer_pinned(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The buffer, as large as the payload, used to stay pinned until the sender was closed."""

    def struck(value: object, kind: type) -> bool:
        if isinstance(value, Packed):
            raise KeyboardInterrupt
        return isinstance(value, kind)

    with monkeypatch.context() as patched:
        patched.setattr("weightsync.engine.sender.isinstance", struck, raising=False)
        with pytest.raises(KeyboardInterrupt):
            getattr(pair.sender, call)()
    gc.collect()

    assert statistics(pair.sender._packer._pool).pinned == 0
    assert pair.sync().ok


def test_an_interrupt_while_answers_are_read_loses_no_answer(three: Pair, signum: int) -> None:
    three.sender.send_async()
    for receiver in three.receivers:
        receiver.receive(timeout=0)
    interrupt_at(three.sender._driver.machine, SenderInput.REPLY, signum, times=3)
    with pytest.raises((KeyboardInterrupt, Alarm)):
        three.sender.send(on_pending="wait", timeout=PATIENCE)

    assert three.sender.wait_async(timeout=0).ok


def test_an_interrupt_in_a_swap_is_deferred_until_the_update_is_acked(pair: Pair, signum: int) -> None:
    interrupt_at(pair.receiver._driver.machine, ReceiverInput.APPLIED, signum)
    pair.sender.send_async()
    with pytest.raises((KeyboardInterrupt, Alarm)):
        pair.receiver.receive(timeout=0)

    assert (pair.receiver.version, pair.receiver.state) == (1, State.READY)
    assert pair.sender.wait_async(timeout=0).ok


def test_an_update_whose_take_was_interrupted_is_returned_by_the_next_take_update(
    pair: Pair, signum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def struck(*given: Any) -> Any:
        os.kill(os.getpid(), signum)
        return present_as(*given)

    pair.sender.send_async()
    with monkeypatch.context() as patched:
        patched.setattr("weightsync.engine.manual_ack.present_as", struck)
        with pytest.raises((KeyboardInterrupt, Alarm)):
            pair.receiver.take_update(PATIENCE)
    assert not pair.receiver.owes_ack
    assert pair.receiver.has_update()

    assert pair.receiver.take_update() is not None
    pair.receiver.ack()
    assert pair.sender.wait_async(timeout=PATIENCE).ok


def test_a_signal_handler_that_does_not_raise_does_not_disturb_a_send(pair: Pair) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    interrupt_at(pair.sender._driver.machine, SenderInput.SEND, signal.SIGUSR2)
    helping = threading.Thread(target=lambda: pair.receiver.receive(timeout=PATIENCE))
    helping.start()
    assert pair.sender.send(timeout=PATIENCE).ok
    helping.join(PATIENCE)
    signal.signal(signal.SIGUSR2, before)

    assert seen == [signal.SIGUSR2]


@pytest.mark.parametrize("at", ["_read", "_drain", "_describe_end"])
def test_a_signal_handler_may_close_a_receiver_while_the_users_messages_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    shipped = getattr(Channel, at)

    def struck(channel: Channel, *asked: Any) -> Any:
        monkeypatch.undo()
        assert channel._lock.acquire(blocking=False), "the handler would wait for its own thread forever"
        channel._lock.release()
        signal.raise_signal(signal.SIGUSR1)
        return shipped(channel, *asked)

    pair.sync()
    if at == "_describe_end":
        pair.sender.close()
    messages, before = pair.receiver.pipe, signal.signal(signal.SIGUSR1, lambda *_: pair.receiver.close())
    monkeypatch.setattr(Channel, at, struck)
    try:
        with pytest.raises(EOFError, match="closed"):
            messages.recv()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert pair.receiver.state is State.CLOSED
    if at != "_describe_end":
        pair.sender.progress()
        assert pair.sender.worker_ids == ()


def test_signal_handlers_are_restored_after_each_call(pair: Pair) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    pair.sync()
    pair.sender.send(timeout=0, on_failure="report")
    pair.sender.abandon()

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == before


# -------------------------------------------------------------------------------------------------- states


def as_ready(pair: Pair) -> None:
    pair.sync()


def as_pending(pair: Pair) -> None:
    pair.sync()
    pair.sender.send_async()
    pair.receiver._driver.pump()


def as_closed(pair: Pair) -> None:
    pair.sync()
    pair.sender.close()
    pair.receiver.close()


STATES = {State.READY: as_ready, State.PENDING_ASYNC: as_pending, State.CLOSED: as_closed}

SENDER_CALLS: dict[str, Callable[[Any], Any]] = {
    "send": lambda sender: sender.send(timeout=0),
    "send_async": lambda sender: sender.send_async(),
    "update_weights": lambda sender: sender.update_weights(small()),
    "wait_async": lambda sender: sender.wait_async(timeout=0),
    "abandon": lambda sender: sender.abandon(),
    "poll": lambda sender: sender.poll(),
    "connect": lambda sender: sender.connect(),
    "set_context": lambda sender: sender.set_context(None, "other"),
    "add_worker": lambda sender: sender.add_worker(5, multiprocessing.Pipe()[0]),
    "remove_worker": lambda sender: sender.remove_worker(0),
    "pipe": lambda sender: sender.pipe(0),
}
REFUSED = {
    State.READY: {"wait_async", "abandon", "connect", "set_context"},
    State.PENDING_ASYNC: {"send", "send_async", "update_weights", "connect", "set_context"},
    State.CLOSED: set(SENDER_CALLS),
    State.UNINITIALIZED: {"send", "send_async", "update_weights", "wait_async", "abandon"},
}


@pytest.mark.parametrize(("state", "call"), [(s, c) for s, calls in REFUSED.items() for c in sorted(calls)])
def test_a_sender_refuses_what_its_state_does_not_allow(scheme_class: Any, pair: Pair, state: State, call: str) -> None:
    if state is State.UNINITIALIZED:
        sender = scheme_class().create_sender()
    else:
        STATES[state](pair)
        sender = pair.sender
    assert sender.state is state
    before = (sender._driver.data, sender.state)
    with pytest.raises(StateError) as refused:
        SENDER_CALLS[call](sender)

    after = (sender._driver.data, sender.state)
    assert after == before
    assert state.value in str(refused.value)


RECEIVER_CALLS: dict[str, Callable[[Any], Any]] = {
    "receive": lambda receiver: receiver.receive(timeout=0),
    "apply_weights": lambda receiver: receiver.apply_weights(small().state_dict()),
    "register_worker_transport": lambda receiver: receiver.register_worker_transport(multiprocessing.Pipe()[0]),
    "set_context": lambda receiver: receiver.set_context(None, "other"),
}


@pytest.mark.parametrize("call", list(RECEIVER_CALLS))
def test_a_closed_receiver_refuses_every_call(pair: Pair, call: str) -> None:
    as_closed(pair)
    with pytest.raises(StateError):
        RECEIVER_CALLS[call](pair.receiver)

    assert (pair.receiver.version, constants(pair.model)) == (1, {1.0})


def test_closing_twice_is_allowed(pair: Pair) -> None:
    as_closed(pair)
    as_closed_again = [pair.sender.close(), pair.receiver.close(), pair.scheme.close()]

    assert as_closed_again == [None] * 3
    assert pair.sender.state is State.CLOSED


def test_context_managers_close(scheme_class: Any) -> None:
    pair = Pair(scheme_class)
    with pair.sender as sender, pair.receiver as receiver:
        assert (sender.state, receiver.state) == (State.READY, State.UNINITIALIZED)

    assert (sender.state, receiver.state) == (State.CLOSED, State.CLOSED)
    pair.close()


# -------------------------------------------------------------------------------------------------- copies

COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", list(COPIES))
@pytest.mark.parametrize("state", list(STATES))
def test_a_copy_is_uninitialized_and_its_original_untouched(pair: Pair, how: str, state: State) -> None:
    STATES[state](pair)
    before = [(side._driver.data, side.state) for side in (pair.sender, pair.receiver)]
    copies = [COPIES[how](side) for side in (pair.sender, pair.receiver)]
    twin = COPIES[how](pair.scheme)

    assert [side.state for side in copies] == [State.UNINITIALIZED] * 2
    assert copies[0].worker_ids == ()
    assert copies[1].version is None
    with pytest.raises(StateError):
        twin.get_sender()
    with pytest.raises(StateError):
        copies[0].wait_async()
    for side in copies:
        side.close()
    twin.close()
    del copies, twin, side
    assert [(side._driver.data, side.state) for side in (pair.sender, pair.receiver)] == before
    if state is State.PENDING_ASYNC:
        assert pair.receiver.receive(timeout=0)
        assert pair.sender.wait_async().ok
    if state is not State.CLOSED:
        assert pair.sync().ok


def test_a_spawned_process_gets_the_pipes_of_the_workers_that_can_still_be_reached(
    monkeypatch: pytest.MonkeyPatch, scheme_class: Any
) -> None:
    four = Pair(scheme_class, workers=4)
    four.sync()
    four.receivers[1].close()
    four.pipes[2][1].close()  # lost
    four.schemes[2].close()
    four.sender.poll()
    four.sender.remove_worker(3)
    monkeypatch.setattr("weightsync.engine.sender.pipes_travel", lambda: True)

    assert four.sender._carried() == {0: four.pipes[0][0]}
    assert 1 not in four.sender._workers.endpoints
    four.close()


def test_a_copied_scheme_can_be_initialised_with_pipes_of_its_own(pair: Pair) -> None:
    pair.sync()
    ours, theirs = multiprocessing.Pipe()
    with copy.deepcopy(pair.scheme) as a, pickle.loads(pickle.dumps(pair.schemes[0])) as b:
        a.init_on_sender("policy", pipes=[ours], model=small(7.0))
        b.init_on_worker("policy", pipe=theirs, model=small())
        a.get_sender().send_async()
        assert b.get_receiver().receive(timeout=PATIENCE)
        assert constants(b.get_receiver().model) == {7.0}

    assert pair.sync().ok


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("state", list(STATES))
def test_a_sender_and_receiver_inherited_by_a_fork_are_uninitialized_copies(pair: Pair, state: State) -> None:
    STATES[state](pair)
    before = [(side._driver.data, side.state) for side in (pair.sender, pair.receiver)]
    reading, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            states = [pair.sender.state, pair.receiver.state]
            pair.scheme.close()
            pair.schemes[0].close()
            pair.sender.close()
            os.write(telling, b"copy" if states == [State.UNINITIALIZED] * 2 else b"live")
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert os.read(reading, 4) == b"copy"
    os.close(reading)
    os.close(telling)
    assert [(side._driver.data, side.state) for side in (pair.sender, pair.receiver)] == before
    if state is State.PENDING_ASYNC:
        assert pair.receiver.receive(timeout=0)
        assert pair.sender.wait_async().ok
    if state is not State.CLOSED:
        filled(pair.source, 4.0)
        assert pair.sync().ok
        assert constants(pair.model) == {4.0}


# ------------------------------------------------------------- the faults of the reference, generation A


def test_fault_1_a_late_ack_of_one_send_never_satisfies_the_next(pair: Pair) -> None:
    pair.sender.send_async()
    pair.sender.abandon()
    pair.receiver.receive(timeout=0)
    pair.sender.send_async()

    assert pair.sender.poll()[0].kind is OutcomeKind.PENDING
    assert pair.receiver.receive(timeout=0)
    assert pair.sender.wait_async(timeout=0).version == 2


def test_fault_3_a_failed_apply_is_answered_and_never_acked(pair: Pair) -> None:
    pair.model.more = small()
    pair.sender.send_async()

    assert pair.receiver.receive(timeout=0) is False
    assert pair.sender.wait_async(timeout=0, on_failure="report")[0].kind is OutcomeKind.REFUSED
    assert pair.receiver.version is None


def test_fault_4_unpickling_keeps_no_ack_for_the_next_send(pair: Pair) -> None:
    pair.sender.send_async()
    pair.receiver.receive(timeout=0)
    clone = pickle.loads(pickle.dumps(pair.sender))

    assert clone.state is State.UNINITIALIZED
    assert clone.poll() is None
    assert pair.sender.wait_async(timeout=0).ok


def test_fault_5_a_send_of_an_uninitialized_sender_raises_state_error(scheme_class: Any) -> None:
    with pytest.raises(StateError):
        scheme_class().create_sender().send(small())


def test_fault_6_a_user_message_is_not_lost(pair: Pair) -> None:
    pair.sender.pipe(0).send("mine")
    pair.sync()

    assert pair.receiver.pipe.recv() == "mine"


def test_fault_7_a_send_to_a_subset_changes_no_other_worker(three: Pair) -> None:
    three.sync()
    filled(three.source, 2.0)
    three.sync(worker_ids=[1])

    assert [constants(model) for model in three.models] == [{1.0}, {2.0}, {1.0}]


def test_fault_7_weights_of_a_worker_that_does_not_receive_do_not_change(pair: Pair) -> None:
    pair.sync()
    for fill in (2.0, 3.0, 4.0):
        filled(pair.source, fill)
        pair.sender.send_async(on_pending="supersede")

    assert constants(pair.model) == {1.0}


def test_fault_9_a_receive_that_times_out_has_written_nothing(pair: Pair) -> None:
    pair.sync()
    assert pair.receiver.receive(timeout=0.001) is False

    assert (pair.receiver.version, constants(pair.model)) == (1, {1.0})


def test_fault_10_unknown_weights_are_an_error_and_no_empty_update(pair: Pair) -> None:
    with pytest.raises(ConfigurationError):
        pair.sender.send("no.such.model")
    with pytest.raises(ConfigurationError):
        pair.sender.send(object())

    assert pair.sender.version == 0


def test_fault_11_an_exception_in_one_dispatch_does_not_stop_the_others(three: Pair) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    three.sender._driver._links[2].link.send = broken
    three.sender.send_async()
    for index in (0, 2):
        assert three.receivers[index].receive(timeout=0)
    report = three.sender.wait_async(timeout=0, on_failure="report")

    assert [report[i].kind.name for i in range(3)] == ["APPLIED", "LOST", "APPLIED"]
    assert "no room" in report[1].reason
    assert three.sender.state is State.READY


def test_fault_13_a_closed_sender_raises_on_send(pair: Pair) -> None:
    pair.sender.close()
    with pytest.raises(StateError):
        pair.sender.send()
    with pytest.raises(TransportError):
        pair.receiver.receive(timeout=PATIENCE)


def test_fault_15_both_sides_of_one_scheme_object_are_independent(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as scheme:
        scheme.init_on_worker("policy", pipe=theirs, model=small())
        scheme.init_on_sender("policy", pipes=[ours], model=small(3.0))
        scheme.get_sender().send_async()

        assert scheme.get_receiver().receive(timeout=PATIENCE)
        assert scheme.get_sender().wait_async().ok
        assert constants(scheme.get_receiver().model) == {3.0}
