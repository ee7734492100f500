"""A call client that first asks whether our receiver listens at the other end, and calls that wait for others."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from weightsync.errors import TransportError
from weightsync.protocol.messages import Message
from weightsync.transports.base import SharesMemory
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, CallClient
from weightsync.transports.calls.without_receiver import RefusingClient, another_model


class ForwardingClient(SharesMemory):
    """Asks at the first message whether our receiver listens, and passes all messages to the fitting call client.

    Args:
        ask: asks the other end for which models our receivers listen there. If for others only, all is refused.
    """

    def __init__(
        self, model_id: str, ask: Callable[[], Future[Sequence[str]]], ours: CallClient, plain: CallClient
    ) -> None:
        self._model_id = model_id
        self._ask = ask
        self._ours, self._plain = ours, plain
        self._lock = threading.RLock()
        self._asked = False
        self._chosen: CallClient | None = None
        self._failure: BaseException | None = None
        self._waiting: deque[tuple[Message, Buffer | None, Answers]] = deque()

    def shares(self, payload: Buffer, nbytes: int) -> bool:
        """Whether the worker maps the payload's memory; no, before it is known which call client is called."""
        return isinstance(self._chosen, SharesMemory) and self._chosen.shares(payload, nbytes)

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries a message, once the call client is known: see `CallClient.start`."""
        with self._lock:
            if self._failure is not None:
                raise TransportError(str(self._failure)) from self._failure
            if self._chosen is not None:
                return self._chosen.start(message, payload)
            answers: Answers = Future()
            self._waiting.append((message, payload, answers))
            if not self._asked:
                self._asked = True
                self._ask().add_done_callback(self._found)
        return answers

    def _found(self, found: Future[Sequence[str]]) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
            self._failure = found.exception()
            if self._failure is None:
                self._chosen = self._fitting(found.result())
            begun = [(answers, self._begin(message, payload)) for message, payload, answers in waiting]
        for answers, inner in begun:
            inner.add_done_callback(functools.partial(complete_like, answers))

    def _fitting(self, models: Sequence[str]) -> CallClient:
        if self._model_id in models:
            return self._ours
        return RefusingClient(another_model(self._model_id, models)) if models else self._plain

    def _begin(self, message: Message, payload: Buffer | None) -> Answers:
        try:
            return self.start(message, payload)
        except Exception as failure:  # noqa: BLE001 - raised to the call that waits for the answers
            failed: Answers = Future()
            failed.set_exception(failure)
            return failed

    def close(self) -> None:
        """Begin no further calls: see `CallClient.close`."""
        self._ours.close()
        self._plain.close()


class NoCallClient:
    """Refuses every message: the worker cannot be reached."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def start(self, message: Message, payload: Buffer | None) -> Answers:  # noqa: ARG002 - it sends nothing
        """Raise: see `CallClient.start`."""
        raise TransportError(self._reason)

    def close(self) -> None:
        """Nothing to close."""


def complete_like(answers: Future[Any], over: Future[Any]) -> None:
    """Complete one future like another."""
    error = over.exception()
    if error is None:
        answers.set_result(over.result())
    else:
        answers.set_exception(error)


class CallsInTurn:
    """Begins each call once the one before it has ended.

    A worker that runs two calls side by side, as async and threaded ones do, could end with the older version.
    """

    def __init__(self) -> None:
        self._last: Answers | None = None

    def begin(self, call: Callable[[], Answers]) -> Answers:
        """Begin a call, now or later. Raises TransportError: as ``call`` does, if it is begun now."""
        last = self._last
        if last is None or last.done():
            self._last = call()
            return self._last
        answers: Answers = Future()
        self._last = answers
        last.add_done_callback(lambda _: _begin_late(answers, call))
        return answers


def _begin_late(answers: Answers, call: Callable[[], Answers]) -> None:
    try:
        begun = call()
    except Exception as error:  # noqa: BLE001 - raised to the call that waits for the answers
        answers.set_exception(error)
    else:
        begun.add_done_callback(functools.partial(complete_like, answers))
