"""The model's names for the machines of a run: it numbers senders, workers and links from 1, and ranks incarnations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weightsync.engine.recorder import LineKind
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.verify.judging import Run
from weightsync.verify.lines import Line
from weightsync.verify.network import LinkKey, Network
from weightsync.verify.replaying import Machine

#: A TLA+ value: a number, a string, a Boolean, a tuple, or a record.
Value = Any


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large a run may be for the model to follow it."""

    senders: int = 8
    workers: int = 8
    versions: int = 50
    links: int = 20
    events: int = 1000


class BeyondTheModelError(Exception):
    """The model cannot express something in a run. The message says what."""


@dataclass(frozen=True, slots=True)
class RecordedAction:
    """One action, and the line that records it."""

    line: Line
    action: dict[str, Value]


@dataclass
class Naming:
    """The model's names for everything in a run.

    Raises BeyondTheModelError: the model cannot express something in the run.
    """

    run: Run
    bounds: Bounds
    network: Network = field(init=False)
    senders: dict[str, int] = field(default_factory=dict)
    workers: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    #: For each link of a sender, its worker and its number among the links to that worker.
    links: dict[LinkKey, tuple[int, int]] = field(default_factory=dict)
    #: The worker of each receiver.
    worker_of: dict[str, int] = field(default_factory=dict)
    #: The newest version, and the largest number of links to one worker.
    versions: int = 0
    deepest: int = 1

    def __post_init__(self) -> None:
        if self.run.findings:
            raise BeyondTheModelError("it does not conform")
        if len({machine.clock for machine in self.run.machines}) > 1:
            raise BeyondTheModelError("it was recorded with several clocks")
        if self.run.unseen and any(machine.ended for machine in self.run.machines):
            raise BeyondTheModelError("it continued after the end of a recording")
        self.network = Network(self.run.machines)
        connected = [machine for machine in self.run.machines if machine.incarnation]
        connected.sort(key=lambda machine: machine.lines[0].time)
        self.senders = {machine.name: number for number, machine in enumerate(connected, 1)}
        self.ranks = {inc: rank for rank, inc in enumerate(sorted(machine.incarnation for machine in connected), 1)}
        if len(self.ranks) < len(connected):
            raise BeyondTheModelError("two senders have the same incarnation")
        for machine in connected:
            self._number_links(machine)
        self._number_workers()
        self._require_within()

    def _number_links(self, sender: Machine) -> None:
        created: dict[int, int] = {}
        for moment in sender.of(LineKind.STEP):
            if isinstance(moment.event, sending.Join):
                worker, link = moment.event.worker, moment.event.link
                created[worker] = created.get(worker, 0) + 1
                number = self.workers.setdefault(worker, len(self.workers) + 1)
                self.links[sender.name, link] = (number, created[worker])

    def _number_workers(self) -> None:
        for (receiver, link), ends in self.network.hellos.items():
            if len({sender for sender, _ in ends}) > 1 or len(ends) > 1:
                raise BeyondTheModelError("two handshakes arrived over one link of a worker")
            number = self.links[ends[0]][0]
            if self.worker_of.setdefault(receiver, number) != number:
                raise BeyondTheModelError("two senders number one worker differently")
            del link

    def _require_within(self) -> None:
        versions = max((machine.moments[-1].after.version for machine in self._sending()), default=0)
        deepest = max((k for _, k in self.links.values()), default=1)
        sizes = {
            "senders": (len(self.senders), self.bounds.senders),
            "workers": (len(self.workers), self.bounds.workers),
            "versions": (versions, self.bounds.versions),
            "links to a worker": (deepest, self.bounds.links),
        }
        for name, (size, bound) in sizes.items():
            if size > bound:
                raise BeyondTheModelError(f"more than {bound} {name}")
        if not self.senders:
            raise BeyondTheModelError("no sender connected")
        self.versions, self.deepest = versions, deepest

    def _sending(self) -> Iterator[Any]:
        return (self.network.by_name[name] for name in self.senders)

    def model_link(self, machine: Machine, w: int, link: int) -> dict[str, Value]:
        """The model's link for a link of a worker."""
        ends = self.network.hellos[machine.name, link]
        if not ends:
            raise BeyondTheModelError("a sender is not recorded")
        return {"w": w, "s": self.senders[ends[0][0]], "k": self.links[ends[0]][1]}

    def key(self, key: receiving.Key | None) -> tuple[int, int]:
        """A version of an incarnation, in the model's numbers."""
        return (0, 0) if key is None else (self.ranks.get(key[0], 0), key[1])
