"""`WeightSyncActor`: turns a class of Ray actors into receivers of weights."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Final

import torch

from weightsync._tables import State
from weightsync.errors import ConfigurationError, ModelPathError, StateError, TransportError
from weightsync.receiver import WeightReceiver
from weightsync.timing import Deadline
from weightsync.transports.doors import Door, Frames, Parcel

#: The actor's method that senders call.
CALL: Final = "_weightsync_call"
#: Seconds a call waits for calls that were begun before it; reached if they were lost.
PATIENCE_FOR_ORDER: Final = 5.0
#: Seconds that an async actor's event loop is held while another thread serves.
PATIENCE_OF_LOOP: Final = 1.0
#: Seconds between two looks at whether another thread has answered.
STEP: Final = 0.05


class Desk:
    """Takes the calls for one model in this process to its receiver, and the answers home.

    Args:
        model_id: the model.
    """

    def __init__(self, model_id: str) -> None:
        self.door = Door(model_id)
        #: Set once it listens: who is driven by the calls; None: a thread of the receiver's own reads.
        self.receiver: WeightReceiver | None = None
        self._early: dict[str, list[Parcel]] = {}

    def call(self, parcel: Parcel, lost: tuple[int, ...]) -> Frames:
        """Take a parcel in and have it decided; the answers.

        Waits while the version served is held (`WeightReceiver.serving`), so that nothing is torn.

        Raises:
            TransportError: its link is not known here, or closed. Whatever is raised, the link is closed.
            StateError, ConfigurationError, ModelPathError: the receiver is closed, or there is no model.
        """
        try:
            return self._decided(parcel, lost)
        except BaseException:
            self._early.pop(parcel.link, None)
            self.door.drop(parcel)
            raise

    def _decided(self, parcel: Parcel, lost: tuple[int, ...]) -> Frames:
        early = self._early.pop(parcel.link, [])
        if not self.door.knows(parcel.link) and not early:
            self._require_first(parcel)
        answers = [self.door.knock(each) for each in (*early, parcel)]
        self.door.skip(parcel, lost)
        return [frame for answer in answers for frame in answer.result()]
