"""Workers that do what they should not: module-level functions, so that other processes can import them."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from weightsync import WeightReceiver
from weightsync.demo import Settings
from weightsync.demo.worker import Rollout, work


def serves_something_else(index: int, settings: Settings, *rest: Any) -> None:
    """The last worker's live model is changed before its digest is taken."""
    honest = WeightReceiver.digest

    def changed(receiver: WeightReceiver) -> bytes:
        with torch.no_grad():
            next(receiver.model.parameters()).view(-1)[0] += 1e-6
        return honest(receiver)

    if index == settings.workers - 1:
        WeightReceiver.digest = changed  # type: ignore[method-assign]
    work(index, settings, *rest)


def stops_in_its_first_chunk(index: int, settings: Settings, *rest: Any) -> None:
    """The last worker is stopped, as by a debugger: it is there, and does nothing."""

    def answer(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if index == settings.workers - 1:
        Rollout.answer = answer  # type: ignore[method-assign, assignment]
    work(index, settings, *rest)


def raises(index: int, settings: Settings, *rest: Any) -> None:
    """Every worker fails in its first chunk."""

    def answer(*_: object) -> None:
        raise ZeroDivisionError("planted")

    Rollout.answer = answer  # type: ignore[method-assign, assignment]
    work(index, settings, *rest)


def never_starts(index: int, settings: Settings, *rest: Any) -> None:
    """The last worker ends before it has said anything."""
    if index < settings.workers - 1:
        work(index, settings, *rest)
