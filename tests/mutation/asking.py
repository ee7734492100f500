"""Which tests are asked about a mutant of a driver or of the payload's path: those that enter its function.

They are recorded once a hunt. Each file of tests runs in a forked child, so that nothing of it stays in the process
that forks for the mutants: each test once traced, once timed. A test that fails there, or takes long, is asked about
nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]

#: The files of tests that may be asked: of one process and its forked children, without a cluster.
FILES = (
    "transports",
    "strategy",
    "planted",
    "tracing/test_guarantees_told.py",
    "stateful/test_directed.py",
    "schemes/test_sending.py",
    "schemes/test_names_a.py",
    "schemes/test_bounds.py",
    "schemes/test_odd_weights.py",
    "schemes/test_fake_clock.py",
    "schemes/test_verified_updates.py",
    "schemes/test_models_by_path.py",
    "schemes/test_weights_of_another_model.py",
    "faults/test_bad_input.py",
    "faults/test_wire_damage.py",
    "faults/test_bad_links.py",
    "faults/test_goodbyes.py",
    "faults/test_interrupts_and_states.py",
    "faults/test_no_descriptors.py",
    "faults/test_other_hosts.py",
    "genb/test_background.py",
    "genb/test_cascade.py",
    "genb/test_copies_b.py",
    "distributed/test_store_group.py",
    "distributed/test_store_sends.py",
    "distributed/test_store_faults.py",
    "distributed/test_store_exchange.py",
    "distributed/test_store_strangers.py",
    "distributed/test_store_key.py",
)
#: Seconds that a test may take to be asked at all, and until it is taken for one that hangs.
LONGEST, HANGS = 1.5, 30
#: Seconds that the tests of one function take together at most; the quickest are asked.
ENOUGH = 4.0


@dataclass(frozen=True)
class Asked:
    """What was recorded.

    Attributes:
        seconds: what each test takes that passes.
        entered: the functions that it enters, behind their modules.
    """

    seconds: dict[str, float]
    entered: dict[str, list[str]]

    def by_function(self) -> dict[str, list[str]]:
        """The tests of each function in the order in which they are asked."""
        found: dict[str, list[str]] = defaultdict(list)
        for test, functions in self.entered.items():
            for function in functions:
                found[function].append(test)
        return {function: list(self._chosen(tests)) for function, tests in found.items()}

    def _chosen(self, tests: Sequence[str]) -> Iterator[str]:
        """The quickest first; of one test with several parameters, the later ones behind other tests."""
        met, weights, spent = Counter[str](), {}, 0.0
        for test in sorted(tests, key=self.seconds.__getitem__):
            name = test.partition("[")[0]
            met[name] += 1
            weights[test] = self.seconds[test] * met[name]
        for test in sorted(weights, key=weights.__getitem__):
            if spent + self.seconds[test] <= ENOUGH:
                spent += self.seconds[test]
                yield test


def record(items: Sequence[pytest.Item], modules: Sequence[str], lines: Path) -> Asked:
    """Run the tests in forked children, and see what they enter.

    Args:
        items: the tests.
        modules: whose functions are of interest.
        lines: a file for what the children have to tell; what it tells already is believed.
    """
    lines.touch()
    files = {str(ROOT / f"{module.replace('.', '/')}.py"): module for module in modules}
    for _, group in groupby((item for item in items if _in_process(item)), key=lambda item: item.path):
        left = _untold(list(group), lines)
        while left:
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                _record(left, files, lines)
            os.waitpid(child, 0)
            end(child)
            left = _untold(left, lines)[1:]  # the first one hung, or there is none
    return _read(lines)


def _untold(items: Sequence[pytest.Item], lines: Path) -> list[pytest.Item]:
    told = {json.loads(line)["test"] for line in lines.read_text(encoding="utf-8").splitlines()}
    return [item for item in items if item.nodeid not in told]


def _read(lines: Path) -> Asked:
    told = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    asked = [each for each in told if each["passed"] and each["seconds"] <= LONGEST and each["entered"]]
    return Asked({each["test"]: each["seconds"] for each in asked}, {each["test"]: each["entered"] for each in asked})


def _in_process(item: pytest.Item) -> bool:
    # A server of forked processes takes seconds to start, and its children import what is shipped.
    return not {"forkserver", "cluster"} & set(getattr(item, "fixturenames", ()))


def _record(items: Sequence[pytest.Item], files: dict[str, str], lines: Path) -> NoReturn:
    with lines.open("a", encoding="utf-8") as told:
        for item in items:
            entered: set[CodeType] = set()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HANGS)
            passed, begun = run(item, None, Tracer(entered, set(files))), time.monotonic()
            passed, taken = run(item, None) and passed, time.monotonic() - begun
            names = sorted({f"{files[code.co_filename]}.{_outer(code)}" for code in entered})
            print(
                json.dumps({"test": item.nodeid, "passed": passed, "seconds": round(taken, 4), "entered": names}),
                file=told,
                flush=True,
            )
    os._exit(0)


def _outer(code: CodeType) -> str:
    return code.co_qualname.partition(".<locals>")[0]


class Tracer:
    """Notes the functions of some files that any thread enters."""

    def __init__(self, entered: set[CodeType], files: set[str]) -> None:
        self._entered, self._files = entered, files

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename in self._files:
            self._entered.add(frame.f_code)

    def __enter__(self) -> None:
        threading.settrace(self)
        sys.settrace(self)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def run(item: pytest.Item, following: pytest.Item | None, tracer: Tracer | None = None) -> bool:
    """Whether a test passes, or skips itself."""
    if tracer is None:
        reports = runtestprotocol(item, log=False, nextitem=following)
    else:
        with tracer:
            reports = runtestprotocol(item, log=False, nextitem=following)
    return not any(report.failed for report in reports)


def end(group: int) -> None:
    """End what a child has left running: its processes are of one group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
