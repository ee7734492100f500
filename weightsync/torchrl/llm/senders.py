"""What the senders and transports of all engines share: a `WeightSender` over one engine's link."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from weightsync.clock import Deadline, Timeout, seconds
from weightsync.engine.context import optional
from weightsync.engine.sequential import SequentialSends
from weightsync.errors import ConfigurationError, StateError
from weightsync.options import OnFailure, whole_number
from weightsync.protocol.report import SyncReport
from weightsync.schemes.engines.client import Engine
from weightsync.schemes.engines.scheme import EngineWeightSyncScheme
from weightsync.weights.strategy import WeightStrategy

#: The names of a model's tensors, with their dtypes and shapes.
Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


def get_model_metadata(model: Any) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """The dtype and shape of each tensor that is sent for a model, by its name; a LoRA model is merged on a copy.

    Raises:
        ConfigurationError: (a ValueError) weights cannot be taken from it.
    """
    found = WeightStrategy("state_dict").extract_weights(model)
    return {name: (value.dtype, value.shape) for name, value in found.items() if isinstance(value, Tensor)}


def at_least_one(value: object, argument: str) -> int:
    """A number, 1 or more. Raises ConfigurationError: it is not."""
    number = whole_number(value)
    if not number:
        raise ConfigurationError(f"{argument}= is {value!r}: give a whole number, 1 or more.")
    return number


class EngineTransport:
    """One engine, and its sender. A send succeeds completely, or raises; a late answer never counts for another send.

    Args:
        timeout: seconds until `send_weights` ends; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.
    """

    def __init__(self, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        seconds(timeout)
        self.timeout = timeout
        self._scheme: EngineWeightSyncScheme | None = None
        self._sends: SequentialSends | None = None

    def _connect(self, engine: Engine) -> None:
        """Create a link to the engine, in place of the previous one."""
        self.shutdown()
        scheme = EngineWeightSyncScheme()
        scheme.init_on_sender("policy", engines=[engine])
        self._scheme, self._sends = scheme, SequentialSends(scheme.get_sender())

    def send_weights(self, model_id: str, weights: Any) -> SyncReport:
        """Send weights to the engine, and wait until it has answered.

        Args:
            model_id: the model, for messages.
            weights: a module, a TensorDict or a dict.

        Returns:
            The report; its evidence is CALL.

        Raises:
            StateError: (a RuntimeError) `init_all_workers_group` was not called.
            AckTimeoutError, WorkerLostError, RefusedError: as for `WeightSender.send`. After WorkerLostError call
                `init_all_workers_group` again, once the engine was started again.
        """
        if self._sends is None:
            raise StateError(
                type(self).__name__, "uninitialized", "send_weights", ["init_all_workers_group"], f"{model_id!r}:"
            )
        return self._sends.send(weights, None, Deadline(self.timeout), OnFailure.RAISE)

    def check_connection(self) -> bool:
        """Whether `init_all_workers_group` was called, and the engine has not been lost since then."""
        return self._scheme is not None and self._scheme.get_sender().workers[0].open

    def shutdown(self) -> None:
        """End the link, and a call in progress. `init_all_workers_group` creates a new link."""
        scheme, self._scheme, self._sends = self._scheme, None, None
        if scheme is not None:
            scheme.close()


class SendingScheme(Protocol):
    """The attributes of its scheme that a sender reads."""

    @property
    def strategy(self) -> WeightStrategy:
        """How weights are taken from a model."""


class EngineSender:
    """Sends a model's weights by a transport, and notifies its collectors.

    Args:
        scheme: the scheme that made it.
    """

    _scheme: SendingScheme

    def __init__(self, scheme: SendingScheme) -> None:
        self._scheme = scheme
        self._model: Callable[[], Any] = _no_model
        self._collectors: list[Any] = []
        self._transport: Any = None

    def register_model(self, model: Any) -> None:
        """Send this model's weights when `update_weights` is given none. It is held weakly.

        Raises:
            ConfigurationError: it cannot be held weakly: None, or a dict.
        """
        try:
            self._model = weakref.ref(model)
        except TypeError:
            raise ConfigurationError(
                f"register_model() was given a {type(model).__name__}, which cannot be held weakly: give the module, "
                "or pass weights to update_weights()."
            ) from None

    def register_collector(self, collector: Any) -> None:
        """Call the collector's ``increment_version()`` after each update that was applied.

        Raises:
            ConfigurationError: it has no such method.
        """
        if not callable(optional(collector, "increment_version")):
            raise ConfigurationError(
                f"register_collector() was given {collector!r}, which has no increment_version(): give the collector."
            )
        self._collectors.append(collector)

    def update_weights(self, weights: Any = None) -> SyncReport:
        """Send weights, and wait until they were applied.

        Args:
            weights: a module, a TensorDict or a dict; None: those of the registered model.

        Returns:
            The report.

        Raises:
            StateError: (a RuntimeError) there is no transport yet.
            ConfigurationError: there are no weights: no model was registered, or it was garbage-collected.
            AckTimeoutError, WorkerLostError, RefusedError: the weights were not applied, or it is not known whether
                they were.
        """
        if self._transport is None:
            raise StateError(type(self).__name__, "uninitialized", "update_weights", ["init_all_workers_group"])
        source = self._model() if weights is None else weights
        if source is None:
            raise ConfigurationError(
                "update_weights() needs weights: no model is registered, or it was garbage-collected."
            )
        extracted = self._scheme.strategy.extract_weights(source)
        report: SyncReport = self._transport.send_weights("policy", extracted)
        for collector in self._collectors:
            collector.increment_version()
        return report

    def shutdown(self) -> None:
        """End the link to the engine, and forget the collectors."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.shutdown()
        self._collectors.clear()


def _no_model() -> None:
    """Nothing was registered."""
