"""The mutants of the drivers that live, each with its reason, and the scores that may not fall.

`python tests/protocol/mutation/driven_ledger.py [RESULT...]` takes in results of `run.py --driven`, of whole modules or
of nothing but functions that no hunt has counted yet, and renders docs/driver-mutants.md. What is no mutant any more
leaves the file, a new one comes in without a reason, and the score of each module is that of its result. `--prune`
takes off what is no mutant of the code as it is.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mutated import DRIVEN

FILE = Path(__file__).with_name("driven.toml")
PAGE = Path(__file__).parents[3] / "docs/driver-mutants.md"

#: A mutant: its function, what was there, what stands there now, and how many before it read the same.
Key = tuple[str, str, str, int]

HEAD = """# Mutants of the drivers and of the payload's path

As [those of the machines](code-mutants.md), these are functions changed in one place by mutmut. The tests that reach
the changed lines are asked: those of one process and its forked children that take at most 0.6 s of the processor, at
most 50 a mutant and one second of them together; first the modules' own (`tests/unit/engine`), then in turn one that
reaches little else and one that reaches much. What lives here may still be killed by others, of Ray, RPC or spawned
processes, or by the traces that `make test` records.

Not mutated: prose (texts with a space in them), what is only logged, and what stands outside functions.

`python tests/protocol/mutation/run.py --driven RESULT [MODULE...]` hunts (all: forty minutes on two cores), and
`python tests/protocol/mutation/driven_ledger.py RESULT` takes that in and renders this page. Then each new mutant wants
its reason in `tests/protocol/mutation/driven.toml`, or a test that kills it; `--prune` in place of RESULT takes off
what the code does not have any more. `make verify` hunts another twentieth each day, and fails if one lives that is not
here.
"""


@dataclass(frozen=True)
class Score:
    """Of one module.

    Attributes:
        mutants: how many there are.
        killed: how many of them are killed.
    """

    mutants: int
    killed: int

    @property
    def share(self) -> float:
        """Of the killed."""
        return self.killed / self.mutants if self.mutants else 1.0

    def __str__(self) -> str:
        return f"{self.killed} of {self.mutants} ({100 * self.share:.1f} %)"


@dataclass(frozen=True)
class Ledger:
    """What is committed.

    Attributes:
        scores: of each module.
        reasons: what may be said of several mutants, by name.
        new: functions that came to these modules since their last hunt: they count nowhere yet.
        survivors: the name of the reason why each that lives may; empty: it has none yet.
    """

    scores: dict[str, Score]
    reasons: dict[str, str]
    survivors: dict[Key, str]
    new: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> Ledger:
        """As the file says."""
        told = tomllib.loads(FILE.read_text(encoding="utf-8"))
        scores = {module: Score(**score) for module, score in told["scores"].items()}
        living = {(e["function"], e["was"], e["now"], e["twin"]): e["reason"] for e in told.get("survivor", [])}
        return cls(scores, told["reasons"], living, tuple(told.get("unhunted", ())))

    def after(self, result: Sequence[Sequence[object]]) -> Ledger:
        """With a result taken in: of whole modules, or of functions that are new, which are added to their modules'."""
        found = [(_key(each), each[4] == "survived") for each in result]
        functions = {key[0] for key, _ in found}
        return self._with(found, functions) if functions <= set(self.new) else self._after_whole(found)

    def _with(self, found: Sequence[tuple[Key, bool]], functions: set[str]) -> Ledger:
        scores = dict(self.scores)
        for key, lives in found:
            score = scores[module_of(key)]
            scores[module_of(key)] = Score(score.mutants + 1, score.killed + (not lives))
        living = {key: self.survivors.get(key, "") for key, lives in found if lives}
        new = tuple(name for name in self.new if name not in functions)
        return replace(self, scores=scores, survivors=self.survivors | living, new=new)

    def _after_whole(self, found: Sequence[tuple[Key, bool]]) -> Ledger:
        hunted = {module_of(key) for key, _ in found}
        scores = dict(self.scores)
        for module in hunted:
            lived = [lives for key, lives in found if module_of(key) == module]
            scores[module] = Score(len(lived), len(lived) - sum(lived))
        kept = {key: reason for key, reason in self.survivors.items() if module_of(key) not in hunted}
        living = {key: self.survivors.get(key, "") for key, lives in found if lives}
        new = tuple(name for name in self.new if not any(name.startswith(f"{module}.") for module in hunted))
        return replace(self, scores=scores, survivors=kept | living, new=new)

    def without(self, keys: Iterable[Key]) -> Ledger:
        """What is left of it."""
        gone = set(keys)
        return replace(self, survivors={key: why for key, why in self.survivors.items() if key not in gone})

    @property
    def unhunted(self) -> list[str]:
        """The modules, and the functions of others, whose mutants nobody has hunted yet: they count nowhere."""
        return [*(module for module in DRIVEN if module not in self.scores), *self.new]

    @property
    def whole(self) -> Score:
        """Of all modules together."""
        scores = self.scores.values()
        return Score(sum(each.mutants for each in scores), sum(each.killed for each in scores))

    def write(self) -> None:
        """Into the file."""
        lines = ["# Rendered in docs/driver-mutants.md, and kept by driven_ledger.py.", ""]
        if self.new:
            lines += ["unhunted = [", *(f"  {json.dumps(name)}," for name in self.new), "]", ""]
        lines += ["[scores]"]
        lines += [
            f"{json.dumps(module)} = {{ mutants = {score.mutants}, killed = {score.killed} }}"
            for module, score in sorted(self.scores.items())
        ]
        lines += ["", "[reasons]", *(f"{name} = {json.dumps(why)}" for name, why in sorted(self.reasons.items()))]
        for (function, was, now, twin), reason in sorted(self.survivors.items()):
            lines += ["", "[[survivor]]", f"function = {json.dumps(function)}", f"was = {json.dumps(was)}"]
            lines += [f"now = {json.dumps(now)}", f"twin = {twin}", f"reason = {json.dumps(reason)}"]
        FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def page(self) -> str:
        """The page of the docs."""
        lines = [HEAD, f"**{self.whole} are killed.**", "", "| module | killed |", "|:--|:--|"]
        lines += [f"| `{module}` | {score} |" for module, score in sorted(self.scores.items())]
        if self.unhunted:
            lines += ["", f"**Not hunted yet, and not counted:** {', '.join(f'`{each}`' for each in self.unhunted)}."]
        counted = Counter(self.survivors.values())
        for name, why in sorted(self.reasons.items(), key=lambda each: (-counted[each[0]], each[0])):
            lines += ["", f"## {counted[name]} times: {name.replace('-', ' ')}", "", why, ""]
            lines += [_line(key) for key, reason in sorted(self.survivors.items()) if reason == name]
        return "\n".join(lines) + "\n"


def _key(each: Sequence[object]) -> Key:
    function, was, now, twin, *_ = each
    return str(function), str(was), str(now), int(str(twin))


def _line(key: Key) -> str:
    function, was, now, _ = key
    changed = f"``{was}`` became ``{now}``" if now else f"``{was}`` is gone"
    return f"- `{function.removeprefix('weightsync.')}`: {changed}"


def module_of(key: Key) -> str:
    """Where a function stands: modules and packages begin with small letters, classes and functions follow them."""
    return next(module for module in DRIVEN if key[0].startswith(f"{module}."))


def unknown(ledger: Ledger) -> list[Key]:
    """The survivors that are no mutants of the code as it is."""
    from making import mutants  # noqa: PLC0415 - what renders the page needs no mutmut

    known = {mutant.key for module in DRIVEN for mutant in mutants(module)}
    return [key for key in ledger.survivors if key not in known]


def main() -> None:
    """Take in results, if some are named, and render the page."""
    ledger = Ledger.read()
    if sys.argv[1:] == ["--prune"]:
        ledger = ledger.without(unknown(ledger))
    else:
        for path in sys.argv[1:]:
            ledger = ledger.after(json.loads(Path(path).read_text(encoding="utf-8")))
    ledger.write()
    PAGE.write_text(ledger.page, encoding="utf-8")


if __name__ == "__main__":
    main()
