"""The survivors among the mutants of the machines and their pure halves, each with its reason, and the score.

`python tests/protocol/mutation/reviewed.py` renders them as code-mutants.md. With a result of run.py it first adds the
result: survivors that are killed now are removed, new ones are added without a reason, and the score is that of the
result. A result of functions that were never run before is added to the results of the others.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("survivors.toml")
PAGE = Path(__file__).with_name("code-mutants.md")

#: A mutant: its function, the original lines, the lines in their place, and how many before it read the same.
Key = tuple[str, str, str, int]

HEAD = """# Mutants of the code

A mutant is one function of the machines or their pure halves, changed in one place by mutmut: an operator, an argument,
a constant, a text, a case. A test kills a mutant by failing on it: the tests of `tests/protocol/machines` and
`tests/protocol/pure` run first, then the small graphs of `tests/protocol/graph`, whose digests agree with TLC's.
`make verify` runs all mutants. The run fails if a mutant survives that is not listed here, if a listed one is now
killed, or if the kill rate drops.

Not mutated: code outside functions (the rows are generated, and the graphs are compared with TLC's), the drivers, and
everything that sends, receives or applies.

`python tests/protocol/mutation/run.py RESULT` runs the mutants; `python tests/protocol/mutation/reviewed.py RESULT`
records the result and renders this page. Each new survivor then needs a reason in
`tests/protocol/mutation/survivors.toml`, or a test that kills it.
"""


@dataclass(frozen=True)
class Reviewed:
    """The committed results.

    Attributes:
        mutants: how many there are.
        killed: how many of them are killed.
        reasons: the reason of each survivor.
        unhunted: functions whose mutants the score does not count yet; a run of all mutants leaves none.
    """

    mutants: int
    killed: int
    reasons: dict[Key, str]
    unhunted: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> Reviewed:
        """Read the results from their file."""
        loaded = tomllib.loads(FILE.read_text(encoding="utf-8"))
        reasons = {(e["function"], e["was"], e["now"], e["twin"]): e["reason"] for e in loaded.get("survivor", [])}
        return cls(loaded["mutants"], loaded["killed"], reasons, tuple(loaded.get("unhunted", ())))

    def after(self, result: list[list[str]]) -> Reviewed:
        """Add a result of all mutants, or of all mutants of functions that were never run.

        A result of all mutants replaces the counts; survivors keep their reasons.
        """
        hunted = {function for function, *_ in result}
        if hunted and hunted <= set(self.unhunted):
            return self._and(Reviewed(0, 0, {}).after(result), hunted)
        living = [(function, was, now, int(twin)) for function, was, now, twin, how in result if how == "survived"]
        reasons = {key: self.reasons.get(key, "") for key in sorted(living)}
        return Reviewed(len(result), len(result) - len(living), reasons)

    def _and(self, found: Reviewed, hunted: set[str]) -> Reviewed:
        reasons = dict(sorted((self.reasons | found.reasons).items()))
        left = tuple(name for name in self.unhunted if name not in hunted)
        return Reviewed(self.mutants + found.mutants, self.killed + found.killed, reasons, left)

    def write(self) -> None:
        """Write the results to their file."""
        lines = ["# Rendered in code-mutants.md, and kept by reviewed.py.", f"mutants = {self.mutants}"]
        lines += [f"killed = {self.killed}", f"unhunted = {json.dumps(self.unhunted)}"]
        for (function, was, now, twin), reason in self.reasons.items():
            lines += ["", "[[survivor]]", f"function = {json.dumps(function)}", f"was = {json.dumps(was)}"]
            lines += [f"now = {json.dumps(now)}", f"twin = {twin}", f"reason = {json.dumps(reason)}"]
        FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def page(self) -> str:
        """The page that shows the results."""
        share = 100 * self.killed / self.mutants if self.mutants else 0
        lines = [HEAD, f"**{self.killed} of {self.mutants} are killed ({share:.1f} %).** The survivors:"]
        if self.unhunted:
            lines.insert(1, f"**Not run yet, and not counted:** {', '.join(self.unhunted)}.\n")
        by_function = Counter(function for function, *_ in self.reasons)
        for function in by_function:
            lines += ["", f"## `{function.removeprefix('weightsync.')}`", ""]
            for (where, was, now, _), reason in self.reasons.items():
                if where == function:
                    lines += [f"- ``{was}`` became ``{now}``" if now else f"- ``{was}`` is gone", f"  : {reason}"]
        return "\n".join(lines) + "\n"


def main() -> None:
    """Add the results that are named, if any, and render the page."""
    found = Reviewed.read()
    for path in sys.argv[1:]:
        found = found.after(json.loads(Path(path).read_text(encoding="utf-8")))
        found.write()
    PAGE.write_text(found.page, encoding="utf-8")


if __name__ == "__main__":
    main()
