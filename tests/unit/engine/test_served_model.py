"""The model that a worker serves: when another one takes its place, and whether that serves the version still."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fleet import Pair, large, small

from weightsync import (
    ConfigurationError,
    LayoutError,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from weightsync.weights.target import Target


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(partial(MultiProcessWeightSyncScheme, verify="digest"))
    yield made
    made.close()


def test_g2_a_model_with_the_workers_own_changes_does_not_serve_the_version_that_was_sent(pair: Pair) -> None:
    pair.sync()
    with torch.no_grad():
        pair.model[0].weight.fill_(7.0)
    pair.receiver.register_model(copy.deepcopy(pair.model))

    assert pair.receiver.version is None


@pytest.mark.parametrize("error", [ConfigurationError, LayoutError])
def test_g2_where_the_model_before_cannot_be_read_the_next_one_serves_nothing(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(self: Target) -> bytes:
        raise error("it is gone")

    pair = Pair(partial(MultiProcessWeightSyncScheme, verify="layout"))
    pair.sync()
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Target, "digest", digest)
        pair.receiver.register_model(small(1.0))
    assert pair.receiver.version is None
    assert pair.sync().ok
    pair.close()


@pytest.mark.parametrize(
    ("scheme", "mapped"), [(MultiProcessWeightSyncScheme, False), (SharedMemWeightSyncScheme, True)]
)
def test_a_model_keeps_its_memory_unless_its_scheme_maps_the_weights_into_it(scheme: Any, mapped: bool) -> None:
    pair = Pair(scheme, model=large)
    before, destination = pair.model[0].weight.data_ptr(), pair.receiver._served.destination()
    pair.sync()

    assert (pair.model[0].weight.data_ptr() != before) is mapped
    assert pair.receiver._served.destination() is destination
    pair.close()
