"""Users' own transports under `WeightSender`: each link calls its transport in a thread of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from weightsync.clock import Stopwatch
from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol.messages import Message, Update
from weightsync.protocol.report import Evidence
from weightsync.schemes.peers.base import (
    PLAIN_METHODS,
    BareTransport,
    JobThread,
    Presenter,
    payload_of,
    refuse_coroutines,
)
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, BlockingLink
from weightsync.transports.calls.waiting import CallsInTurn
from weightsync.transports.calls.without_receiver import ack, raised, start_call
from weightsync.weights.loader import is_unawaited


def user_link(transport: BareTransport, model_id: str, peer: str) -> BlockingLink:
    """A link over a user's own transport. Raises ConfigurationError: its ``evidence`` is none, or it is ``async``."""
    return BlockingLink(UserTransportClient(transport, model_id, peer), peer)


class UserTransportClient:
    """Calls ``transport.send_weights`` in a daemon thread, one call after the other, also after those of a former link.

    A call that never returns blocks neither `close` nor the end of the process: its thread remains, as a daemon, until
    the call returns or the process ends. If the link was closed, its result is dropped. As long as a call has not
    returned, the worker owes an answer, later versions wait behind it, and a send ends by its deadline.
    """

    def __init__(self, transport: BareTransport, model_id: str, peer: str) -> None:
        refuse_coroutines(transport, ("send_weights", "check_connection"), PLAIN_METHODS)
        self._transport = transport
        self._peer = peer
        self._evidence = declared_evidence(transport)
        self._send = sending_call(transport)
        self._presenter = Presenter()
        self._thread = JobThread(f"weightsync transport to {peer}")
        # By its id: a transport need not be hashable, and lives as long as a call of a former link.
        self._in_turn = CallsInTurn(peer, ("transport", id(transport), model_id, peer))
        self._last: Answers = Future()

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call; a handshake is answered here, since users' transports have none."""

        def begin(update: Update) -> Answers:
            return self._in_turn.begin(lambda: self._call(update, payload_of(update, payload)))

        return start_call(message, self._peer, begin)

    def _call(self, update: Update, view: memoryview) -> Answers:
        answers = self._last = Future()
        self._presenter.read_layout(update)
        self._thread.begin(lambda: self._deliver(update, view, answers))
        return answers

    def close(self) -> None:
        """Let the thread end after its current call, and wait for it if no call is in progress.

        A daemon thread that frees tensors while the interpreter ends would crash the process.
        """
        self._in_turn.close()
        thread = self._thread.end()
        if thread is not None and self._last.done():
            thread.join()

    def _deliver(self, update: Update, view: memoryview, answers: Answers) -> None:
        """Runs in the link's thread."""
        stopwatch = Stopwatch()
        try:
            check = optional(self._transport, "check_connection")
            if check is not MISSING and not check():
                raise TransportError(f"The transport to {self._peer} is not connected, by its check_connection().")
            if is_unawaited(self._send(update.model_id, self._presenter.present(update, view))):
                raise ConfigurationError("send_weights() returned an awaitable, and nothing here awaits it")
        except (TransportError, ProtocolError) as error:
            answers.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - whatever a user's transport raises is reported to the sender
            answers.set_result([raised(update, error, "its transport raised ")])
        else:
            answers.set_result([ack(update, seconds=stopwatch.seconds, evidence=self._evidence)])


def declared_evidence(transport: object) -> Evidence:
    """What the return of a user's ``send_weights`` means: its ``evidence``, CALL if it has none.

    Raises ConfigurationError: it is neither `Evidence.CALL` nor `Evidence.ANSWER`.
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
    """The transport's ``send_weights``, of either generation, as a function of model id and weights."""
    parameters = inspect.signature(transport.send_weights).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [place.name for place in positional]
    takes_several = any(p.kind is p.VAR_POSITIONAL for p in parameters) or (
        len([place for place in positional if place.default is place.empty]) > 1
    )
    send: Callable[..., Any] = transport.send_weights
    if names[:1] == ["weights"] and "model_id" in names:
        return lambda model_id, weights: send(weights, model_id=model_id)
    if names[:1] == ["model_id"] or (takes_several and names[:1] != ["weights"]):
        return send
    return lambda _, weights: send(weights)
