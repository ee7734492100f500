"""Telling apart the argument forms of TorchRL's two generations."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from weightsync.errors import ConfigurationError


class Generation(enum.Enum):
    """Which generation's results a transport returns; its constructor's arguments decide."""

    #: ``receive_weights`` returns ``(model_id, weights)``, and waits 1 s by default.
    A = "A"
    #: ``receive_weights`` returns the weights, and by default waits until some arrive.
    B = "B"


class UnsetType(enum.Enum):
    """The value of an argument that was not given, where None has a meaning of its own."""

    UNSET = "unset"


UNSET: Final = UnsetType.UNSET
#: The model id if none is given.
POLICY: Final = "policy"
#: A model's id, and its weights.
_BOTH: Final = 2


def model_and_weights(*given: Any) -> tuple[str, Any]:
    """The model id and the weights in ``send_weights(model_id, weights)``, ``(weights)`` or ``(weights, model_id)``.

    Of two arguments the str is the model's id, in either position; a single argument is the weights of "policy".

    Args:
        given: by position or by name; UNSET: not given.

    Raises ConfigurationError: no weights, more than two arguments, or two and neither is a str.
    """
    arguments = [each for each in given if each is not UNSET]
    if len(arguments) > _BOTH:
        raise ConfigurationError(
            f"a model's id and its weights are two arguments, not {len(arguments)}. Nothing was sent."
        )
    model_id, weights = arguments if len(arguments) == _BOTH else (POLICY, *(arguments or [UNSET]))
    if len(arguments) == _BOTH and isinstance(weights, str):
        model_id, weights = weights, model_id
    if weights is UNSET or weights is None or isinstance(weights, str):
        raise ConfigurationError(
            f"a transport sends weights (a module, a TensorDict or a dict of tensors), not {_named(weights)}: it has "
            "no model of its own. Nothing was sent."
        )
    if not isinstance(model_id, str):
        raise ConfigurationError(
            f"a model's id is a str, and this is of type {type(model_id).__name__}: call "
            "send_weights(model_id, weights) or send_weights(weights). Nothing was sent."
        )
    return model_id, weights


def unpack_arguments(names: Sequence[str], packed: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that TorchRL's first generation takes as one tuple, and its second separately.

    Args:
        keywords: the keywords; None: not given.

    Raises ConfigurationError: the tuple has another length, or an argument is given twice.
    """
    is_tuple = isinstance(packed, tuple | list)
    values = list(packed) if is_tuple else [packed]
    if is_tuple and len(values) != len(names):
        raise ConfigurationError(f"expected ({', '.join(names)}), but {len(values)} values were given.")
    from_tuple = {name: value for name, value in zip(names, values, strict=False) if value is not None}
    from_keywords = {name: value for name, value in keywords.items() if value is not None}
    twice = sorted(from_tuple.keys() & from_keywords.keys())
    if twice:
        raise ConfigurationError(f"{', '.join(twice)}: given twice.")
    return dict.fromkeys(names) | from_tuple | from_keywords


def _named(weights: Any) -> str:
    return "nothing" if weights is UNSET else repr(weights)
