"""Runs in an actor whose class is not ours, but in which one of our schemes was initialised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from weightsync.errors import TransportError, reason_of
from weightsync.transports.calls.client import ENDED, FAILED, ClosedByPeer
from weightsync.transports.calls.server import Frames
from weightsync.transports.calls.without_receiver import another_model

logger = logging.getLogger("weightsync")

#: Processes a call: its link, number, frame and payload, and the numbers of earlier calls that will never arrive.
Take = Callable[[str, int, bytes, Any, tuple[int, ...]], Frames]

_lock = threading.Lock()
_taking: dict[str, Take] = {}


def accept_calls(model_id: str, take: Take) -> None:
    """From now on accept calls for this model, and pass them to ``take``."""
    with _lock:
        _taking[model_id] = take


def refuse_calls(model_id: str) -> None:
    """Accept no more calls for this model."""
    with _lock:
        _taking.pop(model_id, None)


def models_accepted(_: Any, model_id: str) -> list[str]:
    """The models for which calls are accepted, for a sender of that model. Called in an actor, with the actor."""
    with _lock:
        models = sorted(_taking)
    if models and model_id not in models:
        logger.warning("model %r: a handshake was refused: %s", model_id, another_model(model_id, models))
    return models


def call(  # noqa: PLR0917 - Ray transmits positional arguments at less cost
    _: Any, model_id: str, link: str, number: int, frame: bytes, payload: Any, lost_calls: tuple[int, ...] = ()
) -> Frames:
    """Process a call. Called in an actor, with the actor.

    Raises nothing: an error is the call's answer. Ray takes the ``bool()`` of an actor whose method raised. That of a
    TorchRL collector raises too, since its length is infinite, and Ray then ends the actor's process.
    """
    with _lock:
        take = _taking.get(model_id)
    try:
        if take is None:
            raise TransportError(f"no receiver of model {model_id!r} listens in this actor any more.")
        return take(link, number, frame, payload, lost_calls)
    except ClosedByPeer as error:
        return [ENDED + reason_of(error).encode()]
    except Exception as error:  # whatever it is, the sender is told the reason
        logger.debug("model %r: a call failed: %s", model_id, reason_of(error), exc_info=True)
        return [FAILED + reason_of(error).encode()]
