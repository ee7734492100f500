"""`Selection`: some of a model's weights, chosen by name on both sides: what ``names=`` says."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from weightsync.errors import ConfigurationError, LayoutError
from weightsync.options import items_of
from weightsync.weights.extra_state import refuse_fsdp, refuse_hidden_state
from weightsync.weights.layout import extra_state_name, listed, quoted
from weightsync.weights.reading import Weights, read_unchecked
from weightsync.weights.tensors import past_modes


class Selection:
    """Chooses the tensors and the extra state whose dotted names match.

    Args:
        names: names, or patterns as a shell has them: ``"*.lora_?.*"``. A dot is matched as any other character.

    Raises:
        ConfigurationError: they are not names.
    """

    def __init__(self, names: str | Iterable[str]) -> None:
        given = [names] if isinstance(names, str) else items_of(names)
        if given is None:
            raise ConfigurationError(f"names= is {names!r}: give names of weights, or patterns such as '*.lora_?.*'.")
        self._patterns = tuple(given)
        if not self._patterns or not all(isinstance(each, str) and each for each in self._patterns):
            raise ConfigurationError(
                f"names= has {self._patterns!r}: give at least one name of a weight, or a pattern such as "
                "'*.lora_?.*'. Nothing has changed."
            )
        #: Whether a name matches, by name.
        self._known: dict[str, bool] = {}
        #: The names that were chosen last: each pattern matched one of them. None: nothing was read yet.
        self._matched: list[str] | None = None

    def __repr__(self) -> str:
        return f"Selection({list(self._patterns)})"

    def read(self, source: object) -> Weights:
        """Read the chosen weights of a source, and nothing else of it. An adapted module (LoRA) is not merged.

        Raises:
            ConfigurationError: the source or a value in it is of an unsupported type.
            LayoutError: a pattern matches nothing, or a module with a chosen tensor keeps state elsewhere.
        """
        all_weights, customising = read_unchecked(source)
        left_out = {name: tensor for name, tensor in all_weights.tensors.items() if not self._has(name)}
        chosen = Weights(
            {name: tensor for name, tensor in all_weights.tensors.items() if self._has(name)},
            {module: slot for module, slot in all_weights.slots.items() if self._has(extra_state_name(module))},
            left_out,
            _addresses_of(left_out.values()),
        )
        self._refuse_unmatched(chosen, all_weights)
        if customising:
            refuse_fsdp(customising)
            _refuse_hidden_state(all_weights, chosen, customising)
        return chosen

    def state_dict(self, source: object) -> dict[str, Any]:
        """The chosen weights of a source, not copied, as a state dict has them. Raises as `read`."""
        chosen = self.read(source)
        extras = {extra_state_name(module): value for module, value in chosen.extras().items()}
        return {**chosen.tensors, **extras}

    def _has(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = any(_matches(name, pattern) for pattern in self._patterns)
        return known

    def _refuse_unmatched(self, chosen: Weights, all_weights: Weights) -> None:
        names = [*chosen.tensors, *map(extra_state_name, chosen.slots)]
        if names == self._matched:
            return
        unmatched = [pattern for pattern in self._patterns if not any(_matches(name, pattern) for name in names)]
        if unmatched:
            has = listed([quoted(name) for name in sorted(all_weights.tensors)]) or "no tensors"
            lacking = listed([quoted(pattern) for pattern in unmatched])
            text = f"no weights match {lacking} in names=. Available: {has}."
            raise LayoutError(text, missing=unmatched)
        self._matched = names


def _addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Where tensors of any type are; 0 for one that does not say."""
    addresses = []
    with past_modes():
        for tensor in tensors:
            try:
                addresses.append(tensor.data_ptr())
            except Exception:  # noqa: BLE001 - it has no memory (sparse), or a subclass raises
                addresses.append(0)
    return addresses


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)  # a name may have brackets, which are a set in a pattern


def _refuse_hidden_state(all_weights: Weights, chosen: Weights, customising: dict[str, nn.Module]) -> None:
    """Refuse modules that customise their state dict and have chosen tensors of their own, if they keep more state."""
    owners = {name.rpartition(".")[0] for name in chosen.tensors}
    for name in owners.intersection(customising):
        prefix = f"{name}." if name else ""
        tensors = {key: tensor for key, tensor in all_weights.tensors.items() if key.startswith(prefix)}
        extras = set(map(extra_state_name, all_weights.slots))
        refuse_hidden_state(customising[name], {name: customising[name]}, tensors, extras, prefix)
