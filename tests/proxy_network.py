"""A network between processes of one machine, built of proxies that can cut, reset or silence connections."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import re
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
LOOPBACK: Final = "127.0.0.1"
#: Of two peers, gloo lets the one with the greater port connect, and the other wait. It compares the bytes of the ports
#: in network order as numbers in this machine's byte order. Both peers must still agree, though each sees a proxy's
#: port instead of the other's. So others see this process at one of the least ports (LEAST), and this process sees
#: others at one of the greatest (GREATEST): the others connect. GREATEST is above all ports that Linux assigns by
#: itself. If a process had a greater port of its own, both would connect, and each would wait at an address where the
#: other is not.
LEAST: Final = range(1024, 32768, 256)
GREATEST: Final = range(65535, 61000, -256)
#: An address as RPC writes it, as text, and as gloo does, as a sockaddr_in.
_SPELT: Final = re.compile(rb"127\.0\.0\.1:(\d{4,5})")
_PACKED: Final = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
#: The size limit of frames that may carry addresses. Larger ones are payloads, which are not rewritten.
_SMALL: Final = 4096


class Failure(enum.StrEnum):
    """A way in which a network fails."""

    #: Both ends read an end of file.
    CUT = "cut"
    #: Both ends see that the connection was reset.
    RESET = "reset"
    #: Data is no longer passed on, and neither end notices.
    SILENCE = "silence"


def _as_it_is(data: bytes) -> bytes:
    return data


class Wire:
    """A proxy that forwards connections to a port of this machine, until it fails.

    Args:
        port: the port to which connections are forwarded.
        at: the address at which they are accepted. Port 0: a free port.
        out: rewrites the data from the client.
        back: rewrites the data to the client.
    """

    def __init__(
        self,
        port: int,
        at: tuple[str, int] = (LOOPBACK, 0),
        out: Callable[[bytes], bytes] = _as_it_is,
        back: Callable[[bytes], bytes] = _as_it_is,
    ) -> None:
        self._target, self._out, self._back = port, out, back
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._silent, self._over = threading.Event(), threading.Event()
        self._left, self._at_last = 0, _nothing
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((LOOPBACK, self._target))
                with self._lock:
                    self._sockets += [near, far]
                    both = (near, far, self._out), (far, near, self._back)
                    ways = [threading.Thread(target=self._carry, args=way, daemon=True) for way in both]
                    self._threads += ways
                for way in ways:
                    way.start()

    def _carry(self, here: socket.socket, there: socket.socket, rewritten: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(1 << 16):
                self._count(len(data))
                if self._silent.is_set():
                    self._over.wait()
                    return
                there.sendall(rewritten(data))
        with contextlib.suppress(OSError):
            there.shutdown(socket.SHUT_WR)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            due = 0 < self._left <= nbytes
            self._left -= min(nbytes, self._left)
        if due:
            self._at_last()

    def when_carried(self, nbytes: int, act: Callable[[], None]) -> None:
        """Call ``act`` when this many more bytes have arrived, before the last of them are passed on."""
        with self._lock:
            self._left, self._at_last = nbytes, act

    def fail(self, failure: Failure) -> None:
        """Fail in this way. New connections are refused, or under SILENCE forward nothing."""
        if failure is Failure.SILENCE:
            self._silent.set()
            return
        self._stop_listening()
        with self._lock:
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR) if failure is Failure.CUT else _reset(sock)

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def end(self) -> None:
        """End all threads, and close all sockets."""
        self._over.set()
        self.fail(Failure.CUT)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


def _nothing() -> None:
    return None


def _reset(sock: socket.socket) -> None:
    """Send a reset to the peer: connecting a connected socket to AF_UNSPEC makes Linux do so."""
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    if _LIBC.connect(sock.fileno(), nowhere, len(nowhere)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Network:
    """The proxies for all connections of one process: to its store, and to and from the peers that the store names.

    Messages to and from the store are rewritten: each address in them is replaced by that of a wire that leads there.
    Only its own address the process reads back unchanged. RPC and gloo have no other way to use a proxy.

    Args:
        port: the port of the store.
    """

    def __init__(self, port: int) -> None:
        self.store = Wire(port, out=self._told, back=self._read)
        #: The wires, by the ports to which they forward.
        self.peers: dict[int, Wire] = {}
        #: The ports at which the process itself listens, by the ports of their wires.
        self._own: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """The port at which the process reaches the store through this network."""
        return self.store.port

    def _told(self, data: bytes) -> bytes:
        return _rewritten(data, self._way_in)

    def _read(self, data: bytes) -> bytes:
        return _rewritten(data, self._way_out)

    def _way_in(self, port: int) -> int:
        way = self._way_to(port, LEAST)
        self._own[way] = port
        return way

    def _way_out(self, port: int) -> int:
        return self._own[port] if port in self._own else self._way_to(port, GREATEST)

    def _way_to(self, port: int, among: range) -> int:
        with self._lock:
            if port not in self.peers:
                self.peers[port] = _wire_at_one(among, port)
            return self.peers[port].port

    def end(self) -> None:
        """End all wires."""
        for wire in (self.store, *self.peers.values()):
            wire.end()


def _wire_at_one(ports: range, to: int) -> Wire:
    for port in ports:
        with contextlib.suppress(OSError):
            return Wire(to, (LOOPBACK, port))
    raise AssertionError(f"none of {ports} is free")


def _rewritten(data: bytes, way: Callable[[int], int]) -> bytes:
    """The frame, with each port in it replaced by that of the wire."""
    if len(data) > _SMALL:
        return data
    spelt = _SPELT.sub(lambda found: f"{LOOPBACK}:{way(int(found[1])):0{len(found[1])}}".encode(), data)
    return _PACKED.sub(lambda found: _packed(way(*struct.unpack("!H", found[1]))), spelt)


def _packed(port: int) -> bytes:
    return b"\x02\x00" + struct.pack("!H", port) + socket.inet_aton(LOOPBACK)
