"""What travels between trainer and worker over the demo's own pipes. The weights do not: weightsync moves those."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Experience of one worker: T steps of K environments, and the version each step was acted with."""

    #: Shape (T, K, 4), before the step and after it.
    observations: Floats
    following: Floats
    #: Shape (T, K).
    actions: Ints
    log_probabilities: Floats
    fallen: Bools
    ended: Bools
    #: Shape (T,): `WeightReceiver.version` at each step.
    versions: Ints
    #: Returns of the episodes that ended within it.
    returns: tuple[float, ...]

    @property
    def steps(self) -> int:
        """How many transitions it holds."""
        return int(self.actions.size)

    def writable(self) -> Chunk:
        """The same with arrays of its own: torch wants none that lie in Ray's object store."""
        arrays: dict[str, Any] = {
            each.name: getattr(self, each.name).copy() for each in fields(self) if each.name != "returns"
        }
        return replace(self, **arrays)


@dataclass(frozen=True, slots=True)
class Status:
    """How a worker stands: its receiver's state, and the version it serves."""

    state: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Proof:
    """The digest that a worker computed over its live model, and the version it says it serves."""

    version: int | None
    digest: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's last words: the error that ends it."""

    reason: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Collect:
    """The worker may collect so many more chunks."""

    chunks: int


@dataclass(frozen=True, slots=True)
class Prove:
    """The worker is asked for its `Proof`; it collects nothing from here on."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker is to end."""


FromWorker = Chunk | Status | Proof | Failure
ToWorker = Collect | Prove | Stop
