"""Relaying: a worker with its own workers updates them before it answers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, SyncError
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport
from weightsync.weights.loader import has_not_run

#: Takes the live version and a function that reads its weights; returns the report of the worker's own workers.
RelayWeights = Callable[[int | None, Callable[[], Any]], SyncReport | None]

#: The attribute in which TorchRL's collectors keep the schemes to their own workers; None or empty: they have none.
_SCHEMES = "_weight_sync_schemes"
#: The attribute that counts the versions with which their trajectories are tagged.
_COUNTER = "policy_version_tracker"


def is_torchrl_collector(context: Any) -> bool:
    """Whether this is a TorchRL collector with schemes to its workers: these take weights as a TensorDict."""
    return context is not None and optional(context, _SCHEMES) is not MISSING


def has_worker_scheme(context: Any, model_id: str) -> bool:
    """Whether this is a TorchRL collector with a scheme to its own workers for that model."""
    schemes = MISSING if context is None else optional(context, _SCHEMES)
    return schemes is not MISSING and bool(schemes) and model_id in schemes


def relay_call(context: Any, model_id: str) -> RelayWeights | None:
    """What to do with a version of this model once it is live and before it is acked, or None.

    A context that has ``update_policy_weights_`` has workers of its own. A TorchRL collector always has that method,
    but passes weights on only if it has a scheme for the model. Without one it would write the weights into its own
    policy, which serves them already; so the version is only counted, if the collector counts versions.
    """
    if context is None or optional(context, "update_policy_weights_") is MISSING:
        return None
    if optional(context, _SCHEMES) is MISSING or has_worker_scheme(context, model_id):
        return lambda version, weights: _call_and_report(
            model_id, version, lambda: _update(context, model_id, weights())
        )
    if optional(context, _COUNTER) in (MISSING, None):
        return None
    return lambda version, _: _call_and_report(model_id, version, context.increment_version)


def _update(context: Any, model_id: str, weights: Any) -> Any:
    return context.update_policy_weights_(model_id=model_id, policy_or_weights=weights)


def _call_and_report(model_id: str, version: int | None, call: Callable[[], Any]) -> SyncReport | None:
    """Call the user's method, and return the outcome.

    Returns:
        The report that the user's method returned, or that the error it raised carries; for any other error a report of
        one outcome, ABANDONED, with the reason; None if the method returned no report.
    """
    try:
        result = _run(call)
    except SyncError as error:
        return error.report if isinstance(error.report, SyncReport) else _unknown_outcome(model_id, version, error)
    except Exception as error:  # noqa: BLE001 - a user's method may raise anything, and the sender is notified
        return _unknown_outcome(model_id, version, error)
    return result if isinstance(result, SyncReport) else None


def _run(call: Callable[[], Any]) -> Any:
    found = call()
    if has_not_run(found):
        raise ConfigurationError("the method is async, and nothing here awaits it: nothing of it has run.")
    return found


def _unknown_outcome(model_id: str, version: int | None, error: Exception) -> SyncReport:
    outcome = Outcome(
        kind=OutcomeKind.ABANDONED,
        reason=f"relaying it raised {error!r}: which of the worker's own workers were updated is not known",
        remote_traceback="".join(traceback.format_exception(error)),
    )
    return SyncReport(model_id=model_id, version=version, incarnation=0, outcomes={0: outcome})
