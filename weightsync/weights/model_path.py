"""Model paths: ``"policy"``, ``"env.value_net"``, ``"env.transform[0]"``, ``"a[0][1].b"``, ``"nets['critic']"``."""

from __future__ import annotations

import re
from typing import Any

from weightsync.errors import ConfigurationError, ModelPathError, sentence

_NAME = r"[^.\[\]\s]+"
#: An integer, or a quoted key, which may contain anything but that quote and brackets.
_INDEX = r"""\[(?:-?\d+|'[^'\[\]]+'|"[^"\[\]]+")\]"""
_PATH = re.compile(rf"{_NAME}(?:{_INDEX})*(?:\.{_NAME}(?:{_INDEX})*)*")
_PART = re.compile(rf"{_INDEX}|{_NAME}")


def _resolve_model(context: object, path: str) -> Any:
    """Follow a path of attributes and indices from a context.

    Raises:
        ConfigurationError: there is no context, or it was garbage-collected.
        ModelPathError: the path is malformed, a part of it (which the error names) does not resolve, or it leads to
            None.
    """
    if context is None:
        raise ConfigurationError(
            f"The model path '{path}' needs a context, but there is none, or it was garbage-collected: pass a context "
            "and keep it alive, or pass the model itself."
        )
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise ModelPathError(
            f"{path!r} is not a model path: write names joined by dots, with integers or quoted keys in brackets, for "
            "example 'env.transform[0]' or 'nets[\"critic\"]'.",
            path,
            path,
        )
    value: Any = context
    for match in _PART.finditer(path):
        value = _step(value, match.group(), path, path[: match.start()].rstrip("."))
    if value is None:
        raise ModelPathError(f"'{path}' is None: no model is there.", path, path)
    return value


def _step(parent: Any, part: str, path: str, prefix: str) -> Any:
    try:
        return parent[_index(part[1:-1])] if part.startswith("[") else getattr(parent, part)
    except Exception as error:  # a property of the user's may raise anything
        where = f"'{prefix}'" if prefix else "the context"
        kind = type(parent).__name__
        message = (
            f"The part '{part}' of the model path '{path}' does not resolve on {where} (a {kind}): "
            f"{sentence(_text(error))} Set it before weights are sent, or give both sides the model_id that is the "
            "model's path there."
        )
        raise ModelPathError(message, path, part) from error


def _text(error: Exception) -> str:
    """The message of an error that says of itself what is missing, otherwise its type too."""
    says_what = isinstance(error, AttributeError | LookupError | TypeError | ValueError)
    return str(error) if says_what else f"{type(error).__name__}: {error}"


def _index(written: str) -> int | str:
    return written[1:-1] if written[0] in "'\"" else int(written)
