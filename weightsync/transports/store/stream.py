"""The connection of a link: it carries messages and payloads, in each direction from one thread to one thread.

A message is its length in four bytes, then its text; a payload follows the message that announces it. The worker
listens, at an address that it announces in the store, until the sender has connected.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeGuard

from weightsync.clock import Deadline
from weightsync.errors import TransportError
from weightsync.protocol import codec
from weightsync.protocol.messages import Message
from weightsync.transports.exposure import is_loopback
from weightsync.transports.store.mailbox import INLINE_NBYTES

_LENGTH: Final = struct.Struct("!I")
_CHUNK_NBYTES: Final = 2**20
#: Payloads are written and read in pieces of this size.
PIECE_NBYTES: Final = 64 * 2**20
#: Seconds for connecting, and for an accepted connection to name its link.
_DIAL_SECONDS: Final = 5.0
_PROOF_SECONDS: Final = 1.0
#: Milliseconds between two checks whether to keep waiting.
_LOOK_MS: Final = 50
_SEND_TIMEOUT: Final = struct.pack("@ll", 0, _LOOK_MS * 1000)
_SEND_FLAGS: Final = int(socket.MSG_NOSIGNAL)
_AT_ONCE: Final = _SEND_FLAGS | socket.MSG_DONTWAIT
_WHOLE: Final = int(socket.MSG_WAITALL)
_SIOCGIFADDR: Final = 0x8915
#: Names the interface to use, for gloo and for us.
_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_LOOPBACK: Final = "127.0.0.1"
#: The IPv6 addresses of this network namespace, and the scope there of those that are valid on one link only.
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")
_LINK_LOCAL: Final = "20"
#: What the resolver says of a name that has no IPv4 address, but may have one of IPv6.
_NO_IPV4: Final = frozenset({socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY})
#: On another host, if there are any: an address for documentation.
_ELSEWHERE: Final = ("203.0.113.1", 9)
#: A congestion control that neither paces nor measures delays. Every Linux has it, and every process may choose it.
_CONGESTION_CONTROL: Final = b"reno"


class EndOfStream(Exception):
    """The other end has closed the connection, between two messages."""


class Stream:
    """A connection. One thread at a time writes, one thread reads; any thread may end it.

    Args:
        sock: connected; it belongs to the stream.

    Raises (all methods that read or write):
        TransportError: the connection has broken, or was cut.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        # A blocking call writes a whole piece at once, and returns in time if the other end reads nothing.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        send_at_once(sock)
        self._socket = sock
        self._lock = threading.Lock()

    def write(self, text: bytes, payload: memoryview | None, go_on: Callable[[], None]) -> None:
        """Write a message, and the payload behind it.

        Args:
            go_on: called while there is no room in the connection; raises TransportError to give up.
        """
        with _as_transport_errors():
            self._send(memoryview(_LENGTH.pack(len(text)) + text), go_on)
            for piece in _pieces(payload):
                self._write_piece(piece, go_on)

    def begin(self, text: bytes) -> bytes:
        """Write what there is room for of a message, and never wait; returns what is left for `finish`."""
        left = _LENGTH.pack(len(text)) + text
        with contextlib.suppress(OSError):  # no room, or the connection has broken: `finish` meets that again
            left = left[self._socket.send(left, _AT_ONCE) :]
        return left

    def finish(self, rest: bytes, go_on: Callable[[], None]) -> None:
        """Write the rest of a message: see `begin` and `write`."""
        with _as_transport_errors():
            self._send(memoryview(rest), go_on)

    def _write_piece(self, piece: memoryview, go_on: Callable[[], None]) -> None:
        self._send(piece, go_on)

    def _send(self, data: memoryview, go_on: Callable[[], None]) -> None:
        while data:
            with contextlib.suppress(BlockingIOError):
                data = data[self._socket.send(data, _SEND_FLAGS) :]
            if data:
                go_on()

    def read(self) -> bytearray:
        """The next message. Its memory grows with what has arrived: a false length costs nothing.

        Raises EndOfStream: there is none.
        """
        head = bytearray(_LENGTH.size)
        if not self._fill(memoryview(head)):
            raise EndOfStream
        (nbytes,) = _LENGTH.unpack(head)
        text = bytearray()
        while len(text) < nbytes:
            more = bytearray(min(nbytes - len(text), _CHUNK_NBYTES))
            if not self._fill(memoryview(more)):
                raise _truncated_error()
            text = text + more if text else more
        return text

    def read_into(self, buffer: memoryview) -> None:
        """Fill ``buffer``. After an error its contents are undefined."""
        for piece in _pieces(buffer):
            self._read_piece(piece)

    def _read_piece(self, piece: memoryview) -> None:
        if not self._fill(piece):
            raise _truncated_error()

    def skip(self, nbytes: int) -> None:
        """Read a payload for which there is no memory, and drop it."""
        scratch = memoryview(bytearray(min(nbytes, _CHUNK_NBYTES)))
        while nbytes:
            self.read_into(scratch[:nbytes])
            nbytes -= min(nbytes, len(scratch))

    def _fill(self, buffer: memoryview) -> bool:
        """Fill ``buffer``; False: the stream has ended before its first byte."""
        filled = 0
        with _as_transport_errors():
            while filled < len(buffer):
                nbytes = self._socket.recv_into(buffer[filled:], 0, _WHOLE)
                if not nbytes and filled:
                    raise _truncated_error()
                if not nbytes:
                    return False
                filled += nbytes
        return True

    def drain(self) -> None:
        """Read and drop everything until the other end closes. If we closed first, our own bytes could be dropped."""
        scratch = bytearray(_CHUNK_NBYTES)
        with contextlib.suppress(OSError):
            while self._socket.recv_into(scratch):
                continue

    def end_writing(self) -> None:
        """Tell the other end, after everything that was written, that nothing more will be."""
        self._shut(socket.SHUT_WR)

    def end_reading(self) -> None:
        """Nothing more will arrive: reading ends after what is there."""
        self._shut(socket.SHUT_RD)

    def cut(self) -> None:
        """Make reading and writing fail, here and at the other end."""
        self._shut(socket.SHUT_RDWR)

    def _shut(self, direction: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(direction)

    def close(self) -> None:
        """Close the descriptor, once no thread reads or writes any more."""
        with self._lock:
            self._socket.close()

    def forget(self) -> None:
        """In a forked child: close our copy of the descriptor, which leaves the parent's connection as it is."""
        self._socket.close()


class Acceptor:
    """Where a worker awaits the connection of one sender.

    Raises TransportError: no descriptor is left, or it is not an address that `own_address` made.
    """

    def __init__(self, host: str) -> None:
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise TransportError(f"No connection can be accepted at {host}: {error.strerror or error}.") from error
        self._listener.setblocking(False)
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def accept(self, name: str, go_on: Callable[[], None]) -> Stream:
        """The connection that names the link. All others are closed.

        Args:
            go_on: called from time to time; raises to end the wait.

        Raises TransportError: no descriptor is left.
        """
        with _as_transport_errors():
            while True:
                go_on()
                if not _is_ready(self._listener, select.POLLIN):
                    continue
                with contextlib.suppress(BlockingIOError):
                    sock, _ = self._listener.accept()
                    if _proves_name(sock, name):
                        return Stream(sock)
                    sock.close()

    def close(self) -> None:
        """Stop listening. In a forked child: close our copy of the descriptor."""
        self._listener.close()


def send_at_once(sock: socket.socket) -> None:
    """Have a connection send at once, and as fast as the other end reads if that is on this host: nothing is congested.

    BBR carried half as much there. So did CUBIC, tried where BBR is the default: see docs/design/distributed.md.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # it has ended, or this kernel does not allow it: it is slower then
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_CONTROL)


def dial(address: str, name: str) -> Stream:
    """The connection to a worker that listens. Raises TransportError: it is out of reach, or no descriptor is left."""
    try:
        sock = connection_to(address, _DIAL_SECONDS)
    except OSError as error:
        raise TransportError(f"The connection to {address} could not be made: {error}.") from error
    stream = Stream(sock)
    with _as_transport_errors():
        sock.sendall(name.encode(), _SEND_FLAGS)
    return stream


def connection_to(address: str, timeout: float) -> socket.socket:
    """A new connection to ``host:port``, as a peer has announced it.

    Raises OSError: it is out of reach, or this is not an address. The resolver would take a port modulo 65536.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise OSError(f"{address!r} has no port from 1 to 65535")
    try:
        return socket.create_connection((host, int(port)), timeout)
    except UnicodeError as error:
        raise OSError(f"{address!r} has no valid host name: {error}") from error


def _pieces(payload: memoryview | None) -> Iterator[memoryview]:
    nbytes = 0 if payload is None else len(payload)
    return (payload[start : start + PIECE_NBYTES] for start in range(0, nbytes, PIECE_NBYTES) if payload is not None)


def _proves_name(sock: socket.socket, name: str) -> bool:
    """Whether an accepted connection names the link in time, in however many segments."""
    expected, shown, deadline = name.encode(), b"", Deadline(_PROOF_SECONDS)
    with contextlib.suppress(OSError):
        while len(shown) < len(expected):
            sock.settimeout(deadline.remaining)
            more = sock.recv(len(expected) - len(shown))
            if not more:
                return False
            shown += more
    return hmac.compare_digest(shown, expected)


def _is_ready(sock: socket.socket, event: int) -> bool:
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(_LOOK_MS))


@contextlib.contextmanager
def _as_transport_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, TransportError):
            raise
        raise TransportError(f"The connection has ended: {error.strerror or error}.") from error


def _truncated_error() -> TransportError:
    return TransportError("The connection has ended in the middle of a message.")


def own_address(stays_on_host: bool, towards_store: str | None) -> str:
    """The address to listen at for the sender.

    Raises TransportError: the interface that ``GLOO_SOCKET_IFNAME`` names has no address.
    """
    interface = os.environ.get(_INTERFACE)
    if interface:
        return _address_at(interface)
    if stays_on_host:  # an IPv6 loopback by which the store was reached exists; 127.0.0.1 may not
        return towards_store if towards_store is not None and is_loopback(towards_store) else _LOOPBACK
    # A sender elsewhere cannot connect to a loopback. The host's own name may be one's (127.0.1.1 on Debian).
    if _is_reachable(towards_store):
        return towards_store
    named = host_address()
    return named if _is_reachable(named) else _routed_address() or _LOOPBACK


def _is_reachable(address: str | None) -> TypeGuard[str]:
    """Whether other hosts may reach an address: it is none of a loopback."""
    return address is not None and not is_loopback(address)


def named_address() -> str:
    """The address of the interface that ``GLOO_SOCKET_IFNAME`` names, else of the host's name.

    Raises TransportError: that interface has no address.
    """
    interface = os.environ.get(_INTERFACE)
    return _address_at(interface) if interface else host_address()


def _routed_address() -> str | None:
    """The address from which this host would reach others; None: it has no route to them."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(_ELSEWHERE)  # sends nothing
        return str(sock.getsockname()[0])
    return None


def _address_at(interfaces: str) -> str:
    interface = interfaces.partition(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            only = _ipv6_address_at(interface)
            if only is not None:
                return only
            raise TransportError(f"GLOO_SOCKET_IFNAME names {interface}, which has no address: {error}.") from error
    return socket.inet_ntoa(reply[20:24])


def _ipv6_address_at(interface: str) -> str | None:
    """An IPv6 address of an interface that is not valid on its own link only; None: it has none."""
    with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
        for row in _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines():
            address, _, _, scope, _, name = row.split()
            if name == interface and scope != _LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return None


def host_address() -> str:
    """This host's address for other hosts, IPv4 if it has one; the loopback's if the host's name has no address."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except socket.gaierror as error:
        if error.errno not in _NO_IPV4:  # no DNS server answers: asking for another address takes as long again
            return _LOOPBACK
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET6)[0][4][0])
    except OSError:
        return _LOOPBACK


def decoded(text: memoryview) -> tuple[Message, memoryview | None, int]:
    """A message, the payload in it, and the size of the payload that comes with it, which follows it if it is large.

    Raises ProtocolError: it is malformed.
    """
    head = codec.peek(text)
    message, inline = codec.decode_with(head, text[: head.control_nbytes]), text[head.control_nbytes :]
    nbytes = head.payload_nbytes
    if len(inline) != (nbytes if nbytes <= INLINE_NBYTES else 0):
        raise codec.malformed(f"{nbytes} bytes were announced, but {len(inline)} arrived", text)
    return message, inline if len(inline) else None, nbytes
