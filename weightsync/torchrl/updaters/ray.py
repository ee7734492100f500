"""`RayWeightUpdater`: pushes weights to collectors that are Ray actors, and checks the end of each call."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from weightsync.clock import Deadline
from weightsync.errors import ConfigurationError, TransportError, with_type
from weightsync.protocol.report import OutcomeKind, SyncReport
from weightsync.schemes.peers.ray_actors import POLICY_METHOD, method_of, returning_once
from weightsync.torchrl.updaters.base import WeightUpdaterBase
from weightsync.torchrl.updaters.calls import NotCalled, Raised
from weightsync.torchrl.updaters.local import got
from weightsync.transports.ray.session import (
    ACTOR_WATCH,
    Session,
    failure_in_actor,
    keep_if_ray_ended,
    plain,
    require_ray,
    settle,
)
from weightsync.weights.portable_pickle import portable


class RayWeightUpdater(WeightUpdaterBase):
    """Pushes weights to remote collectors: Ray actors with a method ``update_policy_weights_(weights)``.

    Each push puts the weights, on the CPU, into Ray's object store once, and calls each collector with the reference.
    Every call is awaited: a collector that raised is REFUSED, with its own traceback; a collector that died or cannot
    be reached is LOST. APPLIED means that the collector's method returned (evidence CALL). Actors with weightsync's own
    receiver give better evidence: use `RayWeightSyncScheme` for them.

    `remote_collectors` may be changed between pushes: the next push calls an actor that replaces another, and waits for
    no call of that one.

    Args:
        policy_weights: the weights that a push without weights sends, as they are then.
        remote_collectors: the actors' handles; a worker's id is its index. If there are none, a push sends nothing, and
            returns a report without outcomes.
        max_interval: how many pushes skip a worker between two that reach it, even if it is named. A worker's first
            push, the push after a failed one, and the first push to an actor that replaces another are never skipped. A
            negative number counts as 0.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigurationError: these are not actors with that method (one that comes later is REFUSED with that reason), or
            ``max_interval`` is not a whole number.
    """

    def __init__(self, policy_weights: TensorDictBase, remote_collectors: list[Any], max_interval: int = 0) -> None:
        require_ray("RayWeightUpdater")
        if not isinstance(remote_collectors, Sequence) or isinstance(remote_collectors, str):
            raise ConfigurationError(
                f"remote_collectors= is {remote_collectors!r}: give a list with the handle of each actor."
            )
        for worker, actor in enumerate(remote_collectors):
            _method_of(actor, worker)
        self.policy_weights = policy_weights
        self.remote_collectors = remote_collectors
        self.max_interval = _interval(max_interval)
        #: The actor at each index, and how many more pushes skip it.
        self._rests: dict[int, tuple[Any, int]] = {}
        self._sessions = {
            worker: (actor, Session(f"worker {worker}")) for worker, actor in enumerate(remote_collectors)
        }
        self._reference: Any = None

    def all_worker_ids(self) -> list[int]:
        """The indices of the remote collectors."""
        return list(range(len(self.remote_collectors)))

    def _get_server_weights(self) -> Any:
        weights = self.policy_weights
        return got(self, None if weights is None else lambda: weights, "policy_weights=")

    def _skip_update(self, worker_id: int) -> bool:  # type: ignore[override]
        actor = self.remote_collectors[worker_id]
        known, resting = self._rests.get(worker_id, (actor, 0))
        if known != actor:  # two handles of one actor are equal
            return False
        self._rests[worker_id] = actor, max(0, resting - 1)
        return resting > 0

    def _push(self, policy_or_weights: Any, worker_ids: Any, deadline: Deadline) -> SyncReport:
        self._forget_replaced()
        try:
            report = super()._push(policy_or_weights, worker_ids, deadline)
        finally:
            if self._reference is not None:
                keep_if_ray_ended(self._reference)
            self._reference = None
        for worker in report.of(OutcomeKind.APPLIED):
            self._rests[worker] = self.remote_collectors[worker], self.max_interval
        return report

    def _sync_weights_with_worker(self, worker_id: int, server_weights: Any) -> Future[None]:  # type: ignore[override]
        actor, peer = self.remote_collectors[worker_id], f"worker {worker_id}"
        try:
            method = _method_of(actor, worker_id)
        except ConfigurationError as error:
            raise NotCalled(str(error)) from error
        ray = self._session(worker_id, actor).require()
        if self._reference is None:
            self._reference = _store_weights(ray, server_weights, peer)
        return _watched_future(_begin_call(ray, method, self._reference, peer), peer)

    def _forget_replaced(self) -> None:
        """Forget the actors that are collectors no more: their handles would keep them alive."""
        actors = dict(enumerate(self.remote_collectors))
        for worker, (known, _) in tuple(self._sessions.items()):
            if worker not in actors or actors[worker] != known:
                self._pushes.replaced(worker)
                del self._sessions[worker]
                self._rests.pop(worker, None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process, perhaps on another node, makes its own sessions with the actors.
        return {**super().__getstate__(), "_sessions": {}, "_rests": {}, "_reference": None}

    def _session(self, worker_id: int, actor: Any) -> Session:
        """The session in which this actor was first seen."""
        if worker_id not in self._sessions:
            self._sessions[worker_id] = actor, Session(f"worker {worker_id}")
        return self._sessions[worker_id][1]


def _interval(value: Any) -> int:
    try:
        return max(0, operator.index(value))
    except TypeError:
        raise ConfigurationError(
            f"max_interval= is {value!r}: give a whole number of pushes that skip a worker."
        ) from None


def _method_of(actor: Any, worker: int) -> Any:
    """The collector's method that is called. Raises ConfigurationError: it has no such method, or is not an actor."""
    name, method = method_of(actor, (POLICY_METHOD,), f"worker {worker}")
    if name != POLICY_METHOD:
        raise ConfigurationError(
            f"worker {worker} is an actor without {POLICY_METHOD}(weights): give its class this method, or use a "
            "RayWeightSyncScheme. Nothing was sent to it."
        )
    return returning_once(method)


def _detached_on_cpu(weights: Any) -> Any:
    """Weights detached, and on the CPU."""
    match weights:
        case TensorDictBase():
            return weights.data.cpu()
        case Tensor():
            return weights.detach().cpu()
        case Mapping():
            return {name: _detached_on_cpu(value) for name, value in weights.items()}
        case _:
            return weights


def _store_weights(ray: Any, weights: Any, peer: str) -> Any:
    """The reference to weights in the object store. Raises NotCalled: they cannot be put there."""
    if isinstance(weights, ray.ObjectRef):
        return weights
    try:
        return ray.put(portable(_detached_on_cpu(weights)))
    except Exception as error:  # of Ray, of pickling, or of any type that the weights raise there
        raise NotCalled(
            f"{peer} was not called, since the weights could not be put into Ray's object store: "
            f"{plain(with_type(error))}"
        ) from error


def _begin_call(ray: Any, method: Any, reference: Any, peer: str) -> Any:
    """Begin a call.

    Raises:
        NotCalled: the actor's queue is full, or its method does not take one argument.
        TransportError: Ray cannot reach such an actor.
    """
    try:
        return method.remote(reference)
    except (TypeError, ray.exceptions.PendingCallsLimitExceeded) as error:
        raise NotCalled(f"Ray accepted no call for {peer}: {plain(str(error))}") from error
    except Exception as error:
        raise TransportError(f"Ray accepted no call for {peer}: {plain(str(error))}") from error


def _watched_future(reference: Any, peer: str) -> Future[None]:
    """A future of a call's end, which also ends if Ray does."""
    end: Future[None] = Future()
    ACTOR_WATCH.watch(end, peer)
    reference.future().add_done_callback(lambda over: _on_call_ended(end, over, peer))
    return end


def _on_call_ended(end: Future[None], finished: Future[Any], peer: str) -> None:
    """Runs in a thread of Ray's."""
    error = finished.exception()
    exceptions = require_ray("RayWeightUpdater").exceptions
    if error is None:
        settle(end)
    # Checked first: what the actor's method raised may itself be a ConnectionError.
    elif (ended := failure_in_actor(error)) is not None:
        settle(end, error=Raised(*ended))
    elif isinstance(error, exceptions.ObjectLostError):
        text = plain(str(error))
        settle(end, error=Raised(text.splitlines()[-1] if text else repr(error), text))
    else:
        lost = TransportError(f"The call to {peer} did not return: {plain(str(error)) or repr(error)}")
        lost.__cause__ = error
        settle(end, error=lost)
