"""Real drivers over an adapter's links, compared after every step with the expected state."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol._tables import State
from weightsync.testing.ends import Ends
from weightsync.testing.link_pair import EventKind
from weightsync.testing.link_recorder import LinkRecorder
from weightsync.testing.link_setup import LinkSetup
from weightsync.testing.oracle import ReceiverOracle, SenderOracle
from weightsync.testing.payloads import Payloads
from weightsync.testing.rules import Rule, RuleViolation


class Sender:
    """A sender's driver, with the oracle of its expected state."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.driver = SenderDriver("policy")
        self.oracle = SenderOracle()
        #: Its links by number, and the newest link of each worker.
        self.links: dict[int, LinkRecorder] = {}
        self.of: dict[int, LinkRecorder] = {}
        self.gone = False


class Receiver:
    """A receiver's driver, with the oracle of its expected state."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.driver = ReceiverDriver("policy")
        self.oracle = ReceiverOracle(lambda link, index: index in self.links[link].failures)
        self.links: dict[int, LinkRecorder] = {}
        #: The weights that it serves, as they arrived. They must not change.
        self.served: tuple[memoryview, bytes] | None = None
        self.gone = False

    @property
    def over(self) -> bool:
        """Whether it has ended or is closed."""
        return self.gone or self.driver.machine.state is State.CLOSED


class Comparing:
    """Senders, their workers and their links, compared with their expected states.

    Args:
        link_setup: makes the links and waits for them.
        nbytes: the size of each version's weights.
    """

    def __init__(self, link_setup: LinkSetup, nbytes: int = 1000) -> None:
        self.link_setup = link_setup
        self.payloads = Payloads(nbytes, link_setup.storage)
        self.senders: list[Sender] = []
        self.receivers: dict[int, Receiver] = {}
        self._all_receivers: list[Receiver] = []
        self._laid: dict[int, Ends] = {}
        #: Links that arrived for a worker, perhaps in a thread of the adapter, and were not given to it yet.
        self._come_up: deque[tuple[Receiver, LinkRecorder]] = deque()
        self.new_sender()

    @property
    def sender(self) -> Sender:
        """The newest sender."""
        return self.senders[-1]

    def new_sender(self) -> None:
        """Add a sender that knows no worker yet."""
        self.senders.append(Sender("the sender" if not self.senders else f"sender {len(self.senders) + 1}"))

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Do one step, then compare."""
        self.link_setup.watch.steps.append(what)
        yield
        self.compare()

    # ----------------------------------------------------------------------------------------- comparing

    def compare(self) -> None:
        """Feed the oracles with what was seen, and compare everything with them."""
        self.link_setup.watch.check()
        self._follow()
        for sender in self.senders:
            if not sender.gone:
                self._agree(sender.name, sender.oracle.difference(sender.driver))
                self._compare_sent(sender.name, sender.links, sender.oracle.sent)
        for receiver in self.receivers.values():
            if not receiver.gone:
                self._agree(f"worker {receiver.worker}", receiver.oracle.difference(receiver.driver))
                self._compare_sent(f"worker {receiver.worker}", receiver.links, receiver.oracle.sent)
        self.payloads.scribble()
        self._still_served()

    def _follow(self) -> None:
        log, self.link_setup.watch.log = self.link_setup.watch.log, []
        for seen in log:
            oracle, number = self._owner(seen.recorder)
            if seen.kind is EventKind.CAME and seen.message is not None:
                oracle.came(number, seen.message)
            else:
                oracle.ended(number)
        for sender in self.senders:
            sender.oracle.settle()

    def _owner(self, recorder: object) -> tuple[SenderOracle | ReceiverOracle, int]:
        owners: list[Sender | Receiver] = [*self.senders, *self._all_receivers]
        return next((o.oracle, number) for o in owners for number, each in o.links.items() if each is recorder)

    def _agree(self, who: str, difference: str) -> None:
        if difference:
            raise RuleViolation(Rule.STATE, f"of {who}, {difference}")

    def _compare_sent(
        self, who: str, links: dict[int, LinkRecorder], sent: dict[int, list[tuple[str, int, int]]]
    ) -> None:
        for number, recorder in links.items():
            if recorder.attempts != sent[number]:
                raise RuleViolation(
                    Rule.STATE, f"{who} sent {recorder.attempts} over link {number}, but must send {sent[number]}"
                )

    def _still_served(self) -> None:
        for receiver in self.receivers.values():
            if receiver.served is not None and not self.payloads.intact(*receiver.served):
                what = f"what worker {receiver.worker} serves was overwritten before it acked a newer version"
                raise RuleViolation(Rule.PINNED, f"{what}: its buffer was not pinned")
