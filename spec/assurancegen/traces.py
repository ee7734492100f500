"""How much of the test suite was recorded and held against the protocol, as the pytest plugin last counted it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

#: Written by ``pytest --trace-counts tests/protocol/traces/recorded.json``: runs and events of each test.
RECORDED = Path("tests/protocol/traces/recorded.json")


class Recorded:
    """What was recorded, and conforms: the plugin fails a session of which a line does not."""

    def __init__(self, root: Path) -> None:
        self._counts: dict[str, tuple[int, int]] = json.loads((root / RECORDED).read_text(encoding="utf-8"))

    def of(self, tests: Iterable[str]) -> str:
        """What was recorded of tests, in words."""
        return self._words([self._counts[test] for test in tests if test in self._counts])

    def all(self) -> str:
        """What was recorded of all tests, in words."""
        return f"{self._words(list(self._counts.values()))} of {len(self._counts):,} tests"

    @staticmethod
    def _words(counts: list[tuple[int, int]]) -> str:
        runs, events = (sum(count[place] for count in counts) for place in (0, 1))
        return f"{runs:,} runs, {events:,} events" if runs else "-"
