"""Our signatures equal those of TorchRL's generation B, except for differences in a reviewed table with reasons.

The names, kinds and defaults of parameters are compared, and whether a property can be set. Annotations are not, since
TorchRL's are strings that name its own types.
"""

from __future__ import annotations

import enum
import inspect
import re
import warnings
from typing import Any

import pytest
from documented_forms import FORMS, Form, X, given
from reviewed_differences import ADDED, DIFFERENCES, REASONS
from skipping import not_tested

import weightsync
from weightsync.protocol.messages import WeightsForm
from weightsync.weights.unpacking import form_taken

pytestmark = pytest.mark.torchrl

UPDATERS = (
    "WeightUpdaterBase",
    "VanillaWeightUpdater",
    "MultiProcessedWeightUpdater",
    "RemoteModuleWeightUpdater",
    "RayWeightUpdater",
)
#: Methods with an underscore that, according to TorchRL's documentation, users override.
OVERRIDDEN = ("_get_server_weights", "_maybe_map_weights", "_sync_weights_with_worker", "_skip_update")
#: Methods that users write and we call, not the other way round.
UNCALLED = (
    "WeightSyncScheme.create_transport",
    "TransportBackend.send_weights",
    "TransportBackend.receive_weights",
    "WeightUpdaterBase._maybe_map_weights",
    "RemoteModuleWeightUpdater._maybe_map_weights",
)
SIMPLE = inspect.Parameter.empty


def torchrl_modules() -> tuple[Any, Any]:
    """TorchRL's two modules. If TorchRL is not installed, the test is skipped, or fails in CI."""
    try:
        with warnings.catch_warnings(action="ignore"):  # TorchRL and its dependencies warn about their own deprecations
            from torchrl import collectors, weight_update  # noqa: PLC0415 - takes seconds, and may be missing
    except ImportError as error:
        not_tested("OUR SIGNATURES AGAINST TORCHRL'S", f"{error} (pip install 'weightsync[torchrl]')")
    return weight_update, collectors


def rendered(function: Any) -> str:
    """The parameters of a function, without annotations. Enum members appear as their values, or ``...`` if unset."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=SIMPLE, default=plain(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=SIMPLE)).replace("Ellipsis", "...")


def plain(default: Any) -> Any:
    return default if not isinstance(default, enum.Enum) else ... if default.value == "unset" else default.value


def described(cls: type, member: str) -> str:
    """How a member can be used: its parameters, or the kind of property. Empty if the class has no such member."""
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
    """The constructor, all public members, and the private methods that users override."""
    return ["__init__", *(name for name in dir(cls) if not name.startswith("_") or name in OVERRIDDEN)]


def classes() -> dict[str, type]:
    """TorchRL's public classes of weight synchronisation."""
    weight_update, collectors = torchrl_modules()
    found = {name: getattr(weight_update, name) for name in weight_update.__all__}
    found |= {name: getattr(collectors, name) for name in UPDATERS}
    kinds = {name: value for name, value in found.items() if isinstance(value, type)}
    return dict(sorted(kinds.items(), key=lambda item: len(item[1].__mro__)))  # bases first


def compared() -> dict[str, tuple[str, str]]:
    """How each member of TorchRL's public classes can be used in TorchRL, and in weightsync.

    A member that a subclass inherits in both is listed with its base only.
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


def differing(signatures: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {name: pair for name, pair in signatures.items() if pair[1] and pair[0] != pair[1]}


def test_every_difference_is_in_the_reviewed_table(signatures: dict[str, tuple[str, str]]) -> None:
    assert set(differing(signatures)) - set(ADDED) - set(DIFFERENCES) - set(FORMS) == set()


def test_every_call_that_torchrl_accepts_is_accepted() -> None:
    """Our signatures accept every call that TorchRL's accept, with arguments by position or by name."""
    refused = {}
    for name, theirs in classes().items():
        for member in members(theirs):
            known = inspect.getattr_static(theirs, member, None)
            if inspect.isfunction(known) and f"{name}.{member}" not in UNCALLED:
                ours = inspect.signature(getattr(getattr(weightsync, name), member))
                refused |= {f"{name}.{member}": call for call in calls_of(known) if not takes(ours, call)}

    assert refused == {}


def calls_of(function: Any) -> list[Form]:
    """The calls that a function accepts, with the first n arguments by position and the rest by name, for each n."""
    first, *rest = inspect.signature(function).parameters.values()
    places = [each for each in rest if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    keywords = {each.name: X for each in rest if each.kind is each.KEYWORD_ONLY}
    named = [{each.name: X for each in places[count:]} for count in range(len(places) + 1)]
    return [given(first, *places[:count], **by_name, **keywords) for count, by_name in enumerate(named)]


def takes(signature: inspect.Signature, call: Form) -> bool:
    positional, keywords = call
    try:
        signature.bind(*positional, **keywords)
    except TypeError:
        return False
    return True


def test_members_listed_as_added_differ_only_by_keywords(signatures: dict[str, tuple[str, str]]) -> None:
    assert {name: signatures[name] for name in ADDED if not only_adds(*signatures[name])} == {}


def test_other_differences_equal_the_reviewed_signatures(signatures: dict[str, tuple[str, str]]) -> None:
    found = {name: core(*pair) for name, pair in differing(signatures).items() if name in DIFFERENCES}

    assert {name: ours for name, ours in found.items() if DIFFERENCES[name][0] != ours} == {}


def test_no_public_name_of_torchrl_is_missing(signatures: dict[str, tuple[str, str]]) -> None:
    assert len(signatures) > 100
    assert [name for name, (_, ours) in signatures.items() if not ours] == []


def test_no_entry_of_the_reviewed_table_is_out_of_date(signatures: dict[str, tuple[str, str]]) -> None:
    assert {*ADDED, *DIFFERENCES} - set(differing(signatures)) == set()


def test_differences_and_reasons_match() -> None:
    given = {reason for _, reason in DIFFERENCES.values()}

    assert given == set(REASONS)


def only_adds(theirs: str, ours: str) -> bool:
    """Whether our signature has all parameters of theirs unchanged, and in addition only keywords with defaults."""
    before, after = parameters(theirs), parameters(ours)
    more = [after[name] for name in after if name not in before]
    return all(after.get(name) == parameter for name, parameter in before.items()) and all(
        parameter.startswith("keyword") and "=" in parameter for parameter in more
    )


def core(theirs: str, ours: str) -> str:
    """Our signature, without the keywords with defaults that theirs does not have."""
    if not (theirs.startswith("(") and ours.startswith("(")):
        return ours
    known, parts, keywords = parameters(theirs), [], False
    for part in split(ours):
        name, _, default = part.partition("=")
        if not keywords or name in known or not default:
            parts.append(part)
        keywords = keywords or part == "*"
    return f"({', '.join(parts[:-1] if parts[-1] == '*' else parts)})"


def split(text: str) -> list[str]:
    return re.split(r", ", text[1:-1])


def parameters(text: str) -> dict[str, str]:
    """The kind, position and default of each parameter."""
    found, kind = {}, "any"
    for part in split(text):
        if part == "*":
            kind = "keyword"
            continue
        name, _, default = part.partition("=")
        found[name] = f"{kind} {len(found) if kind == 'any' else ''}{'=' + default if default else ''}"
    return found


def test_update_methods_of_torchrls_collectors_are_recognised_as_taking_tensordicts() -> None:
    """The method takes TensorDicts, and TorchRL's fails for a dict (``form_taken``)."""
    _, collectors = torchrl_modules()
    kinds = [getattr(collectors, name) for name in ("Collector", "AsyncCollector", "MultiSyncCollector")]
    for kind in [*kinds, collectors.MultiAsyncCollector]:
        parameters = inspect.signature(kind.update_policy_weights_).parameters
        assert form_taken(parameters) is WeightsForm.TENSORDICT
