"""Tensors that cannot be read or written are refused by name and type, on both sides, before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from data_samples import packed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from weightsync import ConfigurationError, LayoutError, WeightStrategy
from weightsync.engine.packer import Packer
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.packing import digest_of_weights
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.target import Mode, Target

modes = pytest.mark.parametrize("mode", Mode)


class AlwaysRaising(Tensor):
    """A subclass on which each function of torch raises."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyError(f"no {func}")


class Shapeless(Tensor):
    """A subclass whose shape cannot be read."""

    @property
    def shape(self) -> Any:
        raise ZeroDivisionError("no shape")


class Uncopyable(Tensor):
    """A subclass whose copies raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.copy_, torch._foreach_copy_):
            raise KeyError(f"no {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


def _freed(numel: int = 4, left: int = 0) -> Tensor:
    parameter = nn.Parameter(torch.ones(numel))
    parameter.untyped_storage().resize_(left)
    return parameter


def _past_the_end_of_its_storage() -> Tensor:
    """A view of the right size that begins behind the end of its shrunken storage."""
    base = torch.ones(8)
    view = base[4:]
    base.untyped_storage().resize_(16)
    return view


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def _masked() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype
        return masked_tensor(torch.ones(4), torch.tensor([True, False, True, True]))


def _nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(2)])


odd = pytest.mark.parametrize(
    ("make", "message"),
    [
        (_freed, "was freed or shrunk: its storage has 0 bytes, its shape and strides need 16"),
        (lambda: _freed(1 << 20, 64), "was freed or shrunk: its storage has 64 bytes"),
        (_past_the_end_of_its_storage, "was freed or shrunk: its storage has 16 bytes, its shape and strides need 32"),
        (_fake, "is a FakeTensor, which has no data"),
        (_masked, "is a MaskedTensor, which has no memory of its own"),
        (_nested, "is a nested tensor"),
        (lambda: torch._efficientzerotensor(4), "is a Tensor, which has no memory of its own"),
        (lambda: torch.ones(4, device="meta"), "is on the meta device"),
        (lambda: torch.ones(4).to_sparse(), "has the layout torch.sparse_coo"),
        (lambda: Tensor._make_subclass(AlwaysRaising, torch.ones(4)), "is a AlwaysRaising, which cannot be"),
        (lambda: torch.ones(4).as_subclass(Uncopyable), "is a Uncopyable, which cannot be"),
        (lambda: torch.ones(4).as_subclass(Shapeless), "is a Shapeless, which cannot be"),
    ],
)


@odd
@pytest.mark.parametrize("known", [False, True])
def test_the_trainer_refuses_to_send_an_unreadable_tensor(
    make: Callable[[], Tensor], message: str, known: bool
) -> None:
    packer, tensor = Packer(), make()
    numel = 1 << 20 if "64 bytes" in message else 4
    if known:
        packer.release_packed(packer.pack({"a": torch.ones(2), "x": torch.ones(numel)}))

    with pytest.raises(LayoutError, match=f"'x' {message}") as caught:
        packer.pack({"a": torch.ones(2), "x": tensor})

    assert caught.value.mismatched.keys() == {"x"}


@odd
@modes
def test_a_worker_refuses_an_unwritable_destination_tensor(
    make: Callable[[], Tensor], message: str, mode: Mode
) -> None:
    with pytest.raises(LayoutError, match=r"'x' (of the destination )?is a|'x' (was|has the layout|is on)"):
        Target({"a": torch.ones(2), "x": make()}, mode)


@odd
def test_extra_state_that_holds_an_unreadable_tensor_is_refused(make: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(LayoutError, match=f"extra state of module 'm' holds a tensor that {message}"):
        encode_extras({"m": {"ema": make()}})


@modes
@pytest.mark.parametrize("left", [0, 8])
def test_a_parameter_freed_after_the_target_was_made_is_refused_until_its_memory_is_restored(
    mode: Mode, left: int
) -> None:
    worker, update = nn.Linear(1000, 4), packed(nn.Linear(1000, 4))
    target = Target(worker, mode)
    bias, staged = worker.bias.tolist(), target.stage(*update)
    worker.weight.untyped_storage().resize_(left)

    for act in (lambda: target.swap(target.stage(*update)), lambda: target.swap(staged), target.digest):
        with pytest.raises(LayoutError, match=r"'weight' was freed or shrunk"):
            act()
    assert worker.bias.tolist() == bias

    worker.weight.untyped_storage().resize_(16000)
    target.swap(target.stage(*update))
    assert packed(worker)[1] == update[1]


@modes
@pytest.mark.parametrize("keeps_addresses", [False, True])
def test_memory_that_was_shrunk_is_not_written_even_at_the_same_address(mode: Mode, keeps_addresses: bool) -> None:
    worker, update = nn.BatchNorm1d(1000), packed(nn.BatchNorm1d(1000))
    target = Target(worker, mode)
    for _ in range(2):
        target.swap(target.stage(*update))
    if keeps_addresses:
        target.keep_addresses()
    staged = target.stage(*update)
    worker.running_mean.untyped_storage().resize_(8)
    # As if it had been freed, and smaller memory allocated at the same address, as malloc often does.
    target._plan.form.addresses = list(map(Tensor.data_ptr, target._plan.weights.tensors.values()))

    for act in (lambda: target.swap(target.stage(*update)), lambda: target.swap(staged), target.digest):
        with pytest.raises(LayoutError, match="'running_mean' was freed or shrunk"):
            act()


@modes
def test_a_version_in_another_order_is_not_written_into_shrunk_memory(mode: Mode) -> None:
    worker = nn.ParameterDict({"a": torch.zeros(100, 10)})
    target, update = Target(worker, mode), packed({"a": torch.ones(10, 100).t()})
    worker["a"].untyped_storage().resize_(8)
    target._plan.form.addresses = list(map(Tensor.data_ptr, target._plan.weights.tensors.values()))

    with pytest.raises(LayoutError, match="'a' was freed or shrunk"):
        target.swap(target.stage(*update))


def test_views_are_sent_while_their_storage_is_large_enough_and_refused_once_it_shrinks() -> None:
    base = torch.arange(12.0)
    source = {
        "tail": base[8:],
        "column": base.view(3, 4)[:, 3],
        "nothing": base[12:],
        "wide": base[:1].expand(5),
        "reversed": base.view(3, 4).t(),
    }
    known = layout_of(read_weights({name: tensor.clone() for name, tensor in source.items()}))

    assert layout_of(read_weights(source), known) is known
    alone = {name: layout_of(read_weights({name: tensor.clone()})) for name, tensor in source.items()}
    base.untyped_storage().resize_(44)
    for name in ("tail", "column", "reversed"):
        for expected in (None, alone[name]):
            with pytest.raises(LayoutError, match=f"'{name}' was freed .* has 44 bytes, .* need 48"):
                layout_of(read_weights({name: source[name]}), expected)


def test_a_module_with_fake_parameters_is_refused_by_the_strategy_or_the_packer() -> None:
    with FakeTensorMode():
        module = nn.Linear(2, 2)

    with pytest.raises(LayoutError, match=r"'(weight|bias)' is a FakeTensor, which has no data"):
        Packer().pack(WeightStrategy().extract_weights(module))
    silent = nn.Module()
    silent.register_buffer("x", Tensor._make_subclass(AlwaysRaising, torch.ones(4)))
    with pytest.raises(LayoutError, match="'x' is a AlwaysRaising, which cannot be detached"):
        WeightStrategy().extract_weights(silent)


class Tagged(Tensor):
    """A subclass that differs only in its name."""


def test_a_tensor_subclass_without_special_behaviour_is_applied() -> None:
    destination = {"x": torch.zeros(4).as_subclass(Tagged)}
    target = Target(destination)

    target.apply({"x": torch.arange(4.0).as_subclass(Tagged)})

    assert destination["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


class Computed(Mapping[str, Tensor]):
    """A mapping that makes its tensors at each access, such as one that reads a file."""

    def __getitem__(self, name: str) -> Tensor:
        return torch.zeros(4)

    def __iter__(self) -> Iterator[str]:
        return iter(["x"])

    def __len__(self) -> int:
        return 1


def test_a_destination_made_anew_at_each_access_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="The Computed creates a new tensor for 'x' on each read"):
        Target(Computed())

    assert layout_of(read_weights(Computed())).nbytes == 16


@modes
@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: parameter.data[:2],
        lambda parameter: parameter.data.view(torch.int32),
        lambda parameter: parameter.data[:1].expand(4),
    ],
)
def test_a_parameter_with_new_shape_dtype_or_strides_at_the_same_address_is_refused(mode: Mode, change: Any) -> None:
    worker = nn.ParameterDict({"a": torch.zeros(3), "x": nn.Parameter(torch.ones(4), requires_grad=False)})
    target, update = Target(worker, mode), packed({"a": torch.ones(3), "x": torch.arange(4.0)})
    staged = target.stage(*update)
    worker["x"].data = change(worker["x"])

    for act in (lambda: target.swap(target.stage(*update)), lambda: target.swap(staged)):
        with pytest.raises(LayoutError, match="'x'"):
            act()
    assert worker["a"].tolist() == [0.0, 0.0, 0.0]


@odd
@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_a_module_with_an_unusable_tensor_is_refused_by_each_strategy(
    make: Callable[[], Tensor], message: str, strategy: str
) -> None:
    module, found = nn.Module(), make()
    (module._parameters if isinstance(found, nn.Parameter) else module._buffers)["x"] = found

    with pytest.raises(LayoutError, match="'x'"):
        Packer().pack(WeightStrategy(strategy).extract_weights(module))
    with pytest.raises(LayoutError, match="'x'"):
        WeightStrategy(strategy).apply_weights({"x": torch.zeros(4)}, module)
    with pytest.raises(LayoutError, match="'x'"):
        WeightStrategy(strategy).apply_weights(module, {"x": torch.zeros(4)}, inplace=False)


def _buffers(**buffers: Tensor) -> nn.Module:
    module = nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


@pytest.mark.parametrize("flag", [Tensor.conj, lambda tensor: tensor.conj().imag], ids=["conjugate", "negative"])
def test_lazily_conjugated_or_negated_tensors_are_sent_but_refused_as_a_destination(
    flag: Callable[[Tensor], Tensor],
) -> None:
    lazy = flag(torch.randn(4, dtype=torch.complex64))
    plain = _buffers(x=torch.zeros_like(lazy.resolve_conj().resolve_neg()), y=torch.ones(2))

    Target(plain).apply({"x": lazy, "y": torch.zeros(2)})

    assert torch.equal(plain.x, lazy.resolve_conj().resolve_neg())
    with pytest.raises(LayoutError, match="'x' of the destination is a lazily conjugated or negated"):
        Target(_buffers(x=lazy, y=torch.ones(2)))


def _made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 3)


def _made_in_inference_mode_and_cast() -> nn.Module:
    """A model whose tensors are not inference tensors any more, although autograd still counts no writes to them."""
    return _made_in_inference_mode().bfloat16()


def _frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


def _in_a_graph() -> nn.Module:
    module = nn.Linear(3, 3)
    module.outcome = module(torch.ones(1, 3)).sum()
    return module


def _channels_last() -> nn.Module:
    return nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def _sharing() -> nn.Module:
    """A module with a parameter that is tied to a buffer, and with parameters side by side in one storage."""
    module, base = nn.Module(), torch.randn(12)
    for name, tensor in {"a": base[:4], "b": base[4:], "c": base.view(3, 4)[0]}.items():
        module.register_parameter(name, nn.Parameter(tensor))
    module.register_buffer("tied", module.b.data)
    return module


@modes
@pytest.mark.parametrize(
    "make",
    [
        _made_in_inference_mode,
        _made_in_inference_mode_and_cast,
        _frozen,
        _in_a_graph,
        _channels_last,
        _sharing,
        lambda: nn.Linear(3, 3).share_memory(),
        lambda: torch.compile(nn.Linear(3, 3), backend="eager"),  # the default backend warns in some releases of torch
        lambda: nn.DataParallel(nn.Linear(3, 3)),
        lambda: _buffers(x=torch.randn(3, 4).t(), y=nn.Parameter(torch.ones(3)) * torch.randn(())),
    ],
)
def test_applied_weights_are_live_in_every_kind_of_module(mode: Mode, make: Callable[[], nn.Module]) -> None:
    source, destination = make(), make()
    target = Target(destination, mode)

    for _ in range(2):
        target.apply(source)
        assert target.digest() == digest_of_weights(source) == digest_of_weights(destination)
        # Replace each parameter, so that the second version meets new ones.
        for module in destination.modules():
            for name, parameter in list(module._parameters.items()):
                module._parameters[name] = nn.Parameter(torch.zeros_like(parameter.data))
