"""WeightStrategy: both formats, flat or nested, into modules, TensorDicts and dicts, with strict checks."""

from __future__ import annotations

import copy
import io
import pickle
import types

import pytest
import torch
from data_samples import Counted, snapshot, trained
from tensordict import TensorDict, TensorDictParams
from torch import Tensor, nn

from weightsync import ConfigurationError, LayoutError, WeightStrategy

formats = pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])


def test_a_strategy_equals_and_hashes_like_its_name() -> None:
    strategy = WeightStrategy("state_dict")

    assert strategy == "state_dict"
    assert strategy != "tensordict"
    assert strategy == WeightStrategy(extract_as="state_dict")
    assert strategy != WeightStrategy()
    assert strategy != 3
    assert {strategy: 1}["state_dict"] == 1
    assert WeightStrategy() == "tensordict"
    assert str(strategy) == "state_dict"
    assert repr(strategy) == "WeightStrategy('state_dict')"
    assert pickle.loads(pickle.dumps(strategy)) == copy.deepcopy(strategy) == strategy


@pytest.mark.parametrize("name", ["", "dict", None, 3])
def test_unknown_strategy_names_are_refused(name: object) -> None:
    with pytest.raises(ConfigurationError, match="There is no strategy"):
        WeightStrategy(name)
    assert issubclass(ConfigurationError, ValueError)


def test_a_state_dict_is_flat_and_refers_to_the_weights() -> None:
    policy = trained(1)

    state = WeightStrategy("state_dict").extract_weights(policy)

    assert state.keys() == policy.state_dict().keys()
    assert state["head.weight"].data_ptr() == policy.head.weight.data_ptr()
    assert not state["head.weight"].requires_grad
    policy.load_state_dict(state)


def test_a_tensordict_is_nested_unlocked_and_refers_to_the_weights() -> None:
    policy = trained(1)

    tensordict = WeightStrategy().extract_weights(policy)

    assert type(tensordict) is TensorDict
    assert not tensordict.is_locked
    assert tensordict.batch_size == ()
    assert tensordict["body", "1", "running_mean"].data_ptr() == policy.body[1].running_mean.data_ptr()
    assert not tensordict["head", "weight"].requires_grad
    assert tensordict["counted", "_extra_state"] == policy.counted.state


@formats
def test_every_kind_of_source_gives_the_same_weights(extract_as: str) -> None:
    policy, strategy = trained(2), WeightStrategy(extract_as)
    expected = snapshot(policy)

    once = strategy.extract_weights(policy)
    for source in (policy, once, WeightStrategy().extract_weights(policy), policy.state_dict()):
        assert snapshot(strategy.extract_weights(source)) == expected


@formats
@pytest.mark.parametrize("inplace", [True, False])
def test_weights_of_either_format_are_applied_to_every_kind_of_destination(extract_as: str, inplace: bool) -> None:
    source, strategy = trained(2), WeightStrategy(extract_as)
    nested = WeightStrategy().extract_weights(trained(1)).clone()
    for destination in (
        trained(1),
        nested,
        nested.flatten_keys("."),
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in trained(1).state_dict().items()
        },
        nested.to_dict(),
    ):
        strategy.apply_weights(destination, strategy.extract_weights(source), inplace=inplace)

        assert snapshot(destination) == snapshot(source)


@pytest.mark.parametrize("wrap", [TensorDict, dict])
def test_out_of_place_apply_creates_new_tensors_and_does_not_change_the_old(wrap) -> None:
    destination = wrap({"a": torch.zeros(2), "n": wrap({"b": nn.Parameter(torch.zeros(3), requires_grad=False)})})
    a, b = destination["a"], destination["n"]["b"]
    weights = {"a": torch.ones(2), "n.b": torch.ones(3)}

    WeightStrategy().apply_weights(destination, weights, inplace=False)

    assert (a.tolist(), b.tolist()) == ([0, 0], [0, 0, 0])
    assert (destination["a"].tolist(), destination["n"]["b"].tolist()) == ([1, 1], [1, 1, 1])
    assert isinstance(destination["n"]["b"], nn.Parameter)
    assert not destination["n"]["b"].requires_grad
    weights["a"].zero_()
    assert destination["a"].tolist() == [1, 1]


@pytest.mark.parametrize("wrap", [TensorDict, dict])
def test_out_of_place_apply_gives_each_tensor_its_own_storage_so_torch_can_save_it(wrap) -> None:
    destination, file = wrap({"a": torch.zeros(100), "b": torch.zeros(2), "n": torch.tensor(0)}), io.BytesIO()
    weights = {"a": torch.ones(100), "b": torch.ones(2), "n": torch.tensor(3)}

    WeightStrategy().apply_weights(destination, weights, inplace=False)
    torch.save(dict(destination.items()), file)  # raises if tensors of two dtypes lie in one storage
    file.seek(0)

    assert {name: tensor.tolist() for name, tensor in torch.load(file).items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in destination.values())


def test_out_of_place_apply_gives_parameters_new_memory() -> None:
    module = nn.Linear(2, 2)
    weight, memory = module.weight, module.weight.detach()
    before = memory.clone()

    WeightStrategy().apply_weights(module, nn.Linear(2, 2).state_dict(), inplace=False)

    assert module.weight is weight
    assert torch.equal(memory, before)
    assert not torch.equal(module.weight, before)


@pytest.mark.parametrize(
    "destination",
    [
        TensorDict({"a": torch.zeros(2)}).lock_(),
        TensorDict({"n": TensorDict({"a": torch.zeros(2)})}).lock_(),
        {"n": TensorDict({"a": torch.zeros(2)}).lock_()},
        types.MappingProxyType({"a": torch.zeros(2)}),
    ],
)
def test_out_of_place_apply_refuses_locked_and_read_only_destinations(destination) -> None:
    before = snapshot(destination)
    name = next(name for name in before if name != "extras")

    with pytest.raises(ConfigurationError, match="cannot get new tensors"):
        WeightStrategy().apply_weights(destination, {name: torch.ones(2)}, inplace=False)
    assert snapshot(destination) == before

    WeightStrategy().apply_weights(destination, {name: torch.ones(2)})
    assert snapshot(destination) == {**snapshot({name: torch.ones(2)})}


def test_out_of_place_apply_keeps_the_identity_of_tensordict_parameters() -> None:
    params = TensorDictParams(TensorDict({"a": torch.zeros(2)}))
    parameter = params["a"]
    before = parameter.detach()

    WeightStrategy().apply_weights(params, {"a": torch.ones(2)}, inplace=False)

    assert params["a"] is parameter
    assert parameter.tolist() == [1, 1]
    assert before.tolist() == [0, 0]


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    "weights",
    [
        {"a": torch.ones(2)},
        {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)},
        {"a": torch.ones(2), "b": torch.ones(3)},
        {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)},
        {"a": torch.ones(2), "b": torch.ones(2), "_extra_state": 3},
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(inplace: bool, weights: dict[str, object]) -> None:
    module = nn.Module()
    module.a, module.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    for destination in (
        module,
        {"a": torch.zeros(2), "b": torch.zeros(2)},
        TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}),
    ):
        before = snapshot(destination)
        with pytest.raises(LayoutError) as caught:
            WeightStrategy().apply_weights(destination, weights, inplace=inplace)

        assert isinstance(caught.value, KeyError)
        assert isinstance(caught.value, ValueError)
        assert snapshot(destination) == before


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    ("destination", "weights"), [({"a": torch.ones(1)}, None), (None, {}), ({"a": torch.ones(1)}, [1]), (3, {})]
)
def test_unsupported_types_are_refused(inplace: bool, destination: object, weights: object) -> None:
    with pytest.raises(ConfigurationError, match="are not supported"):
        WeightStrategy().apply_weights(destination, weights, inplace=inplace)


def test_names_that_cannot_be_nested_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot"):
        WeightStrategy().extract_weights({"a": torch.ones(1), "a.b": torch.ones(1)})
    with pytest.raises(ConfigurationError, match="cannot"):
        WeightStrategy().extract_weights({"a.b": torch.ones(1), "a": torch.ones(1)})


def test_extra_state_of_the_root_module_is_applied_in_both_formats() -> None:
    source, destination = Counted(), Counted()
    source.state = {"x": torch.ones(2), "y": [1, None]}
    for extract_as in ("tensordict", "state_dict"):
        strategy = WeightStrategy(extract_as)
        strategy.apply_weights(destination, strategy.extract_weights(source))

        assert snapshot(destination) == snapshot(source)
        destination.state = {}
