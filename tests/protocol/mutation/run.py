"""Run the mutants and write what became of each: `python tests/protocol/mutation/run.py RESULT [NAME...]`.

A mutant is one function of the code, changed in one place. It is killed if a test fails on it; a mutant that survives
needs a reason why no test has to find it. The modules of this folder:

- `mutated` lists the modules whose functions are mutated, and `making` makes their mutants with mutmut.
- `run`, this program, runs the mutants of the machines and their pure halves. With `--driven` it runs those of the
  drivers and of the payload's path instead, by `driven`. For these, `asking` chooses the tests.
- `reviewed` and `driven_ledger` add results to the files of survivors (survivors.toml, driven.toml), and render them as
  pages (code-mutants.md, driver-mutants.md).
- `test_mutation` requires that each survivor has a reason, and that no others survive.

How the mutants of the machines and their pure halves are run: pytest collects the tests once. For each mutant this
process forks. The child plants the mutant and runs the oracles, the fastest first: the tests of the mutant's module,
then the small graphs of tests/protocol/graph, whose committed digests TLC agrees with. The first oracle that fails
kills the mutant, and so does exceeding the limit of processor time (that of wall-clock time is far higher, so that a
busy computer kills none).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from _pytest.runner import runtestprotocol

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "protocol" / "graph"), str(TESTS / "protocol" / "mutation")]

from asking import FILES  # noqa: E402
from configurations import SMALL, committed  # noqa: E402
from driven import DrivenHunt, Share  # noqa: E402
from driven_ledger import Ledger  # noqa: E402
from making import Mutant, mutants  # noqa: E402
from mutated import PURE  # noqa: E402
from search import digest, search  # noqa: E402

#: The tests that are run on the mutants of a module.
ASKED = {
    "weightsync.protocol.machine": ("machines",),
    "weightsync.protocol.sender": ("test_sender.py", "test_exact_results.py"),
    "weightsync.protocol.receiver": ("test_receiver.py", "test_exact_results.py"),
}
#: The most nodes of a graph that is searched. Larger graphs take longer than all others together.
MOST_NODES = 10_000
#: Most seconds of processor time, and of wall-clock time, for a mutant; all oracles together take about three.
CPU_SECONDS, SECONDS = 20, 300
WORKERS = 2
SURVIVED, BY_LOADING, BY_TEST, BY_GRAPH = 0, 11, 12, 13
HOW = {SURVIVED: "survived", BY_LOADING: "loading", BY_TEST: "test", BY_GRAPH: "graph"}


class Hunt:
    """A pytest plugin that runs the mutants in place of the tests."""

    def __init__(self, wanted: Callable[[str], bool], result: Path) -> None:
        self._wanted, self._result = wanted, result
        self.failure = ""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each mutant in a child, and write the results."""
        found: list[tuple[Mutant, str]] = []
        if self._shipped_code_passes(session.items):
            found = list(self._hunted(session.items))
        rows = [[*mutant.key, how] for mutant, how in found]
        self._result.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        return True

    def _shipped_code_passes(self, items: list[pytest.Item]) -> bool:
        """Whether the shipped code passes all oracles. Otherwise every mutant would count as killed."""
        for module in filter(self._wanted, PURE):
            if os.waitstatus_to_exitcode(os.waitpid(_forked(module, None, items), 0)[1]) != SURVIVED:
                self.failure = f"an oracle fails of {module} as it is shipped"
                return False
        return True

    def _hunted(self, items: list[pytest.Item]) -> Iterator[tuple[Mutant, str]]:
        todo = (mutant for module in PURE for mutant in mutants(module, self._wanted))
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


def _forked(module: str, mutant: Mutant | None, items: list[pytest.Item]) -> int:
    """Fork a child that runs all oracles on a mutant (None: on the shipped code)."""
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
        # A changed sentence changes no graph: machines do not act on sentences.
        sentence = mutant is not None and mutant.text_only
        if module != "weightsync.protocol.machine" and not sentence and _graphs_differ():
            os._exit(how)
    except BaseException:  # noqa: BLE001 - whatever an oracle raises, the mutant is killed
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
    pinned = committed()
    small = sorted(
        (name for name in SMALL if pinned[name]["nodes"] < MOST_NODES), key=lambda name: pinned[name]["nodes"]
    )
    return any(digest(search(SMALL[name]))["digest"] != pinned[name]["digest"] for name in small)


def main() -> int:
    """Run the mutants. Returns 0 if the result of each is written."""
    arguments = _arguments()

    def wanted(function: str) -> bool:
        return not arguments.names or any(name in function or function in name for name in arguments.names)

    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    # If the parent process ignores SIGINT, so would this one, and tests could not send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--no-traces"]
    if arguments.driven:
        return _driven(arguments, wanted, quiet)
    hunt = Hunt(wanted, arguments.result)
    chosen = [str(TESTS / "protocol" / name) for name in ("pure", "machines")]
    chosen.append(f"--deselect={TESTS / 'protocol/machines/test_cost.py'}")
    return _ended(hunt, pytest.main([*chosen, *quiet], plugins=[hunt]))


def _ended(hunt: Hunt | DrivenHunt, code: int) -> int:
    if hunt.failure:
        print(hunt.failure, file=sys.stderr)
    return 1 if hunt.failure else int(code)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hunts the mutants of the code.")
    parser.add_argument("result", type=Path, help="the file for what becomes of each")
    parser.add_argument("names", nargs="*", help="of functions or modules; none: all")
    parser.add_argument("--driven", action="store_true", help="those of the drivers and of the payload's path")
    parser.add_argument("--living", action="store_true", help="of those only the ones that the ledger says live")
    parser.add_argument("--share", default="0/1", help="which share of them, such as 3/20")
    parser.add_argument("--recorded", type=Path, help="a file that keeps which tests enter what; it may be there")
    parser.add_argument("--workers", type=int, default=WORKERS, help="how many work at once")
    return parser.parse_intermixed_args()


def _driven(arguments: argparse.Namespace, wanted: Callable[[str], bool], quiet: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="weightsync-mutants-") as folder:
        recorded = arguments.recorded or Path(folder, "recorded.jsonl")
        index, _, of = arguments.share.partition("/")
        living = frozenset(Ledger.read().survivors) if arguments.living else None
        hunt = DrivenHunt(wanted, Share(int(index), int(of), living), arguments.result, recorded, arguments.workers)
        chosen = [str(TESTS / name) for name in FILES]
        kinds = "not slow and not tlc and not ray and not rpc and not gpu"
        return _ended(hunt, pytest.main([*chosen, *quiet, "-m", kinds, f"--basetemp={folder}/tests"], plugins=[hunt]))


if __name__ == "__main__":
    sys.exit(main())
