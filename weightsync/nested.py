"""A report as bytes: what became of a version where a worker handed it on to. No pickle."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from weightsync.report import Evidence, Outcome, OutcomeKind, SyncReport

#: Reports in reports in reports: more is refused on both sides, so that neither runs out of stack.
MAX_DEPTH: Final = 32

_SECONDS: Final = ("preparing", "connect_s", "transferring", "applying")
#: The widths that the wire has for these numbers.
_INCARNATIONS: Final = 2**128
_NUMBERS: Final = 2**64
_LONGEST: Final = sys.float_info.max


def encode_report(report: SyncReport | None) -> bytes:
    """The report as JSON; empty for None.

    Raises:
        ValueError: it is nested too deep.
    """
    return b"" if report is None else json.dumps(_told(report, 1)).encode()


def decode_report(data: bytes) -> SyncReport | None:
    """The report that `encode_report` made the bytes of.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: no report of ours.
    """
    if not data:
        return None
    try:
        told = json.loads(data.decode(), parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("a report is nested too deep") from error
    return _read(told, 1)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"a report says {text} where a number belongs")


def _require_shallow(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"reports are nested more than {MAX_DEPTH} deep")


def _told(report: SyncReport, depth: int) -> dict[str, Any]:
    _require_shallow(depth)
    return {
        "model_id": report.model_id,
        "version": report.version,
        "incarnation": report.incarnation,
        "nbytes": report.nbytes,
        "outcomes": _all(report.outcomes, depth),
        "superseded": {str(worker): list(versions) for worker, versions in report.superseded.items()},
        "not_caught_up": _all(report.not_caught_up, depth),
        "left": {str(worker): goodbye for worker, goodbye in report.left.items()},
        **{name: getattr(report, name) for name in _SECONDS},
    }


def _all(outcomes: Mapping[int, Outcome], depth: int) -> dict[str, Any]:
    return {str(worker): _outcome(outcome, depth) for worker, outcome in outcomes.items()}


def _outcome(outcome: Outcome, depth: int) -> dict[str, Any]:
    return {
        "kind": outcome.kind.value,
        "reason": outcome.reason,
        "remote_traceback": outcome.remote_traceback,
        "evidence": outcome.evidence.value,
        "fence": outcome.fence,
        "seconds": outcome.seconds,
        "nested": None if outcome.nested is None else _told(outcome.nested, depth + 1),
    }


def _read(told: dict[str, Any], depth: int) -> SyncReport:
    _require_shallow(depth)
    return SyncReport(
        model_id=_text(told["model_id"]),
        version=None if told["version"] is None else _number(told["version"], _NUMBERS),
        incarnation=_number(told["incarnation"], _INCARNATIONS),
        nbytes=_number(told["nbytes"], _NUMBERS),
        outcomes=_read_all(told["outcomes"], depth),
        superseded={
            _worker(worker): tuple(_number(version, _NUMBERS) for version in versions)
            for worker, versions in told["superseded"].items()
        },
        not_caught_up=_read_all(told["not_caught_up"], depth),
        left={_worker(worker): _text(goodbye) for worker, goodbye in told["left"].items()},
        preparing=_seconds(told["preparing"]),
        connect_s=_seconds(told["connect_s"]),
        transferring=_seconds(told["transferring"]),
        applying=_seconds(told["applying"]),
    )


def _read_all(told: dict[str, Any], depth: int) -> dict[int, Outcome]:
    return {_worker(worker): _read_outcome(outcome, depth) for worker, outcome in told.items()}


def _read_outcome(told: dict[str, Any], depth: int) -> Outcome:
    return Outcome(
        kind=OutcomeKind(told["kind"]),
        reason=_text(told["reason"]),
        remote_traceback=_text(told["remote_traceback"]),
        evidence=Evidence(told["evidence"]),
        fence=_number(told["fence"], _INCARNATIONS),
        seconds=_seconds(told["seconds"]),
        nested=None if told["nested"] is None else _read(told["nested"], depth + 1),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a report has a {type(value).__name__} where text belongs")
    return value


def _number(value: Any, bound: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < bound:
        raise ValueError("a report has a number that is none of ours")
    return value


def _worker(key: str) -> int:
    return _number(int(key), _NUMBERS)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST:
        raise ValueError("a report has a time that is none")
    return float(value)
