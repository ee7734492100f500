"""Where the trainer and its worker processes find each other, scheme by scheme."""

from __future__ import annotations

import contextlib
import multiprocessing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol

from weightsync import ConfigurationError
from weightsync.demo.settings import MODEL_ID, SchemeName

if TYPE_CHECKING:
    from torch import nn

    from weightsync import WeightReceiver, WeightSyncScheme


class Seat(Protocol):
    """A worker's place. It travels to the worker's process when that is started."""

    def take(self, scheme: WeightSyncScheme, model: nn.Module) -> WeightReceiver:
        """Initialise the worker's side."""

    def leave(self) -> None:
        """Let go of what this process holds of it: in the worker at its end, in the trainer once it is given away."""


class Ground(Protocol):
    """The trainer's side of it."""

    def seat(self, index: int) -> Seat:
        """Make a worker's place."""

    def arguments(self) -> dict[str, Any]:
        """What `init_on_sender` is to be given, now that all workers are started."""

    def close(self) -> None:
        """Let go of it all; the workers have ended."""


@dataclass(frozen=True, slots=True)
class PipeSeat:
    """A worker's end of a pipe."""

    pipe: Connection

    def take(self, scheme: WeightSyncScheme, model: nn.Module) -> WeightReceiver:
        """Initialise the worker's side."""
        scheme.init_on_worker(MODEL_ID, pipe=self.pipe, model=model)
        return scheme.get_receiver()

    def leave(self) -> None:
        """Close it here."""
        self.pipe.close()


class Pipes:
    """One pipe a worker."""

    def __init__(self) -> None:
        self._ours: list[Connection] = []

    def seat(self, index: int) -> Seat:  # noqa: ARG002 - others number their seats
        """Lay a pipe."""
        ours, theirs = multiprocessing.Pipe()
        self._ours.append(ours)
        return PipeSeat(theirs)

    def arguments(self) -> dict[str, Any]:
        """Our ends."""
        return {"pipes": self._ours}

    def close(self) -> None:
        """Close our ends."""
        for pipe in self._ours:
            with contextlib.suppress(OSError):
                pipe.close()


def ground_for(scheme: SchemeName) -> Ground:
    """The ground on which a scheme's processes meet."""
    match scheme:
        case SchemeName.SHARED | SchemeName.PIPE:
            return Pipes()
        case SchemeName.RAY:
            raise ConfigurationError("over Ray the workers are actors, and no processes of ours.")
