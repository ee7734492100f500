"""What became of each worker, in the end: who proved to serve the trainer's last weights, and who did not."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightsync.demo.settings import Casualty, Settings
from weightsync.demo.wire import Proof


class Verdict(enum.Enum):
    """What became of a worker."""

    #: The digest over its live model is the trainer's, and so is the version it says it serves.
    PROVED = "proved"
    #: It was killed as asked, and a report has called it LOST.
    KILLED = "killed, and reported LOST"
    #: It is not there any more, and nobody asked for that.
    LOST = "lost"
    #: It serves other weights, or another version.
    DIFFERS = "serves something else"
    #: It did not answer in time.
    SILENT = "did not answer"


@dataclass(frozen=True, slots=True)
class Fate:
    """One worker's verdict, and what it rests on."""

    index: int
    verdict: Verdict
    #: What the worker answered; None: nothing.
    proof: Proof | None = None
    #: Why, in words; may be empty.
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run."""

    settings: Settings
    seconds: float
    updates: int
    steps: int
    episodes: int
    #: Mean return of the first and of the last episodes; None: none has ended.
    first_mean: float | None
    last_mean: float | None
    #: The trainer's last version, and its digest.
    version: int
    digest: bytes
    fates: Sequence[Fate]

    def of(self, verdict: Verdict) -> list[int]:
        """The workers with this verdict."""
        return [fate.index for fate in self.fates if fate.verdict is verdict]

    @property
    def shortcomings(self) -> list[str]:
        """All that keeps the run from being a success, in words; empty: it is one."""
        found = [] if self.updates else ["no training happened: there was too little time, or nobody to collect"]
        killed = self.of(Verdict.KILLED)
        if self.settings.casualty is Casualty.ONE and not killed:
            found.append("no worker was killed and reported LOST")
        if not self.of(Verdict.PROVED):
            found.append("nobody has proved to serve the trainer's last weights")
        found += [
            f"worker {fate.index}: {fate.verdict.value}" + (f" ({fate.words})" if fate.words else "")
            for fate in self.fates
            if fate.verdict not in (Verdict.PROVED, Verdict.KILLED)
        ]
        return found


def judge(
    workers: Iterable[int],
    killed: frozenset[int],
    lost: Mapping[int, str],
    proofs: Mapping[int, Proof],
    expected: Proof,
) -> list[Fate]:
    """Compare what the workers answered with what the trainer sent last.

    Args:
        workers: all of them.
        killed: those that were killed as asked, and that a report called LOST.
        lost: those that are not there any more, and why.
        proofs: what workers answered.
        expected: the trainer's last version and its digest.
    """
    return [_fate(index, killed, lost.get(index), proofs.get(index), expected) for index in workers]


def _fate(index: int, killed: frozenset[int], lost: str | None, proof: Proof | None, expected: Proof) -> Fate:
    if lost is not None:
        return Fate(index, Verdict.KILLED if index in killed else Verdict.LOST, proof, lost)
    if proof is None:
        return Fate(index, Verdict.SILENT)
    if not expected.digest:
        return Fate(index, Verdict.DIFFERS, proof, "the trainer has no digest to compare with")
    if proof.version != expected.version:
        return Fate(index, Verdict.DIFFERS, proof, f"version {proof.version} instead of {expected.version}")
    if proof.digest != expected.digest:
        return Fate(index, Verdict.DIFFERS, proof, "the digest of its live model is another")
    return Fate(index, Verdict.PROVED, proof)
