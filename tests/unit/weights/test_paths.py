"""Model paths resolve by attributes, integer indices and quoted keys. An error names the part that does not resolve."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightsync import ConfigurationError, ModelPathError
from weightsync.weights.model_path import _resolve_model

LEAF = nn.Linear(1, 1)
CONTEXT = SimpleNamespace(
    policy=LEAF,
    env=SimpleNamespace(value_net=LEAF, transform=[LEAF], nets=nn.Sequential(LEAF)),
    a=[[0, SimpleNamespace(b=LEAF)]],
    nets={"critic": LEAF, "a.b": [LEAF], "it's": LEAF, "0": LEAF},
    empty=None,
)


@pytest.mark.parametrize(
    "path",
    ["policy", "env.value_net", "env.transform[0]", "env.transform[-1]", "a[0][1].b", "env.nets.0", "env.nets[0]"],
)
def test_paths_resolve(path: str) -> None:
    assert _resolve_model(CONTEXT, path) is LEAF


@pytest.mark.parametrize(
    "path", ["nets['critic']", 'nets["critic"]', "nets['a.b'][0]", """nets["it's"]""", "nets['0']"]
)
def test_quoted_keys_resolve(path: str) -> None:
    assert _resolve_model(CONTEXT, path) is LEAF


@pytest.mark.parametrize(
    ("path", "part", "message"),
    [
        ("value", "value", "on the context"),
        ("env.critic", "critic", "on 'env' (a SimpleNamespace)"),
        ("env.transform[3]", "[3]", "on 'env.transform' (a list)"),
        ("env[0]", "[0]", "on 'env'"),
        ("nets['actor']", "['actor']", "on 'nets' (a dict)"),
        ("nets[0]", "[0]", "on 'nets' (a dict)"),
        ("env.transform['0']", "['0']", "on 'env.transform' (a list)"),
        ("a[0][7].b", "[7]", "on 'a[0]'"),
        ("a[0][1].c", "c", "on 'a[0][1]'"),
        ("empty", "empty", "is None"),
        ("empty.net", "net", "on 'empty' (a NoneType)"),
    ],
)
def test_the_error_names_the_part_that_does_not_resolve(path: str, part: str, message: str) -> None:
    with pytest.raises(ModelPathError) as caught:
        _resolve_model(CONTEXT, path)

    assert isinstance(caught.value, AttributeError)
    assert (caught.value.path, caught.value.part) == (path, part)
    assert message in str(caught.value)


class Unbuilt:
    """A model that is made late."""

    @property
    def policy(self) -> nn.Module:
        raise RuntimeError("call build() first")


@pytest.mark.parametrize(
    ("context", "reason"),
    [
        (SimpleNamespace(), "(a SimpleNamespace): 'types.SimpleNamespace' object has no attribute 'policy'. Set it"),
        (Unbuilt(), "(a Unbuilt): RuntimeError: call build() first. Set it"),
    ],
    ids=["missing", "raises"],
)
def test_the_error_says_why_a_part_does_not_resolve(context: Any, reason: str) -> None:
    with pytest.raises(ModelPathError) as caught:
        _resolve_model(context, "policy")

    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "path", ["", ".", "a.", ".a", "a..b", "a[", "a[]", "a[x]", "a]0[", "[0]", "a[0]b", "a b", "a[0", "a\n"]
)
def test_malformed_paths_are_refused(path: str) -> None:
    with pytest.raises(ModelPathError, match="is not a model path") as caught:
        _resolve_model(CONTEXT, path)

    assert (caught.value.path, caught.value.part) == (path, path)


@pytest.mark.parametrize("path", [None, 3, b"a", ["a"]])
def test_paths_that_are_not_strings_are_refused(path: Any) -> None:
    with pytest.raises(ModelPathError, match="is not a model path"):
        _resolve_model(CONTEXT, path)


@pytest.mark.parametrize(
    "path", ["a['']", "a['b]", "a[b']", "a['b\"]", "a['b'c]", "a['[']", "['a']", "a['b']c", "a[1.0]", "a[ 1]"]
)
def test_malformed_keys_are_refused(path: str) -> None:
    with pytest.raises(ModelPathError, match="is not a model path"):
        _resolve_model(CONTEXT, path)


@given(st.text(alphabet="ab.[]0-1 '\"", max_size=10))
def test_any_text_resolves_or_is_refused(path: str) -> None:
    with contextlib.suppress(ModelPathError):
        assert _resolve_model(CONTEXT, path) is not None


def test_a_missing_context_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="needs a context"):
        _resolve_model(None, "policy")
