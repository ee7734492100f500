"""Users' own transports under `WeightReceiver`: a thread asks for weights, and passes them on over one of our links."""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing
import threading
from collections.abc import Callable
from typing import Any, Final

from weightsync.engine.context import MISSING, optional
from weightsync.engine.manual_ack import UPDATED
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError, StateError, TransportError, WeightSyncError, thread_not_started
from weightsync.options import OnFailure
from weightsync.schemes.facade_services import FacadeServices
from weightsync.schemes.peers.base import PLAIN_METHODS, BareTransport, refuse_coroutines
from weightsync.transports.base import Link, Received
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.process import forget_after_fork
from weightsync.weights.strategy import WeightStrategy

logger = logging.getLogger("weightsync")

#: Seconds that one ``receive_weights`` may wait, so that `close` is noticed.
STEP: Final = 0.1
#: Seconds between two calls of a ``receive_weights`` that does not wait.
PAUSE: Final = 0.005
#: Seconds that `close` waits for a call that exceeds its timeout.
PATIENCE: Final = 1.0


def start_transport_reader(
    transport: BareTransport, model_id: str, strategy: WeightStrategy, accept: Callable[[Link], None]
) -> Callable[[], None]:
    """Have the receiver that ``accept`` belongs to receive through a user's own transport.

    Returns:
        A function that ends it.

    Raises TransportError: no thread can be started. The receiver has no sender any more.
    """
    reader = TransportReader(transport, model_id, strategy, accept)
    try:
        reader.start()
    except TransportError:
        reader.close()
        raise
    return reader.close


class TransportReader:
    """Passes what a user's transport receives to a receiver in this process; each ``receive_weights`` is one version.

    It calls ``receive_weights`` again once the receiver has answered the previous version. It calls the transport's
    ``send_ack("updated")``, if there is one, once the weights are live; any other text says why they are not.
    """

    def __init__(
        self, transport: BareTransport, model_id: str, strategy: WeightStrategy, accept: Callable[[Link], None]
    ) -> None:
        refuse_coroutines(transport, ("receive_weights", "send_ack"), PLAIN_METHODS)
        self._transport = transport
        self._receive = receiving_call(transport)
        self._model_id = model_id
        near, far = multiprocessing.Pipe()
        self._near, self._far = PipeLink(near, model_id), _FarEnd(far, model_id)
        self._over = threading.Event()
        self._sender = WeightSender(FacadeServices(self, strategy))
        self._sender.set_context(None, model_id)
        self._sender.add_worker(0, None)
        name = f"weightsync transport of {model_id!r}"
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=name, daemon=True)
        forget_after_fork(self)
        accept(self._far)

    def start(self) -> None:
        """Begin to ask for weights. Raises TransportError: no thread can be started."""
        thread = self._thread
        if thread is None:
            return
        try:
            thread.start()
        except RuntimeError as error:
            self._thread = None
            raise thread_not_started(f"the {thread.name}", error) from error

    def close(self) -> None:
        """Stop asking. Weights that were applied are still acked.

        It does not wait for a call that does not return: the call's thread is a daemon.
        """
        self._over.set()
        with contextlib.suppress(StateError):  # it is closed already if the transport has failed
            self._sender.poll()  # takes in the answer that the receiver has just given
        self._sender.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)

    def forget(self) -> None:
        """In a forked child: there is no thread."""
        self._over.set()
        self._thread = None

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                message = self._receive(STEP)
            except BaseException as error:  # noqa: BLE001 - whatever a user's transport raises, receive() reports
                self._fail(error)
                return
            if message is None:
                self._over.wait(PAUSE)
            elif not self._over.is_set():
                self._answer(self._pass_on(message))

    def _pass_on(self, message: Any) -> str:
        """The outcome of weights, as the text for ``send_ack``."""
        has_model_id = isinstance(message, tuple) and len(message) == 2 and isinstance(message[0], str)
        model_id, weights = message if has_model_id else (self._model_id, message)
        if model_id != self._model_id:
            return f"these are weights of model {model_id!r}; {self._model_id!r} is received here"
        try:
            report = self._sender.send(weights, timeout=None, on_failure=OnFailure.REPORT)
        except WeightSyncError as error:
            return f"not applied: {error}"
        return UPDATED if report.ok else f"not applied: {report[0].reason}"

    def _answer(self, answer: str) -> None:
        if answer != UPDATED and not self._over.is_set():
            logger.warning("model %r: weights from your own transport: %s", self._model_id, answer)
        ack = optional(self._transport, "send_ack")
        if ack is MISSING or (answer != UPDATED and self._over.is_set()):
            return
        try:
            ack(answer)
        except BaseException as error:  # noqa: BLE001 - as in _run
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._over.is_set():
            return
        self._over.set()
        lost = TransportError(f"its transport raised {type(error).__name__}: {error}")
        lost.__cause__ = error
        self._far.fail(lost)
        self._sender.close()

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        return self._near

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Nothing is received here. Raises ConfigurationError: always."""
        raise ConfigurationError("This end only sends: it cannot listen.")

    def user_messages(self) -> UserMessages:
        """There are none. Raises ConfigurationError: always."""
        raise ConfigurationError("Your own transport carries no messages other than weights.")

    def _published(self, model_id: str, weights: Any) -> None:
        """Do nothing: nothing else uses the weights."""


class _FarEnd(PipeLink):
    """The receiver's end, which can fail."""

    _failure: TransportError | None = None

    def fail(self, failure: TransportError) -> None:
        """Raise this in the reading call, which wakes when the link at the other end is closed."""
        self._failure = failure

    def receive(self) -> list[Received]:
        """What has arrived: see `Link.receive`."""
        if self._failure is not None:
            raise self._failure
        return super().receive()


def receiving_call(transport: BareTransport) -> Callable[[float], Any]:
    """The transport's ``receive_weights`` as a function of its timeout in seconds, if it takes one."""
    parameters = inspect.signature(transport.receive_weights).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "timeout" in parameters or takes_any:
        return lambda seconds: transport.receive_weights(timeout=seconds)
    receive: Callable[..., Any] = transport.receive_weights
    return lambda _: receive()
