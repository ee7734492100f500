"""What every transport offers: a `Link`, and how to wait for several at once."""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from weightsync.errors import TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Message
from weightsync.transports.buffers import Buffer
from weightsync.transports.process import forget_after_fork


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Received:
    """A message, whole, with its payload."""

    message: Message
    #: The payload's bytes, writable; None if the message has none. Valid as long as it is referred to.
    payload: memoryview | None = None
    #: Makes the payload read as it was sent, whatever this process has written over it since.
    refresh: Callable[[], None] = _nothing
    #: Why this process could not take the payload, for want of memory or descriptors; empty: it could.
    untaken: str = ""


class Payloads(Enum):
    """How large payloads travel."""

    #: In shared memory where the link can hand it over, and inline where it cannot.
    SHARED = "shared"
    #: With their message, whatever their size.
    INLINE = "inline"


class Link(Protocol):
    """One sender-worker pair.

    No method blocks. All are called under the lock of the one driver that owns the link. An adapter knows no
    model and no clock.
    """

    #: What the transport promises of its messages.
    delivery: Delivery

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages to people."""

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queue a message and write what fits now; the rest leaves in `flush`.

        Args:
            message: what to say. An update's ``slot`` is the link's business: leave it None.
            payload: the first ``message.nbytes`` bytes of it travel with the message. It stays pinned while
                the link or the worker may still read it.

        Raises:
            TransportError: the link is dead or closed. The peer will never see this message. What it wrote
                before may still be there: call `receive` until that raises too, then count the link as lost.
            ConfigurationError: the message does not fit the wire. Nothing was queued.
        """

    def flush(self) -> bool:
        """Write what is queued, as far as it fits; True once nothing is left.

        Raises:
            TransportError: the link is dead or closed. The peer will see none of what had not left whole.
        """

    def receive(self) -> list[Received]:
        """Everything that has arrived whole, in the order of arrival; empty if nothing has.

        Raises:
            TransportError: the link is dead or closed. What was readable before has been delivered by earlier
                calls.
            ProtocolError: the peer sent bytes that are ours but malformed, or speaks another version of the
                protocol. Nothing more can be read; `send` still works, for a last word before `close`.
        """

    def waitables(self) -> list[int]:
        """File descriptors; one of them readable means: call `receive`. Empty once closed."""

    def wants_write(self) -> int | None:
        """The file descriptor to be watched for room to write, while something is queued; else None."""

    def watch(self, pid: int, started: int) -> None:
        """Notice the death of the peer's process, named by its Hello, even where the link would not show it.

        From then on that death makes `receive` raise TransportError, after delivering what was readable. With
        pid 0 nothing changes.
        """

    def close(self) -> None:
        """Give the link up, with whatever had not left. Closing twice is allowed.

        Descriptors and threads that the link has begun end with it, not with the last who holds it; what blocks in
        them, soon after.

        Buffers that the peer may still be reading are retired (never written again), unless it is known dead.
        """


class TellsWhatIsRead(ABC):
    """A link that can tell whether its peer has read what was sent."""

    @abstractmethod
    def all_read(self) -> bool | None:
        """Whether the peer's process has read all that was sent; None: that is not known."""


class Remarks(ABC):
    """A link that can say why its worker does not answer, though nothing has failed."""

    @property
    @abstractmethod
    def remark(self) -> str:
        """What was told of this link by others than its worker; empty: nothing, or its worker has answered since."""


class Waker:
    """Ends a `wait` from another thread.

    Firing is remembered until a wait has seen it. A closed waker stays fired. In a forked child an inherited
    waker counts as closed, and firing it there wakes nobody in the parent.

    Raises:
        TransportError: no file descriptor is left.
    """

    def __init__(self) -> None:
        # Re-entrant: a signal handler may fire it while its own thread is inside.
        self._lock = threading.RLock()
        self._waiting = 0
        self._fired = 0
        self._closed = False
        self._pid = os.getpid()
        self._fd: int | None = None
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise TransportError(f"Nothing can be waited for: {error.strerror}.") from error
        forget_after_fork(self)

    def fileno(self) -> int:
        """The descriptor that is readable while it is fired; -1 once closed."""
        return -1 if self._fd is None else self._fd

    def fire(self) -> None:
        """Wake whoever waits, or the next that will."""
        with self._lock:
            # A child that closes what it inherited must not wake its parent, with whom it shares the counter.
            if self._fd is not None and self._pid == os.getpid():
                self._fired += 1
                os.eventfd_write(self._fd, 1)

    @property
    def fired(self) -> int:
        """How often it was fired: a wait that is told what the number was misses nothing that came since."""
        return self._fired

    def clear(self) -> None:
        """Forget that it was fired, unless others wait who have not seen it yet."""
        with self._lock:
            if self._fd is not None and not self._closed and self._waiting == 0:
                _drain(self._fd)

    def enter(self) -> int | None:
        """Begin to wait: the descriptor to watch, open until `leave`; None if it is fired for good."""
        with self._lock:
            if self._closed:
                return None
            self._waiting += 1
            return self._fd

    def leave(self) -> None:
        """End a wait begun by `enter`."""
        with self._lock:
            self._waiting -= 1
            self._release()

    def close(self) -> None:
        """Fire for good. Closing twice is allowed."""
        with self._lock:
            # Closed before it fires: a wait that saw the firing first would clear it, and the next would never end.
            self._closed = True
            self.fire()
            self._release()

    def forget(self) -> None:
        """In a forked child: count as closed."""
        self._lock = threading.RLock()
        self._closed = True
        self._waiting = 0
        self._release()

    def _release(self) -> None:
        # A descriptor closed under a poll would be reused by something else while that poll still watches it.
        if self._closed and self._waiting == 0 and self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self.close()


def _drain(eventfd: int) -> None:
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        return


class Waitable(Protocol):
    """What can be waited for: a link, or a whole channel."""

    def waitables(self) -> list[int]:
        """File descriptors that are readable when there is something to do."""

    def wants_write(self) -> int | None:
        """The file descriptor to be watched for room to write; else None."""


class WaitFailed(Exception):
    """What is waited for cannot tell what it waits for itself.

    Args:
        which: its index among those that were to be waited for.
    """

    def __init__(self, which: int) -> None:
        super().__init__(which)
        self.which = which


_Waited = TypeVar("_Waited", bound=Waitable)


def wait(waker: Waker, links: Sequence[_Waited], timeout: float | None, since: int | None = None) -> list[_Waited]:
    """Block until a link can be read or written, the waker fires, or time is up.

    Args:
        waker: ends the wait from another thread; seen once, it is cleared.
        links: whom to wait for.
        timeout: seconds; None for ever.
        since: `Waker.fired` as it was before the caller looked at what it waits for: fired since, it does not block.

    Returns:
        The links that have something to read, room for what they have to write, or are dead.

    Raises:
        WaitFailed: one of them raised; that is the cause.
    """
    fd = waker.enter()
    if fd is None:
        return []
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        owners = _register(poller, links)
        if since is not None and waker.fired != since:
            timeout = 0.0
        ready = [known for known, _ in poller.poll(None if timeout is None else max(timeout, 0.0) * 1000)]
    finally:
        waker.leave()
    if fd in ready:
        waker.clear()
    found = [index for known in ready for index in owners.get(known, ())]
    return [links[index] for index in sorted(set(found))]


def _register(poller: select.poll, links: Sequence[Waitable]) -> dict[int, list[int]]:
    owners: dict[int, list[int]] = {}
    masks: dict[int, int] = {}
    for index, link in enumerate(links):
        try:
            readable, writable = link.waitables(), link.wants_write()
        except Exception as error:
            raise WaitFailed(index) from error
        for fd in readable:
            masks[fd] = masks.get(fd, 0) | select.POLLIN
            owners.setdefault(fd, []).append(index)
        if writable is not None:
            masks[writable] = masks.get(writable, 0) | select.POLLOUT
            owners.setdefault(writable, []).append(index)
    for fd, mask in masks.items():
        poller.register(fd, mask)
    return owners
