"""The user's own messages on a connection that also carries ours."""

from __future__ import annotations

import select
from multiprocessing.reduction import ForkingPickler
from typing import Any

from weightsync.clock import Deadline
from weightsync.errors import ConfigurationError, TransportError
from weightsync.protocol.codec import MAGIC
from weightsync.transports.pipe.connection import Channel
from weightsync.transports.pipe.framing import PREAMBLE, OutgoingFrame, header_offset


class UserMessages:
    """The methods of `multiprocessing.connection.Connection`, for the frames that are not ours.

    The messages are delivered in order and unchanged. In a process where a connection carries a link, use this instead
    of the connection's own methods: two writers would break up each other's frames. Blocking calls block as those of
    a connection do, for as long as the user chooses.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether `recv` has something to return or raise within ``timeout`` seconds (None: no limit)."""
        deadline = Deadline(timeout)
        while not self._channel.has_user_message():
            if deadline.passed:
                return False
            self._wait_for_message(deadline.nap)
        return True

    def _wait_for_message(self, timeout: float | None) -> None:
        waker = self._channel.user_waker()
        fd = waker.enter()
        if fd is None:
            return
        try:
            if not self._channel.has_user_message():
                _poll([fd, *self._channel.waitables()], select.POLLIN, timeout)
        finally:
            waker.leave()
        waker.clear()

    def recv_bytes(self) -> bytes:
        """The user's next message, as bytes. Blocks until there is one.

        Raises EOFError: none is left, and the connection has ended.
        """
        return bytes(self._take_message())

    def recv(self) -> Any:
        """The user's next message, unpickled. Blocks until there is one.

        Raises EOFError: none is left, and the connection has ended.
        """
        return ForkingPickler.loads(self._take_message())

    def _take_message(self) -> bytearray:
        while True:
            self.poll(None)
            try:
                message = self._channel.take_user_message()
            except TransportError as error:
                raise EOFError(error.message) from error
            if message is not None:
                return message.data

    def send(self, obj: Any) -> None:
        """Pickle and send an object, between two of our frames. Blocks until it was written.

        Raises TransportError: the connection is dead or closed.
        """
        self._write_frame(memoryview(ForkingPickler.dumps(obj)))

    def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, between two of our frames. Blocks until they were written.

        Raises:
            ConfigurationError: they begin like our own frames.
            TransportError: the connection is dead or closed.
        """
        view = memoryview(data).cast("B")
        start = header_offset(view)
        if start is not None:
            begins = PREAMBLE if start else MAGIC
            raise ConfigurationError(f"Messages that begin with {begins!r} are weightsync's own. Nothing was sent.")
        self._write_frame(view)

    def _write_frame(self, data: memoryview) -> None:
        frame = OutgoingFrame(b"", data)
        self._channel.write("the peer", frame)
        while not frame.written:  # if it was dropped, as another thread has closed the link, `write` raises
            fd = self._channel.wants_write()
            if fd is not None:
                _poll([fd], select.POLLOUT, None)
            self._channel.write("the peer")


def _poll(descriptors: list[int], mask: int, timeout: float | None) -> None:
    poller = select.poll()
    for fd in descriptors:
        poller.register(fd, mask)
    poller.poll(None if timeout is None else timeout * 1000)
