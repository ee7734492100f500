"""One send to several groups of workers, each with weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from weightsync.errors import WorkerLostError
from weightsync.options import OnFailure
from weightsync.report import SyncReport
from weightsync.timing import Deadline

#: Weights, and the ids of the workers that get them; None: all.
Groups = Sequence[tuple[Any, list[int] | None]]


def send_to_groups(
    send: Callable[..., SyncReport], groups: Groups, deadline: Deadline, failing: OnFailure
) -> SyncReport:
    """Send to one group after another; each is a version of its own.

    Raises:
        As ``send``, once every group has been served.
    """
    if len(groups) == 1:
        return send(*groups[0], timeout=deadline.remaining, on_failure=failing)
    merged = together([_served(send, group, deadline) for group in groups])
    if failing is OnFailure.RAISE:
        merged.raise_on_failure()
    return merged


def _served(send: Callable[..., SyncReport], group: tuple[Any, list[int] | None], deadline: Deadline) -> SyncReport:
    try:
        return send(*group, timeout=deadline.remaining, on_failure=OnFailure.REPORT)
    except WorkerLostError as error:
        if not isinstance(error.report, SyncReport):
            raise
        return error.report


def together(reports: Sequence[SyncReport]) -> SyncReport:
    """One report of several: ``version`` is the newest of theirs."""
    versions = [report.version for report in reports if report.version is not None]
    outcomes = {worker: outcome for report in reports for worker, outcome in report.outcomes.items()}
    return replace(
        reports[-1],
        version=max(versions, default=None),
        outcomes=dict(sorted(outcomes.items())),
        nbytes=sum(report.nbytes for report in reports),
        preparing=sum(report.preparing for report in reports),
        connect_s=sum(report.connect_s for report in reports),
        transferring=sum(report.transferring for report in reports),
        applying=max(report.applying for report in reports),
        superseded={w: versions for report in reports for w, versions in report.superseded.items()},
        not_caught_up={w: outcome for report in reports for w, outcome in report.not_caught_up.items()},
    )
