"""Two ends without drivers: messages are sent at one end and arrive at the other."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.clock import Deadline
from weightsync.errors import TransportError
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Update
from weightsync.testing.ends import Ends
from weightsync.testing.link_pair import End, words
from weightsync.testing.link_recorder import LinkRecorder
from weightsync.testing.link_setup import LinkSetup
from weightsync.testing.payloads import fill
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.transports.base import Link, Received
from weightsync.transports.buffers import Buffer

#: The incarnation that lines use.
INCARNATION = 1 << 70


class Line:
    """A connection for one model whose ends are recorded.

    The sender's end sends first, and the receiver's end sends at most one answer per message: calls carry answers back.

    Args:
        link_setup: makes the connection.
        ends: its ends. None: new ones.
    """

    def __init__(self, link_setup: LinkSetup, model_id: str = "policy", ends: Ends | None = None) -> None:
        self.link_setup = link_setup
        self.model_id = model_id
        self.ends = link_setup.create(model_id) if ends is None else link_setup.adopt(ends)
        self.link_pair = link_setup.link_pair(self.ends, f"the link of {model_id!r}")
        self.link_pair.patient = True
        self.sender = LinkRecorder(self.ends.sender, self.link_pair, End.SENDER)
        self._receiver: list[LinkRecorder] = []
        link_setup.listen(self.ends, self._accept)

    def _accept(self, link: Link) -> None:
        self._receiver.append(LinkRecorder(link, self.link_pair, End.RECEIVER))

    @property
    def receiver(self) -> LinkRecorder:
        """The receiver's end; waits for it where it does not exist yet."""
        self.link_setup.until(
            lambda: bool(self._receiver),
            lambda: self._write(self.sender),
            Rule.ARRIVES,
            "a message was sent, but the receiver's end never appeared",
        )
        return self._receiver[0]

    def greet(self) -> None:
        """Exchange handshakes."""
        self.tell(Hello(model_id=self.model_id, incarnation=INCARNATION))
        self.receive(self.receiver)
        self.answer(Hello(model_id=self.model_id, incarnation=INCARNATION, fence=INCARNATION))
        self.receive(self.sender)

    def tell(self, message: Message, payload: Buffer | None = None) -> None:
        """Send a message from the sender's end."""
        self.link_setup.watch.steps.append(f"the sender's end sends {words(message)}")
        self.sender.send(message, payload)
        self.link_setup.watch.check()

    def answer(self, message: Message) -> None:
        """Send a message from the receiver's end."""
        self.link_setup.watch.steps.append(f"the receiver's end sends {words(message)}")
        self.receiver.send(message)
        self.link_setup.watch.check()

    def update(self, version: int, nbytes: int = 0) -> tuple[Update, Buffer | None]:
        """An update and its payload's buffer."""
        message = Update(
            model_id=self.model_id, incarnation=INCARNATION, version=version, layout_digest=b"l" * 16, nbytes=nbytes
        )
        buffer = Buffer(nbytes, self.link_setup.storage) if nbytes else None
        if buffer is not None:
            fill(buffer, nbytes, version)
        return message, buffer

    def ack(self, version: int) -> Ack:
        """An ack."""
        return Ack(model_id=self.model_id, incarnation=INCARNATION, version=version)

    def bye(self) -> Bye:
        """A goodbye."""
        return Bye(model_id=self.model_id, incarnation=INCARNATION, reason="the kit is done")

    def receive(self, recorder: LinkRecorder) -> list[Received]:
        """Receive all that was sent to an end, and report messages that are missing or out of order."""
        self.link_setup.watch.steps.append(f"{recorder.end.value} receives what has arrived")
        other = self.sender if recorder.end is End.RECEIVER else self.receiver
        received: list[Received] = []
        deadline = Deadline(self.link_setup.patience if not self.link_pair.delivery.loses else 0.05)
        while self.link_pair.in_flight[recorder.end]:
            self._write(other)
            woken = self.link_setup.readable(recorder, min(deadline.remaining or 0.0, 0.05))
            if not woken and not deadline.passed:
                continue
            found = recorder.receive()
            received += found
            if deadline.passed and not (woken and found):
                self._check_arrival(recorder, bool(found))
                break
        return received

    def _check_arrival(self, recorder: LinkRecorder, found: bool) -> None:
        if found:
            raise RuleViolation(Rule.WAKES, f"{recorder.end.value} had a message to receive, but no readable waitable")
        if not self.link_pair.delivery.loses:
            missing = ", ".join(words(each.message) for each in self.link_pair.in_flight[recorder.end])
            raise RuleViolation(Rule.ARRIVES, f"{missing} never arrived at {recorder.end.value}")

    def _write(self, recorder: LinkRecorder) -> None:
        if not recorder.dead:
            self.link_setup.flush(recorder)

    def receive_until_dead(self, recorder: LinkRecorder) -> None:
        """Receive all that was sent to that end, which may report its death only after that."""
        try:
            self.receive(recorder)
        except TransportError:
            return

    def write_everything(self, recorder: LinkRecorder) -> None:
        """Have an end write until nothing is left, while the other end reads nothing."""
        self.link_setup.until(
            recorder.flush,
            lambda: self.link_setup.readable(recorder, 0.01),
            Rule.ARRIVES,
            "a message was never written",
        )

    def require_death(self, recorder: LinkRecorder) -> None:
        """Require that this end reports the death of the link."""
        self.link_setup.watch.steps.append(f"{recorder.end.value} must report that the link is dead")
        self.link_setup.until_dead(recorder, lambda: _swallow(recorder.receive))
        must_raise("receive() on a link that reported its death", recorder.receive, Rule.DEATH_REPORTED)


def _swallow(receive: Callable[[], list[Received]]) -> None:
    try:
        receive()
    except TransportError:
        return


def must_raise(what: str, use: Callable[[], object], rule: Rule) -> None:
    """Call a function that must raise TransportError.

    Raises:
        RuleViolation: it did not raise, which breaks ``rule``.
    """
    try:
        found = use()
    except TransportError:
        return
    raise RuleViolation(rule, f"{what} returned {found!r}")
