"""Every public name imports from `weightsync`, lazily, and type checkers see the same names."""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from skipping import require_modules
from torch import nn

import weightsync
from weightsync import MultiProcessWeightSyncScheme, Outcome, OutcomeKind, StateError, SyncReport


@pytest.mark.parametrize("name", weightsync.__all__)
def test_every_public_name_imports(name: str) -> None:
    assert getattr(weightsync, name) is not None
    assert name in dir(weightsync)


def test_type_checkers_see_the_same_names() -> None:
    source = Path(weightsync.__file__).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    seen = {f"{node.module}.{alias.asname}" for node in imports for alias in node.names if alias.asname}

    assert seen == {f"weightsync.{home}.{name}" for name, home in weightsync._HOMES.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nonesuch"):
        weightsync.Nonesuch  # noqa: B018


def test_importing_weightsync_imports_no_torch() -> None:
    program = "import sys, weightsync; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:Creating .* is deprecated:DeprecationWarning")  # a warning of TorchRL's own
@pytest.mark.parametrize(
    ("former", "home", "name"),
    [
        ("weightsync.messages", "weightsync.protocol.messages", "Update"),
        ("weightsync.transports.memory", "weightsync.transports.buffers", "Buffer"),
        ("weightsync.tracing", "weightsync.engine.recorder", "record"),
        ("weightsync.updaters", "weightsync.torchrl.updaters", "WeightUpdaterBase"),
        ("weightsync.integrations.torchrl", "weightsync.torchrl.collectors", "accept"),
    ],
)
def test_a_documented_module_that_moved_is_importable_by_its_former_name_and_warns(
    former: str, home: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home == "weightsync.torchrl.collectors":
        require_modules("torchrl", what="THE FORMER NAME OF A MODULE OVER TORCHRL", extra="torchrl")
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=f"^{former} is now {home}: import from there.$"):
        found = getattr(importlib.import_module(former), name)

    assert found is getattr(importlib.import_module(home), name)


def test_a_former_module_still_has_a_name_that_moved_elsewhere() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        former = importlib.import_module("weightsync.transports.memory")

    assert former.Mapping is importlib.import_module("weightsync.transports.mapping").Mapping


def test_names_that_changed_warn_and_still_work() -> None:
    report = SyncReport(
        model_id="policy", version=1, incarnation=2, outcomes={}, pack_s=1.0, transfer_s=2.0, apply_s=3.0
    )
    ours, theirs = multiprocessing.Pipe()
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[ours], model=nn.Linear(1, 1))
        with pytest.deprecated_call(match="WeightSender.roll is now workers"):
            assert scheme.get_sender().roll == scheme.get_sender().workers
        theirs.close()
    for former, name in (("preparing", "pack_s"), ("transferring", "transfer_s"), ("applying", "apply_s")):
        with pytest.deprecated_call(match=f"SyncReport.{former} is now {name}"):
            assert getattr(report, former) == getattr(report, name)
    with pytest.deprecated_call(match=r"Outcome.seconds is now apply_s"):
        assert Outcome(kind=OutcomeKind.APPLIED, apply_s=0.5).seconds == 0.5


def test_a_receivers_methods_that_changed_their_names_warn_and_still_work() -> None:
    with MultiProcessWeightSyncScheme().create_receiver() as receiver:
        receiver.register_model(nn.Linear(1, 1))
        for former, name, refused in (("hand_out", "take_update", "no link"), ("acknowledge", "ack", r"ack\(\)")):
            with pytest.deprecated_call(match=f"{former}.* is now {name}"), pytest.raises(StateError, match=refused):
                getattr(receiver, former)()
        with pytest.deprecated_call(match="refuse.* is now nack"):
            receiver.refuse(ValueError("no"))
