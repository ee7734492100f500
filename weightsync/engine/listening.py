"""Where a receiver's weights come from and go to: the links it listens on, and the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from weightsync.clock import Deadline, Timeout
from weightsync.engine.copies import Side, pipes_travel
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.recorded_drivers import receiver_driver
from weightsync.engine.serving_lock import ServingLock
from weightsync.errors import ConfigurationError, ModelBusyError
from weightsync.protocol import receiver as pure
from weightsync.protocol.messages import Ack
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.relay import Relay, RelayTarget
from weightsync.weights.target import Target


class BackgroundReader(Protocol):
    """Reads a receiver's links for it, on a thread of its own."""

    def receive(self, timeout: float | None) -> bool:
        """Wait for what comes of it: see `WeightReceiver.receive`."""

    def link_added(self) -> None:
        """There is one more link to read."""

    def model_set(self, model: Any) -> None:
        """Another model is served from now on."""

    def applied(self) -> None:
        """A version went live, or was refused, on whichever thread."""

    def hands_on(self) -> bool:
        """Whether what is applied is handed on, and answered for only afterwards."""

    def stop(self) -> None:
        """Read no more, and end the thread; waits for it, except on itself."""


class Listening(Side):
    """A receiver's links and its model."""

    _driver: ReceiverDriver

    def _begin(self) -> None:
        self._model: Any = None
        #: Where the model is found on the context, if it is; looked up whenever it is needed.
        self._path: str | None = None
        self._endpoint: Any = None
        self._listening: list[Callable[[], None]] = []
        self._driver = receiver_driver(self._model_id)
        self._target: Target | None = None
        self._serving = ServingLock()
        self._attendant: BackgroundReader | None = None

    # ------------------------------------------------------------------------------------------- wiring

    def register_model(self, model: Any = None, *, model_ref: Any = None) -> None:
        """Say what the weights are applied to.

        A model set anew serves the version of the one before only if it holds the very same weights; otherwise
        `version` is None until the next one.

        Args:
            model: an `nn.Module`, a TensorDict, a dict of tensors, or a path such as ``"env.transform[0]"``. A path
                is resolved on the context whenever the model is needed: what stands there now is a model set anew.
            model_ref: the same, by TorchRL's older name.

        Raises:
            ConfigurationError: neither is given, or both.
            ModelBusyError: (a TimeoutError) other threads served the model before for `WEIGHTSYNC_TIMEOUT` or 60
                seconds; nothing has changed.
        """
        if (model is None) == (model_ref is None):
            raise ConfigurationError("register_model() takes a model: once, as model= or by its older name model_ref=.")
        model = model_ref if model is None else model
        self._set_model(model, model if isinstance(model, str) else None, Deadline(Timeout.DEFAULT))

    def _set_model(self, model: Any, path: str | None, deadline: Deadline) -> None:
        with self._serving.alone(deadline, "register_model"), self._driver.lock:
            self._model, self._path = model, path
            self._drop_target()
            try:
                if not isinstance(model, str):
                    self._make_target()
            finally:
                if self.version is not None and not self._serves_the_same():
                    self._driver.take(pure.Invalidate())
        if self._attendant is not None:
            self._attendant.model_set(model)

    def _serves_the_same(self) -> bool:
        """Whether the model holds the very weights of the version served."""
        return self._target is not None and self._target.digest() == self._served_digest()

    def _served_digest(self) -> bytes | None:
        answer = self._driver.data.answer
        answer = answer.ack if isinstance(answer, pure.Deferred) else answer
        return answer.digest if isinstance(answer, Ack) and answer.digest else None

    def register_worker_transport(self, pipe_or_context: Any = None, *, pipe: Any = None) -> None:
        """Listen on a link: the first, or one over which a sender makes a new handshake.

        Args:
            pipe_or_context: our end of a duplex `multiprocessing.Pipe`, or an object whose ``.pipe`` is that; other
                transports take what their scheme's `listen` says.
            pipe: the same, by TorchRL's older name.

        Raises:
            StateError: the receiver is closed.
            ConfigurationError: no link can be made of it, or both are given.
        """
        self._driver.require_open("register_worker_transport")
        if pipe is not None and pipe_or_context is not None:
            raise ConfigurationError("pipe= is an older name of pipe_or_context=: give one of them.")
        pipe_or_context = pipe if pipe_or_context is None else pipe_or_context
        self._endpoint = pipe_or_context
        with self._driver.expecting():
            listener = self._scheme.listen(pipe_or_context, self._model_id, self._accept)
        if listener in self._listening:  # at the same place: the one before would hear nothing any more
            self._listening.pop(self._listening.index(listener))()
        self._listening.append(listener)

    def _accept(self, link: Link) -> None:
        self._driver.add_link(link)
        if self._attendant is not None:
            self._attendant.link_added()

    _register_model = register_model
    _register_worker_transport = register_worker_transport

    def attend(self, background_reader: BackgroundReader | None) -> None:
        """From now on ``background_reader`` is the only one who reads our links; None: `receive` does again."""
        self._attendant = background_reader

    def check_links(self) -> None:
        """Check that there is somebody to receive from, or will be.

        Raises:
            StateError: the receiver is closed, or has no link yet.
            SenderClosed: the sender closed the link in good order.
            TransportError: the sender is gone.
        """
        self._driver.require_open("receive")
        if not self._driver.links() and (self._driver.ended or not self._listening):
            if self._driver.ended:
                raise self._driver.ended_as(
                    f"model {self._model_id!r} has no sender any more: {self._driver.ended.rstrip('.')}. It keeps "
                    f"version {self.version}; register_worker_transport() gives it a new link."
                )
            raise self._driver.refused("receive")

    def _deafen(self) -> None:
        while self._listening:
            self._listening.pop()()

    def _destination(self) -> Target:
        self._look_again()
        return self._target if self._target is not None else self._make_target()

    def _look_again(self) -> None:
        """Follow the path to the model, where it was given by one: another may stand there by now."""
        if self._path is None:
            return
        try:
            found = _resolve_model(self._context(), self._path)
        except ConfigurationError:
            if isinstance(self._model, str):
                raise
            return  # the context was collected, and the model found there before lives on
        if found is not self._model:
            # While others serve the model before, nothing could be applied to this one: it is looked for again.
            with contextlib.suppress(ModelBusyError):
                self._set_model(found, self._path, Deadline(0))

    def _make_target(self) -> Target:
        if self._model is None:
            raise ConfigurationError(
                f"no model is registered for {self._model_id!r}: call register_model() with a module, a "
                "TensorDict, a dict or a path on the context."
            )
        self._target = self._target_of(self._model)
        self._driver.layout = self._target.demanded
        return self._target

    def _target_of(self, model: Any) -> Target:
        return RelayTarget(model) if isinstance(model, Relay) else Target(model, self._scheme.apply_mode)

    def _drop_target(self) -> None:
        """Another model is served from now on."""
        self._target = None

    # ------------------------------------------------------------------------------------------- reading

    @property
    def model(self) -> Any:
        """What the weights are applied to."""
        return self._model

    @property
    def version(self) -> int | None:
        """The version that the model serves, whole; None: none yet, or weights were applied by hand."""
        served = self._driver.data.served
        return served[1] if served else None

    @property
    def incarnation(self) -> int | None:
        """The sender's incarnation that `version` belongs to."""
        served = self._driver.data.served
        return served[0] if served else None

    @property
    def pipe(self) -> UserMessages:
        """The user's own messages on our pipe, with the methods of a connection.

        Raises:
            ConfigurationError: there is no pipe.
        """
        return self._scheme.user_messages(self._endpoint)

    @property
    def _transport(self) -> Any:
        """What TorchRL calls so: its transport class, over this receiver.

        Raises:
            ConfigurationError: there is no link, or the scheme has no such class.
        """
        return self._scheme.transport_of(self, self._endpoint)

    @property
    def driver(self) -> ReceiverDriver:
        """The driver, for an attendant."""
        return self._driver

    def target(self) -> Target:
        """What the weights are applied to, as a target.

        Raises:
            ConfigurationError: no model is registered.
        """
        return self._destination()

    def digest(self) -> bytes:
        """The xxh3-128 digest of what the model holds now, 16 bytes, computed as a sender computes it.

        Raises:
            ConfigurationError: no model is registered.
        """
        return self._destination().digest()

    # -------------------------------------------------------------------------------------------- copies

    def _travelling(self) -> tuple[str | None, Any]:
        return self._path, (self._endpoint if pipes_travel() else None)

    def _arrived(self, own: tuple[str | None, Any]) -> None:
        self._path, endpoint = own
        self._model = self._path
        if endpoint is not None:
            self.register_worker_transport(endpoint)
