"""The sender of a transform's one actor. Its links are pipes here, so that the tests run without Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from fleet import PATIENCE, constants, small

from weightsync import MultiProcessWeightSyncScheme, RayModuleTransformScheme, WeightSyncError
from weightsync.transports.base import Link
from weightsync.transports.pipe.link import PipeLink


class OverPipes(RayModuleTransformScheme):
    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        return PipeLink(endpoint, model_id, peer=peer)


@pytest.fixture
def pipes() -> Iterator[list[tuple[Connection, Connection]]]:
    made = [multiprocessing.Pipe() for _ in range(2)]
    yield made
    for ours, theirs in made:
        ours.close()
        theirs.close()


def test_an_actor_that_left_is_not_added_again_until_the_user_does(pipes: list[tuple[Connection, Connection]]) -> None:
    (first, there), (second, there_again) = pipes
    with OverPipes() as scheme, MultiProcessWeightSyncScheme() as leaves, MultiProcessWeightSyncScheme() as comes:
        scheme.init_on_sender("policy", ray_transform=SimpleNamespace(_actor=first), model=small(1.0))
        sender = scheme.get_sender()
        leaves.init_on_worker("policy", pipe=there, model=small())
        sender.send_async()
        leaves.get_receiver().receive(timeout=PATIENCE)
        assert sender.wait_async(timeout=PATIENCE).ok
        leaves.close()
        sender.poll()
        assert not sender.worker_ids

        with pytest.raises(WeightSyncError, match="no workers"):
            sender.send(timeout=PATIENCE)
        assert not sender.worker_ids

        model = small()
        comes.init_on_worker("policy", pipe=there_again, model=model)
        sender.add_worker(0, second)
        sender.send_async()
        comes.get_receiver().receive(timeout=PATIENCE)
        assert sender.wait_async(timeout=PATIENCE).ok
        assert constants(model) == {1.0}
