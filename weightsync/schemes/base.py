"""`WeightSyncScheme`: what all schemes share."""

from __future__ import annotations

import abc
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from weightsync.clock import Deadline, Timeout
from weightsync.engine.background import Background, RelayCall
from weightsync.engine.copies import (
    expected_number,
    held,
    is_clean,
    optional,
    require_name,
    require_whole,
    require_worker_id,
)
from weightsync.engine.packer import Packer
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender, worker_ids_of
from weightsync.engine.sequential import SequentialSends
from weightsync.errors import ConfigurationError, StateError
from weightsync.options import OnFailure, Verify, WireDtype
from weightsync.protocol._tables import State
from weightsync.protocol.report import SyncReport
from weightsync.schemes.facade_services import LinkTransport
from weightsync.schemes.peers.base import BareTransport
from weightsync.schemes.peers.user_receiving import listen_by
from weightsync.schemes.peers.user_transport import user_link
from weightsync.schemes.registry import WeightSyncBackend, scheme_of
from weightsync.schemes.relay import is_torchrls, relay_call
from weightsync.schemes.rendezvous import Rendezvous, Side, await_first_version, require_weights
from weightsync.schemes.sources import (
    checked,
    given_or_found,
    is_weightless,
    model_for_worker,
    processes_of,
    registered,
    weights_of,
)
from weightsync.schemes.worker_set import (
    Groups,
    WorkerSet,
    groups_of,
    has_factories,
    is_per_worker,
    per_worker,
    send_to_groups,
    worker_set_of,
)
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.process import forget_after_fork
from weightsync.weights.casting import wire_dtype_of
from weightsync.weights.meta_device import fill_in
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.target import Mode

#: The base, and what schemes read their arguments with.
__all__ = ["WeightSyncScheme", "checked", "given_or_found"]

logger = logging.getLogger("weightsync")

_ALWAYS_ON_SENDER = (
    *("num_workers", "model", "source_model", "cached_weights", "fence", "expected_workers"),
    *("weights", "params_map", "devices", "device_map_fn", "ctx"),
)
_ALWAYS_ON_WORKER = ("model", "worker_idx")


class WeightSyncScheme(abc.ABC):
    """One model across all workers: makes the sender in the trainer and the receivers in the workers.

    Both generations of TorchRL's API: `get_sender` and `get_receiver` give the objects of the first; `connect`, `send`
    and `receive` of the scheme itself are the second's. A pickled, copied or forked scheme carries its configuration
    only; each side is initialised once. A scheme object with both sides is two independent machines.

    Args:
        strategy: "state_dict" or "tensordict", or a `WeightStrategy`.
        verify: what a receiver compares before it applies a version, beside names, shapes, dtypes and length. "auto"
            (default): the digest of weights that travelled; of weights in memory that it shares with the trainer, the
            seal of that memory. "digest": also the digest of those. "layout": no digest.
        wire_dtype: "bfloat16", "float16" or "float32", or the torch dtype: wider floating tensors are cast to it, on
            their device, before they are sent, and the workers' models must have it (``model.to(torch.bfloat16)``).
            All other tensors travel as they are. A value that would become infinite is a `LayoutError`, and nothing
            is sent. Default: nothing is cast. Only the trainer's scheme reads it.
    """

    #: How received weights become live.
    apply_mode = Mode.COPY
    #: Whether `send` waits for its answers. If not, it returns what is PENDING, and the next `send` or `shutdown`
    #: settles it.
    sync = True
    #: Whether a send may name weights for some workers only: the others keep theirs.
    per_worker_weights = False
    #: What `init_on_sender` and `init_on_worker` take by keyword besides what all schemes do.
    _sender_arguments: tuple[str, ...] = ()
    _worker_arguments: tuple[str, ...] = ()
    #: Attributes that a copy is made without; `_begin` sets them anew.
    _not_copied: tuple[str, ...] = (
        *("_sender", "_receiver", "_context", "_given", "_worker_set", "_rendezvous", "_worker_idx", "_is_blank"),
    )

    def __init__(
        self,
        strategy: WeightStrategy | str = "state_dict",
        *,
        verify: Verify | str = Verify.AUTO,
        wire_dtype: torch.dtype | WireDtype | str | None = None,
    ) -> None:
        self._verify = Verify(verify)
        self._wire_dtype = wire_dtype_of(wire_dtype)
        self._strategy = strategy if isinstance(strategy, WeightStrategy) else WeightStrategy(strategy)
        self._begin()

    def _begin(self) -> None:
        """Become uninitialised on both sides."""
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._context: Callable[[], Any] = held(None)
        self._given: Mapping[str, Any] = {}
        self._worker_set = WorkerSet()
        self._rendezvous = Rendezvous()
        self._worker_idx: int | None = None
        #: Whether the worker's model came without weights, and serves nothing before its first version.
        self._is_blank = False
        forget_after_fork(self)

    @classmethod
    def from_backend(cls, backend: WeightSyncBackend | str, **kwargs: Any) -> WeightSyncScheme:
        """Make the scheme of a backend.

        Args:
            backend: "none" (or "direct"), "shared" (or "thread"), "process" (or "multiprocessing"), "distributed",
                "rpc", "ray", or a name given to `register_weight_sync_backend`.
            **kwargs: for its constructor.

        Raises:
            ConfigurationError: there is no such backend.
            MissingExtraError: (an ImportError) its optional package is not installed.
        """
        scheme: WeightSyncScheme = scheme_of(backend)(**kwargs)
        return scheme

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **kwargs: Any) -> None:
        """Make the sender and add the workers to it. Never waits.

        The links are laid here, or at `connect` where the scheme makes them itself.

        Args:
            model_id: the name of the model, the same on both sides; may be a path on the context.
            context: gives what is not given by keyword, from attributes of the same names, and the model by
                ``.get_model(model_id)`` or ``.get_cached_weights(model_id)``. Held weakly.
            **kwargs: how the workers are reached (see the scheme's own page); ``num_workers``, or what implies it:
                ``params_map`` (worker id to its weights), ``devices`` (one per worker), ``device_map_fn(worker_idx,
                weights)`` with ``num_workers``; ``model``, ``weights``, ``source_model``, ``cached_weights``: what a
                send without weights sends; ``ctx``, a multiprocessing context; ``fence`` (the incarnation to rise
                above, after `WorkerLostError.fence`); ``expected_workers``: the least number of workers that a send
                needs.

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing, unknown or contradictory.
        """
        if self._sender is not None:
            raise StateError("scheme", "initialised on the sender", "init_on_sender", ["get_sender", "close"])
        require_name(model_id, "model_id")
        given = checked(kwargs, (*self._sender_arguments, *_ALWAYS_ON_SENDER), "init_on_sender")
        fence = given.get("fence")
        if fence is not None:
            require_whole(fence, "fence", "the incarnation to rise above, from WorkerLostError.fence")
        expected = expected_number(given.get("expected_workers"))
        workers = worker_set_of(given, context, self._strategy)
        given = workers.counted(given)
        endpoints = self._endpoints(given, context, model_id)
        processes = processes_of(given.get("processes"), endpoints)
        sender = self.create_sender()
        self.per_worker_weights = self.per_worker_weights or has_factories(context)
        self._given, self._context, self._worker_set = given, held(context), workers
        sender.set_context(context, model_id)
        for worker_id, endpoint in endpoints.items():
            sender.add_worker(worker_id, endpoint, process=processes.get(worker_id))
        if not self._lays_links_at_connect(given, context):
            sender.connect(fence=fence)
        sender.expected_workers = expected
        self._sender = sender

    def init_on_worker(self, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen for the sender. Never waits for it.

        Args:
            model_id: the name of the model, the same on both sides. Without a model it is resolved on the context when
                the first weights are received.
            context: gives what is not given by keyword, from attributes of the same names, and the model by
                ``.get_model(model_id)``. Held weakly.
            **kwargs: how the sender reaches us (see the scheme's own page), ``model``, ``worker_idx``.

        Raises:
            StateError: initialised already.
            ConfigurationError: something is missing or unknown, or there is neither a model nor a context.
        """
        if self._receiver is not None:
            raise StateError("scheme", "initialised on the worker", "init_on_worker", ["get_receiver", "close"])
        require_name(model_id, "model_id")
        given = checked(kwargs, (*self._worker_arguments, *_ALWAYS_ON_WORKER), "init_on_worker")
        endpoint = self._endpoint(given, context, model_id)
        model = self._worker_model(given, context, model_id)
        receiver = self.create_receiver()
        receiver.set_context(context, model_id)
        receiver.register_model(weights_of(model))
        receiver.register_worker_transport(endpoint)
        self._become_worker(given, context)
        self._receiver = receiver

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        """Make the receiver and listen for the sender: the second generation's name of `init_on_worker`.

        Args:
            model_id: the name of the model, the same on both sides.
            context: as for `init_on_worker`; ``context.worker_idx`` is read too.
            **kwargs: ``worker_idx`` (this worker's id), ``model``, and how the sender reaches us. A model on the meta
                device, as TorchRL's collectors give it, gets memory on the CPU, and its first values at `connect`.

        Raises:
            StateError, ConfigurationError: as `init_on_worker`.
            LayoutError: a buffer is on the meta device, and weights do not include it.
        """
        model = kwargs.get("model")
        is_blank = isinstance(model, nn.Module) and fill_in(model)
        self.init_on_worker(model_id, context, **kwargs)
        self._is_blank = is_blank

    def _become_worker(self, given: Mapping[str, Any], context: Any) -> None:
        """Keep what the worker's side was given."""
        worker_idx = given_or_found(given, context, "worker_idx")
        self._worker_idx = self._worker_idx if worker_idx is None else require_worker_id(worker_idx)
        if self._sender is None:
            self._context = held(context)

    def _endpoints(self, given: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        """How each worker is reached: worker id to what `lay_link` takes.

        Raises ConfigurationError: it is not given, or contradictory. No link has been laid.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not override init_on_sender(): do so, or use create_sender() and add_worker()."
        )

    def _endpoint(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """How the sender reaches us: what `listen` takes. Raises ConfigurationError: it is not given."""
        raise NotImplementedError(
            f"{type(self).__name__} does not override init_on_worker(): do so, or use create_receiver() and "
            "register_worker_transport()."
        )

    def _worker_model(self, given: Mapping[str, Any], context: Any, model_id: str) -> Any:
        """What the weights are applied to: a model, or a path on the context."""
        return model_for_worker(given, context, model_id)

    def _lays_links_at_connect(self, given: Mapping[str, Any], context: Any) -> bool:
        """Whether the handshake is sent at `connect`, when the worker can find it, and not at `init_on_sender`."""
        return False

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | Timeout | None = Timeout.START,
    ) -> None:
        """Connect this side: the workers get their first weights.

        In the trainer: lay the links, send the first weights and wait until every worker serves them; without weights
        (none given, no model registered) wait until every worker has answered the handshake. In a worker: wait for the
        first version, apply it, and receive in the background from then on; if the sender has no weights, wait for its
        handshake. If this object has both sides, the first call connects the trainer's, and ``worker_idx`` means the
        worker's.

        Args:
            worker_idx: in a worker, its id, if it was not given before.
            weights: in the trainer, the first weights: as for `send`.
            timeout: seconds; None: for ever; default: five times `WEIGHTSYNC_TIMEOUT` or 60, since workers may still
                be starting.

        Raises:
            StateError: this side has connected already, or neither side was initialised.
            ConfigurationError: ``worker_idx`` on the sender's side, or ``weights`` on the receiver's.
            AckTimeoutError: in the trainer, some worker did not answer in time; in a worker, nothing arrived in time.
                `connect` may be called again.
            WorkerLostError, RefusedError, SyncError, TransportError, WeightSyncError: the first weights were not
                applied everywhere, or not here.
        """
        deadline = Deadline(timeout)
        side = self._rendezvous.next_side(self._sender, self._receiver, worker_idx, weights)
        with self._rendezvous.connecting(side):
            if side is Side.SENDER:
                self._connect_sender(weights, deadline)
            else:
                self._connect_receiver(worker_idx, deadline)

    def _connect_sender(self, weights: Any, deadline: Deadline) -> None:
        sender = self.get_sender()
        sends = self._rendezvous.sends = self._rendezvous.sends or SequentialSends(sender)
        if weights is None:
            weights = self._worker_set.weights or None
        has_weights = weights is not None or self._registered_weights() is not None
        groups = self._groups(weights, None) if has_weights else []
        if sender.state is State.UNINITIALIZED:
            sender.connect(fence=self._given.get("fence"), weights=groups[0][0] if groups else None)
        if groups:
            send_to_groups(sends.send, groups, deadline, OnFailure.RAISE)
        else:
            sender.await_workers(deadline.remaining)
        self._workers_answered()

    def _connect_receiver(self, worker_idx: int | None, deadline: Deadline) -> None:
        receiver = self.get_receiver()
        if worker_idx is not None:
            self._worker_idx = require_worker_id(worker_idx)
        background = Background(receiver, self._relay_call)
        background.start()
        try:
            self._await_first(receiver, background, deadline)
        except BaseException:
            background.stop()
            raise

    def _await_first(self, receiver: WeightReceiver, background: Background, deadline: Deadline) -> None:
        await_first_version(receiver, background, deadline)
        if self._is_blank:
            require_weights(receiver)

    def _workers_answered(self) -> None:
        """Called after `connect` and each `send`: a scheme lets go of what it kept for workers until they answer."""
        return

    def _relay_call(self) -> RelayCall | None:
        """How a version is passed on to this worker's own workers; None: it has none."""
        receiver = self.get_receiver()
        relay = relay_call(self.context, receiver.model_id)
        if relay is None:
            return None
        form = WeightStrategy("tensordict") if is_torchrls(self.context) else self._strategy
        return lambda: relay(receiver.version, lambda: form.extract_weights(receiver.target().destination))

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
            weights: as for `WeightSender.send`; or a dict of worker ids to weights: workers whose weights are equal
                share a version, and the others' versions are sent one after another. With ``per_worker_weights`` it
                may leave workers out; they keep what they serve.
            worker_ids: one or several worker ids; None: all workers.
            timeout: seconds until the wait ends; None: for ever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: "raise", or "report": return the report whatever is in it.

        Returns:
            Each worker's outcome; PENDING with ``sync=False``, where the next send or `shutdown` reports it.

        Raises:
            StateError: not initialised, not connected, or shut down.
            ConfigurationError, LayoutError, AckTimeoutError, WorkerLostError, RefusedError, SyncError: as
                `WeightSender.send`. With ``sync=False`` the outcomes are those of the update before; this one was
                dispatched all the same.
        """
        sends = self._rendezvous.connected_sends(self._sender, "send")
        groups = self._groups(weights, worker_ids_of(worker_ids))
        send = sends.send if self.sync else sends.dispatch
        report = send_to_groups(send, groups, Deadline(timeout), OnFailure(on_failure))
        self._workers_answered()
        return report

    def _groups(self, weights: Any, worker_ids: Sequence[int] | None) -> Groups:
        """Weights, and the workers that get them (None: all)."""
        sender = self.get_sender()
        if weights is None and self._worker_set.weights and self._registered_weights() is None:
            own: Mapping[int, Any] | None = self._worker_set.weights
        else:
            own = per_worker(weights, "weights") if is_per_worker(weights) else None
        if own is None:
            prepared = self.weights_to_send(weights, sender.model_id)
            return [(prepared, None if worker_ids is None else list(worker_ids))]
        if worker_ids is None:
            worker_ids = [each for each in sender.worker_ids if each in own or not self.per_worker_weights]
        return groups_of(
            own,
            worker_ids,
            sender.worker_ids,
            lambda each: self.weights_to_send(each, sender.model_id),
        )

    def receive(self, timeout: float | None = None) -> Any:
        """Wait for the next version to go live.

        Args:
            timeout: seconds to wait; 0: do not wait; None: until one arrives or the sender is gone.

        Returns:
            The weights that the model holds now, if a new version went live since the last call; None: none arrived, or
            it was refused.

        Raises:
            StateError: not initialised, not connected, or shut down.
            TransportError: the sender is gone.
            WeightSyncError: what happened in the background since the last call; raised once.
        """
        receiver = self._rendezvous.connected_receiver(self._receiver, "receive")
        return self._strategy.extract_weights(receiver.target().destination) if receiver.receive(timeout) else None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights by hand: see `WeightReceiver.apply_weights`.

        Raises:
            StateError: the receiver's side is not initialised, or closed.
            ConfigurationError, LayoutError: no model, or weights that do not fit; nothing was changed.
        """
        self.get_receiver().apply_weights(weights, inplace=inplace)

    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """The weights that a send sends.

        Args:
            weights: None: the cached weights, else the model found by `get_model`, the path ``model_id`` on the
                context, its fallback policy, or the model given at init, in this order. A module is extracted; a str is
                a path on the context; anything else is taken as it is.
            model_id: the model that is sent.
            strategy: how a module's weights are extracted.
            context: where models are found; None: the one given at init.

        Raises:
            ConfigurationError: None was given and no model is found.
            ModelPathError: a path does not resolve.
        """
        found = self._source(weights, model_id, context)
        return strategy.extract_weights(found) if isinstance(found, nn.Module) else found

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """As `prepare_weights`, but a module is read straight from its own tensors, and not extracted first.

        A subclass that overrides `prepare_weights`, or a strategy that overrides `extract_weights`, is asked as ever.
        """
        ours = type(self).prepare_weights is WeightSyncScheme.prepare_weights
        if ours and type(self._strategy).extract_weights is WeightStrategy.extract_weights:
            return self._source(weights, model_id, context)
        return self.prepare_weights(weights, model_id, self._strategy, context)

    def _source(self, weights: Any, model_id: str, context: Any) -> Any:
        """What `prepare_weights` takes the weights of."""
        if is_weightless(weights) and any(
            weights is known for known in (self._given.get("model"), optional(self.context, "policy"))
        ):
            return {}
        found = weights
        if weights is None or isinstance(weights, str):
            context = context if context is not None else self._context()
            found = self._found(model_id, context) if weights is None else _resolve_model(context, weights)
        if found is None:
            raise ConfigurationError(
                f"send() was given no weights and no model is registered for {model_id!r}: pass weights, or give "
                "init_on_sender() model=, source_model=, cached_weights= or a context that has the model. Nothing was "
                "sent."
            )
        return found

    def _registered_weights(self) -> Any:
        return self._found(self.get_sender().model_id, self._context())

    def _found(self, model_id: str, context: Any) -> Any:
        """What a send without weights sends; None: nothing is registered."""
        return registered(self._given, context, model_id)

    def get_sender(self) -> WeightSender:
        """The sender.

        Raises:
            StateError: `init_on_sender` was not called in this process.
        """
        if self._sender is None:
            raise StateError("scheme", "uninitialized on the sender", "get_sender", ["init_on_sender"])
        return self._sender

    def get_receiver(self) -> WeightReceiver:
        """The receiver.

        Raises:
            StateError: `init_on_worker` was not called in this process.
        """
        if self._receiver is None:
            raise StateError("scheme", "uninitialized on the worker", "get_receiver", ["init_on_worker"])
        return self._receiver

    def create_sender(self) -> WeightSender:
        """A sender without workers: `register_worker` adds them."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A receiver without a link: `register_model` and `register_worker_transport` set it up."""
        return WeightReceiver(self)

    def close(self) -> None:
        """Close whichever sides were initialised. Closing twice is allowed."""
        for side in (self._sender, self._receiver):
            if side is not None:
                side.close()

    def shutdown(self) -> None:
        """End both sides for good, the background thread too. Calling it again does nothing.

        An update whose outcome was not reported yet is waited for first (at most 60 s or `WEIGHTSYNC_TIMEOUT`); if it
        failed, that is logged, since nothing is raised here.
        """
        sends = self._rendezvous.sends
        if sends is not None and self._sender is not None and self._sender.state is State.PENDING_ASYNC:
            report = sends.settle()
            if report is not None and report.failed:
                logger.warning("at shutdown: %s", report.error())
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not is_clean(error):
            for side in (self._sender, self._receiver):
                if side is not None:
                    side.fail(error)  # the other ends are told
        self.close()

    @abc.abstractmethod
    def create_transport(self, pipe_or_context: Any) -> Any:
        """A transport to one worker, or to the sender."""

    @property
    def packer(self) -> Packer:
        """A new packer with buffers of the kind that this scheme's links carry best."""
        return Packer(self._verify, self._wire_dtype)

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over ``endpoint`` for one model; ``peer`` names the other end in messages.

        Here ``endpoint`` is a transport, TorchRL's or the user's own, or `create_transport` makes one of it.

        Raises:
            ConfigurationError: no link can be made of it.
        """
        transport = self._transport_for(endpoint)
        if isinstance(transport, LinkTransport):
            return transport.link(model_id, peer)
        if transport is None:
            raise ConfigurationError(
                f"{type(self).__name__} lays no links: give it a TransportBackend, have create_transport() return one, "
                "or override lay_link() to return a Link of your own."
            )
        return user_link(transport, peer)

    def _transport_for(self, endpoint: Any) -> LinkTransport | BareTransport | None:
        """The transport that reaches an endpoint, TorchRL's or the user's own; None: there is none."""
        made = endpoint if isinstance(endpoint, BareTransport) else self.create_transport(endpoint)
        return made if isinstance(made, LinkTransport | BareTransport) else None

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Give ``accept`` the links by which senders reach us at ``endpoint``; here there is just one, at once.

        A user's own transport, which ``endpoint`` is or `create_transport` makes of it, is asked for weights by a
        thread.

        Raises:
            ConfigurationError: no link can be made of the endpoint.
        """
        transport = self._transport_for(endpoint)
        lays_links = type(self).lay_link is not WeightSyncScheme.lay_link
        if isinstance(transport, LinkTransport) and (transport is endpoint or not lays_links):
            return transport.listen(model_id, accept)
        if transport is not None and not isinstance(transport, LinkTransport):
            return listen_by(transport, model_id, self.strategy, accept)
        accept(self.lay_link(endpoint, model_id, "the sender"))
        return lambda: None

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``.

        Raises:
            ConfigurationError: this scheme has no pipes.
        """
        transport = self._transport_for(endpoint)
        if isinstance(transport, LinkTransport):
            return transport.user_messages()
        raise ConfigurationError(f"{type(self).__name__} has no pipes that could carry messages of your own.")

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

    def published(self, model_id: str, weights: Any) -> None:
        """Called with each version's weights before it is dispatched; keeps none of them."""
        return

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
        """What wider floating tensors are cast to before they are sent; None: nothing is cast."""
        return self._wire_dtype

    @property
    def initialized_on_sender(self) -> bool:
        """Whether `init_on_sender` was called in this process."""
        return self._sender is not None

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether `init_on_receiver` was called in this process."""
        return self._receiver is not None

    #: Names that programs written for TorchRL read; setting them raises.
    _initialized_on_sender = initialized_on_sender
    _initialized_on_worker = initialized_on_receiver
    _initialized_on_receiver = initialized_on_receiver

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether the trainer has connected."""
        return self._rendezvous.is_connected(Side.SENDER)

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this worker has connected."""
        return self._rendezvous.is_connected(Side.RECEIVER)

    @property
    def model_id(self) -> str | None:
        """The name of the model; None before an init."""
        side = self._sender or self._receiver
        return None if side is None else side.model_id

    @property
    def worker_idx(self) -> int | None:
        """This worker's id; None in the trainer, and if it was not given."""
        return self._worker_idx

    @worker_idx.setter
    def worker_idx(self, worker_idx: int | None) -> None:
        if self._sender is not None and self._receiver is None and worker_idx is not None:
            raise StateError("scheme", "initialised on the sender", "worker_idx =", ["init_on_receiver"])
        self._worker_idx = None if worker_idx is None else require_worker_id(worker_idx)

    @property
    def context(self) -> Any:
        """The context, held weakly; None: none was given, or it was collected."""
        try:
            return self._context()
        except ConfigurationError:
            return None

    @context.setter
    def context(self, context: Any) -> None:
        self._context = held(context)
        for side in (self._sender, self._receiver):
            if side is not None:
                side.set_context(context)

    @property
    def model(self) -> Any:
        """In a worker: what the weights are applied to; in the trainer: what a send without weights sends.

        Raises (reading):
            ModelPathError: (an AttributeError) the model's path does not resolve on the context.
        """
        if self._receiver is not None:
            model = self._receiver.model
            return _resolve_model(self.context, model) if isinstance(model, str) else model
        if self._sender is None:
            return None
        return self._found(self._sender.model_id, self.context)

    @model.setter
    def model(self, model: Any) -> None:
        if self._receiver is not None:
            self._receiver.register_model(weights_of(model))
        else:
            self._given = {**self._given, "model": model}

    @property
    def weights(self) -> Any:
        """The weights of `model`, in the strategy's format; None: there is no model."""
        model = self.model
        return self._strategy.extract_weights(model) if isinstance(model, nn.Module) else model

    @property
    def sender_transports(self) -> dict[int, Link]:
        """Each worker's link, by its id; empty in a worker, and before the links are laid."""
        return {} if self._sender is None else self._sender.transports()

    @property
    def receiver_transport(self) -> Link | None:
        """This worker's link to the sender, once the handshake was made."""
        return None if self._receiver is None else self._receiver.driver.in_force()

    @property
    def shared_transport(self) -> None:
        """None: each worker has a link of its own."""
        return

    def _copy_uninitialized(self) -> Self:
        """A copy, which carries the configuration only: TorchRL's name of `copy.copy`."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def forget(self) -> None:
        """Become a copy: called in a forked child."""
        self._begin()
