"""Judges traces: each machine's own steps, its messages, the network, the guarantees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from weightsync.engine.recorder import LineKind
from weightsync.protocol.machine import Role
from weightsync.protocol.messages import Ack, Bye, Refusal
from weightsync.protocol.report import Evidence
from weightsync.verify.guarantees import breaches
from weightsync.verify.lines import Finding, Line, TraceFile, find_files, read_file
from weightsync.verify.network import Network, SentMessage
from weightsync.verify.replaying import HALVES, Machine, replay
from weightsync.verify.talking import listen

_MISSING = "none of the given files has the machine that sent it, or its recording had ended"
_WHOLE = "all files are given (--complete)"


class Judgement(Enum):
    """The judgement of a run."""

    CONFORMS = "conforms"
    DOES_NOT = "does not conform"


@dataclass
class Run:
    """Machines that exchanged messages, and the findings in their trace, in order."""

    machines: tuple[Machine, ...]
    findings: tuple[Finding, ...] = ()
    #: Messages from machines that are in no file or whose recording had ended.
    unseen: tuple[Line, ...] = ()
    #: Every message that was sent, in order of time, with the lines of its arrivals.
    messages: tuple[SentMessage, ...] = ()

    @property
    def judgement(self) -> Judgement:
        """Whether the run conforms."""
        return Judgement.DOES_NOT if self.findings else Judgement.CONFORMS

    @property
    def missing(self) -> tuple[Finding, ...]:
        """The first message over each link whose other end is in no file or had ended its recording.

        A link that an adapter answers itself has no machine at its other end, so none is missing there. A lone goodbye
        may come from a sender that never connected, and does not identify it.
        """
        answered = {place for machine in self.machines for place in _links_answered_by_adapter(machine)}
        first: dict[tuple[str, int], Line] = {}
        for line in self.unseen:
            if line.fields["message"]["is"] != Bye.__name__:
                first.setdefault((line.machine, int(line.fields["link"])), line)
        return tuple(Finding(line, _MISSING, rule=_WHOLE) for place, line in first.items() if place not in answered)

    @property
    def events(self) -> int:
        """How many lines its machines have."""
        return sum(len(machine.lines) for machine in self.machines)

    @property
    def begun(self) -> int:
        """When its first machine began."""
        return min(machine.lines[0].time for machine in self.machines)

    @property
    def ended(self) -> int:
        """When its last line was written."""
        return max(machine.lines[-1].time for machine in self.machines)


@dataclass
class Verdict:
    """The judgement of all traces."""

    files: tuple[TraceFile, ...]
    runs: tuple[Run, ...]
    #: Lines that were changed after they were written.
    damages: tuple[Finding, ...] = field(default=())

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, those of damaged files first."""
        damaged = {found.line for found in self.damages}
        return (*self.damages, *(found for run in self.runs for found in run.findings if found.line not in damaged))

    @property
    def missing(self) -> tuple[Finding, ...]:
        """Messages of machines whose files are missing."""
        return tuple(found for run in self.runs for found in run.missing)

    @property
    def conforms(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    @property
    def events(self) -> int:
        """How many lines record machines."""
        return sum(run.events for run in self.runs)

    def record(self) -> dict[str, Any]:
        """The whole verdict, as JSON."""
        return {
            "conforms": self.conforms,
            "files": [str(file.path) for file in self.files],
            "missing": [found.record() for found in self.missing],
            "damages": [found.record() for found in self.damages],
            "runs": [
                {
                    "verdict": run.judgement.value,
                    "machines": {machine.name: machine.role for machine in run.machines},
                    "events": run.events,
                    "findings": [found.record() for found in run.findings],
                    "unseen": [line.place for line in run.unseen],
                }
                for run in self.runs
            ],
        }


def verify(places: Sequence[Path]) -> Verdict:
    """Judge the traces in files or folders.

    Raises UnreadableTraceError: a place has no trace, or one of another release.
    """
    files = tuple(read_file(path) for path in find_files(places))
    runs = tuple(sorted(map(judge, runs_of(machines_in(files))), key=lambda run: run.begun))
    meant = {found.line: found for run in runs for found in run.findings}
    damages = (file.damage for file in files if file.damage is not None)
    return Verdict(files, runs, tuple(_with_meaning(damage, meant.get(damage.line)) for damage in damages))


def _links_answered_by_adapter(machine: Machine) -> Iterator[tuple[str, int]]:
    for moment in machine.of(LineKind.RECEIVED):
        message = moment.message
        if isinstance(message, Ack | Refusal) and message.evidence is not Evidence.ANSWER:
            yield machine.name, moment.link


def _with_meaning(damage: Finding, meant: Finding | None) -> Finding:
    """A damaged line, with the finding that it would cause if it were undamaged."""
    if meant is None:
        return damage
    return replace(damage, what=f"{damage.what}; {meant.what}", allowed=(*damage.allowed, *meant.allowed))


def machines_in(files: Iterable[TraceFile]) -> list[Machine]:
    """The machines in the files, replayed."""
    lines: dict[tuple[str, str], list[Line]] = defaultdict(list)
    ended: dict[Path, int | None] = {}
    for file in files:
        ended[file.path] = file.ended
        for line in file.lines:
            if line.machine:
                lines[file.clock, line.machine].append(line)
    machines = []
    for (clock, name), events in lines.items():
        role = events[0].fields.get("role")
        model_id = str(events[-1].fields.get("model"))  # the first lines of a machine precede its model's name
        machine = Machine(name, Role(role) if role in HALVES else Role.SENDER, model_id, clock, events)
        machine.ended = ended[events[-1].path]
        replay(machine)
        machines.append(machine)
    return machines


def runs_of(machines: Sequence[Machine]) -> list[Network]:
    """The machines in groups that exchanged messages."""
    network = Network(machines)
    group = {machine.name: {machine.name} for machine in machines}
    for ours, theirs in network.connected:
        joined = group[ours] | group[theirs]
        for each in joined:
            group[each] = joined
    runs: dict[int, list[Machine]] = defaultdict(list)
    for machine in machines:
        runs[id(group[machine.name])].append(machine)
    return [Network(run) for run in runs.values()]


def judge(network: Network) -> Run:
    """Judge machines that exchanged messages."""
    findings = [machine.finding for machine in network.machines if machine.finding is not None]
    findings += [found for found in map(listen, network.machines) if found is not None]
    findings += [*network.findings(), *breaches(network)]
    findings.sort(key=lambda found: found.line.time)
    messages = sorted((sent for each in network.sent.values() for sent in each), key=lambda sent: sent.line.time)
    return Run(tuple(network.machines), tuple(findings), tuple(network.unseen), tuple(messages))
