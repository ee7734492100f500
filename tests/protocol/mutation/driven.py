"""Run the mutants of the drivers and of the payload's path.

For each mutant this process forks. The child plants the mutant and runs the tests that execute the changed lines (see
`asking`), until one fails. An alarm ends a test that hangs. While children wait, more are started.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from asking import Asked, end, record, run
from driven_ledger import Key
from making import Mutant, mutants
from mutated import DRIVEN

TESTS = Path(__file__).parents[2]
SURVIVED, BY_LOADING, BY_TEST = 0, 11, 12
HOW = {SURVIVED: "survived", BY_LOADING: "loading", BY_TEST: "test"}
#: Seconds after which a child that does not run counts as waiting, and the most children at a time.
WAITING_SECONDS, MOST = 1.5, 8
#: A test counts as hanging after this many seconds plus twenty times its usual duration.
HANGS = 10
#: The largest file or segment, in bytes, that a child may have. A mutant that asks for more gets an error. Without the
#: limit the kernel would kill the largest processes of the machine.
LARGEST = 2**30


@dataclass(frozen=True)
class Share:
    """The mutants to run. Each belongs to one share, by its key.

    Attributes:
        index: the number of this share, from 0.
        of: how many shares there are.
        living: of the share, run only these mutants; None: run all.
    """

    index: int = 0
    of: int = 1
    living: frozenset[Key] | None = None

    def has(self, mutant: Mutant) -> bool:
        """Whether a mutant is to be run."""
        if self.living is not None and mutant.key not in self.living:
            return False
        return zlib.crc32(repr(mutant.key).encode()) % self.of == self.index % self.of


class DrivenHunt:
    """A pytest plugin that runs the mutants in place of the tests.

    Args:
        wanted: whether a function's mutants are to be run, given its full name.
        share: the share of the mutants to run.
        result: the file for the results.
        recorded: the file that says which tests execute which lines.
        workers: how many children work at once.
    """

    def __init__(
        self, wanted: Callable[[str], bool], share: Share, result: Path, recorded: Path, workers: int = 2
    ) -> None:
        self._wanted, self._share, self._workers = wanted, share, workers
        self._result, self._recorded = result, recorded
        self.failure = ""
        self._under_way: dict[int, tuple[Mutant, float]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each mutant in a child, and write the results."""
        _settle(session)
        asked = record(session.items, DRIVEN, self._recorded)
        items = {item.nodeid: item for item in session.items}
        found: list[list[object]] = []
        self.failure = self._failure_of_the_shipped_code(items, asked)
        for mutant, how in () if self.failure else self._hunted(items, asked):
            found.append([*mutant.key, how])
            if len(found) % 20 == 0:
                self._write(found)
        self._write(found)
        return True

    def _failure_of_the_shipped_code(self, items: dict[str, pytest.Item], asked: Asked) -> str:
        """A message that names a test which fails with the shipped code; empty: none does.

        If one did, every mutant would count as killed.
        """
        for module in filter(self._wanted, DRIVEN):
            tests = [items[test] for test in asked.about(module, range(10_000)) if test in items]
            child = _forked(None, tests, asked, self._result)
            _, status = os.waitpid(child, 0)
            end(child)
            if os.waitstatus_to_exitcode(status) != SURVIVED:
                return f"{self._result.read_text(encoding='utf-8')} fails of {module} as it is shipped"
        return ""

    def _write(self, found: list[list[object]]) -> None:
        self._result.write_text(json.dumps(found, indent=1), encoding="utf-8")

    def _hunted(self, items: dict[str, pytest.Item], asked: Asked) -> Iterator[tuple[Mutant, str]]:
        for mutant in (mutant for module in DRIVEN for mutant in mutants(module, self._wanted)):
            if not self._share.has(mutant):
                continue
            chosen = [items[test] for test in asked.about(mutant.module, *mutant.spans) if test in items]
            while not self._has_room():
                yield from self._ended()
            self._under_way[_forked(mutant, chosen, asked)] = mutant, time.monotonic()
        while self._under_way:
            yield from self._ended()

    def _has_room(self) -> bool:
        now = time.monotonic()
        busy = [
            child
            for child, (_, begun) in self._under_way.items()
            if now - begun < WAITING_SECONDS or _is_running(child)
        ]
        return len(busy) < self._workers and len(self._under_way) < MOST

    def _ended(self) -> Iterator[tuple[Mutant, str]]:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            time.sleep(0.02)
            return
        end(child)
        mutant, _ = self._under_way.pop(child)
        yield mutant, HOW.get(os.waitstatus_to_exitcode(status), "time")


def _settle(session: pytest.Session) -> None:
    """Prepare what all children inherit.

    They have one thread, one base folder, and do not see the shared names of other children.
    """
    torch.set_num_threads(1)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    conftest = session.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    assert conftest is not None
    names = conftest._shared_names  # type: ignore[attr-defined]
    conftest._shared_names = lambda: {name for name in names() if str(os.getpid()) in name}  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()


def _is_running(child: int) -> bool:
    try:
        return Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "R"
    except FileNotFoundError:
        return False


def _forked(mutant: Mutant | None, items: Sequence[pytest.Item], asked: Asked, last: Path | None = None) -> int:
    """Fork a child that runs tests on a mutant (None: the shipped code), and writes each one's name to `last`."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _try(mutant, items, asked, last)
    return child


def _try(mutant: Mutant | None, items: Sequence[pytest.Item], asked: Asked, last: Path | None) -> NoReturn:
    how = BY_LOADING
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        if mutant is not None:
            mutant.plant()
        how = BY_TEST
        for item, after in zip_longest(items, items[1:]):
            if last is not None:
                last.write_text(item.nodeid, encoding="utf-8")
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(HANGS + 20 * asked.seconds[item.nodeid]))
            if not run(item, after):
                os._exit(how)
    except BaseException:  # noqa: BLE001 - whatever a test raises, the mutant is killed
        os._exit(how)
    os._exit(SURVIVED)
