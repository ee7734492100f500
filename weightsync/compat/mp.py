"""`MPTransport`: TorchRL's transport over a multiprocessing pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightsync.compat.arguments import Form
from weightsync.compat.facade import TransportFacade
from weightsync.compat.pipes import ReferencePipe
from weightsync.context import MISSING, optional
from weightsync.errors import ConfigurationError
from weightsync.receiver import WeightReceiver
from weightsync.strategy import WeightStrategy
from weightsync.timing import Deadline
from weightsync.transports.base import Link
from weightsync.transports.channel import Channel
from weightsync.transports.pipe import PipeLink
from weightsync.transports.user import UserMessages


class MPTransport(TransportFacade):
    """Sends weights to one worker over a duplex pipe, or receives them at its other end.

    Both ends may be driven by one thread: `send_weights_async`, `receive_weights`, `send_ack`, `wait_ack`. While the
    transport is used, the connection's own methods must not be: `pipe` stands in for them.

    Args:
        pipe_connection: our end of ``multiprocessing.Pipe()``, or an object whose ``.pipe`` is that. Without one the
            first send raises.
        timeout: seconds that `send_weights`, `wait_ack` and `check_ack` wait.
        strategy: how modules are extracted.
    """

    def __init__(
        self,
        pipe_connection: Any = None,
        timeout: float | None = 10.0,
        *,
        strategy: WeightStrategy | str = "state_dict",
    ) -> None:
        super().__init__(form=Form.A, timeout=timeout, strategy=strategy)
        self._given = pipe_connection

    _live = (*TransportFacade._live, "_channel")
    _channel: Channel | None

    @property
    def pipe(self) -> ReferencePipe:
        """The pipe, as worker loops written for TorchRL's messages expect it.

        Raises:
            ConfigurationError: there is none, or it is no duplex pipe.
        """
        return ReferencePipe(self._open_channel(), self)

    def check_connection(self) -> bool:
        """Whether the pipe is open."""
        return self._given is not None and not self._connection().closed

    def _connection(self) -> Any:
        if self._given is None:
            raise ConfigurationError(
                f"{type(self).__name__} was given no pipe: pass our end of multiprocessing.Pipe(). Nothing was sent."
            )
        return connection_of(self._given)

    def _open_channel(self) -> Channel:
        """The pipe's channel, kept: what was read of the pipe and not handed out yet lies in it."""
        with self._lock:
            if self._channel is None:
                self._channel = Channel.of(self._connection())
            return self._channel

    def _begin(self) -> None:
        super()._begin()
        self._channel = None

    # ---------------------------------------------------------------------------------------- the facade

    def _endpoints(self) -> Mapping[int, Any]:
        return {0: self._connection()}

    def _lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        self._open_channel()
        return PipeLink(endpoint, model_id, peer=peer)

    def _listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        self._open_channel()
        accept(PipeLink(self._connection(), model_id, peer="the sender"))
        return _nothing

    def _user_messages(self) -> UserMessages:
        return UserMessages(self._open_channel())

    def _next(self, deadline: Deadline) -> tuple[str, Any] | None:
        self._require_open("receive_weights")
        return self.pipe.await_update(deadline)

    # ----------------------------------------------------------------------------------------- the inbox

    def _arrived(self) -> Sequence[str]:
        """The models that have an update here; whoever sends a model first gets a receiver."""
        for model_id in self._open_channel().strays():
            self._receiver(model_id)
        return [model_id for model_id, receiver in list(self._receivers.items()) if receiver.has_update()]

    def _hand_out(self, model_id: str) -> Any:
        weights = self._receivers[model_id].hand_out(0.0)
        if weights is not None:
            self._last = model_id
        return weights

    def _links(self) -> list[Link]:
        return [link for receiver in list(self._receivers.values()) for link in receiver.links()]

    def _owes_ack(self) -> bool:
        return self._last is not None and self._receivers[self._last].owes_ack


class WorkerTransport(MPTransport):
    """`MPTransport` over a receiver that a scheme has made: what TorchRL calls ``receiver._transport``.

    Args:
        receiver: the receiver; it keeps its link when this is closed.
        connection: the pipe on which it listens.
    """

    def __init__(self, receiver: WeightReceiver, connection: Any) -> None:
        super().__init__(connection)
        self._receivers = {receiver.model_id: receiver}
        self._last = receiver.model_id

    def _arrived(self) -> Sequence[str]:
        return [model_id for model_id, receiver in self._receivers.items() if receiver.has_update()]

    def _hang_up(self) -> None:
        """The receiver is the scheme's."""
        self._receivers = {}
        super()._hang_up()


def connection_of(endpoint: Any) -> Any:
    """The connection meant by a pipe's end, by an object whose ``.pipe`` is that, or by an `MPTransport`."""
    if isinstance(endpoint, MPTransport):
        return endpoint._connection()
    pipe = optional(endpoint, "pipe")
    return endpoint if pipe is MISSING else pipe


def _nothing() -> None:
    return None
