"""The contract of every transport, `Link`, and how to wait for several links at once."""

from __future__ import annotations

import math
import operator
import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from functools import reduce
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from weightsync.errors import ConfigurationError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Message, Part
from weightsync.transports.buffers import Buffer
from weightsync.transports.device import OnDevice, Slot
from weightsync.transports.process import forget_after_fork


class Received(Struct, frozen=True):
    """A whole message with its payload."""

    message: Message
    #: The payload's bytes, writable; None if the message has none. Valid as long as something refers to them. For a
    #: `Part`: the whole payload, of which only this part and earlier ones have arrived.
    payload: memoryview | None = None
    #: The slot that holds the payload; None if it travelled, and is in this process's own memory.
    slot: Slot | None = None
    #: Why this process could not take the payload (no memory or no descriptors); empty if it could.
    untaken: str = ""
    #: The payload in the memory of a device, in place of `payload`; None if it is not on one.
    on_device: OnDevice | None = None


class Payloads(Enum):
    """How large payloads travel."""

    #: In shared memory where the link can pass it on, and inline where it cannot.
    SHARED = "shared"
    #: With their message, whatever their size.
    INLINE = "inline"


class Link(Protocol):
    """The connection between a sender and one worker, for one model.

    No method blocks. All methods are called under the lock of the one driver that owns the link. An adapter knows
    no model and no clock.
    """

    #: What the transport promises about its messages.
    delivery: Delivery

    @property
    def peer(self) -> str:
        """The name of the other end, for messages to people."""

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        """Queue a message and write what fits now; `flush` writes the rest.

        Args:
            message: the message. Leave an update's ``slot`` None: the link sets it.
            payload: its first ``message.nbytes`` bytes are sent with the message. It stays pinned while the link or
                the worker may still read it.

        Raises:
            TransportError: the link is dead or closed. The peer will never see this message. Messages from the peer
                may still be there: call `receive` until that raises too, then count the link as lost.
            ConfigurationError: the message does not fit the wire format. Nothing was queued.
        """

    def flush(self) -> bool:
        """Write as much as possible of what is queued; True once nothing is left.

        Raises:
            TransportError: the link is dead or closed. The peer will see no message that was not written whole.
        """

    def receive(self) -> list[Received]:
        """All whole messages that have arrived, in the order of arrival; empty if there are none.

        Raises:
            TransportError: the link is dead or closed. Earlier calls have delivered everything that was readable.
            ProtocolError: the peer sent a malformed weightsync message, or speaks another version of the protocol.
                Nothing more can be read; `send` still works, for a last message before `close`.
        """

    def waitables(self) -> list[int]:
        """File descriptors. When one of them is readable, call `receive`. Empty once the link is closed."""

    def wants_write(self) -> int | None:
        """The file descriptor to watch for room to write while something is queued; else None."""

    def watch(self, pid: int, started: int) -> None:
        """Watch the peer's process, named by its Hello, for links that would not show its death.

        After this, the death of that process makes `receive` raise TransportError, once it has delivered what was
        readable. With pid 0 nothing changes.
        """

    def close(self) -> None:
        """Close the link and drop what was not written. Closing twice is allowed.

        The link's own descriptors and threads end now, not when the last reference to it goes. A thread that blocks
        ends soon after.

        Buffers that the peer may still be reading are retired (never written again), unless the peer is known dead.
        """


_MEMBERS: Final = tuple(name for name in {**Link.__annotations__, **vars(Link)} if not name.startswith("_"))


def require_link(link: object, what: str) -> None:
    """Raise ConfigurationError: a user's object lacks members of `Link`. ``what`` begins the message."""
    missing = [name for name in _MEMBERS if getattr(link, name, None) is None]
    if missing:
        raise ConfigurationError(
            f"{what} of type {type(link).__name__}, which lacks {', '.join(missing)}: give a link, which has all "
            "members of weightsync.transports.base.Link (docs/testing.md lists them)."
        )


class TellsWhatIsRead(ABC):
    """A link that knows whether its peer has read what was sent."""

    @abstractmethod
    def all_read(self) -> bool | None:
        """Whether the peer's process has read everything that was sent; None: unknown."""


class SharesMemory(ABC):
    """A link whose worker may map the memory that a payload lies in."""

    @abstractmethod
    def shares(self, payload: Buffer, nbytes: int) -> bool:
        """Whether the worker maps the payload; if not, its bytes travel. The answer for a payload never changes."""


class TakesParts(ABC):
    """A link that can carry a payload in parts while it is packed, ahead of its update."""

    @abstractmethod
    def takes_parts(self, payload: Buffer, nbytes: int, hashed: bool) -> bool:
        """Whether the worker gains from getting this payload in parts.

        Args:
            payload: the buffer that will be filled.
            nbytes: the size of the payload in bytes.
            hashed: whether its update will carry a digest.
        """

    @abstractmethod
    def send_part(self, part: Part, payload: Buffer) -> None:
        """Queue a range of a payload, which is written, and write what fits now.

        Args:
            part: the range. Leave its ``segment`` 0: the link sets it.
            payload: stays pinned while the link still reads the range. The worker's reading pins nothing: what it has
                read of a payload whose update never comes is dropped.

        Raises:
            TransportError: the link is dead or closed.
        """


class CarriesDeltas(ABC):
    """A link whose worker has a weightsync receiver, which may be sent deltas."""

    @property
    @abstractmethod
    def carries_deltas(self) -> bool:
        """Whether the bytes of each payload travel over it."""


class Gathering(ABC):
    """Holds back the updates of one dispatch, so that their links can send them together."""

    @abstractmethod
    def begin(self) -> None:
        """A dispatch begins."""

    @abstractmethod
    def end(self) -> None:
        """The dispatch is complete: send the updates that were held back. Never raises because of a link."""


class Gathers(ABC):
    """A link whose updates may be sent together with those of the sender's other links."""

    @property
    @abstractmethod
    def gathering(self) -> Gathering | None:
        """The object that the links of its sender share; None: it sends on its own. The answer never changes."""


class Outlet(Protocol):
    """The writing half of a link."""

    #: Whether nothing is left to be written, and nothing that `Link.flush` would raise has happened.
    idle: bool


class Steady(ABC):
    """A link whose descriptors change only with `Link.watch` and `Link.close`, or when one after the first is ready.

    It need not be flushed while its outlet is idle, and does not want to write then.
    """

    outlet: Outlet


class Withdraws(ABC):
    """A link over a connection of the user's, which can be given again if nothing has gone over the link."""

    @abstractmethod
    def withdraw(self) -> None:
        """Close the link, and leave the connection open."""


class Remarks(ABC):
    """A link that can explain why its worker does not answer although nothing has failed."""

    @property
    @abstractmethod
    def remark(self) -> str:
        """What processes other than the worker reported about this link; empty: nothing, or the worker has answered."""


class Waker:
    """Ends a `wait` from another thread.

    A waker stays fired until a wait has seen it, and a closed waker stays fired. In a forked child an
    inherited waker counts as closed, and firing it there wakes no thread of the parent.

    Raises:
        TransportError: no file descriptor is left.
    """

    def __init__(self) -> None:
        # Re-entrant: a signal handler may fire it while its own thread holds the lock.
        self._lock = threading.RLock()
        self._waiting = 0
        #: How often it was fired. A wait that is given an earlier number returns at once if it was fired since.
        self.fired = 0
        self._closed = False
        self._pid = os.getpid()
        #: The descriptor that is readable while the waker is fired; -1 once closed.
        self.fd = -1
        try:
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise TransportError(f"No file descriptor to wait on: {error.strerror}.") from error
        forget_after_fork(self)

    def fileno(self) -> int:
        """The descriptor that is readable while the waker is fired; -1 once closed."""
        return self.fd

    def fire(self) -> None:
        """Wake the current waits, or else the next one."""
        with self._lock:
            # A child that closes an inherited waker must not wake its parent: they share the counter.
            if self.fd >= 0 and self._pid == os.getpid():
                self.fired += 1
                os.eventfd_write(self.fd, 1)

    def nudge(self) -> None:
        """Wake the current waits. A later one that was given `fired` from before does not block either."""
        with self._lock:
            if self._waiting:
                self.fire()
            else:
                self.fired += 1

    def clear(self) -> None:
        """Clear it, unless other waits have not seen it yet."""
        with self._lock:
            if self.fd >= 0 and not self._closed and self._waiting == 0:
                _drain(self.fd)

    def enter(self) -> int | None:
        """Begin a wait. Returns the descriptor to watch, open until `leave`; None: the waker is fired permanently."""
        with self._lock:
            if self._closed:
                return None
            self._waiting += 1
            return self.fd

    def leave(self) -> None:
        """End a wait begun by `enter`."""
        with self._lock:
            self._waiting -= 1
            if self._closed:
                self._release()

    def close(self) -> None:
        """Fire permanently. Closing twice is allowed."""
        if self._pid != os.getpid():
            # Its owner may be forgotten before it is: until then a thread of the parent may seem to hold its lock.
            self.forget()
            return
        with self._lock:
            # Mark it closed before firing: a wait that saw it fired first would clear it, and the next would never end.
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
        # A descriptor closed under a poll would be reused while that poll still watches it.
        if self._closed and self._waiting == 0 and self.fd >= 0:
            fd, self.fd = self.fd, -1  # first: after an interrupt its number may be another file's
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _drain(eventfd: int) -> None:
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        return


#: The longest poll, in seconds. A signal that arrives just before poll(2) sleeps, or in another thread, does not end
#: that poll, and Python runs its handler only afterwards.
SLICE: Final = 1.0


class Waitable(Protocol):
    """Anything that can be waited for: a link, or a whole channel."""

    def waitables(self) -> list[int]:
        """File descriptors that are readable when there is something to do."""

    def wants_write(self) -> int | None:
        """The file descriptor to be watched for room to write; else None."""


class WaitFailed(Exception):
    """An object that was to be waited for raised an error.

    Args:
        which: its index in the list that was given to `wait`.
    """

    def __init__(self, which: int) -> None:
        super().__init__(which)
        self.which = which


_Waited = TypeVar("_Waited", bound=Waitable)


def wait(waker: Waker, links: Sequence[_Waited], timeout: float | None, since: int | None = None) -> list[_Waited]:
    """Block until a link is readable or writable, the waker fires, or the time is up.

    Args:
        waker: ends the wait from another thread. The wait clears it.
        links: what to wait for.
        timeout: in seconds; None for no limit.
        since: `Waker.fired` before the caller looked for work. If it was fired since then, the wait does not block.

    Returns:
        The links that are readable, writable while they want to write, or dead.

    Raises:
        WaitFailed: one of the links raised; its error is the cause.
    """
    return Waits[_Waited](waker).wait(links, timeout, since)


class Waits(Generic[_Waited]):
    """Waits of one thread for the same links, one after another.

    A link is asked for its descriptors at the first wait, and again once its id is in `changed`, it could be written,
    or another of its descriptors than the first was ready. All are asked again when other links are waited for, and
    after a wait that the waker ended; unless all are `Steady`, also after one that the time ended, and now and then.

    Args:
        waker: ends a wait from another thread.
    """

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        #: The ids (`id`) of links whose descriptors may have changed. Any thread may add to it.
        self.changed: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        self._links: Sequence[_Waited] = ()
        self._places: dict[int, int] = {}
        self._wanted: list[dict[int, int]] = []
        self._owners: dict[int, dict[int, int]] = {}
        self._poller = select.poll()
        #: How many waits may follow until all links are asked again.
        self._waits_left = 0
        self._steady = False

    def wait(self, links: Sequence[_Waited], timeout: float | None, since: int | None = None) -> list[_Waited]:
        """Wait: see the function `wait`. ``links`` must not change afterwards."""
        fd = self._waker.enter()
        if fd is None:
            return []
        try:
            if self._waits_left <= 0 or self.changed or links is not self._links:
                self._update_descriptors(links, fd)
            if since is not None and self._waker.fired != since:
                timeout = 0.0
            seconds_left = math.inf if timeout is None else max(timeout, 0.0)
            ready = self._poller.poll((seconds_left if seconds_left < SLICE else SLICE) * 1000)
            while seconds_left > SLICE and not ready:
                seconds_left -= SLICE
                ready = self._poller.poll((seconds_left if seconds_left < SLICE else SLICE) * 1000)
        except BaseException:
            self._forget()
            raise
        finally:
            self._waker.leave()
        if not self._steady:
            self._waits_left = self._waits_left - 1 if ready else 0
        return self._ready_links(links, ready, fd) if ready else []

    def _ready_links(self, links: Sequence[_Waited], ready: list[tuple[int, int]], waker: int) -> list[_Waited]:
        """The links behind the descriptors that are ready."""
        places: set[int] = set()
        for fd, event in ready:
            if fd == waker:
                self._waker.clear()
            if fd == waker or event & select.POLLNVAL:
                self._waits_left = 0
            for place in self._owners.get(fd, ()):
                places.add(place)
                if event & select.POLLOUT or fd != next(iter(self._wanted[place])):
                    self.changed.add(id(links[place]))
        return list(map(links.__getitem__, sorted(places)))

    def _update_descriptors(self, links: Sequence[_Waited], waker: int) -> None:
        """Ask the links for their descriptors: those whose descriptors may have changed, or all."""
        if self._waits_left > 0 and len(links) == len(self._links) and all(map(operator.is_, links, self._links)):
            self._links = links
            while self.changed:
                place = self._places.get(self.changed.pop())
                if place is not None:
                    self._update_link(place)
            return
        self.changed.clear()
        self._forget()
        self._links, self._wanted = links, [{} for _ in links]
        self._places = {id(link): place for place, link in enumerate(links)}
        self._waits_left = len(links)
        self._steady = all(isinstance(link, Steady) for link in links)
        self._poller.register(waker, select.POLLIN)
        for place in range(len(links)):
            self._update_link(place)

    def _update_link(self, place: int) -> None:
        try:
            readable, writable = self._links[place].waitables(), self._links[place].wants_write()
        except Exception as error:
            raise WaitFailed(place) from error
        events_of_fd = dict.fromkeys(readable, select.POLLIN)
        events_of_fd.pop(-1, None)  # that of a link which another thread closes meanwhile
        if writable is not None:
            events_of_fd[writable] = events_of_fd.get(writable, 0) | select.POLLOUT
        previous, self._wanted[place] = self._wanted[place], events_of_fd
        if events_of_fd == previous:
            return
        for fd in previous.keys() | events_of_fd.keys():
            owners = self._owners.setdefault(fd, {})
            if fd in events_of_fd:
                owners[place] = events_of_fd[fd]
            else:
                del owners[place]
            if owners:
                self._poller.register(fd, reduce(operator.or_, owners.values()))
            else:
                del self._owners[fd]
                self._poller.unregister(fd)
