"""A verdict as plain data, for `weightsync check --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weightsync.model.verdict import Verdict


def record(verdict: Verdict) -> dict[str, Any]:
    """Return all that is known of a verdict, ready for JSON."""
    configuration, outcome = verdict.configuration, verdict.outcome
    found: dict[str, Any] = {
        "name": configuration.name,
        "module": configuration.module,
        "config": configuration.config.text,
        "guarantees": list(configuration.guarantees),
        "kind": configuration.purpose.value,
        "expected": configuration.expected.value,
        "violates": configuration.violates,
        "pinned": asdict(configuration.pinned) if configuration.pinned else None,
        "as_expected": verdict.as_expected,
        "found": list(verdict.found),
        "complaints": list(verdict.complaints),
    }
    if outcome is not None:
        findings = outcome.findings
        found |= {
            "ending": outcome.ending.value,
            "exit_code": outcome.exit_code,
            "seconds": round(outcome.seconds, 2),
            "counts": asdict(findings.counts) if findings.counts else None,
            "trace": [asdict(step) for step in findings.trace],
            "actions": [asdict(action) for action in findings.actions],
            "warnings": list(findings.warnings),
            "errors": [*findings.errors, *outcome.loose] if verdict.complaints else list(findings.errors),
        }
    return found
