"""What the kit needs of an adapter: fresh connections, and what it may do to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weightsync.transports.base import Link

#: Has its argument called with each link by which a sender reaches the receiver; returns what ends that.
Listen = Callable[[Callable[[Link], None]], Callable[[], None]]


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Ends:
    """A fresh connection between a sender and a receiver."""

    #: The sender's end.
    sender: Link
    #: The receiver's end; or, where that exists only once a sender has spoken, a `Listen`.
    receiver: Link | Listen
    #: Breaks what lies between the ends, both of which live on; None: cannot be done.
    cut: Callable[[], None] | None = None
    #: Lays the ends of one more model over the same connection; None: cannot be done.
    another: Callable[[str], Ends] | None = None
    #: Frees what closing both links does not.
    dispose: Callable[[], None] = _nothing

    def listen(self, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with the receiver's end, once it is there. What is returned ends that."""
        if callable(self.receiver):
            return self.receiver(accept)
        accept(self.receiver)
        return _nothing


#: Makes a fresh connection for the model of that id.
Factory = Callable[[str], Ends]
