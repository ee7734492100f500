"""Handing a version on: a worker that has workers of its own updates them before it answers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from weightsync.context import MISSING, optional
from weightsync.errors import SyncError
from weightsync.report import Outcome, OutcomeKind, SyncReport

#: TorchRL's collectors keep the schemes that lead to their own workers under this name; None or empty: they have none.
_SCHEMES = "_weight_sync_schemes"


def has_workers(context: Any, model_id: str) -> bool:
    """Whether weights of this model are to be handed on by ``context.update_policy_weights_``.

    A context that has this method is taken at its word. A TorchRL collector always has it: it hands on only if it has a
    scheme for the model, and would otherwise write the weights into its own policy, which serves them already.
    """
    if context is None or optional(context, "update_policy_weights_") is MISSING:
        return False
    schemes = optional(context, _SCHEMES)
    return schemes is MISSING or bool(schemes and model_id in schemes)


def hand_on(context: Any, model_id: str, version: int | None, weights: Callable[[], Any]) -> SyncReport | None:
    """Have ``context`` update its own workers.

    Returns:
        What became of it: the report that its method returned, or that the error it raised carries; for any other
        error a report of one outcome, ABANDONED, with the reason; None if it returned nothing of the kind.
    """
    try:
        found = context.update_policy_weights_(model_id=model_id, policy_or_weights=weights())
    except SyncError as error:
        if isinstance(error.report, SyncReport):
            return error.report
        return _unknown(model_id, version, error)
    except Exception as error:  # noqa: BLE001 - a user's method may raise anything, and the sender is told
        return _unknown(model_id, version, error)
    return found if isinstance(found, SyncReport) else None


def _unknown(model_id: str, version: int | None, error: Exception) -> SyncReport:
    outcome = Outcome(
        kind=OutcomeKind.ABANDONED,
        reason=f"update_policy_weights_() raised {error!r}: which of its workers were updated is not known",
        remote_traceback="".join(traceback.format_exception(error)),
    )
    return SyncReport(model_id=model_id, version=version, incarnation=0, outcomes={0: outcome})
