"""Links whose messages are calls and whose answers are the calls' results: Ray, RPC, and users' own transports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Protocol

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Message, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer
from weightsync.transports.wakeup import WakeableLink

#: What a call gives once it is over: what the worker had to say by then. Fails with TransportError if the worker is
#: gone, with ProtocolError if it answered nonsense; any other exception counts as the first.
Answers = Future[Sequence[Message]]


class GivenUp(TransportError):
    """The other end's own word that it has given the link up: with it, every call of that link comes home."""


class CallClient(Protocol):
    """Carries messages to one worker: the part of a transport that `CallLink` does not know."""

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries a message; never blocks. Calls arrive in the order in which they were begun.

        The payload's first ``message.nbytes`` bytes are not written to until the future is done.

        Raises:
            TransportError: there is no way to the worker. It will never see this message.
        """

    def close(self) -> None:
        """No further call will be begun; those on their way are not waited for."""


class CallLink(WakeableLink):
    """A link over the calls of a `CallClient`. See `weightsync.transports.base.Link` for its contract.

    Args:
        courier: begins the calls.
        peer: who is at the other end, for messages to people.
    """

    delivery = Delivery.ORDERED

    def __init__(self, call_client: CallClient, peer: str) -> None:
        super().__init__(peer)
        self._call_client = call_client
        self._calls: list[Answers] = []
        self._failed: TransportError | ProtocolError | None = None

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Begin the call that carries a message: see `Link.send`."""
        self._require_open()
        nbytes = message.nbytes if isinstance(message, Update) else 0
        if nbytes and (payload is None or payload.nbytes < nbytes):
            raise ConfigurationError(f"The update comes without its {nbytes} bytes.")
        token = object()
        if payload is not None:
            payload.pin(token)
        try:
            answers = self._call_client.start(message, payload)
        except BaseException:
            if payload is not None:
                payload.unpin(token)
            raise
        self._calls.append(answers)
        answers.add_done_callback(lambda _: self._over(payload, token))

    def _over(self, payload: Buffer | None, token: object) -> None:
        """Runs in whichever thread the call ends in, possibly after the link was closed."""
        if payload is not None:
            payload.unpin(token)
        self._waker.fire()

    def receive(self) -> list[Received]:
        """The answers of the calls that are over, in the order in which the calls were begun: see `Link.receive`.

        A call that failed is told at once, even if others are still on their way: they may never end. That the other
        end has given the link up is told once all have ended, since what it said before may come home later.
        """
        self._require_open()
        self._waker.clear()
        # Asked before looking: what the peer said before its death is then certainly there.
        death = self._death()
        received = [Received(message) for call in self._over_now() for message in self._said(call)]
        if self._failed is None and death:
            self._failed = TransportError(f"{self._peer} has ended: {death}.")
        if self._failed is not None:
            if not received:
                raise self._failed
            # What came before is delivered now, the error at the next call: the wait before it must end.
            self._waker.fire()
        return received

    def _over_now(self) -> list[Answers]:
        """The calls that are over up to the first that is not or that failed; all that are over, if the link failed."""
        over = [call for call in self._calls if call.done()]
        errors = [error for call in over if (error := _error_of(call)) is not None]
        if len(over) < len(self._calls) and all(isinstance(error, GivenUp) for error in errors):
            over = list(itertools.takewhile(_answered, self._calls))
        self._calls = [call for call in self._calls if call not in over]
        return over

    def _said(self, call: Answers) -> Sequence[Message]:
        error = _error_of(call)
        if error is None:
            return call.result()
        if isinstance(error, TransportError | ProtocolError):
            self._failed = error
        else:
            self._failed = TransportError(f"A call to {self._peer} failed: {error}")
            self._failed.__cause__ = error
        return ()

    def close(self) -> None:
        """Give the link up: see `Link.close`. A payload on its way stays as it is until its call is over."""
        if self._closed:
            return
        self._closed = True
        self._call_client.close()
        self._calls.clear()
        self._let_go()

    def forget(self) -> None:
        """In a forked child: be closed, and close nothing of the parent's."""
        super().forget()
        self._calls.clear()


def _error_of(call: Answers) -> BaseException | None:
    return CancelledError("it was cancelled") if call.cancelled() else call.exception()


def _answered(call: Answers) -> bool:
    return call.done() and _error_of(call) is None


class BlockingLink(CallLink):
    """Calls of which nobody is told that they are over but he who waits: a sender's `send_async` refuses it."""
