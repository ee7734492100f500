"""RPC worlds in which a process dies, stops, or shuts RPC down."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fleet import PATIENCE, WorkerSetup, large, receive
from rpc_fleet import (
    World,
    attempt,
    command,
    enter,
    listen,
    retire,
    send,
    send_async,
    sender_state,
    shows,
    shut_down_rpc,
    wait_async,
)
from torch.distributed import rpc

from weightsync import AckTimeoutError, OutcomeKind, State, SyncError, TransportError, WorkerLostError
from weightsync.clock import Deadline
from weightsync.protocol.messages import Update
from weightsync.transports import rpc as call_server

Make = Callable[..., World]


def test_rpc_timeout_ends_neither_a_wait_nor_an_update(short_lived: Make) -> None:
    """While a worker is stopped for longer than ``rpc_timeout``, only the deadline ends waits; a late answer counts."""
    world = short_lived(2)
    for process in (world.trainer, *world.workers):  # set after joining the world, which may take longer
        process.do(limit_calls, 1.0)
    with world.syncing([0, 1], large) as trainer:
        world.workers[0].stop()
        trainer.tell(attempt, send_within, 2.0, 2.5)
        assert world.workers[1].do(receive)
        error = trainer.answer()

        assert isinstance(error, AckTimeoutError)
        assert error.report.outcomes[0].kind is OutcomeKind.TIMED_OUT
        assert trainer.do(sender_state)[0] == State.PENDING_ASYNC.value
        world.workers[0].resume()
        assert world.workers[0].do(receive)
        assert trainer.do(wait_async).ok
        assert world.workers[0].do(shows) == (1, {2.0})


def limit_calls(setup: WorkerSetup, seconds: float) -> None:
    """Set ``rpc_timeout`` for this process."""
    rpc._set_rpc_timeout(seconds)
    assert rpc.get_rpc_timeout() == seconds


def send_within(setup: WorkerSetup, fill: float, timeout: float) -> Any:
    return send(setup, fill, timeout=timeout)


def test_rpc_shutdown_in_the_trainer_loses_the_workers_of_an_outstanding_update(short_lived: Make) -> None:
    world = short_lived(1)
    world.workers[0].do(listen)
    world.trainer.do(command, ["w0"])
    world.trainer.do(send_async, 2.0)
    world.trainer.do(shut_down_rpc)
    error = world.trainer.do(attempt, wait_async)
    later = world.trainer.do(attempt, send, 3.0)

    assert isinstance(error, WorkerLostError)
    assert "shut down" in error.lost[0]
    assert isinstance(later, WorkerLostError)
    world.trainer.do(retire)
    world.workers[0].do(retire)


def test_rpc_shutdown_in_a_worker_loses_it_and_it_still_applies_the_arrived_update(short_lived: Make) -> None:
    world = short_lived(2)
    with world.syncing([0, 1]) as trainer:
        trainer.do(send_async, 2.0)
        assert world.workers[1].do(receive)
        world.workers[0].do(wait_for_an_arrived_update)
        world.workers[0].do(shut_down_rpc)
        error = trainer.do(attempt, wait_async)
        # The update had already arrived: it is applied, and its answer is lost.
        assert world.workers[0].do(receive)

        assert isinstance(error, WorkerLostError)
        assert list(error.lost) == [0]
        assert world.workers[0].do(shows) == (1, {2.0})
        for _ in range(2):  # nothing more can arrive: each `receive` raises the reason
            ended = world.workers[0].do(attempt, receive, 0.1)
            assert type(ended) is TransportError
            assert "RPC was shut down in this process" in str(ended)
            assert "It keeps version 1." in str(ended)
        assert world.workers[0].process.is_alive()


def wait_for_an_arrived_update(setup: WorkerSetup) -> None:
    """Wait until an update has arrived, without reading it."""
    waited = Deadline(PATIENCE)
    while not any(isinstance(each.message, Update) for link in setup.receiver.driver.links() for each in link._arrived):
        assert not waited.passed, "no update has come"
        time.sleep(0.01)


def test_a_graceful_rpc_shutdown_returns_once_the_schemes_are_closed(short_lived: Make) -> None:
    world = short_lived(1)
    with world.syncing([0]) as trainer:
        trainer.tell(send, 2.0)
        assert world.workers[0].do(receive)
        assert trainer.answer().ok
    for process in (world.trainer, world.workers[0]):
        process.tell(shut_down_rpc, True)

    world.trainer.answer()
    world.workers[0].answer()


def test_after_a_death_no_process_can_join_and_a_graceful_shutdown_hangs(short_lived: Make) -> None:
    """Torch's behaviour, as the docs describe it."""
    world = short_lived(2)
    world.workers[0].kill()
    substitute = world.stranger()
    substitute.tell(enter, "w0", 1, 3, world.options)
    world.workers[1].tell(shut_down_rpc, True)
    time.sleep(2.0)

    # The substitute waits, or has already been refused.
    if substitute.answered():
        with pytest.raises(RuntimeError):
            substitute.answer()
    assert not world.workers[1].answered()
    world.trainer.do(shut_down_rpc)


def test_a_lost_worker_is_reported_by_each_later_send(short_lived: Make) -> None:
    world = short_lived(2)
    with world.syncing([0, 1]) as trainer:
        world.workers[0].kill()
        for version in (1, 2):
            trainer.tell(attempt, send, float(version))
            assert world.workers[1].do(receive)
            error = trainer.answer()

            assert isinstance(error, SyncError)
            assert error.report.outcomes[0].kind is OutcomeKind.LOST
            assert error.report.version == version


def test_a_call_with_a_foreign_frame_is_refused_at_once(world: World) -> None:
    refused = world.trainer.do(call_with, b"not a frame of ours")

    assert "does not start with the weightsync magic" in refused


def call_with(setup: WorkerSetup, frame: bytes) -> str:
    arguments = ("a model of nobody", "a link", 0, frame, None)
    failure: str = rpc.rpc_sync("w0", call_server._deliver, args=arguments, timeout=PATIENCE).failure
    return failure
