"""A run as events of AckProtocol.tla: the actions that it took, and the state of each machine after them.

The model's network here is the weakest (messages may be late, duplicated or lost), so the model can follow every order
of reading that the Python checker allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.verify.acting import SenderActs, WorkerActs
from weightsync.verify.judging import Run
from weightsync.verify.naming import BeyondTheModelError, Bounds, Naming, RecordedAction, Value


@dataclass
class Modelled:
    """A run as the model's events, with the constants that it needs."""

    run: Run
    acts: list[RecordedAction]
    senders: int
    workers: int
    versions: int
    links: int

    @property
    def size(self) -> int:
        """How large the model's constants must be for it. The cost of an event for TLC grows with them."""
        return self.senders * self.workers * self.links * self.versions

    @property
    def text(self) -> str:
        """Its events in TLA+."""
        return ",\n".join(literal(act.action) for act in self.acts)


def modelled(run: Run, bounds: Bounds) -> Modelled:
    """The model's events of a run, in the order of time. Raises BeyondTheModelError: the model cannot follow it."""
    names = Naming(run, bounds)
    acts: list[tuple[int, RecordedAction]] = []
    for name, number in names.senders.items():
        acts += SenderActs(names).of(names.network.by_name[name], number)
    for worker in set(names.worker_of.values()):
        acts += WorkerActs(names).of(worker)
    acts.sort(key=lambda act: act[0])
    if len(acts) > bounds.events:
        raise BeyondTheModelError(f"more than {bounds.events} events")
    ordered = [act for _, act in acts]
    return Modelled(run, ordered, len(names.senders), len(names.workers), names.versions, names.deepest)


def literal(value: Value) -> str:
    """A value in TLA+."""
    match value:
        case bool():
            return "TRUE" if value else "FALSE"
        case int():
            return str(value)
        case str():
            return f'"{value}"'
        case tuple():
            return f"<<{', '.join(map(literal, value))}>>"
        case frozenset():
            return f"{{{', '.join(map(literal, sorted(value)))}}}"
    return f"[{', '.join(f'{name} |-> {literal(each)}' for name, each in value.items())}]"


def data_module(traces: Sequence[Modelled]) -> str:
    """`TraceData.tla`: the traces as one literal."""
    literals = ",\n".join(f"<<\n{trace.text}\n>>" for trace in traces)
    return f"---- MODULE TraceData ----\nTraces == <<\n{literals}\n>>\n====\n"
