"""What a machine must refuse in its state: the call raises, nothing changes, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weightsync.engine.sender_driver import SenderDriver
from weightsync.errors import ConfigurationError, StateError, WeightSyncError, WorkerLostError
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, ReceiverInput, SenderInput, State
from weightsync.protocol.messages import Ack
from weightsync.testing.payloads import Payloads
from weightsync.testing.projecting import ReceiverPlayer, SenderPlayer
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.testing.step_gate import StepGate

#: A worker that no sender knows.
_UNKNOWN_WORKER = 99
_ACK = Ack(model_id="policy", incarnation=1, version=1)
#: What is tried: its name, the call, and the error that it must raise.
_Attempt = tuple[str, Callable[[], object], type[WeightSyncError]]


def refusals_of_sender(player: SenderPlayer, payloads: Payloads, base: int) -> int:
    """Try everything that this sender must refuse now. Returns the number of attempts.

    Raises:
        RuleViolation: it accepted something, or changed something while refusing.
    """
    driver = player.driver
    return _check_refusals(
        "the sender",
        _sender_attempts(driver, payloads),
        lambda: player.projected(_UNKNOWN_WORKER, base),
        player.step_gates.values(),
    )


def refusals_of_receiver(player: ReceiverPlayer, base: int) -> int:
    """Try everything that this receiver must refuse now. Returns the number of attempts.

    Raises:
        RuleViolation: as `refusals_of_sender`.
    """
    driver = player.driver
    events: dict[ReceiverInput, receiving.Event] = {
        ReceiverInput.APPLIED: receiving.Applied(_ACK),
        ReceiverInput.DEFERRED: receiving.Defer(_ACK),
        ReceiverInput.REFUSED: receiving.Refused(_ACK),  # type: ignore[arg-type] # refused before it is looked at
        ReceiverInput.BROKEN: receiving.Broken(),
        ReceiverInput.ANSWERED: receiving.Answered(),
    }
    state = driver.machine.state
    attempts: list[_Attempt] = [
        (input.value, lambda event=event: driver.take(event), StateError)  # type: ignore[misc]
        for input, event in events.items()
        if (state, input) not in RECEIVER_ROWS
    ]
    return _check_refusals("the receiver", attempts, lambda: player.projected(base), player.step_gates.values())


def _sender_attempts(driver: SenderDriver, payloads: Payloads) -> Iterator[_Attempt]:
    state, workers = driver.machine.state, driver.data.workers
    calls: dict[SenderInput, Callable[[], object]] = {
        SenderInput.SEND: lambda: _dispatch(driver, payloads, sending.Send(None)),
        SenderInput.SEND_ASYNC: lambda: _dispatch(driver, payloads, sending.SendAsync(None)),
        SenderInput.WAIT: lambda: driver.take(sending.Wait()),
        SenderInput.ABANDON: lambda: driver.take(sending.Abandon()),
        SenderInput.CONNECT: lambda: driver.take(sending.Connect(1)),
        SenderInput.JOIN: lambda: driver.take(sending.Join(_UNKNOWN_WORKER, _UNKNOWN_WORKER)),
    }
    if driver.data.outstanding is not None and not driver.data.outstanding.owed:
        del calls[SenderInput.WAIT]  # then it is another input: WAIT_SETTLED
    for input, call in calls.items():
        if (state, input) not in SENDER_ROWS:
            yield input.value, call, StateError
    if state is State.CLOSED:
        return
    yield "remove an unknown worker", lambda: driver.remove(_UNKNOWN_WORKER, ""), ConfigurationError
    if state is State.READY:
        yield "send to nobody", lambda: _dispatch(driver, payloads, sending.Send(())), ConfigurationError
        yield (
            "send to one unknown",
            lambda: _dispatch(driver, payloads, sending.Send((_UNKNOWN_WORKER,))),
            ConfigurationError,
        )
        if workers and all(entry.link_state is sending.LinkState.LOST for entry in workers.values()):
            yield "send to the lost", lambda: _dispatch(driver, payloads, sending.Send(None)), WorkerLostError


def _dispatch(driver: SenderDriver, payloads: Payloads, event: sending.Send | sending.SendAsync) -> None:
    packed = payloads.packed()
    try:
        driver.dispatch(event, packed)
    finally:
        payloads.release_packed(packed)


def _check_refusals(who: str, attempts: Any, look: Callable[[], Sequence[Any]], step_gates: Any) -> int:
    count = 0
    before, sent = look(), [len(step_gate.attempts) for step_gate in _all(step_gates)]
    for what, attempt, wanted in attempts:
        count += 1
        try:
            attempt()
        except wanted:
            pass
        else:
            raise RuleViolation(Rule.STATE, f"{who} must refuse this in its state, but accepted it: {what}")
        if look() != before:
            raise RuleViolation(Rule.STATE, f"{who} refused {what!r}, but its state changed: {before} -> {look()}")
        if [len(step_gate.attempts) for step_gate in _all(step_gates)] != sent:
            raise RuleViolation(Rule.STATE, f"{who} refused {what!r}, but sent something")
    return count


def _all(step_gates: Any) -> list[StepGate]:
    return list(step_gates)
