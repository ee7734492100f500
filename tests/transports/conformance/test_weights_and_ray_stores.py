"""1 GiB over Ray, with an object store that holds it in memory and with one that cannot."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Crew, WorkerSetup
from ray_cluster import INSTALLED
from ray_environment import ENVIRONMENT
from skipping import not_tested

from weightsync import Evidence, Outcome, OutcomeKind, RayWeightSyncScheme, WeightSyncActor

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
MIB = 2**20
#: With a key, links carry every payload through the object store; without, an actor on this host maps payloads.
KEY = "a key of 32 characters and no less"


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder with a short path, since the paths of Ray's sockets below it may have 107 characters at most."""
    if not INSTALLED:
        not_tested("RAY'S OBJECT STORE", "Ray is not installed (pip install 'weightsync[ray]')")
    made = tempfile.mkdtemp(prefix="ws", dir="/tmp")
    yield made
    shutil.rmtree(made)


class Large(WeightSyncActor):
    def __init__(self) -> None:
        self.weight_key = KEY
        self.policy = {"w": torch.zeros(1, dtype=torch.int32)}

    def hold(self, count: int) -> None:
        self.policy = {"w": torch.zeros(count, dtype=torch.int32)}

    def miscounts(self) -> int:
        """The number of elements that differ from those sent."""
        pieces = self.policy["w"].split(2**22)
        return sum(int((piece != torch.arange(len(piece)) + (n << 22)).sum()) for n, piece in enumerate(pieces))


def over_ray(
    setup: WorkerSetup, folder: str, room: int, nbytes: int, system: dict[str, Any]
) -> tuple[list[Outcome], int, list[str]]:
    """Send twice over a local Ray cluster. Returns the outcomes, the wrong elements and the files that Ray spilled."""
    os.environ.update(ENVIRONMENT)
    ray = importlib.import_module("ray")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init("local", num_cpus=2, object_store_memory=room, _temp_dir=folder, _system_config=system, **quiet)
    try:
        actor = ray.remote(num_cpus=0)(Large).remote()
        ray.get(actor.hold.remote(nbytes // 4))
        weights = {"w": torch.arange(nbytes // 4, dtype=torch.int32)}
        with RayWeightSyncScheme(key=KEY) as scheme:
            scheme.init_on_sender("policy", remote_collectors=[actor])
            send = scheme.get_sender().send
            outcomes = [send(weights, timeout=PATIENCE, on_failure="report")[0] for _ in range(2)]
        return outcomes, ray.get(actor.miscounts.remote()), _spilled(folder)
    finally:
        ray.shutdown()


def _spilled(folder: str) -> list[str]:
    return [name for where, _, names in os.walk(folder) if "spilled" in where for name in names]


def answer(crew: Crew, *what: Any) -> Any:
    """Run `over_ray` in a child process. Waits without a limit: the test has its own timeout."""
    (trainer,) = crew.start(None)
    trainer.tell(over_ray, *what)
    while not trainer.answered():
        time.sleep(0.1)
    return trainer.answer()


def test_an_object_store_of_two_and_a_half_times_the_weights_spills_nothing(crew: Crew, folder: str) -> None:
    outcomes, wrong, spilled = answer(crew, folder, 2560 * MIB, 1024 * MIB, {})

    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.APPLIED] * 2
    assert (wrong, spilled) == (0, [])


def test_an_update_is_refused_if_object_store_and_disk_are_full(crew: Crew, folder: str) -> None:
    outcomes, wrong, _ = answer(crew, folder, 100 * MIB, 200 * MIB, {"local_fs_capacity_threshold": 0.0})

    assert [(outcome.kind, outcome.evidence) for outcome in outcomes] == [(OutcomeKind.REFUSED, Evidence.NONE)] * 2
    assert all("Local disk is full" in outcome.reason for outcome in outcomes)
    assert wrong == 50 * MIB - 1
