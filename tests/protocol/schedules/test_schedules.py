"""Public methods that threads call at the same time end in an allowed way, whatever the order of the threads' accesses.

Bounds: two or three threads, one call each, one worker, two preemptions, waits that do not block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from skipping import require_modules

PROGRAM = Path(__file__).with_name("exploring.py")
#: The names of the scenarios. They are not imported, since frontrun must patch what they import first.
SCENARIOS = (
    "two sends",
    "a send and a close",
    "two waits",
    "a wait and a close",
    "two abandon",
    "an answer is polled and abandoned",
    "an answer is waited for and abandoned",
    "a send, a poll and a close",
)
#: The scenarios that end wrongly if locks are missing.
FAILING_WITHOUT_LOCKS = ("two sends", "two abandon")

#: The scenario that every run explores, so that the stand-in for a scheme is kept up to date with the sender.
QUICK = "two abandon"

pytestmark = pytest.mark.timeout(1000)


def verdict(*arguments: str) -> dict[str, Any]:
    """Explore a scenario with frontrun, and return the verdict."""
    require_modules("frontrun", what="EVERY SCHEDULE OF THE PUBLIC METHODS", extra="dev")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # Recording must not be explored.
    environment.pop("WEIGHTSYNC_TRACE", None)
    command = [str(Path(sys.executable).with_name("frontrun")), sys.executable, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == QUICK else pytest.mark.slow) for each in SCENARIOS]
)
def test_concurrent_calls_end_in_an_allowed_way_under_every_schedule(name: str) -> None:
    found = verdict(name)

    assert found["holds"] is True, found["why"]
    # Two calls that hold one lock throughout have two orders. In a third schedule a call finds the lock taken.
    assert found["schedules"] > 1, "the code was not traced: one schedule proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING_WITHOUT_LOCKS)
def test_without_locks_some_schedule_ends_in_a_wrong_way(name: str) -> None:
    assert verdict(name, "without locks")["holds"] is False
