"""One connection, shared by the links of several models and by the user's own messages."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import struct
import termios
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final
from weakref import WeakValueDictionary

from weightsync.errors import ConfigurationError, ProtocolError, TransportError, WeightSyncError
from weightsync.protocol.messages import Bye, Refusal
from weightsync.transports.base import Waker
from weightsync.transports.exposure import AUTHKEY, leaves_host, warn_exposed
from weightsync.transports.pipe.framing import Frame, Inflow, Outflow, OutgoingFrame, UserMessage, framed
from weightsync.transports.pipe.mailbox import Mailbox, Sorter
from weightsync.transports.process import PerProcess, ProcessWatch, forget_after_fork, watching

PLEASE: Final = "give one end of multiprocessing.Pipe(duplex=True)"

_COUNT: Final = struct.Struct("i")

#: Makes the error, given the peer's name: one instance raised twice would mix tracebacks.
Failure = Callable[[str], WeightSyncError]


class _Socket(socket.socket):
    """Closes without a warning when it is dropped: the channel of a link that was never closed closes it."""

    def __del__(self) -> None:
        self.close()


def socket_of(connection: Connection[Any, Any]) -> socket.socket:
    """A socket on our own copy of the descriptor: closing it leaves the user's open, and the reverse.

    Raises:
        ConfigurationError: the connection is closed, one-way or not a socket.
        TransportError: no file descriptor is left.
    """
    if not isinstance(connection, Connection):
        raise ConfigurationError(f"An object of type {type(connection).__name__} is not a connection: {PLEASE}.")
    if connection.closed:
        raise ConfigurationError("The connection is closed.")
    two_way = connection.readable and connection.writable
    if not (two_way and stat.S_ISSOCK(os.fstat(connection.fileno()).st_mode)):
        raise ConfigurationError(f"The connection is one-way: {PLEASE}.")
    try:
        sock = _Socket(fileno=os.dup(connection.fileno()))
    except OSError as error:
        raise TransportError(f"The connection cannot be used: {error.strerror}.") from error
    if socket.getdefaulttimeout() is not None:
        # Python has just made the shared descriptor non-blocking, and the user shares it.
        sock.settimeout(None)
    return sock


def unread_nbytes(sock: socket.socket) -> int:
    """How many bytes of kernel memory hold data that was written to a local socket and not read at its other end."""
    counted = bytearray(_COUNT.size)
    fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, counted)
    (nbytes,) = _COUNT.unpack(counted)
    return int(nbytes)


def lost(what: str, cause: Exception | None = None) -> Failure:
    """Makes the error for a lost connection."""

    def error(peer: str) -> WeightSyncError:
        gone = TransportError(f"The connection to {peer} {what}.")
        gone.__cause__ = cause
        return gone

    return error


def broken(cause: ProtocolError) -> Failure:
    """Makes the error for a peer that broke the protocol."""
    return lambda peer: ProtocolError(f"From {peer}: {cause.message}", unread=cause.unread)


logger = logging.getLogger("weightsync")

#: Reads in one call. The rest is left for the next, so that no call takes long.
_ROUNDS: Final = 256

#: The attribute under which a closed connection keeps its channel.
_CHANNEL: Final = "_weightsync_channel"


class _Unfinished:
    """What a channel has read and not passed on, or not written yet. Dropped with the channel.

    Not by a finalizer of the channel itself: while that runs, a weak reference still leads to the channel, and another
    thread could make a link over it.
    """

    def __init__(self, inflow: Inflow, outlet: Outflow, sorter: Sorter) -> None:
        self._inflow, self._outlet, self._sorter = inflow, outlet, sorter

    def drop(self) -> None:
        self._outlet.clear()
        self._inflow.close()
        self._sorter.clear()

    def __del__(self) -> None:
        self.drop()


class Channel:
    """The one reader and writer of a connection in this process.

    It holds its lock for one non-blocking step at a time. In a forked child it is dead, and closing it there closes
    nothing of the parent's.
    """

    def __init__(self, connection: Connection[Any, Any], sock: socket.socket) -> None:
        self.connection = connection
        # Re-entrant: a signal handler may close a link while its own thread reads or writes the user's messages.
        self._lock = threading.RLock()
        self._socket: socket.socket | None = sock
        #: Whether shared memory can be passed over this connection.
        self.passes_descriptors = sock.family == socket.AF_UNIX
        self._inflow = Inflow(sock)
        self.outlet = Outflow(sock)
        self._sorter = Sorter()
        self._unfinished = _Unfinished(self._inflow, self.outlet, self._sorter)
        self._watch: ProcessWatch | None = None
        #: Makes the error of each further read, given the peer's name; None: the connection can be read.
        self._read_failure: Failure | None = None
        self._reading = False
        forget_after_fork(self)

    @classmethod
    def of(cls, connection: Connection[Any, Any]) -> Channel:
        """The channel of that connection object in this process.

        Raises ConfigurationError: the connection is closed, one-way or not a socket.
        """
        return _channels.of(connection)

    @property
    def peer_is_dead(self) -> bool:
        """Whether the peer's process is known dead."""
        with self._lock:
            return self._watch is not None and self._watch.dead

    def register(self, model_id: str, peer: str) -> Mailbox:
        """A mailbox for a model, with the messages that have already arrived for it.

        Raises ConfigurationError: the model has a mailbox, or the connection is closed.
        """
        with self._lock:
            if self._socket is None or self.connection.closed:
                raise ConfigurationError(f"The connection to {peer} is closed.")
            return self._sorter.register(model_id, peer)

    def leave(self, box: Mailbox) -> None:
        """Close a mailbox. The last one closes the connection."""
        with self._lock:
            if self._sorter.leave(box) and not self._sorter:
                self._close()

    def withdraw(self, box: Mailbox) -> None:
        """Drop a mailbox, and leave the connection open."""
        with self._lock:
            self._sorter.leave(box)

    def write(self, peer: str, frame: OutgoingFrame | None = None) -> bool:
        """Queue a frame, if one is given, and write what fits; True once nothing is left.

        Raises TransportError: the connection is dead or closed; the frame will never arrive.
        """
        with self._lock:
            if frame is None and self.outlet.idle and self._socket is not None:
                return True
            if self._socket is None or self.connection.closed:
                self.outlet.clear()
                if frame is not None:
                    frame.end()
                raise (self._read_failure or lost("is closed"))(peer)
            try:
                return self.outlet.write(frame)
            except OSError as error:
                raise TransportError(f"Cannot write to {peer}: {error.strerror}.") from error

    def wants_write(self) -> int | None:
        """The socket's descriptor while something is queued."""
        with self._lock:
            return self._socket.fileno() if self.outlet.queue and self._socket else None

    def all_read(self) -> bool | None:
        """Whether the other end has read everything; None: unknown. Only sockets within this host show it."""
        with self._lock:
            if self._socket is None or not self.passes_descriptors:
                return None
            return not self.outlet.queue and not unread_nbytes(self._socket)

    def waitables(self) -> list[int]:
        """Descriptors that are readable when there is something to read, or the peer is dead."""
        with self._lock:
            found = [self._socket.fileno()] if self._socket is not None else []
            if self._watch is not None and self._watch.fd >= 0:
                found.append(self._watch.fd)
            return found

    def watch(self, pid: int, started: int, box: Mailbox) -> None:
        """Count the connection as ended once that process is dead. The links of other mailboxes than ``box`` wake.

        Raises TransportError: the process cannot be watched.
        """
        with self._lock:
            if self._socket is None or (self._watch is not None and self._watch.names(pid, started)):
                return
            watch = watching(pid, started)
            if self._watch is not None:
                self._watch.close()
            self._watch = watch
            self._sorter.signal_all(None if watch.dead else box)

    def collect(self, box: Mailbox) -> list[Frame]:
        """Read what is there, and take out the frames for ``box``, up to a goodbye.

        Raises:
            TransportError: no frame is left for it, and the connection is dead or closed.
            ProtocolError: no frame is left for it, and what follows is malformed.
        """
        unmet: list[Refusal] = []
        with self._lock:
            self._read(box)
            if box.signalled:
                box.unsignal()
            frames = list(box.frames)
            box.frames.clear()
            box.said_goodbye = False
            for frame in frames:
                if type(frame.message) is Bye:
                    frames = box.put_back_behind_goodbye(frames)
                    break
            if self._read_failure is None:
                if self._sorter.unmet:
                    unmet = self._answer_unmet()
            elif not frames:
                raise self._read_failure(box.peer)
            else:
                box.signal()
        for refusal in unmet:  # without the lock: a log handler may write to this very connection
            words = "model %r: a sender's handshake arrived and was not accepted: %s"
            logger.warning(words, refusal.model_id, refusal.reason)
        return frames

    def _answer_unmet(self) -> list[Refusal]:
        """Answer senders of models that are not registered here, once each. Returns the answers."""
        answers = self._sorter.answers_to_unmet()
        for refusal in answers:
            with contextlib.suppress(OSError):  # the next write reports it
                self.outlet.write(OutgoingFrame(framed(refusal)))
        return answers

    def user_waker(self) -> Waker:
        """Fired when another reader of the connection has read one of the user's messages."""
        with self._lock:
            return self._sorter.user_waker()

    def has_user_message(self) -> bool:
        """Read what is there. Returns whether a user message is available, or none can come any more."""
        with self._lock:
            if not self._sorter.user_messages:
                self._read(None)
            return bool(self._sorter.user_messages) or self._read_failure is not None

    def has_ended(self) -> bool:
        """Read what is there. Returns whether nothing more can come."""
        with self._lock:
            self._read(None)
            return self._read_failure is not None

    def take_user_message(self) -> UserMessage | None:
        """The next user message; None if another thread has just taken it.

        Raises:
            TransportError: none is left, and the connection is dead or closed.
            ProtocolError: none is left, and what follows is malformed.
        """
        with self._lock:
            if not self._sorter.user_messages and self._read_failure is not None:
                raise self._read_failure("the peer")
            return self._sorter.take_user_message()

    def unclaimed(self) -> tuple[str, ...]:
        """The models for which frames have arrived that have no link here."""
        with self._lock:
            return self._sorter.unclaimed()

    def user_message_is_first(self, model_id: str) -> bool:
        """Whether the user's next message arrived before the model's newest update."""
        with self._lock:
            return self._sorter.user_message_is_first(model_id)

    def _read(self, reader: Mailbox | None) -> None:
        if self._read_failure is None and (self._socket is None or self.connection.closed):
            self._fail(lost("is closed"))
        if self._read_failure is None and self._reading:
            # An exception from outside, such as KeyboardInterrupt, came between reading and counting the bytes.
            self._fail(lost("was interrupted in the middle of a frame"))
        if self._read_failure is not None:
            return
        self._reading = True
        try:
            self._drain(reader)
        except EOFError as error:
            self._fail(lost(self._describe_end("was closed by the other end"), error))
        except ProtocolError as error:
            self._fail(broken(error))
        except OSError as error:
            if self._socket is not None:  # a signal handler may have closed it
                self._fail(lost(self._describe_end(f"broke ({error})"), error))
        self._reading = False

    def _describe_end(self, reason: str) -> str:
        """How the connection ended: with the peer's process, or as the socket says."""
        watch = self._watch
        if watch is None:
            return reason
        return f"has ended: {watch.ending}" if watch.dies() else f"{reason}, process {watch.pid}"

    def _drain(self, reader: Mailbox | None) -> None:
        """Read for a bounded time. A peer is found dead once nothing is left to read, not before."""
        inflow, found_dead = self._inflow, self._watch is not None and self._watch.found_dead
        for _ in range(_ROUNDS):
            try:
                may_have_more = inflow.read()
            except BlockingIOError:
                if self._watch is None or not self._watch.dead:
                    return
                if found_dead:
                    self._fail(lost(f"has ended: {self._watch.ending}"))
                    return
                found_dead = True  # read once more: what it wrote just before its death may have come since
                continue
            while (inflow.end or inflow.filling) and (frame := inflow.next()) is not None:
                self._sorter.sort(frame, reader)
            if not (may_have_more or found_dead):
                return

    def _fail(self, why: Failure) -> None:
        self._read_failure = why
        self._inflow.close()
        self._sorter.signal_all()

    def _close(self) -> None:
        if not self.connection.closed:
            with contextlib.suppress(OSError):
                self.outlet.write()
        if self._socket is not None and not self.outlet.idle:
            # A frame, and the goodbye behind it, will never be whole. Another process, such as a forked worker, may
            # have a copy of this end, so that closing ours would not end the stream.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        self._release()
        self._fail(lost("is closed"))
        # The user can read the rest of its messages as long as the connection object exists.
        vars(self.connection)[_CHANNEL] = self
        with contextlib.suppress(OSError):
            self.connection.close()

    def _release(self) -> None:
        self._unfinished.drop()
        self.passes_descriptors = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def forget(self) -> None:
        """In a forked child: count as dead, and leave the connection to its users here."""
        self._lock = threading.RLock()
        self._release()
        self._read_failure = lost("was inherited over a fork: it is the parent's")


class _Channels(PerProcess):
    """The channels of this process, by the id of their connection."""

    def _begin(self) -> None:
        self._found: WeakValueDictionary[int, Channel] = WeakValueDictionary()

    def of(self, connection: Connection[Any, Any]) -> Channel:
        """See `Channel.of`."""
        with self._lock:
            channel = self._found.get(id(connection))
            if channel is None or channel.connection is not connection:
                sock = socket_of(connection)
                if leaves_host(sock):
                    warn_exposed("A connection given as a pipe goes to another host", AUTHKEY)
                channel = self._found[id(connection)] = Channel(connection, sock)
            return channel


_channels: Final = _Channels()
