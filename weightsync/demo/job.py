"""The run as a whole. Cheap to import: what takes seconds is imported only when it runs."""

from __future__ import annotations

from weightsync.demo.board import Board
from weightsync.demo.environments import require_gymnasium
from weightsync.demo.fleet import Body, warm_up
from weightsync.demo.proof import Result
from weightsync.demo.settings import Settings


def run(settings: Settings, board: Board, body: Body | None = None) -> Result:
    """Train a policy on CartPole while workers act with it, and let each prove in the end what it serves.

    Whatever ends it, an interrupt too, no worker is left.

    Args:
        settings: what to do.
        board: where to write what there is to show.
        body: what worker processes run; None: `rollout.work`.

    Raises:
        MissingExtraError: gymnasium is not installed, or Ray where it is wanted.
        TransportError: the workers did not start.
    """
    require_gymnasium()
    warm_up(settings.scheme)
    # torch takes seconds: the process that the workers are forked from imports it at the same time
    from weightsync.demo.trainer import train  # noqa: PLC0415

    return train(settings, board, body)
