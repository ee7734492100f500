"""State that only the state dict has is refused on both sides: nothing is APPLIED that did not move."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet import PATIENCE
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from weightsync import LayoutError, MultiProcessWeightSyncScheme, WeightStrategy
from weightsync.weights.reading import read_weights
from weightsync.weights.selection import Selection
from weightsync.weights.target import Target


class PlainAttribute(nn.Module):
    """A module that keeps its weights in a plain attribute, and writes them into the state dict itself."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = torch.ones(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = self.packed


class VocabularyInStateDict(nn.Linear):
    """A layer that overrides `state_dict`, as models with a format of their own do."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "vocabulary": ["a", "b"]}


class Placeholder(nn.Module):
    """A module with an empty parameter, for which its state dict has the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = torch.ones(4)


class FailingStateDict(nn.Linear):
    """A layer that cannot make a state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("not here")


def _quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates what is to be refused here
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_quantised())


def _frozen() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.jit.freeze(torch.jit.script(nn.Linear(4, 4)).eval()))


def _hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0]._register_state_dict_hook(lambda _m, state, prefix, _meta: state.update({prefix + "scale": 0.5}))
    return module


def _post_hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(
        lambda _m, state, prefix, _meta: state.update({prefix + "table": torch.ones(2)})
    )
    return module


def _pre_hooked() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_state_dict_pre_hook(
        lambda owner, _prefix, _keep: owner._buffers.setdefault("late", torch.ones(2)),
    )
    return module


def _registering_each_time() -> nn.Module:
    """A module that registers another buffer each time its state dict is made."""
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_state_dict_pre_hook(
        lambda owner, _prefix, _keep: owner.register_buffer(f"late{len(owner._buffers) + 1}", torch.ones(2)),
    )
    return module


def _flushing() -> nn.Module:
    module, kept = nn.BatchNorm1d(2), torch.ones(2)
    module.register_state_dict_pre_hook(lambda owner, _prefix, _keep: owner.running_mean.copy_(kept))
    return module


class Rebinding(nn.Module):
    """A module whose parameter gets the memory of its weights only when the state dict is made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.held = nn.Parameter(torch.zeros(3)), torch.ones(3)
        self.register_state_dict_pre_hook(lambda owner, _prefix, _keep: owner.rebind())

    def rebind(self) -> None:
        self.weight.data = self.held.clone()


class Replacing(Rebinding):
    """As `Rebinding`, but with a new parameter each time."""

    def rebind(self) -> None:
        self.weight = nn.Parameter(self.held.clone())


def _patched() -> nn.Module:
    module = nn.Linear(2, 2)
    module.state_dict = lambda **_: {"adapter": torch.ones(2)}
    return module


def _nesting() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_state_dict_post_hook(
        lambda _m, state, prefix, _meta: state.update({prefix + "tables": {"of": {"rows": torch.ones(2)}}})
    )
    return module


hiding = pytest.mark.parametrize(
    ("make", "name"),
    [
        (PlainAttribute, "packed"),
        (lambda: nn.Sequential(nn.Linear(2, 2), PlainAttribute()), "1.packed"),
        (lambda: VocabularyInStateDict(2, 2), "vocabulary"),
        (Placeholder, "weight"),
        (_quantised, "0._packed_params._packed_params"),
        (_scripted, "0"),
        (_frozen, "0"),
        (_hooked, "0.scale"),
        (_post_hooked, "table"),
        (_registering_each_time, "0.late2"),
        (_flushing, "running_mean"),
        (Rebinding, "weight"),
        (Replacing, "weight"),
        (lambda: nn.Sequential(Replacing()), "0.weight"),
        (_nesting, "tables.of.rows"),
        (_patched, "adapter"),
    ],
)


@hiding
def test_hidden_state_is_refused_by_name_on_both_sides(make: Callable[[], nn.Module], name: str) -> None:
    for use in (read_weights, Target, WeightStrategy().extract_weights):
        module = make()
        with pytest.raises(LayoutError) as caught:
            use(module)
        assert f"'{name}'" in str(caught.value)
        assert name in caught.value.mismatched


def test_a_buffer_registered_while_the_state_dict_is_made_is_part_of_the_weights() -> None:
    model = _pre_hooked()
    target = Target(model)
    target.apply({**_pre_hooked().state_dict(), "0.late": torch.full((2,), 3.0)})

    assert model[0].late.tolist() == [3.0, 3.0]
    assert "0.late" in read_weights(_pre_hooked()).tensors


def test_a_root_module_whose_state_dict_raises_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"FailingStateDict cannot be determined: its state_dict\(\) raised KeyError"):
        read_weights(FailingStateDict(2, 2))


class Saving(nn.Linear):
    """A layer that overrides `_save_to_state_dict` without adding anything."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)


class Renaming(nn.Module):
    """A wrapper, as for checkpointing, whose state dict leaves out the prefix of the wrapper, and the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(_module: nn.Module, state: Any, prefix: str, _metadata: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}inner.")]:
            value = state.pop(name)
            if not name.endswith("bias"):
                state[name.replace("inner.", "", 1)] = value.detach()


class Halving(nn.Linear):
    """A layer that saves its weights in half precision. They travel as they are."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in list(destination):
            destination[name] = destination[name].half()


class Extra(nn.Linear):
    """A layer with extra state in a dict, and with a `state_dict` of its own."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": {"done": 3}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        return

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict(super().state_dict(*args, **kwargs))


class Adapted(nn.Module):
    """A LoRA module that can be merged. It saves only its adapter, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2)
        self.lora_a = nn.Parameter(torch.randn(2, 1))
        self.lora_b = nn.Parameter(torch.randn(1, 2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "default.lora_a"] = self.lora_a.detach()
        destination[prefix + "default.lora_b"] = self.lora_b.detach()

    def merge_and_unload(self) -> nn.Module:
        self.base.weight.data += self.lora_a @ self.lora_b
        return self.base


class OldStyle(nn.Linear):
    """A layer whose `state_dict` has no arguments, as in TorchRL's environments, and has an empty dict under a key."""

    def state_dict(self) -> Any:
        return {"weight": self.weight.data, "bias": self.bias.data, "workers": {}}


class Parametrized(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))


def _parametrized() -> nn.Module:
    module = nn.Linear(3, 3)
    parametrize.register_parametrization(module, "weight", Parametrized())
    return module


def _spectral() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(nn.Linear(3, 3))


def _spectral_of_inference_mode() -> nn.Module:
    with torch.inference_mode():
        module = _spectral()
    return module.double()


def _pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)


def _lazy_initialised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    module(torch.ones(2, 4))
    return module


def _scripted_float() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


class WithConstant(nn.Linear):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) * torch.tensor([1.0, 2.0])


class WithoutForward(nn.Module):
    """A module with an exported method, but without a `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    @torch.jit.export
    def act(self, values: Tensor) -> Tensor:
        return values * self.weight


def _traced_with_a_constant() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(WithConstant(2, 2), torch.ones(1, 2))


def _scripted_without_forward() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(WithoutForward())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Saving(3, 3),
        Renaming,
        lambda: nn.Sequential(Renaming(), nn.Linear(2, 2)),
        lambda: Halving(3, 3),
        lambda: nn.Sequential(Extra(3, 3)),
        lambda: OldStyle(2, 2),
        lambda: nn.Sequential(Adapted()),
        _weight_normed,
        _parametrized,
        _spectral,
        _spectral_of_inference_mode,
        _pruned,
        _lazy_initialised,
        _scripted_float,
        _scripted_without_forward,
        _traced_with_a_constant,
        lambda: nn.LSTM(2, 2, num_layers=2),
        lambda: nn.TransformerEncoderLayer(4, 2, batch_first=True),
    ],
)
def test_modules_without_hidden_state_are_applied(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    source, destination = make(), make()

    Target(destination).apply(source)

    found = read_weights(destination).tensors
    assert found
    assert all(torch.equal(found[name], tensor) for name, tensor in read_weights(source).tensors.items())


class HalvingExtra(Extra):
    """A layer that saves one weight in half precision, and has extra state."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().half()


@pytest.mark.parametrize(
    ("hiding", "name"),
    [(Placeholder, "weight"), (lambda: VocabularyInStateDict(2, 2), "vocabulary"), (Replacing, "weight")],
)
def test_selection_refuses_a_module_with_hidden_state_and_reads_its_sibling(
    hiding: Callable[[], nn.Module], name: str
) -> None:
    beside = HalvingExtra(2, 2)
    model = nn.ModuleDict({"a": nn.ModuleDict({"hiding": hiding(), "beside": beside})})

    for chosen, source, prefix in (("*.hiding.*", model, "a.hiding."), ("weight", model["a"]["hiding"], "")):
        with pytest.raises(LayoutError, match=f"'{prefix}{name}' ") as caught:
            Selection(chosen).read(source)
        assert caught.value.mismatched.keys() == {prefix + name}
        assert (f"their state dict: '{prefix[:-1]}' (" in str(caught.value)) == bool(prefix)
    found = Selection("a.beside.*").state_dict(model)
    assert list(found) == ["a.beside.weight", "a.beside.bias", "a.beside._extra_state"]
    assert found["a.beside.weight"] is beside.weight
    assert list(Selection(["weight", "_extra_state"]).state_dict(beside)) == ["weight", "_extra_state"]


def test_an_adapter_with_its_own_state_dict_is_merged_and_applied() -> None:
    adapted, worker = Adapted(), nn.Linear(2, 2)
    merged = adapted.base.weight.detach() + (adapted.lora_a @ adapted.lora_b).detach()

    Target(worker).apply(adapted)

    assert torch.allclose(worker.weight, merged)
    assert torch.equal(worker.bias, adapted.base.bias)


def test_a_lazy_module_is_refused_as_not_initialised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.Sequential(nn.LazyLinear(3))

    with pytest.raises(LayoutError, match=r"'0\.(weight|bias)' is not initialised"):
        Target(lazy)


def test_hidden_state_that_appears_later_is_refused_from_then_on() -> None:
    module, late = nn.Sequential(Saving(2, 2), nn.Linear(2, 2)), dict[str, Tensor]()
    module[1].register_state_dict_post_hook(
        lambda _m, state, prefix, _meta: state.update({prefix + "n": late["n"]} if late else {})
    )
    target = Target(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    target.apply(module)

    late["n"] = torch.ones(2)

    for use in (read_weights, target.apply, WeightStrategy().extract_weights):
        with pytest.raises(LayoutError, match=r"'1\.n'"):
            use(module)


def test_a_replaced_submodule_is_checked_for_hidden_state_again() -> None:
    module = nn.Sequential(Saving(2, 2), nn.Linear(2, 2))
    read_weights(module)

    module[1] = PlainAttribute()

    for _ in range(2):
        with pytest.raises(LayoutError, match=r"'1\.packed'"):
            read_weights(module)
    module[1] = nn.Linear(2, 2)
    assert "1.weight" in read_weights(module).tensors


def test_a_plain_model_is_not_checked_for_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.GRU(2, 2))
    monkeypatch.setattr("weightsync.weights.reading.refuse_hidden_state", None)

    assert read_weights(model).tensors.keys() == model.state_dict().keys()


def test_sending_a_model_with_hidden_state_raises_and_sends_nothing() -> None:
    ours, theirs = multiprocessing.Pipe()
    with MultiProcessWeightSyncScheme() as a, MultiProcessWeightSyncScheme() as b:
        a.init_on_sender("policy", pipes=[ours], model=_quantised())
        b.init_on_worker("policy", pipe=theirs, model={"weight": torch.zeros(2, 2), "bias": torch.zeros(2)})

        with pytest.raises(LayoutError, match="_packed_params"):
            a.get_sender().send()
        assert a.get_sender().version == 0
        assert not b.get_receiver().receive(timeout=0)

        a.get_sender().send_async(dict(nn.Linear(2, 2).named_parameters()))
        assert b.get_receiver().receive(timeout=PATIENCE)
        assert a.get_sender().wait_async().ok


def test_a_worker_refuses_a_model_with_hidden_state_at_init() -> None:
    _, theirs = multiprocessing.Pipe()
    with MultiProcessWeightSyncScheme() as scheme, pytest.raises(LayoutError, match="_packed_params"):
        scheme.init_on_worker("policy", pipe=theirs, model=_quantised())
