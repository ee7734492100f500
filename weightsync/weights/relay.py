"""The destination of a worker that has no model: it keeps the latest weights for its own workers."""

from __future__ import annotations

from torch import Tensor

from weightsync.errors import LayoutError
from weightsync.weights.device.base import DeviceMemory, on_host
from weightsync.weights.layout import Layout
from weightsync.weights.packing import views
from weightsync.weights.target import Mode, Staged, Target, plan_for
from weightsync.weights.tensors import address_of, borrowed


class Relay(dict[str, Tensor]):
    """The weights of the served version, by dotted name; empty before the first version. It accepts any layout."""


class AnyLayoutTarget(Target):
    """A target on the host that accepts any layout, but no extra state."""

    #: Why extra state is refused; ``{}`` stands for the names of its modules.
    _REFUSAL: str

    @property
    def demanded(self) -> Layout | None:
        """None, because any layout is accepted."""
        return None

    @property
    def devices(self) -> bytes:
        """No devices: the tensors are needed on the host."""
        return b""

    def stage(
        self, layout: Layout, payload: memoryview | DeviceMemory, extras: bytes = b"", in_slot: bool = False
    ) -> Staged:
        """Check that an update is complete: see `Target.stage`.

        Raises:
            LayoutError: it has extra state.
            ProtocolError: payload or extras do not match the layout.
        """
        decoded = self._decoded(layout, payload, extras)
        if decoded:
            raise LayoutError(self._REFUSAL.format(sorted(decoded)), unexpected=sorted(decoded))
        return Staged(layout, payload, decoded, self._plan, in_slot)


class RelayTarget(AnyLayoutTarget):
    """A target that replaces all of its contents with each update."""

    destination: Relay
    _REFUSAL = (
        "This worker has no model of its own and passes weights on to its own workers, but the extra state of {} "
        "cannot be passed on. Give the worker the model, or send weights without extra state."
    )

    def __init__(self, destination: Relay) -> None:
        super().__init__(destination, Mode.COPY)

    def swap(self, staged: Staged) -> None:
        """Keep a copy of the staged weights, and drop those of the version before."""
        payload = on_host(staged.payload, staged.layout.nbytes)
        flat = borrowed(address_of(payload), staged.layout.nbytes).clone()
        names = [entry.name for entry in staged.layout.entries]
        held = dict(zip(names, views(staged.layout, flat), strict=True))
        self.destination.clear()
        self.destination.update(held)
        self._plan = plan_for(self.destination)
