"""A handshake for a model without a receiver is answered, reported on both sides, and kept for a later receiver."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import PATIENCE, constants, small

from weightsync import AckTimeoutError, SenderClosed
from weightsync.protocol.sender import LinkState
from weightsync.transports.pipe.user_messages import UserMessages


class MismatchedModels:
    """A trainer with a sender for one model, and a worker with a receiver for another, over one pipe."""

    def __init__(self, scheme_class: Any) -> None:
        self.ours, self.theirs = multiprocessing.Pipe()
        self.trainer, self.worker, self.later, self.first, self.second = (scheme_class() for _ in range(5))
        self.trainer.init_on_sender("policy", pipes=[self.ours], model=small(1.0))
        self.worker.init_on_worker("actor", pipe=self.theirs, model=small())

    def look(self) -> None:
        """Make the worker read the messages that have arrived."""
        assert self.worker.get_receiver().receive(timeout=0) is False

    def serve_version_1(self) -> None:
        """Have ``first`` receive version 1. The sender of ``second`` keeps the connection open after the receivers."""
        self.second.init_on_sender("actor", pipes=[self.ours], model=small())
        self.first.init_on_worker("policy", pipe=self.theirs, model=small())
        sender = self.trainer.get_sender()
        sender.send_async()
        assert self.first.get_receiver().receive(timeout=PATIENCE)
        assert sender.wait_async(timeout=PATIENCE).ok

    def close(self) -> None:
        for scheme in (self.trainer, self.worker, self.later, self.first, self.second):
            scheme.close()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def mismatched(scheme_class: Any) -> Iterator[MismatchedModels]:
    made = MismatchedModels(scheme_class)
    yield made
    made.close()


REMARK = "the worker has a receiver of 'actor' over this connection, and none of 'policy' so far"


def test_g11_a_handshake_for_another_model_is_answered_and_reported_on_both_sides(
    mismatched: MismatchedModels, caplog: pytest.LogCaptureFixture
) -> None:
    sender = mismatched.trainer.get_sender()
    with caplog.at_level(logging.WARNING, "weightsync"):
        sender.send_async()
        for _ in range(3):
            mismatched.look()
        with pytest.raises(AckTimeoutError, match=REMARK) as caught:
            sender.wait_async(timeout=0)
        with pytest.raises(AckTimeoutError, match="never connected"):
            sender.wait_async(timeout=0)

    assert "never connected" in caught.value.report[0].reason
    here, there = (record.getMessage() for record in caplog.records)
    assert here.startswith("model 'policy': a sender's handshake arrived and was not accepted")
    assert there.startswith("model 'policy': worker 0 did not accept the handshake")
    assert all(REMARK in said for said in (here, there))
    assert sender.stale_answers == 0


class SendsOver(logging.Handler):
    """A user's log handler that sends each record over the same pipe, in another thread."""

    def __init__(self, pipe: UserMessages) -> None:
        super().__init__(logging.WARNING)
        self.pipe = pipe
        self.waited: list[bool] = []

    def emit(self, record: logging.LogRecord) -> None:
        sending = threading.Thread(target=self.pipe.send, args=(record.getMessage(),))
        sending.start()
        sending.join(PATIENCE / 2)
        self.waited.append(sending.is_alive())


def test_a_log_handler_may_send_over_the_pipe_of_a_handshake_for_another_model(mismatched: MismatchedModels) -> None:
    handler, log = SendsOver(mismatched.worker.get_receiver().pipe), logging.getLogger("weightsync")
    mismatched.trainer.get_sender().send_async()
    log.addHandler(handler)
    try:
        mismatched.look()
    finally:
        log.removeHandler(handler)

    assert handler.waited == [False]
    assert REMARK in mismatched.trainer.get_sender().pipe(0).recv()


def test_a_handshake_for_a_model_whose_receiver_was_closed_is_answered_and_kept(mismatched: MismatchedModels) -> None:
    mismatched.serve_version_1()
    sender, model = mismatched.trainer.get_sender(), small()
    mismatched.first.close()
    sender.poll()
    sender.add_worker(0, mismatched.ours)
    for _ in range(2):
        mismatched.look()
    with pytest.raises(AckTimeoutError, match=f"have not connected. Worker 0: {REMARK}"):
        sender.await_workers(timeout=0)
    mismatched.later.init_on_worker("policy", pipe=mismatched.theirs, model=model)
    assert mismatched.later.get_receiver().receive(timeout=0)
    assert constants(model) == {1.0}


def test_a_worker_removed_and_added_again_at_once_is_updated_by_its_next_receiver(mismatched: MismatchedModels) -> None:
    """Both models share the pipe, so that the goodbye and the next handshake are read together."""
    mismatched.serve_version_1()
    sender, model = mismatched.trainer.get_sender(), small()
    sender.remove_worker(0)
    sender.add_worker(0, mismatched.ours)
    with pytest.raises(SenderClosed):
        mismatched.first.get_receiver().receive(timeout=PATIENCE)
    mismatched.first.close()
    mismatched.later.init_on_worker("policy", pipe=mismatched.theirs, model=model)

    assert mismatched.later.get_receiver().receive(timeout=PATIENCE)
    assert constants(model) == {1.0}


def test_an_ack_in_flight_from_a_removed_worker_does_not_connect_its_new_link(mismatched: MismatchedModels) -> None:
    mismatched.serve_version_1()
    sender = mismatched.trainer.get_sender()
    sender.send_async()
    assert mismatched.first.get_receiver().receive(timeout=PATIENCE)
    sender.remove_worker(0)
    sender.add_worker(0, mismatched.ours)
    sender.poll()

    assert sender.workers[0].link_state is LinkState.EXPECTED


def test_await_workers_reports_a_worker_with_another_model(mismatched: MismatchedModels) -> None:
    mismatched.look()
    with pytest.raises(AckTimeoutError, match=f"have not connected. Worker 0: {REMARK}"):
        mismatched.trainer.get_sender().await_workers(timeout=0)


def test_a_model_registered_after_its_handshake_was_answered_is_updated(mismatched: MismatchedModels) -> None:
    sender, model = mismatched.trainer.get_sender(), small()
    sender.send_async()
    mismatched.look()
    sender.poll()
    mismatched.later.init_on_worker("policy", pipe=mismatched.theirs, model=model)
    assert mismatched.later.get_receiver().receive(timeout=0)

    assert sender.wait_async(timeout=PATIENCE).ok
    assert constants(model) == {1.0}
    assert sender._driver.remark(0) == ""


def test_models_registered_before_the_first_read_cause_no_remark(
    mismatched: MismatchedModels, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "weightsync"):
        mismatched.trainer.get_sender().send_async()
        mismatched.later.init_on_worker("policy", pipe=mismatched.theirs, model=small())
        mismatched.look()
        assert mismatched.later.get_receiver().receive(timeout=0)

    assert mismatched.trainer.get_sender().wait_async(timeout=PATIENCE).ok
    assert caplog.records == []
