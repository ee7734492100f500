"""Checks reports: each must say what the sender's data says at that time, and a version ends once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightsync.protocol import sender as sending
from weightsync.protocol.report import Outcome, OutcomeKind
from weightsync.verify.decoding import decoded


class FalseReportError(ValueError):
    """A report says what it cannot say."""


@dataclass
class Reports:
    """One sender's reports: which versions ended without a report, and what a report may say now."""

    _over: dict[int, sending.Conclude] = field(default_factory=dict)
    #: For each worker, the versions that were given up before it answered.
    _abandoned: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    #: The event that ended a caller's wait or its update; the next line must be its report.
    _due: object = None

    @property
    def due(self) -> object:
        """The event that must be reported now; None: there is none."""
        return self._due

    def step(self, event: object, step: sending.Step) -> None:
        """Follow a step."""
        ends = isinstance(event, sending.Deadline | sending.Abandon) and step.input is not None
        self._due = event if ends else None
        for effect in step.effects:
            if isinstance(effect, sending.Conclude):
                self._conclude(effect)

    def _conclude(self, effect: sending.Conclude) -> None:
        out = effect.outstanding
        self._over[out.version] = effect
        for worker, outcome in out.outcomes.items():
            if outcome.kind is OutcomeKind.ABANDONED:
                self._abandoned[worker].add(out.version)

    def expected(self, recorded: Mapping[str, Any], data: sending.SenderData) -> dict[str, object]:
        """The contents that a report of this version must have.

        Raises FalseReportError: this version cannot be reported now.
        """
        outcomes = decoded(Mapping[int, Outcome], recorded["outcomes"])
        superseded = decoded(Mapping[int, tuple[int, ...]], recorded["superseded"])
        version, timed_out = recorded["version"], isinstance(self._due, sending.Deadline)
        self._due = None
        must: dict[str, object] = {"incarnation": data.incarnation, "not_caught_up": {}}
        if version is None:
            return must | {"outcomes": _all_ended(outcomes, data), "superseded": {}, "left": {}}
        must["superseded"] = self._given_up(superseded, outcomes)
        over, out = self._over.pop(version, None), data.outstanding
        if over is not None:
            return must | {
                "outcomes": over.outstanding.outcomes,
                "not_caught_up": over.not_caught_up,
                "left": over.left,
            }
        if out is None or out.version != version:
            raise FalseReportError(f"version {version} is not outstanding, and no caller waits for its report")
        kind = OutcomeKind.TIMED_OUT if timed_out else OutcomeKind.PENDING
        owing = {worker: Outcome(kind=kind, reason=_reason(outcomes, worker, kind)) for worker in out.owed}
        return must | {"outcomes": {**out.outcomes, **owing}, "left": data.left}

    def _given_up(
        self, superseded: Mapping[int, tuple[int, ...]], outcomes: Mapping[int, Outcome]
    ) -> dict[int, tuple[int, ...]]:
        """The versions that were given up in favour of this one, as far as they were."""
        known = {
            worker: tuple(v for v in versions if v in self._abandoned[worker])
            for worker, versions in superseded.items()
        }
        return {worker: versions for worker, versions in known.items() if versions and worker in outcomes}


def _reason(outcomes: Mapping[int, Outcome], worker: int, kind: OutcomeKind) -> str:
    """The reason of a LATE outcome is free text; every other reason is fixed."""
    outcome = outcomes.get(worker)
    return outcome.reason if outcome is not None and kind is OutcomeKind.TIMED_OUT else ""


def _all_ended(outcomes: Mapping[int, Outcome], data: sending.SenderData) -> dict[int, Outcome]:
    """The outcomes of a send that was refused because no target has a link."""
    return {
        worker: sending.ended(entry) for worker, entry in data.workers.items() if worker in outcomes and not entry.open
    }
