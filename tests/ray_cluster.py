"""A real Ray cluster for the tests of all folders, started once per session. None of its processes may outlive it."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ray_environment import ENVIRONMENT
from skipping import not_tested

INSTALLED = find_spec("ray") is not None and find_spec("ray.actor") is not None
OBJECT_STORE_NBYTES = 200 * 2**20


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster with one head node, to which this process is connected. Tests may add and remove nodes."""
    if not INSTALLED:
        not_tested("ANYTHING WITH RAY", "it is not installed (pip install 'weightsync[ray]')")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        yield from running()


@pytest.fixture
def in_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make weightsync take this process for a Ray actor."""
    monkeypatch.setattr("weightsync.schemes.ray_server.own_actor", lambda: "an actor")


def running() -> Iterator[Any]:
    """Start a cluster of one node, connect this process to it, and shut it down afterwards. Nodes can be added."""
    ray, utilities = importlib.import_module("ray"), importlib.import_module("ray.cluster_utils")
    # A short path: the paths of Ray's sockets begin with it, and may have at most 107 characters.
    folder = tempfile.mkdtemp(prefix="ws", dir="/tmp")
    with pytest.MonkeyPatch.context() as patched:
        # Ray writes the cluster's address into this folder, which must exist. The default folder may have the address
        # of a user's cluster.
        patched.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        made = utilities.Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 4,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_NBYTES,
                "temp_dir": folder,
            },
        )
        try:
            ray.init(address=made.address, log_to_driver=False, logging_level="error")
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            left = _left_of(folder)
            shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"of Ray's processes, these outlived its cluster: {left}"


def _left_of(folder: str) -> list[str]:
    # The agents of a node end only when they notice that the node has ended.
    given_up = time.monotonic() + 30
    while (left := _processes_of(folder)) and time.monotonic() < given_up:
        time.sleep(0.1)
    return left


def _processes_of(folder: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if folder in line:
            found.append(line[:200])
    return found
