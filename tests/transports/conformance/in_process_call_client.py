"""Call clients of a call server in this process: one calls in the caller's thread, the other in a thread pool."""

from __future__ import annotations

import itertools
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from weightsync.errors import TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Update
from weightsync.transports.base import SharesMemory
from weightsync.transports.calls.client import Answers
from weightsync.transports.calls.same_host import SharedPayloads
from weightsync.transports.calls.server import CallServer, Parcel, decoded


class DirectCallClient(SharesMemory):
    """Calls the call server in the thread that sends."""

    def __init__(self, call_server: CallServer) -> None:
        self.call_server = call_server
        self._link = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._shared = SharedPayloads()
        self._closed = False

    def shares(self, payload: Any, nbytes: int) -> bool:
        return self._shared.shares(payload)

    def start(self, message: Any, payload: Any) -> Answers:
        if self._closed:
            raise TransportError("The call client is closed.")
        place = None
        if isinstance(message, Update) and message.nbytes:
            message, place = self._shared.place(message, payload)
        carried = None if payload is None or place else memoryview(bytearray(payload.view[: message.nbytes]))
        parcel = Parcel(self._link, next(self._numbers), codec.encode(message), carried, place)
        answers: Answers = Future()
        self._bring(parcel, answers)
        return answers

    def _bring(self, parcel: Parcel, answers: Answers) -> None:
        try:
            frames = self.call_server.submit(parcel)
        except Exception as error:  # noqa: BLE001 - the answers' error, as after a remote call
            answers.set_exception(error)
            return
        frames.add_done_callback(lambda done: self._returned(answers, done))

    def _returned(self, answers: Answers, done: Future[Any]) -> None:
        try:
            messages = decoded(self._shared.strip_mark(done.result()))
        except Exception as error:  # noqa: BLE001 - the answers' error, as after a remote call
            answers.set_exception(error)
            return
        self._shared.heard(messages)
        answers.set_result(messages)

    def close(self) -> None:
        self._closed = True
        self._shared.close()


class ThreadedCallClient(DirectCallClient):
    """Calls the call server in a thread pool, so that calls overtake each other."""

    def __init__(self, call_server: CallServer) -> None:
        super().__init__(call_server)
        self._threads = ThreadPoolExecutor(3)

    def _bring(self, parcel: Parcel, answers: Answers) -> None:
        try:
            self._threads.submit(super()._bring, parcel, answers)
        except RuntimeError as error:
            raise TransportError("The call client is closed.") from error

    def close(self) -> None:
        super().close()
        self._threads.shutdown(wait=False)
