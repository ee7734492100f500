"""Calls that wait: until it is known whether our receiver listens at the other end, or until another call has ended."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Final
from weakref import WeakValueDictionary

from weightsync.errors import TransportError
from weightsync.protocol.messages import Message
from weightsync.transports.base import SharesMemory
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, CallClient
from weightsync.transports.calls.without_receiver import RefusingClient, another_model
from weightsync.transports.process import PerProcess


class AskingClient(SharesMemory):
    """Asks at the first message whether our receiver listens, and passes all messages to the fitting call client.

    Args:
        ask_models: asks the other end for which models our receivers listen there. If for others only, all is refused.
    """

    def __init__(
        self,
        model_id: str,
        ask_models: Callable[[], Future[Sequence[str]]],
        our_client: CallClient,
        plain_client: CallClient,
    ) -> None:
        self._model_id = model_id
        self._ask = ask_models
        self._ours, self._plain = our_client, plain_client
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
                self._begin_to_ask()
        return answers

    def _begin_to_ask(self) -> None:
        try:
            models = self._ask()
        except TransportError as failure:
            self._failure = failure  # nobody will answer the messages that follow either
            self._waiting.clear()
            raise
        models.add_done_callback(self._choose_client)

    def _choose_client(self, models: Future[Sequence[str]]) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
            self._failure = models.exception()
            if self._failure is None:
                self._chosen = self._client_for(models.result())
            begun = [
                (answers, _begin_or_fail(functools.partial(self.start, message, payload)))
                for message, payload, answers in waiting
            ]
        for answers, inner in begun:
            inner.add_done_callback(functools.partial(complete_like, answers))

    def _client_for(self, models: Sequence[str]) -> CallClient:
        if self._model_id in models:
            return self._ours
        return RefusingClient(another_model(self._model_id, models)) if models else self._plain

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


def complete_like(future: Future[Any], finished: Future[Any]) -> None:
    """Complete one future like another."""
    error = finished.exception()
    if error is None:
        future.set_result(finished.result())
    else:
        future.set_exception(error)


class _InFlight(PerProcess):
    """The call to each worker that was begun last, over whichever link, while something may still complete it."""

    def _begin(self) -> None:
        self._calls: WeakValueDictionary[Hashable, Answers] = WeakValueDictionary()

    def note(self, worker: Hashable | None, call: Answers) -> None:
        """A call to a worker is begun. None: it is not known which worker that is."""
        with self._lock:
            if worker is not None:
                self._calls[worker] = call

    def to(self, worker: Hashable | None) -> Answers | None:
        """The call to a worker, if it has not ended; None: there is none."""
        with self._lock:
            call = None if worker is None else self._calls.get(worker)
        return None if call is None or call.done() else call


_in_flight: Final = _InFlight()


class CallsInTurn:
    """Begins each call once the one before it has ended, also if that was begun over a former link to the worker.

    A worker that runs two calls side by side, as async and threaded ones do, could end with the older version.

    Args:
        peer: the worker's name in messages to people.
        worker: identifies what is called, whatever the link; None: the calls of former links are not waited for.
    """

    def __init__(self, peer: str, worker: Hashable | None = None) -> None:
        self._peer = peer
        self._worker = worker
        self._lock = threading.Lock()
        #: Whether there is a call that has not ended, after which the next one is begun.
        self._busy = False
        self._closed = False
        self._waiting: deque[tuple[Answers, Callable[[], Answers]]] = deque()

    def begin(self, call: Callable[[], Answers]) -> Answers:
        """Begin a call, now or later. Raises TransportError: closed, or as ``call`` does, if it is begun now."""
        with self._lock:
            if self._closed:
                raise self._closed_error()
            previous_answers = None if self._busy else _in_flight.to(self._worker)
            must_wait, self._busy = self._busy or previous_answers is not None, True
            if must_wait:
                answers: Answers = Future()
                self._waiting.append((answers, call))
        if previous_answers is not None:
            previous_answers.add_done_callback(lambda _: self._begin_next())
        if must_wait:
            return answers
        try:
            begun = call()
        except BaseException:
            self._begin_next()
            raise
        _in_flight.note(self._worker, begun)
        begun.add_done_callback(lambda _: self._begin_next())
        return begun

    def close(self) -> None:
        """Fail the calls that have not begun: a later link's version would be overwritten by theirs."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
        for answers, _ in waiting:
            answers.set_exception(self._closed_error())

    def _closed_error(self) -> TransportError:
        return TransportError(f"The link to {self._peer} is closed.")

    def _begin_next(self) -> None:
        """Begin the call that has waited longest. A loop, since calls that end at once would begin others inside."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                answers, call = self._waiting.popleft()
            _in_flight.note(self._worker, answers)
            begun = _begin_or_fail(call)
            if not begun.done():
                begun.add_done_callback(functools.partial(self._complete_and_begin_next, answers))
                return
            complete_like(answers, begun)

    def _complete_and_begin_next(self, answers: Answers, begun: Answers) -> None:
        complete_like(answers, begun)
        self._begin_next()


def _begin_or_fail(call: Callable[[], Answers]) -> Answers:
    """The call's answers; if it could not be begun, they have failed already."""
    try:
        return call()
    except Exception as failure:  # noqa: BLE001 - raised to the call that waits for the answers
        failed: Answers = Future()
        failed.set_exception(failure)
        return failed
