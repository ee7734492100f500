"""`mutants.toml`: the result for every mutant, the reason why each survivor may live, and the minimum score."""

from __future__ import annotations

import json
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from modelcheck.mutants.hunt import Fate
from weightsync.errors import ConfigurationError

#: The ledger of weightsync's own model.
LEDGER = Path(__file__).resolve().parents[1] / "mutants.toml"
_MARK = "# `python spec/check.py mutants --pin` writes all that follows, except the reasons.\n"


@dataclass(frozen=True, slots=True)
class Entry:
    """The known result for one mutant.

    Attributes:
        name: its name.
        fate: its result.
        by: the property or situation that decided.
        where: the configuration that decided, which is tried first.
        reason: why it may survive; only for survivors.
    """

    name: str
    fate: Fate
    by: str = ""
    where: str = ""
    reason: str = ""

    @property
    def lives(self) -> bool:
        """Whether TLC can evaluate it, and no check notices it."""
        return not self.fate.killed and self.fate is not Fate.INVALID


@dataclass(frozen=True)
class Score:
    """The counts of mutants by result.

    Attributes:
        entries: the results of the mutants.
    """

    entries: Sequence[Entry]

    @cached_property
    def fates(self) -> Counter[Fate]:
        """The number of mutants with each result, in the order of `Fate`."""
        return Counter(sorted((entry.fate for entry in self.entries), key=list(Fate).index))

    @property
    def killed(self) -> int:
        """The number of mutants that were killed."""
        return sum(count for fate, count in self.fates.items() if fate.killed)

    @property
    def valid(self) -> int:
        """The number of mutants that TLC could evaluate."""
        return len(self.entries) - self.fates[Fate.INVALID]

    @property
    def percent(self) -> float:
        """The percentage of valid mutants that were killed; mutants equivalent within the bounds count as alive."""
        return 100.0 * self.killed / self.valid if self.valid else 0.0

    @property
    def killers(self) -> tuple[tuple[str, Fate, int], ...]:
        """The properties and situations that killed mutants, those with the most kills first."""
        found = Counter((entry.by, entry.fate.value) for entry in self.entries if entry.fate.killed)
        return tuple(
            (by, Fate(fate), count) for (by, fate), count in sorted(found.items(), key=lambda one: (-one[1], one[0]))
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The contents of the ledger's file.

    Attributes:
        path: the path of the file.
        module: the module that is changed.
        roots: the definitions that specify the behaviour.
        untouched: definitions that are not changed.
        lookout: the constraint of the hunting configurations that is always true and reports the situations reached.
        ratchet: the minimum score, in percent.
        hunts: the hunting configurations in the order they are tried; the situations that the model reaches in each.
        entries: a mutant's name to its result.
    """

    path: Path
    module: str
    roots: tuple[str, ...]
    untouched: tuple[str, ...]
    lookout: str
    ratchet: float
    hunts: Mapping[str, frozenset[str]]
    entries: Mapping[str, Entry]

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Read a ledger.

        Raises:
            ConfigurationError: it is missing or malformed.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
            return _ledger(path, document)
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(f"The ledger {path} cannot be read: {error}.") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"The ledger {path} is wrong: {error!r}.") from error

    def known(self, name: str) -> Entry | None:
        """Return the result for a mutant."""
        return self.entries.get(name)

    @property
    def score(self) -> Score:
        """The score of all entries."""
        return Score(tuple(self.entries.values()))

    def kills(self) -> defaultdict[str, Counter[str]]:
        """Return for each definition how many of its mutants died in each configuration."""
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for entry in self.entries.values():
            if entry.fate.killed:
                found[entry.name.partition(":")[0]][entry.where] += 1
        return found

    def after(self, seen: Iterable[Entry], names: Iterable[str]) -> Ledger:
        """Return the ledger after a run.

        Args:
            seen: the results of the run; survivors keep their reasons.
            names: all mutants in their order; entries for others are dropped.
        """
        known = {**self.entries, **{entry.name: self._explained(entry) for entry in seen}}
        return replace(self, entries={name: known[name] for name in names if name in known})

    def write(self, hunts: Mapping[str, frozenset[str]]) -> None:
        """Write the results and the situations reached. The ratchet only increases."""
        head, mark, _ = self.path.read_text(encoding="utf-8").partition(_MARK)
        ratchet = max(self.ratchet, _floor(self.score.percent))
        lines = [head, mark, f"[ratchet]\nscore = {ratchet}\n"]
        lines += [_hunt(name, met) for name, met in hunts.items()]
        lines += [_mutant(entry) for entry in self.entries.values()]
        self.path.write_text("".join(lines), encoding="utf-8")

    def _explained(self, entry: Entry) -> Entry:
        before = self.known(entry.name)
        return replace(entry, reason=before.reason) if before and entry.lives else entry


def deadliest(kills: Mapping[str, int]) -> str:
    """Return the configuration in which most mutants died; none if none has."""
    return max(kills, key=kills.__getitem__, default="")


def _ledger(path: Path, document: Mapping[str, Any]) -> Ledger:
    model = document["model"]
    entries = [Entry(**{**found, "fate": Fate(found["fate"])}) for found in document.get("mutant", ())]
    return Ledger(
        path,
        model["module"],
        tuple(model["roots"]),
        tuple(model["untouched"]),
        model["lookout"],
        float(document["ratchet"]["score"]),
        {found["configuration"]: frozenset(found["met"]) for found in document["hunt"]},
        {entry.name: entry for entry in entries},
    )


def _floor(score: float) -> float:
    return int(score * 10) / 10


def _hunt(name: str, met: frozenset[str]) -> str:
    situations = "".join(f"  {_quoted(each)},\n" for each in sorted(met))
    return f'\n[[hunt]]\nconfiguration = "{name}"\nmet = [\n{situations}]\n'


def _mutant(entry: Entry) -> str:
    lines = [f"name = {_quoted(entry.name)}", f'fate = "{entry.fate.value}"']
    for key, value in (("by", entry.by), ("where", entry.where), ("reason", entry.reason)):
        if value:
            lines.append(f"{key} = {_quoted(value)}")
    return "\n[[mutant]]\n" + "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)
