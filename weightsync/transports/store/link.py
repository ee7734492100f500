"""`StoreLink`: two ends that find each other in a store, and a connection of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final
from weakref import ref

from msgspec import structs

from weightsync.errors import ConfigurationError, TransportError
from weightsync.protocol import codec
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Bye, Message, Part, Refusal, Update
from weightsync.transports.base import CarriesDeltas, Gathering, Gathers, Received, Remarks, TakesParts
from weightsync.transports.buffers import Buffer
from weightsync.transports.process import forget_after_fork
from weightsync.transports.sealing import sent_digest, sent_part_digest
from weightsync.transports.store.fanout import Fanout
from weightsync.transports.store.link_threads import LinkThreads
from weightsync.transports.store.mailbox import QueuedMessage, Side
from weightsync.transports.store.seals import Guard
from weightsync.transports.store.store import StoreEndpoint
from weightsync.transports.wakeup import WakeableLink


class StoreLink(WakeableLink, Remarks, CarriesDeltas, TakesParts, Gathers):
    """A link over a store. See `weightsync.transports.base.Link` for its contract.

    Args:
        fanout: at the trainer's end, what all links of its sender share; None: each payload goes over its own link.

    Raises:
        ConfigurationError: the backend is not available here.
        TransportError: no descriptor or thread is left.
    """

    delivery = Delivery.ORDERED
    carries_deltas = True

    def __init__(
        self, endpoint: StoreEndpoint, name: str, side: Side, guard: Guard, *, fanout: Fanout | None = None
    ) -> None:
        super().__init__(side.peer)
        self._rank, self._hints = endpoint.rank, endpoint.hints
        self._side = side
        self._fanout = fanout
        #: The payload that was sent in parts last, and how many bytes of it.
        self._parts = _NONE_SENT
        #: Whether payloads go over the link's own connection: not in a group of two ranks, nor from worker to worker.
        self._carries_payloads = fanout is None and endpoint.backend == "gloo"
        #: Why the peer's handshake was refused; empty if it was not.
        self._refused = ""
        self._when_refused: Callable[[str], None] = _ignore_reason
        try:
            self._threads = LinkThreads(endpoint, name, side, guard, self._waker, fanout=fanout)
        except BaseException:
            self._waker.close()
            raise
        # A link that is dropped is closed by its threads: a finalizer may run anywhere, and must not take their locks.
        self._threads.owner = ref(self)
        forget_after_fork(self)

    def when_admitted(self, accept: Callable[[StoreLink], None], turn_away: Callable[[StoreLink], None]) -> None:
        """Call one of the two, from any thread, once it is known whether the peer is authentic."""
        self._threads.when_admitted(lambda: (accept if self._threads.admits else turn_away)(self))

    def when_refused(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the reason when this end closes the link because it has refused the handshake."""
        self._when_refused = callback

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, once the peer's end of a closed link has ended, or after a while."""
        self._threads.when_over(callback)

    @property
    def failure(self) -> str:
        """Why nothing more will arrive; empty: more may arrive."""
        return str(self._threads.failed or "")

    @property
    def remark(self) -> str:
        """Why the worker may never answer: see `Remarks`."""
        return self._threads.remark

    @property
    def gathering(self) -> Gathering | None:
        """The fan-out, at the trainer's end: see `Gathers`."""
        return self._fanout

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queue a message for the writing thread: see `Link.send`."""
        self._require_unfailed()
        if isinstance(message, Update):
            self._send_update(message, payload)
            return
        if isinstance(message, Refusal) and not message.version:
            self._refused = message.reason
        queued = QueuedMessage(codec.encode(message), None, self._hints.of(message, self._rank))
        if isinstance(message, Bye):
            queued = replace(queued, before=self._side.before_goodbye)
        self._threads.post(queued)

    def _send_update(self, update: Update, payload: Buffer | None) -> None:
        # The worker drops what has come in parts, unless this update names it.
        parts_sent, self._parts = self._parts, _NONE_SENT
        if update.nbytes and (payload is None or payload.nbytes < update.nbytes):
            raise ConfigurationError(f"Version {update.version} was sent without its {update.nbytes} bytes.")
        hint = self._hints.of(update, self._rank)
        if payload is None:
            self._threads.post(QueuedMessage(codec.encode(update), None, hint))
        elif payload.segment is not None and parts_sent == (payload.segment.next_seal, update.nbytes):
            named_update = structs.replace(update, payload_id=parts_sent[0])
            self._threads.post(QueuedMessage(codec.encode(named_update), None, hint, payload_id=parts_sent[0]))
        else:
            self._send_whole(update, payload, hint)

    def _send_whole(self, update: Update, payload: Buffer, hint: tuple[str, str] | None) -> None:
        frame, token = codec.encode(update), object()
        payload.pin(token)
        queued = QueuedMessage(
            *(frame, payload.view[: update.nbytes] if update.nbytes else None, hint),
            done=lambda: payload.unpin(token),
            digest=lambda: sent_digest(update, payload),
        )
        if self._threads.branch is None:
            self._threads.post(queued)
        else:
            self._threads.branch.send(update, payload, queued)

    def _require_unfailed(self) -> None:
        self._require_open()
        if self._threads.failed is not None:
            raise self._with_ending(TransportError(str(self._threads.failed))) from self._threads.failed

    def takes_parts(self, payload: Buffer, nbytes: int, hashed: bool) -> bool:  # noqa: ARG002 - they travel in any case
        """Whether payloads go over the link's own connection: see `TakesParts`.

        After parts that no update has named, the next payload goes whole: it waits its turn, and parts would not.
        """
        return self._carries_payloads and payload.segment is not None and self._parts == _NONE_SENT

    def send_part(self, part: Part, payload: Buffer) -> None:
        """Queue a range of a payload for the writing thread: see `TakesParts`."""
        self._require_unfailed()
        frame, view, token = codec.encode(part), payload.view[part.start : part.end], object()
        payload.pin(token)
        done, digest = partial(payload.unpin, token), partial(sent_part_digest, part, payload)
        self._threads.post(QueuedMessage(frame, view, done=done, digest=digest, payload_id=part.payload_id))
        payload_id, sent = self._parts
        self._parts = part.payload_id, part.end - part.start + (sent if part.payload_id == payload_id else 0)

    def flush(self) -> bool:
        """Whether the writing thread has written everything; if not, a waitable reports it later: see `Link.flush`."""
        self._require_open()
        return self._threads.flushed()

    def receive(self) -> list[Received]:
        """All whole messages that have arrived: see `Link.receive`."""
        self._require_open()
        self._waker.clear()
        death = self._death()
        if death:
            self._ending = death
            self._threads.end_reading(death)
            self._unwatch()
        arrived, failure = self._threads.collect()
        if failure is not None:
            if not arrived:
                raise self._with_ending(failure)
            # Earlier messages are delivered now and the error at the next call, so the wait before that must end.
            self._waker.fire()
        return arrived

    def close(self) -> None:
        """Close the link: see `Link.close`.

        Queued messages are still written, up to the first payload that the peer would have to receive from us.
        """
        if self._closed:
            return
        self._closed = True
        if self._refused:  # first: the peer's end may close as soon as this one does
            self._when_refused(self._refused)
        self._threads.close()
        self._let_go()

    def forget(self) -> None:
        """In a forked child: count as closed."""
        super().forget()
        self._threads.forget()


#: No payload, and no byte of it.
_NONE_SENT: Final = (b"", 0)


def _ignore_reason(_: str) -> None:
    return None
