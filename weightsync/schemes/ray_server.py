"""The actor server, which passes a Ray actor's calls to its receiver; and both sides on Ray."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from weightsync.clock import Deadline
from weightsync.engine.background import ForwardGuard
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import (
    ConfigurationError,
    LayoutError,
    ModelPathError,
    ProtocolError,
    StateError,
    TransportError,
    WeightSyncError,
)
from weightsync.keys import SharedKey
from weightsync.protocol import codec
from weightsync.protocol._tables import State
from weightsync.transports.base import Link
from weightsync.transports.calls.client import EARLY, PATIENCE_FOR_ORDER, UNKNOWN
from weightsync.transports.calls.same_host import SegmentPlace
from weightsync.transports.calls.server import CallRefused, CallServer, Frames, Parcel
from weightsync.transports.calls.without_receiver import another_model, rejection
from weightsync.transports.ray import server
from weightsync.transports.ray.client import TRANSPORT_NAME
from weightsync.transports.ray.session import own_actor
from weightsync.transports.sealing import is_envelope

logger = logging.getLogger("weightsync")

#: Seconds that an async actor's event loop is held while another thread serves.
PATIENCE_OF_LOOP: Final = 1.0
#: Seconds between two checks of what another thread may have done.
STEP: Final = 0.05

Answer = concurrent.futures.Future[Frames]


class _OutOfOrderCall(Exception):
    """This call would have to wait, for instance for earlier calls, in a thread that must not: the sender repeats it.

    Args:
        mark: what the answer begins with.
    """

    def __init__(self, reason: str, mark: bytes = EARLY) -> None:
        super().__init__(reason)
        self.mark = mark


class ActorServer:
    """Passes the calls for one model in this process to its receiver, and returns the answers."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        #: Held while a receiver is made.
        self.lock = threading.RLock()
        #: The receiver that the calls drive; None if there is none yet, or if a background thread reads for it.
        self.receiver: WeightReceiver | None = None
        self._call_server = CallServer(model_id, TRANSPORT_NAME, own_actor)
        self._listening = False
        self._unanswered: dict[str, list[Answer]] = {}
        #: Guards the forwards of an actor that is not serial.
        self._guard: ForwardGuard | None = None
        #: The model that could not be guarded.
        self._unguarded: Any = None

    @property
    def has_receiver(self) -> bool:
        """Whether there is, or was, a receiver."""
        return self.receiver is not None or self._listening

    @property
    def serves(self) -> bool:
        """Whether versions have a model to go to in this actor."""
        if self.receiver is None:
            return self._listening
        try:
            self.receiver.target()
        except WeightSyncError:
            return False
        return True

    def open(self, accept: Callable[[Link], None], key: SharedKey | None = None) -> Callable[[], None]:
        """Have ``accept`` called with each sender's link: see `CallServer.open`."""
        stop_listening = self._call_server.open(accept, key)
        self._listening = True
        server.accept_calls(self.model_id, self.receive_and_apply)

        def stop() -> None:
            self._listening = False
            server.refuse_calls(self.model_id)
            stop_listening()
            if self._guard is not None:
                self._guard.clear()

        return stop

    def receive_and_apply(
        self, link: str, number: int, frame: bytes, payload: Any, lost_calls: tuple[int, ...] = ()
    ) -> Frames:
        """Take a call with Ray's arguments: see `call`. The payload is flat: bytes, an array, or a tensor
        under NIXL. A tuple is its place in the sender's memory.
        """
        if isinstance(payload, tuple):
            return self.call(Parcel(link, number, frame, place=SegmentPlace.read(payload)), lost_calls)
        flat: Any = payload.cpu().numpy() if isinstance(payload, torch.Tensor) else payload
        return self.call(Parcel(link, number, frame, None if payload is None else memoryview(flat)), lost_calls)

    def call(self, parcel: Parcel, lost_calls: tuple[int, ...]) -> Frames:
        """Take a parcel, have the receiver decide it, and return the answers.

        It waits for running forward passes (`WeightReceiver.serving`), so that none sees two versions.

        Raises:
            TransportError: its link is closed, or unknown here though this is not its first call; or calls begun
                before it have not arrived. Whatever is raised, the link is closed here.
            StateError: the receiver is closed.
            ConfigurationError, ModelPathError: weights have arrived, and there is no model yet.
            LayoutError: weights have arrived, and the model has no data yet (meta, uninitialised).
        """
        try:
            return self._answer_call(parcel, lost_calls)
        except _OutOfOrderCall as early:
            return [early.mark + str(early).encode()]
        except BaseException:
            self._unanswered.pop(parcel.link, None)
            self._call_server.drop(parcel)
            raise

    def _answer_call(self, parcel: Parcel, lost_calls: tuple[int, ...]) -> Frames:
        self._require_known(parcel)
        answer = self._call_server.submit(parcel)
        if isinstance(answer, CallRefused):
            return answer.result()
        answers = [*self._unanswered.pop(parcel.link, []), answer]
        self._call_server.skip(parcel, lost_calls)
        try:
            self._decide(parcel, answers[-1])
        except _OutOfOrderCall:
            self._unanswered[parcel.link] = answers[:-1]
            raise
        except (ConfigurationError, ModelPathError, LayoutError) as error:
            # A model, or its data, may be made after the trainer's handshake, which is every link's first call: the
            # handshake is then answered with the first weights.
            if parcel.number:
                return self._reject_link(parcel, error)
            # Another call may have the receiver answer at any moment: each answer is returned now or later, not twice.
            unanswered = [answer for answer in answers if not answer.done()]
            self._unanswered[parcel.link] = unanswered
            answers = [answer for answer in answers if answer not in unanswered]
        return [frame for answer in answers if answer.done() for frame in answer.result()]

    def _reject_link(self, parcel: Parcel, error: WeightSyncError) -> Frames:
        """Reject a link whose model is not in this actor, if other models are.

        Raises WeightSyncError: the error given: there are no other models, or the answer would have to be sealed.
        """
        with _lock:
            actor_servers = tuple(_servers.items())  # a call in another thread may add one
        others = [model_id for model_id, each in actor_servers if each is not self and each.serves]
        if not others or is_envelope(parcel.frame):
            raise error
        reason = another_model(self.model_id, others)
        logger.warning("model %r: a handshake was refused: %s", self.model_id, reason)
        self._call_server.drop(parcel)
        return [codec.encode(rejection(codec.decode(parcel.frame), reason))]

    def _require_known(self, parcel: Parcel) -> None:
        """Refuse a link whose first call has not arrived. The sender knows whether that means a restart."""
        patience = Deadline(0.0 if _calls_arrive_in_order() else STEP)
        while parcel.number and not self._call_server.knows(parcel.link):
            if patience.passed:
                reason = (
                    f"this actor does not know the sender that calls for {self.model_id!r}: the actor was restarted. "
                    "add_worker() makes a new handshake."
                )
                raise TransportError(reason) if _calls_arrive_in_order() else _OutOfOrderCall(reason, UNKNOWN)
            threading.Event().wait(STEP)

    def _decide(self, parcel: Parcel, answer: Answer) -> None:
        # A serial actor runs no earlier call while it waits, and with a key that one may be repeated behind this one.
        threaded = not _calls_arrive_in_order() and not _is_on_event_loop()
        order_deadline = Deadline(PATIENCE_FOR_ORDER if threaded else STEP)
        loop_deadline = Deadline(PATIENCE_OF_LOOP if _is_on_event_loop() else None)
        timeout = 0.0
        while not answer.done():
            self._drive(answer, timeout)
            timeout = STEP
            if answer.done():
                return
            if self._call_server.awaits_turn(parcel):
                if order_deadline.passed:
                    reason = f"calls for {self.model_id!r} that were begun before this one have not arrived."
                    raise TransportError(reason) if threaded else _OutOfOrderCall(reason)
            elif loop_deadline.passed:
                if self.receiver is not None and not self.receiver.serves_here:
                    raise _OutOfOrderCall("another thread was in a forward, or in serving(), for a minute.")
                raise StateError(
                    "receiver", "serving", "an update on the event loop", [], "Leave serving() before you await."
                )

    def _drive(self, answer: Answer, timeout: float) -> None:
        if self.receiver is None:
            concurrent.futures.wait([answer], timeout=STEP)
            return
        if not _calls_arrive_in_order():
            self._guard_forwards(self.receiver)
        try:
            self.receiver.receive(timeout=timeout)
        except TransportError:
            # The link is gone. If that was the answer (to a refused handshake, or a goodbye), it has been given.
            if not answer.done():
                raise
        except ProtocolError as error:
            # The link that broke the protocol is closed, and its calls have failed. This may be another link's call.
            if answer.done() and answer.exception() is not None:
                raise
            logger.error("model %r: a sender broke the protocol: %s", self.model_id, error)
        if self.receiver.state is State.CLOSED and not answer.done():
            raise StateError("receiver", "closed", "a call", [])

    def _guard_forwards(self, receiver: WeightReceiver) -> None:
        """Have no version go live during a forward: other threads of the actor may be running the model."""
        with contextlib.suppress(WeightSyncError):  # there is no model yet: applying weights reports it
            receiver.target()  # its path may lead to another model by now
        with self.lock:
            if self._guard is None or self._guard.receiver is not receiver:
                self._guard = ForwardGuard(receiver)
            try:
                self._guard.set(receiver.model)
            except ConfigurationError as error:
                if self._unguarded is not receiver.model:
                    logger.warning(
                        "model %r: forwards that are not inside serving() may see two versions: %s",
                        self.model_id,
                        error.__cause__,
                    )
                self._unguarded = receiver.model


def _is_on_event_loop() -> bool:
    """Whether this is an async actor's event loop, which must not be blocked for long."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _calls_arrive_in_order() -> bool:
    """Whether calls arrive in the order in which they began: Ray runs a serial actor's calls in its main thread."""
    return threading.current_thread() is threading.main_thread() and not _is_on_event_loop()


def require_actor() -> None:
    """Raises ConfigurationError: this process is not an actor, so no sender could call it."""
    if not own_actor():
        raise ConfigurationError(
            "This process is not a Ray actor, so no trainer could send to its receiver: call init_on_worker() or "
            "init_on_receiver() in a method of the actor, or derive the actor's class from WeightSyncActor. A Ray task "
            "is not an actor. Nothing has changed."
        )


_lock = threading.Lock()
_servers: dict[str, ActorServer] = {}


def actor_server_of(model_id: str) -> ActorServer:
    """This process's actor server for a model: a process holds one actor."""
    with _lock:
        return _servers.setdefault(model_id, ActorServer(model_id))


class ActorSender(WeightSender):
    """A sender to actors: a copy carries their handles, and makes its own handshakes with its first send."""

    def _carried(self) -> dict[int, Any]:
        return dict(self._workers.endpoints)


class ActorReceiver(WeightReceiver):
    """A receiver driven by the calls to this process's actor: `receive` need not be called."""

    # Otherwise, with threads that act without a pause, a call could never apply its weights.
    _forwards_swap = True

    def register_worker_transport(self, pipe_or_context: Any = None, *, pipe: Any = None) -> None:
        """Listen for senders' calls: see `WeightReceiver.register_worker_transport`."""
        super().register_worker_transport(pipe_or_context, pipe=pipe)
        actor_server_of(self.model_id).receiver = self

    _register_worker_transport = register_worker_transport
