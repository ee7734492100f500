"""Parameters for the tests of the machines: both roles, with their rows.

The tests read the rows from `spec/protocol.toml` themselves, and so also check the tables that are generated from it.
"""

from __future__ import annotations

import tomllib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from weightsync.protocol._tables import INITIAL, ReceiverInput, SenderInput, State
from weightsync.protocol.machine import ReceiverMachine, SenderMachine

AnyMachine = SenderMachine | ReceiverMachine
AnyInput = SenderInput | ReceiverInput

TOML = tomllib.loads((Path(__file__).parents[3] / "spec" / "protocol.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Role:
    """A role: its machine, its inputs, and its rows as in the file."""

    name: str
    machine: Callable[[], AnyMachine]
    inputs: type[AnyInput]
    rows: dict[tuple[State, AnyInput], State]

    def at(self, state: State) -> AnyMachine:
        """A machine that rows have brought into this state."""
        machine = self.machine()
        for step in self.path(state):
            machine.fire(step)
        assert machine.state is state
        return machine

    def path(self, state: State) -> list[AnyInput]:
        """The fewest inputs that lead from the initial state to this state."""
        paths: dict[State, list[AnyInput]] = {INITIAL: []}
        queue = deque([INITIAL])
        while queue:
            here = queue.popleft()
            for (source, step), target in self.rows.items():
                if source is here and target not in paths:
                    paths[target] = [*paths[here], step]
                    queue.append(target)
        return paths[state]


def _rows(name: str, inputs: type[AnyInput]) -> dict[tuple[State, AnyInput], State]:
    return {
        (State(source), inputs(row["input"])): State(source if row["to"] == "same" else row["to"])
        for row in TOML[name]["row"]
        for source in row["from"]
    }


SENDER = Role("sender", SenderMachine, SenderInput, _rows("sender", SenderInput))
RECEIVER = Role("receiver", ReceiverMachine, ReceiverInput, _rows("receiver", ReceiverInput))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `role` with both roles, and `state` with all five states.

    A `pair` is any (role, state, input). A `row` is a pair that has a row, and a `gap` is one that has none.
    """
    names = set(metafunc.fixturenames)
    roles = (SENDER, RECEIVER)
    pairs = [(role, state, step) for role in roles for state in State for step in role.inputs]
    kinds = {
        "pair": pairs,
        "row": [(role, state, step) for role, state, step in pairs if (state, step) in role.rows],
        "gap": [(role, state, step) for role, state, step in pairs if (state, step) not in role.rows],
    }
    for kind in names & set(kinds):
        ids = [f"{role.name}-{state.value}-{step.value}" for role, state, step in kinds[kind]]
        metafunc.parametrize(kind, kinds[kind], ids=ids)
    if "role" in names:
        metafunc.parametrize("role", roles, ids=lambda role: role.name)
    if "state" in names:
        metafunc.parametrize("state", list(State), ids=lambda state: state.value)
