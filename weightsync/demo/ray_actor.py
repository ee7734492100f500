"""What a worker is over Ray: an actor that acts with the synchronised policy."""

from __future__ import annotations

import os

import torch

from weightsync import WeightSyncActor
from weightsync.demo.rollout import Rollout, proof_of, status_of
from weightsync.demo.settings import MODEL_ID, Settings
from weightsync.demo.wire import Chunk, Proof, Status


class RayRollout(WeightSyncActor):
    """Worker `index`. The trainer's versions reach it between two calls of its methods.

    Args:
        index: the worker's id.
        settings: the run's settings.
    """

    def __init__(self, index: int, settings: Settings) -> None:
        torch.set_num_threads(1)
        self._rollout = Rollout(index, settings)
        self.policy = self._rollout.policy
        assert MODEL_ID in vars(self)

    def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    def collect(self) -> tuple[Status, Chunk]:
        """A chunk of experience, and how the worker stands."""
        receiver = self.weight_receiver(MODEL_ID)
        chunk = self._rollout.collect(receiver, _nothing)
        return status_of(receiver), chunk

    def prove(self) -> Proof:
        """What the worker serves."""
        return proof_of(self.weight_receiver(MODEL_ID))


def _nothing() -> None:
    """In a serial actor no version can come while it steps."""
