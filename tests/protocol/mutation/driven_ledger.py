"""The ledger of the drivers' mutants: the survivors, each with its reason, and the score of each module.

`python tests/protocol/mutation/driven_ledger.py [RESULT...]` adds results of `run.py --driven` (of whole modules, or of
all mutants of some functions), counts the mutants again and renders driver-mutants.md. Entries that are no longer
mutants of the code are removed, and new survivors are added without a reason. `--prune` does the same without a result.
`--living RESULT...` takes results of `run.py --driven --living` and removes the entries that are killed now.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mutated import DRIVEN

FILE = Path(__file__).with_name("driven.toml")
PAGE = Path(__file__).with_name("driver-mutants.md")

#: A mutant: its function, the original lines, the lines in their place, and how many before it read the same.
Key = tuple[str, str, str, int]

HEAD = """# Mutants of the drivers and of the payload's path

A mutant is one function, changed in one place by mutmut, as in [the mutants of the machines](code-mutants.md). A test
kills a mutant by failing on it. Only tests that execute the changed lines are run: tests of one process and its forked
children that take at most 0.6 s of processor time, at most 150 of them for each mutant, and at most two seconds for all
of them together. The tests of the module itself run first. A mutant that survives here may still be killed by a test
that is not run: one that uses Ray, RPC or spawned processes, or the check of the traces that `make test` records.

Not mutated: sentences (texts with a space in them), calls of the logger, and code outside functions.

`python tests/protocol/mutation/run.py --driven RESULT [MODULE...]` runs the mutants (all of them: forty minutes on two
cores). `python tests/protocol/mutation/driven_ledger.py RESULT` records the result and renders this page. Each new
survivor then needs a reason in `tests/protocol/mutation/driven.toml`, or a test that kills it. `--prune` in place of
RESULT removes the mutants that the code no longer has. After a change of tests alone, `--living` with both commands
asks again about those that live, and about no others. Each day `make verify` runs another twentieth of the mutants,
and fails if one survives that is not listed here.
"""


@dataclass(frozen=True)
class Score:
    """The score of a module.

    Attributes:
        mutants: how many there are.
        killed: how many of them are killed.
    """

    mutants: int
    killed: int

    @property
    def share(self) -> float:
        """The share of the mutants that are killed."""
        return self.killed / self.mutants if self.mutants else 1.0

    def __str__(self) -> str:
        return f"{self.killed} of {self.mutants} ({100 * self.share:.1f} %)"


@dataclass(frozen=True)
class Ledger:
    """The committed results.

    Attributes:
        scores: the score of each module.
        reasons: the reasons, by name; several survivors may share one.
        new: functions that were added to these modules and not run since. Their mutants are not counted.
        survivors: the name of each survivor's reason; empty: it has none yet.
    """

    scores: dict[str, Score]
    reasons: dict[str, str]
    survivors: dict[Key, str]
    new: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> Ledger:
        """Read the ledger from its file."""
        loaded = tomllib.loads(FILE.read_text(encoding="utf-8"))
        scores = {module: Score(**score) for module, score in loaded["scores"].items()}
        living = {(e["function"], e["was"], e["now"], e["twin"]): e["reason"] for e in loaded.get("survivor", [])}
        return cls(scores, loaded["reasons"], living, tuple(loaded.get("unhunted", ())))

    def after(self, result: Sequence[Sequence[object]], mutants: Mapping[str, int]) -> Ledger:
        """The ledger with a result added, which has all mutants of some functions.

        Args:
            result: each mutant, and what became of it.
            mutants: how many mutants each function of the current code has.
        """
        found = {_key(each): each[4] == "survived" for each in result}
        functions = {key[0] for key in found}
        modules = {module_of((name,)) for name in mutants}
        # All functions of a module that was never run are new.
        new = {*self.new, *(each for each in mutants if module_of((each,)) in modules - self.scores.keys())}
        kept = {key: why for key, why in self.survivors.items() if key[0] not in functions}
        living = {key: self.survivors.get(key, "") for key, lives in found.items() if lives}
        after = replace(self, survivors=kept | living, new=tuple(sorted((new & mutants.keys()) - functions)))
        return replace(after, scores={module: after._score(module, mutants) for module in self.scores.keys() | modules})

    def _score(self, module: str, mutants: Mapping[str, int]) -> Score:
        """The score of a module's functions, without those that are new."""
        counted = [of for name, of in mutants.items() if name not in self.new and module_of((name,)) == module]
        lives = sum(module_of(key) == module for key in self.counted)
        return Score(sum(counted), sum(counted) - lives)

    @property
    def counted(self) -> list[Key]:
        """The survivors that the scores count: those of functions that are not new."""
        return [key for key in self.survivors if key[0] not in self.new]

    def without(self, keys: Iterable[Key]) -> Ledger:
        """The ledger without these survivors."""
        gone = set(keys)
        return replace(self, survivors={key: why for key, why in self.survivors.items() if key not in gone})

    @property
    def unhunted(self) -> list[str]:
        """The modules, and the functions of other modules, whose mutants were never run. They are not counted."""
        return [*(module for module in DRIVEN if module not in self.scores), *self.new]

    @property
    def whole(self) -> Score:
        """The score of all modules together."""
        scores = self.scores.values()
        return Score(sum(each.mutants for each in scores), sum(each.killed for each in scores))

    def write(self) -> None:
        """Write the ledger to its file."""
        lines = ["# Rendered in driver-mutants.md, and kept by driven_ledger.py.", ""]
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
        """The page that shows the ledger."""
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


def killed(result: Sequence[Sequence[object]]) -> set[Key]:
    """The mutants of a result that are killed."""
    return {_key(each) for each in result if each[4] != "survived"}


def _line(key: Key) -> str:
    function, was, now, _ = key
    changed = f"``{was}`` became ``{now}``" if now else f"``{was}`` is gone"
    return f"- `{function.removeprefix('weightsync.')}`: {changed}"


def module_of(key: Sequence[object]) -> str:
    """The module that a function is in, found by the beginning of its full name."""
    return next(module for module in DRIVEN if str(key[0]).startswith(f"{module}."))


def known(modules: Iterable[str] = DRIVEN) -> list[Key]:
    """The keys of all mutants of the current code."""
    from making import mutants  # noqa: PLC0415 - rendering the page needs no mutmut

    return [mutant.key for module in modules for mutant in mutants(module)]


def main() -> None:
    """Add the results that are named, if any, and render the page."""
    ledger = Ledger.read()
    if sys.argv[1:]:
        keys, how, paths = known(), sys.argv[1], [path for path in sys.argv[1:] if not path.startswith("--")]
        found = [each for path in paths for each in json.loads(Path(path).read_text(encoding="utf-8"))]
        ledger = ledger.without(ledger.survivors.keys() - set(keys))
        if how == "--living":
            ledger, found = ledger.without(killed(found)), []
        ledger = ledger.after(found, Counter(key[0] for key in keys))
    ledger.write()
    PAGE.write_text(ledger.page, encoding="utf-8")


if __name__ == "__main__":
    main()
