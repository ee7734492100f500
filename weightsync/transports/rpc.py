"""Links over the calls of `torch.distributed.rpc`: payloads are flat tensors, answers are the calls' results."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution

from weightsync.errors import ConfigurationError, TransportError, WeightSyncError
from weightsync.keys import SharedKey
from weightsync.protocol.messages import Bye, Message, Update
from weightsync.transports.base import SharesMemory
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, ClosedByPeer
from weightsync.transports.calls.same_host import SegmentPlace, SharedPayloads
from weightsync.transports.calls.server import CallServer, Frames, Parcel
from weightsync.transports.calls.waiting import complete_like
from weightsync.transports.calls.without_receiver import another_model
from weightsync.transports.sealing import Challenged, Identity, new_name, seal_of

logger = logging.getLogger("weightsync")

#: torch exports, annotates and documents less than it provides.
torch_rpc: Final[Any] = rpc
WorkerInfo = Any
#: torch's value for "no timeout": a call ends with its answer, with its worker or with RPC itself. The sender has its
#: own deadlines.
ENDLESS: Final = 0.0
#: What a rank's end means for the others, in torch 2.15.
NO_NEW_RANK: Final = (
    "torch's RPC cannot replace a rank that died: the others continue without it; to have it back, start a new "
    "world in new processes"
)


#: The name of this transport in link identities, where there is a key.
TRANSPORT_NAME: Final = "rpc"
#: How many call servers a process keeps, not counting those that are in use.
_IDLE_KEPT: Final = 256


class Delivered(NamedTuple):
    """The result of a call."""

    #: The answers, each encoded by `codec.encode`.
    frames: tuple[bytes, ...]
    #: Why the call was refused; empty if it was not.
    failure: str = ""


class _CallServers:
    """The call servers of this process, one for each model. They exist before a receiver listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call_servers: dict[str, CallServer] = {}
        #: Whether RPC was running in the process that this one was forked from.
        self.inherited = False
        #: Whether a sender has called this process by RPC.
        self.called = False
        os.register_at_fork(after_in_child=self._forget)

    def of(self, model_id: str) -> CallServer:
        """The call server of a model, made if it does not exist yet."""
        with self._lock:
            server = self._call_servers.pop(model_id, None)
            if server is None:
                server = CallServer(model_id, TRANSPORT_NAME, _own_name, self._unreachable)
                self._evict_excess()
            self._call_servers[model_id] = server  # last: the first ones are those that were not asked for the longest
            return server

    def _evict_excess(self) -> None:
        """Drop what is left of senders whose models were never received here: each may have had a name of its own."""
        if len(self._call_servers) >= _IDLE_KEPT:
            idle = [model_id for model_id, server in self._call_servers.items() if server.idle]
            for model_id in idle[: -_IDLE_KEPT + 1]:
                del self._call_servers[model_id]

    def listening(self) -> list[str]:
        """The models for which a receiver listens."""
        with self._lock:
            return sorted(model_id for model_id, server in self._call_servers.items() if server.listening)

    def _unreachable(self) -> str:
        """Why no sender can call this process any more; empty: they can, or none has ever called."""
        if not self.called or is_initialised():
            return ""
        return "RPC was shut down in this process, so no sender can call it: leave the loop before rpc.shutdown()"

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._call_servers = {}
        self.inherited = self.inherited or is_initialised()
        self.called = False


def is_initialised() -> bool:
    """Whether RPC runs in this process."""
    if not rpc.is_available():
        return False
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True


def _own_name() -> str:
    """RPC's name for this process, the only name that its callers use."""
    return str(rpc.get_worker_info().name)


def is_called() -> bool:
    """Whether this thread is one of RPC's, so that a caller waits for it."""
    # RPC's threads are C++ threads: Python knows them by name only while they run Python code.
    return isinstance(threading.current_thread(), threading._DummyThread) and is_initialised()


_call_servers: Final = _CallServers()


def call_server_of(model_id: str) -> CallServer:
    """The call server of a model in this process. Links that arrive before a receiver listens wait in it."""
    return _call_servers.of(model_id)


@async_execution  # type: ignore[untyped-decorator]
def _deliver(
    model_id: str, link: str, number: int, frame: bytes, payload: torch.Tensor | tuple[int, ...] | None
) -> torch.futures.Future[Delivered]:
    """Deliver a call. Returns at once in a thread of the worker's RPC; the result follows with the answer."""
    delivery: torch.futures.Future[Delivered] = torch.futures.Future()
    _call_servers.called = True
    try:
        parcel = _parcel(link, number, frame, payload)
        answer = call_server_of(model_id).submit(parcel)
    except WeightSyncError as error:
        delivery.set_result(Delivered((), str(error)))
        return delivery
    answer.add_done_callback(_AnswerCallback(delivery, torch_rpc.api._get_current_rpc_agent()))
    return delivery


def _parcel(link: str, number: int, frame: bytes, carried: torch.Tensor | tuple[int, ...] | None) -> Parcel:
    payload, place = (None, None) if carried is None else _payload_of(carried)
    return Parcel(link, number, frame, payload, place)


def _payload_of(carried: torch.Tensor | tuple[int, ...]) -> tuple[memoryview | None, SegmentPlace | None]:
    """The payload that a call carried, or the place that it named."""
    if not isinstance(carried, torch.Tensor):
        return None, SegmentPlace.read(carried)
    array: Any = carried.numpy()
    return memoryview(array), None


@dataclass(frozen=True, slots=True)
class _AnswerCallback:
    """Returns a call's answer."""

    over: torch.futures.Future[Delivered]
    #: Kept, since an answer may come after RPC was shut down here, and torch still needs its agent then.
    agent: object

    def __call__(self, answer: Future[Frames]) -> None:
        error = answer.exception()
        self.over.set_result(Delivered(tuple(answer.result())) if error is None else Delivered((), str(error)))


def _hang_up(model_id: str, link: str, number: int, frame: bytes) -> Delivered:
    """The sender's last call of a link: its calls no longer wait for answers, with or without a receiver."""
    try:
        call_server_of(model_id).hang_up(Parcel(link, number, frame))
    except WeightSyncError as error:
        return Delivered((), str(error))
    return Delivered(())


def _listening(model_id: str) -> list[str]:
    """The models for which our receivers listen in this process, for a sender of that model."""
    models = _call_servers.listening()
    if models and model_id not in models:
        logger.warning("model %r: a handshake was not accepted: %s", model_id, another_model(model_id, models))
    return models


def require_rpc(peer: str) -> None:
    """Require that RPC runs here.

    Raises ConfigurationError: RPC is not initialised in this process, or this torch was built without it.
    """
    if not rpc.is_available():
        raise ConfigurationError(f"{peer} cannot be called: this torch was built without torch.distributed.rpc.")
    if _call_servers.inherited:
        raise ConfigurationError(
            f"{peer} cannot be called from here: RPC ran in the process that this one was forked from, and torch's RPC "
            "does not survive a fork. Start the process with spawn or forkserver, and call init_rpc() in it."
        )
    if not is_initialised():
        raise ConfigurationError(
            f"{peer} cannot be called: RPC is not initialised in this process. Call torch.distributed.rpc.init_rpc() "
            "first."
        )


def worker_named(worker: Any, peer: str) -> WorkerInfo:
    """The worker that a name, a rank or a `WorkerInfo` denotes.

    Raises ConfigurationError: as for `require_rpc`, or RPC knows no such worker.
    """
    require_rpc(peer)
    if isinstance(worker, torch_rpc.WorkerInfo):
        return worker
    if isinstance(worker, bool) or not isinstance(worker, str | int):
        kind = type(worker).__name__
        raise ConfigurationError(f"{peer} is of type {kind}: give the name, rank or WorkerInfo of a worker.")
    try:
        return torch_rpc.api._to_worker_info(worker)
    except (RuntimeError, TypeError) as error:  # TypeError: the number is too large for a rank
        raise ConfigurationError(
            f"{peer}: RPC knows no worker {worker!r} ({plain(error)}). If it replaces one that died: {NO_NEW_RANK}."
        ) from error


def plain(error: BaseException) -> str:
    """torch's description of a failure, in one line."""
    return next(iter(str(error).strip().splitlines()), "") or repr(error)


def lost(peer: str, error: BaseException) -> TransportError:
    """The error of a call that ended without an answer."""
    if raised_remotely(error):
        reason = f"{peer} could not accept our call: is weightsync installed there? ({plain(error)})"
    elif is_initialised() and "pipe closed" not in str(error):
        reason = f"RPC can no longer reach {peer} ({plain(error)}). {NO_NEW_RANK}"
    else:
        reason = f"RPC was shut down here before {peer} had answered ({plain(error)}): it may have applied the update"
    found = TransportError(f"{reason}.")
    found.__cause__ = error
    return found


def begin(
    peer: str,
    call: Callable[[], torch.futures.Future[Any]],
    answers_of: Callable[[torch.futures.Future[Any]], Sequence[Message]],
    again: Callable[[], torch.futures.Future[Any]] | None = None,
) -> Answers:
    """Begin a call; ``answers_of`` makes its answers, in a thread of RPC's.

    Args:
        again: repeats the call if it was answered with a challenge; then the end of the repeated call counts.

    Raises TransportError: RPC accepted no call. The worker will never see it.
    """
    answers: Answers = Future()

    def over(call_over: torch.futures.Future[Any]) -> None:
        try:
            messages = answers_of(call_over)
        except Challenged as error:
            if again is None:
                answers.set_exception(error)
            else:
                _follow(answers, peer, again, answers_of)
        except Exception as error:  # noqa: BLE001 - reported to the call that waits for the answers
            answers.set_exception(error)
        else:
            answers.set_result(messages)

    try:
        require_rpc(peer)
        call().add_done_callback(over)
    except Exception as error:
        raise TransportError(f"RPC accepted no call for {peer}: {plain(error)}") from error
    return answers


def _follow(
    answers: Answers,
    peer: str,
    call: Callable[[], torch.futures.Future[Any]],
    answers_of: Callable[[torch.futures.Future[Any]], Sequence[Message]],
) -> None:
    """Begin a call whose end is that of ``answers``."""
    try:
        begin(peer, call, answers_of).add_done_callback(functools.partial(complete_like, answers))
    except TransportError as error:
        answers.set_exception(error)


class RpcCallClient(SharesMemory):
    """Carries messages to a process with our receiver, and returns the receiver's own answers.

    Args:
        key: shared with the worker. None: its answers are trusted as they are.
    """

    def __init__(self, worker: WorkerInfo, model_id: str, peer: str, key: SharedKey | None = None) -> None:
        self._worker = worker
        self._model_id = model_id
        self._peer = peer
        self._link = new_name()
        self._seal = seal_of(key, Identity(TRANSPORT_NAME, model_id, str(worker.name), self._link), peer)
        self._shared = SharedPayloads()
        self._next = 0
        self._greeted = self._closed = False
        #: Why the worker does not answer the handshake, as far as is known; empty if it has, or nothing is known.
        self.remark = ""

    def shares(self, payload: Buffer, nbytes: int) -> bool:  # noqa: ARG002 - a segment is mapped whole
        """Whether the worker maps the payload's memory: see `SharesMemory.shares`."""
        return self._shared.shares(payload)

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries a message: see `weightsync.transports.calls.client.CallClient.start`."""
        number = self._next
        message, carried = self._carried(message, payload)
        frame = self._seal.frame(number, message, payload)
        if isinstance(message, Bye):
            answers = self._send_goodbye(number, frame)
        else:
            answers = begin(
                self._peer,
                lambda: self._call(_deliver, number, frame, carried),
                self._answers_of,
                lambda: self._call_again(number),
            )
        self._next += 1
        if not self._greeted and not isinstance(message, Bye):
            self._ask_for_other_models()
        return answers

    def _send_goodbye(self, number: int, frame: bytes) -> Answers:
        """Begin the last call. If RPC was shut down here before, warn: the worker keeps waiting for the sender."""
        try:
            return begin(self._peer, lambda: self._call(_hang_up, number, frame), self._answers_of)
        except TransportError:
            if not is_initialised():
                logger.warning(
                    "model %r: %s was not told that its sender has closed, because RPC was shut down before: call "
                    "the scheme's close() before rpc.shutdown().",
                    self._model_id,
                    self._peer,
                )
            raise

    def _ask_for_other_models(self) -> None:
        """Find out whether receivers of other models only listen there. The handshake still waits for ours."""
        with contextlib.suppress(TransportError):  # the call that carries the message reports it
            ask_listening(self._worker, self._model_id, self._peer).add_done_callback(self._note_other_models)

    def _note_other_models(self, found: Future[Sequence[str]]) -> None:
        models = () if found.exception() is not None else found.result()
        if models and self._model_id not in models and not self._greeted:
            self.remark = another_model(self._model_id, models)
            logger.warning("model %r: %s did not accept the handshake: %s", self._model_id, self._peer, self.remark)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> torch.futures.Future[Any]:
        whole = self._model_id, self._link, *arguments
        over: torch.futures.Future[Any] = rpc.rpc_async(self._worker, function, args=whole, timeout=ENDLESS)
        return over

    def _call_again(self, number: int) -> torch.futures.Future[Any]:
        if self._closed:
            raise TransportError(f"The link to {self._peer} is closed.")
        return self._call(_deliver, number, self._seal.again(number), None)

    def _answers_of(self, finished: torch.futures.Future[Delivered]) -> Sequence[Message]:
        try:
            delivered = finished.value()
        except Exception as error:
            raise lost(self._peer, error) from error
        if delivered.failure:
            raise ClosedByPeer(f"{self._peer} refused a call: {delivered.failure}")
        messages = self._seal.brought(self._shared.strip_mark(delivered.frames))
        self._shared.heard(messages)
        if messages:
            self._greeted, self.remark = True, ""
        return messages

    def close(self) -> None:
        """Begin no further calls. Those in flight end with the worker's answer."""
        self._closed = True
        self._shared.close()

    def _carried(
        self, message: Message, payload: Buffer | None
    ) -> tuple[Message, torch.Tensor | tuple[int, ...] | None]:
        """The message, with its slot if the worker maps its payload, and what the call carries beside it."""
        if not isinstance(message, Update) or not message.nbytes or payload is None:
            return message, None
        message, place = self._shared.place(message, payload)
        if place is not None:
            return message, tuple(place)
        # A view: RPC reads the buffer itself, which stays pinned until the call ends.
        return message, torch.frombuffer(payload.view[: message.nbytes], dtype=torch.uint8)


def ask_listening(worker: WorkerInfo, model_id: str, peer: str) -> Future[Sequence[str]]:
    """Ask for which models our receivers listen there. A process without weightsync has none.

    Raises TransportError: RPC accepted no call.
    """
    models: Future[Sequence[str]] = Future()

    def said(over: torch.futures.Future[list[str]]) -> Sequence[Message]:
        try:
            models.set_result(over.value())
        except Exception as error:  # noqa: BLE001 - reported to the call that waits
            models.set_result(()) if raised_remotely(error) else models.set_exception(lost(peer, error))
        return ()

    begin(peer, lambda: rpc.rpc_async(worker, _listening, args=(model_id,), timeout=ENDLESS), said)
    return models


def raised_remotely(error: BaseException) -> bool:
    """Whether the called code raised it, or unpickling it there, and not RPC: torch names the place in the message."""
    return any(words in str(error) for words in ("On WorkerInfo(", "Error on Node "))
