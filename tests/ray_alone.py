"""Ray clusters whose nodes come and go: each in a process of its own.

Adding a node forks the process that is connected to Ray. Then new connections of its gRPC may fail, or never open,
and so may everything that the following tests need.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

from missing import not_tested
from ray_cluster import INSTALLED, OBJECT_STORE_NBYTES, running
from ray_environment import ENVIRONMENT

#: Seconds; reached only by a failure.
PATIENCE = 240.0


def alone(module: str, function: str) -> None:
    """Call a function with a cluster, which nobody else uses, in a process of its own; fail as it fails."""
    if not INSTALLED:
        not_tested("THE DEATH OF A RAY NODE", "Ray is not installed (pip install 'weightsync[ray]')")
    command = [sys.executable, "-c", f"import ray_alone; ray_alone.call({module!r}, {function!r})"]
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def call(module: str, function: str) -> None:
    """What the process does."""
    with contextmanager(running)() as cluster:
        getattr(importlib.import_module(module), function)(cluster)


def add_node(cluster: Any, resources: dict[str, int]) -> Any:
    """One more node, which alone has these resources."""
    return cluster.add_node(num_cpus=1, resources=resources, object_store_memory=OBJECT_STORE_NBYTES)
