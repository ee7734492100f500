"""The values of the protocol are immutable: a step leaves its arguments as they were, and threads may share them."""

from __future__ import annotations

import pickle

import pytest
from msgspec import Struct

from weightsync.protocol import codec, machine, messages, receiver, report, sender

VALUES = sorted(
    {
        kind
        for module in (codec, machine, messages, receiver, report, sender)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind is not Struct
    },
    key=lambda kind: (kind.__module__, kind.__name__),
)


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
def test_values_are_frozen_structs(kind: type[Struct]) -> None:
    assert kind.__struct_config__.frozen


def test_a_report_survives_pickling_and_shares_no_default_with_another() -> None:
    outcome = report.Outcome(kind=report.OutcomeKind.APPLIED)
    first, second = (report.SyncReport(model_id="m", version=1, incarnation=1, outcomes={0: outcome}) for _ in "ab")

    assert pickle.loads(pickle.dumps(first)) == first == second
    assert first.left is not second.left
    with pytest.raises(AttributeError):
        first.version = 2  # type: ignore[misc]
