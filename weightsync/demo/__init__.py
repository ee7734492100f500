"""The demo: train a policy while worker processes act with the weights they receive.

    state      the options, progress and result    learning   the policy and its training (PPO)
    trainer    the training loop and its sends     worker     what each worker does
                                                   joined     workers over torch's RPC and torch.distributed

`trainer` and `worker` show how to use weightsync on either side. The demo uses only the public API.
"""

from __future__ import annotations

import importlib.util
import os

from weightsync import MissingExtraError
from weightsync.demo.state import Phase, Proof, RunState, Settings, Verdict, WorkerState
from weightsync.local_workers import SchemeName, start_forkserver

__all__ = ["Phase", "Proof", "RunState", "SchemeName", "Settings", "Verdict", "WorkerState", "run"]


def run(state: RunState) -> RunState:
    """Train a policy on CartPole while workers act with it; at the end each worker proves what it serves.

    All workers have ended when this returns or raises.

    Args:
        state: holds the settings; it is updated during the run, for a display in another thread.

    Returns:
        The same state, with the result.

    Raises:
        MissingExtraError: gymnasium is not installed, or Ray is chosen and not installed.
        WeightSyncError: a worker did not start.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise MissingExtraError("rl", "weightsync demo")
    if state.settings.scheme in (SchemeName.RPC, SchemeName.DISTRIBUTED):
        # torch logs each connection that ends, in every process.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if state.settings.scheme is not SchemeName.RAY:
        start_forkserver(["weightsync.demo.worker"])
    # Importing torch takes seconds. The fork server imports it at the same time.
    from weightsync.demo.trainer import train  # noqa: PLC0415

    train(state)
    return state
