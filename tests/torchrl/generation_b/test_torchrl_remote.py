"""TorchRL's collectors with workers over RPC and torch.distributed, on our schemes and updaters.

Situations that no scheme of TorchRL's supports are not tested: a `DistributedCollector` whose workers have workers of
their own never returns a batch. Weights as a dict, weights for each worker and policies without weights fail with
TorchRL's own schemes over both, and work with ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from collecting import MARKS
from fleet import free_port

pytestmark = [*MARKS, pytest.mark.slow]

PROGRAM = Path(__file__).parents[2] / "remote_collectors.py"
PATIENCE = 240.0
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
KINDS = [pytest.param("rpc", marks=pytest.mark.rpc), pytest.param("distributed", marks=pytest.mark.gloo)]


def run_program(kind: str, situation: str) -> list[Any]:
    """Run the program, and return its output for each step. Fails if any of its processes is left."""
    command = [sys.executable, str(PROGRAM), kind, situation, str(free_port())]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors[-4000:]
        left = ended(process.pid)
    finally:
        if not ended(process.pid, patience=0.0):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert left, "it left processes behind"
    steps = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    assert steps.pop() == ["over", []]
    return steps


def ended(group: int, patience: float = 30.0) -> bool:
    """Whether all processes of a group end in time, including the helpers of multiprocessing."""
    given_up = time.monotonic() + patience
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= given_up:
            return False
        time.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_workers_act_with_weights_of_every_form_once_the_update_returns(kind: str) -> None:
    assert run_program(kind, "a_policy") == [
        ["first", [0]],
        ["module", [1]],
        ["tensordict", [0]],
        ["dict", [1]],
        ["own", [0]],
        ["one worker", [[0], [1]]],
        ["report", [True, ["ANSWER"]]],
        ["in the end", [1]],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_with_policy_factories_accept_shared_and_per_worker_weights(kind: str) -> None:
    assert run_program(kind, "factories") == [
        ["first", [0]],
        ["module", [1]],
        ["each its own", [[0], [1]]],
        ["one left out", [0]],
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_without_weights_still_has_versions_and_acks(kind: str) -> None:
    assert run_program(kind, "without_weights") == [["frames", 20], ["versions", [1, 1]], ["frames", 20]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_weightsync_updater_pushes_to_a_collectors_workers(kind: str) -> None:
    assert run_program(kind, "an_updater") == [["registered", True], ["first", [0]], ["module", [1]]]


@pytest.mark.rpc
def test_workers_of_an_rpc_worker_act_with_the_sent_weights() -> None:
    assert run_program("rpc", "workers_of_workers") == [["first", [0]], ["module", [1]]]
