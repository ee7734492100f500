"""A report as bytes: what became of a version where a worker handed it on to. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from weightsync.report import Evidence, Outcome, OutcomeKind, SyncReport

_NUMBERS = ("preparing", "transferring", "applying")


def encode_report(report: SyncReport | None) -> bytes:
    """The report as JSON; empty for None."""
    return b"" if report is None else json.dumps(_told(report)).encode()


def decode_report(data: bytes) -> SyncReport | None:
    """The report that `encode_report` made the bytes of.

    Raises:
        ValueError, LookupError, TypeError: no report of ours.
    """
    return _read(json.loads(data)) if data else None


def _told(report: SyncReport) -> dict[str, Any]:
    return {
        "model_id": report.model_id,
        "version": report.version,
        "incarnation": report.incarnation,
        "nbytes": report.nbytes,
        "outcomes": _all(report.outcomes),
        "superseded": {str(worker): list(versions) for worker, versions in report.superseded.items()},
        "not_caught_up": _all(report.not_caught_up),
        "left": {str(worker): goodbye for worker, goodbye in report.left.items()},
        **{name: getattr(report, name) for name in _NUMBERS},
    }


def _all(outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
    return {str(worker): _outcome(outcome) for worker, outcome in outcomes.items()}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "kind": outcome.kind.value,
        "reason": outcome.reason,
        "remote_traceback": outcome.remote_traceback,
        "evidence": outcome.evidence.value,
        "fence": outcome.fence,
        "seconds": outcome.seconds,
        "nested": None if outcome.nested is None else _told(outcome.nested),
    }


def _read(told: dict[str, Any]) -> SyncReport:
    return SyncReport(
        model_id=str(told["model_id"]),
        version=None if told["version"] is None else int(told["version"]),
        incarnation=int(told["incarnation"]),
        nbytes=int(told["nbytes"]),
        outcomes=_read_all(told["outcomes"]),
        superseded={int(worker): tuple(map(int, versions)) for worker, versions in told["superseded"].items()},
        not_caught_up=_read_all(told["not_caught_up"]),
        left={int(worker): str(goodbye) for worker, goodbye in told["left"].items()},
        **{name: float(told[name]) for name in _NUMBERS},
    )


def _read_all(told: dict[str, Any]) -> dict[int, Outcome]:
    return {int(worker): _read_outcome(outcome) for worker, outcome in told.items()}


def _read_outcome(told: dict[str, Any]) -> Outcome:
    return Outcome(
        kind=OutcomeKind(told["kind"]),
        reason=str(told["reason"]),
        remote_traceback=str(told["remote_traceback"]),
        evidence=Evidence(told["evidence"]),
        fence=int(told["fence"]),
        seconds=float(told["seconds"]),
        nested=None if told["nested"] is None else _read(told["nested"]),
    )
