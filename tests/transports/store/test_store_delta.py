"""Deltas over torch.distributed: between processes and under a key, with workers that die and come back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import store_fleet
import torch
from fleet import PATIENCE, Crew, large, receive
from store_fleet import StorePair, meet
from torch import nn

from weightsync import DistributedWeightSyncScheme, OutcomeKind

WHOLE = sum(each.nbytes for each in large().state_dict().values())
DELTA = 16 + 8 + 200 * 6


@pytest.fixture(params=[None, "the fleet's own secret"], ids=["without a key", "under a key"])
def one(request: pytest.FixtureRequest, store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorePair]:
    """A sender of deltas, and a receiver that serves version 1."""
    if request.param is not None:
        monkeypatch.setenv("WEIGHTSYNC_KEY", request.param)
    monkeypatch.setattr(store_fleet, "DistributedWeightSyncScheme", partial(DistributedWeightSyncScheme, delta=True))
    made = StorePair(store)
    made.sync()
    yield made
    made.close()


def step(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight")[7] += 1.0


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(each, other.state_dict()[name]) for name, each in one.state_dict().items())


def test_a_small_step_travels_as_a_delta(one: StorePair) -> None:
    step(one.source)
    report = one.sync()

    assert report.payload_nbytes == {0: DELTA}
    assert same(one.model, one.source)


def test_if_a_worker_has_lost_the_base_the_whole_payload_follows_within_one_send(one: StorePair) -> None:
    step(one.source)
    one.receiver.driver.held.drop()
    one.sender.send_async()
    while one.receiver.version != 2:
        one.sender.poll()
        one.receiver.receive(0.01)
    report = one.sender.wait_async(timeout=PATIENCE)

    assert report.payload_nbytes == {0: DELTA + WHOLE}
    assert same(one.model, one.source)


def test_a_worker_killed_during_a_delta_is_lost_and_its_replacement_applies_versions(store: Any, crew: Crew) -> None:
    source = large(1.0)
    with DistributedWeightSyncScheme(delta=True) as scheme:
        (worker,) = crew.start(None)
        worker.do(meet, store.port, 1)
        scheme.init_on_sender("policy", store=store, num_workers=1, model=source)
        sender = scheme.get_sender()
        worker.tell(receive)
        sender.send(timeout=PATIENCE)
        worker.answer()
        step(source)
        worker.stop()
        sender.send_async()
        worker.kill()
        lost = sender.wait_async(timeout=PATIENCE, on_failure="report")
        (successor,) = crew.start(None)
        successor.do(meet, store.port, 1)
        sender.add_worker(0, (store, 1))
        successor.tell(receive)
        sender.await_workers(PATIENCE)
        successor.answer()
        step(source)
        successor.tell(receive)
        report = sender.send(timeout=PATIENCE)
        successor.answer()

        assert (lost[0].kind, lost.payload_nbytes) == (OutcomeKind.LOST, {0: DELTA})
        assert report[0].kind is OutcomeKind.APPLIED
        assert report.payload_nbytes[0] in (DELTA, WHOLE)
