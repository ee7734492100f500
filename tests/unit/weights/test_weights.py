"""Reading: modules, TensorDicts and dicts give the names of a state dict, and nothing is silently left out."""

from __future__ import annotations

import collections
import gc
import types
import warnings
from weakref import ref

import pytest
import torch
from data_samples import Counted, Policy, sampled_dicts, trained
from hypothesis import given
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictParams
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from weightsync import ConfigurationError, LayoutError
from weightsync.engine.packer import Packer
from weightsync.schemes.sources import is_weightless
from weightsync.weights.extra_state import PerClass
from weightsync.weights.layout import Layout
from weightsync.weights.reading import layout_of, ordered, read_live, read_weights
from weightsync.weights.sharded import is_sharded


def test_a_module_is_read_like_its_state_dict() -> None:
    policy = trained(1)
    found, expected = read_weights(policy), policy.state_dict(keep_vars=True)

    extras = {name for name in expected if name.endswith("_extra_state")}
    assert found.tensors.keys() == expected.keys() - extras
    assert all(found.tensors[name] is expected[name] for name in found.tensors)
    assert found.extras() == {"counted": policy.counted.state}
    assert "scratch" not in found.tensors
    assert found.tensors["head.weight"] is found.tensors["embedding.weight"]


@pytest.mark.parametrize(
    "module",
    [nn.LSTM(2, 3), nn.MultiheadAttention(4, 2), nn.Identity(), nn.ParameterDict({"a": torch.ones(2)}), Counted()],
)
def test_modules_of_other_kinds_are_read_like_their_state_dicts(module: nn.Module) -> None:
    expected = {name for name in module.state_dict() if name != "_extra_state"}

    assert read_weights(module).tensors.keys() == expected


class BuffersAsProperty(nn.Linear):
    """A module whose class defines where its buffers are."""

    _buffers = property(lambda self: {"scale": self.scale}, lambda *_: None)  # type: ignore[assignment]
    scale = torch.ones(3)


def test_a_module_whose_class_defines_buffers_as_a_property_is_read_like_its_state_dict() -> None:
    model = nn.Sequential(BuffersAsProperty(2, 3), nn.Linear(3, 1))

    assert read_weights(model).tensors.keys() == model.state_dict().keys() >= {"0.scale"}


def test_changes_to_a_class_or_a_module_after_it_was_read_are_noticed() -> None:
    class Late(nn.Linear):
        pass

    model = nn.Sequential(Late(2, 3), nn.Linear(3, 1))
    assert not read_weights(model).slots
    Late.get_extra_state = lambda self: self.bias.sum().item()  # type: ignore[method-assign]
    Late.set_extra_state = lambda *_: None  # type: ignore[method-assign]
    assert read_weights(model).slots.keys() == {"0"}

    def whole(destination: dict[str, Tensor], **_: object) -> dict[str, Tensor]:
        destination["1.hidden"] = torch.ones(1)
        return destination

    model[1].state_dict = whole  # type: ignore[assignment, method-assign]
    with pytest.raises(LayoutError, match=r"1\.hidden"):
        read_weights(model)


def test_parameters_of_a_tensordict_inside_a_module_keep_their_names() -> None:
    module = nn.Module()
    module.inner = TensorDictParams(TensorDict({"w": torch.ones(2), "n": {"b": torch.zeros(3)}}))
    module.linear = nn.Linear(2, 2)

    assert read_weights(module).tensors.keys() == module.state_dict().keys()
    assert read_weights(module.inner).tensors.keys() == {"w", "n.b"}


def test_all_formats_of_one_model_give_one_layout() -> None:
    policy = trained(2)
    state = policy.state_dict()
    nested: dict[str, object] = {}
    for name, value in state.items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    tensordict = TensorDict({name: value for name, value in state.items() if isinstance(value, Tensor)})
    tensordict["counted._extra_state"] = NonTensorData(policy.counted.state)
    layout = layout_of(read_weights(policy))

    for source in (state, nested, types.MappingProxyType(state), tensordict, tensordict.lock_()):
        assert layout_of(read_weights(source)) == layout
        assert read_weights(source).extras().keys() == {"counted"}
    assert layout_of(read_weights(TensorDict(nested))) == layout


def test_a_tensordict_inside_a_dict_is_read() -> None:
    assert read_weights({"a": TensorDict({"b": torch.ones(2)})}).tensors.keys() == {"a.b"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "'a.b'"),
        ({"a._extra_state": 1, "a": {"_extra_state": 2}}, "'a._extra_state'"),
        ({"a": {"b": 3}}, "'a.b' is a builtins.int"),
        ({"a": None}, "'a' is a builtins.NoneType"),
        ({"a": {1: torch.ones(1)}}, "key 1 below 'a'"),
        ({1: torch.ones(1)}, "key 1 of the weights is not a str: give each tensor a name"),
        (TensorDict({"a": {"b": NonTensorData([1])}}), "'a.b' is a tensordict"),
        (None, "builtins.NoneType"),
        ([torch.ones(1)], "builtins.list"),
        (torch.ones(1), "torch.Tensor"),
        ("policy", "builtins.str"),
    ],
)
def test_sources_that_are_not_weights_are_refused_with_their_name_or_type(source: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_weights(source)

    assert message in str(caught.value)


def test_a_lazy_stack_that_creates_tensors_on_each_access_is_refused() -> None:
    stack = LazyStackedTensorDict(TensorDict({"a": torch.ones(2)}), TensorDict({"a": torch.ones(2)}), stack_dim=0)

    with pytest.raises(ConfigurationError, match="creates new tensors on each access"):
        read_weights({"x": stack})


def test_sources_that_contain_themselves_are_refused() -> None:
    module = nn.Linear(1, 1)
    module.add_module("me", module)
    endless: dict[str, object] = {}
    endless["me"] = endless

    for source in (module, endless):
        with pytest.raises(ConfigurationError, match="contains itself"):
            read_weights(source)


class Lora(nn.Module):
    """A module that is merged as in peft: the result is the inner module, changed."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2, bias=False)
        self.delta = nn.Parameter(torch.ones(2, 2))

    def merge_and_unload(self) -> nn.Module:
        self.base.weight.data += self.delta
        return self.base


def test_adapters_are_merged_on_a_copy() -> None:
    lora = Lora()
    before = lora.base.weight.detach().clone()

    found = read_weights(lora)

    assert found.tensors.keys() == {"weight"}
    assert torch.equal(found.tensors["weight"], before + 1)
    assert torch.equal(lora.base.weight, before)
    assert read_weights(nn.Sequential(lora)).tensors.keys() == {"0.base.weight", "0.delta"}


def test_adapters_of_a_model_that_cannot_be_copied_are_refused_with_advice() -> None:
    lora = Lora()
    lora.tied = lora.delta.T  # as peft ties an adapter of the embeddings: torch cannot copy the result of a computation

    with pytest.raises(
        ConfigurationError, match=r"copy of it, which cannot be made \(RuntimeError: .*names=\.$"
    ) as caught:
        read_weights(lora)

    assert isinstance(caught.value.__cause__, RuntimeError)


def _quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what is to be refused here
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def _nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_quantised, "is quantised"),
        (_nested, "is a nested tensor"),
        (lambda: torch.ones(2).to_sparse(), "has the layout torch.sparse_coo"),
        (
            lambda: torch.ones(2, device="meta"),
            "is on the meta device and has no data: make its model on another device",
        ),
        (lambda: nn.LazyLinear(3).weight, "is not initialised"),
        (lambda: nn.LazyBatchNorm1d().running_mean, "is not initialised"),
        (lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8), "has the dtype torch.bits8"),
    ],
)
def test_tensors_without_bytes_of_their_own_are_refused_by_name(make, message: str) -> None:
    weights = read_weights({"a": {"x": make()}, "b": torch.ones(1)})

    with pytest.raises(LayoutError) as caught:
        layout_of(weights)

    assert "'a.x'" in str(caught.value)
    assert message in str(caught.value)
    assert "a.x" in caught.value.mismatched


@given(sampled_dicts)
def test_a_known_layout_that_fits_is_reused(found: dict[str, tuple[Tensor, bytes]]) -> None:
    weights = read_weights({name: tensor for name, (tensor, _) in found.items()})
    layout = layout_of(weights)

    assert layout_of(weights, layout) is layout
    assert layout_of(weights, Layout([("z", "float32", ())])) == layout
    for tensor, entry in zip(ordered(weights, layout), layout.entries, strict=True):
        assert tensor is weights.tensors[entry.name]


def test_a_tensor_that_wraps_others_is_refused_even_if_a_known_layout_fits() -> None:
    known = layout_of(read_weights({"a": torch.ones(2)}))
    weights = read_weights({"a": TwoTensor(torch.ones(2), torch.ones(2))})

    with pytest.raises(LayoutError, match=r"'a' is a TwoTensor, which wraps other tensors.* before it is quantised"):
        layout_of(weights, known)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.ones(3), "b": torch.ones(2, 2)},
        {"a": torch.ones(2), "b": torch.ones(2, 2, dtype=torch.float64)},
        {"a": torch.ones(2), "b": torch.ones(2, 2), "c": torch.ones(())},
        {"a": torch.ones(2)},
        {"a": torch.ones(2), "b": torch.ones(2, 2), "_extra_state": 1},
    ],
)
def test_a_known_layout_that_no_longer_fits_is_not_reused(other: dict[str, object]) -> None:
    known = layout_of(read_weights({"a": torch.ones(2), "b": torch.ones(2, 2)}))
    weights = read_weights(collections.OrderedDict(other))

    assert layout_of(weights, known) != known


def test_two_policies_of_one_class_have_equal_layouts() -> None:
    assert layout_of(read_weights(Policy())) == layout_of(read_weights(trained(3)))


def test_reading_a_module_does_not_keep_its_class_alive() -> None:
    """Such a class is made anew by each run of a notebook's cell, or by each trial of a search."""
    data, asked = torch.ones(3), PerClass(lambda kind: issubclass(kind, nn.Linear))

    class Net(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + data

    packer, kind = Packer(), ref(Net)
    packer.release_packed(packer.pack(Net(2, 3)))
    assert not is_sharded(Net(2, 3))
    assert not is_weightless(Net(2, 3))
    assert read_live(Net(2, 3)).tensors
    assert asked[kind]
    assert len(asked) == 1
    del Net
    gc.collect()

    assert kind() is None
    assert not asked
    assert not asked._ends


def test_per_class_answers_are_computed_once_for_classes_that_cannot_be_compared() -> None:
    class Incomparable(type):
        __hash__ = type.__hash__

        def __eq__(cls, other: object) -> bool:
            raise AssertionError("classes were compared")

    asked = []
    answers = PerClass(lambda kind: not asked.append(kind))
    kind = Incomparable("kind", (), {})

    assert [answers[ref(kind)] for _ in range(3)] == [True] * 3
    assert len(asked) == len(answers) == 1
