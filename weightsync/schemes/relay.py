"""Handing a version on: a worker that has workers of its own updates them before it answers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from weightsync.errors import SyncError
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport
from weightsync.weights.context import MISSING, optional

#: Told which version is live, and given a way to read its weights; says what became of it further on.
HandOn = Callable[[int | None, Callable[[], Any]], SyncReport | None]

#: TorchRL's collectors keep the schemes that lead to their own workers under this name; None or empty: they have none.
_SCHEMES = "_weight_sync_schemes"
#: And here, what counts the versions that their trajectories are tagged with.
_COUNTER = "policy_version_tracker"


def is_torchrls(context: Any) -> bool:
    """Whether this is a TorchRL collector that wires its workers' schemes: these take weights as a TensorDict."""
    return context is not None and optional(context, _SCHEMES) is not MISSING


def leads_on(context: Any, model_id: str) -> bool:
    """Whether this is a TorchRL collector with a scheme that leads to its own workers' models of that name."""
    schemes = MISSING if context is None else optional(context, _SCHEMES)
    return schemes is not MISSING and bool(schemes) and model_id in schemes


def handing_on(context: Any, model_id: str) -> HandOn | None:
    """What is to be done with a version of this model once it is live, before we answer for it; None: nothing.

    A context that has ``update_policy_weights_`` is taken at its word: it has workers of its own. A TorchRL collector
    always has that method: it hands on only if it has a scheme for the model. Without one it would write the weights
    into its own policy, which serves them already; what is left to do is to count the version, if it counts.
    """
    if context is None or optional(context, "update_policy_weights_") is MISSING:
        return None
    if optional(context, _SCHEMES) is MISSING or leads_on(context, model_id):
        return lambda version, weights: _guarded(model_id, version, lambda: _update(context, model_id, weights()))
    if optional(context, _COUNTER) in (MISSING, None):
        return None
    return lambda version, _: _guarded(model_id, version, context.increment_version)


def _update(context: Any, model_id: str, weights: Any) -> Any:
    return context.update_policy_weights_(model_id=model_id, policy_or_weights=weights)


def _guarded(model_id: str, version: int | None, call: Callable[[], Any]) -> SyncReport | None:
    """What became of it.

    Returns:
        The report that the user's method returned, or that the error it raised carries; for any other error a report of
        one outcome, ABANDONED, with the reason; None if it returned nothing of the kind.
    """
    try:
        found = call()
    except SyncError as error:
        return error.report if isinstance(error.report, SyncReport) else _unknown(model_id, version, error)
    except Exception as error:  # noqa: BLE001 - a user's method may raise anything, and the sender is told
        return _unknown(model_id, version, error)
    return found if isinstance(found, SyncReport) else None


def _unknown(model_id: str, version: int | None, error: Exception) -> SyncReport:
    outcome = Outcome(
        kind=OutcomeKind.ABANDONED,
        reason=f"handing it on raised {error!r}: which of the worker's own workers were updated is not known",
        remote_traceback="".join(traceback.format_exception(error)),
    )
    return SyncReport(model_id=model_id, version=version, incarnation=0, outcomes={0: outcome})
