"""A model of a worker that holds none itself: it keeps the weights that came last, for workers of its own."""

from __future__ import annotations

from torch import Tensor

from weightsync.errors import LayoutError
from weightsync.weights.layout import Layout
from weightsync.weights.packing import views
from weightsync.weights.target import Mode, Staged, Target, look_at
from weightsync.weights.tensors import address_of, borrowed


class Relay(dict[str, Tensor]):
    """The weights of the version served, by dotted name; empty before the first one. Any layout fits."""


class RelayTarget(Target):
    """A destination that becomes what is sent.

    Args:
        destination: the relay.
    """

    destination: Relay

    def __init__(self, destination: Relay) -> None:
        super().__init__(destination, Mode.COPY)

    @property
    def demanded(self) -> Layout | None:
        """None: any layout is taken."""
        return None

    def stage(self, layout: Layout, payload: memoryview, extras: bytes = b"") -> Staged:
        """Check that an update is whole: see `Target.stage`.

        Raises:
            LayoutError: it has extra state, which the workers further on could not be given.
            ProtocolError: payload or extras are not what the layout says.
        """
        decoded = self._decoded(layout, payload, extras)
        if decoded:
            raise LayoutError(
                f"This worker has no model of its own and hands weights on to its workers; the extra state of "
                f"{sorted(decoded)} cannot be handed on. Give the worker the model, or send weights without it.",
                unexpected=sorted(decoded),
            )
        return Staged(layout, payload, decoded, self._live)

    def swap(self, staged: Staged) -> None:
        """Keep the staged weights, in memory of our own; those of the version before are let go."""
        flat = borrowed(address_of(staged.payload), staged.layout.nbytes).clone()
        names = [entry.name for entry in staged.layout.entries]
        held = dict(zip(names, views(staged.layout, flat), strict=True))
        self.destination.clear()
        self.destination.update(held)
        self._live = look_at(self.destination)
