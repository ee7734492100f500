"""What runs in an actor whose class is not ours, and in which a scheme of ours was initialised all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from weightsync.errors import TransportError
from weightsync.transports.calls.server import Frames

#: Takes a call in: its link, number, frame and payload, and the numbers of calls before it that will never come.
Take = Callable[[str, int, bytes, Any, tuple[int, ...]], Frames]

_lock = threading.Lock()
_taking: dict[str, Take] = {}


def attend(model_id: str, take: Take) -> None:
    """From now on calls for this model are taken in by ``take``."""
    with _lock:
        _taking[model_id] = take


def leave(model_id: str) -> None:
    """Nobody takes calls for this model in any more."""
    with _lock:
        _taking.pop(model_id, None)


def is_attended(_: Any, model_id: str) -> bool:
    """Whether somebody takes calls for this model in. Called in an actor, with the actor."""
    with _lock:
        return model_id in _taking


def call(  # noqa: PLR0917 - Ray carries what is positional at less cost
    _: Any, model_id: str, link: str, number: int, frame: bytes, payload: Any, lost: tuple[int, ...] = ()
) -> Frames:
    """Take a call in. Called in an actor, with the actor.

    Raises:
        TransportError: nobody takes calls for this model in any more.
    """
    with _lock:
        take = _taking.get(model_id)
    if take is None:
        raise TransportError(f"no receiver of model {model_id!r} listens in this actor any more.")
    return take(link, number, frame, payload, lost)
