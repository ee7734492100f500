"""The pure halves of both roles, stepped by what the recorders saw: the drivers' expected states and messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from weightsync.engine.driver import Backlog
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update

#: Kind, incarnation and version of a message.
SentMessage = tuple[str, int, int]


def sender_projection(state: State, data: sending.SenderData) -> dict[str, Any]:
    """The parts of a sender's state that are compared, without texts."""
    out = data.outstanding
    owed = None if out is None else dict(out.owed)
    outcomes = None if out is None else {worker: outcome.kind.name for worker, outcome in out.outcomes.items()}
    workers = {w: (e.link, e.link_state.name, e.served, e.due, e.catching) for w, e in data.workers.items()}
    return {
        "state": state.value,
        "version": data.version,
        "due to all": data.due_all,
        "members": workers,
        "owed": owed,
        "outcomes": outcomes,
        "stale answers": data.stale,
    }


def receiver_projection(state: State, data: receiving.ReceiverData) -> dict[str, Any]:
    """The parts of a receiver's state that are compared, without texts."""
    return {
        "state": state.value,
        "link": data.link,
        "fence": data.fence,
        "decided": data.decided,
        "pending": data.pending,
        "served": data.served,
    }


class SenderOracle:
    """The expected state of a sender."""

    def __init__(self) -> None:
        self.state = State.UNINITIALIZED
        self.data = sending.SenderData()
        #: What it must have tried to send, by link.
        self.sent: dict[int, list[SentMessage]] = defaultdict(list)
        self._open: dict[int, int] = {}
        self._lossy: set[int] = set()
        self._backlogs: dict[int, Backlog] = defaultdict(Backlog)
        self._late: list[sending.LinkLost] = []

    def take(self, event: sending.Event) -> None:
        """Take an event."""
        step = sending.step(self.state, self.data, event)
        self.state, self.data = step.to, step.data
        for effect in step.effects:
            self._apply_effect(effect)
        self.last: SenderInput | None = step.input

    def _apply_effect(self, effect: sending.Effect) -> None:
        match effect:
            case sending.Greet(_, link, due):
                self._send(link, "Hello", due)
                if due:
                    self._update(link, due)
            case sending.Dispatch(_, link, version):
                self._update(link, version)
            case sending.CloseLink(_, link):
                if self._open.pop(link, None) is not None:
                    self.sent[link].append(("Bye", self.data.incarnation, 0))
            case sending.Conclude() | sending.Farewell():
                pass

    def _update(self, link: int, version: int) -> None:
        if link in self._open and (link in self._lossy or self._backlogs[link].admit(version)):
            self._send(link, "Update", version)

    def _send(self, link: int, kind: str, version: int) -> None:
        if link in self._open:
            self.sent[link].append((kind, self.data.incarnation, version))

    def join(self, worker: int, link: int, loses: bool) -> None:
        """A worker joins on a new link."""
        events = sending.joining(self.state, self.data, worker, link)
        self._open[link] = worker
        if loses:
            self._lossy.add(link)
        for event in events:
            self.take(event)

    def remove(self, worker: int, reason: str) -> None:
        """A worker is removed."""
        for event in sending.removal(self.state, self.data, worker, reason):
            self.take(event)

    def came(self, link: int, message: Message) -> None:
        """A message arrived at the sender's end."""
        worker = self._open.get(link)
        if worker is None:
            return
        match message:
            case Bye(incarnation=0) | Refusal(incarnation=0):
                expected = self.data.workers[worker].link_state is sending.LinkState.EXPECTED
                self.take(sending.Answer(worker, link, message))
                if expected:
                    self.take(sending.LinkLost(worker, link, "ended before the handshake"))
            case Hello() | Bye():
                self.take(sending.Answer(worker, link, message))
            case Ack() | Refusal():
                self.take(sending.Answer(worker, link, message))
                self._catch_up(link, message)
            case Update():
                pass

    def _catch_up(self, link: int, message: Ack | Refusal) -> None:
        if link in self._open and message.incarnation == self.data.incarnation:
            waiting = self._backlogs[link].answered(message.version)
            if waiting:
                self._update(link, waiting)

    def ended(self, link: int) -> None:
        """The link reported its death: it counts as lost once everything that it delivered is processed."""
        if link in self._open:
            self._late.append(sending.LinkLost(self._open[link], link, "dead"))

    def settle(self) -> None:
        """Process the losses."""
        while self._late:
            self.take(self._late.pop(0))

    def difference(self, driver: SenderDriver) -> str:
        """How the driver differs from the expected state; empty if it does not."""
        wanted = sender_projection(self.state, self.data)
        return _difference(wanted, sender_projection(driver.machine.state, driver.data))


class ReceiverOracle:
    """The expected state of a receiver. Every handshake fits here: the kit's models are all alike.

    Args:
        failed: whether the message of this number over a link, counted from 0, could not be sent.
    """

    def __init__(self, failed: Callable[[int, int], bool]) -> None:
        self._failed = failed
        self.state = State.UNINITIALIZED
        self.data = receiving.ReceiverData()
        self.sent: dict[int, list[SentMessage]] = defaultdict(list)
        self.open: set[int] = set()

    def take(self, event: receiving.Event) -> None:
        """Take an event."""
        step = receiving.step(self.state, self.data, event)
        self.state, self.data = step.to, step.data
        for effect in step.effects:
            self._apply_effect(effect)

    def _apply_effect(self, effect: receiving.Effect) -> None:
        match effect:
            case receiving.Greet(link):
                served = self.data.served
                version = served[1] if served and served[0] == self.data.fence else 0
                self._send(link, ("Hello", self.data.fence, version))
            case receiving.Reject(link, incarnation, _, _):
                self._send(link, ("Refusal", incarnation, 0))
            case receiving.Disown(link, incarnation):
                if link in self.open:
                    self.sent[link].append(("Refusal", incarnation, 0))
            case receiving.Tell(link, key, _):
                self._send(link, ("Refusal", *key))
            case receiving.Reply(link, answer):
                self._send(link, (type(answer).__name__, answer.incarnation, answer.version))
            case receiving.CloseLink(link):
                self.open.discard(link)
            case receiving.Leave(link):
                self._close_with_goodbye(link, self.data.fence)

    def _send(self, link: int, message: SentMessage) -> None:
        if link in self.open:
            self.sent[link].append(message)
            if self._failed(link, len(self.sent[link]) - 1):
                self.ended(link)

    def _close_with_goodbye(self, link: int, incarnation: int) -> None:
        if link in self.open:
            self.open.remove(link)
            self.sent[link].append(("Bye", incarnation, 0))

    def close_all(self) -> None:
        """Every link is closed, each with a goodbye. Over those without a handshake it names no sender."""
        for link in sorted(self.open):
            self._close_with_goodbye(link, 0)

    def came(self, link: int, message: Message) -> None:
        """A message arrived at the receiver's end."""
        if link not in self.open:
            return
        match message:
            case Hello():
                self.take(receiving.HelloArrived(link, message.incarnation, senders_number=message.link))
            case Update():
                self.take(receiving.UpdateArrived(link, message.incarnation, message.version))
            case Bye():
                self.take(receiving.Goodbye(link, message.incarnation))
            case _:
                pass

    def ended(self, link: int, failure: str = "dead") -> None:
        """The link is dead, or its sender has said goodbye."""
        if link not in self.open:
            return
        self.take(receiving.LinkDown(link, failure))

    def answered(self) -> None:
        """The answer was sent."""
        if self.state is State.AWAITING_ACK:
            self.take(receiving.Answered())

    def difference(self, driver: ReceiverDriver) -> str:
        """How the driver differs from the expected state; empty if it does not."""
        wanted = receiver_projection(self.state, self.data)
        return _difference(wanted, receiver_projection(driver.machine.state, driver.data))


def _difference(wanted: dict[str, Any], found: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} is {found[name]}, but must be {value}" for name, value in wanted.items() if found[name] != value
    )
