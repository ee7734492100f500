"""A model that arrives on the meta device, without its weights, gets memory."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import warnings

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from weightsync import LayoutError, MultiProcessWeightSyncScheme, WeightStrategy
from weightsync.weights.meta_device import fill_in, give_memory, is_on_meta, lacks_weights
from weightsync.weights.reading import read_live
from weightsync.weights.target import Mode, Target


class Scaled(nn.Module):
    """A module with a layer, and with parameters in a TensorDict."""

    def __init__(self, fill: float, *, lock: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.held = TensorDictParams(
            TensorDict({"deep": {"scale": torch.full((2,), fill)}, "steps": torch.full((2,), int(fill))}), lock=lock
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.held["deep", "scale"] + self.held["steps"]


def sent_by_a_collector(model: nn.Module) -> nn.Module:
    """The model as a worker of TorchRL's multi-process collectors gets it."""

    def without_data(data: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return nn.Parameter(data, requires_grad=False) if isinstance(tensor, nn.Parameter) else data

    weights = TensorDict.from_module(model, as_module=True)
    # The call of TorchRL. An older tensordict lacks the option, and behaves in the same way without it.
    known = inspect.signature(TensorDict.to_module).parameters
    options = {"preserve_module_state": False} if "preserve_module_state" in known else {}
    with weights.data.to("meta").apply(without_data, weights).to_module(model, **options):
        sent = pickle.dumps(model)
    return pickle.loads(sent)


@pytest.mark.parametrize("lock", [False, True])
@pytest.mark.parametrize("mode", [Mode.COPY, Mode.MAP])
def test_parameters_in_a_tensordict_are_filled_and_then_updated(mode: Mode, lock: bool) -> None:
    source = Scaled(3.0, lock=lock)
    model = sent_by_a_collector(source)

    assert fill_in(model)
    assert not fill_in(model)
    assert {tensor.device.type for tensor in read_live(model).tensors.values()} == {"cpu"}
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.held["deep", "scale"].isnan().all()

    Target(model, mode).apply(WeightStrategy().extract_weights(source))
    assert torch.equal(model(torch.ones(2)), source(torch.ones(2)))
    assert torch.equal(dict(model.named_buffers())["held.steps"], source.held["steps"])


def test_a_tensor_that_a_tensordict_shares_with_a_layer_stays_one_tensor() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2, device="meta")
    model.held = TensorDictParams(TensorDict({"weight": model.layer.weight}))

    assert fill_in(model)
    assert model.held["weight"] is model.layer.weight
    assert model.layer.weight.isnan().all()
    assert model.layer.weight.requires_grad


def test_a_tensordict_model_on_the_meta_device_is_given_memory() -> None:
    held = TensorDictParams(
        TensorDict({"scale": torch.ones(2, device="meta"), "steps": torch.tensor([1], device="meta")})
    )

    assert is_on_meta(held)
    assert fill_in(held)
    assert not is_on_meta(held)
    assert (held["scale"].isnan().tolist(), held["steps"].tolist()) == ([True, True], [0])


def test_a_frozen_parameter_stays_frozen() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.weight.requires_grad_(False)

    assert fill_in(model)
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, True)


@pytest.mark.parametrize(("depth", "name"), [(0, "scale"), (1, "0.scale")])
def test_a_non_persistent_buffer_on_the_meta_device_is_refused_by_name(depth: int, name: str) -> None:
    model: nn.Module = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)
    if depth:
        model = nn.Sequential(model)

    with pytest.raises(LayoutError, match=f"^'{name}' is on the meta device and not persistent") as caught:
        fill_in(model)
    assert caught.value.mismatched == {name: "is on the meta device, and not persistent"}


def test_a_model_that_was_given_memory_has_no_weights_until_they_are_written() -> None:
    model = nn.Sequential(nn.Linear(1, 1, device="meta"), nn.Linear(2, 2))
    model.empty = nn.Parameter(torch.empty(0))

    assert lacks_weights(model)
    assert [give_memory(model) for _ in range(2)] == [True, True]
    assert lacks_weights(model)
    Target(model).apply({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})
    assert not lacks_weights(model)
    assert not give_memory(model)
    assert not give_memory("a.path")
    assert not give_memory(nn.Linear(2, 2).requires_grad_(False).apply(lambda each: each.weight.fill_(torch.nan)))


def test_a_filled_tensor_keeps_its_strides_so_that_a_worker_can_map_it() -> None:
    source = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last)
    model = nn.Conv2d(3, 4, 5).to(memory_format=torch.channels_last).to("meta")

    assert fill_in(model)

    assert model.weight.stride() == source.weight.stride()
    assert model.weight.isnan().all()
    target = Target(model, Mode.MAP)
    target.apply(source)
    assert torch.equal(model.weight, source.weight)
    assert len(target._plan.mappable) == 2


def offloaded(model: nn.Sequential) -> nn.Sequential:
    """A model as offloaded by accelerate: a hook of the parent loads the weights of its parts, and frees them."""
    kept = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    inner = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.load_state_dict(kept, assign=True)
        found = inner(x)
        model.to("meta")
        return found

    model.forward, model._hf_hook = forward, object()
    return model.to("meta")


def test_a_model_that_accelerate_has_offloaded_is_refused() -> None:
    model = offloaded(nn.Sequential(nn.Linear(2, 2)))

    with pytest.raises(
        LayoutError, match=r"'0\.weight' is on the meta device because accelerate has offloaded it"
    ) as caught:
        fill_in(model)

    assert caught.value.mismatched == {"0.weight": "is offloaded by accelerate"}
    assert model[0].weight.is_meta


def test_a_model_with_accelerate_hooks_but_no_meta_tensors_is_accepted() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model._hf_hook = object()

    assert not fill_in(model)


def test_a_lazy_module_on_the_meta_device_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that lazy modules are new
        model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.LazyLinear(3, device="meta"))
    worker, (ours, theirs) = MultiProcessWeightSyncScheme(), multiprocessing.Pipe()

    with worker, pytest.raises(LayoutError, match=r"'1\.weight' is not initialised: run a forward pass first"):
        worker.init_on_receiver(model_id="policy", pipe=theirs, model=model)
    ours.close()
    theirs.close()
