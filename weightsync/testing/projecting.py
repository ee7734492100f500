"""A driver's state in the model's terms, as `replay.json` has it for each node of a role's projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol._tables import State
from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.receiver import Deferred, Key
from weightsync.protocol.report import OutcomeKind
from weightsync.protocol.sender import Outstanding
from weightsync.testing.step_gate import StepGate

SENDER_FIELDS = ("state", "incarnation", "version", "due to all", "members", "outstanding or last report")
RECEIVER_FIELDS = ("state", "link", "fence", "decided", "pending", "served", "answer")


class SenderPlayer:
    """A sender that follows a path."""

    def __init__(self) -> None:
        self.driver = SenderDriver("policy")
        #: Its ends of links by the driver's numbers, and the newest of each worker.
        self.step_gates: dict[int, StepGate] = {}
        self.of: dict[int, StepGate] = {}
        self._last: Outstanding | None = None

    def projected(self, workers: int, base: int) -> list[Any]:
        """The sender's state; incarnations count from ``base``."""
        data = self.driver.data
        concluded = self.driver.concluded.get(data.version)
        self._last = data.outstanding or (concluded.outstanding if concluded else self._last)
        entries: list[Any] = []
        for worker in range(1, workers + 1):
            entry = data.workers.get(worker)
            entries.append(
                entry
                and [
                    self.step_gates[entry.link].place[2],
                    entry.link_state.name,
                    entry.served,
                    entry.due,
                    entry.catching,
                    _number(entry.fence, base),
                ]
            )
        last = self._report(workers)
        return [
            self.driver.machine.state.value,
            _number(data.incarnation, base),
            data.version,
            data.due_all,
            entries,
            last,
        ]

    def _report(self, workers: int) -> list[Any]:
        last = self._last or Outstanding(0, {}, {})
        outcomes = {worker: outcome.kind.name for worker, outcome in last.outcomes.items()}
        outcomes |= dict.fromkeys(last.owed, OutcomeKind.PENDING.name)
        owed = {worker: self.step_gates[link].place[2] for worker, link in last.owed.items()}
        every = range(1, workers + 1)
        return [last.version, [owed.get(w, 0) for w in every], [outcomes.get(w, "NONE") for w in every]]


class ReceiverPlayer:
    """A receiver that follows a path."""

    def __init__(self) -> None:
        self.driver = ReceiverDriver("policy")
        self.step_gates: dict[int, StepGate] = {}
        #: The weights that it serves, as they arrived. They must not change.
        self.served: tuple[memoryview, bytes] | None = None
        #: Whether its process has ended.
        self.gone = False

    def add(self, step_gate: StepGate) -> None:
        """Listen on one more link."""
        if self.gone or self.driver.machine.state is State.CLOSED:
            step_gate.close()
            return
        self.step_gates[self.driver._last_link + 1] = step_gate
        self.driver.add_link(step_gate)

    def at(self, place: tuple[int, int, int]) -> StepGate | None:
        """Its end of that link, if it exists."""
        return next((step_gate for step_gate in tuple(self.step_gates.values()) if step_gate.place == place), None)

    def current_link(self) -> StepGate | None:
        """Its end of the current link."""
        link = self.driver.data.link
        return None if link is None else self.step_gates[link]

    def projected(self, base: int) -> list[Any]:
        """The receiver's state; incarnations count from ``base``."""
        data, step_gate = self.driver.data, self.current_link()
        keys = [_key(key, base) for key in (data.decided, data.pending, data.served)]
        answer = data.answer.kind.name if isinstance(data.answer, Refusal) else _ANSWERS[type(data.answer)]
        link = [0, 0] if step_gate is None else [step_gate.place[0], step_gate.place[2]]
        return [self.driver.machine.state.value, link, _number(data.fence, base), *keys, answer]


_ANSWERS = {type(None): "NONE", Ack: "ACK", Deferred: "DEFERRED"}


def _number(incarnation: int, base: int) -> int:
    return incarnation - base if incarnation else 0


def _key(key: Key | None, base: int) -> list[int]:
    return [0, 0] if key is None else [_number(key[0], base), key[1]]


def difference(fields: Sequence[str], wanted: Sequence[Any], found: Sequence[Any]) -> str:
    """How a machine differs from the model; empty if it does not."""
    named = zip(fields, wanted, found, strict=True)
    return "; ".join(f"{name} is {is_}, but {must} in the model" for name, must, is_ in named if is_ != must)
