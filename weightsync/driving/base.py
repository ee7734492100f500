"""What both drivers share: they take an event as one step of the pure half, and execute its effects in order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from weightsync._tables import State
from weightsync.driving.adapters import waited
from weightsync.errors import StateError
from weightsync.layout import Layout
from weightsync.machine import Input, RoleMachine
from weightsync.protocol.steps import Data, Effect, Step
from weightsync.refusals import method_of, refusal
from weightsync.transports.base import Link, Waker
from weightsync.transports.liveness import own_host

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
