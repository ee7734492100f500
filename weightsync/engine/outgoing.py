"""The weights that a sender sends: the registered model's, or those that a call is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from weightsync.engine.packer import Packed, Packer
from weightsync.engine.sender_driver import SenderDriver
from weightsync.engine.services import SchemeServices
from weightsync.errors import ConfigurationError, LayoutError
from weightsync.protocol.messages import WeightsForm
from weightsync.weights.layout import Layout
from weightsync.weights.unpacking import form_of


class OutgoingWeights:
    """Reads, checks and packs the weights of one sender.

    Args:
        services: the scheme, which knows the registered model.
        driver: the sender's driver.
        packer: packs them.
        context: gives the object on which models are found.
    """

    def __init__(
        self, services: SchemeServices, driver: SenderDriver, packer: Packer, context: Callable[[], Any]
    ) -> None:
        self._services = services
        self._driver = driver
        self._packer = packer
        self._context = context

    def registered_layout(self) -> Layout | None:
        """The layout of the registered model; None: there is no such model yet, or it cannot be sent."""
        try:
            return self._packer.layout_of(self._prepared(None, self._context()))
        except (ConfigurationError, LayoutError):
            return None  # the first send says why

    def pack(self, weights: Any) -> Packed:
        """Pack weights, which are the caller's until `Packer.handed_over`.

        Args:
            weights: what `WeightSender.send` takes.

        Raises:
            ConfigurationError, LayoutError: they cannot be sent, or are not those of the registered model.
            TransportError: there is not enough memory.
        """
        # Only weights that are found on the context need it: otherwise it may have been collected.
        context = self._context() if weights is None or isinstance(weights, str) else None
        prepared = self._prepared(weights, context)
        packed = self._packer.pack(prepared, self._form(prepared), self._driver)
        try:
            if weights is not None:
                self._refuse_other_model(packed.layout)
            self._services.published(self._driver.model_id, prepared)
        except BaseException:
            self._packer.handed_over(packed)
            raise
        return packed

    def _prepared(self, weights: Any, context: Any) -> Any:
        return self._services.weights_to_send(weights, self._driver.model_id, context)

    def _form(self, weights: Any) -> WeightsForm:
        """The type in which workers get weights: a module's are those that the strategy would extract."""
        if not isinstance(weights, nn.Module) or isinstance(weights, TensorDictBase):
            return form_of(weights)
        return WeightsForm.TENSORDICT if self._services.strategy.extract_as == "tensordict" else WeightsForm.FLAT

    def _refuse_other_model(self, given: Layout) -> None:
        """Refuse weights of another model than the registered one: every worker would refuse them.

        Raises:
            LayoutError: their names, shapes or dtypes differ.
        """
        if given == self._driver.layout:
            return
        registered = self.registered_layout()
        if registered is None:  # a model that cannot be sent does not show which weights can
            self._refuse_other_dtypes(given)
            return
        text = f"The weights are not those of the model that is registered for {self._driver.model_id!r}"
        error = registered.difference(given, text)
        if error is not None:
            message = (
                f"{error} The model has {registered.summary()}. The weights have {given.summary()}. Nothing was sent. "
                "If the workers have another model now, register it in the trainer first (scheme.model = ...). "
                "To send the model's weights in another dtype, give the scheme a wire_dtype."
            )
            raise LayoutError(message, error.missing, error.unexpected, error.mismatched)

    def _refuse_other_dtypes(self, given: Layout) -> None:
        """Refuse weights that `wire_dtype` does not bring to the dtypes that were agreed on.

        Raises:
            LayoutError: dtypes differ, and nothing else does.
        """
        agreed, wire_dtype = self._driver.layout, self._packer.wire_dtype
        if wire_dtype is None or agreed is None or not agreed.other_dtypes(given):
            return
        error = agreed.difference(given, f"The workers of {self._driver.model_id!r} have other dtypes")
        assert error is not None
        message = f"{error} wire_dtype='{wire_dtype.value}' casts wider floating tensors only. Nothing was sent."
        raise LayoutError(message, error.missing, error.unexpected, error.mismatched)
