"""The demo: a policy is trained here while workers act with the weights they were sent.

    settings   what a run is asked to do           learning   the policy and its training (PPO)
    state      how a run stands, how it ended      worker     what a worker does
    trainer    the training loop and its sends     workers    starting workers, asking them, ending them

`trainer` and `worker` show how weightsync is used on either side. The demo uses only what any user can import.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker

from weightsync import MissingExtraError
from weightsync.demo.settings import SchemeName, Settings
from weightsync.demo.state import Phase, Proof, Result, RunState, Verdict, WorkerResult, WorkerState

__all__ = [
    "Phase",
    "Proof",
    "Result",
    "RunState",
    "SchemeName",
    "Settings",
    "Verdict",
    "WorkerResult",
    "WorkerState",
    "run",
]


def run(state: RunState) -> Result:
    """Train a policy on CartPole while workers act with it, and have each prove in the end what it serves.

    No worker is left when this ends, whatever ends it.

    Args:
        state: says what to do; kept up to date during the run, for a display in another thread.

    Raises:
        MissingExtraError: gymnasium is not installed, or Ray where it is wanted.
        TransportError: the workers did not start.
    """
    if importlib.util.find_spec("gymnasium") is None:
        raise MissingExtraError("rl", "weightsync demo")
    if state.settings.scheme is SchemeName.RPC:
        # torch's RPC writes a line for each connection that ends, in every process.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if state.settings.scheme is not SchemeName.RAY:
        _start_forkserver()
    # Importing torch takes seconds. The fork server imports it at the same time.
    from weightsync.demo.trainer import train  # noqa: PLC0415

    return train(state)


def _start_forkserver() -> None:
    """Start the process that workers are forked from. It imports what they need, once for all of them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["weightsync.demo.worker"])
    resource_tracker.ensure_running()  # started below, it would unblock the signal
    # Ctrl-C goes to all processes of the terminal, but is for the trainer alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
