"""`MPTransport`: TorchRL's transport over a multiprocessing pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from weightsync.clock import Deadline, Timeout, seconds
from weightsync.engine.context import optional
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import ConfigurationError
from weightsync.options import OnFailure, OnPending
from weightsync.protocol.report import SyncReport
from weightsync.schemes.arguments import UNSET, Generation, UnsetType
from weightsync.schemes.facade_services import connection_of, torchrl_class
from weightsync.torchrl.transports.facade import TransportFacade
from weightsync.torchrl.transports.pipes import ReferencePipe
from weightsync.torchrl.transports.queues import AnyQueue, QueueChannel, QueueLink
from weightsync.transports.base import Link, Waitable, Waker, wait
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.weights.strategy import WeightStrategy


@torchrl_class
class MPTransport(TransportFacade):
    """Sends weights to one worker over a duplex pipe, or receives them at its other end.

    One thread may drive both ends: `send_weights_async`, `receive_weights`, `send_ack`, `wait_ack`. While the
    transport is used, do not call the connection's own methods: use those of `pipe`.

    With queues it is generation B's transport, over ``multiprocessing.Queue``s, and has no `pipe`.

    Args:
        pipe_connection: our end of ``multiprocessing.Pipe()``, or an object whose ``.pipe`` is one, or generation B's
            ``weight_queue``. Without one the first send raises.
        ack_queue: generation B: where answers arrive. In generation A the second argument is the timeout.
        timeout: seconds that `send_weights`, `wait_ack` and `check_ack` wait; None: forever; default: 10.
        weight_queue: generation B: where weights go, a ``multiprocessing.Queue``.
        strategy: how modules are extracted.
    """

    _not_copied = (*TransportFacade._not_copied, "_channel", "_queues", "_wakers")
    _channel: Channel | None
    _queues: dict[str, QueueChannel]

    def __init__(
        self,
        pipe_connection: Any = None,
        ack_queue: Any = None,
        timeout: float | None = 10.0,
        *,
        weight_queue: Any = None,
        strategy: WeightStrategy | str = "state_dict",
    ) -> None:
        if isinstance(ack_queue, Real):
            ack_queue, timeout = None, ack_queue
        pipe_or_queue = pipe_connection if weight_queue is None else weight_queue
        self.weight_queue = pipe_or_queue if isinstance(pipe_or_queue, AnyQueue) else weight_queue
        self.ack_queue = ack_queue
        generation = Generation.A if self.weight_queue is None and ack_queue is None else Generation.B
        super().__init__(generation=generation, timeout=timeout, strategy=strategy)
        self._given = None if generation is Generation.B else pipe_or_queue

    def _reset(self) -> None:
        super()._reset()
        self._channel = None
        self._queues = {}
        #: Those of the threads that wait for the queues.
        self._wakers: list[Waker] = []

    @property
    def pipe(self) -> ReferencePipe:
        """The pipe, as worker loops written for TorchRL's messages expect it.

        Raises:
            ConfigurationError: there is none, or it is not duplex.
        """
        return ReferencePipe(self._open_channel(), self)

    def check_connection(self) -> bool:
        """Whether the pipe is open, or there is a queue."""
        if self._generation is Generation.B:
            return self.weight_queue is not None
        return self._given is not None and optional(self.pipe_end(), "closed") is False

    def pipe_end(self) -> Any:
        """Our end of the pipe.

        Raises:
            ConfigurationError: there is no pipe.
        """
        if self._given is None:
            raise ConfigurationError(
                f"{type(self).__name__} was given no pipe: pass our end of multiprocessing.Pipe(). Nothing was sent."
            )
        return connection_of(self._given)

    def over(self, receiver: WeightReceiver) -> WorkerTransport:
        """The same pipe's transport over a scheme's receiver."""
        return WorkerTransport(receiver, self.pipe_end())

    def _open_channel(self) -> Channel:
        """The pipe's channel. It is kept because it holds what was read from the pipe and not yet returned."""
        with self._lock:
            if self._channel is None:
                self._channel = Channel.of(self.pipe_end())
            return self._channel

    def _hang_up(self) -> None:
        super()._hang_up()
        with self._lock:
            for waker in (*self._wakers, *([] if self._channel is None else [self._channel.user_waker()])):
                waker.fire()
            self._channel, self._queues = None, {}

    def _queue(self, end: str) -> QueueChannel:
        """The queues as the sender's or the receiver's end sees them.

        Raises ConfigurationError: there is no ``weight_queue``.
        """
        if self.weight_queue is None:
            raise ConfigurationError("MPTransport was given no weight_queue: pass a multiprocessing.Queue().")
        ends = {"sender": (self.weight_queue, self.ack_queue), "receiver": (self.ack_queue, self.weight_queue)}
        with self._lock:
            if end not in self._queues:
                self._queues[end] = QueueChannel(*ends[end])
            return self._queues[end]

    def _pending(self, model_id: str, sender: WeightSender, method: str) -> OnPending:
        # Generation B has no method that waits here, so the previous update is abandoned, and the report says so.
        return OnPending.SUPERSEDE if self._generation is Generation.B else super()._pending(model_id, sender, method)

    def send_weights(
        self,
        first: Any = UNSET,
        second: Any = UNSET,
        /,
        *,
        model_id: Any = UNSET,
        weights: Any = UNSET,
        timeout: float | Timeout | UnsetType | None = UNSET,
        on_failure: OnFailure | str = OnFailure.RAISE,
    ) -> SyncReport:
        """Send weights and wait until they are acked: see `TransportFacade.send_weights`.

        Raises:
            ConfigurationError: (queues) there is no ``ack_queue`` for answers. Nothing was sent.
        """
        if self._generation is Generation.B and self.ack_queue is None:
            raise ConfigurationError(
                "MPTransport has no ack_queue for answers. Give it one, or use send_weights_async(). Nothing was sent."
            )
        return super().send_weights(
            first, second, model_id=model_id, weights=weights, timeout=timeout, on_failure=on_failure
        )

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | str | None = None,
    ) -> Any:
        """Wait ``timeout`` seconds for the first weights, and return them as `receive_weights` does."""
        return self.receive_weights(seconds(self.timeout), weights=weights, model=model, strategy=strategy)

    def _endpoints(self) -> Mapping[int, Any]:
        return {0: self._queue("sender") if self._generation is Generation.B else self.pipe_end()}

    def _create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        if self._generation is Generation.B:
            return QueueLink(self._queue("sender"), model_id, peer)
        self._open_channel()
        return PipeLink(endpoint, model_id, peer=peer)

    def listen(self, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Take the one link of the pipe or the queues: see `TransportFacade.listen`."""
        if self._generation is Generation.B:
            accept(QueueLink(self._queue("receiver"), model_id, "the sender"))
            return lambda: None
        self._open_channel()
        accept(PipeLink(self.pipe_end(), model_id, peer="the sender"))
        return lambda: None

    def user_messages(self) -> UserMessages:
        """The user's own messages on the pipe."""
        return UserMessages(self._open_channel())

    def _next(self, deadline: Deadline) -> tuple[str, Any] | None:
        self._require_open("receive_weights")
        if self._generation is Generation.A:
            return self.pipe.await_update(deadline)
        channel, waker = self._queue("receiver"), Waker()
        self._wakers.append(waker)
        try:
            while True:
                self._require_open("receive_weights")
                for model_id in self._arrived() or self._models_without_sender():
                    weights = self._take_weights(model_id)
                    if weights is not None:
                        return model_id, weights
                if deadline.passed:
                    return None
                watched: list[Waitable] = [*self._links(), channel]
                wait(waker, watched, deadline.nap)
        finally:
            self._wakers.remove(waker)

    def _unclaimed(self) -> Sequence[str]:
        """The models that have no receiver here and for which something arrived."""
        unclaimed = (
            self._queue("receiver").unclaimed()
            if self._generation is Generation.B
            else self._open_channel().unclaimed()
        )
        return [model_id for model_id in unclaimed if model_id not in self._receivers]

    def _arrived(self) -> Sequence[str]:
        """The models with an update to return. A model whose first message arrived gets a receiver."""
        for model_id in self._unclaimed():
            self._receiver(model_id)
        return [model_id for model_id, receiver in list(self._receivers.items()) if receiver.has_update()]

    def _models_without_sender(self) -> Sequence[str]:
        """The models whose senders are gone, if nothing is left that could bring an update: taking one says so."""
        return () if self._links() else list(self._receivers)

    def _take_weights(self, model_id: str) -> Any:
        receiver = self._receivers.get(model_id)  # None: another thread has closed the transport
        weights = None if receiver is None else receiver.take_update(0.0)
        if weights is not None:
            self._last = model_id
        return weights

    def _links(self) -> list[Link]:
        return [link for receiver in list(self._receivers.values()) for link in receiver.links()]

    def _owes_ack(self) -> bool:
        receiver = self._last_receiver()
        return receiver is not None and receiver.owes_ack


class WorkerTransport(MPTransport):
    """`MPTransport` over a receiver that a scheme made: TorchRL's ``receiver._transport``.

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
        """Do nothing: the receiver is the scheme's."""
        self._receivers = {}
        super()._hang_up()
