"""The thread that calls a user's transport ends with its link, unless a call does not return."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fleet import PATIENCE

from weightsync import AckTimeoutError, MultiProcessWeightSyncScheme


class BlockingTransport:
    """A user's transport whose calls block until `goes_on` is set."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.goes_on = threading.Event()
        self.threads: list[threading.Thread] = []

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.threads.append(threading.current_thread())
        self.called.set()
        self.goes_on.wait()

    def receive_weights(self, timeout: float = 1.0) -> None:
        """Receive nothing."""

    def check_connection(self) -> bool:
        return True


def test_close_ends_the_thread_that_calls_a_users_transport() -> None:
    own = BlockingTransport()
    own.goes_on.set()
    with MultiProcessWeightSyncScheme().create_sender() as sender:
        sender.register_worker(0, own)
        sender.send({"weight": torch.zeros(2)})

    assert not own.threads[0].is_alive()


def test_close_does_not_wait_for_a_call_that_does_not_return() -> None:
    own = BlockingTransport()
    with MultiProcessWeightSyncScheme().create_sender() as sender:
        sender.register_worker(0, own)
        with pytest.raises(AckTimeoutError):
            sender.send({"weight": torch.zeros(2)}, timeout=0.1)
        assert own.called.wait(PATIENCE)

    assert own.threads[0].is_alive()
    own.goes_on.set()
    own.threads[0].join(PATIENCE)


def test_a_worker_that_is_added_again_gets_one_call_at_a_time_and_the_newest_version_last() -> None:
    class Slow(BlockingTransport):
        def __init__(self) -> None:
            super().__init__()
            self.brought: list[float] = []

        def send_weights(self, model_id: str, weights: Any) -> None:
            super().send_weights(model_id, weights)
            self.brought.append(float(weights["weight"][0]))

    own = Slow()
    with MultiProcessWeightSyncScheme().create_sender() as sender:
        sender.register_worker(0, own)
        for version in (1.0, 2.0):
            with pytest.raises(AckTimeoutError):
                sender.send({"weight": torch.full((2,), version)}, timeout=0.1, on_pending="supersede")
        sender.abandon()
        sender.register_worker(0, own)
        with pytest.raises(AckTimeoutError):
            sender.send({"weight": torch.full((2,), 3.0)}, timeout=0.1)
        assert len(own.threads) == 1, "a second call began before the first returned"
        own.goes_on.set()
        assert sender.wait_async(timeout=PATIENCE).ok

    assert own.brought == [1.0, 2.0, 3.0]
    for thread in own.threads:
        thread.join(PATIENCE)
