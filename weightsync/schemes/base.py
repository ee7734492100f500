"""`WeightSyncScheme`: what all schemes share.

It has TorchRL's methods with their documentation, and what a scheme over one transport overrides. What the methods do
in the trainer is in `sender_side`, what they do in a worker in `receiver_side`.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from weightsync.clock import Deadline, Timeout
from weightsync.engine.arguments import require_name, require_worker_id, worker_ids_of
from weightsync.engine.background import Background, RelayCall
from weightsync.engine.context import Context, optional
from weightsync.engine.copies import Configured
from weightsync.engine.events import Callback, OnDemandEvents, Subscription, SyncEvent, Tracer
from weightsync.engine.packer import Packer
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError, StateError, WorkerLostError
from weightsync.options import OnFailure, Verify, WireDtype, switch
from weightsync.protocol.report import SyncReport
from weightsync.schemes.collector_kinds import WorkerKind, note_worker_errors
from weightsync.schemes.facade_services import LinkTransport
from weightsync.schemes.peers.base import BareTransport
from weightsync.schemes.peers.user_receiving import start_transport_reader
from weightsync.schemes.peers.user_transport import user_link
from weightsync.schemes.receiver_side import ReceiverSide
from weightsync.schemes.registry import WeightSyncBackend, scheme_of
from weightsync.schemes.rendezvous import not_initialised_error
from weightsync.schemes.sender_side import SenderSide
from weightsync.schemes.sources import (
    SET_MODEL,
    checked,
    given_or_found,
    is_weightless,
    missing_path_reason,
    model_for_worker,
    model_or_empty,
    registered,
)
from weightsync.schemes.worker_set import Groups
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.process import forget_after_fork
from weightsync.weights.casting import wire_dtype_of
from weightsync.weights.meta_device import give_memory, lacks_weights
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.selection import Selection
from weightsync.weights.strategy import WeightStrategy, strategy_of
from weightsync.weights.target import Mode

#: The keywords of `init_on_worker` that every scheme takes.
_ALWAYS_ON_WORKER = ("model", "names", "loader", "name_map", "bucket_bytes", "worker_idx")


class WeightSyncScheme(Configured):
    """One model across all workers: makes the sender in the trainer and the receivers in the workers.

    Both generations of TorchRL's API: `get_sender` and `get_receiver` give the objects of the first; `connect`, `send`
    and `receive` of the scheme itself are the second's. A pickled, copied or forked scheme carries only its
    configuration. Each side is initialised once. The two sides of one scheme object are independent of each other.

    Args:
        strategy: "state_dict" or "tensordict", or a `WeightStrategy`.
        verify: what a receiver compares before it applies a version, in addition to names, shapes, dtypes and length.
            "auto" (default): the digest of weights that were transferred; for weights in memory that worker and trainer
            share, the seal of that memory. "digest": the digest of these too. "layout": the seal, but no digest.
        wire_dtype: "bfloat16", "float16" or "float32", or the torch dtype: wider floating tensors are cast to it, on
            their device, before they are sent, and the workers' models must have that dtype
            (``model.to(torch.bfloat16)``). All other tensors are sent as they are. A value that would become infinite
            is a `LayoutError`, and nothing is sent. Default: nothing is cast. Only the trainer's scheme reads it.
        delta: whether a version may be sent as its difference from the previous one, to workers that hold that one.
            Meant for slow links. Each worker keeps one extra packed version. Only the trainer's scheme reads this
            argument. See the guide.

    Raises:
        ConfigurationError: ``delta=True`` over links on which it can save nothing, or with ``verify="layout"``.
    """

    #: How received weights become live.
    apply_mode = Mode.COPY
    #: Whether `send` waits for the answers. If not, it returns a report with PENDING outcomes, and the next `send`, or
    #: `shutdown`, settles the update.
    sync = True
    #: Whether a send may name weights for some workers only: the others keep theirs.
    per_worker_weights = False
    #: Whether ``delta=True`` is possible: the bytes of each payload are sent, to weightsync receivers.
    _carries_deltas = False
    #: Which workers of TorchRL's collectors this scheme can reach; None: it needs none of them.
    _reached: WorkerKind | None = None
    #: The keywords of `init_on_sender`, and of `init_on_worker`, beyond those of all schemes.
    _sender_arguments: tuple[str, ...] = ()
    _worker_arguments: tuple[str, ...] = ()
    #: Those of `init_on_sender` that are not kept, since the sender has the workers that were made from them.
    _given_to_workers: tuple[str, ...] = ()
    _not_copied: tuple[str, ...] = ("_sender_side", "_receiver_side", "_context", "_events", "applied_selection")

    def __init__(
        self,
        strategy: WeightStrategy | str = "state_dict",
        *,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
        delta: bool = False,
    ) -> None:
        self._verify = Verify(verify)
        self._delta = switch(delta, "delta")
        if self._delta:
            self._require_deltas()
        self._wire_dtype = wire_dtype_of(wire_dtype)
        self._strategy = strategy if isinstance(strategy, WeightStrategy) else WeightStrategy(strategy)
        self._reset()

    def _require_deltas(self) -> None:
        """Raise ConfigurationError unless this scheme's links carry deltas, and receivers verify the results."""
        if not self._carries_deltas:
            raise ConfigurationError(
                f"delta=True is not for {type(self).__name__}. It is for weights whose bytes travel over a slow link: "
                "DistributedWeightSyncScheme, or MultiProcessWeightSyncScheme over connections to other hosts. Shared "
                "memory is faster than any delta."
            )
        if self._verify is Verify.LAYOUT:
            raise ConfigurationError(
                "delta=True needs the digest of each version, and verify='layout' sends none: choose 'auto' or "
                "'digest'."
            )

    def _reset(self) -> None:
        """Become uninitialised on both sides."""
        self._sender_side = SenderSide(self)
        self._receiver_side = ReceiverSide()
        self._context = Context()
        self._events = OnDemandEvents()
        #: In a worker: which weights of its model are received; None means all.
        self.applied_selection: Selection | None = None
        forget_after_fork(self)

    @classmethod
    def from_backend(cls, backend: WeightSyncBackend | str, **kwargs: Any) -> WeightSyncScheme:
        """Make the scheme of a backend.

        Args:
            backend: "none" (or "direct"), "shared" (or "thread"), "process" (or "multiprocessing"), "distributed",
                "rpc", "ray", a name given to `register_weight_sync_backend`, or one of an installed package.
            **kwargs: for its constructor.

        Raises:
            ConfigurationError: there is no such backend.
            Exception: what its constructor raises. Whether Ray is installed is checked only when the scheme is used.
        """
        scheme: WeightSyncScheme = scheme_of(backend)(**kwargs)
        return scheme

    # -------------------------------------------------------------------------------------------- initialising

    def init_on_sender(self, model_id: str | None = "policy", context: Any = None, **kwargs: Any) -> None:
        """Make the sender and add the workers to it. Never waits.

        The links are created here, or in `connect` if the scheme makes them itself.

        Args:
            model_id: the name of the model, the same on both sides; may be a path on the context. None: "policy".
            context: an object whose attributes are used for arguments of the same names that are not given; its
                ``.get_model(model_id)`` or ``.get_cached_weights(model_id)`` gives the model. Held weakly. None: what
                ``scheme.context`` was set to before.
            **kwargs: how the workers are reached (see the scheme's own page). Also:

                ``num_workers``, or an argument that implies it: ``params_map`` (worker id to its weights), ``devices``
                (one per worker), or ``device_map_fn(worker_idx, weights)`` together with ``num_workers``;
                ``model``, ``weights``, ``source_model``, ``cached_weights``: what a send without weights sends;
                ``names``: the names of the weights to send, or patterns (``"*.lora_?.*"``). All other weights of the
                workers stay as they are. The workers must be given the same ``names``;
                ``check_finite=True``: refuse weights with NaN or infinite values (`NonFiniteError`);
                ``expected_workers``: the least number of workers that a send needs;
                ``fence``: the new sender's incarnation is higher than this one: see `WorkerLostError.fence`;
                ``ctx``: a multiprocessing context.

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing, unknown or contradictory. The scheme is not initialised, and this
                may be called again. Weights that cannot be sent are refused by `connect` or the first send, not here.
            ModelPathError: (an AttributeError) the context is a TorchRL collector of processes that does not have the
                model. This may be called again.
            MissingExtraError: (an ImportError) the workers are Ray actors, and Ray is not installed.
            TransportError: over torch.distributed, no store could be opened.
        """
        side = self._sender_side
        side.require_uninitialized()
        model_id = require_name("policy" if model_id is None else model_id)
        if context is None and self._receiver_side.receiver is None:
            context = self.context
        setup = side.read(model_id, context, kwargs)
        sender = self.create_sender()
        with self._events.reported_by(sender.report_to):
            if context is not None or self._receiver_side.receiver is None:
                self._context = Context(context)
            side.begin(sender, setup)

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen for the sender. Never waits for it.

        Over torch.distributed with the address of a store, it waits for that store: as long as the scheme's `timeout`.

        Args:
            model_id: the name of the model, the same on both sides. Without a model it is resolved on the context when
                the first weights are received.
            context: an object whose attributes are used for arguments of the same names that are not given; its
                ``.get_model(model_id)`` gives the model. Held weakly. None: what ``scheme.context`` was set to before.
            **kwargs: how the sender reaches this worker (see the scheme's own page), ``model``, ``worker_idx``;
                ``names``: the names of the weights to receive, or patterns, if the trainer sends only these (all others
                stay as they are). In place of a model: ``loader``, with ``name_map`` and ``bucket_bytes``: see
                `Loader`.

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing or unknown, or there is neither a model nor a context.
            LayoutError: weights cannot be applied to a tensor of the model, or no weights match ``names``.
            TransportError: over torch.distributed, the store cannot be reached. After this and the two errors before it
                the scheme is not initialised, and this may be called again.
        """
        side = self._receiver_side
        side.require_uninitialized()
        require_name(model_id)
        if context is None and self._sender_side.sender is None:
            context = self.context
        keywords = checked(kwargs, (*self._worker_arguments, *_ALWAYS_ON_WORKER), "init_on_worker")
        endpoint = self._endpoint(keywords, context, model_id)
        model = self._worker_model(keywords, context, model_id)
        self.applied_selection = Selection(keywords["names"]) if "names" in keywords else None
        receiver = self.create_receiver()
        with self._events.reported_by(lambda events: receiver.report_to(events, lambda: self.worker_idx)):
            receiver.set_context(context, model_id)
            receiver.register_model(model_or_empty(model))
            try:
                receiver.register_worker_transport(endpoint)
                self._become_worker(keywords, context)
            except BaseException:  # after an interrupt it listens already, and nobody could close it
                receiver._listening.stop()
                raise
            side.receiver = receiver

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen for the sender: the second generation's name of `init_on_worker`.

        Args:
            model_id: the name of the model, the same on both sides.
            context: as for `init_on_worker`; ``context.worker_idx`` is read too.
            **kwargs: ``worker_idx`` (this worker's id), ``model``, and how the sender reaches this worker. A model on
                the meta device, as TorchRL's collectors pass it, gets memory on the CPU, and its first values at
                `connect`.

        Raises:
            StateError, ConfigurationError, TransportError: as for `init_on_worker`.
            LayoutError: as for `init_on_worker`; or a buffer is on the meta device, and weights do not include it.
        """
        model = kwargs.get("model")
        if kwargs.get("names") is not None and isinstance(model, nn.Module) and lacks_weights(model):
            raise ConfigurationError(
                f"the model {model_id!r} came without its weights (on the meta device), and names= receives only some "
                "of them: make the model in the worker."
            )
        lacking = give_memory(model)
        self.init_on_worker(model_id, context, **kwargs)
        self._receiver_side.on_meta_device = lacking

    def _become_worker(self, keywords: Mapping[str, Any], context: Any) -> None:
        """Keep the arguments of the worker's side."""
        worker_idx = given_or_found(keywords, context, "worker_idx")
        if worker_idx is not None:
            self._receiver_side.worker_idx = require_worker_id(worker_idx, "worker_idx")
        if self._sender_side.sender is None:
            self._context.set(context)

    # -------------------------------------------------------------------------- connecting, sending, receiving

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | Timeout | None = Timeout.START,
    ) -> None:
        """Connect this side: the workers get their first weights.

        In the trainer: create the links, send the first weights and wait until every worker serves them; without
        weights (none given, no model registered) wait until every worker has answered the handshake. In a worker: wait
        for the first version, apply it, and receive in the background from then on; if the sender has no weights, wait
        for its handshake. If this object has both sides, the first call connects the trainer's, and ``worker_idx``
        means the worker's.

        Args:
            worker_idx: in a worker, its id, if it was not given before.
            weights: in the trainer, the first weights: as for `send`.
            timeout: seconds; None: forever; default: five times `WEIGHTSYNC_TIMEOUT` or 60, since workers may still
                be starting.

        Raises:
            StateError: this side has connected already or is closed, or neither side was initialised.
            ConfigurationError: ``worker_idx`` on the sender's side, or ``weights`` on the receiver's; in a worker, the
                model takes no hooks (a ScriptModule), or has no weights (on the meta device) and the sender has none.
            ConfigurationError, ModelPathError, LayoutError, NonFiniteError: in the trainer, the weights cannot be sent:
                as for `WeightSender.send`. Nothing was sent, and `connect` may be called again.
            AckTimeoutError: in the trainer, some worker did not answer in time; in a worker, nothing arrived in time.
                `connect` may be called again.
            WorkerLostError, RefusedError, SyncError: in the trainer, not every worker applied the first weights.
            TransportError, WeightSyncError: in a worker, the first weights were not applied.
        """
        deadline = Deadline(timeout)
        side = self._next_side(worker_idx, weights)
        with side.rendezvous.connecting(side.participant):
            if side is self._sender_side:
                self._connect_sender(weights, deadline)
            else:
                self._connect_receiver(worker_idx, deadline)

    def _next_side(self, worker_idx: int | None, weights: Any) -> SenderSide | ReceiverSide:
        """The side that a call of `connect` connects; if the object has both, the sender's comes first."""
        sending, receiving = self._sender_side, self._receiver_side
        if sending.sender is None and receiving.receiver is None:
            raise not_initialised_error("uninitialized", "connect", "init_on_sender", "init_on_receiver")
        if receiving.receiver is None and worker_idx is not None:
            raise ConfigurationError("connect() takes worker_idx= in a worker only: leave it out in the trainer.")
        if sending.sender is None:
            if weights is not None:
                raise ConfigurationError("connect() takes weights= in the trainer only: leave it out in a worker.")
            return receiving
        comes_first = worker_idx is None and (sending.rendezvous.not_connected or weights is not None)
        return sending if receiving.receiver is None or comes_first else receiving

    def _connect_sender(self, weights: Any, deadline: Deadline) -> None:
        try:
            self._sender_side.connect(weights, deadline)
        except WorkerLostError as error:
            note_worker_errors(error, self.context)
            raise
        self._workers_answered()

    def _connect_receiver(self, worker_idx: int | None, deadline: Deadline) -> None:
        if worker_idx is not None:
            self._receiver_side.worker_idx = require_worker_id(worker_idx, "worker_idx")
        self._receiver_side.connect(self._relay_call, self._await_first, deadline)

    def _relay_call(self) -> RelayCall | None:
        return self._receiver_side.relay_call(self.context, self._strategy)

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send weights as the next version, and wait until every target has answered or is lost (``sync=True``).

        An outstanding update is settled first: abandoned if its failure was already reported, else waited for.

        Args:
            weights: as for `WeightSender.send`; or a dict that maps worker ids to weights: workers whose weights are
                equal share a version, and the others' versions are sent one after another. With ``per_worker_weights``
                it may leave workers out; they keep what they serve.
            worker_ids: one or several worker ids; None: all workers.
            timeout: seconds until the wait ends; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: as for `WeightSender.send`.

        Returns:
            Each worker's outcome. With ``sync=False`` it is PENDING, and the next send or `shutdown` reports the
            result.

        Raises:
            StateError: not initialised, not connected, or shut down.
            ConfigurationError, ModelPathError, LayoutError, NonFiniteError: as `WeightSender.send`; nothing was sent.
            AckTimeoutError, WorkerLostError, RefusedError, SyncError: as `WeightSender.send`. With ``sync=False`` they
                are about the previous update; this one was dispatched anyway.
        """
        report = self._sender_side.send(weights, worker_ids_of(worker_ids), Deadline(timeout), OnFailure(on_failure))
        self._workers_answered()
        return report

    def receive(self, timeout: float | None = None) -> Any:
        """Wait for the next version to go live.

        Args:
            timeout: seconds to wait; 0: do not wait; None: until one arrives or the sender is gone.

        Returns:
            The weights that the model holds now (those that ``names=`` chooses), if a new version went live since the
            last call; with a loader, the version's number. None: no version arrived, or it was refused.

        Raises:
            StateError: not initialised, not connected, or shut down.
            TransportError: the sender is gone.
            WeightSyncError: an error in the background since the last call; raised once.
        """
        return self._receiver_side.receive(timeout, self._strategy, self.applied_selection)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights that did not come from the sender: see `WeightReceiver.apply_weights`.

        Raises:
            StateError: the receiver's side is not initialised, or closed.
            ConfigurationError, ModelPathError, LayoutError: no model, or weights that do not fit; nothing was changed.
            ModelBusyError: (a TimeoutError) other threads used the model for `WEIGHTSYNC_TIMEOUT` or 60 seconds;
                nothing was changed.
            WeightSyncError: they are the pending version's weights, and that version was refused.
        """
        self._receiver_side.require_receiver("apply_weights").apply_weights(weights, inplace=inplace)

    # --------------------------------------------------------------------------------------- what a send sends

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy | str, context: Any = None) -> Any:
        """The weights that a send sends.

        Args:
            weights: None: the first of what ``scheme.model`` was set to, the cached weights, the model found by
                `get_model`, the path ``model_id`` on the context, its fallback policy, and the model given at init. A
                module's weights are extracted; a str is a path on the context; anything else is taken as it is.
            model_id: the model that is sent.
            strategy: how a module's weights are extracted: "state_dict", "tensordict", or a `WeightStrategy`.
            context: where models are found; None: the one given at init.

        Raises:
            ConfigurationError: None was given and no model is found, or the strategy is unknown.
            ModelPathError: a path does not resolve.
        """
        form = strategy_of(strategy)
        found = self._source(weights, model_id, context)
        return form.extract_weights(found) if isinstance(found, nn.Module) else found

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """Like `prepare_weights`, but a module's tensors are read directly, and not extracted first.

        If a subclass overrides `prepare_weights`, or a strategy overrides `extract_weights`, that is called instead.

        Raises:
            ConfigurationError, ModelPathError: as for `prepare_weights`.
        """
        ours = type(self).prepare_weights is WeightSyncScheme.prepare_weights
        if ours and type(self._strategy).extract_weights is WeightStrategy.extract_weights:
            return self._source(weights, model_id, context)
        return self.prepare_weights(weights, model_id, self._strategy, context)

    def _source(self, weights: Any, model_id: str, context: Any) -> Any:
        """The object whose weights `prepare_weights` takes."""
        if weights is None:
            source = self._found(model_id, self._context() if context is None else context)
        elif isinstance(weights, str):
            source = _resolve_model(self._context() if context is None else context, weights)
        elif is_weightless(weights) and any(
            weights is model for model in (self._sender_side.given.get("model"), optional(self.context, "policy"))
        ):
            source = {}
        else:
            source = weights
        if source is None:
            why = missing_path_reason(self._context() if context is None else context, model_id)
            raise ConfigurationError(
                f"send() was given no weights and no model is registered for {model_id!r}: pass weights, or give "
                "init_on_sender() model=, source_model=, cached_weights= or a context that has the model. Nothing was "
                f"sent.{why}"
            )
        return source

    # --------------------------------------------------------------------- senders, receivers, events; the end

    def get_sender(self) -> WeightSender:
        """The sender.

        Raises:
            StateError: `init_on_sender` was not called in this process.
        """
        return self._sender_side.require_sender("get_sender")

    def get_receiver(self) -> WeightReceiver:
        """The receiver.

        Raises:
            StateError: `init_on_worker` was not called in this process.
        """
        return self._receiver_side.require_receiver("get_receiver")

    def create_sender(self) -> WeightSender:
        """A sender without workers: `register_worker` adds them."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver without a link: `register_model` and `register_worker_transport` set it up."""
        return WeightReceiver(self)

    def on_event(self, callback: Callback, *, tracer: Tracer | None = None) -> Subscription:
        """Call ``callback`` with each `SyncEvent` of this scheme's sender and receiver from now on.

        Callbacks run one after another in a daemon thread, behind a queue of 4096 events. They can neither delay a sync
        nor make it fail: if the queue is full, events are dropped, counted and logged; exceptions in callbacks are
        logged and counted. The thread ends when the scheme is closed, which waits at most 5 s for the callbacks. A
        copy, a pickled scheme and a forked child have no callbacks.

        Args:
            callback: takes one event. It may call the scheme.
            tracer: gives each version the trace context that its updates carry, until the subscription is cancelled. If
                there are several, the newest is used.

        Returns:
            The subscription: how many events were dropped, how often the callback has raised, and how to end it.

        Raises:
            ConfigurationError: ``callback`` cannot be called, or is an async function.
        """
        return self._events.subscribe(callback, tracer)

    def emit(self, event: SyncEvent) -> None:
        """Pass an event from a user of this scheme, such as a `WorkerGroup`, to the callbacks of `on_event`."""
        self._events.emit(event)

    def close(self) -> None:
        """Close whichever sides were initialised. Closing twice is allowed."""
        with contextlib.ExitStack() as ends:  # also if an interrupt is raised in one of them
            ends.callback(self._events.close)
            for participant in reversed(self._participants):
                if participant is not None:
                    ends.callback(participant.close)

    def shutdown(self) -> None:
        """End both sides for good, the background thread too. Calling it again does nothing.

        An update whose outcome was not reported yet is waited for first (at most 60 s or `WEIGHTSYNC_TIMEOUT`); if it
        failed, that is logged, since nothing is raised here. An interrupt ends the wait, and is raised once both sides
        have ended.
        """
        try:
            self._sender_side.settle()
        finally:
            self.close()

    @property
    def _participants(self) -> tuple[WeightSender | None, WeightReceiver | None]:
        return self._sender_side.sender, self._receiver_side.receiver

    def _close_on_error(self, error: BaseException) -> None:
        for participant in self._participants:
            if participant is not None:
                participant.fail(error)  # the other ends are notified
        self.close()

    # -------------------------------------------------------------- what a scheme over one transport overrides

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """The endpoint of each worker, as `create_link` takes it, by worker id.

        Raises ConfigurationError: an endpoint is missing, or they are contradictory. No link has been created.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no init_on_sender(): override it, or use what create_sender() returns."
        )

    def _endpoint(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """The endpoint at which the sender reaches us, for `listen`. Raises ConfigurationError: it is missing."""
        raise NotImplementedError(
            f"{type(self).__name__} has no init_on_worker(): override it, or use what create_receiver() returns."
        )

    def _worker_model(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """The destination of the weights: a model, or a path on the context."""
        return model_for_worker(keywords, context, model_id)

    def _creates_links_at_connect(self, keywords: Mapping[str, Any], context: Any) -> bool:
        """Whether `connect` sends the handshake, when the workers can receive it, instead of `init_on_sender`."""
        return False

    @abc.abstractmethod
    def create_transport(self, pipe_or_context: Any) -> Any:
        """A transport to one worker, or to the sender."""

    @property
    def packer(self) -> Packer:
        """A new packer with buffers of the kind that this scheme's links carry best."""
        return Packer(
            self._verify, self._wire_dtype, self._sender_side.selection, self._sender_side.finite_model_id, self._delta
        )

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link to one peer, for one model.

        Args:
            endpoint: how the peer is reached; here a transport, TorchRL's or the user's own, or what
                `create_transport` makes one from.
            model_id: the model whose messages the link carries.
            peer: what messages call the other end, such as "worker 0".

        Raises:
            ConfigurationError: no link can be made over ``endpoint``.
        """
        transport = self._transport_for(endpoint)
        if isinstance(transport, LinkTransport):
            return transport.link(model_id, peer)
        if transport is None:
            raise ConfigurationError(
                f"{type(self).__name__} makes no links: give it a TransportBackend, have create_transport() return "
                "one, or override create_link() to return a Link of your own."
            )
        return user_link(transport, model_id, peer)

    def _transport_for(self, endpoint: Any) -> LinkTransport | BareTransport | None:
        """The transport that reaches an endpoint, TorchRL's or the user's own, or None."""
        made = endpoint if isinstance(endpoint, BareTransport) else self.create_transport(endpoint)
        return made if isinstance(made, LinkTransport | BareTransport) else None

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Call ``accept`` with each link over which a sender reaches this worker; here with one link, at once.

        If the transport (``endpoint``, or what `create_transport` makes from it) is the user's own, a thread asks it
        for weights.

        Args:
            endpoint: where senders reach this worker: see `create_link`.
            model_id: the model that is received.
            accept: called with each link, perhaps in another thread.

        Returns:
            A function that ends the listening.

        Raises:
            ConfigurationError: no link can be made over ``endpoint``.
        """
        transport = self._transport_for(endpoint)
        creates_links = type(self).create_link is not WeightSyncScheme.create_link
        if isinstance(transport, LinkTransport) and (transport is endpoint or not creates_links):
            return transport.listen(model_id, accept)
        if transport is not None and not isinstance(transport, LinkTransport):
            return start_transport_reader(transport, model_id, self.strategy, accept)
        accept(self.create_link(endpoint, model_id, "the sender"))
        return lambda: None

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``.

        Raises:
            ConfigurationError: this scheme has no pipes.
        """
        transport = self._transport_for(endpoint)
        if isinstance(transport, LinkTransport):
            return transport.user_messages()
        raise ConfigurationError(f"{type(self).__name__} has no pipes: send your own messages over another connection.")

    def transport_of(self, receiver: Any, endpoint: Any) -> Any:
        """The transport over ``receiver``, which listens at ``endpoint``: its ``_transport``, or the user's own.

        Raises:
            ConfigurationError: this scheme has none at the worker's end.
        """
        transport = self._transport_for(endpoint)
        found = transport.over(receiver) if isinstance(transport, LinkTransport) else transport
        if found is not None:
            return found
        raise ConfigurationError(f"{type(self).__name__} has no transport at the worker's end: use the receiver.")

    def _await_first(self, receiver: WeightReceiver, background: Background, deadline: Deadline) -> None:
        """Wait for the worker's first version."""
        self._receiver_side.await_first(receiver, background, deadline)

    def _workers_answered(self) -> None:
        """Called after `connect` and each `send`: a scheme releases what it kept until the workers answered."""
        return

    def _groups(self, weights: Any, worker_ids: Sequence[int] | None) -> Groups:
        """Weights, and the workers that get them (None: all)."""
        return self._sender_side.groups(weights, worker_ids)

    def _found(self, model_id: str, context: Any) -> Any:
        """What a send without weights sends, or None if nothing is registered."""
        return registered(self._sender_side.given, context, model_id)

    def published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched; does not keep them."""
        return

    # ----------------------------------------------------------- what the scheme has, and which state it is in

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are taken from a model; equals and hashes like its name."""
        return self._strategy

    @property
    def strategy_str(self) -> str:
        """The name of the strategy."""
        return str(self._strategy)

    @property
    def wire_dtype(self) -> WireDtype | None:
        """The dtype that wider floating tensors are cast to before they are sent, or None."""
        return self._wire_dtype

    @property
    def initialized_on_sender(self) -> bool:
        """Whether `init_on_sender` was called in this process."""
        return self._sender_side.sender is not None

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether `init_on_receiver` was called in this process."""
        return self._receiver_side.receiver is not None

    #: Names that programs written for TorchRL read; setting them raises.
    _initialized_on_sender = initialized_on_sender
    _initialized_on_worker = initialized_on_receiver
    _initialized_on_receiver = initialized_on_receiver

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether the trainer has connected."""
        return self._sender_side.rendezvous.is_connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this worker has connected."""
        return self._receiver_side.rendezvous.is_connected

    @property
    def model_id(self) -> str | None:
        """The name of the model; None before an init."""
        sender, receiver = self._participants
        participant = sender or receiver
        return None if participant is None else participant.model_id

    @property
    def worker_idx(self) -> int | None:
        """This worker's id, or None if it was not given. Setting it raises StateError in the trainer."""
        return self._receiver_side.worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if self.initialized_on_sender and not self.initialized_on_receiver and worker_idx is not None:
            raise StateError("scheme", "initialised on the sender", "worker_idx =", ["init_on_receiver"])
        self._receiver_side.worker_idx = None if worker_idx is None else require_worker_id(worker_idx, "worker_idx")

    @property
    def context(self) -> Any:
        """The context, held weakly; None if none was given, or if it was garbage-collected."""
        try:
            return self._context()
        except ConfigurationError:
            return None

    @context.setter
    def context(self, context: Any) -> None:
        self._context.set(context)
        for participant in self._participants:
            if participant is not None:
                participant.set_context(context)

    @property
    def model(self) -> Any:
        """In a worker: what the weights are applied to; in the trainer: what a send without weights sends.

        Raises (reading):
            ModelPathError: (an AttributeError) the model's path does not resolve on the context.
        """
        sender, receiver = self._participants
        if receiver is not None:
            return _resolve_model(self.context, receiver.model) if isinstance(receiver.model, str) else receiver.model
        return self._sender_side.given.get(SET_MODEL) if sender is None else self._found(sender.model_id, self.context)

    @model.setter
    def model(self, model: Any) -> None:
        receiver = self._receiver_side.receiver
        if receiver is not None:
            receiver.register_model(model_or_empty(model))
        else:
            self._sender_side.set_model(model)

    @property
    def weights(self) -> Any:
        """The weights of `model`, in the strategy's format, or None without a model. Raises what `model` raises."""
        model = self.model
        return self._strategy.extract_weights(model) if isinstance(model, nn.Module) else model

    @property
    def sender_transports(self) -> dict[int, Link]:
        """Each worker's link, by its id; empty in a worker, and before the links are created."""
        sender = self._sender_side.sender
        return {} if sender is None else sender.transports()

    @property
    def receiver_transport(self) -> Link | None:
        """This worker's link to the sender, once the handshake was made."""
        receiver = self._receiver_side.receiver
        return None if receiver is None else receiver.driver.current_link()

    @property
    def shared_transport(self) -> None:
        """Always None: each worker has its own link."""
        return

    def _copy_uninitialized(self) -> Self:
        """A copy, which carries the configuration only: TorchRL's name of `copy.copy`."""
        return copy.copy(self)
