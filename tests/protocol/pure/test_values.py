"""Values that are made often are what the dataclass alone would make."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from weightsync.protocol.values import made_often


@made_often
@dataclass(frozen=True, slots=True)
class Made:
    first: int
    names: Mapping[str, int] = field(default_factory=dict)
    last: str = field(default="end", kw_only=True)


@dataclass(frozen=True, slots=True)
class Plain:
    first: int
    names: Mapping[str, int] = field(default_factory=dict)
    last: str = field(default="end", kw_only=True)


def test_a_value_made_often_has_its_fields_defaults_and_signature_and_cannot_be_changed() -> None:
    value = Made(1)

    assert (value.first, value.names, value.last) == (1, {}, "end")
    assert value.names is not Made(1).names
    assert Made(1, {"a": 2}, last="b") == replace(value, names={"a": 2}, last="b") != value
    assert str(inspect.signature(Made)) == str(inspect.signature(Plain))
    assert repr(value) == repr(Plain(1)).replace("Plain", "Made")
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    with pytest.raises(FrozenInstanceError):
        value.first = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Made()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Made(1, {}, "not by keyword")  # type: ignore[call-arg]
