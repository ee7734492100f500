"""Over a scheme, weights arrive whatever orders the tensors of the trainer and of the worker have in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Crew, Pair, WorkerSetup
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme


def row_major(fill: float) -> nn.Module:
    """A model in the orders that torch uses, and large enough for a slot."""
    made = nn.Sequential(nn.Conv2d(64, 32, 3), nn.Linear(200, 300), nn.BatchNorm2d(4))
    torch.manual_seed(int(fill))
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return made


def reordered(fill: float) -> nn.Module:
    """The same weights, but the large tensors lie in other orders in memory."""
    made = row_major(fill).to(memory_format=torch.channels_last)
    made[1].weight.data = made[1].weight.data.t().contiguous().t()
    return made


def both(trainers: Callable[[float], nn.Module], workers: Callable[[float], nn.Module]) -> Callable[[float], nn.Module]:
    """A model factory for a `Pair`, which makes the trainer's model from 1.0 and the workers' models from 0.0."""
    return lambda fill: (trainers if fill else workers)(fill)


kinds = pytest.mark.parametrize(
    "kind",
    [both(reordered, reordered), both(reordered, row_major), both(row_major, reordered)],
    ids=["same", "trainer's", "worker's"],
)


def equal(one: nn.Module, other: nn.Module) -> bool:
    there = other.state_dict()
    return all(torch.equal(value, there[name]) for name, value in one.state_dict().items())


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


@kinds
@pytest.mark.parametrize("options", [{}, {"verify": "digest"}, {"wire_dtype": "bfloat16"}])
def test_versions_arrive_in_any_order_of_elements_and_have_the_trainers_digest(
    scheme_class: Any, kind: Any, options: dict[str, Any]
) -> None:
    def model(fill: float) -> nn.Module:
        return kind(fill) if fill or "wire_dtype" not in options else kind(fill).to(torch.bfloat16)

    pair = Pair(lambda: scheme_class(**options), model=model)
    strides = [parameter.stride() for parameter in pair.model.parameters()]
    for _ in range(3):
        assert pair.sync().ok
        wanted = pair.source.to(torch.bfloat16) if "wire_dtype" in options else pair.source
        assert equal(wanted, pair.model)
        assert pair.receiver.digest() == pair.sender.digest()
        pair.source.float()
        step(pair.source)
    assert [parameter.stride() for parameter in pair.model.parameters()] == strides
    pair.close()


def small_row_major(fill: float) -> nn.Module:
    made = nn.Linear(30, 40)
    nn.init.constant_(made.weight, fill)
    return made


def small_reordered(fill: float) -> nn.Module:
    made = small_row_major(fill)
    made.weight.data = made.weight.data.t().contiguous().t()
    return made


@pytest.mark.parametrize("trainers", [small_row_major, small_reordered])
@pytest.mark.parametrize("workers", [small_row_major, small_reordered])
def test_deltas_arrive_in_any_order_of_elements(
    trainers: Callable[[float], nn.Module], workers: Callable[[float], nn.Module]
) -> None:
    pair = Pair(lambda: MultiProcessWeightSyncScheme(delta=True), model=both(trainers, workers))
    for version in range(4):
        report = pair.sync()
        assert (report.payload_nbytes[0] < report.nbytes) == (version > 0)
        assert equal(pair.source, pair.model)
        with torch.no_grad():
            pair.source.weight[:, 3].mul_(2)
    assert pair.receiver.digest() == pair.sender.digest()
    pair.close()


@kinds
def test_g2_a_replacement_model_with_equal_weights_in_any_order_serves_the_same_version(
    scheme_class: Any, kind: Any
) -> None:
    pair = Pair(scheme_class, model=kind)
    assert pair.sync().ok
    for make in (row_major, reordered):
        pair.receiver.register_model(make(1.0))
        assert pair.receiver.version == 1

    pair.receiver.register_model(row_major(2.0))
    assert pair.receiver.version is None
    pair.close()


@kinds
@pytest.mark.parametrize("given", [row_major, reordered])
@pytest.mark.parametrize("taken", [True, False])
def test_apply_weights_recognizes_the_pending_version_in_any_order_of_elements(
    scheme_class: Any, kind: Any, given: Callable[[float], nn.Module], taken: bool
) -> None:
    pair = Pair(scheme_class, model=kind)
    pair.sender.send_async()
    weights = pair.receiver.take_update(PATIENCE) if taken else given(1.0).state_dict()

    pair.receiver.apply_weights(weights)

    assert pair.sender.wait_async(timeout=PATIENCE).ok
    assert (pair.receiver.version, equal(pair.source, pair.model)) == (1, True)
    pair.close()


@pytest.mark.parametrize("given", [row_major, reordered])
def test_weights_in_another_order_than_the_registered_model_are_sent(
    scheme_class: Any, given: Callable[[float], nn.Module]
) -> None:
    pair = Pair(scheme_class, model=both(reordered, reordered))
    for fill in (1.0, 2.0, 3.0):
        assert pair.sync(given(fill)).ok
        assert equal(given(fill), pair.model)
    pair.close()


def join(setup: WorkerSetup) -> None:
    setup.model = reordered(0.0)
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()


def received(setup: WorkerSetup) -> tuple[list[tuple[int, ...]], bool, dict[str, Any]]:
    """Receive a version. Returns the strides, whether all large weights view one slot, and the weights."""
    assert setup.receiver.receive(timeout=PATIENCE)
    large = [setup.model[at].weight for at in (0, 1)]
    slots = {weight.untyped_storage().data_ptr() for weight in large}
    return [each.stride() for each in large], len(slots) == 1, setup.model.state_dict()


def test_a_worker_maps_weights_that_lie_in_the_trainers_order(crew: Crew) -> None:
    (worker,), source = crew.start(SharedMemWeightSyncScheme()), reordered(1.0)
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=source)
        worker.do(join)
        for _ in range(4):
            worker.tell(received)
            assert scheme.get_sender().send().ok
            strides, mapped, found = worker.answer()
            assert strides == [source[at].weight.stride() for at in (0, 1)]
            assert mapped
            assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())
            step(source)
