"""The user's store, our own connections to it, and TorchRL's keys in it.

TorchRL's keys are written as hints for loops that wait on them. They are never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore


import contextlib
import enum
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import IPv6Address
from typing import Any, Final

import torch

from weightsync.errors import ConfigurationError, TransportError
from weightsync.keys import SharedKey
from weightsync.options import whole_number
from weightsync.protocol.messages import Ack, Message, Update
from weightsync.transports.exposure import is_exposed, warn_exposed
from weightsync.transports.process import forget_after_fork

__all__ = ["PrefixStore", "Store", "TCPStore"]

#: TorchRL's values.
HINT: Final = "update_weights"
ACKED: Final = "updated"


class HintMode(enum.Enum):
    """Which updates and acks are written to TorchRL's keys."""

    ALL = "all"
    NONE = "none"
    #: All but the next.
    AFTER_NEXT = "after the next"


class Hints:
    """The hints of one side. First weights have no hint: a loop would take them for an update."""

    def __init__(self) -> None:
        self._mode = HintMode.ALL

    def of(self, message: Message, rank: int) -> tuple[str, str] | None:
        """The key and value of the hint for a message to or from the worker of that rank; None if there is no hint."""
        if not isinstance(message, Update | Ack):
            return None
        mode, self._mode = self._mode, HintMode.ALL if self._mode is HintMode.AFTER_NEXT else self._mode
        if mode is not HintMode.ALL:
            return None
        return (f"NODE_{rank}_in", HINT) if isinstance(message, Update) else (f"NODE_{rank}_out", ACKED)

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Write no hints for messages that are sent inside the block."""
        self._mode = HintMode.NONE
        try:
            yield
        finally:
            self._mode = HintMode.ALL

    def withhold_next(self) -> None:
        """Write no hint for the next update or ack."""
        self._mode = HintMode.AFTER_NEXT

    def write_all(self) -> None:
        """Write hints for everything."""
        self._mode = HintMode.ALL


logger = logging.getLogger("weightsync")

#: The time limit for connecting to a store. torch asks the DNS for a name of each address that it connects to, only to
#: log it; where a DNS server does not answer, that alone takes 5 to 10 s.
DIAL: Final = timedelta(seconds=15)
_BACKLOG: Final = 2048
FOR_EVER: Final = timedelta(days=365)
#: The socket, our copy of it, and one to look for both.
_CLIENT_DESCRIPTORS: Final = 3
#: The descriptors that torch's server needs: for its event loop, its own connection, and some to spare. It aborts the
#: process (SIGABRT) if no descriptor is left for its event loop.
_SERVER_DESCRIPTORS: Final = 16
#: Where torch names the descriptor of a store's connection. Looking at all descriptors takes a while if there are many.
_DESCRIPTOR_PATTERN: Final = re.compile(r"client=TCPClient\(SocketImpl\(fd=([0-9]+),")
#: If a key has no value, `compare_set` with this as the expected and the new value returns it.
_ABSENT: Final = "weightsync: no value"


#: In a forked child: never freed, since torch would wait for threads that do not exist there.
_inherited: list[object] = []


def keep_in_child(*parents: object) -> None:
    """In a forked child: never free the parent's objects, which torch would take apart."""
    _inherited.append(parents)


class _ConnectionLocks:
    """Makes connections to a port one at a time, so that a new socket is known to be ours.

    Those to other ports go on meanwhile: a store that was stopped may never answer, and torch waits for that.
    """

    def __init__(self) -> None:
        self.forget()
        forget_after_fork(self)

    def lock_of(self, port: int) -> threading.Lock:
        """Held while a connection to that port is made."""
        return self._locks.setdefault(port, threading.Lock())

    def forget(self) -> None:
        """In a forked child: no connection is being made."""
        self._locks: dict[int, threading.Lock] = {}
        forget_after_fork(self)


_connection_locks = _ConnectionLocks()


@dataclass(frozen=True)
class StoreEndpoint:
    """The store through which a sender and one worker find each other.

    Args:
        key: shared by the trainer and its workers. None: the contents of the store are trusted.
        hints: what is written to TorchRL's keys; each copy has its own.

    Raises ConfigurationError: the store or the rank is of another kind.
    """

    store: Store
    rank: int
    backend: str = "gloo"
    in_flight: int = 1
    key: SharedKey | None = None
    hints: Hints = field(default_factory=Hints, compare=False, repr=False)
    #: NCCL's GPU: the current one of the thread that makes this. In the thread that makes the links another is current.
    gpu: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        base_of(self.store)
        rank = whole_number(self.rank)
        if not rank:
            raise ConfigurationError(f"rank is {self.rank!r}: the trainer is rank 0, worker i is rank i + 1.")
        object.__setattr__(self, "rank", rank)
        if self.backend == "nccl" and torch.cuda.is_available():
            object.__setattr__(self, "gpu", torch.cuda.current_device())

    def warn_if_exposed(self) -> None:
        """Warn once per process if other hosts can reach the store and there is no key."""
        base = base_of(self.store)
        if self.key is None and is_exposed(base.host, base.port):
            warn_exposed(f"The store at {base.host}:{base.port} can be reached from other hosts")

    def __reduce__(self) -> tuple[Any, ...]:
        if not isinstance(self.store, TCPStore):
            raise ConfigurationError("A PrefixStore cannot be sent to another process: give that process its own.")
        return _arrived, (self.store.host, self.store.port, self.rank, self.backend, self.in_flight, self.key)


def _arrived(host: str, port: int, *rest: Any) -> StoreEndpoint:
    return StoreEndpoint(TCPStore(host, port, None, False, DIAL, wait_for_workers=False), *rest)


def open_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A store of our own that listens at that address alone. By default torch's store listens on all interfaces.

    Raises OSError, RuntimeError: it cannot be opened there.
    """
    _require_descriptors(_SERVER_DESCRIPTORS)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        port = listener.getsockname()[1]
        # The store owns it from here on, and closes it even if it fails. Closing it twice might close another's.
        number = listener.detach()
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=number)


def connect_to_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """The store that listens at an address.

    Raises OSError, RuntimeError: no descriptor is left, or nothing has listened there for that long.
    """
    _require_descriptors()
    return TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def base_of(store: Any) -> TCPStore:
    """The TCPStore behind a store.

    Raises:
        ConfigurationError: there is none. Other stores serve one process or one file system, and cannot be waited for.
    """
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if not isinstance(base, TCPStore):
        raise ConfigurationError(
            f"a {type(base).__name__} is not a store that trainer and workers can share: give a "
            "torch.distributed.TCPStore, or a PrefixStore around one."
        )
    return base


class Client:
    """Our own connection to a store: a call that blocks on it blocks no other.

    Args:
        store: the user's store; its prefixes are kept.

    Raises (all methods):
        TransportError: the store is gone, the connection was `cut`, or no descriptor is left for it.
    """

    def __init__(self, store: Store) -> None:
        base = base_of(store)
        self._where = f"the store at {base.host}:{base.port}"
        self._store: Store | None = None
        with _connection_locks.lock_of(base.port), self._as_transport_errors():
            _require_descriptors()
            sockets_before = connected_sockets() if _descriptor(base) is None else {}
            self._store = _new_connection(store, base)
            self._store.set_timeout(FOR_EVER)
            now = connected_sockets(_descriptor(self._store)).items()
            fresh = [each for identity, each in now if identity not in sockets_before and each.peer == base.port]
            self._socket_copy = fresh[0].copy() if len(fresh) == 1 else None
        if len(fresh) == 1 and self._socket_copy is None:
            raise TransportError(
                f"The connection to {self._where} ended while it was being made, or no descriptor is left."
            )

    @contextlib.contextmanager
    def _checked_store(self) -> Iterator[Store]:
        store = self._store
        if store is None:
            raise TransportError(f"The connection to {self._where} was closed.")
        with self._as_transport_errors():
            yield store

    @contextlib.contextmanager
    def _as_transport_errors(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            raise TransportError(f"{self._where} failed: {str(error).splitlines()[0]}") from error

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        with self._checked_store() as store:
            store.set(key, value)  # type: ignore[arg-type] # torch takes bytes

    def await_value(self, key: str) -> bytes:
        """The value of a key, once it exists."""
        with self._checked_store() as store:
            return store.get(key)

    def present(self, key: str) -> bool:
        """Whether a key has a value."""
        with self._checked_store() as store:
            return store.check([key])

    def value(self, key: str) -> bytes | None:
        """The value of a key that is never deleted, or None."""
        return self.await_value(key) if self.present(key) else None

    def peek(self, key: str) -> bytes | None:
        """The value of a key that no client waits for, or None. The key may be deleted at the same time.

        The store takes this for a write: a client that waits for the key would be woken, and find nothing.
        """
        with self._checked_store() as store:
            found = store.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else found

    def claim(self, key: str, value: str, ours: Callable[[str], bool] = lambda _: True) -> str:
        """Write a value unless there is one. Returns the value that is there then.

        Args:
            ours: whether weightsync wrote a value. Any other value is overwritten.
        """
        with self._checked_store() as store:
            found = store.compare_set(key, "", value)
            while not ours(found.decode("ascii", "replace")):
                logger.warning("the store's key %s held a value that is not ours: it was overwritten", key)
                found = store.compare_set(key, found, value)  # type: ignore[arg-type] # torch takes bytes
            return found.decode("ascii", "replace")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value. The store ends the connection if the value is not a number."""
        with self._checked_store() as store:
            return store.add(key, amount)

    def delete(self, key: str) -> None:
        """Delete a key."""
        with self._checked_store() as store:
            store.delete_key(key)

    @property
    def own_address(self) -> str | None:
        """The address by which this process reaches the store; None: unknown."""
        with contextlib.suppress(OSError):
            return None if self._socket_copy is None else _as_ipv4(self._socket_copy.getsockname()[0])
        return None

    def cut(self) -> None:
        """Make every current and later call on this connection fail."""
        if self._socket_copy is not None:
            with contextlib.suppress(OSError):
                self._socket_copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection once the current call has ended."""
        self._store = None
        if self._socket_copy is not None:
            self._socket_copy.close()


def _as_ipv4(address: str) -> str:
    """An IPv4 address as usual: torch's sockets are IPv6 and write ``::ffff:10.0.0.1``, where no socket can listen."""
    mapped = IPv6Address(address).ipv4_mapped if ":" in address else None
    return address if mapped is None else str(mapped)


def _require_descriptors(count: int = _CLIENT_DESCRIPTORS) -> None:
    """Check for free descriptors: without any, torch would retry until its time limit.

    Raises OSError: fewer than that are left.
    """
    descriptors: list[int] = []
    try:
        for _ in range(count):
            descriptors.append(os.eventfd(0, os.EFD_CLOEXEC))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _new_connection(store: Store, base: TCPStore) -> Store:
    if store is base:
        return TCPStore(base.host, base.port, None, False, DIAL, wait_for_workers=False)
    return store.clone()


@dataclass(frozen=True, slots=True)
class ConnectedSocket:
    """A socket that is connected over IP, with the port of its other end."""

    identity: str
    fd: int
    peer: int

    def copy(self) -> socket.socket | None:
        """A copy of it; None if it was closed meanwhile: its number may belong to another socket already."""
        with contextlib.suppress(OSError):
            copied = os.dup(self.fd)
            if _identity(copied) == self.identity:
                return _socket_over(copied)
            os.close(copied)
        return None


def _socket_over(fd: int) -> socket.socket:
    """A socket over a descriptor whose blocking mode others share.

    Said to be non-blocking, it leaves that mode alone. Otherwise Python would set O_NONBLOCK while a default timeout is
    set (`socket.setdefaulttimeout`). Raises OSError: it is no socket.
    """
    return socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=fd)


def _identity(fd: int | str) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _descriptor(store: Store) -> str | None:
    """The descriptor of a store's connection, which torch names where it describes the store; None: it does not."""
    described = _DESCRIPTOR_PATTERN.search(repr(base_of(store)))
    return None if described is None else described[1]


def connected_sockets(descriptor: str | None = None) -> dict[str, ConnectedSocket]:
    """This process's connected sockets, by identity: the one of that descriptor, or all."""
    sockets = {}
    for entry in os.listdir("/proc/self/fd") if descriptor is None else (descriptor,):
        with contextlib.suppress(OSError):
            identity = _identity(entry)
            if identity.startswith("socket:"):
                # Not copied: another thread that looks now would take the copy, which is closed soon, for the socket.
                sock = _socket_over(int(entry))
                try:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        sockets[identity] = ConnectedSocket(identity, int(entry), sock.getpeername()[1])
                finally:
                    sock.detach()
    return sockets
