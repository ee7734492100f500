"""Signatures against TorchRL's own, for generation B: what differs is in one reviewed table, each with its reason.

Compared are the names, kinds and defaults of parameters, and whether a property can be set. Annotations are not:
TorchRL's are strings that name its own types.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
from reviewed_differences import DIFFERENCES, MISSING, REASONS

import weightsync

pytestmark = pytest.mark.torchrl

UPDATERS = (
    "WeightUpdaterBase",
    "VanillaWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RemoteModuleWeightUpdater",
    "RayWeightUpdater",
)
#: Names with an underscore that TorchRL's documentation has users override.
OVERRIDDEN = ("_get_server_weights", "_maybe_map_weights", "_sync_weights_with_worker", "_skip_update")
SIMPLE = inspect.Parameter.empty


def torchrl_weight_update() -> Any:
    """TorchRL's module. Where it is not installed the test is skipped, in CI it fails."""
    try:
        import torchrl.weight_update as module  # noqa: PLC0415 - takes seconds, and may be missing
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must compare with TorchRL: {error}")
        pytest.skip(f"NOT COMPARED with TorchRL: {error}")
    return module


def rendered(function: Any) -> str:
    """The parameters of a function, without its annotations."""
    signature = inspect.signature(function)
    bare = [parameter.replace(annotation=SIMPLE) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=SIMPLE))


def described(cls: type, member: str) -> str:
    """How a member can be used: its parameters, or what kind of property it is; empty: there is none."""
    found = inspect.getattr_static(cls, member, None)
    match found:
        case None:
            return ""
        case property():
            return "property, can be set" if found.fset else "property"
        case classmethod() | staticmethod():
            return f"{type(found).__name__}{rendered(getattr(cls, member))}"
    return rendered(found) if callable(found) else "attribute"


def members(cls: type) -> list[str]:
    """The constructor and all public members."""
    return ["__init__", *(name for name in dir(cls) if not name.startswith("_") or name in OVERRIDDEN)]


def classes() -> dict[str, type]:
    """TorchRL's public classes of weight synchronisation."""
    weight_update = torchrl_weight_update()
    from torchrl import collectors  # noqa: PLC0415 - as above

    found = {name: getattr(weight_update, name) for name in weight_update.__all__}
    found |= {name: getattr(collectors, name) for name in UPDATERS}
    kinds = {name: value for name, value in found.items() if isinstance(value, type)}
    return dict(sorted(kinds.items(), key=lambda item: len(item[1].__mro__)))  # bases first


def compared() -> dict[str, tuple[str, str]]:
    """Each member of each of TorchRL's public classes: how it can be used there, and here.

    What a subclass has from its base, on both sides, stands there only.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, theirs in classes().items():
        ours = getattr(weightsync, name, None)
        if ours is None:
            found[name] = ("class", "")
            continue
        for member in members(theirs):
            pair = described(theirs, member), described(ours, member)
            if not any(found.get(f"{base.__name__}.{member}") == pair for base in theirs.__mro__[1:]):
                found[f"{name}.{member}"] = pair
    return found


@pytest.fixture(scope="module")
def signatures() -> dict[str, tuple[str, str]]:
    return compared()


def test_every_public_class_of_torchrl_is_here(signatures: dict[str, tuple[str, str]]) -> None:
    assert [name for name, (theirs, ours) in signatures.items() if theirs == "class" and not ours] == []


def test_what_differs_is_in_the_reviewed_table(signatures: dict[str, tuple[str, str]]) -> None:
    differing = {name: ours for name, (theirs, ours) in signatures.items() if ours and ours != theirs}

    assert {name: ours for name, ours in differing.items() if DIFFERENCES.get(name, ("", ""))[0] != ours} == {}


def test_what_is_missing_is_in_the_reviewed_table(signatures: dict[str, tuple[str, str]]) -> None:
    missing = {name for name, (_, ours) in signatures.items() if not ours}

    assert missing == set(MISSING)


def test_no_entry_of_the_reviewed_table_is_out_of_date(signatures: dict[str, tuple[str, str]]) -> None:
    differing = {name for name, (theirs, ours) in signatures.items() if ours and ours != theirs}

    assert set(DIFFERENCES) - differing == set()


def test_every_difference_has_its_reason() -> None:
    given = {reason for _, reason in DIFFERENCES.values()} | set(MISSING.values())

    assert given <= set(REASONS)
    assert set(REASONS) <= given


def test_what_generation_b_calls_by_position_means_the_same_here(signatures: dict[str, tuple[str, str]]) -> None:
    """A difference may add parameters; no positional one of TorchRL's goes or moves, but where a reason says so."""
    moved = []
    for name, (theirs, ours) in signatures.items():
        if not (theirs.startswith("(") and ours.startswith("(")) or name not in DIFFERENCES:
            continue
        if positional(ours)[: len(positional(theirs))] != positional(theirs):
            moved.append(name)

    assert [name for name in moved if DIFFERENCES[name][1] not in ("A/B", "positional too")] == []


def positional(text: str) -> list[str]:
    """The names of the parameters that can be given by position."""
    found = []
    for part in text[1:-1].split(", "):
        if part.startswith("*"):
            break
        found.append(part.partition("=")[0])
    return [name for name in found if name != "/"]
