"""An end of a connection that gives its driver one message at a time, when the replay allows it."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.errors import ProtocolError, TransportError
from weightsync.protocol.messages import Bye, Message
from weightsync.testing.link_pair import End, LinkPair, words
from weightsync.testing.link_recorder import LinkRecorder
from weightsync.testing.rules import Rule
from weightsync.transports.base import Link, Received
from weightsync.transports.buffers import Buffer


class StepGate(LinkRecorder):
    """A link recorder that holds back everything.

    A delivered message waits until it is let through, and the link's death until it is reported. While `holding`, the
    driver's answers wait to be sent. So a driver takes exactly the steps of a path of the model.

    Args:
        place: sender, worker, and the link's number among that worker's links with this sender.
    """

    def __init__(self, link: Link, link_pair: LinkPair, end: End, place: tuple[int, int, int]) -> None:
        super().__init__(link, link_pair, end)
        #: Sender, worker and number of the link, as the model counts.
        self.place = place
        #: Messages that the link delivered and that were not let through; and those that were, where links duplicate.
        self.waiting: list[Received] = []
        self.through: list[Received] = []
        self.holding = False
        #: What reading raised.
        self.ended: TransportError | ProtocolError | None = None
        self._ready: list[Received] = []
        self._end_due = False
        self._held: list[Message] = []

    # ------------------------------------------------------------------------------ called by the replay

    def fetch(self) -> None:
        """Receive what the link has delivered."""
        if self.ended is not None or self.dead:
            return
        try:
            self.waiting += super().receive()
        except (TransportError, ProtocolError) as error:
            self.ended = error

    def find(self, wanted: Callable[[Message], bool]) -> Received | None:
        """The first match among what waits, or, where links duplicate, what was let through before."""
        known = [*self.waiting, *(self.through if self.delivery.duplicates else ())]
        return next((each for each in known if wanted(each.message)), None)

    def let_through(self, received: Received) -> None:
        """Give it to the driver at its next read."""
        self.lose(received)
        self.through.append(received)
        self._ready.append(received)

    def lose(self, received: Received) -> None:
        """Never give it to the driver."""
        self.waiting = [each for each in self.waiting if each is not received]

    def report_end(self) -> None:
        """Report the link's death to the driver at its next read."""
        self._end_due = True

    def release(self) -> None:
        """Send the answers that were held back."""
        self.holding = False
        held, self._held = self._held, []
        for message in held:
            self.send(message)

    # ------------------------------------------------------------------------------ called by the driver

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Send it, or hold it back. A dead link is reported by reading, when the path gets to that."""
        if self.holding and not isinstance(message, Bye):
            self._held.append(message)
            return
        try:
            super().send(message, payload)
        except TransportError as error:
            if not self.link_pair.closed and not self.link_pair.cut:
                raise self.link_pair.broke(Rule.LIVES, self.end, f"{words(message)} was refused: {error}") from error

    def flush(self) -> bool:
        """Write, unless the answer is held back. Raises the link's end: a driver that owes an answer only flushes."""
        if self._end_due and self.ended is not None:
            raise self.ended
        if self.holding:
            return False
        self.write()
        return not self.queued or self.ended is not None or bool(self.link_pair.closed) or self.link_pair.cut

    def receive(self) -> list[Received]:
        """The messages that were let through."""
        ready, self._ready = self._ready, []
        if not ready and self._end_due and self.ended is not None:
            raise self.ended
        return ready
