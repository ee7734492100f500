"""Hypothesis profiles, the shared forkserver, the check for leaks after each test, and xdist scheduling."""

from __future__ import annotations

import os

# torch makes a reverse DNS query for each address that it connects to, in the only thread of a store too, and the DNS
# of a test machine may not answer. The C library reads this variable once per thread, so it is set before any import
# that may make a query.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Let torch's threads sleep, not spin, while they wait for each other. The tests have more threads than cores, so a
# spinning thread may take the core from the thread that it waits for. torch reads this variable when it is loaded, also
# in the workers of pytest-xdist and in all other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gc
import multiprocessing
import multiprocessing.context
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from ray_cluster import cluster, in_an_actor  # noqa: F401 - one cluster for all folders
from xdist.scheduler import LoadScopeScheduling

from weightsync.weights import threads as copy_threads

settings.register_profile("dev", max_examples=50, stateful_step_count=30, deadline=None)
settings.register_profile(
    "ci",
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", max_examples=5000, stateful_step_count=100, deadline=None, print_blob=True)
# For tests that run once for each of thousands of mutants (tests/protocol/mutation).
settings.register_profile(
    "mutants", max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_configure() -> None:
    """Stop ignoring SIGINT, as a process started in the background does: the tests' child processes inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Exclude imported objects from garbage collection: to scan them would take longer than most tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Collect all garbage as usual when the process ends: some extensions warn about objects that are left."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def forkserver() -> multiprocessing.context.ForkServerContext:
    """A forkserver that has imported torch, weightsync and the test helpers: it starts processes in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch",
            "tensordict",
            "weightsync.schemes.shared",
            "weightsync.schemes.none",
            "weightsync.schemes.rpc",
            "weightsync.schemes.distributed",
            "pytest",
            "fleet",
        ]
    )
    return context


@pytest.fixture(autouse=True)
def nothing_outlives_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no child process, thread or name in shared memory outlives the test.

    Whatever existed before the test belongs to a fixture of a wider scope, which ends it. The session's Ray cluster is
    such a fixture, so it is started here before the first test with the mark `ray`.
    """
    if request.node.get_closest_marker("ray") is not None:
        request.getfixturevalue("cluster")
    names, threads, children = _shared_names(), set(threading.enumerate()), set(multiprocessing.active_children())
    owners = set(copy_threads._helpers._keys)
    yield
    _forget_frames(request.node)
    for child in set(multiprocessing.active_children()) - children:
        child.join(30)
        assert not child.is_alive(), f"{child} outlived the test"
    assert _names_left(names) == set()
    for thread in set(threading.enumerate()) - threads:
        if thread.name == "weightsync-copy" and owners & copy_threads._helpers._keys:
            continue  # the thread serves a sender or receiver that was open before the test
        thread.join(30)  # a store's connection ends only after the queries that its store still has to answer
        assert not thread.is_alive(), f"{thread} outlived the test"
    _end_helpers()


def _forget_frames(item: pytest.Item) -> None:
    """Drop the tracebacks of exceptions among the test's parameters, which would keep frames alive all session."""
    given = getattr(item, "callspec", None)
    for value in given.params.values() if given is not None else ():
        if isinstance(value, BaseException):
            value.__traceback__ = value.__context__ = None


def _end_helpers() -> None:
    """End the helper threads for copying, which would otherwise outlive the senders and receivers of this test."""
    helpers = copy_threads._helpers
    with helpers._lock:
        keys, helpers._keys = helpers._keys, set()
        ending = helpers._ending()
        helpers._keys = keys
    copy_threads._join(ending)


def _names_left(names: set[str]) -> set[str]:
    # Another worker of pytest-xdist may have created names too, which last as long as its test.
    given_up = time.monotonic() + 10
    while (left := _shared_names() - names) and time.monotonic() < given_up:
        time.sleep(0.05)
    return left


def _shared_names() -> set[str]:
    # Leave out the semaphores of multiprocessing, in any process: they keep their names until they are collected.
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


#: Units with few but long tests, which start first. Of the others, units with many tests start first, so the last ones
#: are short and the workers finish at about the same time.
_LONG = (
    "tests/protocol/traces/test_pytest_plugin.py",
    "tests/transports/rpc/test_rpc_generation_b.py",
    "tests/unit/demo/test_demo_command.py",
    "tests/unit/bench/test_bench_runs.py",
    "tests/docs/test_site.py",
    "tests/protocol/schedules/test_schedules.py",
    "tests/transports/conformance/test_example_in_docs.py",
    "tests/protocol/traces/test_corrupted.py",
    "tests/unit/cli/test_soak.py",
    "tests/transports/store/test_store_fanout_strikes.py",
    "tests/transports/store/test_store_faults.py",
    "tests/transports/strikes/test_cuts.py, store",
    "tests/transports/strikes/test_strikes.py, store",
    "tests/transports/strikes/test_strikes.py, inline",
    "tests/torchrl/generation_b/test_torchrl_collectors.py",
    "tests/unit/demo/test_demo_runs.py",
    "tests/unit/demo/test_demo_rpc.py",
    "tests/unit/schemes/test_start_methods.py",
    "tests/unit/weights/test_set_data.py",
    "tests/protocol/mutation/test_mutation.py",
    "tests/model/spec/test_charts.py",
)


class _SharedResourceScheduling(LoadScopeScheduling):
    """Runs tests that share something in one worker: the Ray cluster, graphs, the record of rows taken, or a file.

    The tests of strikes and cuts are one unit for each transport, since together they take minutes.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if re.search(r"(?<![a-z])(ray|actor)(?![a-z])", nodeid.lower()):
            return "ray"
        if path.startswith(("tests/protocol/graph/", "tests/protocol/stateful/")):
            return str(Path(path).parent)
        over = re.search(r"\[([a-z]+)-", nodeid) if path.startswith("tests/transports/strikes/") else None
        return f"{path}, {over[1]}" if over else path

    def _assign_work_unit(self, node: Any) -> None:
        long = next((scope for scope in _LONG if scope in self.workqueue), None)
        if long is not None:
            self.workqueue.move_to_end(long, last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Schedule tests on the workers of pytest-xdist by what they share."""
    return _SharedResourceScheduling(config, log)
