"""What a sender and a receiver have in common: a scheme, a model, a context, and how they are copied and forked."""

from __future__ import annotations

import abc
import multiprocessing.context
import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.engine.services import SchemeServices
from weightsync.errors import ConfigurationError
from weightsync.protocol._tables import State
from weightsync.transports.process import forget_after_fork
from weightsync.weights.context import held


class Side(abc.ABC):
    """One side of the protocol.

    A pickled, copied or deep-copied side is `uninitialized`: it carries its configuration, owes nothing and is owed
    nothing; pipe ends travel only while multiprocessing spawns a process. In a forked child every inherited side
    counts as a copy.

    Args:
        scheme: the scheme that wires it.
    """

    _driver: SenderDriver | ReceiverDriver

    def __init__(self, scheme: SchemeServices) -> None:
        self._scheme = scheme
        self._model_id = "policy"
        self._start_over()

    def _start_over(self) -> None:
        self._context: Callable[[], Any] = held(None)
        self._begin()
        forget_after_fork(self)

    @abc.abstractmethod
    def _begin(self) -> None:
        """Become `uninitialized`, with nothing but the scheme and the model's id."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close for good."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Close for good, since ``error`` was raised: what `with` does when an exception leaves its block."""

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        """Say where models are found (held weakly), and which one is meant.

        Raises:
            StateError: another model's id is given after the links were laid.
        """
        if model_id is not None and model_id != self._model_id:
            if self.state is not State.UNINITIALIZED:
                raise self._driver.refused("set_context", f"the links are laid for model {self._model_id!r} already.")
            self._model_id = self._driver.model_id = model_id
        self._context = held(context)

    _set_context = set_context

    @property
    def state(self) -> State:
        """One of the five states."""
        return self._driver.machine.state

    @property
    def model_id(self) -> str:
        """The name of the model, the same on both sides."""
        return self._model_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_clean(error):
            self.close()
        else:
            self.fail(error)

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self._scheme, "model_id": self._model_id, "own": self._travelling()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._scheme = state["scheme"]
        self._model_id = state["model_id"]
        self._start_over()
        self._arrived(state["own"])

    @abc.abstractmethod
    def _travelling(self) -> Any:
        """What else a copy carries."""

    @abc.abstractmethod
    def _arrived(self, own: Any) -> None:
        """Take in what `_travelling` gave."""

    def forget(self) -> None:
        """Become a copy: called in a forked child, which says no Bye and closes nothing of its parent's."""
        self._start_over()


def is_clean(error: BaseException) -> bool:
    """Whether an exception ends a program or a generator as it should: nothing failed."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def pipes_travel() -> bool:
    """Whether a process is being spawned just now: a copied connection would share its descriptor otherwise."""
    return multiprocessing.context.get_spawning_popen() is not None


def require_worker_id(worker_id: Any, argument: str = "worker_id") -> int:
    """The worker's id as an int: numpy's are taken too.

    Args:
        worker_id: what was given.
        argument: as what it was given.

    Raises:
        ConfigurationError: it is not an int of 0 or more.
    """
    number = _whole(worker_id)
    if number is None:
        raise ConfigurationError(
            f"{argument}= is {worker_id!r}: a worker's id is an int of 0 or more. Nothing has changed."
        )
    return number


def require_whole(value: Any, argument: str, what: str) -> int:
    """The value as an int of 0 or more: numpy's are taken too.

    Raises:
        ConfigurationError: it is none.
    """
    number = _whole(value)
    if number is None:
        raise ConfigurationError(f"{argument}= is {value!r}: give {what}, an int of 0 or more. Nothing has changed.")
    return number


def expected_number(value: Any) -> int | None:
    """What was given as ``expected_workers``; None: nothing.

    Raises:
        ConfigurationError: it is no number of workers.
    """
    return None if value is None else require_whole(value, "expected_workers", "the number of workers")


def _whole(value: Any) -> int | None:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return number if number >= 0 else None


def require_name(value: Any, argument: str) -> str:
    """The value, if it is a str that is not empty.

    Raises:
        ConfigurationError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise ConfigurationError(
            f"{argument}= is {value!r}: give the model's name, a str, the same on both sides. Nothing has changed."
        )
    return value
