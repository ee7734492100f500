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


class Apart:
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
def apart(scheme_class: Any) -> Iterator[Apart]:
    made = Apart(scheme_class)
    yield made
    made.close()


REMARK = "the worker has a receiver of 'actor' over this connection, and none of 'policy' so far"


def test_g11_another_models_handshake_is_answered_and_both_sides_are_told(
    apart: Apart, caplog: pytest.LogCaptureFixture
) -> None:
    sender = apart.trainer.get_sender()
    with caplog.at_level(logging.WARNING, "weightsync"):
        sender.send_async()
        for _ in range(3):
            apart.look()
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


def test_a_log_handler_may_send_over_the_pipe_that_a_handshake_of_another_model_has_come_over(apart: Apart) -> None:
    handler, log = SendsOver(apart.worker.get_receiver().pipe), logging.getLogger("weightsync")
    apart.trainer.get_sender().send_async()
    log.addHandler(handler)
    try:
        apart.look()
    finally:
        log.removeHandler(handler)

    assert handler.waited == [False]
    assert REMARK in apart.trainer.get_sender().pipe(0).recv()


def test_a_handshake_for_a_model_whose_receiver_was_closed_is_answered_and_kept(apart: Apart) -> None:
    apart.serve_version_1()
    sender, model = apart.trainer.get_sender(), small()
    apart.first.close()
    sender.poll()
    sender.add_worker(0, apart.ours)
    for _ in range(2):
        apart.look()
    with pytest.raises(AckTimeoutError, match=f"have not connected. Worker 0: {REMARK}"):
        sender.await_workers(timeout=0)
    apart.later.init_on_worker("policy", pipe=apart.theirs, model=model)
    assert apart.later.get_receiver().receive(timeout=0)
    assert constants(model) == {1.0}


def test_a_worker_that_is_removed_and_added_again_at_once_is_served_over_its_next_receiver(apart: Apart) -> None:
    """Both models share the pipe, so that the goodbye and the next handshake are read together."""
    apart.serve_version_1()
    sender, model = apart.trainer.get_sender(), small()
    sender.remove_worker(0)
    sender.add_worker(0, apart.ours)
    with pytest.raises(SenderClosed):
        apart.first.get_receiver().receive(timeout=PATIENCE)
    apart.first.close()
    apart.later.init_on_worker("policy", pipe=apart.theirs, model=model)

    assert apart.later.get_receiver().receive(timeout=PATIENCE)
    assert constants(model) == {1.0}


def test_an_ack_that_was_in_flight_to_a_removed_worker_connects_no_later_one(apart: Apart) -> None:
    apart.serve_version_1()
    sender = apart.trainer.get_sender()
    sender.send_async()
    assert apart.first.get_receiver().receive(timeout=PATIENCE)
    sender.remove_worker(0)
    sender.add_worker(0, apart.ours)
    sender.poll()

    assert sender.workers[0].link_state is LinkState.EXPECTED


def test_a_rendez_vous_with_a_worker_of_another_model_says_so(apart: Apart) -> None:
    apart.look()
    with pytest.raises(AckTimeoutError, match=f"have not connected. Worker 0: {REMARK}"):
        apart.trainer.get_sender().await_workers(timeout=0)


def test_a_model_that_is_registered_after_its_handshake_was_answered_is_served_all_the_same(apart: Apart) -> None:
    sender, model = apart.trainer.get_sender(), small()
    sender.send_async()
    apart.look()
    sender.poll()
    apart.later.init_on_worker("policy", pipe=apart.theirs, model=model)
    assert apart.later.get_receiver().receive(timeout=0)

    assert sender.wait_async(timeout=PATIENCE).ok
    assert constants(model) == {1.0}
    assert sender._driver.remark(0) == ""


def test_models_that_are_all_registered_before_anything_is_read_get_no_answer(
    apart: Apart, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "weightsync"):
        apart.trainer.get_sender().send_async()
        apart.later.init_on_worker("policy", pipe=apart.theirs, model=small())
        apart.look()
        assert apart.later.get_receiver().receive(timeout=0)

    assert apart.trainer.get_sender().wait_async(timeout=PATIENCE).ok
    assert caplog.records == []
