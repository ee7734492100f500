"""What the second generation's verbs know of the two sides of a scheme, and the properties that show it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from weightsync.background import Background
from weightsync.context import held
from weightsync.errors import ConfigurationError, StateError
from weightsync.paths import _resolve_model
from weightsync.receiver import WeightReceiver
from weightsync.schemes.fleet import Fleet
from weightsync.schemes.sources import given_or_found, registered
from weightsync.sender import WeightSender
from weightsync.side import require_worker_id
from weightsync.strategy import WeightStrategy
from weightsync.successive import Successive
from weightsync.transports.base import Link


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
    _left_behind: tuple[str, ...] = ("_meetings", "_successive", "_background", "_worker_idx")

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
        self._successive: Successive | None = None
        self._background: Background | None = None
        self._worker_idx: int | None = None

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

    def _connected_sender(self, asked: str) -> Successive:
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
            self._receiver.register_model(model)
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
