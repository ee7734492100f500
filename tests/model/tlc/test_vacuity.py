"""Each action of the model is taken in some proof, and each part of an action evaluated: no guard is false everywhere."""

from __future__ import annotations

import pytest
from tlc_support import Recorder

from weightsync.model import Coverage, Manifest, Purpose, Suite, Toolchain, find_model, idle, vacuity

#: The distinct states of the proofs that are run for this; the larger ones take no other actions.
_LARGEST = 20_000


@pytest.mark.tlc
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_action_is_taken_and_each_part_is_evaluated_in_some_proof(
    toolchain: Toolchain, recorder: Recorder
) -> None:
    model = Manifest.read(find_model())
    small = [
        found
        for found in model.configurations
        if found.purpose is Purpose.PROOF and found.pinned and found.pinned.distinct <= _LARGEST
    ]

    verdicts = Suite(toolchain, model, recorder, Coverage.COUNTED).run(small)

    assert [complaint for verdict in verdicts for complaint in verdict.complaints] == []
    assert list(vacuity(verdicts, model.planted)) == []
    assert list(idle(verdicts, model)) == []
