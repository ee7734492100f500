"""An end of a cable that hands its driver one message at a time, when the replay says so."""

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
    """A tap behind which everything waits.

    What the link delivers waits until it is let through, its death until it is told, and, while `holding`, what the
    driver answers waits to be sent. So a driver goes through exactly what a path of the model has it go through.

    Args:
        worker: of the link, and its number among that worker's links with this sender.
    """

    def __init__(self, link: Link, link_pair: LinkPair, end: End, place: tuple[int, int, int]) -> None:
        super().__init__(link, link_pair, end)
        #: Sender, worker and number of the link, as the model counts.
        self.place = place
        #: What has come out of the link and was not let through; and what was, where links duplicate.
        self.waiting: list[Received] = []
        self.through: list[Received] = []
        self.holding = False
        #: What reading raised.
        self.ended: TransportError | ProtocolError | None = None
        self._ready: list[Received] = []
        self._telling = False
        self._held: list[Message] = []

    # ------------------------------------------------------------------------------ called by the replay

    def fetch(self) -> None:
        """Take in what has come out of the link."""
        if self.ended is not None or self.dead:
            return
        try:
            self.waiting += super().receive()
        except (TransportError, ProtocolError) as error:
            self.ended = error

    def find(self, wanted: Callable[[Message], bool]) -> Received | None:
        """The first of what waits, or, where links duplicate, was let through before."""
        known = [*self.waiting, *(self.through if self.delivery.duplicates else ())]
        return next((each for each in known if wanted(each.message)), None)

    def let_through(self, received: Received) -> None:
        """Hand it to the driver when that reads next."""
        self.lose(received)
        self.through.append(received)
        self._ready.append(received)

    def lose(self, received: Received) -> None:
        """It never reaches the driver."""
        self.waiting = [each for each in self.waiting if each is not received]

    def tell_end(self) -> None:
        """Let the driver be told, when it reads next, that the link is dead."""
        self._telling = True

    def release(self) -> None:
        """Send what was held."""
        self.holding = False
        held, self._held = self._held, []
        for message in held:
            self.send(message)

    # ------------------------------------------------------------------------------ called by the driver

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Send it, or hold it. A link that is dead is told by reading, when the path comes to that."""
        if self.holding and not isinstance(message, Bye):
            self._held.append(message)
            return
        try:
            super().send(message, payload)
        except TransportError as error:
            if not self.link_pair.closed and not self.link_pair.cut:
                raise self.link_pair.broke(Rule.LIVES, self.end, f"{words(message)} was refused: {error}") from error

    def flush(self) -> bool:
        """Write, unless the answer is held. Who owes an answer does not read: writing tells it of the end."""
        if self._telling and self.ended is not None:
            raise self.ended
        if self.holding:
            return False
        self.write()
        return not self.queued or self.ended is not None or bool(self.link_pair.closed) or self.link_pair.cut

    def receive(self) -> list[Received]:
        """What was let through."""
        ready, self._ready = self._ready, []
        if not ready and self._telling and self.ended is not None:
            raise self.ended
        return ready
