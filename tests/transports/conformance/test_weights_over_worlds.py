"""Weights of every kind arrive bit by bit in other processes, over each public scheme."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fleet import WorkerSetup
from kind_worlds import (
    ALL_WORKERS,
    OverPipes,
    OverRay,
    OverRpc,
    OverStore,
    World,
    begin,
    begin_cast,
    begin_kind,
    begin_mapped,
    hold,
    hold_kind,
    link_state,
    marked,
    pack_as_if_on_a_device,
    pack_normally,
    push,
    send_cast,
    send_kind,
    send_what,
    serves,
)
from skipping import not_tested, skip_without_gpus
from torch import Tensor, nn
from torch.distributed import is_available, is_gloo_available, rpc
from weight_kinds import BY_NAME, REFUSED, snapshot

from weightsync import LayoutError, MultiProcessWeightSyncScheme, OutcomeKind, SharedMemWeightSyncScheme, WireDtype
from weightsync.weights.reading import layout_of, read_weights

WORLDS = [
    "pipe",
    "shared",
    pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(300)]),
    pytest.param("rpc", marks=pytest.mark.rpc),
    pytest.param("distributed", marks=pytest.mark.gloo),
]
pytestmark = [
    # Ray's C++ and its background threads leave sockets and files to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # torch warns whenever complex32 is allocated, as in the table of kinds.
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
        not_tested("WEIGHTS OF EVERY KIND OVER A STORE", "this torch was built without torch.distributed over gloo")
    return OverStore(forkserver)


@pytest.mark.parametrize("kind", BY_NAME)
def test_weights_of_every_kind_arrive_bit_identical(world: World, kind: str) -> None:
    world.workers[0].do(hold_kind, kind, kind)
    world.trainer.do(begin_kind, kind, kind)
    for version in (1, 2, 3):
        report, wanted, digest = world.send(kind, send_kind, kind)

        assert (report.version, report[0].kind) == (version, OutcomeKind.APPLIED)
        assert world.workers[0].do(serves, kind) == (wanted, digest)
    world.forget(kind)


@pytest.mark.parametrize("kind", REFUSED)
def test_unsendable_weights_raise_layout_error_before_any_send(world: World, kind: str) -> None:
    (make, said), model_id = REFUSED[kind], "refuses " + kind
    world.workers[0].do(hold_kind, model_id, "module")
    world.trainer.do(begin_kind, model_id, "module")
    served = world.send(model_id, send_kind, "module")[1:]
    with pytest.raises(LayoutError, match=f"(?i){said}"):
        world.trainer.do(send_what, model_id, make)

    assert world.trainer.do(link_state, model_id) == (1, "ready")
    assert world.workers[0].do(serves, model_id) == served
    assert world.send(model_id, send_kind, "module")[0].version == 2
    world.forget(model_id)


@pytest.mark.parametrize(("kind", "said"), [("meta", "on the meta device"), ("uninitialised", "not initialised")])
def test_a_worker_whose_model_has_no_data_raises_with_the_tensors_name(world: World, kind: str, said: str) -> None:
    make, _ = REFUSED[kind]

    assert f"weight' is {said}" in world.refusal_of(kind, make)


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(["cpu", "cpu"], id="posed"),
        pytest.param(["cpu", "cuda:0"], id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_device_map_fn_gives_each_worker_its_own_first_weights_on_its_device(world: World, devices: list[str]) -> None:
    if "cuda:0" in devices and not torch.cuda.is_available():
        skip_without_gpus("A WORKER ON A DEVICE", "no GPU; its code path was tested with the CPU as device")
    model_id = f"mapped to {devices}"
    for worker, device in zip(world.workers, devices, strict=True):
        worker.do(hold, model_id, partial(buffered_on, device))
    # Without a GPU, too, the trainer and the second worker pack their weights as if they were on a device.
    for process in (world.trainer, world.workers[1]):
        process.do(pack_as_if_on_a_device)

    workers, types, strategy = world.trainer.do(begin_mapped, model_id, devices)
    world.connect(model_id)
    source = buffered_on(devices[0], seed=1).state_dict()
    first = [snapshot({name: marked(tensor, worker) for name, tensor in source.items()}) for worker in ALL_WORKERS]
    assert (workers, types) == ([0, 1], {{"state_dict": "dict", "tensordict": "TensorDict"}[strategy]})
    assert [worker.do(serves, model_id)[0] for worker in world.workers] == first

    report, wanted = world.trainer.do(push, model_id)
    assert (report.version, report.ok, len(report.outcomes)) == (3, True, 2)
    assert [worker.do(serves, model_id)[0] for worker in world.workers] == [wanted] * 2
    for process in (world.trainer, world.workers[1]):
        process.do(pack_normally)
    world.forget(model_id, ALL_WORKERS)


def buffered_on(device: str, seed: int = 2) -> nn.Module:
    return BY_NAME["buffers"].source(seed).to(device)


def test_a_float32_model_is_cast_to_the_wire_dtype_and_served_in_it(world: World) -> None:
    dtype, model_id = torch.bfloat16, "cast"
    world.workers[0].do(hold, model_id, partial(cast_to, dtype))
    world.trainer.do(begin_cast, model_id, dtype)
    for version in (1, 2):
        report, wanted, digest = world.send(model_id, send_cast, dtype, False)

        assert (report.version, report[0].kind) == (version, OutcomeKind.APPLIED)
        assert world.workers[0].do(serves, model_id) == (wanted, digest)
        assert (report.wire_dtype, report.nbytes) == (WireDtype.BFLOAT16, sent_nbytes(dtype))
    world.forget(model_id)


def test_generation_b_send_casts_to_the_wire_dtype(world: World) -> None:
    dtype, model_id = torch.float16, "cast by the scheme"
    for worker in world.workers:
        worker.do(hold, model_id, partial(cast_to, dtype))
    world.trainer.do(begin_cast, model_id, "float16", ALL_WORKERS)
    world.connect(model_id)
    report, wanted, digest = world.trainer.do(send_cast, model_id, dtype, True)

    assert (report.version, report.ok, report.wire_dtype) == (2, True, WireDtype.FLOAT16)
    assert [worker.do(serves, model_id) for worker in world.workers] == [(wanted, digest)] * 2
    world.forget(model_id, ALL_WORKERS)


def test_a_worker_whose_model_has_another_dtype_is_refused_at_the_handshake_and_not_lost(world: World) -> None:
    model_id = "not cast"
    world.workers[0].do(hold, model_id, partial(cast_to, torch.float32))
    world.trainer.do(begin_cast, model_id, "bfloat16")
    errors = world.refuse(model_id)

    assert [kind for kind, _ in errors] == ["RefusedError"] * 2
    for _, message in errors:
        assert "dtype bfloat16, expected float32" in message
        assert "'0.weight'" in message
        assert "wire_dtype='float32', or cast the worker's model with model.to(torch.bfloat16)" in message
    world.forget(model_id)


def cast_to(dtype: torch.dtype) -> nn.Module:
    return buffered_on("cpu").to(dtype)


def sent_nbytes(dtype: torch.dtype) -> int:
    return layout_of(read_weights(cast_to(dtype))).nbytes


#: Elements of four bytes each: 1 GiB.
COUNT = 2**28


def counted() -> dict[str, Tensor]:
    return {"w": torch.arange(COUNT, dtype=torch.int32)}


def uncounted() -> dict[str, Tensor]:
    return {"w": torch.zeros(COUNT, dtype=torch.int32)}


def miscounts(setup: WorkerSetup, model_id: str) -> list[int]:
    """The indexes of the pieces of the model that differ from those sent."""
    pieces = enumerate(setup.kept["model of " + model_id]["w"].split(2**22))
    return [n for n, piece in pieces if not torch.equal(piece, torch.arange(n << 22, (n + 1) << 22, dtype=torch.int32))]


@pytest.mark.slow
def test_one_gibibyte_of_weights_arrives_unchanged(world: World) -> None:
    world.workers[0].do(hold, "gibibyte", uncounted)
    world.trainer.do(begin, "gibibyte")
    report = world.send("gibibyte", send_what, counted)

    assert (report.ok, report.nbytes) == (True, 2**30)
    assert world.workers[0].do(miscounts, "gibibyte") == []
    world.forget("gibibyte")
