"""What a refused call is told, in the words of the public methods: the protocol's inputs are our own business."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from weightsync._tables import FINAL, ReceiverInput, SenderInput, State
from weightsync.errors import StateError

#: The last steps of a machine: (input, state before, state after), oldest first.
Steps = tuple[tuple[str, str, str], ...]

#: The method that asks for each input of a sender; the others come from workers, links and clocks.
SENDER_METHODS: Final[Mapping[SenderInput, str]] = {
    SenderInput.SEND: "send",
    SenderInput.SEND_ASYNC: "send_async",
    SenderInput.WAIT: "wait_async",
    SenderInput.WAIT_SETTLED: "wait_async",
    SenderInput.ABANDON: "abandon",
    SenderInput.CONNECT: "connect",
    SenderInput.JOIN: "add_worker",
    SenderInput.REMOVE: "remove_worker",
    SenderInput.CLOSE: "close",
}
#: What a receiver's caller may do, state by state.
RECEIVER_ALLOWS: Final[Mapping[State, tuple[str, ...]]] = {
    State.UNINITIALIZED: ("register_worker_transport", "register_model", "apply_weights", "close"),
    State.READY: ("receive", "hand_out", "apply_weights", "register_worker_transport", "close"),
    State.PENDING_ASYNC: ("receive", "hand_out", "apply_weights", "acknowledge", "close"),
    State.AWAITING_ACK: ("receive", "apply_weights", "register_worker_transport", "close"),
    State.CLOSED: ("close",),
}


def method_of(input: SenderInput | ReceiverInput) -> str:
    """The public method that asks for an input; for what no caller asks for, what it is."""
    if isinstance(input, SenderInput):
        return SENDER_METHODS.get(input, f"an event {input.value}")
    return "close" if input is ReceiverInput.CLOSE else f"an event {input.value}"


def allowed_in(rows: Iterable[tuple[State, SenderInput | ReceiverInput]], state: State, role: type) -> tuple[str, ...]:
    """The public methods that a state allows."""
    if role is ReceiverInput:
        return RECEIVER_ALLOWS[state]
    taken = {input for source, input in rows if source is state}
    methods = dict.fromkeys(method for input, method in SENDER_METHODS.items() if input in taken)
    return tuple(methods) if state is FINAL else (*methods, "poll")


def refusal(
    rows: Iterable[tuple[State, SenderInput | ReceiverInput]],
    state: State,
    role: type,
    asked: str,
    *,
    hint: str = "",
    steps: Steps = (),
) -> StateError:
    """The error for a call that a state does not allow.

    Args:
        rows: the table of the role.
        state: the state that the machine is in.
        role: `SenderInput` or `ReceiverInput`.
        asked: the public method.
        hint: what stands in the way, and what the caller can do about it.
        steps: the machine's last steps.
    """
    machine = "sender" if role is SenderInput else "receiver"
    return StateError(machine, state.value, asked, allowed_in(rows, state, role), hint, steps=steps)
