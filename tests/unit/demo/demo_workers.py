"""Faulty workers: module-level functions, so that other processes can import them."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import torch

from weightsync import Worker
from weightsync.demo import Settings
from weightsync.demo.worker import Rollout, act


def serves_changed_weights(worker: Worker, settings: Settings) -> None:
    """Change the last worker's live model before its digest is taken."""
    honest = worker.receiver.digest

    def changed() -> bytes:
        with torch.no_grad():
            next(worker.model.parameters()).view(-1)[0] += 1e-6
        return honest()

    if worker.index == settings.workers - 1:
        worker.receiver.digest = changed  # type: ignore[method-assign]
    act(worker, settings)


def stops_in_its_first_chunk(worker: Worker, settings: Settings) -> None:
    """Stop the process of the last worker in its first chunk, as a debugger would."""

    def collect(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    if worker.index == settings.workers - 1:
        Rollout.collect = collect  # type: ignore[method-assign, assignment]
    act(worker, settings)


def raises(worker: Worker, settings: Settings) -> None:
    """Fail in the first chunk, in every worker."""

    def collect(*_: object) -> None:
        raise ZeroDivisionError("planted")

    Rollout.collect = collect  # type: ignore[method-assign, assignment]
    act(worker, settings)


def ends(*_: object, **__: object) -> NoReturn:
    """End before the first message."""
    os._exit(1)
