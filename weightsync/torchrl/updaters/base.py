"""`WeightUpdaterBase`: pushes weights to workers by the subclass's own calls, and reports each worker's outcome."""

from __future__ import annotations

import abc
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from msgspec.structs import replace
from tensordict import TensorDictBase
from torch import nn

from weightsync.clock import Deadline, Stopwatch, Timeout
from weightsync.errors import ConfigurationError
from weightsync.options import OnFailure, items_of
from weightsync.protocol._tables import State
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport
from weightsync.torchrl.updaters.calls import WorkerId
from weightsync.torchrl.updaters.pushes import ADVICE, Pushes, key_of
from weightsync.weights.reading import read_weights
from weightsync.weights.strategy import WeightStrategy


class WeightUpdaterBase(abc.ABC):
    """Pushes the weights of one policy to workers that it reaches by calls.

    A subclass says how one worker is reached (`_sync_weights_with_worker`), and may override `all_worker_ids`,
    `_get_server_weights`, `_maybe_map_weights`, `_skip_update` and `_push_weights`. It need not call
    ``super().__init__()``.

    A push uses the state machines of a `WeightSender`. Its outcomes have the evidence CALL: APPLIED means that the
    worker's call returned, and nothing else. For an answer that names version and digest use a scheme. A pickled,
    copied or forked updater has its configuration and hooks, but no collectors and no push.
    """

    #: Why workers are SKIPPED, for reports.
    _why_skipped = "it was not its turn"
    _pushes: Pushes
    _registered: list[weakref.ReferenceType[Any]]
    _hooks: list[Callable[[], None]]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Set up the state that a subclass's constructor does not deal with."""
        updater = super().__new__(cls)
        _register_with_torchrl()
        updater._pushes = Pushes()
        updater._registered = []
        updater._hooks = []
        return updater

    @classmethod
    def from_policy(cls, policy: nn.Module) -> WeightUpdaterBase | None:
        """An updater made from a policy alone, or None if that is not enough; tried before the constructor."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Called by a collector once it is set up, with its arguments. Does nothing here."""
        return

    def push_weights(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        worker_ids: torch.device | int | Sequence[int] | Sequence[torch.device] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Push weights to workers, wait until each call has ended, then run the post-hooks.

        The calls are made one after the other in this thread. If one fails, the others are still made. After an
        `AckTimeoutError` the next push abandons this one; after an interrupted wait it first waits for this one.

        Args:
            policy_or_weights: a module, which is extracted to a TensorDict; a TensorDict or a dict, taken as it is;
                None: what `_get_server_weights` returns. `_maybe_map_weights` gets it first, and may take other types.
            worker_ids: one or several ids or devices; None: all.
            timeout: seconds until the wait ends for calls that returned a future; None: forever; default:
                `WEIGHTSYNC_TIMEOUT` or 60. A call that blocks cannot be cut short.
            on_failure: "raise", or "report": return the report even if workers failed.

        Returns:
            Each worker's outcome. SKIPPED: `_skip_update` returned True; if it did for all, ``version`` is None.

        Raises:
            StateError: another thread is pushing, or this is called from a push's own hook. Nothing was called.
            ConfigurationError: an empty list of workers, an unknown id, weights of an unsupported type, or no weights.
                Nothing was called.
            RefusedError: calls raised; `.refused` has the workers' own tracebacks. All other workers were called.
            WorkerLostError: workers are gone (their calls failed with a ConnectionError or EOFError).
            AckTimeoutError: calls had not ended by the deadline.
            SyncError: failures of several kinds. After any of these no post-hook has run.
        """
        deadline, failing = Deadline(timeout), OnFailure(on_failure)
        with self._pushes.turn():
            report = self._push(policy_or_weights, worker_ids, deadline)
            if failing is OnFailure.RAISE:
                report.raise_on_failure(ADVICE)
            self._call_post_hooks()
        return report

    def __call__(
        self,
        policy_or_weights: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
        worker_ids: torch.device | int | Sequence[int] | Sequence[torch.device] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """The same as `push_weights`."""
        # A subclass's own push_weights() may take TorchRL's two arguments only.
        options: dict[str, Any] = {} if timeout is Timeout.DEFAULT else {"timeout": timeout}
        if on_failure is not OnFailure.RAISE:
            options["on_failure"] = on_failure
        return self.push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids, **options)

    @property
    def state(self) -> State:
        """The state of its sender: `pending_async` while a push that timed out is outstanding."""
        return self._pushes.state

    def _push(self, policy_or_weights: Any, worker_ids: Any, deadline: Deadline) -> SyncReport:
        if type(self)._push_weights is not WeightUpdaterBase._push_weights:
            push = functools.partial(self._push_weights, policy_or_weights=policy_or_weights, worker_ids=worker_ids)
            return self._pushes.push([None], lambda _worker: push(), deadline)
        targets, watch = _targets(worker_ids, _known_ids(self)), Stopwatch()
        if not targets:
            return self._pushes.empty()
        weights = self._maybe_map_weights(
            self._get_server_weights() if policy_or_weights is None else policy_or_weights
        )
        if policy_or_weights is not None and weights is policy_or_weights:
            weights = _taken(policy_or_weights)
        due = [worker for worker in targets if not self._skips(worker)]
        seconds = watch.seconds
        report = self._pushes.push(due, functools.partial(self._call, weights), deadline) if due else None
        reported: Mapping[Any, Outcome] = report.outcomes if report else {}
        skipped = Outcome(kind=OutcomeKind.SKIPPED, reason=self._why_skipped)
        outcomes = {key_of(worker): reported.get(key_of(worker), skipped) for worker in targets}
        report = report or self._pushes.empty()
        return replace(report, outcomes=outcomes, pack_s=seconds, nbytes=_nbytes(weights))

    def _skips(self, worker: WorkerId) -> bool:
        return worker is not None and self._skip_update(worker)

    def _call(self, weights: Any, worker: WorkerId) -> Any:
        if worker is None:
            return self._sync_weights_with_worker(server_weights=weights)
        return self._sync_weights_with_worker(worker_id=worker, server_weights=weights)

    @abc.abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: int | torch.device | None = None, server_weights: Any) -> Any:
        """Hand the weights to one worker.

        It may return a `concurrent.futures.Future`, which is awaited together with those of the other workers; any
        other value means that the call has ended. A ConnectionError or EOFError, raised here or by the future, means
        that the worker is gone. Any other exception means that it refused, and so does a method that is ``async``:
        nothing of it would run.

        Args:
            worker_id: the worker; not passed if workers have no ids.
        """

    def all_worker_ids(self) -> Sequence[int] | Sequence[torch.device] | None:
        """The ids of all workers; None if they have no ids, and one call without an id serves them all."""
        return None

    def _get_server_weights(self) -> Any:
        """The weights of a push without weights. None here, and passed on as None."""
        return None

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """The weights in the form that workers take; here a module's are extracted to a TensorDict, all else is kept.

        Args:
            server_weights: what was given to `push_weights`, a module as a module; or what `_get_server_weights`
                returned.
        """
        return _extract_if_module(server_weights)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> Any:
        """To be overridden by a subclass that makes all calls of a push itself, in place of the methods above.

        The report has one outcome, for worker 0: APPLIED means that this method returned.
        """
        raise NotImplementedError

    def _skip_update(self, worker_id: int | torch.device) -> bool:
        """Whether this push leaves a worker out; asked once for each target. False here."""
        return False

    @property
    def post_hooks(self) -> list[Callable[[], None]]:
        """The hooks, in the order in which they run."""
        return self._hooks

    def register_post_hook(self, hook: Callable[[], None]) -> None:
        """Have a function called, without arguments, after each push that did not raise.

        Hooks run in order of registration, in the thread that pushed, before `push_weights` returns; they may not push.
        If a hook raises, the push raises that exception and later hooks do not run; the weights have been pushed.

        Raises:
            ConfigurationError: it is not callable, or an async function.
        """
        if not callable(hook) or any(map(inspect.iscoroutinefunction, (hook, type(hook).__call__))):
            raise ConfigurationError(f"a post-hook is a plain function without arguments, not {hook!r}.")
        self._hooks.append(hook)

    def _call_post_hooks(self) -> None:
        """Call the hooks. For a subclass that overrides `push_weights`."""
        for hook in tuple(self._hooks):
            hook()

    def register_collector(self, collector: Any) -> None:
        """Register the collector that uses this updater. Held weakly.

        Raises:
            ConfigurationError: another collector is registered and still alive, or this is None, a str, a number, or
                another object that cannot be referenced weakly.
        """
        living = self._live_collectors()
        if any(known is not collector for known in living):
            raise ConfigurationError(
                f"this {type(self).__name__} serves a {type(living[0]).__name__} already, and an updater has one "
                "collector: make another updater for this one."
            )
        if not living:
            self._registered.append(_weak_reference(collector))

    @property
    def collector(self) -> Any | None:
        """The collector that was registered; None if there is none, or it is gone."""
        return next(iter(self._live_collectors()), None)

    @property
    def collectors(self) -> list[Any] | None:
        """A list of `collector`, or an empty one if it is gone; None if none was ever registered."""
        return self._live_collectors() if self._registered else None

    def _live_collectors(self) -> list[Any]:
        return [collector for reference in self._registered if (collector := reference()) is not None]

    def increment_version(self) -> None:
        """Call `increment_version` on the registered collector, if it still exists."""
        for collector in self._live_collectors():
            collector.increment_version()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_pushes", "_registered")}
        return {**state, "_hooks": list(self._hooks)}


def _weak_reference(collector: Any) -> weakref.ReferenceType[Any]:
    try:
        return weakref.ref(collector)
    except TypeError:
        raise ConfigurationError(
            f"register_collector() was given {collector!r}, which cannot be referenced weakly: give the collector."
        ) from None


def _register_with_torchrl() -> None:
    """Make our updaters virtual subclasses of TorchRL's, if its collectors are imported."""
    module = sys.modules.get("torchrl.collectors.weight_update")
    theirs = None if module is None else vars(module).get("WeightUpdaterBase")
    if theirs is not None:  # None while the module is being imported
        theirs.register(WeightUpdaterBase)


def _extract_if_module(weights: Any) -> Any:
    return WeightStrategy().extract_weights(weights) if isinstance(weights, nn.Module) else weights


def _taken(weights: Any) -> Any:
    """The given weights: a module is extracted, a TensorDict or dict taken as it is.

    Raises ConfigurationError: they are of another type.
    """
    if isinstance(weights, TensorDictBase | Mapping | nn.Module):
        return _extract_if_module(weights)
    raise ConfigurationError(
        f"push_weights() takes a torch.nn.Module, a TensorDict, a dict of tensors or None, not a "
        f"{type(weights).__name__}. Nothing was pushed."
    )


def _known_ids(updater: WeightUpdaterBase) -> list[Any] | None:
    """What `all_worker_ids` returns, as a list. Raises ConfigurationError: it is neither iterable nor None."""
    returned = updater.all_worker_ids()
    ids = None if returned is None else items_of(returned)
    if returned is not None and ids is None:
        raise ConfigurationError(
            f"all_worker_ids() of {type(updater).__name__} returned {returned!r}: it has to return a list of ids, or "
            "None if workers have none. Nothing was pushed."
        )
    return ids


def _targets(worker_ids: Any, all_ids: Sequence[Any] | None) -> list[Any]:
    """The target workers, by the ids that the updater has; [None]: the only worker, which has no id.

    Raises ConfigurationError: the list is empty, or has an unknown id.
    """
    if worker_ids is None:
        return [None] if all_ids is None else list(all_ids)
    is_collection = isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str)
    try:
        ids = iter(worker_ids if is_collection else [worker_ids])
    except TypeError:  # a tensor or an array without dimensions is Iterable by its type
        ids = iter([worker_ids])
    targets = [str(worker) if all_ids is not None and str(worker) in all_ids else _id(worker) for worker in ids]
    if not targets:
        raise ConfigurationError("no worker to push to: worker_ids is empty. Nothing was pushed.")
    unknown = [worker for worker in targets if all_ids is not None and worker not in all_ids]
    if unknown:
        raise ConfigurationError(
            f"unknown worker ids {_join_ids(unknown)}: there are {_join_ids(all_ids or [])}. Nothing was pushed."
        )
    return list(dict.fromkeys(targets))


def _id(worker: Any) -> int | torch.device:
    named: Any = None if isinstance(worker, bool) else worker  # True does not mean worker 1
    try:
        return torch.device(named) if isinstance(named, str | torch.device) else operator.index(named)
    except (TypeError, RuntimeError):
        raise ConfigurationError(f"a worker's id is an int or a device, not {worker!r}. Nothing was pushed.") from None


def _join_ids(workers: Sequence[Any]) -> str:
    return ", ".join(str(worker) for worker in workers) or "none"


def _nbytes(weights: Any) -> int:
    """The size of weights in bytes; 0 if they are of a type that we cannot read."""
    if not isinstance(weights, TensorDictBase | Mapping):
        return 0
    try:
        return sum(tensor.nbytes for tensor in read_weights(weights).tensors.values())
    except ConfigurationError:
        return 0
