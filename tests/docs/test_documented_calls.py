"""Calls in the documents fit the signatures, and the docstrings of sending methods name the errors of a send."""

from __future__ import annotations

import ast
import inspect
import math
import multiprocessing
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightsync
from weightsync import MultiProcessWeightSyncScheme, WeightSyncError, testing

ROOT = Path(__file__).parents[2]
#: The names that the documents use for objects of each class.
CALLED = {
    "scheme": weightsync.WeightSyncScheme,
    "trainer": weightsync.WeightSyncScheme,
    "sender": weightsync.WeightSender,
    "get_sender": weightsync.WeightSender,
    "receiver": weightsync.WeightReceiver,
    "get_receiver": weightsync.WeightReceiver,
    "group": weightsync.WorkerGroup,
    "worker": weightsync.Worker,
}
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "spec/README.md", ROOT / "tla/README.md"]
    if path.name != "CHANGELOG.md"  # describes former releases
)


def calls(text: str) -> Iterator[ast.Call]:
    """The calls in the code spans and code blocks of a document."""
    blocks = re.findall(r"^```(?:python|text)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    for code in [*blocks, *(" ".join(span.split()) for span in spans)]:
        try:
            parsed = ast.parse(code)
        except SyntaxError:
            continue
        yield from (node for node in ast.walk(parsed) if isinstance(node, ast.Call))


def callee(call: ast.Call) -> Callable[..., Any] | None:
    """The function or class of the package that is called, or None if it is not the package's."""
    match call.func:
        case ast.Name(name):
            found = getattr(weightsync, name, None) if name in weightsync.__all__ else getattr(testing, name, None)
            return found if callable(found) else None
        case ast.Attribute(ast.Name(of) | ast.Call(ast.Attribute(attr=of)), name) if of in CALLED:
            found = inspect.getattr_static(CALLED[of], name, None)
            return found if inspect.isfunction(found) else None
    return None


def faults(call: ast.Call, called: Callable[..., Any]) -> Iterator[str]:
    """The faults of a call, or of a signature written as a call, such as `WorkerGroup(run, capacity=2)`."""
    parameters = [each for each in inspect.signature(called).parameters.values() if each.name != "self"]
    known = {each.name: each for each in parameters}
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        yield from (f"has no {each.arg}=" for each in call.keywords if each.arg and each.arg not in known)
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    if (
        len(call.args) > len(places)
        and not starred
        and not any(each.kind is each.VAR_POSITIONAL for each in parameters)
    ):
        yield f"takes {len(places)} arguments by position"
    names = [each.id if isinstance(each, ast.Name) else "" for each in call.args]
    if names and names == [each.name for each in places[: len(names)]] and len(call.keywords) > 1:
        for given, place in zip(call.keywords, parameters[len(names) :], strict=False):
            expected = getattr(place.default, "value", place.default)
            if given.arg != place.name:
                yield f"has {place.name}= where {given.arg}= is written"
            elif isinstance(given.value, ast.Constant) and given.value.value not in (expected, ...):
                yield f"has {place.name}={expected!r} by default"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_call_in_a_document_fits_its_signature(path: Path) -> None:
    found = [(call, called) for call in calls(path.read_text("utf-8")) if (called := callee(call)) is not None]

    assert [f"{ast.unparse(call)}: {fault}" for call, called in found for fault in faults(call, called)] == []


# -------------------------------------------------------------------------------------------------- attributes


def attributes() -> dict[str, set[str]]:
    """The names that each class of the package and its bases define, by the name of the class."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for path in (ROOT / "weightsync").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    def of(name: str, below: frozenset[str] = frozenset()) -> set[str]:
        found = set()
        for node in classes.get(name, []):
            found |= {each for inside in ast.walk(node) for each in defined(inside)}
            bases = {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
            found |= {each for base in bases - below - {name} for each in of(base, below | {name})}
        return found

    return {name: of(name) for name in classes}


def defined(node: ast.AST) -> list[str]:
    """The names that a node in a class body defines in the class or on `self`."""
    match node:
        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(name)):
            return [name]
        case ast.Assign(targets=targets):
            return [each.id for each in targets if isinstance(each, ast.Name)]
        case ast.Attribute(ast.Name("self"), name):
            return [name]
    return []


def test_each_class_attribute_named_in_a_document_exists() -> None:
    known = attributes()
    named = {
        (path.name, *found)
        for path in DOCUMENTS
        for found in re.findall(r"`([A-Z]\w+)\.(\w+)", path.read_text("utf-8"))
        if found[0] in known and found[1] != "tla"  # a module of the model
    }

    assert len(named) > 100
    assert [f"{page}: {name}.{each}" for page, name, each in sorted(named) if each not in known[name]] == []


# ------------------------------------------------------------------------------------------------------ errors


class Context:
    """A context without a model."""


UNSENDABLE = {
    "ConfigurationError": 3,
    "ModelPathError": "net.part",
    "LayoutError": {"a": torch.eye(2).to_sparse()},
    "NonFiniteError": {"a": torch.tensor(math.nan)},
}


@pytest.mark.parametrize("error", UNSENDABLE)
@pytest.mark.parametrize("method", ["WeightSender.send", "WeightSender.send_async", "WeightSyncScheme.connect"])
def test_docstrings_of_sending_methods_name_each_error_for_unsendable_weights(method: str, error: str) -> None:
    scheme, context, ends = MultiProcessWeightSyncScheme(), Context(), multiprocessing.Pipe()
    scheme.init_on_sender("net", context, pipes=[ends[0]], check_finite=True)
    of, name = method.split(".")
    with scheme, pytest.raises(WeightSyncError) as raised:
        getattr(scheme if of == "WeightSyncScheme" else scheme.get_sender(), name)(weights=UNSENDABLE[error])
    ends[1].close()

    assert type(raised.value).__name__ == error
    for each in (method, "WeightSyncScheme.send"):
        assert error in pkgutil.resolve_name(f"weightsync:{each}").__doc__
