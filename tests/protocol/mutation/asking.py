"""Choose the tests for a mutant of a driver or of the payload's path: those that execute the lines that it changes.

Which lines each test executes is recorded once per run of the mutants. Each file of tests runs in a forked child, so
that nothing of it stays in the process that forks for the mutants. Each test runs twice, once traced and once timed. A
test that fails there, or takes long, is used for no mutant.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[3]

#: The tests that may be used: they run in one process and its forked children, without a cluster.
FILES = (
    "unit/engine",
    "transports/pipe",
    "transports/device",
    "unit/weights",
    "protocol/planted",
    "protocol/traces/test_guarantees_reported.py",
    "protocol/stateful/test_directed.py",
    "unit/schemes/test_sending.py",
    "unit/schemes/test_delta.py",
    "unit/schemes/test_names_a.py",
    "unit/schemes/test_bounds.py",
    "unit/schemes/test_odd_weights.py",
    "unit/schemes/test_fake_clock.py",
    "unit/schemes/test_verified_updates.py",
    "unit/schemes/test_loaders.py",
    "unit/schemes/test_chosen_weights.py",
    "unit/schemes/test_wire_dtype.py",
    "unit/schemes/test_check_finite.py",
    "unit/schemes/test_models_by_path.py",
    "unit/schemes/test_shared_models.py",
    "unit/schemes/test_weights_of_another_model.py",
    "transports/faults/test_bad_input.py",
    "transports/faults/test_wire_damage.py",
    "transports/faults/test_bad_links.py",
    "transports/faults/test_goodbyes.py",
    "transports/faults/test_interrupts_and_states.py",
    "transports/faults/test_no_descriptors.py",
    "transports/faults/test_other_hosts.py",
    "torchrl/generation_b/test_background.py",
    "torchrl/generation_b/test_background_by_path.py",
    "torchrl/generation_b/test_background_compiled.py",
    "torchrl/generation_b/test_background_functional.py",
    "torchrl/generation_b/test_cascade.py",
    "torchrl/generation_b/test_copies_b.py",
    "transports/store/test_store_group.py",
    "transports/store/test_store_sends.py",
    "transports/store/test_store_faults.py",
    "transports/store/test_store_link_threads.py",
    "transports/store/test_store_strangers.py",
    "transports/store/test_store_key.py",
    "transports/store/test_store_client.py",
    "transports/store/test_store_tree.py",
    "transports/store/test_store_branches.py",
    "transports/store/test_store_fanout.py",
    "transports/store/test_store_parts.py",
)
#: The tests of some modules, by how the names of the modules begin. They run first.
OWN = {
    "weightsync.engine.serving_lock": (
        "tests/unit/schemes/test_loaders.py",
        "tests/unit/schemes/test_chosen_weights.py",
        "tests/unit/engine/test_serv",
        "tests/torchrl/generation_b/test_background_compiled.py",
        "tests/unit/schemes/test_shared_models.py",
        "tests/torchrl/generation_b/test_cascade.py",
        "tests/unit/schemes/test_models_by_path.py",
        "tests/unit/schemes/test_bounds.py",
        "tests/unit/schemes/test_verified_updates.py",
    ),
    "weightsync.engine.packer": (
        "tests/unit/engine/test_parts.py::test_several_threads",
        "tests/unit/engine/test_parts.py::test_only_targets",
        "tests/transports/store/test_store_parts.py::test_parts_whose_digest",
        "tests/unit/engine/test_packer.py",
        "tests/unit/engine/test_slots_at_connect.py",
        "tests/unit/engine/test_payload.py",
        "tests/unit/schemes/test_weights_of_another_model.py",
        "tests/unit/schemes/test_wire_dtype.py",
        "tests/transports/device/",
    ),
    "weightsync.engine.applier": (
        "tests/unit/schemes/test_verified_updates.py::test_g2_a_slot",
        "tests/torchrl/generation_b/test_background_functional.py",
        "tests/unit/engine/test_parts.py::test_g2_bytes_hashed",
        "tests/unit/engine/test_parts.py::test_parts_overwritten",
        "tests/unit/engine/test_applier.py",
        "tests/unit/engine/test_served_model.py",
        "tests/transports/device/",
        "tests/torchrl/generation_b/test_cascade.py",
        "tests/unit/schemes/test_verified_updates.py",
    ),
    "weightsync.engine.receiver_driver": (
        "tests/unit/engine/test_parts.py::test_g2_bytes_hashed",
        "tests/unit/engine/test_receiver_driver.py",
        "tests/unit/engine/test_steady_links.py",
        "tests/unit/schemes/test_delta.py",
        "tests/unit/engine/",
    ),
    "weightsync.engine.sender_driver": (
        "tests/unit/engine/test_parts.py::test_a_payload_that_lies",
        "tests/unit/engine/test_sender",
        "tests/unit/engine/test_steady_links.py",
        "tests/unit/schemes/test_delta.py",
        "tests/transports/device/",
        "tests/unit/engine/",
    ),
    "weightsync.engine.reporter": ("tests/unit/engine/test_reporter.py", "tests/unit/schemes/test_delta.py"),
    "weightsync.engine.parts": (
        "tests/unit/engine/test_parts.py",
        "tests/transports/pipe/test_pipe.py",
        "tests/transports/store/test_store_parts.py",
        "tests/unit/engine/",
    ),
    "weightsync.engine.driver": (
        "tests/unit/engine/test_parts.py::test_several_threads",
        "tests/unit/engine/test_parts.py::test_a_link_that_cannot",
        "tests/unit/engine/",
    ),
    "weightsync.engine.": ("tests/unit/engine/",),
    "weightsync.weights.destination_checks": (
        "tests/torchrl/generation_b/test_background_functional.py",
        "tests/unit/weights/test_target",
        "tests/unit/weights/",
    ),
    "weightsync.weights.mapped": (
        "tests/unit/schemes/test_shared_models.py",
        "tests/unit/weights/test_mapped.py",
        "tests/unit/weights/",
        "tests/transports/device/",
    ),
    "weightsync.weights.target": (
        "tests/unit/weights/test_send_plan.py::test_a_copy_is_planned_again",
        "tests/unit/weights/test_target_hooks.py::test_weights_that_a_functional_call",
        "tests/unit/weights/test_odd_tensors.py::test_a_destination_made_anew",
        "tests/unit/weights/test_odd_tensors.py::test_memory_that_was_shrunk",
        "tests/unit/weights/test_target_refusals.py::test_a_destination_that_was_refused",
        "tests/unit/weights/test_target_refusals.py::test_an_update_refused_for",
        "tests/unit/weights/test_target.py::test_parameters_of_a_dict",
        "tests/unit/weights/test_target.py::test_extra_state_goes_to",
        "tests/torchrl/generation_b/test_background_functional.py",
        "tests/unit/schemes/test_shared_models.py",
        "tests/unit/schemes/test_chosen_weights.py",
        "tests/transports/device/",
        "tests/unit/weights/test_target",
        "tests/unit/weights/",
    ),
    "weightsync.transports.pipe.framing": ("tests/transports/pipe/test_framing.py", "tests/transports/pipe/"),
    "weightsync.transports.pipe.link": (
        "tests/transports/pipe/test_framing.py",
        "tests/transports/pipe/test_pipe.py",
        "tests/transports/device/",
    ),
    "weightsync.clock": ("tests/unit/engine/test_timing.py", "tests/unit/schemes/test_fake_clock.py"),
    "weightsync.protocol.": (
        "tests/unit/engine/test_wire_refusals.py",
        "tests/transports/pipe/test_wire.py",
        "tests/transports/pipe/test_decoding.py",
        "tests/transports/pipe/test_golden.py",
    ),
    "weightsync.weights.packing": (
        "tests/unit/weights/test_packing.py",
        "tests/unit/weights/test_unpacking.py",
        "tests/unit/weights/test_tree_digest.py",
        "tests/unit/weights/test_send_plan.py",
        "tests/unit/engine/test_parts.py",
    ),
    "weightsync.weights.division": (
        "tests/unit/weights/test_tree_digest.py",
        "tests/unit/weights/test_packing.py",
        "tests/unit/weights/test_copy_threads.py",
    ),
    "weightsync.weights.threads": ("tests/unit/weights/test_copy_threads.py", "tests/unit/weights/test_tree_digest.py"),
    "weightsync.weights.moving": ("tests/unit/weights/test_moving.py", "tests/unit/weights/test_packing.py"),
    "weightsync.weights.send_plan": ("tests/unit/weights/test_send_plan.py", "tests/unit/weights/test_packing.py"),
    "weightsync.weights.tree_digest": ("tests/unit/weights/test_tree_digest.py",),
    "weightsync.transports.store.store": ("tests/transports/store/test_store_client.py",),
    "weightsync.transports.store.tree": ("tests/transports/store/test_store_tree.py",),
    "weightsync.transports.store.routes": ("tests/transports/store/test_store_tree.py",),
    "weightsync.transports.store.fanout": ("tests/transports/store/test_store_branches.py",),
    "weightsync.transports.process": ("tests/transports/pipe/test_process_watch.py",),
    "weightsync.transports.mapping": ("tests/transports/pipe/test_memory.py", "tests/transports/pipe/test_pipe.py"),
    "weightsync.transports.buffers": (
        "tests/unit/engine/test_segments.py",
        "tests/unit/engine/test_slots_at_connect.py",
        "tests/transports/pipe/test_memory.py",
        "tests/transports/device/test_host.py",
    ),
    "weightsync.transports.pipe.": ("tests/transports/pipe/test_pipe.py",),
}
#: Tests that are never used. This one leaves its process a few descriptors. How many an initialisation needs depends on
#: what earlier tests in the same child have imported and opened, so the test also fails with the shipped code.
EXCLUDED_TESTS = ("test_initialising_a_scheme_without_free_descriptors_raises_weightsync_error",)
#: Most seconds of processor time that a test may take to be used (of wall-clock time, four times as many), and seconds
#: after which a test counts as hanging.
MAX_TEST_SECONDS, HANGS = 0.6, 20
#: Most seconds that the tests of one mutant may take together, and most tests for one mutant.
MAX_SECONDS_PER_MUTANT, MOST = 2.0, 150


@dataclass(frozen=True)
class Asked:
    """The recorded tests.

    Attributes:
        seconds: the duration of each test that passes.
        breadth: the number of lines that each test executes.
        reached: the tests that execute a line of a module.
    """

    seconds: dict[str, float]
    breadth: dict[str, int]
    reached: dict[tuple[str, int], set[str]]

    def about(self, module: str, *spans: range) -> list[str]:
        """The tests that execute the first of these spans of lines that any test executes, in the order to run them."""
        for lines in spans:
            tests = set().union(*(self.reached.get((module, line), ()) for line in lines))
            if tests:
                own = next(own for name, own in OWN.items() if module.startswith(name))
                return list(self._chosen(sorted(tests), own))
        return []

    def _chosen(self, tests: Sequence[str], own: tuple[str, ...]) -> Iterator[str]:
        spent = 0.0
        for test in islice(self._ordered(tests, own), MOST):
            if spent + self.seconds[test] <= MAX_SECONDS_PER_MUTANT:
                spent += self.seconds[test]
                yield test

    def _ordered(self, tests: Sequence[str], about: tuple[str, ...]) -> Iterator[str]:
        """The module's own tests, then alternately a test that executes few lines and one that executes many."""
        met, weights = Counter[str](), {}
        for test in sorted(tests, key=self.breadth.__getitem__):
            name = test.partition("[")[0]
            # The later parameters of one test come a little later.
            weights[test] = self.breadth[test] * (10 + met[name])
            met[name] += 1
        others = deque(sorted(weights, key=weights.__getitem__))
        own = list(dict.fromkeys(test for name in about for test in others if test.startswith(name)))
        yield from own
        for test in own:
            others.remove(test)
        while others:
            yield others.popleft()
            if others:
                yield others.pop()


def record(items: Sequence[pytest.Item], modules: Sequence[str], lines: Path) -> Asked:
    """Run the tests in forked children, and record the lines that they execute.

    Args:
        items: the tests.
        modules: the modules whose lines are recorded.
        lines: the file that the children write to. Tests that are in it already do not run again.
    """
    lines.touch()
    files = {str(ROOT / f"{module.replace('.', '/')}.py"): module for module in modules}
    for _, group in groupby((item for item in items if _in_process(item)), key=lambda item: item.path):
        left = _not_recorded(list(group), lines)
        while left:
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                _record(left, files, lines)
            os.waitpid(child, 0)
            end(child)
            left = _not_recorded(left, lines)[1:]  # the first test left has hung, or none is left
    return _read(lines)


def _not_recorded(items: Sequence[pytest.Item], lines: Path) -> list[pytest.Item]:
    recorded = {json.loads(line)["test"] for line in lines.read_text(encoding="utf-8").splitlines()}
    return [item for item in items if item.nodeid not in recorded]


def _read(lines: Path) -> Asked:
    records = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    known = [each for each in records if not each["test"].rpartition("::")[2].startswith(EXCLUDED_TESTS)]
    asked = [each for each in known if each["passed"] and each["seconds"] <= MAX_TEST_SECONDS]
    reached: dict[tuple[str, int], set[str]] = defaultdict(set)
    for each in asked:
        for module, numbers in each["reached"].items():
            for line in numbers:
                reached[module, line].add(each["test"])
    breadth = {each["test"]: sum(map(len, each["reached"].values())) for each in asked}
    return Asked({each["test"]: each["seconds"] for each in asked}, breadth, reached)


def _in_process(item: pytest.Item) -> bool:
    # A fork server takes seconds to start, and its children import the shipped code, not the mutant.
    return not {"forkserver", "cluster"} & set(getattr(item, "fixturenames", ())) and not item.name.startswith(
        EXCLUDED_TESTS
    )


def _record(items: Sequence[pytest.Item], files: dict[str, str], lines: Path) -> NoReturn:
    with lines.open("a", encoding="utf-8") as file:
        for item in items:
            tracer = Tracer(set(files))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HANGS)
            traced = run(item, None, tracer)
            passed, taken = _timed(item)
            each = {"test": item.nodeid, "passed": passed and traced, "seconds": round(taken, 4)}
            reached = {module: sorted(tracer.reached[file]) for file, module in files.items() if tracer.reached[file]}
            print(json.dumps({**each, "reached": reached}), file=file, flush=True)
    os._exit(0)


def _timed(item: pytest.Item) -> tuple[bool, float]:
    """Run a test. Returns whether it passes, and its seconds.

    These are the processor time, or a quarter of the wall-clock time if that is more: on a busy machine a test waits.
    """
    clock, processor = time.monotonic(), time.process_time()
    passed = run(item, None)
    return passed, max((time.monotonic() - clock) / 4, time.process_time() - processor)


class Tracer:
    """Records the lines of the given files that any thread executes."""

    def __init__(self, files: set[str]) -> None:
        self.reached: dict[str, set[int]] = {file: set() for file in files}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Tracer | None:
        lines = self.reached.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)
        return self

    def __enter__(self) -> None:
        threading.settrace(self)  # type: ignore[arg-type]
        sys.settrace(self)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def run(item: pytest.Item, following: pytest.Item | None, tracer: Tracer | None = None) -> bool:
    """Run a test. Returns whether it passes or skips itself."""
    if tracer is None:
        reports = runtestprotocol(item, log=False, nextitem=following)
    else:
        with tracer:
            reports = runtestprotocol(item, log=False, nextitem=following)
    return not any(report.failed for report in reports)


def end(group: int) -> None:
    """Kill the processes that a child has left running: they are in its process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
