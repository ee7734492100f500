"""A step of either pure half: what follows from an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from weightsync._tables import State
from weightsync.machine import Input

Data = TypeVar("Data")
Effect = TypeVar("Effect")


@dataclass(frozen=True, slots=True)
class Step(Generic[Input, Data, Effect]):
    """What follows from an event. ``input`` None: LATE, no row was looked up."""

    input: Input | None
    to: State
    data: Data
    effects: tuple[Effect, ...] = ()
