"""Weights of every kind arrive bit by bit over every transport, version after version."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from carriers import PARAMS, PATIENCE
from weight_kinds import KINDS, REFUSED, Kind, expected, linear, seeded, snapshot

from weightsync import LayoutError, OutcomeKind


# torch warns whenever complex32 is allocated, as in the table of kinds.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.name) for kind in KINDS])
@pytest.mark.parametrize("carry", PARAMS)
def test_weights_of_every_kind_arrive_bit_identical(carry: Any, kind: Kind) -> None:
    source = kind.source(1)
    with carry(partial(kind.destination, 2)) as carrier:
        for version in (1, 2, 3):
            wanted = expected(source)
            report = carrier.send(source)
            assert (report.version, report[0].kind) == (version, OutcomeKind.APPLIED)
            assert carrier.served() == wanted
            assert carrier.digest() == carrier.sender.digest()
            source = kind.change(source)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("carry", PARAMS)
def test_unsendable_weights_raise_layout_error_before_any_send(carry: Any, kind: str) -> None:
    make, said = REFUSED[kind]
    good = seeded(linear, 1)
    with carry(partial(seeded, linear, 2)) as carrier:
        carrier.send(good)
        with pytest.raises(LayoutError, match=f"(?i){said}"):
            carrier.sender.send(make(), timeout=PATIENCE)

        assert carrier.served() == snapshot(good)
        assert (carrier.sender.version, carrier.sender.state.value) == (1, "ready")
        assert carrier.send(good).version == 2


@pytest.mark.parametrize("carry", PARAMS)
def test_changes_after_send_async_do_not_affect_the_sent_weights(carry: Any) -> None:
    source = {"w": torch.zeros(50_000)}
    with carry(lambda: {"w": torch.ones(50_000)}) as carrier:
        carrier.sender.send_async(source)
        source["w"].fill_(9.0)
        while carrier.receiver.version is None:
            carrier.receiver.receive(timeout=0.01)

        assert carrier.sender.wait_async(timeout=PATIENCE).ok
        assert carrier.model["w"].unique().tolist() == [0.0]
