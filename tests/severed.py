"""A network between processes of one machine: what passes through it can be cut, reset, or swallowed."""

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
HERE: Final = "127.0.0.1"
#: gloo compares ports, as this machine's byte order reads those of the network's: the greater one connects, the other
#: waits. So that both still agree, others see the process at a least port, and it sees them at greatest ones: they
#: connect. Greatest are those above all that Linux gives to listeners by itself: a process that had been given a
#: greater one would connect as well, and each would wait for answers where the other is not.
LEAST: Final = range(1024, 32768, 256)
GREATEST: Final = range(65535, 61000, -256)
#: As RPC writes where it is reached, and as gloo does: a sockaddr_in.
_SPELT: Final = re.compile(rb"127\.0\.0\.1:(\d{4,5})")
_PACKED: Final = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
#: Of the frames that carry addresses; payloads are larger, and left alone.
_SMALL: Final = 4096


class Failure(enum.StrEnum):
    """How a network fails."""

    #: Both ends read an end of file.
    CUT = "cut"
    #: Both ends see that the connection was reset.
    RESET = "reset"
    #: Neither end notices anything, and nothing is carried any more.
    SILENCE = "silence"


def _as_it_is(data: bytes) -> bytes:
    return data


class Wire:
    """Carries connections to a port of this machine, until it fails.

    Args:
        port: the port to which connections go.
        at: the address at which they are accepted; port 0: a free one.
        out: what is passed on of what came from who connected.
        back: what is passed on of what came from whom it leads to.
    """

    def __init__(
        self,
        port: int,
        at: tuple[str, int] = (HERE, 0),
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
                far = socket.create_connection((HERE, self._target))
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
        """Have ``act`` called once that many more bytes have come, before the last of them are passed on."""
        with self._lock:
            self._left, self._at_last = nbytes, act

    def fail(self, failure: Failure) -> None:
        """Fail so. New connections fail alike: they are refused, or lead nowhere."""
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
        """Be gone, threads and sockets."""
        self._over.set()
        self.fail(Failure.CUT)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


def _nothing() -> None:
    return None


def _reset(sock: socket.socket) -> None:
    """Send the peer a reset: Linux sends it when a connected socket is connected to nowhere."""
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)
    if _LIBC.connect(sock.fileno(), nowhere, len(nowhere)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Network:
    """All connections of one process: to its store, and between it and the peers that the store names.

    Messages to and from the store are rewritten: each address in them becomes that of a wire of ours that leads there,
    but the process reads its own address as it wrote it. There is no other way to give RPC and gloo a proxy.

    Args:
        port: the store's.
    """

    def __init__(self, port: int) -> None:
        self.store = Wire(port, out=self._told, back=self._read)
        #: By where they lead.
        self.peers: dict[int, Wire] = {}
        #: Where the process itself listens, by the wires' ports.
        self._own: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """Where the store is reached through it."""
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
        """Be gone."""
        for wire in (self.store, *self.peers.values()):
            wire.end()


def _wire_at_one(ports: range, to: int) -> Wire:
    for port in ports:
        with contextlib.suppress(OSError):
            return Wire(to, (HERE, port))
    raise AssertionError(f"none of {ports} is free")


def _rewritten(data: bytes, way: Callable[[int], int]) -> bytes:
    """The frame, with another port in the place of each that is named."""
    if len(data) > _SMALL:
        return data
    spelt = _SPELT.sub(lambda found: f"{HERE}:{way(int(found[1])):0{len(found[1])}}".encode(), data)
    return _PACKED.sub(lambda found: _packed(way(*struct.unpack("!H", found[1]))), spelt)


def _packed(port: int) -> bytes:
    return b"\x02\x00" + struct.pack("!H", port) + socket.inet_aton(HERE)
