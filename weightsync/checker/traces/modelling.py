"""A run as events of AckProtocol.tla: the actions that it took, and what the machines were after each.

The model counts senders, workers and links from 1 and ranks incarnations; its network here is the weakest (messages
may be late, doubled or lost), so that every order of reading that the Python checker allows can be followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync._tables import RefusalKind, State
from weightsync.checker.traces.judging import Run
from weightsync.checker.traces.lines import Line
from weightsync.checker.traces.network import Network, Place
from weightsync.checker.traces.replaying import Machine, Moment
from weightsync.messages import Ack, Hello, Refusal
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.report import Evidence
from weightsync.tracing import What

#: A value of TLA+: a number, a string, a truth value, a tuple, or a record.
Value = Any


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large a run may be for the model to follow it."""

    senders: int = 4
    workers: int = 3
    versions: int = 12
    links: int = 6
    events: int = 400


class BeyondTheModelError(Exception):
    """The model has no word for something in a run. The message says what."""


@dataclass(frozen=True, slots=True)
class Acted:
    """One action, and the line that tells of it."""

    line: Line
    action: dict[str, Value]


@dataclass
class Modelled:
    """A run as the model's events, and the constants that it needs."""

    run: Run
    acts: list[Acted]
    senders: int
    workers: int
    versions: int
    links: int

    @property
    def text(self) -> str:
        """Its events, as TLA+ has them."""
        return ",\n".join(literal(act.action) for act in self.acts)


def modelled(run: Run, bounds: Bounds) -> Modelled:
    """The model's events of a run.

    Raises:
        BeyondTheModelError: the model cannot follow it.
    """
    return _Projection(run, bounds).all()


@dataclass
class _Projection:
    run: Run
    bounds: Bounds
    network: Network = field(init=False)
    senders: dict[str, int] = field(default_factory=dict)
    workers: dict[int, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    #: A sender's link: its worker, and the how manyth to it.
    links: dict[Place, tuple[int, int]] = field(default_factory=dict)
    #: Which worker a receiver is.
    seats: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.run.findings:
            raise BeyondTheModelError("it does not conform")
        if len({machine.clock for machine in self.run.machines}) > 1:
            raise BeyondTheModelError("it was recorded with several clocks")
        self.network = Network(self.run.machines)
        connected = [machine for machine in self.run.machines if machine.incarnation]
        connected.sort(key=lambda machine: machine.lines[0].time)
        self.senders = {machine.name: number for number, machine in enumerate(connected, 1)}
        self.ranks = {inc: rank for rank, inc in enumerate(sorted(machine.incarnation for machine in connected), 1)}
        for machine in connected:
            self._lay(machine)
        self._seat()
        self._require_within()

    def _lay(self, sender: Machine) -> None:
        laid: dict[int, int] = {}
        for moment in sender.of(What.STEP):
            if isinstance(moment.event, sending.Join):
                worker, link = moment.event.worker, moment.event.link
                laid[worker] = laid.get(worker, 0) + 1
                number = self.workers.setdefault(worker, len(self.workers) + 1)
                self.links[sender.name, link] = (number, laid[worker])

    def _seat(self) -> None:
        for (receiver, link), ends in self.network.hellos.items():
            if len({sender for sender, _ in ends}) > 1 or len(ends) > 1:
                raise BeyondTheModelError("two handshakes came over one link of a worker")
            seat = self.links[ends[0]][0]
            if self.seats.setdefault(receiver, seat) != seat:
                raise BeyondTheModelError("a worker has another id for another sender")
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
        if not self.senders or not versions:
            raise BeyondTheModelError("nothing was sent")
        self._versions, self._deepest = versions, deepest

    def _sending(self) -> Iterator[Any]:
        return (self.network.by_name[name] for name in self.senders)

    def all(self) -> Modelled:
        """Every event, in the order of time."""
        acts: list[tuple[int, Acted]] = []
        for name, number in self.senders.items():
            acts += self._of_sender(self.network.by_name[name], number)
        for worker in set(self.seats.values()):
            acts += self._of_worker(worker)
        acts.sort(key=lambda act: act[0])
        if len(acts) > self.bounds.events:
            raise BeyondTheModelError(f"more than {self.bounds.events} events")
        ordered = [act for _, act in acts]
        return Modelled(self.run, ordered, len(self.senders), len(self.workers), self._versions, self._deepest)

    # ------------------------------------------------------------------------------------------ senders

    def _of_sender(self, machine: Machine, number: int) -> Iterator[tuple[int, Acted]]:
        fenced: dict[int, int] = {}
        if number > 1:
            line = machine.lines[0]
            yield line.time, Acted(line, {"a": "Copy", "s": 1, "t": number})
        for moment in machine.of(What.STEP):
            if moment.step is None or moment.step.input is None:
                continue
            action = self._sender_action(machine, number, moment)
            event = moment.event
            if isinstance(event, sending.Answer) and isinstance(event.message, Refusal) and event.message.version == 0:
                spoken = self._spoken(machine, event)
                fenced[event.worker] = event.message.fence if spoken else 0
                if not spoken:
                    action = self._lost(machine, number, event.link)
            shown = self._sender_shown(machine, number, moment, fenced)
            yield moment.line.time, Acted(moment.line, {**action, **shown})

    def _spoken(self, machine: Machine, event: sending.Answer) -> bool:
        """Whether a rejection was a message; otherwise it stands for a goodbye that named a newer sender."""
        ends = self.network.heard_by[machine.name, event.link]
        return any(flown.message == event.message for end in ends for flown in self.network.sent[end])

    def _sender_action(self, machine: Machine, s: int, moment: Moment) -> dict[str, Value]:
        match moment.event:
            case sending.Connect(incarnation):
                if not moment.before.roll:  # type: ignore[union-attr]
                    raise BeyondTheModelError("a sender connects to nobody")
                return {"a": "Connect", "s": s, "c": self.ranks[incarnation]}
            case sending.Send(targets):
                return self._dispatch("Send", s, targets)
            case sending.SendAsync(targets):
                return self._dispatch("SendAsync", s, targets)
            case sending.Wait() | sending.Abandon():
                return {"a": type(moment.event).__name__, "s": s}
            case sending.Deadline() | sending.Interrupted():
                return {"a": type(moment.event).__name__, "s": s}
            case sending.Close():
                return {"a": "CloseSender", "s": s}
            case sending.Join(worker, _) | sending.Remove(worker):
                self._require_lost(moment, worker)
                return {"a": type(moment.event).__name__, "s": s, "w": self.workers[worker]}
            case sending.LinkLost(_, link):
                return self._lost(machine, s, link)
            case sending.Answer():
                return self._answer(machine, s, moment.event)
        raise BeyondTheModelError(f"{moment.event}")

    def _require_lost(self, moment: Moment, worker: int) -> None:
        data = moment.before
        assert isinstance(data, sending.SenderData)
        entry = data.roll.get(worker)
        joins = isinstance(moment.event, sending.Join)
        if entry is not None and entry.standing is not sending.Standing.LOST and (joins or data.incarnation):
            raise BeyondTheModelError("a link is replaced before the sender connects")

    def _dispatch(self, name: str, s: int, targets: tuple[int, ...] | None) -> dict[str, Value]:
        if targets is None:
            return {"a": f"{name}All", "s": s}
        return {"a": f"{name}To", "s": s, "ws": frozenset(self.workers[worker] for worker in targets)}

    def _lost(self, machine: Machine, s: int, link: int) -> dict[str, Value]:
        return {"a": "Lost", "s": s, "w": self.links[machine.name, link][0]}

    def _answer(self, machine: Machine, s: int, event: sending.Answer) -> dict[str, Value]:
        w, k = self.links[machine.name, event.link]
        message = event.message
        if not self.network.heard_by[machine.name, event.link]:
            raise BeyondTheModelError("a worker is not recorded, or has no receiver of ours")
        if message.incarnation != machine.incarnation:
            raise BeyondTheModelError("an answer was meant for another sender")
        where = {"s": s, "w": w, "k": k}
        match message:
            case Hello():
                return {"a": "AnswerHello", **where}
            case Ack() | Refusal() if message.evidence is not Evidence.ANSWER and not self._was_sent(machine, event):
                raise BeyondTheModelError("an adapter answered for its worker")
            case Ack():
                return {"a": "AnswerAck", **where, "n": message.version}
            case Refusal(version=0, kind=kind):
                return {"a": "AnswerRejected", **where, "kind": kind.name}
            case Refusal(version=version, kind=kind):
                return {"a": "AnswerRefusal", **where, "n": version, "kind": kind.name}

    def _was_sent(self, machine: Machine, event: sending.Answer) -> bool:
        ends = self.network.heard_by[machine.name, event.link]
        return any(flown.message == event.message for end in ends for flown in self.network.sent[end])

    def _sender_shown(self, machine: Machine, s: int, moment: Moment, fenced: dict[int, int]) -> dict[str, Value]:
        data, out, told = moment.after, None, True
        assert isinstance(data, sending.SenderData)
        out = data.outstanding
        if out is None:
            ends = [effect for effect in moment.step.effects if isinstance(effect, sending.Conclude)]  # type: ignore[union-attr]
            out, told = (ends[0].outstanding, True) if ends else (None, False)
        return {
            "who": "s",
            "st": moment.state.value,
            "inc": self.ranks.get(data.incarnation, 0),
            "v": data.version,
            "all": data.due_all,
            "roll": tuple(self._entry(machine, data, worker, fenced) for worker in self.workers),
            "told": told,
            "out": tuple(_outcome(out, worker) for worker in self.workers),
        }

    def _entry(
        self, machine: Machine, data: sending.SenderData, worker: int, fenced: dict[int, int]
    ) -> tuple[Value, ...]:
        entry = data.roll.get(worker)
        if entry is None:
            return ("NONE", 0, 0, 0, 0, 0)
        k = self.links[machine.name, entry.link][1]
        fence = self.ranks.get(entry.fence, 0) if fenced.get(worker) else 0
        return (entry.standing.name, k, entry.served, entry.due, entry.catching, fence)

    # ---------------------------------------------------------------------------------------- receivers

    def _of_worker(self, w: int) -> Iterator[tuple[int, Acted]]:
        """The lives of one worker, one after another."""
        lives = sorted(
            (self.network.by_name[name] for name, seat in self.seats.items() if seat == w),
            key=lambda machine: machine.lines[0].time,
        )
        for life, after in zip(lives, [*lives[1:], None], strict=True):
            yield from self._of_receiver(life, w)
            if after is not None:
                end = life.lines[-1]
                if any(time < end.time for time in self._laid_to(after)):
                    raise BeyondTheModelError("two lives of a worker overlap")
                yield end.time, Acted(end, {"a": "CrashReceiver", "w": w})

    def _laid_to(self, receiver: Machine) -> Iterator[int]:
        """When links to a receiver were laid."""
        for (name, _), ends in self.network.hellos.items():
            for sender, link in ends if name == receiver.name else ():
                for moment in self.network.by_name[sender].of(What.LINK):
                    if moment.link == link:
                        yield moment.line.time

    def _of_receiver(self, machine: Machine, w: int) -> Iterator[tuple[int, Acted]]:
        spoiled, left = False, 0
        for moment in machine.moments:
            event = moment.event
            if moment.line.what is What.SPOILED:
                spoiled = True
            if moment.line.what is What.SENT and isinstance(moment.message, Ack | Refusal):
                left = moment.line.time
            if moment.line.what is What.REFUSED:
                raise BeyondTheModelError("a peer broke the protocol")
            if moment.line.what is not What.STEP or moment.step is None or moment.step.input is None:
                continue
            spoiled = spoiled and not isinstance(event, receiving.Applied)
            action = self._receiver_action(machine, w, moment)
            if action is not None:
                # The model's answer leaves when the receiver knows that it has; a sender may have read it before.
                time = left if isinstance(event, receiving.Answered) and left else moment.line.time
                yield time, Acted(moment.line, {**action, **self._receiver_shown(machine, moment, spoiled)})

    def _receiver_action(self, machine: Machine, w: int, moment: Moment) -> dict[str, Value] | None:
        event = moment.event
        match event:
            case receiving.HelloArrived(misfit=misfit):
                return {"a": "Misfit" if misfit else "HelloArrived", **self._over(machine, w, event.link)}
            case receiving.UpdateArrived(version=version):
                return {"a": "UpdateArrived", **self._over(machine, w, event.link), "n": version}
            case receiving.LinkDown(link):
                if moment.before.link is None and moment.state_before is State.UNINITIALIZED:  # type: ignore[union-attr]
                    return None
                return {"a": "LinkDown", **self._over(machine, w, link)}
            case receiving.Close():
                return {"a": "CloseReceiver", "w": w}
            case _:
                return {"a": type(event).__name__, "w": w}

    def _over(self, machine: Machine, w: int, link: int) -> dict[str, Value]:
        ends = self.network.hellos[machine.name, link]
        if not ends:
            raise BeyondTheModelError("a sender is not recorded")
        return {"w": w, "s": self.senders[ends[0][0]], "k": self.links[ends[0]][1]}

    def _receiver_shown(self, machine: Machine, moment: Moment, spoiled: bool) -> dict[str, Value]:
        data = moment.after
        assert isinstance(data, receiving.ReceiverData)
        where = (0, 0)
        if data.link is not None:
            over = self._over(machine, 0, data.link)
            where = (over["s"], over["k"])
        kind = "NONE" if data.answer is None else "ACK" if isinstance(data.answer, Ack) else RefusalKind.REFUSED.name
        return {
            "who": "r",
            "st": moment.state.value,
            "link": where,
            "fence": self.ranks.get(data.fence, 0),
            "decided": self._key(data.decided),
            "pending": self._key(data.pending),
            "spoiled": spoiled,
            "served": self._key(data.served),
            "answer": kind,
        }

    def _key(self, key: receiving.Key | None) -> tuple[int, int]:
        return (0, 0) if key is None else (self.ranks.get(key[0], 0), key[1])


def _outcome(out: sending.Outstanding | None, worker: int) -> str:
    if out is None or (worker not in out.owed and worker not in out.outcomes):
        return "NONE"
    return "PENDING" if worker in out.owed else out.outcomes[worker].kind.name


def literal(value: Value) -> str:
    """A value as TLA+ has it."""
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
    told = ",\n".join(f"<<\n{trace.text}\n>>" for trace in traces)
    return f"---- MODULE TraceData ----\nTraces == <<\n{told}\n>>\n====\n"
