"""Links whose messages are calls and whose answers are the calls' results: Ray, RPC, and users' own transports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Final, Protocol

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Bye, Message, Update
from weightsync.transports.base import Received, Remarks, SharesMemory
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.succession import LinkPosition, when_all_answered
from weightsync.transports.process import forget_after_fork
from weightsync.transports.wakeup import WakeableLink

logger = logging.getLogger("weightsync")

#: The result of a call: the messages that the worker had to send by then. Fails with TransportError if the worker is
#: gone, and with ProtocolError if its answer is malformed. Any other exception counts as a TransportError.
Answers = Future[Sequence[Message]]


class ClosedByPeer(TransportError):
    """The called end has closed the link. It raises this for each call of that link, and so does the calling end."""


#: Seconds that a call waits for calls that were begun before it, where calls may overtake each other. Earlier calls do
#: arrive, however busy the machine is, unless a process dies, which is noticed in another way.
PATIENCE_FOR_ORDER: Final = 60.0
#: A frame in place of answers, followed by the reason: the call came before calls that were begun earlier, in a thread
#: that must not wait for them. It is to be repeated.
EARLY: Final = b"WSYE"
#: The same, from a worker that does not know the call's link: it comes before the handshake, or after a restart.
UNKNOWN: Final = b"WSYU"
#: The same, and not to be repeated: the call has failed in the worker.
FAILED: Final = b"WSYF"
#: The same: the worker has closed the link, so that each of its calls ends: see `ClosedByPeer`.
ENDED: Final = b"WSYG"


class CallClient(Protocol):
    """Carries messages to one worker: the transport's part of a `CallLink`."""

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries a message; never blocks. Calls must arrive in the order in which they are begun.

        The payload's first ``message.nbytes`` bytes stay unchanged until the future is done.

        Raises TransportError: the worker cannot be reached. It will never see this message.
        """

    def close(self) -> None:
        """Begin no further calls. Calls in flight are not waited for."""


class CallLink(WakeableLink, Remarks, SharesMemory):
    """A link over the calls of a `CallClient`. See `weightsync.transports.base.Link` for its contract.

    Args:
        call_client: carries the messages.
        peer: the worker's name in messages to people.
        remark: why the worker does not answer, as far as is known.
        worker: identifies the worker and the model, if the worker may have several links: then the worker gets
            the newest one before the goodbye of an older one.
    """

    delivery = Delivery.ORDERED

    def __init__(
        self, call_client: CallClient, peer: str, remark: Callable[[], str] = str, worker: Hashable | None = None
    ) -> None:
        super().__init__(peer)
        self._get_remark = remark
        self._position = LinkPosition(worker)
        self._call_client = call_client
        self._calls: list[Answers] = []
        self._failed: TransportError | ProtocolError | None = None
        #: The error of the first call that ended because the other end closed the link; None: none did.
        self._closed_by_peer: ClosedByPeer | None = None
        forget_after_fork(self)

    @property
    def remark(self) -> str:
        """Why the worker does not answer: see `Remarks`."""
        return self._get_remark()

    def shares(self, payload: Buffer, nbytes: int) -> bool:
        """Whether the worker maps the payload's memory: see `SharesMemory.shares`."""
        return isinstance(self._call_client, SharesMemory) and self._call_client.shares(payload, nbytes)

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Begin the call that carries a message: see `Link.send`."""
        self._require_open()
        later_answers = self._position.later if isinstance(message, Bye) else ()
        if later_answers:
            when_all_answered(later_answers, lambda: self._send_late_goodbye(message))
            return
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
        answers.add_done_callback(lambda over: self._release_payload(over, payload, token))

    def _release_payload(self, finished: Answers, payload: Buffer | None, token: object) -> None:
        """Release the payload. Runs in the thread in which the call ends, possibly after the link was closed."""
        if payload is not None:
            payload.unpin(token)
        _drop_frames(_error_of(finished))
        self._position.met()
        self._waker.fire()

    def _send_late_goodbye(self, goodbye: Message) -> None:
        """Send a goodbye that has waited for later links. Runs in any thread, after the link was closed."""
        try:
            self._call_client.start(goodbye, None)
        except TransportError as error:
            logger.debug("a goodbye to %s could not be sent: %s", self._peer, error)

    def receive(self) -> list[Received]:
        """The answers of the finished calls, in the order in which the calls were begun: see `Link.receive`.

        An answer is delivered once the answers of all earlier calls were. A failed call is reported at once, even if
        other calls are still in flight, since these may never end. Answers of later calls are lost with the link, since
        the failed call's answers are missing before them. If the other end has closed the link, this is reported once
        all calls have ended, since earlier answers may still arrive.
        """
        self._require_open()
        self._waker.clear()
        # Read before the calls are checked: what the peer sent before its death is then certainly there.
        death = self._death()
        received = [Received(message) for message in self._answers()]
        if self._failed is None and (failure := self._failure()) is not None:
            self._failed = self._with_ending(failure)
        if self._failed is None and death:
            self._failed = TransportError(f"{self._peer} has ended: {death}.")
        if self._failed is not None:
            if not received:
                raise self._failed
            # Earlier answers are delivered now and the error at the next call, so the wait before that must end.
            self._waker.fire()
        return received

    def _answers(self) -> list[Message]:
        """The messages of the finished calls, up to the first that is in flight or has failed."""
        messages: list[Message] = []
        while self._calls and self._calls[0].done():
            error = _error_of(self._calls[0])
            if error is None:
                messages += self._calls[0].result()
            elif isinstance(error, ClosedByPeer):  # no messages; a later call may bring the other end's last ones
                self._closed_by_peer = self._closed_by_peer or error
            else:
                break
            del self._calls[0]
        return messages

    def _failure(self) -> TransportError | ProtocolError | None:
        """Why the link has failed: the first error that says more than that the other end has closed it."""
        errors = (_error_of(call) for call in self._calls if call.done())
        error = next((each for each in errors if each is not None and not isinstance(each, ClosedByPeer)), None)
        if error is None:
            return None if self._calls else self._closed_by_peer
        if isinstance(error, TransportError | ProtocolError):
            return error
        failed = TransportError(f"A call to {self._peer} failed: {error}")
        failed.__cause__ = error
        return failed

    def close(self) -> None:
        """Close the link: see `Link.close`. The payload of a call in flight stays unchanged until the call ends."""
        if self._closed:
            return
        self._closed = True
        self._call_client.close()
        if not self._calls:
            self._position.met()  # there is no call that the worker could yet answer
        self._calls.clear()
        self._let_go()

    def forget(self) -> None:
        """In a forked child: count as closed, and close nothing of the parent's."""
        super().forget()
        self._calls.clear()


def _error_of(call: Answers) -> BaseException | None:
    return CancelledError("it was cancelled") if call.cancelled() else call.exception()


def _drop_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of its causes: they hold the call, which holds the weights and the error."""
    errors = [] if error is None else [error]
    for each in errors:
        each.__traceback__ = None
        cause = each.__cause__ or each.__context__
        if cause is not None and cause not in errors:
            errors.append(cause)


class BlockingLink(CallLink):
    """A link whose calls block until they have ended: a sender's `send_async` refuses its worker."""
