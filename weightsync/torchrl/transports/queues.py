"""Links over two multiprocessing queues, one for each direction."""

from __future__ import annotations

import multiprocessing.queues
import queue
import threading
from collections import deque
from typing import Any, Final

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol import codec
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Message, Update
from weightsync.transports.base import Received, Waker
from weightsync.transports.buffers import Buffer
from weightsync.transports.pipe.mailbox import MAX_KEPT_NBYTES, MAX_UNCLAIMED, MAX_USER_MESSAGES
from weightsync.transports.process import forget_after_fork
from weightsync.transports.wakeup import WakeableLink

#: Messages of one model that are kept until its link reads them.
MAX_UNREAD: Final = 1024

AnyQueue = multiprocessing.queues.Queue


class QueueChannel:
    """The only reader and writer of a pair of queues in this process. Frames are bytes, sorted by model.

    Args:
        outbox: where frames are put. With None the sender cannot be reached.
        inbox: where frames are read. With None no answer can come.

    Raises ConfigurationError: one of them is not a ``multiprocessing.Queue``.
    """

    def __init__(self, outbox: Any, inbox: Any) -> None:
        for given in (outbox, inbox):
            if given is not None and not isinstance(given, AnyQueue):
                kind = type(given).__name__
                raise ConfigurationError(f"A queue is of type {kind}: give a multiprocessing.Queue. Nothing was sent.")
        self._outbox, self.inbox = outbox, inbox
        self._lock = threading.Lock()
        self._boxes: dict[str, deque[Received]] = {}
        #: For each model that exceeded the limit, the error to report after the kept messages.
        self._flooded: dict[str, ProtocolError] = {}
        #: Why nothing more is read.
        self._broken: TransportError | ProtocolError | None = None
        #: The wakers of links: one link may read messages of another.
        self._wakers: dict[str, Waker] = {}
        #: Objects that are not ours, kept in order.
        self.user_messages: deque[Any] = deque()

    def put(self, frame: bytes) -> None:
        """Queue a frame. Raises TransportError: the queue is full or closed; the frame will never arrive."""
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(frame)
        except (queue.Full, ValueError, OSError, AssertionError) as error:
            raise TransportError(f"The queue accepts nothing more: {error or 'it is full'}.") from error

    def unclaimed(self) -> tuple[str, ...]:
        """The models that have messages here."""
        self._read(None)
        with self._lock:
            return tuple(model_id for model_id, box in self._boxes.items() if box)

    def collect(self, model_id: str) -> list[Received]:
        """Take out what has arrived for a model.

        Raises:
            TransportError: the queue is closed, or too many objects arrived that are not ours.
            ProtocolError: a frame is malformed, or that model, or those without a link, exceeded their limit.
        """
        self._read(model_id)
        with self._lock:
            if model_id in self._wakers:
                self._wakers[model_id].clear()
            arrived = list(self._boxes.pop(model_id, ()))
            if not arrived and model_id in self._flooded:
                raise self._flooded[model_id]
            return arrived

    def enroll(self, model_id: str, waker: Waker) -> None:
        """Fire ``waker`` when a message of that model is read."""
        with self._lock:
            self._wakers[model_id] = waker
            if self._boxes.get(model_id):
                waker.fire()

    def leave(self, model_id: str, waker: Waker) -> None:
        """Stop firing the waker."""
        with self._lock:
            if self._wakers.get(model_id) is waker:
                del self._wakers[model_id]
                self._flooded.pop(model_id, None)

    def _read(self, reader: str | None) -> None:
        """Read from the queue, as long as there is room for what the reader takes out next."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            while self.inbox is not None and self._has_room(reader):
                try:
                    self._sort(self.inbox.get_nowait())
                except queue.Empty:
                    return
                except (ValueError, OSError, EOFError) as error:
                    raise TransportError(f"The queue is closed: {error}.") from error

    def _sort(self, item: Any) -> None:
        if not isinstance(item, bytes) or item[: len(codec.MAGIC)] != codec.MAGIC:
            self._keep_user_message(item)
            return
        head = codec.peek(item)
        message = codec.decode_with(head, item[: head.control_nbytes])
        if len(item) - head.control_nbytes != head.payload_nbytes:
            raise ProtocolError(f"A frame arrived without its {head.payload_nbytes} bytes.", unread=item[:64])
        self._keep(message.model_id, _with_payload(message, item, head))

    def _has_room(self, reader: str | None) -> bool:
        if reader is None:
            count, nbytes = self._unclaimed()
            return count < MAX_UNCLAIMED and nbytes < MAX_KEPT_NBYTES
        box = self._boxes.get(reader, deque())
        return len(box) < MAX_UNREAD and _nbytes(box) < MAX_KEPT_NBYTES

    def _unclaimed(self) -> tuple[int, int]:
        """How many messages are here for models without a link, and the bytes of their payloads."""
        boxes = [box for known, box in self._boxes.items() if known not in self._wakers]
        return sum(map(len, boxes)), sum(map(_nbytes, boxes))

    def _keep(self, model_id: str, received: Received) -> None:
        waker, box = self._wakers.get(model_id), self._boxes.get(model_id, deque())
        count, nbytes = self._unclaimed()
        if waker is None and (count >= MAX_UNCLAIMED or nbytes >= MAX_KEPT_NBYTES):
            self._broken = ProtocolError(
                f"{count} messages of {nbytes} bytes are kept for models without a link, and another arrived (for "
                f"{model_id!r}): initialise that model at this end, with the same model_id."
            )
            raise self._broken
        if len(box) >= MAX_UNREAD or _nbytes(box) >= MAX_KEPT_NBYTES:
            self._flooded[model_id] = ProtocolError(
                f"{len(box)} messages ({_nbytes(box)} bytes) for {model_id!r} are unread here, and another arrived: "
                "this link is closed. Read more often: by receive() in a worker, by poll() in the trainer."
            )
        if model_id not in self._flooded:
            self._boxes.setdefault(model_id, box).append(received)
        if waker is not None:
            waker.fire()

    def _keep_user_message(self, item: Any) -> None:
        if len(self.user_messages) >= MAX_USER_MESSAGES:
            self._broken = TransportError(
                f"{len(self.user_messages)} objects that are not weightsync messages arrived in this queue: "
                "use it for weightsync alone."
            )
            raise self._broken
        self.user_messages.append(item)

    def waitables(self) -> list[int]:
        """Readable when something is in the queue."""
        return [] if self.inbox is None else [self.inbox._reader.fileno()]

    def wants_write(self) -> None:
        """Nothing to write: the queue's own thread writes."""


def _with_payload(message: Message, item: bytes, head: codec.Head) -> Received:
    """A message with a writable copy of its payload."""
    if not head.payload_nbytes:
        return Received(message)
    try:
        return Received(message, memoryview(bytearray(memoryview(item)[head.control_nbytes :])))
    except MemoryError:
        return Received(message, untaken=f"No memory for a payload of {head.payload_nbytes} bytes.")


def _nbytes(box: deque[Received]) -> int:
    return sum(each.payload.nbytes for each in box if each.payload is not None)


class QueueLink(WakeableLink):
    """One model's link over a `QueueChannel`. See `weightsync.transports.base.Link` for its contract."""

    def __init__(self, channel: QueueChannel, model_id: str, peer: str) -> None:
        # Without a queue for answers none is awaited, as with transports that may lose answers.
        self.delivery = Delivery.ORDERED if channel.inbox is not None else Delivery.BEST_EFFORT
        super().__init__(peer)
        self._channel = channel
        self._model_id = model_id
        channel.enroll(model_id, self._waker)
        forget_after_fork(self)

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Put a message in the queue, with a copy of its payload: see `Link.send`."""
        self._require_open()
        frame = codec.encode(message)
        if isinstance(message, Update) and message.nbytes:
            if payload is None or payload.nbytes < message.nbytes:
                raise ConfigurationError(f"Version {message.version} was sent without its {message.nbytes} bytes.")
            frame = b"".join((frame, payload.view[: message.nbytes]))
        self._channel.put(frame)

    def receive(self) -> list[Received]:
        """The messages that have arrived: see `Link.receive`."""
        self._require_open()
        # Checked before reading, so that everything that the peer sent before its death is there.
        death = self._death()
        received = self._channel.collect(self._model_id)
        if death and not received:
            raise TransportError(f"{self._peer} has ended: {death}.")
        if death:
            self._waker.fire()  # earlier messages are delivered now, the end at the next call
        return received

    def waitables(self) -> list[int]:
        """Readable when something is in the queue, or the peer is dead: see `Link.waitables`."""
        return [] if self._closed else [*super().waitables(), *self._channel.waitables()]

    def close(self) -> None:
        """Close the link: see `Link.close`. The queues are the user's and stay open."""
        if not self._closed:
            self._closed = True
            self._channel.leave(self._model_id, self._waker)
            self._let_go()
