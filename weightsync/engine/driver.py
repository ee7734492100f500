"""What both drivers share: each event is one step of the pure half, and its effects are executed in order.

Calls of links are wrapped: an adapter that raises loses its own link and nothing else. `Backlog` limits what a sender
writes to a link, a `Lane` is one of its open links, and `Hearing` records when each worker was last heard from.
"""

from __future__ import annotations

import logging
import signal
import threading

# `signal.getsignal` converts each number to an enum, which would be most of the cost of a shield.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from msgspec import Struct, field

from weightsync.clock import Stopwatch, monotonic
from weightsync.errors import ProtocolError, StateError, TransportError
from weightsync.protocol._tables import Delivery, State
from weightsync.protocol.machine import Data, Effect, Input, RoleMachine, Step, method_of, refusal
from weightsync.protocol.messages import MAX_UNANSWERED, Hello
from weightsync.transports.base import (
    Link,
    Outlet,
    Received,
    Remarks,
    SharesMemory,
    Steady,
    TakesParts,
    WaitFailed,
    Waits,
    Waker,
)
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import BlockingLink
from weightsync.transports.process import is_stopped, own_host
from weightsync.transports.wakeup import AwaitedProcess
from weightsync.weights.layout import Layout

logger = logging.getLogger("weightsync")


class Backlog:
    """The unanswered versions on one link, and the newest one that waits behind them.

    At most `MAX_UNANSWERED` are sent and unanswered: a worker that does not read costs the memory of no more versions.

    A waiting version that is superseded is never sent. It was abandoned before the newer one was dispatched, so no
    answer for it is awaited.
    """

    def __init__(self) -> None:
        self._unanswered: set[int] = set()
        self._waiting = 0

    @property
    def waits(self) -> bool:
        """Whether a version waits here."""
        return bool(self._waiting)

    @property
    def empty(self) -> bool:
        """Whether every version that was sent is answered."""
        return not self._unanswered

    def admit(self, version: int) -> bool:
        """Whether a version may be sent now; otherwise it waits, and replaces an older one that waits."""
        if len(self._unanswered) >= MAX_UNANSWERED:
            self._waiting = version
            return False
        self._unanswered.add(version)
        return True

    def answered(self, version: int) -> int:
        """Take the answer to a version, and thus to all older ones. Returns the version to be sent now, or 0."""
        for unanswered in tuple(self._unanswered):
            if unanswered <= version:
                self._unanswered.discard(unanswered)
        if len(self._unanswered) >= MAX_UNANSWERED:
            return 0
        waiting, self._waiting = self._waiting, 0
        return waiting


_LOSSY: Final = frozenset(delivery for delivery in Delivery if delivery.loses)
_IN_ORDER: Final = frozenset(delivery for delivery in Delivery if not (delivery.reorders or delivery.loses))


def _maps_nothing(payload: Buffer, nbytes: int) -> bool:  # noqa: ARG001 - whatever it is
    return False


class Lane:
    """One open link of a sender, and what has gone over it.

    Args:
        process: the worker's process, until it has started; None if it is not awaited.
    """

    __slots__ = (
        *("awaited", "backlog", "blocks", "link", "loses", "orders"),
        *("outlet", "parts", "shares", "known_layout", "unread", "watched", "worker"),
    )

    def __init__(self, worker: int, link: Link, process: AwaitedProcess | None) -> None:
        self.worker = worker
        self.link = link
        self.awaited = process
        #: The process id and the start of the worker's process; None: it is not known, or runs on another host.
        self.watched: tuple[int, int] | None = None
        self.backlog = Backlog()
        #: Messages that were read, but not handled yet.
        self.unread: deque[Received] = deque()
        #: The digest of the layout that the worker knows; empty if it knows none.
        self.known_layout = b""
        #: Whether the worker maps a payload: see `SharesMemory.shares`.
        self.shares: Callable[[Buffer, int], bool] = link.shares if isinstance(link, SharesMemory) else _maps_nothing
        #: The link, if it can carry payloads in parts.
        self.parts: TakesParts | None = link if isinstance(link, TakesParts) else None
        #: The link's queue of unwritten messages, to see if it is empty; None: only `Link.flush` can tell.
        self.outlet: Outlet | None = link.outlet if isinstance(link, Steady) else None
        #: Whether a send over the link blocks until the worker has answered.
        self.blocks = isinstance(link, BlockingLink)
        self.orders = link.delivery in _IN_ORDER
        # Where answers may be lost, a full backlog might never empty.
        self.loses = link.delivery in _LOSSY

    def remark(self) -> str:
        """Why the worker does not answer although nothing has failed; empty if it is not known."""
        if self.awaited is not None and self.awaited.identity is None:
            return "its process was not started: call start() on it"
        if self.watched is not None and is_stopped(*self.watched):
            return f"its process {self.watched[0]} is stopped, by SIGSTOP or a debugger"
        return self.link.remark if isinstance(self.link, Remarks) else ""


class Hearing:
    """When a sender last heard from each worker, in seconds of the clock."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        #: When something first came over each open link.
        self.first: dict[int, float] = {}

    def heard(self, worker: int, link: int) -> None:
        """A message of a worker has just arrived over a link."""
        now = self._last[worker] = monotonic()
        if link not in self.first:
            self.first[link] = now

    def forget(self, worker: int) -> None:
        """A worker has been removed."""
        self._last.pop(worker, None)

    def silent_for(self, worker: int) -> float | None:
        """Seconds since a worker was last heard from, over any link; None if it never was."""
        last = self._last.get(worker)
        return None if last is None else monotonic() - last

    def connected_after(self, link: int, since: Stopwatch) -> float:
        """Seconds from ``since`` to the first message over a link, or to now if there has been none."""
        first = self.first.get(link)
        return since.seconds if first is None else max(0.0, first - since.started)

    def closed(self, link: int) -> None:
        """A link is closed."""
        self.first.pop(link, None)


class AdapterFault(TransportError):
    """An adapter raised an error that the contract of links forbids: the link is given up after a last message."""


def read(link: Link) -> list[Received]:
    """The messages that have arrived: see `Link.receive`.

    Raises:
        TransportError, ProtocolError: as for `Link.receive`.
        AdapterFault: the link raised any other exception.
    """
    try:
        return link.receive()
    except (TransportError, ProtocolError):
        raise
    except Exception as error:
        raise _adapter_failed(link, error) from error


def flush(link: Link) -> bool:
    """Write what is waiting to be written: see `Link.flush`.

    Raises:
        TransportError: as for `Link.flush`.
        AdapterFault: the link raised any other exception.
    """
    try:
        return link.flush()
    except TransportError:
        raise
    except Exception as error:
        raise _adapter_failed(link, error) from error


def watch(link: Link, hello: Hello) -> tuple[int, int] | None:
    """Watch the process that sent ``hello``, if it runs on this host: see `Link.watch`.

    Returns:
        Its process id and start; None: it runs on another host.

    Raises:
        TransportError: it cannot be watched.
        AdapterFault: the link raised any other exception.
    """
    if hello.host != own_host():
        return None
    try:
        link.watch(hello.pid, hello.started)
    except TransportError:
        raise
    except Exception as error:
        raise _adapter_failed(link, error) from error
    return hello.pid, hello.started


def close(link: Link) -> None:
    """Close a link, whatever its adapter raises: see `Link.close`."""
    try:
        link.close()
    except Exception as error:  # noqa: BLE001 - this link is finished; the others continue
        _adapter_failed(link, error)


def handler_failed(link: Link, error: Exception) -> str:
    """Log an unexpected error from handling a link's message. Returns the reason for which the link is lost."""
    logger.error("a message over the link to %s could not be handled", link.peer, exc_info=error)
    return f"a message from {link.peer} could not be handled: {error!r}"


def _adapter_failed(link: Link, error: Exception) -> AdapterFault:
    logger.error("the adapter of the link to %s failed", link.peer, exc_info=error)
    return AdapterFault(f"the adapter of the link to {link.peer} failed: {error!r}")


Event = TypeVar("Event")


class Driver(ABC, Generic[Input, Data, Event, Effect]):
    """One machine, its data, and the effects that are not executed yet.

    Raises TransportError: no file descriptor is left.
    """

    def __init__(
        self,
        model_id: str,
        machine: RoleMachine[Input],
        data: Data,
        pure_step: Callable[[State, Data, Event], Step[Input, Data, Effect]],
    ) -> None:
        self.model_id = model_id
        self.lock = threading.RLock()
        self.machine: RoleMachine[Input] = machine
        self.data = data
        self.waker = Waker()
        own_host()  # cached now: later, when a link needs it, there may be no descriptor left to read it
        #: The layout of the newest version, or of the model; None: neither is known yet.
        self.layout: Layout | None = None
        self._pure_step: Callable[[State, Data, Event], Step[Input, Data, Effect]] = pure_step
        self._todo: deque[Effect] = deque()
        self._last_link = 0
        #: The links that are open. Replaced, never changed in place.
        self._open: tuple[Link, ...] = ()
        #: All `Wait` objects that were made here, one per waiting thread; and those of them that are free for reuse.
        self._waits: list[Waits[Link]] = []
        self._idle: list[Waits[Link]] = []

    def take(self, event: Event) -> Step[Input, Data, Effect]:
        """Take an event, and execute the effects that follow from it.

        Raises:
            StateError, ConfigurationError, WorkerLostError, ProtocolError: the pure half refused it; nothing has
                changed.
        """
        with self.lock:
            step = self._step(event)
            if self._todo:
                self._finish()
            else:
                self._forget()
            return step

    def watch_steps(self, on_step: Callable[[State, Data, Event, Step[Input, Data, Effect]], None]) -> None:
        """Call ``on_step`` for each step from now on, before the step's effects are executed.

        Args:
            on_step: called under the lock with the state and the data before, the event, and the step. It never raises.
        """
        pure_step = self._pure_step

        def watched(state: State, data: Data, event: Event) -> Step[Input, Data, Effect]:
            step = pure_step(state, data, event)
            on_step(state, data, event, step)
            return step

        with self.lock:
            self._pure_step = watched

    def require(self, input: Input, method: str | None = None) -> None:
        """Check that the machine has a row for an input in its present state. Raises StateError: there is none."""
        if (self.machine.state, input) not in self.machine.rows:
            raise self.refused(method or method_of(input))

    def require_open(self, method: str) -> None:
        """Check that the machine is not closed. Raises StateError: it is closed."""
        if self.machine.state is State.CLOSED:
            raise self.refused(method)

    def refused(self, method: str, hint: str = "") -> StateError:
        """The error for a call that is not allowed now.

        Args:
            hint: what prevents it, and what to do; empty: the hint that the data gives.
        """
        machine = self.machine
        advice = hint or self._hint(method)
        return refusal(machine.rows, machine.state, machine.inputs, method, hint=advice, steps=machine.steps)

    @abstractmethod
    def _hint(self, method: str) -> str:
        """Why a method is not allowed now, and what its caller can do; empty if nothing more is known."""

    def wait(self, timeout: float | None, since: int) -> list[Link]:
        """Block until a link can be read or written, the waker fires, or time is up. A link that fails is lost.

        Args:
            timeout: seconds; None forever.

        Returns:
            The links that can be read or written now.
        """
        try:
            waits = self._idle.pop()
        except IndexError:
            waits = Waits(self.waker)
            self._waits.append(waits)
        links = self._open
        try:
            return waits.wait(links, timeout, since)
        except WaitFailed as failed:
            link, cause = links[failed.which], failed.__cause__
            assert isinstance(cause, Exception)
            with self.lock:
                self._lose_link(link, str(_adapter_failed(link, cause)))
                self._finish()
            return []
        finally:
            self._idle.append(waits)

    def _waitables_changed(self, link: Link) -> None:
        """Have the next wait ask a link for its descriptors (`Link.waitables`) again: they may have changed."""
        for waits in self._waits:
            waits.changed.add(id(link))

    def links(self) -> list[Link]:
        """The links that are open."""
        return list(self._open)

    @abstractmethod
    def _lose_link(self, link: Link, reason: str) -> None:
        """Take the loss of a link, if it is still open."""

    def _step(self, event: Event) -> Step[Input, Data, Effect]:
        """Move the machine by one step: the only place that does. `_finish` executes the effects."""
        try:
            step = self._pure_step(self.machine.state, self.data, event)
        except StateError as error:
            raise self.refused(error.asked) from None
        self.data = step.data
        self._todo.extend(step.effects)
        if step.input is not None:
            self.machine.fire(step.input)
        return step

    def _finish(self) -> None:
        while self._todo:
            self._execute(self._todo.popleft())
        self._forget()

    @abstractmethod
    def _execute(self, effect: Effect) -> None:
        """Execute one effect. It may take further steps, whose effects are queued behind the others."""

    @abstractmethod
    def _forget(self) -> None:
        """Release what is no longer needed, once all effects are executed."""


#: Signals whose Python handlers may raise at any point.
DEFERRED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


class Shield(Struct, eq=False):
    """Records signals instead of handling them; `deliver` and the end of the block call their handlers.

    Python runs signal handlers in the main thread only, so in any other thread this does nothing. Signals that
    have no Python handler (ignored, or the default action) act as usual.

    A handler in C that was set over a Python one, as `faulthandler.register` does, is lost for good: setting a Python
    handler replaces it, and Python can neither read it nor set it again.
    """

    #: Called when a signal is recorded.
    wake: Callable[[], None]
    #: The signals that came and were not delivered yet.
    recorded: list[tuple[int, FrameType | None]] = field(default_factory=list)
    _previous: dict[int, Callable[[int, FrameType | None], Any]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        try:
            for signum in DEFERRED:
                handler = getsignal(signum)
                if callable(handler):
                    self._previous[signum] = handler
                    set_handler(signum, self._record)
        except BaseException as error:
            if not isinstance(error, ValueError) or threading.current_thread() is threading.main_thread():
                self.__exit__(None, None, None)
                raise
            self._previous.clear()  # another thread than the main one
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for signum in tuple(self._previous):
                set_handler(signum, self._previous[signum])
                del self._previous[signum]
            while self.recorded:
                signum, frame = self.recorded.pop(0)
                handler = getsignal(signum)
                if callable(handler):
                    handler(signum, frame)
                else:  # an earlier handler has restored the default action
                    signal.raise_signal(signum)
        except BaseException:  # a handler has raised: restore the others all the same
            self.__exit__(None, None, None)
            raise

    def deliver(self) -> None:
        """Leave the block for a moment if signals were recorded, so that handlers may set others for later ones.

        What a handler raises is raised here.
        """
        if self.recorded:
            self.__exit__(None, None, None)
            self.__enter__()

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.recorded.append((signum, frame))
        self.wake()
