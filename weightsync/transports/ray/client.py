"""Call clients of Ray actors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from weightsync.clock import Deadline
from weightsync.errors import TransportError, reason_of
from weightsync.keys import SharedKey
from weightsync.protocol.messages import Hello, Message, Update
from weightsync.protocol.report import Evidence
from weightsync.transports.base import SharesMemory
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import EARLY, ENDED, FAILED, PATIENCE_FOR_ORDER, UNKNOWN, Answers, ClosedByPeer
from weightsync.transports.calls.same_host import SharedPayloads
from weightsync.transports.calls.waiting import CallsInTurn
from weightsync.transports.calls.without_receiver import ack, answered, refusal, start_call
from weightsync.transports.ray import server
from weightsync.transports.ray.object_store import CachedObject, ObjectCaches
from weightsync.transports.ray.session import (
    ACTOR_WATCH,
    Session,
    failure_in_actor,
    keep_if_ray_ended,
    plain,
    require_ray,
    settle,
)
from weightsync.transports.sealing import Challenged, Identity, new_name, seal_of

#: The name of this transport in link identities, where there is a key.
TRANSPORT_NAME: Final = "ray"
#: Ray passes arguments up to 100 KB with the call itself. Larger payloads are put into its object store.
INLINE_NBYTES: Final = 64 * 1024


class _TooManyCalls(TransportError):
    """As many calls of this process wait for the actor as its ``max_pending_calls`` allows: it takes no other now."""


class _OutOfOrderCall(TransportError):
    """The actor's event loop has not run a call of this link that was begun before this one."""


class _Restarting(TransportError):
    """Ray failed a call because it was restarting the actor, which has not run the link's handshake yet.

    Args:
        handshake: the call that carries it; None: this is it.
    """

    def __init__(self, handshake: Answers | None, error: TransportError) -> None:
        super().__init__(str(error))
        self.handshake = handshake


#: What a frame in place of answers means.
_NOT_ANSWERED: Final = {EARLY: _OutOfOrderCall, UNKNOWN: _OutOfOrderCall, FAILED: TransportError, ENDED: ClosedByPeer}


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to an actor."""

    submit: Callable[[], Any]
    #: What its end says.
    said: Callable[[Future[Any]], Sequence[Any]]
    #: Submits it again, sealed for the challenge that it was answered with.
    again: Callable[[], Any] | None = None
    #: Until when it is repeated because it arrived before calls that were begun earlier; None: it has not yet.
    patience: Deadline | None = None

    def after_arriving_early(self) -> _Call | None:
        """This call, to be repeated; None: it has been repeated for long enough."""
        # Counted from the first early arrival: the actor may have been starting until then.
        patience = self.patience or Deadline(PATIENCE_FOR_ORDER)
        return None if patience.passed else dataclasses.replace(self, patience=patience)


class _RayCallClient:
    """What the call clients of actors share: one put per version, the session's end, how a call ends."""

    def __init__(self, peer: str, caches: ObjectCaches) -> None:
        self._peer = peer
        self._caches = caches
        self._cached: CachedObject | None = None
        self._session = Session(peer)
        self._calls: set[Answers] = set()
        self._closed = False

    def close(self) -> None:
        """Begin no further calls: see `CallClient.close`."""
        self._closed = True
        if self._cached is not None:
            keep_if_ray_ended(self._cached)
            self._cached = None
        for call in tuple(self._calls):
            ACTOR_WATCH.leave(call)

    def _put(self, update: Update, payload: Buffer | None) -> Any:
        if self._cached is None:
            self._cached = self._caches.of(update.incarnation)
        return self._cached.put(update, payload)

    def _begin_call(self, call: _Call) -> Future[Any]:
        """Begin a call. If it has to be repeated, the future ends with the repetition."""
        answers: Future[Any] = Future()
        self._submit(answers, call)
        self._watch(answers)
        return answers

    def _begin_call_later(self, call: _Call, error: _TooManyCalls) -> Future[Any]:
        """Begin a call once the actor's queue has room."""
        answers: Future[Any] = Future()
        self._watch(answers)
        ACTOR_WATCH.call_soon(lambda: self._repeat(answers, error, call))
        return answers

    def _watch(self, answers: Answers) -> None:
        self._calls.add(answers)
        answers.add_done_callback(self._calls.discard)
        ACTOR_WATCH.watch(answers, self._peer)

    def _submit(self, answers: Answers, call: _Call) -> None:
        try:
            raw = call.submit().future()
        except Exception as error:
            raise _not_accepted_error(self._peer, error) from error
        raw.add_done_callback(lambda finished: self._settle_or_repeat(answers, finished, call))

    def _settle_or_repeat(self, answers: Answers, finished: Future[Any], call: _Call) -> None:
        """Settle a call that has ended, or repeat it. Runs in a thread of Ray's."""
        try:
            settle(answers, call.said(finished))
        except Challenged as challenge:
            self._repeat(answers, challenge, _Call(call.again, call.said) if call.again else None)
        except _OutOfOrderCall as early:
            self._repeat(answers, early, call.after_arriving_early())
        except _Restarting as restarting:
            self._repeat_after_restart(restarting, answers, call)
        except Exception as error:  # noqa: BLE001 - reported to the call that waits for the answers
            settle(answers, error=error)

    def _repeat_after_restart(self, restarting: _Restarting, answers: Answers, call: _Call) -> None:
        if restarting.handshake is None:  # the worker's next link may have made its own by then
            ACTOR_WATCH.call_soon(lambda: self._repeat(answers, restarting, None if self._closed else call))
        else:
            restarting.handshake.add_done_callback(partial(self._repeat_after_handshake, [(answers, restarting, call)]))

    def _repeat_after_handshake(self, waiting: list[tuple[Answers, _Restarting, _Call]], handshake: Answers) -> None:
        """Repeat a call behind its handshake, or fail it too. The handshake keeps its callbacks, but not the call."""
        answers, restarting, call = waiting.pop()
        self._repeat(answers, restarting, call if handshake.exception() is None else None)

    def _repeat(self, answers: Answers, error: Exception, call: _Call | None) -> None:
        if call is None:
            settle(answers, error=error)
            return
        try:
            self._session.require()
            self._submit(answers, call)
        except _TooManyCalls:  # the actor lives
            ACTOR_WATCH.call_soon(lambda: self._repeat(answers, error, call))
        except Exception as failed:  # noqa: BLE001 - reported to the call that waits for the answers
            settle(answers, error=failed)

    def _loss_error(self, error: BaseException) -> TransportError:
        if isinstance(error, _ray_exceptions().RayTaskError):
            kind = ClosedByPeer if isinstance(error.cause, ClosedByPeer) else TransportError
            loss = kind(f"{self._peer} ended its link: {reason_of(error.cause)}")
        elif (ended := failure_in_actor(error)) is not None:
            loss = TransportError(f"{self._peer} ended its link: {ended[0]}")
        else:
            return lost_call(self._peer, error)
        loss.__cause__ = error
        return loss

    def _no_room_answer(self, update: Update, error: BaseException) -> Answers:
        """Ray's object store took no weights, or the actor's queue no call: the worker has heard of nothing."""
        reason = plain(str(error))
        if not isinstance(error, _TooManyCalls):
            reason = f"Ray's object store did not take the weights: {reason}"
        return answered(refusal(update, reason, evidence=Evidence.NONE))


def _ray_exceptions() -> Any:
    return require_ray("RayWeightSyncScheme").exceptions


def _not_accepted_error(peer: str, error: Exception) -> TransportError:
    """The error of a call that Ray did not take."""
    full = isinstance(error, _ray_exceptions().PendingCallsLimitExceeded)
    return (_TooManyCalls if full else TransportError)(f"Ray accepted no call for {peer}: {plain(str(error))}")


class ActorCallClient(_RayCallClient, SharesMemory):
    """Carries messages to an actor that has our receiver, and returns the receiver's own answers.

    Args:
        key: shared with the worker; None if its answers are believed as they come.
    """

    def __init__(  # noqa: PLR0917 - the first four are those of every call client
        self, call: Any, model_id: str, peer: str, caches: ObjectCaches, key: SharedKey | None = None, actor: str = ""
    ) -> None:
        super().__init__(peer, caches)
        self._call = call
        self._model_id = model_id
        self._link = new_name()
        self._seal = seal_of(key, Identity(TRANSPORT_NAME, model_id, actor, self._link), peer)
        self._shared = SharedPayloads()
        self._handshake: Answers | None = None
        #: Why the handshake waits to be called; None: it does not.
        self._held: _TooManyCalls | None = None
        self._next = 0
        self._lost: list[int] = []
        self._unsent_layout = b""

    def shares(self, payload: Buffer, nbytes: int) -> bool:  # noqa: ARG002 - a segment is mapped whole
        """Whether the actor maps the payload's memory: see `SharesMemory.shares`."""
        return self._shared.shares(payload)

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries a message: see `CallClient.start`."""
        ray = self._session.require()
        carried = None
        if isinstance(message, Update):
            unsent_layout, self._unsent_layout = self._unsent_layout, b""
            message = replace(message, layout=message.layout or unsent_layout)
            try:
                message, carried = self._carried(message, payload)
            except ray.exceptions.RayError as error:
                self._unsent_layout = message.layout
                return self._no_room_answer(message, error)
        lost_calls, number = tuple(self._lost), self._next
        handshake_done = self._handshake is not None and self._handshake.done()
        arguments = self._model_id, self._link, number, self._seal.frame(number, message, payload), carried
        call = _Call(
            lambda: self._first_call(arguments, lost_calls),
            lambda finished: self._answers_of(message, number, handshake_done, lost_calls, finished),
            lambda: self._call_again(number),
        )
        try:
            held_error = self._held  # read once: the thread that makes the handshake may reset it
            if held_error is not None:  # it would overtake the handshake
                raise held_error.with_traceback(None)
            answers = self._begin_call(call)
        except _TooManyCalls as error:
            if not isinstance(message, Hello):
                return self._answer_untaken(message, error)
            self._held = error
            answers = self._begin_call_later(call, error)
        if isinstance(message, Hello):
            self._handshake = answers
        self._next += 1
        del self._lost[: len(lost_calls)]
        return answers

    def _answer_untaken(self, message: Message, error: _TooManyCalls) -> Answers:
        if not isinstance(message, Update):
            raise error
        self._unsent_layout = message.layout
        answers = self._no_room_answer(message, error)
        self._shared.heard(answers.result())
        return answers

    def ask_models(self, actor: Any) -> Future[Sequence[str]]:
        """Ask an actor for which models our receivers listen in it. An actor that cannot be asked has none.

        An actor that Ray is restarting is asked once it runs, and one whose queue is full once that has room, unless
        the link is closed by then.

        Raises TransportError: Ray accepted no call.
        """
        self._session.require()
        call = _Call(lambda: self._ask(actor), self._models_of)
        try:
            return self._begin_call(call)
        except _TooManyCalls as error:
            return self._begin_call_later(call, error)

    def _ask(self, actor: Any) -> Any:
        self._require_open()
        return actor.__ray_call__.remote(server.models_accepted, self._model_id)

    def _models_of(self, finished: Future[Any]) -> Sequence[str]:
        error = finished.exception()
        if error is None or isinstance(error, _ray_exceptions().RayTaskError):
            models: Sequence[str] = finished.result() if error is None else ()
            return models
        loss = lost_call(self._peer, error)
        raise _Restarting(None, loss) if isinstance(error, _ray_exceptions().ActorUnavailableError) else loss

    def _first_call(self, arguments: tuple[Any, ...], lost_calls: tuple[int, ...]) -> Any:
        if self._held is not None:
            self._require_open()
        # If it is repeated, it may be waiting for a call that was lost after it was begun.
        ref = self._call.remote(*arguments, tuple(sorted({*lost_calls, *self._lost})))
        self._held = None
        return ref

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"The link to {self._peer} is closed.")

    def _call_again(self, number: int) -> Any:
        self._require_open()
        self._session.require()
        return self._call.remote(self._model_id, self._link, number, self._seal.again(number), None, ())

    def close(self) -> None:
        """Begin no further calls: see `CallClient.close`."""
        super().close()
        self._shared.close()
        held = self._held
        if held is not None and self._handshake is not None:
            settle(self._handshake, error=held)

    def _carried(self, update: Update, payload: Buffer | None) -> tuple[Update, Any]:
        """What the call carries: the payload's place, the payload itself, or a reference to it in the object store."""
        if not update.nbytes or payload is None:
            return update, None
        update, place = self._shared.place(update, payload)
        if place is not None:
            return update, tuple(place)
        if update.nbytes <= INLINE_NBYTES:
            return update, bytes(payload.view[: update.nbytes])
        return update, self._put(update, payload)

    def _answers_of(
        self, message: Message, number: int, handshake_done: bool, lost_calls: tuple[int, ...], finished: Future[Any]
    ) -> Sequence[Message]:
        error = finished.exception()
        if error is None:
            frames = self._shared.strip_mark(finished.result())
            mark = frames[0][: len(EARLY)] if isinstance(frames, list) and frames else b""
            if mark in _NOT_ANSWERED:
                # Once the actor has answered the handshake, only a restart can make it forget the link. A failed
                # handshake is not repeated.
                is_gone = handshake_done or (self._handshake is not None and _has_failed(self._handshake))
                error_type = TransportError if is_gone and mark == UNKNOWN else _NOT_ANSWERED[mark]
                raise error_type(f"{self._peer} ended its link: {frames[0][len(EARLY) :].decode()}")
            messages = self._seal.brought(frames)
            self._shared.heard(messages)
            return messages
        if not isinstance(error, _ray_exceptions().ObjectLostError) or not isinstance(message, Update):
            raise self._restarting_error(message, error) or self._loss_error(error)
        # Ray ends a call whose argument is lost before the actor's code runs: the worker received nothing,
        # and does not know of the lost calls that this one named.
        self._lost += [*lost_calls, number]
        self._unsent_layout = self._unsent_layout or message.layout
        if self._cached is not None:
            self._cached.forget(message.version)
        reason = f"the weights were lost from Ray's object store before the worker read them: {plain(str(error))}"
        return [refusal(message, reason, evidence=Evidence.NONE)]

    def _restarting_error(self, message: Message, error: BaseException) -> _Restarting | None:
        if not isinstance(error, _ray_exceptions().ActorUnavailableError):
            return None
        if isinstance(message, Hello):
            return None if self._closed else _Restarting(None, self._loss_error(error))
        handshake = self._handshake
        return None if handshake is None or handshake.done() else _Restarting(handshake, self._loss_error(error))


class PlainActorCallClient(_RayCallClient):
    """Carries versions to an actor without our receiver: all that is known is that its method returned.

    Args:
        caches: have the sender's object, which presents weights as the method takes them.
        worker: identifies the actor and the model: calls over former links end first. None: there are none.
    """

    def __init__(
        self, call: Callable[[Any], Any], peer: str, caches: ObjectCaches, worker: Hashable | None = None
    ) -> None:
        super().__init__(peer, caches)
        self._call = call
        self._in_turn = CallsInTurn(peer, worker)

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries an update; a handshake is answered at once: see `CallClient.start`."""
        ray = self._session.require()

        def call(update: Update) -> Answers:
            try:
                ref = self._put(update, payload)
            except ray.exceptions.RayError as error:
                return self._no_room_answer(update, error)
            return self._in_turn.begin(lambda: self._deliver(update, ref))

        return start_call(message, self._peer, call)

    def close(self) -> None:
        """Begin no further calls: see `CallClient.close`."""
        self._in_turn.close()
        super().close()

    def _deliver(self, update: Update, ref: Any) -> Answers:
        self._session.require()
        try:
            return self._begin_call(_Call(lambda: self._call(ref), lambda over: self._answers_of(update, over)))
        except _TooManyCalls as error:
            return self._no_room_answer(update, error)

    def _answers_of(self, update: Update, finished: Future[Any]) -> Sequence[Message]:
        error = finished.exception()
        if error is None:
            return [ack(update)]
        # First of all: what the actor's method raised may be of any of Ray's types, too.
        failure = failure_in_actor(error)
        if failure is None:
            raise self._loss_error(error)
        if isinstance(error, _ray_exceptions().ObjectLostError) and self._cached is not None:
            self._cached.forget(update.version)
        return [refusal(update, *failure)]


def _has_failed(call: Answers) -> bool:
    return call.done() and call.exception() is not None


def lost_call(peer: str, error: BaseException) -> TransportError:
    """The error of a call that ended without an answer."""
    found = TransportError(f"The call to {peer} did not return: {plain(str(error)) or repr(error)}")
    found.__cause__ = error
    return found


class ActorFunctionCaller:
    """Calls functions in an actor whose class is not ours, in Ray's own way."""

    def __init__(self, actor: Any) -> None:
        # A call that Ray repeated would be another message.
        self._run = actor.__ray_call__.options(max_task_retries=0)

    def remote(self, *arguments: Any) -> Any:
        """Begin a call."""
        return self._run.remote(server.call, *arguments)
