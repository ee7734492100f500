"""Two ends without any driver: messages go in at one and come out at the other."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.clock import Deadline
from weightsync.errors import TransportError
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Update
from weightsync.testing.cable import End, words
from weightsync.testing.ends import Ends
from weightsync.testing.payloads import fill
from weightsync.testing.rules import Breach, Rule
from weightsync.testing.stage import Stage
from weightsync.testing.tap import Tap
from weightsync.transports.base import Link, Received
from weightsync.transports.buffers import Buffer

#: The incarnation under which lines speak.
INCARNATION = 1 << 70


class Line:
    """A connection for one model, its ends watched.

    The sender's end speaks first, and the receiver's end says no more than it was told: calls bring answers home.

    Args:
        stage: where it is laid.
        ends: its ends; None: fresh ones.
    """

    def __init__(self, stage: Stage, model_id: str = "policy", ends: Ends | None = None) -> None:
        self.stage = stage
        self.model_id = model_id
        self.ends = stage.lay(model_id) if ends is None else stage.adopt(ends)
        self.cable = stage.cable(self.ends, f"the link of {model_id!r}")
        self.cable.patient = True
        self.sender = Tap(self.ends.sender, self.cable, End.SENDER)
        self._receiver: list[Tap] = []
        stage.listen(self.ends, self._accept)

    def _accept(self, link: Link) -> None:
        self._receiver.append(Tap(link, self.cable, End.RECEIVER))

    @property
    def receiver(self) -> Tap:
        """The receiver's end, which may have to be waited for."""
        self.stage.until(
            lambda: bool(self._receiver),
            lambda: self._write(self.sender),
            Rule.ARRIVES,
            "a message was sent, and the receiver's end never came to be",
        )
        return self._receiver[0]

    def greet(self) -> None:
        """The handshake, there and back."""
        self.tell(Hello(model_id=self.model_id, incarnation=INCARNATION))
        self.receive(self.receiver)
        self.answer(Hello(model_id=self.model_id, incarnation=INCARNATION, fence=INCARNATION))
        self.receive(self.sender)

    def tell(self, message: Message, payload: Buffer | None = None) -> None:
        """Say something at the sender's end."""
        self.stage.watch.steps.append(f"the sender's end sends {words(message)}")
        self.sender.send(message, payload)
        self.stage.watch.check()

    def answer(self, message: Message) -> None:
        """Say something at the receiver's end."""
        self.stage.watch.steps.append(f"the receiver's end sends {words(message)}")
        self.receiver.send(message)
        self.stage.watch.check()

    def update(self, version: int, nbytes: int = 0) -> tuple[Update, Buffer | None]:
        """An update, and its payload's buffer."""
        message = Update(
            model_id=self.model_id, incarnation=INCARNATION, version=version, layout_digest=b"l" * 16, nbytes=nbytes
        )
        buffer = Buffer(nbytes, self.stage.storage) if nbytes else None
        if buffer is not None:
            fill(buffer, nbytes, version)
        return message, buffer

    def ack(self, version: int) -> Ack:
        """An ack."""
        return Ack(model_id=self.model_id, incarnation=INCARNATION, version=version)

    def bye(self) -> Bye:
        """A goodbye."""
        return Bye(model_id=self.model_id, incarnation=INCARNATION, reason="the kit is done")

    def receive(self, tap: Tap) -> list[Received]:
        """Take in all that was sent to that end; messages out of order or missing are told at the end."""
        self.stage.watch.steps.append(f"{tap.end.value} takes in what has arrived")
        other = self.sender if tap.end is End.RECEIVER else self.receiver
        received: list[Received] = []
        deadline = Deadline(self.stage.patience if not self.cable.delivery.loses else 0.05)
        while self.cable.flying[tap.end]:
            self._write(other)
            woken = self.stage.readable(tap, min(deadline.remaining or 0.0, 0.05))
            if not woken and not deadline.passed:
                continue
            found = tap.receive()
            received += found
            if deadline.passed and not (woken and found):
                self._judge(tap, bool(found))
                break
        return received

    def _judge(self, tap: Tap, found: bool) -> None:
        if found:
            raise Breach(Rule.WAKES, f"at {tap.end.value} a message lay unread, and no waitable said so")
        if not self.cable.delivery.loses:
            missing = ", ".join(words(each.message) for each in self.cable.flying[tap.end])
            raise Breach(Rule.ARRIVES, f"{missing} never came out at {tap.end.value}")

    def _write(self, tap: Tap) -> None:
        if not tap.dead:
            self.stage.flush(tap)

    def receive_until_told(self, tap: Tap) -> None:
        """Take in all that was sent to that end; it may tell that it is dead, but not before."""
        try:
            self.receive(tap)
        except TransportError:
            return

    def drained(self, tap: Tap) -> None:
        """Have an end write until nothing is left, while the other reads nothing."""
        self.stage.until(tap.flush, lambda: self.stage.readable(tap, 0.01), Rule.ARRIVES, "what was sent never left")

    def ends_at(self, tap: Tap) -> None:
        """That end must tell that the link is dead."""
        self.stage.watch.steps.append(f"{tap.end.value} must tell that the link is dead")
        self.stage.until_dead(tap, lambda: _swallow(tap.receive))
        must_raise("receive() on a link that told that it is dead", tap.receive, Rule.DEATH_TOLD)


def _swallow(receive: Callable[[], list[Received]]) -> None:
    try:
        receive()
    except TransportError:
        return


def must_raise(what: str, use: Callable[[], object], rule: Rule) -> None:
    """Call what must raise TransportError.

    Raises:
        Breach: of ``rule``: it did not.
    """
    try:
        found = use()
    except TransportError:
        return
    raise Breach(rule, f"{what} returned {found!r}")
