"""The demo over torch's RPC, in processes of their own: RPC cannot be left and joined again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_demo_runs import assert_proved

from weightsync import TransportError
from weightsync.demo import RunState, SchemeName, Settings, run, workers

pytestmark = pytest.mark.rpc


def apart(context: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a process of its own."""
    ours, theirs = context.Pipe()
    process = context.Process(target=_call, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    with contextlib.closing(ours):
        assert ours.poll(100), "it does not end"
        error = ours.recv()
    process.join(20)
    process.kill()
    process.join()
    assert error is None, error


def _call(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except BaseException as error:
        pipe.send(repr(error))
        raise


def proved() -> None:
    """A run in which a worker is killed."""
    settings = Settings(scheme=SchemeName.RPC, workers=3, seconds=3.0, overlap=True, kill_worker=True)
    assert_proved(run(RunState(settings)))


def test_every_worker_that_is_left_proves_the_trainers_last_weights(forkserver: Any) -> None:
    apart(forkserver, proved)


def alone(folder: Path) -> None:
    """Wait for a worker that never joins."""
    workers.START_TIMEOUT = 0.5
    with pytest.raises(TransportError, match="have not joined torch's RPC"):
        workers.ProcessWorkers()._join_rpc(f"file://{folder}/rendezvous", 2)


def test_a_worker_that_never_joins_is_given_up(forkserver: Any, tmp_path: Path) -> None:
    apart(forkserver, alone, tmp_path)
