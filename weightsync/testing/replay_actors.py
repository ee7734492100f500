"""The actors of one path and their links, and how the replay waits for what is in flight in the model."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.clock import Deadline, new_incarnation
from weightsync.protocol.messages import Bye, Hello, Message, Refusal, Update
from weightsync.testing.link_setup import LinkSetup
from weightsync.testing.payloads import Payloads
from weightsync.testing.projecting import ReceiverPlayer, SenderPlayer
from weightsync.testing.replay_data import Configuration, Step
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.testing.step_gate import StepGate
from weightsync.transports.base import Received

#: The size of each version's weights.
_NBYTES = 1000


class MessageLost(Exception):
    """The adapter lost a message that the path needs; its delivery permits that."""


class ReplayActors:
    """The senders, receivers and links of one path.

    Args:
        link_setup: makes the links.
        configuration: the configuration that the path belongs to.
    """

    def __init__(self, link_setup: LinkSetup, configuration: Configuration) -> None:
        self.link_setup = link_setup
        self.payloads = Payloads(_NBYTES, link_setup.storage)
        self._base = new_incarnation(0)
        self._workers = configuration.workers
        self._senders: dict[int, SenderPlayer] = {1: SenderPlayer()}
        self._dead: set[int] = set()
        self._receivers = {worker: ReceiverPlayer() for worker in range(1, configuration.workers + 1)}
        self._laid: dict[tuple[int, int], int] = {}
        #: The owner of each link's far end.
        self._owners: dict[tuple[int, int, int], ReceiverPlayer] = {}
        self._cuts: dict[tuple[int, int, int], Callable[[], None]] = {}
        self._step: Step | None = None

    def _far_end(self, place: tuple[int, int, int]) -> tuple[ReceiverPlayer, StepGate, StepGate]:
        """The receiver of a link, its end (waited for if necessary), and the sender's end."""
        s, w, _ = place
        other = next(step_gate for step_gate in self._senders[s].step_gates.values() if step_gate.place == place)
        receiver = self._receivers[w]
        self.link_setup.until(
            lambda: receiver.at(place) is not None,
            other.write if not other.dead else lambda: None,
            Rule.ARRIVES,
            "a message was sent, but the receiver's end never appeared",
        )
        step_gate = receiver.at(place)
        assert step_gate is not None
        return receiver, step_gate, other

    def _await(self, step_gate: StepGate, other: StepGate | None, wanted: Callable[[Message], bool]) -> Received:
        """The wanted message, once it has arrived at this end."""
        deadline = Deadline(self.link_setup.grace if step_gate.delivery.loses else self.link_setup.patience)
        while (found := step_gate.find(wanted)) is None:
            self._wait(step_gate, other)
            if deadline.passed and step_gate.find(wanted) is None:
                if step_gate.delivery.loses:
                    raise MessageLost
                self._look_elsewhere()
                came = [type(each.message).__name__ for each in step_gate.waiting]
                raise RuleViolation(
                    Rule.ARRIVES,
                    f"a message in flight in the model never arrived at {step_gate.link_pair.name}; these did: {came}",
                )
        return found

    def _look_elsewhere(self) -> None:
        """Report a message that arrived at another end than it was sent to."""
        players: list[SenderPlayer | ReceiverPlayer] = [*self._senders.values(), *self._receivers.values()]
        for step_gate in [step_gate for player in players for step_gate in tuple(player.step_gates.values())]:
            step_gate.fetch()

    def _await_end(self, step_gate: StepGate, other: StepGate | None, or_goodbye: bool = False) -> Received | None:
        """Wait until this end has reported its death; the goodbye instead, where that is enough."""
        deadline = Deadline(self.link_setup.patience)
        while step_gate.ended is None:
            if or_goodbye and (bye := step_gate.find(lambda message: isinstance(message, Bye))) is not None:
                return bye
            if deadline.passed:
                raise RuleViolation(
                    Rule.DEATH_REPORTED,
                    f"{step_gate.link_pair.name}, {step_gate.end.value}: it did not report the link's end",
                )
            self._wait(step_gate, other)
        return step_gate.find(lambda message: isinstance(message, Bye)) if or_goodbye else None

    def _wait(self, step_gate: StepGate, other: StepGate | None) -> None:
        step_gate.fetch()
        self.link_setup.watch.check()
        if other is not None and not other.dead:
            other.write()
        self.link_setup.readable(step_gate, 0.005)


def update_or_hello(version: int) -> Callable[[Message], bool]:
    """Matches that version on its way to a worker; version 0: the handshake."""
    if version:
        return lambda message: isinstance(message, Update) and message.version == version
    return lambda message: isinstance(message, Hello)


def refusal(version: int, kind: str) -> Callable[[Message], bool]:
    """Matches that refusal."""
    return lambda m: isinstance(m, Refusal) and m.version == version and m.kind.name == kind
