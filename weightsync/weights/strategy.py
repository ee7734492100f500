"""`WeightStrategy`: TorchRL's way of extracting and applying weights, with strict checks of what fits."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.options import switch
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import extra_state_name
from weightsync.weights.packing import pack, views
from weightsync.weights.reading import Weights, layout_of, ordered, read_live, read_weights
from weightsync.weights.target import Mode, Staged, Target
from weightsync.weights.tensors import PLAIN, on_cpu, why_unsupported

#: The formats in which weights are extracted.
FORMATS = ("tensordict", "state_dict")


class WeightStrategy:
    """Extracts weights from a model and applies them to one. It equals, and hashes like, the name of its format.

    Args:
        extract_as: ``"tensordict"``, nested, or ``"state_dict"``, flat and dotted.

    Raises:
        ConfigurationError: the format is unknown.
    """

    __slots__ = ("extract_as",)

    def __init__(self, extract_as: str = "tensordict") -> None:
        if not isinstance(extract_as, str | WeightStrategy) or extract_as not in FORMATS:
            raise ConfigurationError(f"There is no strategy {extract_as!r}: choose one of {', '.join(FORMATS)}.")
        self.extract_as = str(extract_as)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, WeightStrategy):
            return self.extract_as == other.extract_as
        return self.extract_as == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.extract_as)

    def __str__(self) -> str:
        return self.extract_as

    def __repr__(self) -> str:
        return f"WeightStrategy({self.extract_as!r})"

    def extract_weights(self, source: object) -> TensorDict | dict[str, Any]:
        """Return the weights of a module, TensorDict or dict, in this strategy's format.

        The tensors are detached but not copied: they change with the source. A LoRA module is merged on a copy first,
        and the tensors are those of the copy. Extra state is stored under the module's ``_extra_state``. A returned
        TensorDict is new and not locked.

        Raises:
            ConfigurationError: the source, or a value in it, is of an unsupported type, or names collide.
            LayoutError: a parameter is not initialised yet.
        """
        weights = read_weights(source)
        tensors = {name: _detach(name, tensor) for name, tensor in weights.tensors.items()}
        extras = {extra_state_name(module): value for module, value in weights.extras().items()}
        if self.extract_as == "state_dict":
            return {**tensors, **extras}
        held = {name: NonTensorData(value) for name, value in extras.items()}
        return TensorDict(_nested({**tensors, **held}), batch_size=[])

    def apply_weights(self, destination: object, weights: object, inplace: bool = True) -> None:
        """Write weights of either format, flat or nested, into a module, TensorDict or dict: all or nothing.

        Args:
            destination: the module, TensorDict or dict. It keeps its tensors if `inplace` is true.
            weights: must have the destination's names, shapes, dtypes and modules with extra state, and no others.
            inplace: if false, a dict or TensorDict gets new tensors, and the old ones keep their values. A module
                keeps its Parameters; those on the CPU get new memory, and buffers are written in place.

        Raises:
            LayoutError: names, shapes or dtypes differ; nothing is changed.
            ConfigurationError: the destination, the weights or a value in them are of an unsupported type, or
                `inplace` is false and the destination is locked or read-only, or `inplace` is not a bool.
        """
        if switch(inplace, "inplace"):
            Target(destination).apply(weights)
        elif isinstance(destination, nn.Module):
            Target(destination, Mode.MAP).apply(weights)
        else:
            _replace(destination, read_weights(weights))


def strategy_of(strategy: WeightStrategy | str) -> WeightStrategy:
    """A strategy that was given as itself or by its name. Raises ConfigurationError: there is none of that name."""
    return WeightStrategy(strategy) if isinstance(strategy, str) else strategy


def _detach(name: str, tensor: Tensor) -> Tensor:
    # A plain tensor can always be detached; a subclass may raise.
    if type(tensor) not in PLAIN:
        why = why_unsupported(tensor) if is_lazy(tensor) else _why_undetached(tensor)
        if why:
            raise LayoutError(f"'{name}' {why}.", mismatched={name: why})
    return tensor.detach()


def _why_undetached(tensor: Tensor) -> str:
    try:
        tensor.detach()
    except Exception as error:  # noqa: BLE001 - a subclass of Tensor may raise anything
        return f"is a {type(tensor).__name__}, which cannot be detached ({error!r})"
    return ""


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *path, leaf = name.split(".")
        level = nested
        for part in path:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                raise ConfigurationError(
                    f"'{name}' cannot be nested below '{part}', which is itself a tensor. Choose the flat format "
                    "'state_dict'."
                )
        if leaf in level:
            raise ConfigurationError(
                f"'{name}' cannot be nested: it is a tensor and also has tensors below it. "
                "Choose the flat format 'state_dict'."
            )
        level[leaf] = value
    return nested


def refuse_misfit(destination: object, weights: object) -> None:
    """Refuse weights that do not fit a destination, as `WeightStrategy.apply_weights` does. Nothing is changed.

    Raises:
        LayoutError, ConfigurationError: as `WeightStrategy.apply_weights`.
    """
    _stage(Target(destination), read_weights(weights))


def _stage(target: Target, weights: Weights) -> tuple[Staged, Tensor]:
    """Stage weights through a separate buffer, which is returned too."""
    layout = layout_of(weights, target.layout)
    flat = on_cpu(layout.nbytes)
    payload = flat.numpy().data
    pack(weights, layout, payload)
    return target.stage(layout, payload, encode_extras(weights.extras())), flat


def _replace(destination: object, weights: Weights) -> None:
    """Give a dict or TensorDict new tensors. All checks come before the first change."""
    target = Target(destination)
    _refuse_fixed(destination)
    staged, flat = _stage(target, weights)
    layout = staged.layout
    live = read_live(destination)
    olds, news = ordered(live, layout), views(layout, flat)
    names = [entry.name for entry in layout.entries]
    fresh = {name: _copy_like(old, new) for name, old, new in zip(names, olds, news, strict=True)}
    for module, value in staged.extras.items():
        live.slots[module].set(value)
    _install(destination, "", fresh)


def _copy_like(old: Tensor, new: Tensor) -> Tensor:
    # Each owns its memory: `torch.save` writes whole storages, and none in which there are tensors of several dtypes.
    moved = new.to(old.device, copy=True)
    return nn.Parameter(moved, old.requires_grad) if isinstance(old, nn.Parameter) else moved


def _refuse_fixed(container: object) -> None:
    if isinstance(container, TensorDictBase) and container.is_locked:
        raise ConfigurationError(
            "A locked TensorDict cannot get new tensors: unlock it, or apply the weights in place."
        )
    if isinstance(container, Mapping) and not isinstance(container, MutableMapping):
        kind = type(container).__name__
        raise ConfigurationError(f"A {kind} is read-only and cannot get new tensors: apply the weights in place.")
    for value in container.values() if isinstance(container, Mapping | TensorDictBase) else ():
        _refuse_fixed(value)


def _install(container: Any, prefix: str, fresh: Mapping[str, Tensor]) -> None:
    for name, value in list(container.items()):
        if prefix + name in fresh:
            container[name] = fresh[prefix + name]
        elif isinstance(value, Mapping | TensorDictBase):
            _install(value, f"{prefix}{name}.", fresh)
