"""`SenderSide`: a scheme in the trainer, from `init_on_sender` to `shutdown`.

It has the sender, what there is to send, and the scheme's own sends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from weightsync.clock import Deadline
from weightsync.engine.arguments import expected_number, require_fence
from weightsync.engine.sender import WeightSender
from weightsync.engine.sequential import SequentialSends
from weightsync.errors import WeightSyncError
from weightsync.options import OnFailure, switch
from weightsync.protocol._tables import State
from weightsync.protocol.machine import Role
from weightsync.protocol.report import SyncReport
from weightsync.schemes.collector_kinds import WorkerKind, collector_processes, has_processes, refuse_out_of_reach
from weightsync.schemes.rendezvous import Rendezvous, already_initialised_error, not_initialised_error
from weightsync.schemes.sources import SET_MODEL, checked, processes_of, refuse_shards, registered
from weightsync.schemes.worker_set import (
    Groups,
    WorkerSet,
    groups_of,
    has_factories,
    is_per_worker,
    per_worker,
    refuse_repeated,
    send_to_groups,
    worker_set_of,
)
from weightsync.weights.reading import read_weights
from weightsync.weights.selection import Selection
from weightsync.weights.strategy import WeightStrategy

logger = logging.getLogger("weightsync")

#: The keywords of `init_on_sender` that every scheme takes.
_ALWAYS: Final = (
    *("num_workers", "model", "source_model", "cached_weights", "fence", "expected_workers"),
    *("weights", "params_map", "devices", "device_map_fn", "ctx", "names", "check_finite"),
)
#: Those that say what a send without weights sends.
_WEIGHT_ARGUMENTS: Final = frozenset({"model", "source_model", "cached_weights", "weights", "params_map"})


class SenderScheme(Protocol):
    """What the trainer's side needs of its scheme."""

    sync: bool
    per_worker_weights: bool
    #: See `WeightSyncScheme`, which says what these and the methods below are.
    _sender_arguments: tuple[str, ...]
    _given_to_workers: tuple[str, ...]
    _reached: WorkerKind | None

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are taken from a model."""

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """The endpoint of each worker, as `create_link` takes it, by worker id."""

    def _creates_links_at_connect(self, keywords: Mapping[str, Any], context: Any) -> bool:
        """Whether the links are created by `connect`, and not by `init_on_sender`."""

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """The weights that a send sends."""

    def _context(self) -> Any:
        """The context. Raises ConfigurationError: it was garbage-collected."""

    def _found(self, model_id: str, context: Any) -> Any:
        """What a send without weights sends; None if nothing is registered."""

    def _groups(self, weights: Any, worker_ids: Sequence[int] | None) -> Groups:
        """Weights, and the workers that get them (None: all): `SenderSide.groups`, unless a scheme overrides it."""


@dataclass(frozen=True, slots=True)
class SenderSetup:
    """What `init_on_sender` was told."""

    model_id: str
    context: Any
    #: The keywords, without those that are None.
    given: Mapping[str, Any]
    worker_set: WorkerSet
    #: By worker id: how the worker is reached, and its process, where that is known.
    endpoints: Mapping[int, Any]
    processes: Mapping[int, Any]
    #: The least number of workers that a send needs; None means one.
    expected_workers: int | None


class SenderSide:
    """The trainer's side of one scheme. It is initialised once."""

    def __init__(self, scheme: SenderScheme) -> None:
        self._scheme = scheme
        self.rendezvous = Rendezvous(Role.SENDER)
        self.sender: WeightSender | None = None
        #: Sends for the scheme's own `send`; None until it connects.
        self.sends: SequentialSends | None = None
        #: The keywords of `init_on_sender`, without those that only the workers are made from, and these workers.
        self.given: Mapping[str, Any] = {}
        self.worker_set = WorkerSet()
        #: Which weights are sent, and the model's id if they must be finite: see `Packer`.
        self.selection: Selection | None = None
        self.finite_model_id: str | None = None

    def require_uninitialized(self) -> None:
        """Raises StateError: this side was initialised before; it may be closed by now."""
        if self.sender is not None:
            raise already_initialised_error(self.sender, "sender", "init_on_sender", "get_sender")

    def read(self, model_id: str, context: Any, kwargs: Mapping[str, Any]) -> SenderSetup:
        """Read the arguments of `init_on_sender`.

        Raises:
            As `WeightSyncScheme.init_on_sender`. Nothing was made.
        """
        scheme = self._scheme
        refuse_out_of_reach(type(scheme).__name__, scheme._reached, context, kwargs.keys() & scheme._sender_arguments)
        keywords = checked(kwargs, (*scheme._sender_arguments, *_ALWAYS), "init_on_sender")
        refuse_shards(keywords)
        if keywords.get("fence") is not None:
            require_fence(keywords["fence"], "the incarnation to rise above, from WorkerLostError.fence")
        expected = expected_number(keywords.get("expected_workers"))
        workers = worker_set_of(keywords, context, scheme.strategy)
        keywords = self._with_set_model(workers.with_count(keywords))
        if has_processes(context):
            registered(keywords, context, model_id)  # an error must come before the collector starts its workers
        endpoints = scheme._endpoints(keywords, context, model_id)
        refuse_repeated(endpoints)
        processes = processes_of(keywords.get("processes"), endpoints) or collector_processes(context, endpoints)
        self.selection = Selection(keywords["names"]) if "names" in keywords else None
        self.finite_model_id = model_id if switch(keywords.get("check_finite", False), "check_finite") else None
        return SenderSetup(model_id, context, keywords, workers, endpoints, processes, expected)

    def _with_set_model(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords given, with the model that was set before, unless they say what to send."""
        model = self.given.get(SET_MODEL)
        if model is None or keywords.keys() & _WEIGHT_ARGUMENTS:
            return keywords
        return {**keywords, "model": model, SET_MODEL: model}

    def begin(self, sender: WeightSender, setup: SenderSetup) -> None:
        """Add the workers to a new sender, and create the links unless `connect` is to create them."""
        scheme, keywords, context = self._scheme, setup.given, setup.context
        scheme.per_worker_weights = scheme.per_worker_weights or has_factories(context)
        # A worker that leaves is released: only the sender keeps how it is reached.
        self.given = {name: each for name, each in keywords.items() if name not in scheme._given_to_workers}
        self.worker_set = setup.worker_set
        sender.set_context(context, setup.model_id)
        try:
            for worker_id, endpoint in setup.endpoints.items():
                sender.add_worker(worker_id, endpoint, process=setup.processes.get(worker_id))
            if not scheme._creates_links_at_connect(keywords, context):
                sender.connect(fence=keywords.get("fence"))
        except BaseException:
            sender._workers.withdraw()
            raise
        sender.expected_workers = setup.expected_workers
        self.sender = sender

    def require_sender(self, method: str) -> WeightSender:
        """The sender. Raises StateError: this side is not initialised."""
        if self.sender is None:
            raise not_initialised_error("uninitialized on the sender", method, "init_on_sender")
        return self.sender

    @property
    def participant(self) -> WeightSender | None:
        """The sender, if this side is initialised."""
        return self.sender

    def set_model(self, model: Any) -> None:
        """Have a send without weights send this from now on; None: what is found elsewhere."""
        self.given = {**self.given, "model": model, SET_MODEL: model}
        if self.sender is not None:
            self.sender._workers.model_replaced(self.sender._known_layout)

    def begin_sends(self) -> SequentialSends:
        """What sends for the scheme's own `send` from now on."""
        self.sends = self.sends or SequentialSends(self.require_sender("connect"))
        return self.sends

    def connect(self, weights: Any, deadline: Deadline) -> None:
        """Create the links, send the first weights to the groups of workers, and wait for all of them.

        Raises:
            As `WeightSyncScheme.connect`.
        """
        sender, sends = self.require_sender("connect"), self.begin_sends()
        sender.require_open("connect")
        if weights is None:
            weights = self.worker_set.weights or None
        has_weights = weights is not None or self._registered_weights() is not None
        groups = self._scheme._groups(weights, None) if has_weights else []
        if sender.state is State.UNINITIALIZED:
            sender.connect(fence=self.given.get("fence"), weights=groups[0][0] if groups else None)
        if groups:
            send_to_groups(sends.send, groups, deadline, OnFailure.RAISE, lambda: sender.worker_ids)
            sender._workers.make_slots()
        else:
            sender._workers.wait(deadline.remaining, "connect")

    def send(
        self, weights: Any, worker_ids: Sequence[int] | None, deadline: Deadline, on_failure: OnFailure
    ) -> SyncReport:
        """Send to one group of workers after another. Raises as `WeightSyncScheme.send`."""
        sender = self.require_sender("send")
        self.rendezvous.require_connected("send", sender)
        sends = self.begin_sends()
        groups = self._scheme._groups(weights, worker_ids)
        send = sends.send if self._scheme.sync else sends.dispatch
        return send_to_groups(send, groups, deadline, on_failure, lambda: sender.worker_ids)

    def groups(self, weights: Any, worker_ids: Sequence[int] | None) -> Groups:
        """Weights, and the workers that get them (None: all)."""
        sender = self.require_sender("send")
        of_init = self.worker_set.weights
        if of_init and (weights is of_init or (weights is None and self._registered_weights() is None)):
            ids = {*sender.worker_ids, *(worker_ids or ())}  # some may have left since
            weights_of: Mapping[int, Any] | None = {worker: each for worker, each in of_init.items() if worker in ids}
        else:
            weights_of = per_worker(weights, "weights") if is_per_worker(weights) else None

        def prepared(each: Any) -> Any:
            return self._scheme.weights_to_send(each, sender.model_id)

        if weights_of is None:
            return [(prepared(weights), None if worker_ids is None else list(worker_ids))]
        if worker_ids is None:
            worker_ids = [
                each for each in sender.worker_ids if each in weights_of or not self._scheme.per_worker_weights
            ]
        read = read_weights if self.selection is None else self.selection.read
        return groups_of(weights_of, worker_ids, sender.worker_ids, prepared, read)

    def _registered_weights(self) -> Any:
        return self._scheme._found(self.require_sender("send").model_id, self._scheme._context())

    def settle(self) -> None:
        """Wait for an update whose outcome was not reported yet, and log its failure."""
        if self.sends is None or self.sender is None or self.sender.state is not State.PENDING_ASYNC:
            return
        try:
            report = self.sends.settle()
        except WeightSyncError as error:  # another thread waits for it, has abandoned it or has closed the sender
            logger.warning("at shutdown: %s", error)
            return
        if report is not None and report.failed:
            logger.warning("at shutdown: %s", report.error())
