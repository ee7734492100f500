"""Hunts the mutants: `python tests/mutation/run.py RESULT [NAME...]` writes what became of each.

The tests are collected once. For each mutant this process forks; the child plants it, and asks the oracles in turn,
the fastest first: the tests of its module, then the small graphs of tests/graph, whose committed digests TLC agrees
with. The first that fails kills it. A child is given seconds of the processor, not of the clock: a busy machine kills
nobody.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from _pytest.runner import runtestprotocol

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "graph"), str(TESTS / "mutation")]

from configurations import SMALL, committed  # noqa: E402
from making import MODULES, Mutant, mutants  # noqa: E402
from search import digest, search  # noqa: E402

#: The tests that are asked about the mutants of a module.
ASKED = {
    "weightsync.machine": ("machines",),
    "weightsync.protocol.sender": ("test_sender.py", "test_words.py"),
    "weightsync.protocol.sender_guards": ("test_sender.py", "test_words.py"),
    "weightsync.protocol.receiver": ("test_receiver.py", "test_words.py"),
}
#: Larger graphs take longer than all others together.
MOST_NODES = 10_000
#: Seconds of the processor, and of the clock, that a mutant may take; all oracles together take about three.
CPU_SECONDS, SECONDS = 20, 300
WORKERS = 2
SURVIVED, BY_LOADING, BY_TEST, BY_GRAPH = 0, 11, 12, 13
HOW = {SURVIVED: "survived", BY_LOADING: "loading", BY_TEST: "test", BY_GRAPH: "graph"}


class Hunt:
    """The plugin that runs instead of the tests."""

    def __init__(self, names: Sequence[str], result: Path) -> None:
        self._names, self._result = names, result
        self.failure = ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """For each mutant a child."""
        found: list[tuple[Mutant, str]] = []
        if self._unharmed(session.items):
            found = list(self._hunted(session.items))
        told = [[*mutant.key, how] for mutant, how in found]
        self._result.write_text(json.dumps(told, indent=1), encoding="utf-8")
        return True

    def _unharmed(self, items: list[pytest.Item]) -> bool:
        """Whether the oracles let pass what is shipped; otherwise every mutant would be killed."""
        for module in filter(self._wanted, MODULES):
            if os.waitstatus_to_exitcode(os.waitpid(_forked(module, None, items), 0)[1]) != SURVIVED:
                self.failure = f"an oracle fails of {module} as it is shipped"
                return False
        return True

    def _hunted(self, items: list[pytest.Item]) -> Iterator[tuple[Mutant, str]]:
        todo = (mutant for module in MODULES for mutant in mutants(module, self._wanted))
        under_way: dict[int, Mutant] = {}
        for mutant in todo:
            under_way[_forked(mutant.module, mutant, items)] = mutant
            if len(under_way) == WORKERS:
                yield self._ended(under_way)
        while under_way:
            yield self._ended(under_way)

    def _ended(self, under_way: dict[int, Mutant]) -> tuple[Mutant, str]:
        child, status = os.wait()
        return under_way.pop(child), HOW.get(os.waitstatus_to_exitcode(status), "time")

    def _wanted(self, function: str) -> bool:
        return not self._names or any(name in function or function in name for name in self._names)


def _forked(module: str, mutant: Mutant | None, items: list[pytest.Item]) -> int:
    """A child that asks all oracles about a mutant (None: the code as it is)."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        _try(module, mutant, items)
    return child


def _try(module: str, mutant: Mutant | None, items: list[pytest.Item]) -> NoReturn:
    how = BY_LOADING
    try:
        if mutant is not None:
            mutant.plant()
        how = BY_TEST
        if _tests_fail([item for item in items if set(ASKED[module]) & set(item.path.parts)]):
            os._exit(how)
        how = BY_GRAPH
        # No machine acts on a sentence, and no graph has one.
        sentence = mutant is not None and mutant.told
        if module != "weightsync.machine" and not sentence and _graphs_differ():
            os._exit(how)
    except BaseException:  # noqa: BLE001 - whatever an oracle raises, it has noticed
        os._exit(how)
    os._exit(SURVIVED)


def _tests_fail(items: list[pytest.Item]) -> bool:
    assert items, "no test was collected"
    following: list[pytest.Item | None] = [*items[1:], None]
    return any(
        report.failed
        for item, after in zip(items, following, strict=True)
        for report in runtestprotocol(item, log=False, nextitem=after)
    )


def _graphs_differ() -> bool:
    told = committed()
    small = sorted((name for name in SMALL if told[name]["nodes"] < MOST_NODES), key=lambda name: told[name]["nodes"])
    return any(digest(search(SMALL[name]))["digest"] != told[name]["digest"] for name in small)


def main() -> int:
    """Hunt; 0: it is written what became of each."""
    hunt = Hunt(sys.argv[2:], Path(sys.argv[1]))
    chosen = [str(TESTS / "protocol"), str(TESTS / "machines"), f"--deselect={TESTS / 'machines/test_cost.py'}"]
    code = pytest.main([*chosen, "-q", "--no-header", "-p", "no:cacheprovider", "--no-traces"], plugins=[hunt])
    if hunt.failure:
        print(hunt.failure, file=sys.stderr)
    return 1 if hunt.failure else int(code)


if __name__ == "__main__":
    sys.exit(main())
