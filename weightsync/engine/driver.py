"""What both drivers share: an event is one step of the pure half, and its effects are executed in order.

Links are wrapped: whatever an adapter raises ends its own link and nothing else. `Hearing` says when each worker was
last heard from.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from weightsync.clock import Stopwatch
from weightsync.errors import ProtocolError, StateError, TransportError
from weightsync.protocol._tables import State
from weightsync.protocol.machine import Data, Effect, Input, RoleMachine, Step, method_of, refusal
from weightsync.protocol.messages import Hello
from weightsync.transports.base import Link, Received, WaitFailed, Waker, wait
from weightsync.transports.process import own_host
from weightsync.weights.layout import Layout


class Hearing:
    """What a sender remembers of when its workers spoke."""

    def __init__(self) -> None:
        self._last: dict[int, Stopwatch] = {}
        self._first: dict[int, Stopwatch] = {}

    def heard(self, worker: int, link: int) -> None:
        """A worker has just said something over a link."""
        now = self._last[worker] = Stopwatch()
        self._first.setdefault(link, now)

    def forget(self, worker: int) -> None:
        """A worker has left the roll."""
        self._last.pop(worker, None)

    def silent_for(self, worker: int) -> float | None:
        """Seconds since a worker was last heard from, over whichever link; None: it never was."""
        last = self._last.get(worker)
        return None if last is None else last.seconds

    def connected_after(self, link: int, since: Stopwatch) -> float:
        """Seconds from ``since`` until the first message over a link; until now, if there has been none."""
        first = self._first.get(link)
        return since.seconds if first is None else max(0.0, since.seconds - first.seconds)

    def closed(self, link: int) -> None:
        """A link is closed."""
        self._first.pop(link, None)


logger = logging.getLogger("weightsync")


class AdapterFault(TransportError):
    """An adapter raised what its contract does not name: its link is given up, but may still carry a last word."""


def read(link: Link) -> list[Received]:
    """What has arrived: see `Link.receive`.

    Raises:
        TransportError, ProtocolError: as `Link.receive`.
        AdapterFault: it raised anything else.
    """
    try:
        return link.receive()
    except (TransportError, ProtocolError):
        raise
    except Exception as error:
        raise _fault(link, error) from error


def flush(link: Link) -> bool:
    """Write what waits to be written: see `Link.flush`.

    Raises:
        TransportError: as `Link.flush`.
        AdapterFault: it raised anything else.
    """
    try:
        return link.flush()
    except TransportError:
        raise
    except Exception as error:
        raise _fault(link, error) from error


def watch(link: Link, hello: Hello) -> None:
    """Notice the death of the process that said ``hello``, if it runs on this host: see `Link.watch`.

    Raises:
        TransportError: it cannot be watched.
        AdapterFault: it raised anything else.
    """
    if hello.host != own_host():
        return
    try:
        link.watch(hello.pid, hello.started)
    except TransportError:
        raise
    except Exception as error:
        raise _fault(link, error) from error


def close(link: Link) -> None:
    """Give a link up, whatever its adapter raises: see `Link.close`."""
    try:
        link.close()
    except Exception as error:  # noqa: BLE001 - nothing more is asked of this link; the others go on
        _fault(link, error)


def waited(waker: Waker, links: Sequence[Link], timeout: float | None, since: int) -> tuple[Link, str] | None:
    """Wait for links: see `weightsync.transports.base.wait`; the one whose adapter failed, if any, and the reason."""
    try:
        wait(waker, links, timeout, since)
    except WaitFailed as failed:
        link, cause = links[failed.which], failed.__cause__
        assert isinstance(cause, Exception)
        return link, str(_fault(link, cause))
    return None


def mishandled(link: Link, error: Exception) -> str:
    """Log what handling a message of that link raised, against all expectation; the reason for which it is lost."""
    logger.error("a message over the link to %s could not be handled", link.peer, exc_info=error)
    return f"a message from {link.peer} could not be handled: {error!r}"


def _fault(link: Link, error: Exception) -> AdapterFault:
    logger.error("the adapter of the link to %s failed", link.peer, exc_info=error)
    return AdapterFault(f"the adapter of the link to {link.peer} failed: {error!r}")


Event = TypeVar("Event")


class Driver(ABC, Generic[Input, Data, Event, Effect]):
    """One machine, its data, and the effects that are still to be executed.

    Args:
        model_id: the model whose weights travel.
        machine: where it stands.
        data: what its pure half knows.
        pure_step: the pure half.

    Raises:
        TransportError: no file descriptor is left.
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
        own_host()  # read once, before a link needs it: later there may be no descriptor left to read it with
        #: The layout of the newest version, or the model's; None: neither is known yet.
        self.layout: Layout | None = None
        self._pure_step: Callable[[State, Data, Event], Step[Input, Data, Effect]] = pure_step
        self._todo: deque[Effect] = deque()
        self._last_link = 0

    def take(self, event: Event) -> Step[Input, Data, Effect]:
        """Let an event happen, and execute all that follows from it.

        Raises:
            StateError, ConfigurationError, WorkerLostError, ProtocolError: what the pure half raises; nothing has
                changed.
        """
        with self.lock:
            step = self._step(event)
            self._finish()
            return step

    def require(self, input: Input, asked: str | None = None) -> None:
        """Check that the machine has a row for an input.

        Args:
            input: what is about to happen.
            asked: the public method that asks for it, where that is not the input's own.

        Raises:
            StateError: it has none.
        """
        if (self.machine.state, input) not in self.machine.rows:
            raise self.refused(asked or method_of(input))

    def require_open(self, asked: str) -> None:
        """Check that the machine is not closed.

        Args:
            asked: the public method that needs that.

        Raises:
            StateError: it is closed.
        """
        if self.machine.state is State.CLOSED:
            raise self.refused(asked)

    def refused(self, asked: str, hint: str = "") -> StateError:
        """The error for a call that cannot be taken now.

        Args:
            asked: the public method.
            hint: what stands in the way, and what to do about it; else what is known of that here.
        """
        machine = self.machine
        told = hint or self._hint(asked)
        return refusal(machine.rows, machine.state, machine.inputs, asked, hint=told, steps=machine.steps)

    @abstractmethod
    def _hint(self, asked: str) -> str:
        """What stands in the way of a method just now, and what its caller can do; empty: nothing more is known."""

    def wait(self, timeout: float | None, since: int) -> None:
        """Block until a link can be read or written, the waker fires, or time is up; a link that fails is lost.

        Args:
            timeout: seconds; None for ever.
            since: the waker's `fired` as it was before the caller looked at what it waits for.
        """
        failed = waited(self.waker, self.links(), timeout, since)
        if failed is not None:
            with self.lock:
                self._give_up(*failed)
                self._finish()

    @abstractmethod
    def links(self) -> list[Link]:
        """The links that are open."""

    @abstractmethod
    def _give_up(self, link: Link, reason: str) -> None:
        """A link has failed, if it is still open."""

    def _step(self, event: Event) -> Step[Input, Data, Effect]:
        """The one place where a machine moves. Its effects are executed by the next `_finish`."""
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
        """Do what a step asks for. It may take further steps, whose effects come behind those that wait."""

    @abstractmethod
    def _forget(self) -> None:
        """Let go of what nothing needs any more, now that no effect waits."""
