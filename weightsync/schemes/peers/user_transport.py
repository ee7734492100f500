"""Transports of a user's own under `WeightSender`: each is called in a thread of its link's own."""

from __future__ import annotations

import inspect
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from weightsync.clock import Stopwatch
from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Hello, Message, Refusal, Update
from weightsync.protocol.report import Evidence
from weightsync.schemes.peers.user_protocols import BareTransport
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, BlockingLink
from weightsync.weights.context import MISSING, optional
from weightsync.weights.layout import Layout
from weightsync.weights.unpacking import present_as

_Job = Callable[[], None]


def user_link(transport: BareTransport, peer: str) -> BlockingLink:
    """A link over a user's own transport.

    Raises:
        ConfigurationError: its ``evidence`` is none.
    """
    return BlockingLink(UserTransportClient(transport, peer), peer)


class UserTransportClient:
    """Calls ``transport.send_weights`` in a daemon thread, one call after the other.

    A call that never returns ends neither `close` nor the process: its thread stays behind, as a daemon, until the
    call returns or the process ends, and what it returns is dropped. Until then the worker counts as owing, later
    versions wait behind it, and a send ends by its deadline.

    Args:
        transport: the user's.
        peer: who is at its other end, for messages to people.
    """

    def __init__(self, transport: BareTransport, peer: str) -> None:
        self._transport = transport
        self._peer = peer
        self._evidence = declared_evidence(transport)
        self._send = sending_call(transport)
        self._layouts: dict[bytes, Layout] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Answers = Future()

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call; a handshake is answered here, since no user's transport knows any."""
        answers: Answers = Future()
        match message:
            case Update():
                layout = self._layout_of(message)
                self._last = answers
                view = payload.view[: message.nbytes] if payload is not None else memoryview(b"")
                self._begin(lambda: self._deliver(message, layout, view, answers))
            case Hello():
                answers.set_result([Hello(model_id=message.model_id, incarnation=message.incarnation)])
            case _:
                answers.set_result([])
        return answers

    def close(self) -> None:
        """Let the thread end after the call that it is in, and wait for it if it is in none.

        A daemon that still lets go of tensors while the interpreter ends would take the process down with it.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        if self._last.done() and thread is not threading.current_thread():
            thread.join()

    def _layout_of(self, update: Update) -> Layout:
        if update.layout:
            self._layouts = {update.layout_digest: Layout.decode(update.layout)}
        return self._layouts[update.layout_digest]

    def _begin(self, job: _Job) -> None:
        if self._thread is None:
            name = f"weightsync transport to {self._peer}"
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _deliver(self, update: Update, layout: Layout, view: memoryview, answers: Answers) -> None:
        """Runs in the link's thread."""
        stopwatch = Stopwatch()
        try:
            check = optional(self._transport, "check_connection")
            if check is not MISSING and not check():
                raise TransportError(f"The transport to {self._peer} says that it is not connected.")
            weights = present_as(update.form, layout, view, update.extras)
            self._send(update.model_id, weights)
        except (TransportError, ProtocolError) as error:
            answers.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - whatever a user's transport raises is told to the sender
            answers.set_result([self._refusal(update, error)])
        else:
            answers.set_result([self._ack(update, stopwatch.seconds)])

    def _ack(self, update: Update, seconds: float) -> Ack:
        return Ack(
            model_id=update.model_id,
            incarnation=update.incarnation,
            version=update.version,
            digest=update.digest,
            seconds=seconds,
            evidence=self._evidence,
        )

    def _refusal(self, update: Update, error: BaseException) -> Refusal:
        return Refusal(
            model_id=update.model_id,
            incarnation=update.incarnation,
            version=update.version,
            kind=RefusalKind.REFUSED,
            reason=f"its transport raised {type(error).__name__}: {error}",
            remote_traceback="".join(traceback.format_exception(error)),
            evidence=Evidence.CALL,
        )


def declared_evidence(transport: object) -> Evidence:
    """What the return of a user's ``send_weights`` means: its ``evidence``, CALL if it has none.

    Raises:
        ConfigurationError: that is neither `Evidence.CALL` nor `Evidence.ANSWER`.
    """
    declared = optional(transport, "evidence")
    if declared is MISSING:
        return Evidence.CALL
    if declared not in (Evidence.CALL, Evidence.ANSWER):
        raise ConfigurationError(
            f"{type(transport).__name__}.evidence is {declared!r}: it is Evidence.ANSWER if send_weights() returns "
            "only when the worker has applied the weights, else Evidence.CALL."
        )
    return Evidence(declared)


def sending_call(transport: BareTransport) -> Callable[[str, Any], Any]:
    """The transport's ``send_weights`` as a function of model id and weights, whichever generation's it is."""
    parameters = inspect.signature(transport.send_weights).parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [place.name for place in places]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters) or (
        len([place for place in places if place.default is place.empty]) > 1
    )
    send: Callable[..., Any] = transport.send_weights
    if names[:1] == ["weights"] and "model_id" in names:
        return lambda model_id, weights: send(weights, model_id=model_id)
    if names[:1] == ["model_id"] or (several and names[:1] != ["weights"]):
        return send
    return lambda _, weights: send(weights)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
