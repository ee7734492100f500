"""Profiles, the forkserver that all tests share, and the checks that nothing outlives a test."""

from __future__ import annotations

import os

# torch asks the DNS for a name of each address it connects to, in a store's one thread too, and a test machine's DNS
# may not answer. The C library reads this once a thread: it is set before anything is imported that might ask.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# torch's threads wait for each other without computing: the tests have fewer cores than threads, and one that spins
# keeps from its core the one it waits for. Read as torch is loaded: by the workers of pytest-xdist and all processes.
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
# Asked about each of thousands of mutants (tests/protocol/mutation).
settings.register_profile(
    "mutants", max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_configure() -> None:
    """Processes that tests start take Ctrl-C, also where this one was started in the background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """No collection of garbage looks through all that was imported: it would take longer than most tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """At the end of the process all is collected as ever: extensions complain of what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def forkserver() -> multiprocessing.context.ForkServerContext:
    """Starts processes in milliseconds: its server has imported torch, weightsync, and what modules of tests import."""
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
    """No process, no thread of ours and no name in shared memory stays behind.

    What was there before is a fixture's of a longer life, and that fixture's to end; so is the session's Ray cluster,
    which is therefore there before the first test that is marked for it.
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
            continue  # it stays for a sender or receiver that was open before
        thread.join(30)  # a store's connection ends with what its store still has to look up
        assert not thread.is_alive(), f"{thread} outlived the test"
    _end_helpers()


def _forget_frames(item: pytest.Item) -> None:
    """Exceptions that a test is given live as long as the session: what they hold of its calls would too."""
    given = getattr(item, "callspec", None)
    for value in given.params.values() if given is not None else ():
        if isinstance(value, BaseException):
            value.__traceback__ = value.__context__ = None


def _end_helpers() -> None:
    """No test meets threads that help to copy and stay for a sender or receiver of another test."""
    helpers = copy_threads._helpers
    with helpers._lock:
        keys, helpers._keys = helpers._keys, set()
        ending = helpers._ending()
        helpers._keys = keys
    copy_threads._join(ending)


def _names_left(names: set[str]) -> set[str]:
    # Another worker of pytest-xdist may have made some, for as long as its test runs.
    given_up = time.monotonic() + 10
    while (left := _shared_names() - names) and time.monotonic() < given_up:
        time.sleep(0.05)
    return left


def _shared_names() -> set[str]:
    # Semaphores of multiprocessing have names until they are collected, other processes' too.
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


#: Few tests, and long ones: they start first. Of the others those of which there are many start first, so the last ones
#: are short, and no worker waits long for the other.
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


class _ByWhatTheyShare(LoadScopeScheduling):
    """Tests that share something run in one worker: Ray's cluster, graphs, the rows that were taken, a file's own.

    Of the strikes and cuts each transport's are a unit of their own: together they take minutes.
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
    """Which worker of pytest-xdist runs what."""
    return _ByWhatTheyShare(config, log)
