"""Reading the weights of a module, TensorDict or dict: tensors by flat dotted name, and the modules' extra state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Protocol, TypeGuard, runtime_checkable
from weakref import ref

import torch
from msgspec import Struct, field
from tensordict import NonTensorData, TensorDict, TensorDictBase, TensorDictParams
from torch import Tensor, nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.weights.extra_state import (
    STATE_DICT_HOOKS,
    ExtraState,
    PerClass,
    is_fsdp,
    overrides_state_dict,
    refuse_fsdp,
    refuse_hidden_state,
)
from weightsync.weights.layout import EXTRA_STATE, Layout, extra_state_name, is_extra_state
from weightsync.weights.tensors import DTYPE_NAMES, DTYPES, PLAIN, are_backed, order_of, why_unsupported

#: A module, a TensorDict, or a dict, flat dotted or nested.
Source = nn.Module | TensorDictBase | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExtraSlot:
    """Access to the extra state of one module."""

    get: Callable[[], ExtraState]
    set: Callable[[ExtraState], object]


class Weights(Struct, frozen=True):
    """The weights of a source: its tensors, not copied, by flat dotted name, and access to its extra state."""

    tensors: dict[str, Tensor]
    slots: dict[str, ExtraSlot]
    #: The source's tensors that do not belong to the weights, if only some were chosen.
    left_out: dict[str, Tensor] = field(default_factory=dict)
    #: Where those are in memory.
    beside: list[int] = field(default_factory=list)

    def extras(self) -> dict[str, ExtraState]:
        """Get the current extra state of each module."""
        return {module: slot.get() for module, slot in self.slots.items()}


@runtime_checkable
class _Mergeable(Protocol):
    """A module whose adapters (LoRA) can be merged into the weights they adapt."""

    def merge_and_unload(self) -> nn.Module: ...


def read_weights(source: object) -> Weights:
    """Read the weights to send.

    A module has parameters, persistent buffers and extra state. A module with a `merge_and_unload` method is copied
    and merged on the copy at each call; a module that only contains such a module is read as it is. In a dict or
    TensorDict, a name that ends in ``_extra_state`` is extra state, as in a state dict; so is a TensorDict's
    ``__extra_state__``, which TorchRL's `WeightStrategy` makes. Nothing else is copied.

    Raises:
        ConfigurationError: the source or a value in it is of an unsupported type, two values have the same name, or a
            module with adapters cannot be copied.
        LayoutError: a module's state dict has an entry that is neither a parameter, a persistent buffer nor extra
            state.
    """
    if _is_mergeable(source):
        source = _copied(source).merge_and_unload()
    return read_live(source)


def _copied(source: _Mergeable) -> _Mergeable:
    try:
        return copy.deepcopy(source)
    except Exception as error:
        raise ConfigurationError(
            f"the adapters of the {_type_name(source)} are merged on a copy of it, which cannot be made "
            f"({type(error).__name__}: {error}). Merge them yourself and send a dict of the merged weights, or send "
            "the adapters alone with names=."
        ) from error


def transient_buffers(model: object) -> set[str]:
    """The names of a module's non-persistent buffers: `TensorDict.from_module` has them, a state dict does not."""
    named = model.named_modules(remove_duplicate=False) if isinstance(model, nn.Module) else ()
    return {f"{name}.{key}".lstrip(".") for name, owner in named for key in owner._non_persistent_buffers_set}


def merges_into_others(model: nn.Module) -> bool:
    """Whether the weights that are read to be sent have other names than the model itself: adapters are merged."""
    return _is_mergeable(model) and read_weights(model).tensors.keys() != read_live(model).tensors.keys()


def _is_mergeable(source: object) -> TypeGuard[_Mergeable]:
    kind: Any = type(source)
    # It is asked only where it is worthwhile: that takes a dozen calls in Python.
    may_merge = isinstance(source, nn.Module) and ("merge_and_unload" in vars(source) or _kind_may_merge[ref(kind)])
    return may_merge and isinstance(source, _Mergeable)


@PerClass
def _kind_may_merge(kind: type[nn.Module]) -> bool:
    # A class with its own __getattr__ (such as peft's) may forward to the method of a module in it.
    finds_more = kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__
    return finds_more or issubclass(kind, _Mergeable)


def read_live(source: object) -> Weights:
    """Read a source without ever merging it. This is what a receiver overwrites."""
    weights, customising = read_unchecked(source)
    if isinstance(source, nn.Module) and (customising or is_fsdp[ref(type(source))]):
        refuse_fsdp({"": source, **customising})
        return _whole(source, weights, customising)
    return weights


def read_shards(source: object) -> Weights:
    """Like `read_live`, for a module that `fully_shard` may have wrapped: its parameters are DTensors."""
    weights, customising = read_unchecked(source)
    return _whole(source, weights, customising) if customising else weights


def _whole(source: Any, weights: Weights, customising: dict[str, nn.Module]) -> Weights:
    """The weights, with tensors that ``state_dict()`` has registered just now, as TorchRL's `SACLoss` does once.

    Raises LayoutError: the module keeps state elsewhere.
    """
    try:
        _refuse_hidden_state(source, weights, customising)
    except LayoutError:
        reread, customising = read_unchecked(source)
        if reread.tensors.keys() == weights.tensors.keys():
            raise
        _refuse_hidden_state(source, reread, customising)
        return reread
    return weights


def _refuse_hidden_state(source: Any, weights: Weights, customising: dict[str, nn.Module]) -> None:
    refuse_hidden_state(source, customising, weights.tensors, set(map(extra_state_name, weights.slots)))


def read_unchecked(source: object) -> tuple[Weights, dict[str, nn.Module]]:
    """The weights, and the modules that customise their state dict, by name: they may keep more than that."""
    weights, customising = Weights({}, {}), dict[str, nn.Module]()
    try:
        if is_module[ref(type(source))]:
            assert isinstance(source, nn.Module)
            _read_module(source, "", weights, customising, {})
        else:
            _read_other(source, weights)
    except RecursionError:
        raise ConfigurationError(f"The {_type_name(source)} contains itself or is nested too deep.") from None
    return weights, customising


@PerClass
def is_module(kind: type) -> bool:
    """Whether weights of a type are read as those of a module."""
    # TensorDictParams is a module too, but its names are those of the TensorDict.
    return issubclass(kind, nn.Module) and not issubclass(kind, TensorDictBase)


def _read_other(source: object, weights: Weights) -> None:
    if isinstance(source, TensorDictBase):
        _read_tensordict(source, "", weights)
    elif isinstance(source, Mapping):
        _read_mapping(source, "", weights)
    else:
        raise ConfigurationError(
            f"Weights of type {_type_name(source)} are not supported: pass a torch.nn.Module, a TensorDict, or a dict "
            "of tensors with str keys."
        )


def _read_module(
    module: nn.Module, prefix: str, into: Weights, customising: dict[str, nn.Module], usual: dict[type, bool]
) -> None:
    # state_dict() takes ten times as long, and named_parameters() omits tied names.
    kind: Any = type(module)
    tensors, is_usual = into.tensors, usual.get(kind)
    if is_usual is None:
        is_usual = usual[kind] = kind.get_extra_state is _GET_EXTRA_STATE and _is_usual[ref(kind)]
    # Looking up each attribute in the module would take longer than everything else.
    fields = module.__dict__ if is_usual else _read_unusual(module, prefix, into, customising)
    for name, parameter in fields["_parameters"].items():
        if parameter is not None:
            tensors[prefix + name] = parameter
    if fields["_buffers"]:
        transient = fields["_non_persistent_buffers_set"]
        for name, buffer in fields["_buffers"].items():
            if buffer is not None and name not in transient:
                tensors[prefix + name] = buffer
    if fields["_state_dict_hooks"] or fields["_state_dict_pre_hooks"] or _STATE_DICT in fields or _SAVE in fields:
        customising[prefix[:-1]] = module
    if fields["_modules"]:
        for name, child in fields["_modules"].items():
            if type(child) is TensorDictParams:
                _read_tensordict(child, f"{prefix}{name}.", into)
            elif child is not None:
                _read_module(child, f"{prefix}{name}.", into, customising, usual)


def _read_unusual(
    module: nn.Module, prefix: str, into: Weights, customising: dict[str, nn.Module]
) -> Mapping[str, Any]:
    """Read what is unusual about a module; returns its attributes."""
    if type(module).get_extra_state is not _GET_EXTRA_STATE:
        into.slots[prefix[:-1]] = ExtraSlot(module.get_extra_state, module.set_extra_state)
    if overrides_state_dict[ref(type(module))]:
        customising[prefix[:-1]] = module
    return {**vars(module), **{name: getattr(module, name) for name in _ATTRIBUTES}}


#: The attributes of a module that say what its state is, and its methods that an instance may replace.
_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", *STATE_DICT_HOOKS})
_STATE_DICT, _SAVE = "state_dict", "_save_to_state_dict"
_GET_EXTRA_STATE = nn.Module.get_extra_state


@PerClass
def _is_usual(kind: type[nn.Module]) -> bool:
    """Whether modules of a kind have the usual state dict, and their own dict has all of their attributes."""
    given = any(map(_ATTRIBUTES.intersection, map(vars, kind.__mro__)))
    found = kind.__getattribute__ is object.__getattribute__ and not given
    return found and not overrides_state_dict[ref(kind)]


def _read_tensordict(source: TensorDictBase, prefix: str, into: Weights) -> None:
    if not isinstance(source, TensorDict | TensorDictParams):
        raise ConfigurationError(
            f"'{prefix[:-1]}' is a {_type_name(source)}, which creates new tensors on each access: call "
            ".to_tensordict() or .contiguous() on it."
        )
    for key, value in source.items():
        name = str(key)
        if name == _TORCHRLS_EXTRA_STATE and not prefix and isinstance(value, TensorDictBase):
            _add_slot(into, EXTRA_STATE, ExtraSlot(partial(_from_torchrls, source), partial(_to_torchrls, source)))
        elif is_extra_state(name):
            slot = ExtraSlot(partial(_from_tensordict, source, name), partial(_to_tensordict, source, name))
            _add_slot(into, prefix + name, slot)
        elif isinstance(value, Tensor):
            _add_tensor(into, prefix + name, value)
        elif isinstance(value, TensorDictBase):
            _read_tensordict(value, f"{prefix}{name}.", into)
        else:
            raise _unsupported(prefix + name, value)


#: Where TorchRL's `WeightStrategy` puts the extra state of the module itself, as a TensorDict.
_TORCHRLS_EXTRA_STATE = "__extra_state__"


def _from_torchrls(source: TensorDictBase) -> ExtraState:
    return source.get(_TORCHRLS_EXTRA_STATE).flatten_keys(".").to_dict()


def _to_torchrls(destination: TensorDictBase, value: ExtraState) -> None:
    destination.set(_TORCHRLS_EXTRA_STATE, TensorDict(value))


def _from_tensordict(source: TensorDictBase, name: str) -> ExtraState:
    value = dict(source.items())[name]
    if isinstance(value, NonTensorData):
        return value.data
    return value.to_dict() if isinstance(value, TensorDictBase) else value


def _to_tensordict(destination: TensorDictBase, name: str, value: ExtraState) -> None:
    destination.set_non_tensor(name, value)


def _read_mapping(source: Mapping[Any, Any], prefix: str, into: Weights) -> None:
    for name, value in source.items():
        if not isinstance(name, str):
            where = f" below '{prefix[:-1]}'" if prefix else ""
            raise ConfigurationError(f"The key {name!r}{where} of the weights is not a str: give each tensor a name.")
        if name.endswith(EXTRA_STATE) and is_extra_state(name):
            # A read-only mapping, without __setitem__, can be read; setting its extra state raises.
            _add_slot(into, prefix + name, ExtraSlot(partial(source.__getitem__, name), partial(_put, source, name)))
        elif type(value) in PLAIN or isinstance(value, Tensor):
            _add_tensor(into, prefix + name, value)
        elif isinstance(value, TensorDictBase):
            _read_tensordict(value, f"{prefix}{name}.", into)
        elif isinstance(value, Mapping):
            _read_mapping(value, f"{prefix}{name}.", into)
        else:
            raise _unsupported(prefix + name, value)


def _put(destination: Any, name: str, value: ExtraState) -> None:
    destination[name] = value


def _add_tensor(into: Weights, name: str, tensor: Tensor) -> None:
    if name in into.tensors:
        raise ConfigurationError(
            f"Two tensors are named '{name}', one by a dotted key and one by nested keys: rename one."
        )
    into.tensors[name] = tensor


def _add_slot(into: Weights, name: str, slot: ExtraSlot) -> None:
    module = name.removesuffix(EXTRA_STATE).removesuffix(".")
    if module in into.slots:
        raise ConfigurationError(f"'{name}' occurs twice, once by a dotted key and once by nested keys: rename one.")
    into.slots[module] = slot


def _unsupported(name: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"'{name}' is a {_type_name(value)}: weights must be tensors or dicts of tensors.")


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass(frozen=True, slots=True)
class _Plan:
    """The names, shapes and dtypes of a layout, prepared for fast comparison with tensors."""

    known: frozenset[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    sizes: list[int]


@lru_cache(maxsize=64)
def _plan(layout: Layout) -> _Plan:
    shapes = [entry.shape for entry in layout.entries]
    dtypes = [DTYPES[entry.dtype] for entry in layout.entries]
    return _Plan(frozenset(layout.names), shapes, dtypes, [entry.nbytes for entry in layout.entries])


def ordered(weights: Weights, layout: Layout) -> list[Tensor]:
    """Return the tensors in the order of the layout, which must be their layout."""
    return list(map(weights.tensors.__getitem__, layout.names))


def layout_of(weights: Weights, known: Layout | None = None) -> Layout:
    """Return the layout of these weights: the object `known` if nothing differs but orders, which is fast to check.

    Raises:
        LayoutError: a tensor, which the error names, cannot be sent (quantised, sparse, nested, meta, uninitialised,
            without memory).
    """
    if known is not None and _fits(weights, known):
        return known
    specs, orders = [], {}
    for name, tensor in weights.tensors.items():
        why = why_unsupported(tensor)
        if why:
            raise LayoutError(f"'{name}' {why}.", mismatched={name: why})
        specs.append((name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
        orders[name] = order_of(tensor)
    layout = Layout(specs, weights.slots, orders)
    return known if known is not None and known.fits(layout) else layout


_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _fits(weights: Weights, known: Layout) -> bool:
    plan = _plan(known)
    if weights.tensors.keys() != plan.known or tuple(sorted(weights.slots)) != known.extras:
        return False
    tensors = ordered(weights, known)
    # A tensor that is not plain, or has less memory than its shape needs, fails here; the slow path then names it.
    return PLAIN.issuperset(map(type, tensors)) and are_formed(tensors, known) and are_backed(tensors, plan.sizes)


def are_formed(tensors: list[Tensor], layout: Layout) -> bool:
    """Whether tensors, given in the order of the layout, have its shapes and dtypes."""
    plan = _plan(layout)
    try:
        return list(map(_dtype, tensors)) == plan.dtypes and list(map(_shape, tensors)) == plan.shapes
    except RuntimeError:  # nested tensors have no shape
        return False
