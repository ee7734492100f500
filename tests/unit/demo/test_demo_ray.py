"""The demo over Ray: the same proof, with actors as workers."""

from __future__ import annotations

import sys

import pytest
from test_demo_runs import assert_proved, end_after

from weightsync import MissingExtraError
from weightsync.demo import RunState, SchemeName, Settings, run

pytestmark = [
    pytest.mark.ray,
    # Ray's C++ code and background threads leave some resources to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.mark.usefixtures("cluster")
def test_every_remaining_worker_proves_the_trainers_last_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    end_after(20, monkeypatch)
    assert_proved(run(RunState(Settings(scheme=SchemeName.RAY, workers=3, overlap=True, kill_worker=True))))


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(MissingExtraError, match=r"weightsync demo --scheme ray needs the extra 'ray'"):
        run(RunState(Settings(scheme=SchemeName.RAY)))
