"""A worker passes payloads on to its children in a fan-out, while they arrive.

It listens for the children. One presents the token of a payload, which the trainer has told both, and gets its bytes as
they arrive, in pieces: the length in four bytes, then the bytes. A length of 0 says that there are no more yet.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Final

from weightsync.errors import TransportError
from weightsync.transports.process import forget_after_fork
from weightsync.transports.store.blocking_threads import start_threads
from weightsync.transports.store.routes import TOKEN_NBYTES
from weightsync.transports.store.stream import send_at_once

LENGTH: Final = struct.Struct("!I")
PIECE_NBYTES: Final = 2**20
#: Seconds for a new connection to present its token, and for the payload of that token to begin.
PATIENCE: Final = 1.0
#: Seconds between two signs of life while no bytes arrive.
_PULSE: Final = 0.25
#: How often in a row a child may take nothing for that long.
_BLOCKED: Final = 20
#: Connections at once, besides those of children: strangers may connect as well.
_MOST: Final = 64
#: Payloads that are kept for children which have not connected yet: a link carries two unanswered versions.
_MAX_FEEDS: Final = 2
_WAITING: Final = LENGTH.pack(0)
_FLAGS: Final = int(socket.MSG_NOSIGNAL)


class Feed:
    """A payload that is arriving, for the threads that pass it on."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self._condition = threading.Condition()
        self._reached = 0
        self._ended = False

    def reach(self, nbytes: int) -> None:
        """Note how many bytes of it have arrived."""
        with self._condition:
            self._reached = max(self._reached, nbytes)
            self._condition.notify_all()

    def end(self) -> None:
        """Note that no more of it can be passed on."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def beyond(self, start: int, timeout: float) -> memoryview | None:
        """The next piece behind ``start`` bytes, empty if there is none in time; None: there will be none."""
        with self._condition:
            self._condition.wait_for(lambda: self._ended or self._reached > start, timeout)
            if self._ended:
                return None
            return self.buffer[start : min(self._reached, start + PIECE_NBYTES)]


class Forwarder:
    """Where a worker awaits its children. Its threads end soon after `close`.

    Args:
        host: the address to listen at.

    Raises TransportError: no descriptor or thread is left.
    """

    def __init__(self, host: str) -> None:
        self._lock = threading.Condition()
        self._over = threading.Event()
        #: Payloads by their tokens, oldest first, each with the number of children that have not got it yet.
        self._feeds: dict[bytes, tuple[Feed, int]] = {}
        self._children: set[_Child] = set()
        self._most = _MOST
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise TransportError(f"No connection can be accepted at {host}: {error.strerror or error}.") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        forget_after_fork(self)
        try:
            start_threads(self, {"weightsync-forwarder": self._accept})
        except TransportError:
            self._listener.close()
            raise

    def offer(self, token: bytes, children: int, buffer: memoryview) -> Feed:
        """Pass a payload on to up to ``children`` connections that present ``token``, or until it is too old."""
        feed = Feed(buffer)
        with self._lock:
            if self._over.is_set():
                feed.end()
            elif children:
                self._feeds[token] = feed, children
                self._most = max(self._most, _MOST + _MAX_FEEDS * children)
            for old in list(self._feeds)[:-_MAX_FEEDS]:
                del self._feeds[old]
            self._lock.notify_all()
        return feed

    def decline(self, token: bytes, children: int) -> None:
        """Tell connections that present ``token`` that this worker does not have the payload."""
        self.offer(token, children, memoryview(b"")).end()

    def feed(self, token: bytes) -> Feed | None:
        """The payload of a token, which may come a little later; None: there is none."""
        with self._lock:
            self._lock.wait_for(lambda: token in self._feeds or self._over.is_set(), PATIENCE)
            if token not in self._feeds or self._over.is_set():
                return None
            feed, children = self._feeds[token]
            if children > 1:
                self._feeds[token] = feed, children - 1
            else:
                del self._feeds[token]
            return feed

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is left
                self._over.wait(_PULSE)
                continue
            child = _Child(self, sock)
            with self._lock:
                welcome = len(self._children) < self._most and not self._over.is_set()
                if welcome:
                    self._children.add(child)
            try:
                if not welcome:
                    raise TransportError("There are too many connections.")
                start_threads(child, {"weightsync-forwarder-child": child.serve})
            except TransportError:
                child.end()
        self._listener.close()

    def gone(self, child: _Child) -> None:
        """A connection is closed."""
        with self._lock:
            self._children.discard(child)

    def close(self) -> None:
        """Pass nothing on any more."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            feeds, self._feeds = self._feeds, {}
            children = tuple(self._children)
            self._lock.notify_all()
        for feed, _ in feeds.values():
            feed.end()
        for child in children:
            child.close()

    cut = close

    def forget(self) -> None:
        """In a forked child: close our copies of the descriptors. The threads are the parent's."""
        self._over.set()
        self._lock = threading.Condition()
        self._listener.close()
        self._feeds = {}
        while self._children:
            self._children.pop().forget()


class _Child:
    """The connection of a child, or of a stranger."""

    def __init__(self, forwarder: Forwarder, sock: socket.socket) -> None:
        self._forwarder, self._socket = forwarder, sock
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Send the payload whose token arrives."""
        try:
            with contextlib.suppress(OSError):
                self._socket.settimeout(PATIENCE)
                feed = self._forwarder.feed(self._read_token())
                if feed is not None:
                    self._socket.settimeout(_PULSE)
                    send_at_once(self._socket)
                    self._send_feed(feed)
        finally:
            self.end()

    def _read_token(self) -> bytes:
        token = b""
        while len(token) < TOKEN_NBYTES:
            more = self._socket.recv(TOKEN_NBYTES - len(token))
            if not more:
                raise ConnectionAbortedError
            token += more
        return token

    def _send_feed(self, feed: Feed) -> None:
        start = 0
        while start < len(feed.buffer):
            piece = feed.beyond(start, _PULSE)
            if piece is None:
                return
            self._send(memoryview(LENGTH.pack(len(piece)) if piece else _WAITING))
            self._send(piece)
            start += len(piece)

    def _send(self, data: memoryview) -> None:
        times_blocked = 0
        while data:
            try:
                data, times_blocked = data[self._socket.send(data, _FLAGS) :], 0
            except TimeoutError:
                times_blocked += 1
                if times_blocked == _BLOCKED:
                    raise

    def close(self) -> None:
        """End the connection now; its thread closes the descriptor."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    cut = close

    def end(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._socket.close()
        self._forwarder.gone(self)

    def forget(self) -> None:
        """In a forked child: close our copy of the descriptor."""
        self._socket.close()
