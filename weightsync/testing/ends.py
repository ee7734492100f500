"""What an adapter gives the kit: new connections, and operations on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightsync.transports.base import Link

#: Calls its argument with each link by which a sender reaches the receiver. Returns a function that ends this.
Listen = Callable[[Callable[[Link], None]], Callable[[], None]]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Ends:
    """A new connection between a sender and a receiver."""

    #: The sender's end.
    sender: Link
    #: The receiver's end, or a `Listen` if that end exists only after a sender has sent something.
    receiver: Link | Listen
    #: Breaks the connection between the ends, and leaves both open. None: not possible.
    cut: Callable[[], None] | None = None
    #: Makes the ends for one more model over the same connection. None: not possible.
    another: Callable[[str], Ends] | None = None
    #: Frees whatever closing both links does not free.
    dispose: Callable[[], None] = _nothing

    def listen(self, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Call ``accept`` with the receiver's end once it exists. Returns a function that ends this."""
        if callable(self.receiver):
            return self.receiver(accept)
        accept(self.receiver)
        return _nothing


#: Makes a new connection for the given model id.
Factory = Callable[[str], Ends]
