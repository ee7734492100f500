"""Where workers on other hosts, or of other parents, connect their result channels.

Each life of such a worker is given an invitation: an address, and a token that is good for one connection. Where
trainer and workers share a key, the worker shows a MAC of the token under that key. A connection that shows anything
else is closed before anything more is read.
"""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import select
import socket
from dataclasses import dataclass
from typing import Final

from weightsync.clock import Deadline
from weightsync.errors import TransportError
from weightsync.group.channel import TrainerEnd
from weightsync.keys import SharedKey
from weightsync.transports.process import forget_after_fork

logger = logging.getLogger("weightsync")

_PURPOSE: Final = "weightsync group channel"
_TOKEN_NBYTES: Final = 32
#: Seconds that a connection has to show its token, and how many may be about to do so besides those of workers.
_PROOF_SECONDS: Final = 5.0
_MOST_STRANGERS: Final = 64
_BACKLOG: Final = 1024
#: Seconds in which a worker must have reached the trainer.
_DIAL_SECONDS: Final = 30.0
#: A peer whose host is gone is noticed after about a minute: seconds idle, between probes, and the number of these.
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 4))


@dataclass(frozen=True)
class Invitation:
    """How a worker connects its channel to the trainer, once."""

    host: str
    port: int
    token: bytes
    #: Shared with the trainer; without one the token is shown as it is.
    key: SharedKey | None = None

    @property
    def proof(self) -> bytes:
        """What the worker shows."""
        return self.token if self.key is None else self.key.derived(_PURPOSE, self.token)

    def connect(self) -> socket.socket:
        """Connect.

        Raises:
            TransportError: the trainer cannot be reached.
        """
        try:
            sock = socket.create_connection((self.host, self.port), _DIAL_SECONDS)
            _set_up(sock)
            sock.sendall(self.proof)
        except OSError as error:
            raise TransportError(
                f"The trainer of this worker group cannot be reached at {self.host}:{self.port} ({error}): it has "
                "closed the group, or that address is not routed from this host."
            ) from error
        return sock


class _Unidentified:
    """A connection that has not shown a token yet."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.shown = bytearray()
        self.deadline = Deadline(_PROOF_SECONDS)

    def listen(self) -> bool:
        """Read the bytes of its token. Returns whether nothing more is read: it is whole, too late, or at its end."""
        try:
            data = self.sock.recv(_TOKEN_NBYTES - len(self.shown))
        except BlockingIOError:
            return self.deadline.passed
        except OSError:
            data = b""
        self.shown += data
        return not data or len(self.shown) == _TOKEN_NBYTES


class ChannelListener:
    """Listens at an address of this host. No call blocks.

    Args:
        host: the address.
        key: shared with the workers.

    Raises:
        TransportError: it is not an address of this host, or no descriptor is left.
    """

    def __init__(self, host: str, key: SharedKey | None = None) -> None:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise TransportError(f"Workers cannot connect to {host}: {error.strerror or error}.") from error
        self._listener.setblocking(False)
        self._host, self._key = host, key
        self._warned = self._warned_of_shortage = False
        self._poll = select.epoll()
        # Its edges: a connection that cannot be accepted is not reported again and again.
        self._poll.register(self._listener, select.EPOLLIN | select.EPOLLET)
        self._strangers: list[_Unidentified] = []
        self._expected: dict[bytes, TrainerEnd] = {}
        forget_after_fork(self)

    def expect(self) -> tuple[Invitation, TrainerEnd]:
        """Expect a worker. Returns the invitation to pass to it, and the trainer's end for its connection."""
        invitation = Invitation(
            self._host, self._listener.getsockname()[1], secrets.token_bytes(_TOKEN_NBYTES), self._key
        )
        end = self._expected[invitation.proof] = TrainerEnd(None, self)
        return invitation, end

    def fileno(self) -> int:
        """Readable when a connection waits to be accepted, or a token has arrived."""
        return self._poll.fileno()

    def admit(self) -> None:
        """Give each connection that has shown a token to the end that expects it; send the others away."""
        if self._poll.closed:
            return
        try:
            while True:
                self._add_stranger(self._listener.accept()[0])
        except BlockingIOError:
            pass
        except OSError as error:  # it waits for the next call
            self._poll.poll(0)
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._warned_of_shortage:
                self._warned_of_shortage = True
                logger.warning(
                    "a worker that connects to its worker group at %s has to wait, because this process has no file "
                    "descriptor left (%s): raise its limit (`ulimit -n`). This is logged once per group.",
                    *(self._host, error.strerror),
                )
        for stranger in tuple(self._strangers):
            if stranger.listen():
                self._remove_stranger(stranger)
                self._attach_or_close(stranger)

    def _add_stranger(self, sock: socket.socket) -> None:
        if len(self._strangers) >= len(self._expected) + _MOST_STRANGERS:
            oldest = self._strangers[0]
            self._remove_stranger(oldest)
            oldest.sock.close()
        self._poll.register(sock, select.EPOLLIN)
        self._strangers.append(_Unidentified(sock))

    def _remove_stranger(self, stranger: _Unidentified) -> None:
        self._strangers.remove(stranger)
        self._poll.unregister(stranger.sock)

    def _attach_or_close(self, stranger: _Unidentified) -> None:
        self._expected = {proof: end for proof, end in self._expected.items() if not end.ended}
        for proof in self._expected:
            if hmac.compare_digest(proof, stranger.shown):
                _set_up(stranger.sock)
                self._expected.pop(proof).attach(stranger.sock)
                return
        stranger.sock.close()
        if not self._warned:
            self._warned = True
            logger.warning(
                "a connection to the worker group at %s was closed, because it showed no valid token: it is not from a "
                "worker of this group, or its worker has another key or was given up. This is logged once per group.",
                self._host,
            )

    def close(self) -> None:
        """Stop listening, and close connections that have shown no token."""
        self.forget()

    def forget(self) -> None:
        """In a forked child: close our copies of the descriptors."""
        self._poll.close()
        self._listener.close()
        for stranger in self._strangers:
            stranger.sock.close()
        self._strangers.clear()
        self._expected.clear()


def _set_up(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
