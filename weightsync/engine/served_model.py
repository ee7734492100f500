"""The model that a receiver serves, and the version that is staged beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weightsync.clock import Deadline
from weightsync.engine.listening import Listening
from weightsync.engine.receiver_driver import Pending, ReceiverDriver
from weightsync.engine.services import SchemeServices
from weightsync.engine.serving_lock import ServingLock
from weightsync.errors import ConfigurationError, LayoutError, ModelBusyError
from weightsync.protocol import receiver as pure
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.reading import read_live
from weightsync.weights.relay import Relay, RelayTarget
from weightsync.weights.target import Mode, Staged, Target


@dataclass(frozen=True, slots=True)
class Ready:
    """A version that has been verified and staged, and only has to be swapped in."""

    pending: Pending
    staged: Staged
    digest: bytes
    seconds: float


class ServedModel:
    """The model that arrived weights are applied to, given as an object or as a path on the context.

    Args:
        services: the scheme, which says how weights are applied.
        driver: the receiver's driver.
        listening: names the background reader, which is told of each new model.
        context: gives the object on which a path is resolved.
    """

    def __init__(
        self, services: SchemeServices, driver: ReceiverDriver, listening: Listening, context: Callable[[], Any]
    ) -> None:
        self._services = services
        self._driver = driver
        self._listening = listening
        self._context = context
        #: The model; a path that was never resolved; or None: none is registered.
        self.model: Any = None
        #: Where the model is found on the context, if it was registered by a path. It is resolved again at each use.
        self.path: str | None = None
        #: The model as something that weights can be swapped into; None: not needed yet.
        self.target: Target | None = None
        #: What is staged for `target`; None: nothing.
        self.staged: Ready | None = None
        #: The digest of the version that was applied last; empty: it came without one.
        self.applied = b""
        #: Who serves the model now, and who may change it.
        self.serving = ServingLock()

    @property
    def apply_mode(self) -> Mode:
        """How arrived weights become live."""
        return self._services.apply_mode

    def copy_of(self, path: str | None) -> None:
        """Become the copy of a model that was registered by ``path``; None: it was registered as an object."""
        self.model = self.path = path

    def serve(self, model: Any, path: str | None, deadline: Deadline) -> None:
        """Serve another model.

        Args:
            model: the model, or the path at which it is found later.
            path: where the model was found on the context; None: it was given as an object.
            deadline: how long to wait for threads that serve the model before.

        Raises:
            ModelBusyError: they served it until then; nothing has changed.
            ConfigurationError, LayoutError: weights cannot be applied to it.
        """
        with self.serving.alone(deadline, "register_model"), self._driver.lock:
            served = self._served_digest()
            self.model, self.path = model, path
            self.target = self.staged = None
            try:
                if not isinstance(model, str):
                    self._make_target()
            finally:
                if self._driver.data.served and not self._serves(served):
                    self._driver.take(pure.Invalidate())
        if self._listening.background_reader is not None:
            self._listening.background_reader.model_set(model)

    def _serves(self, digest: bytes) -> bool:
        """Whether the model holds exactly the weights of that digest."""
        return bool(digest) and self.target is not None and self.target.digest() == digest

    def _served_digest(self) -> bytes:
        """The digest of the version served; empty: it is unknown, or none is served."""
        if not self._driver.data.served:
            return b""
        # It came without a digest: then it is what the model before holds, which was served until now.
        if self.applied or self.target is None:
            return self.applied
        with contextlib.suppress(ConfigurationError, LayoutError):  # the model before cannot be read any more
            return self.target.digest()
        return b""

    def destination(self) -> Target:
        """What weights are applied to now.

        Raises:
            ConfigurationError, LayoutError, ModelPathError: no model is registered, or its path leads to none.
        """
        self.follow_path()
        return self.target if self.target is not None else self._make_target()

    def follow_path(self) -> None:
        """Look again where the path leads, if the model was registered by one: another may be there by now."""
        if self.path is None:
            return
        try:
            found = _resolve_model(self._context(), self.path)
        except ConfigurationError:
            if isinstance(self.model, str):
                raise
            return  # the context was collected; the model found on it earlier is still alive
        if found is not self.model:
            # While other threads serve the model before, nothing could be applied anyway: the next use looks again.
            with contextlib.suppress(ModelBusyError):
                self.serve(found, self.path, Deadline(0))

    def _make_target(self) -> Target:
        if self.model is None:
            raise ConfigurationError(
                f"no model is registered for {self._driver.model_id!r}: call register_model() with a module, a "
                "TensorDict, a dict or a path on the context."
            )
        model = self.model
        chosen = self._services.applied_selection
        if isinstance(model, Relay):
            if chosen is not None:
                raise ConfigurationError(
                    f"the worker has no model {self._driver.model_id!r} of its own, and forwards weights to its "
                    "workers: give names= to those, or give this worker the model."
                )
            target: Target = RelayTarget(model)
        else:
            target = Target(model, self._services.apply_mode, read_live if chosen is None else chosen.read)
        self.target = target
        self._driver.layout, self._driver.devices = target.demanded, target.devices
        return target
