"""Weights of every kind arrive bit by bit in other processes, over each transport's public scheme (issue 4, point 7)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fleet import Seat
from kind_worlds import (
    EVERYBODY,
    OverPipes,
    OverRay,
    OverRpc,
    OverStore,
    World,
    begin,
    begin_kind,
    change_model,
    hold,
    hold_kind,
    send_kind,
    send_what,
    serves,
    standing,
)
from torch import nn
from torch.distributed import is_available, is_gloo_available, rpc
from weight_kinds import BY_NAME, REFUSED, lazy

from weightsync import LayoutError, MultiProcessWeightSyncScheme, OutcomeKind, SharedMemWeightSyncScheme

WORLDS = [
    "pipe",
    "shared",
    pytest.param("ray", marks=pytest.mark.ray),
    pytest.param("rpc", marks=pytest.mark.rpc),
    pytest.param("distributed", marks=pytest.mark.gloo),
]
pytestmark = [
    # Ray's C++ and its background threads leave what they do not close to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # torch warns of complex32 whenever it allocates some, as the table of kinds does.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, forkserver: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = _enter(request, forkserver, str(tmp_path_factory.mktemp("world")))
    yield made
    made.end()


def _enter(request: pytest.FixtureRequest, forkserver: Any, folder: str) -> World:
    match request.param:
        case "pipe":
            return OverPipes(forkserver, MultiProcessWeightSyncScheme)
        case "shared":
            return OverPipes(forkserver, SharedMemWeightSyncScheme)
        case "ray":
            request.getfixturevalue("cluster")
            return OverRay()
        case "rpc":
            assert rpc.is_available(), "this torch was built without RPC, which these tests need"
            return OverRpc(forkserver, folder)
    if not is_available() or not is_gloo_available():
        assert not os.environ.get("CI"), "CI needs a torch with gloo"
        pytest.skip("NO GLOO: this torch was built without torch.distributed over gloo")
    return OverStore(forkserver)


@pytest.mark.parametrize("kind", BY_NAME)
def test_it_arrives_bit_by_bit(world: World, kind: str) -> None:
    world.workers[0].do(hold_kind, kind, kind)
    world.trainer.do(begin_kind, kind, kind)
    for version in (1, 2, 3):
        report, wanted, digest = world.send(kind, send_kind, kind)

        assert (report.version, report[0].kind) == (version, OutcomeKind.APPLIED)
        assert world.workers[0].do(serves, kind) == (wanted, digest)
    world.forget(kind)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_travel_is_a_layout_error_before_anything_is_sent(world: World, kind: str) -> None:
    (make, said), model_id = REFUSED[kind], "refuses " + kind
    world.workers[0].do(hold_kind, model_id, "module")
    world.trainer.do(begin_kind, model_id, "module")
    served = world.send(model_id, send_kind, "module")[1:]
    with pytest.raises(LayoutError, match=f"(?i){said}"):
        world.trainer.do(send_what, model_id, make)

    assert world.trainer.do(standing, model_id) == (1, "ready")
    assert world.workers[0].do(serves, model_id) == served
    assert world.send(model_id, send_kind, "module")[0].version == 2
    world.forget(model_id)


@pytest.mark.parametrize("kind", ["meta", "uninitialised"])
def test_a_worker_whose_own_model_has_no_data_is_told_which_tensor(world: World, kind: str) -> None:
    make, said = REFUSED[kind]

    assert f"weight' is {'on the meta device' if kind == 'meta' else 'not initialised'}" in world.refusal_of(kind, make)
