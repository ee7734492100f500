"""Run tests that add and remove nodes of a Ray cluster in a process of their own.

Adding a node forks the process that is connected to Ray. Afterwards new gRPC connections of that process may fail or
hang, and with them all later tests in it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

from ray_cluster import INSTALLED, OBJECT_STORE_NBYTES, running
from ray_environment import ENVIRONMENT
from skipping import not_tested

#: Seconds until the test fails. Only a failing test takes so long.
PATIENCE = 240.0


def run_isolated(module: str, function: str) -> None:
    """Call a function with a Ray cluster of its own, in a separate process, and fail if it fails there."""
    if not INSTALLED:
        not_tested("THE DEATH OF A RAY NODE", "Ray is not installed (pip install 'weightsync[ray]')")
    command = [sys.executable, "-c", f"import ray_isolated; ray_isolated.call({module!r}, {function!r})"]
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
    """Start a cluster and call the function with it. The separate process runs this."""
    with contextmanager(running)() as cluster:
        getattr(importlib.import_module(module), function)(cluster)


def add_node(cluster: Any, resources: dict[str, int]) -> Any:
    """Add a node that is the only one with these resources."""
    return cluster.add_node(num_cpus=1, resources=resources, object_store_memory=OBJECT_STORE_NBYTES)
