"""The verbs of TorchRL's second generation, on the sender and the receiver that `WeightSyncScheme` makes."""

from __future__ import annotations

import abc
import contextlib
import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from weightsync.clock import Deadline, Timeout
from weightsync.engine.background import Background, HandOn
from weightsync.engine.copies import require_worker_id
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender, worker_ids_of
from weightsync.engine.sequential import SequentialSends
from weightsync.errors import AckTimeoutError, ConfigurationError, StateError, WeightSyncError
from weightsync.options import OnFailure, option
from weightsync.protocol._tables import State
from weightsync.protocol.report import SyncReport
from weightsync.schemes.relay import handing_on, is_torchrls
from weightsync.schemes.sources import given_or_found, registered, weights_of
from weightsync.schemes.worker_set import Fleet, grouped, is_per_worker, per_worker, send_to_groups
from weightsync.transports.base import Link
from weightsync.weights.context import held
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.strategy import WeightStrategy


class Meeting(enum.Enum):
    """Where one side stands with `connect`."""

    AHEAD = "not connected"
    UNDER_WAY = "connecting"
    HELD = "connected"


class Sides:
    """The two sides of a scheme, as the second generation shows them."""

    _sender: WeightSender | None
    _receiver: WeightReceiver | None
    _context: Callable[[], Any]
    _given: Mapping[str, Any]
    _fleet: Fleet
    _strategy: WeightStrategy

    #: What a copy is made without.
    _left_behind: tuple[str, ...] = ("_meetings", "_successive", "_background", "_worker_idx", "_blank")

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

    def close(self) -> None:
        """Close whichever sides were initialised. Closing twice is allowed."""
        for side in (self._sender, self._receiver):
            if side is not None:
                side.close()

    def _fail(self, error: BaseException) -> None:
        """The block of code that used the scheme was left by an exception: workers' senders are told."""
        for side in (self._sender, self._receiver):
            if side is not None:
                side.fail(error)

    def _start_over(self) -> None:
        self._meetings = {"sender": Meeting.AHEAD, "receiver": Meeting.AHEAD}
        self._successive: SequentialSends | None = None
        self._background: Background | None = None
        self._worker_idx: int | None = None
        #: Whether the worker's model came without weights, and serves nothing before its first version.
        self._blank = False

    def _arrive(self, given: Mapping[str, Any], context: Any) -> None:
        """The receiver's side is being initialised."""
        worker_idx = given_or_found(given, context, "worker_idx")
        self._worker_idx = self._worker_idx if worker_idx is None else require_worker_id(worker_idx)
        if self._sender is None:
            self._context = held(context)

    def _arrived(self) -> None:
        """Workers have answered: what was kept for them until then may go."""
        return

    # --------------------------------------------------------------------------------------- whose turn it is

    def _is_senders_turn(self, worker_idx: int | None, weights: Any) -> bool:
        ahead = self._sender is not None and (
            self._receiver is None or self._meetings["sender"] is Meeting.AHEAD or weights is not None
        )
        if self._sender is None and self._receiver is None:
            raise StateError("scheme", "uninitialized", "connect", ["init_on_sender", "init_on_receiver"])
        if ahead and worker_idx is not None and self._receiver is None:
            raise ConfigurationError("worker_idx= is the worker's to give: in the trainer call connect() without it.")
        if self._sender is None and weights is not None:
            raise ConfigurationError("weights= is the trainer's to give: in a worker call connect() without it.")
        return ahead and worker_idx is None

    @contextlib.contextmanager
    def _meeting_of(self, side: str) -> Iterator[None]:
        """The meeting is held once, unless it fails."""
        if self._meetings[side] is not Meeting.AHEAD:
            raise StateError(f"scheme ({side})", self._meetings[side].value, "connect", ["send", "receive", "shutdown"])
        self._meetings[side] = Meeting.UNDER_WAY
        try:
            yield
        except BaseException:
            self._meetings[side] = Meeting.AHEAD
            raise
        self._meetings[side] = Meeting.HELD

    def _connected_sender(self, asked: str) -> SequentialSends:
        if self._sender is None:
            raise StateError("scheme", "uninitialized on the sender", asked, ["init_on_sender"])
        if self._successive is None or self._meetings["sender"] is not Meeting.HELD:
            raise StateError("scheme (sender)", self._meetings["sender"].value, asked, ["connect"])
        return self._successive

    def _connected_receiver(self, asked: str) -> WeightReceiver:
        if self._receiver is None:
            raise StateError("scheme", "uninitialized on the receiver", asked, ["init_on_receiver"])
        if self._meetings["receiver"] is not Meeting.HELD:
            raise StateError("scheme (receiver)", self._meetings["receiver"].value, asked, ["connect"])
        return self._receiver

    def _found(self, model_id: str, context: Any) -> Any:
        """What a send without weights means; None: nothing is registered."""
        return registered(self._given, context, model_id)

    # ---------------------------------------------------------------------------------------------- properties

    @property
    def strategy_str(self) -> str:
        """The name of the strategy."""
        return str(self._strategy)

    @property
    def initialized_on_sender(self) -> bool:
        """Whether `init_on_sender` was called in this process."""
        return self._sender is not None

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether `init_on_receiver` was called in this process."""
        return self._receiver is not None

    #: Names that programs written for TorchRL read; who sets them is told that they are read-only.
    _initialized_on_sender = initialized_on_sender
    _initialized_on_worker = initialized_on_receiver
    _initialized_on_receiver = initialized_on_receiver

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether the trainer has connected."""
        return self._meetings["sender"] is Meeting.HELD

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this worker has connected."""
        return self._meetings["receiver"] is Meeting.HELD

    @property
    def model_id(self) -> str | None:
        """The name of the model; None before an init."""
        side = self._sender or self._receiver
        return None if side is None else side.model_id

    @property
    def worker_idx(self) -> int | None:
        """This worker's id; None if it was not told, and in the trainer."""
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
        """In a worker: what the weights are applied to; in the trainer: what a send without weights means.

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


logger = logging.getLogger("weightsync")


class Rendezvous(Sides):
    """`connect`, then `send` on one side and `receive` on the other.

    A scheme whose object has both sides is two independent machines: what tells them apart is said at each verb.
    """

    #: Whether `send` waits for its answers. If not it returns what is PENDING; the next `send` or `shutdown` settles
    #: it.
    sync = True
    #: Whether workers may be given weights of their own one at a time: those that a send leaves out keep theirs.
    per_worker_weights = False

    # ------------------------------------------------------------------------------------------- rendez-vous

    @abc.abstractmethod
    def prepare_weights(self, weights: Any, model_id: str, strategy: WeightStrategy, context: Any = None) -> Any:
        """The weights that a send means."""

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float | Timeout | None = Timeout.START,
    ) -> None:
        """Meet: the workers get their first weights.

        In the trainer: lay the links, send the first weights and wait until every worker serves them; without weights
        (none given, no model registered) wait until every worker has answered the handshake. In a worker: wait for the
        first version, apply it, and from then on receive in the background; where the sender has none, wait for its
        handshake. Of an object with both sides it is the trainer's turn first; ``worker_idx`` says the worker's.

        Args:
            worker_idx: in a worker, its id, if it was not told before.
            weights: in the trainer, the first weights: as for `send`.
            timeout: seconds; None: for ever; default: five times `WEIGHTSYNC_TIMEOUT` or 60, since workers may still
                be starting.

        Raises:
            StateError: this side has connected already, or neither side was initialised.
            ConfigurationError: ``worker_idx`` on the sender's side, or ``weights`` on the receiver's.
            AckTimeoutError: in the trainer, some worker did not answer in time; in a worker, nothing came in time. It
                may be called again.
            WorkerLostError, RefusedError, SyncError, TransportError, WeightSyncError: the first weights were not
                applied everywhere, or not here.
        """
        deadline = Deadline(timeout)
        if self._is_senders_turn(worker_idx, weights):
            with self._meeting_of("sender"):
                self._connect_sender(weights, deadline)
        else:
            with self._meeting_of("receiver"):
                self._connect_receiver(worker_idx, deadline)

    def _connect_sender(self, weights: Any, deadline: Deadline) -> None:
        sender = self.get_sender()
        successive = self._successive = self._successive or SequentialSends(sender)
        first = self._first_weights(weights)
        if sender.state is State.UNINITIALIZED:
            sender.connect(fence=self._given.get("fence"), weights=first[0][0] if first else None)
        if first:
            send_to_groups(successive.send, first, deadline, OnFailure.RAISE)
        else:
            sender.await_workers(deadline.remaining)
        self._arrived()

    def _first_weights(self, weights: Any) -> list[tuple[Any, list[int] | None]]:
        if weights is None and not self._fleet.weights and self._source() is None:
            return []
        return self._groups(weights if weights is not None else self._fleet.weights or None, None)

    def _source(self) -> Any:
        return self._found(self.get_sender().model_id, self._context())

    def _connect_receiver(self, worker_idx: int | None, deadline: Deadline) -> None:
        receiver = self.get_receiver()
        if worker_idx is not None:
            self._worker_idx = require_worker_id(worker_idx)
        background = Background(receiver, self._handing_on)
        background.start()
        try:
            self._await_first(receiver, background, deadline)
        except BaseException:
            background.stop()
            raise
        self._background = background

    def _await_first(self, receiver: WeightReceiver, background: Background, deadline: Deadline) -> None:
        before, driver = receiver.last_refusal, receiver.driver

        def met() -> bool:
            return receiver.version is not None or receiver.last_refusal != before or without()

        def without() -> bool:
            return driver.greeting is not None and not driver.greeting.layout and not driver.greeting.version

        if not background.wait_until(met, deadline):
            raise AckTimeoutError(
                f"no first version of {receiver.model_id!r} came in time: the sender has not connected, or has not "
                "sent. The model is unchanged; connect() may be called again."
            )
        background.seen()
        if receiver.last_refusal != before and receiver.version is None:
            raise WeightSyncError(
                f"the first version of {receiver.model_id!r} was refused and its sender was told: "
                f"{receiver.last_refusal}"
            )
        if self._blank and receiver.version is None:
            error = ConfigurationError(
                f"the model {receiver.model_id!r} came without its weights (on the meta device), and the trainer has "
                "none to begin with: give its init_on_sender() model= or weights=, or make the model with weights."
            )
            receiver.fail(error)  # the trainer may still be waiting for the other workers: it is told why
            raise error

    def _handing_on(self) -> HandOn | None:
        """How a version is handed on to workers of our own; None: we have none."""
        receiver = self.get_receiver()
        hand_on = handing_on(self.context, receiver.model_id)
        if hand_on is None:
            return None
        form = WeightStrategy("tensordict") if is_torchrls(self.context) else self._strategy
        return lambda: hand_on(receiver.version, lambda: form.extract_weights(receiver.target().destination))

    def _extracted(self, receiver: WeightReceiver) -> Any:
        return self._strategy.extract_weights(receiver.target().destination)

    # ----------------------------------------------------------------------------------------------- sending

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        timeout: float | Timeout | None = Timeout.DEFAULT,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send weights as the next version, and wait until every target has answered or is lost (``sync=True``).

        An update whose failure was already reported is abandoned first; one that nobody was told about is waited for
        first.

        Args:
            weights: as for `WeightSender.send`; or a dict of worker ids to weights: workers whose weights are equal
                share a version, and the others' versions are sent one after another. With ``per_worker_weights`` it
                may leave workers out; they keep what they serve.
            worker_ids: one or several ids on the roll; None: all.
            timeout: seconds until the wait ends; None: for ever; default: `WEIGHTSYNC_TIMEOUT` or 60.
            on_failure: "raise", or "report": return the report whatever is in it.

        Returns:
            What became of it, worker by worker; PENDING with ``sync=False``, where the next send or `shutdown` tells.

        Raises:
            StateError: not initialised, not connected, or shut down.
            ConfigurationError, LayoutError, AckTimeoutError, WorkerLostError, RefusedError, SyncError: as
                `WeightSender.send`. With ``sync=False`` the outcomes are those of the update before; this one was
                dispatched all the same.
        """
        successive = self._connected_sender("send")
        groups = self._groups(weights, worker_ids_of(worker_ids))
        send = successive.send if self.sync else successive.dispatch
        report = send_to_groups(send, groups, Deadline(timeout), option(OnFailure, on_failure))
        self._arrived()
        return report

    def _groups(self, weights: Any, worker_ids: Sequence[int] | None) -> list[tuple[Any, list[int] | None]]:
        """Weights and who gets them (None: all)."""
        sender = self.get_sender()
        own = self._own_weights(weights)
        if own is None:
            prepared = self.prepare_weights(weights, sender.model_id, self._strategy, None)
            return [(prepared, None if worker_ids is None else list(worker_ids))]
        wanted = self._named(own) if worker_ids is None else worker_ids
        missing = sorted(set(wanted) - own.keys())
        unknown = sorted(own.keys() - set(sender.worker_ids))
        if missing or unknown:
            raise ConfigurationError(
                f"weights were given worker by worker, but none for {missing} and some for {unknown}, who are not on "
                "the roll. Nothing was sent. Say by worker_ids= who is meant, or set the scheme's per_worker_weights "
                "where workers are given theirs one at a time."
            )
        prepared = {
            worker: self.prepare_weights(own[worker], sender.model_id, self._strategy, None) for worker in wanted
        }
        return [(weights, workers) for weights, workers in grouped(prepared)]

    def _named(self, own: Mapping[int, Any]) -> Sequence[int]:
        """Who is meant by weights worker by worker: all, unless workers are given theirs one at a time."""
        everybody = self.get_sender().worker_ids
        return [worker for worker in everybody if worker in own] if self.per_worker_weights else everybody

    def _own_weights(self, weights: Any) -> Mapping[int, Any] | None:
        """Weights worker by worker, if that is how they are given."""
        if is_per_worker(weights):
            return per_worker(weights, "weights")
        if weights is None and self._fleet.weights and self._source() is None:
            return self._fleet.weights
        return None

    # --------------------------------------------------------------------------------------------- receiving

    def receive(self, timeout: float | None = None) -> Any:
        """Wait for the next version to go live.

        Args:
            timeout: seconds to wait; 0: do not wait; None: until one comes or the sender is gone.

        Returns:
            The weights that the model holds now, if a new version went live since the last call; None: none came, or it
            was refused.

        Raises:
            StateError: not initialised, not connected, or shut down.
            TransportError: the sender is gone.
            WeightSyncError: what happened in the background since the last call, told once.
        """
        receiver = self._connected_receiver("receive")
        return self._extracted(receiver) if receiver.receive(timeout) else None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights by hand: see `WeightReceiver.apply_weights`.

        Raises:
            StateError: the receiver's side is not initialised, or closed.
            ConfigurationError, LayoutError: no model, or weights that do not fit; nothing was changed.
        """
        self.get_receiver().apply_weights(weights, inplace=inplace)

    # ------------------------------------------------------------------------------------------------- ending

    def shutdown(self) -> None:
        """End both sides for good, the background thread too. Again: nothing happens.

        An update that nobody was told about is waited for first (60 s or `WEIGHTSYNC_TIMEOUT` at most); if it failed
        that is logged, since nothing is raised here.
        """
        if self._successive is not None and self._sender is not None and self._sender.state is State.PENDING_ASYNC:
            report = self._successive.settle()
            if report is not None and report.failed:
                logger.warning("at shutdown: %s", report.error())
        self.close()
