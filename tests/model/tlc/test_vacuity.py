"""Some proof takes each action of the modules beside the protocol.

`tests/protocol/graph/test_graph.py` checks this for the actions of AckProtocol, in the small graphs, and
`test_families.py` for those of the families, in their quick proofs.
"""

from __future__ import annotations

import pytest
from tlc_support import Recorder

from weightsync.model import Coverage, Manifest, Purpose, Suite, Toolchain, find_model, vacuity

_BESIDE = {"Backlog", "Shared", "Delta", "Parts", "Fanout", "Kernels", "Group", "Loader"}
#: Proofs with more distinct states take no actions that the smaller ones do not, except for `_LARGER`.
_LARGEST = 20_000
_LARGER = {"FanoutSuperseded", "PartsTwoTravel"}


@pytest.mark.tlc
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_action_of_the_modules_beside_the_protocol_is_taken_in_some_proof(
    toolchain: Toolchain, recorder: Recorder
) -> None:
    model = Manifest.read(find_model())
    proofs = [found for found in model.configurations if found.purpose is Purpose.PROOF and found.module in _BESIDE]
    small = [
        found
        for found in proofs
        if found.name in _LARGER or (found.pinned is not None and found.pinned.distinct <= _LARGEST)
    ]

    verdicts = Suite(toolchain, model, recorder, Coverage.COUNTED).run(small)

    assert [complaint for verdict in verdicts for complaint in verdict.complaints] == []
    # The actions of the protocol itself, which Shared.tla extends, must be taken in its own proofs.
    assert [each for each in vacuity(verdicts, model.planted) if not each.startswith("AckProtocol.")] == []
