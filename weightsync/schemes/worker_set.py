"""The workers that `init_on_sender` was given: how many, their first weights, and sends to groups of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch.nn
from msgspec.structs import replace
from tensordict import TensorDictBase

from weightsync.clock import Deadline
from weightsync.engine.arguments import require_count, require_worker_id
from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, RefusedError, WeightSyncError, WorkerLostError
from weightsync.options import OnFailure
from weightsync.protocol.report import SyncReport
from weightsync.weights.packing import digest_of_weights
from weightsync.weights.reading import Weights
from weightsync.weights.selection import Selection
from weightsync.weights.strategy import WeightStrategy

#: Weights, and the ids of the workers that get them; None: all.
Groups = Sequence[tuple[Any, list[int] | None]]
#: A method of `SequentialSends`.
Send = Callable[[Any, Sequence[int] | None, Deadline, OnFailure], SyncReport]


def send_to_groups(
    send: Send, groups: Groups, deadline: Deadline, on_failure: OnFailure, members: Callable[[], Collection[int]]
) -> SyncReport:
    """Send to one group after another; each is a version of its own.

    Args:
        members: the workers there are. One that left meanwhile is in a report, and gets nothing.

    Raises:
        As ``send``. If the first group's weights cannot be sent, nothing was sent; if another group's cannot, that
        error is raised once every other group has been served, and a note says what was sent to them.
    """
    if len(groups) == 1:
        return send(*groups[0], deadline, on_failure)
    reports: list[SyncReport] = []
    errors: list[WeightSyncError] = []
    for weights, workers in groups:
        left = {worker for report in reports for worker in report.left}.difference(members())
        if still_there := [worker for worker in workers or () if worker not in left]:
            try:
                reports.append(_send_reporting(send, (weights, still_there), deadline))
            except WeightSyncError as error:
                if not reports:
                    raise
                errors.append(error)
    merged = _merge_reports(reports)
    if errors:
        raise _combine_errors(errors, merged)
    if on_failure is OnFailure.RAISE:
        merged.raise_on_failure()
    return merged


def _send_reporting(send: Send, group: tuple[Any, list[int]], deadline: Deadline) -> SyncReport:
    """Send to one group. Returns the report also where the error of a lost worker or of a refusal carries it."""
    try:
        return send(*group, deadline, OnFailure.REPORT)
    except (WorkerLostError, RefusedError) as error:
        if not isinstance(error.report, SyncReport):
            raise
        return error.report


def _combine_errors(errors: Sequence[WeightSyncError], merged: SyncReport) -> WeightSyncError:
    """The first of the errors, with notes: the other errors, and what was sent to the other groups."""
    first, *others = errors
    for other in others:
        first.add_note(f"Weights of another group could not be sent either: {other}")
    first.add_note(f"The other groups were sent theirs: {merged}")
    return first


def _merge_reports(reports: Sequence[SyncReport]) -> SyncReport:
    """One report of several, with their newest ``version``."""
    versions = [report.version for report in reports if report.version is not None]
    return replace(
        reports[-1],
        version=max(versions, default=None),
        outcomes=dict(sorted(_merge_field(reports, "outcomes").items())),
        nbytes=sum(report.nbytes for report in reports),
        payload_nbytes=_merge_field(reports, "payload_nbytes"),
        pack_s=sum(report.pack_s for report in reports),
        connect_s=sum(report.connect_s for report in reports),
        transfer_s=sum(report.transfer_s for report in reports),
        apply_s=max(report.apply_s for report in reports),
        superseded=_merge_field(reports, "superseded"),
        not_caught_up=_merge_field(reports, "not_caught_up"),
        previous=functools.reduce(_chain_reports, (report.previous for report in reports)),
        left=_merge_field(reports, "left"),
        reported_before=_merge_field(reports, "reported_before"),
    )


def _merge_field(reports: Sequence[SyncReport], name: str) -> dict[int, Any]:
    """What a field of the reports says about each worker."""
    return {worker: said for report in reports for worker, said in getattr(report, name).items()}


def _chain_reports(earlier: SyncReport | None, later: SyncReport | None) -> SyncReport | None:
    """Two reports of updates before this one, as one chain."""
    return earlier if later is None else replace(later, previous=_chain_reports(earlier, later.previous))


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """What `init_on_sender` was told about the workers."""

    #: None: the scheme finds them by other means.
    ids: tuple[int, ...] | None = None
    #: Worker id to its own weights, where they were given one by one.
    weights: Mapping[int, Any] = field(default_factory=dict)

    def with_count(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords given, with the number of workers."""
        return dict(keywords) if self.ids is None else {**keywords, "num_workers": len(self.ids)}


def worker_set_of(keywords: Mapping[str, Any], context: Any, strategy: WeightStrategy) -> WorkerSet:
    """Read the keywords of `init_on_sender` that define the workers.

    Raises ConfigurationError: they contradict one another, or one needs another that is missing.
    """
    _refuse_contradictions(keywords)
    if "params_map" in keywords:
        weights = per_worker(keywords["params_map"], "params_map")
        return _require_count(WorkerSet(tuple(sorted(weights)), weights), keywords)
    if "devices" in keywords and (
        not isinstance(keywords["devices"], Sequence) or isinstance(keywords["devices"], str | bytes)
    ):
        raise ConfigurationError(f"devices= is {keywords['devices']!r}: give a list with one device per worker.")
    if "devices" in keywords:
        return _require_count(WorkerSet(tuple(range(len(keywords["devices"])))), keywords)
    count = keywords.get("num_workers", optional(context, "num_workers"))
    if count is MISSING or count is None:
        return WorkerSet()
    ids = tuple(range(require_count(count)))
    return (
        WorkerSet(ids, _call_device_map_fn(keywords, ids, strategy)) if "device_map_fn" in keywords else WorkerSet(ids)
    )


def refuse_repeated(endpoints: Mapping[int, Any]) -> None:
    """Refuse one worker that is given in two places. Raises ConfigurationError: nothing was sent."""
    seen: dict[Any, int] = {}
    for worker, endpoint in endpoints.items():
        first = seen.setdefault(_identity(endpoint), worker)
        if first != worker and endpoint is not None:
            raise ConfigurationError(
                f"workers {first} and {worker} are the same {type(endpoint).__name__}: name each worker once. A worker "
                "has one receiver of a model. Nothing was sent."
            )


def _identity(endpoint: Any) -> Any:
    """The endpoint itself, since two handles of one actor are equal; its id, if nothing compares equal to it."""
    try:
        hash(endpoint)
    except TypeError:
        return id(endpoint)
    return endpoint


def per_worker(weights: Any, argument: str) -> dict[int, Any]:
    """Weights given for each worker.

    Raises ConfigurationError: this is not a dict with worker ids as keys, or it is empty.
    """
    if not _is_dict(weights) or not weights:
        description = "an empty dict" if _is_dict(weights) else f"of type {type(weights).__name__}"
        raise ConfigurationError(
            f"{argument}= is {description}: give a dict of worker ids to weights, one for each worker."
        )
    return {require_worker_id(worker): weights_of_worker for worker, weights_of_worker in weights.items()}


def is_per_worker(weights: Any) -> bool:
    """Whether weights are given for each worker: a dict whose keys are ints. Weights have names."""
    return _is_dict(weights) and bool(weights) and all(isinstance(key, Integral) for key in weights)


def _is_dict(weights: Any) -> bool:
    # A TensorDict is a Mapping too, and has no truth value.
    return isinstance(weights, Mapping) and not isinstance(weights, TensorDictBase)


def has_factories(context: Any) -> bool:
    """Whether each worker makes a policy of its own: a TorchRL collector with a list of different factories."""
    factories = optional(context, "policy_factory")
    return isinstance(factories, list | tuple) and len({id(factory) for factory in factories}) > 1


def groups_of(
    weights_of: Mapping[int, Any],
    targets: Sequence[int],
    workers: Sequence[int],
    prepare: Callable[[Any], Any],
    read: Callable[[object], Weights],
) -> Groups:
    """Weights and the workers that get them; workers share a version if ``read`` returns the same for them.

    Raises ConfigurationError, LayoutError: weights are missing, are for an unknown worker, or cannot be sent.
    """
    unknown = sorted(weights_of.keys() - set(workers))
    if not targets and not (workers and unknown):
        raise ConfigurationError(
            "weights were given per worker, but there is no worker to send them to. Nothing was sent. add_worker() "
            "adds a worker."
        )
    missing = sorted(set(targets) - weights_of.keys())
    faults = [f"none for workers {missing}"] if missing else []
    faults += [f"some for {unknown}, which are not among this sender's workers, {list(workers)}"] if unknown else []
    if faults:
        raise ConfigurationError(
            f"weights were given per worker, but {' and '.join(faults)}. Nothing was sent. Name the workers by "
            "worker_ids=, or set the scheme's per_worker_weights if a send may leave workers out."
        )
    return _group_by_weights({worker: prepare(weights_of[worker]) for worker in targets}, read)


def _group_by_weights(
    weights: Mapping[int, Any], read: Callable[[object], Weights]
) -> list[tuple[Any, list[int] | None]]:
    workers_of_object: dict[int, list[int]] = {}
    for worker, weights_of_worker in weights.items():
        workers_of_object.setdefault(id(weights_of_worker), []).append(worker)
    if len(workers_of_object) == 1:
        return [(weights[workers[0]], workers) for workers in workers_of_object.values()]
    workers_of_digest: dict[bytes, list[int]] = {}
    for workers in workers_of_object.values():
        workers_of_digest.setdefault(digest_of_weights(weights[workers[0]], read), []).extend(workers)
    return [(weights[workers[0]], sorted(workers)) for workers in workers_of_digest.values()]


def _refuse_contradictions(keywords: Mapping[str, Any]) -> None:
    for argument, others in _EXCLUSIVE.items():
        for excluded in others:
            if argument in keywords and excluded in keywords:
                raise ConfigurationError(
                    f"init_on_sender() takes {argument}= or {excluded}=, not both. Nothing has changed."
                )
    for argument in ("devices", "device_map_fn"):
        if argument in keywords and not ("weights" in keywords or "model" in keywords):
            raise ConfigurationError(f"init_on_sender({argument}=...) needs weights= or model=: the weights to send.")
    if "device_map_fn" in keywords and not callable(keywords["device_map_fn"]):
        raise ConfigurationError(
            f"device_map_fn= is {keywords['device_map_fn']!r}: give a function of (worker_idx, weights)."
        )
    if "device_map_fn" in keywords and "num_workers" not in keywords:
        raise ConfigurationError(
            "init_on_sender(device_map_fn=...) needs num_workers=: the number of times to call it."
        )


_EXCLUSIVE: Mapping[str, Sequence[str]] = {
    "params_map": ("weights", "model", "devices", "device_map_fn"),
    "devices": ("device_map_fn",),
    "weights": ("model",),
}


def _require_count(workers: WorkerSet, keywords: Mapping[str, Any]) -> WorkerSet:
    """The workers. Raises ConfigurationError: ``num_workers``, if it was given, is not their number."""
    count = keywords.get("num_workers")
    if workers.ids is not None and count not in (None, len(workers.ids)):
        raise ConfigurationError(
            f"num_workers is {count}, but weights or devices were given for {len(workers.ids)} workers: give "
            "one for each worker, or leave num_workers= out."
        )
    return workers


def _call_device_map_fn(keywords: Mapping[str, Any], ids: Sequence[int], strategy: WeightStrategy) -> dict[int, Any]:
    """What the user's function returns for each worker."""
    source = weights = keywords.get("weights", keywords.get("model"))
    if isinstance(source, torch.nn.Module):
        selected = Selection(keywords["names"]).state_dict(source) if "names" in keywords else source
        weights = strategy.extract_weights(selected)
    place: Callable[[int, Any], Any] = keywords["device_map_fn"]
    return {worker: place(worker, weights) for worker in ids}
