"""Encoding of a report as JSON: an ack carries the report of the workers that a version was forwarded to."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from weightsync.options import WireDtype
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport

#: How deep reports may nest. Both ends refuse more, so that neither exhausts its stack.
MAX_DEPTH: Final = 32

_SECONDS: Final = ("pack_s", "connect_s", "transfer_s", "apply_s")
#: The exclusive upper bounds of these numbers on the wire.
_INCARNATIONS: Final = 2**128
_NUMBERS: Final = 2**64
_LONGEST: Final = sys.float_info.max


def encode_report(report: SyncReport | None) -> bytes:
    """Encode a report as JSON; None is encoded as no bytes. Raises ValueError: it is nested too deep."""
    return b"" if report is None else json.dumps(_report_fields(report, 1)).encode()


def decode_report(data: bytes) -> SyncReport | None:
    """Decode what `encode_report` returned.

    Raises ValueError, LookupError, TypeError, AttributeError: the bytes are not a valid report.
    """
    if not data:
        return None
    try:
        loaded = json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("a report is nested too deep") from error
    return _read(loaded, 1)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"a report has {text} in place of a number")


def _require_shallow(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"reports are nested more than {MAX_DEPTH} deep")


def _report_fields(report: SyncReport, depth: int) -> dict[str, Any]:
    _require_shallow(depth)
    return {
        "model_id": report.model_id,
        "version": report.version,
        "incarnation": report.incarnation,
        "nbytes": report.nbytes,
        "outcomes": _outcome_fields_by_worker(report.outcomes, depth),
        "superseded": {str(worker): list(versions) for worker, versions in report.superseded.items()},
        "not_caught_up": _outcome_fields_by_worker(report.not_caught_up, depth),
        "left": {str(worker): goodbye for worker, goodbye in report.left.items()},
        **{name: getattr(report, name) for name in _SECONDS},
        **({} if report.wire_dtype is None else {"wire_dtype": report.wire_dtype.value}),
        **({"payload_nbytes": {str(w): n for w, n in report.payload_nbytes.items()}} if report.payload_nbytes else {}),
    }


def _outcome_fields_by_worker(outcomes: Mapping[int, Outcome], depth: int) -> dict[str, Any]:
    return {str(worker): _outcome(outcome, depth) for worker, outcome in outcomes.items()}


def _outcome(outcome: Outcome, depth: int) -> dict[str, Any]:
    return {
        "kind": outcome.kind.value,
        "reason": outcome.reason,
        "remote_traceback": outcome.remote_traceback,
        "evidence": outcome.evidence.value,
        "fence": outcome.fence,
        "seconds": outcome.apply_s,
        "nested": None if outcome.nested is None else _report_fields(outcome.nested, depth + 1),
    }


def _read(loaded: dict[str, Any], depth: int) -> SyncReport:
    _require_shallow(depth)
    return SyncReport(
        model_id=_text(loaded["model_id"]),
        version=None if loaded["version"] is None else _number(loaded["version"], _NUMBERS),
        incarnation=_number(loaded["incarnation"], _INCARNATIONS),
        nbytes=_number(loaded["nbytes"], _NUMBERS),
        wire_dtype=WireDtype(loaded["wire_dtype"]) if "wire_dtype" in loaded else None,
        payload_nbytes={_worker(w): _number(n, _NUMBERS) for w, n in loaded.get("payload_nbytes", {}).items()},
        outcomes=_read_all(loaded["outcomes"], depth),
        superseded={
            _worker(worker): tuple(_number(version, _NUMBERS) for version in versions)
            for worker, versions in loaded["superseded"].items()
        },
        not_caught_up=_read_all(loaded["not_caught_up"], depth),
        left={_worker(worker): _text(goodbye) for worker, goodbye in loaded["left"].items()},
        pack_s=_seconds(loaded["pack_s"]),
        connect_s=_seconds(loaded["connect_s"]),
        transfer_s=_seconds(loaded["transfer_s"]),
        apply_s=_seconds(loaded["apply_s"]),
    )


def _read_all(loaded: dict[str, Any], depth: int) -> dict[int, Outcome]:
    return {_worker(worker): _read_outcome(outcome, depth) for worker, outcome in loaded.items()}


def _read_outcome(loaded: dict[str, Any], depth: int) -> Outcome:
    return Outcome(
        kind=OutcomeKind(loaded["kind"]),
        reason=_text(loaded["reason"]),
        remote_traceback=_text(loaded["remote_traceback"]),
        evidence=Evidence(loaded["evidence"]),
        fence=_number(loaded["fence"], _INCARNATIONS),
        apply_s=_seconds(loaded["seconds"]),
        nested=None if loaded["nested"] is None else _read(loaded["nested"], depth + 1),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a report has a {type(value).__name__} in place of text")
    return value


def _number(value: Any, bound: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < bound:
        raise ValueError("a report has a number that is out of range")
    return value


def _worker(key: str) -> int:
    return _number(int(key), _NUMBERS)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST:
        raise ValueError("a report has an invalid duration")
    return float(value)
