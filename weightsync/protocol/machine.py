"""The machines: one shared, strict `transitions.Machine` per role, built from the tables, and its refusals.

A stock trigger of `transitions` costs about ten microseconds and runs callbacks in the middle of a step. `LeanEvent`,
installed through the library's own extension point, takes a lock, looks up one row, sets the state and calls the
listeners. No model is registered with a shared machine, so the machine keeps none alive, and a copy never acts on its
original.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from operator import attrgetter
from typing import ClassVar, Final, Generic, TypeVar

import transitions
from msgspec import Struct

from weightsync.errors import StateError
from weightsync.protocol._tables import FINAL, INITIAL, RECEIVER_ROWS, SENDER_ROWS, ReceiverInput, SenderInput, State

#: The last steps of a machine: (input, state before, state after), oldest first.
Steps = tuple[tuple[str, str, str], ...]

#: The public method that requests each input of a sender; the other inputs come from workers, links and clocks.
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
#: The public methods that each state of a receiver allows.
RECEIVER_ALLOWS: Final[Mapping[State, tuple[str, ...]]] = {
    State.UNINITIALIZED: ("register_worker_transport", "register_model", "apply_weights", "close"),
    State.READY: ("receive", "take_update", "apply_weights", "register_worker_transport", "close"),
    State.PENDING_ASYNC: ("receive", "take_update", "apply_weights", "ack", "close"),
    State.AWAITING_ACK: ("receive", "apply_weights", "register_worker_transport", "close"),
    State.CLOSED: ("close",),
}


def method_of(input: SenderInput | ReceiverInput) -> str:
    """The public method that requests an input; for an input that no method requests, its name."""
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


class Role(StrEnum):
    """The two kinds of machines, and the sides of a scheme that run them, by the words that errors and traces use."""

    SENDER = "sender"
    RECEIVER = "receiver"


def refusal(
    rows: Iterable[tuple[State, SenderInput | ReceiverInput]],
    state: State,
    role: type,
    asked: str,
    *,
    hint: str = "",
    steps: Steps = (),
) -> StateError:
    """Build the error for a call that a state does not allow."""
    machine = Role.SENDER if role is SenderInput else Role.RECEIVER
    return StateError(machine, state.value, asked, allowed_in(rows, state, role), hint, steps=steps)


Input = TypeVar("Input", SenderInput, ReceiverInput)
Data = TypeVar("Data")
Effect = TypeVar("Effect")


class Step(Struct, Generic[Input, Data, Effect], frozen=True):
    """The result of an event. If ``input`` is None, the event was late and no row was looked up."""

    input: Input | None
    to: State
    data: Data
    effects: tuple[Effect, ...] = ()


#: Called for each step, in order: (state before, input, state after).
Listener = Callable[[State, Input, State], None]

#: How many of its last steps a machine keeps, for error messages.
REMEMBERED: Final = 8


def next_state(rows: Mapping[tuple[State, Input], State], state: State, input: Input) -> State:
    """The state that a row leads to. Raises StateError: there is no such row."""
    after = rows.get((state, input))
    if after is None:
        raise refusal(rows, state, type(input), method_of(input))
    return after


class LeanEvent(transitions.Event):
    """One input: the states that accept it, and the next state for each."""

    def __init__(self, name: str, machine: transitions.Machine) -> None:
        super().__init__(name, machine)
        self._targets: dict[State, State] = {}

    def add_transition(self, transition: transitions.Transition) -> None:
        """Add one row."""
        super().add_transition(transition)
        self._targets[State[transition.source]] = State[str(transition.dest)]

    def trigger(self, model: object, *args: object, **kwargs: object) -> bool:
        """The name that `transitions` gives to `fire`. It takes no arguments, because there are no callbacks."""
        if not isinstance(model, RoleMachine) or model.shared is not self.machine or args or kwargs:
            raise TypeError(f"{self.name} takes a machine of its own role and no arguments")
        model.fire(model.inputs(self.name))
        return True


def _shared(rows: Mapping[tuple[State, Input], State]) -> transitions.Machine:
    return _StrictMachine(
        model=None,
        states=State,
        initial=INITIAL,
        transitions=[
            {"trigger": input.value, "source": source, "dest": target} for (source, input), target in rows.items()
        ],
        auto_transitions=False,
        ignore_invalid_triggers=False,
    )


class _StrictMachine(transitions.Machine):
    event_cls = LeanEvent


def _events(shared: transitions.Machine, inputs: type[Input]) -> dict[Input, LeanEvent]:
    events = {input: shared.events[input.value] for input in inputs}
    return {input: event for input, event in events.items() if isinstance(event, LeanEvent)}


class RoleMachine(Generic[Input]):
    """The state of one sender or one receiver, and the only way to change it.

    A copy, shallow, deep or pickled, is a new machine: `uninitialized`, without listeners, with its own lock.
    """

    __slots__ = ("__weakref__", "_history", "_listeners", "_state", "_telling", "lock")

    #: The `transitions.Machine` of this role.
    shared: ClassVar[transitions.Machine]
    #: The table of this role, and its inputs.
    rows: Mapping[tuple[State, Input], State]
    inputs: type[Input]
    _events: Mapping[Input, LeanEvent]

    def __init__(self) -> None:
        #: Held for each step. A caller whose guard reads more than the state holds it until `fire` returns.
        self.lock = threading.RLock()
        self._state = INITIAL
        self._listeners: list[Listener[Input]] = []
        self._telling = False
        self._history: deque[tuple[Input, State, State]] = deque(maxlen=REMEMBERED)

    @property
    def steps(self) -> Steps:
        """The last steps, oldest first: the input, and the states before and after it."""
        with self.lock:
            return tuple((input.value, before.value, after.value) for input, before, after in self._history)

    #: The current state. A property that is no call in Python: it is read at each step.
    state: State = property(attrgetter("_state"))  # type: ignore[assignment]

    def fire(self, input: Input) -> State:
        """Take one input: one row, as one step under the lock.

        Returns:
            The new state.

        Raises:
            StateError: there is no row for it in this state; nothing has changed, and no listener was called.
            Exception: whatever a listener raises; the step was taken, and later listeners were not called.
        """
        targets = self._events[input]._targets
        with self.lock:
            before = self._state
            after = targets.get(before)
            if after is None:
                raise refusal(self.rows, before, self.inputs, method_of(input), steps=self.steps)
            if self._listeners:
                self._move_and_tell(before, input, after)
            else:
                self._state = after
                self._history.append((input, before, after))
        return after

    def observe(self, listener: Listener[Input]) -> None:
        """Call a listener for each step from now on, in order and under the lock. It must not call `fire`."""
        with self.lock:
            self._listeners.append(listener)

    def _move_and_tell(self, before: State, input: Input, after: State) -> None:
        if self._telling:
            raise RuntimeError(f"a listener fired {input.value}: listeners must not call fire()")
        self._state = after
        self._history.append((input, before, after))
        self._telling = True
        try:
            for listener in self._listeners:
                listener(before, input, after)
        finally:
            self._telling = False

    def __reduce__(self) -> tuple[type[RoleMachine[Input]], tuple[()]]:
        return type(self), ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._state.value}>"


class SenderMachine(RoleMachine[SenderInput]):
    """The machine of one sender."""

    __slots__ = ()

    shared = _shared(SENDER_ROWS)
    rows = SENDER_ROWS
    inputs = SenderInput
    _events = _events(shared, SenderInput)


class ReceiverMachine(RoleMachine[ReceiverInput]):
    """The machine of one receiver."""

    __slots__ = ()

    shared = _shared(RECEIVER_ROWS)
    rows = RECEIVER_ROWS
    inputs = ReceiverInput
    _events = _events(shared, ReceiverInput)
