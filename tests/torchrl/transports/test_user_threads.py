"""The thread that calls a user's transport ends with its link, or is left in a call that does not return."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fleet import PATIENCE

from weightsync import AckTimeoutError, MultiProcessWeightSyncScheme


class Own:
    """A transport of a user's own, whose calls may be held back."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.goes_on = threading.Event()
        self.threads: list[threading.Thread] = []

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.threads.append(threading.current_thread())
        self.called.set()
        self.goes_on.wait()

    def receive_weights(self, timeout: float = 1.0) -> None:
        """Nothing comes back."""

    def check_connection(self) -> bool:
        return True


def test_after_close_no_thread_is_left_that_could_let_go_of_tensors_while_the_interpreter_ends() -> None:
    own = Own()
    own.goes_on.set()
    with MultiProcessWeightSyncScheme().create_sender() as sender:
        sender.register_worker(0, own)
        sender.send({"weight": torch.zeros(2)})

    assert not own.threads[0].is_alive()


def test_a_call_that_does_not_return_is_not_waited_for() -> None:
    own = Own()
    with MultiProcessWeightSyncScheme().create_sender() as sender:
        sender.register_worker(0, own)
        with pytest.raises(AckTimeoutError):
            sender.send({"weight": torch.zeros(2)}, timeout=0.1)
        assert own.called.wait(PATIENCE)

    assert own.threads[0].is_alive()
    own.goes_on.set()
    own.threads[0].join(PATIENCE)
