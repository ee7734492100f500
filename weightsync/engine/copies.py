"""`Participant`: what a sender and a receiver share, in particular how they are copied, pickled and forked."""

from __future__ import annotations

import abc
import enum
import multiprocessing.context
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

from weightsync.clock import MAX_FENCE
from weightsync.engine.packer import Packer, Sources
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.errors import ConfigurationError
from weightsync.protocol._tables import State
from weightsync.protocol.codec import MAX_NAME_NBYTES
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.process import forget_after_fork
from weightsync.weights.selection import Selection
from weightsync.weights.target import Mode


class Context:
    """The user's object on which models are found. It is referenced weakly."""

    def __init__(self) -> None:
        self._held = held(None)

    def set(self, context: Any) -> None:
        """Use another object from now on, or none."""
        self._held = held(context)

    def __call__(self) -> Any:
        """The object, or None. Raises ConfigurationError: it was garbage-collected."""
        return self._held()


class Closing(abc.ABC):
    """Closes at the end of its `with` block. If an exception leaves the block, the other ends are notified of it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close for good."""

    @abc.abstractmethod
    def _close_after(self, error: BaseException) -> None:
        """Close for good because ``error`` was raised."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_clean(error):
            self.close()
        else:
            self._close_after(error)


class Configured(Closing):
    """A scheme or a transport class. Copied, deep-copied, pickled or forked, it keeps its configuration only."""

    #: Attributes that a copy does not get; `_begin` sets them again.
    _not_copied: tuple[str, ...] = ()

    @abc.abstractmethod
    def _begin(self) -> None:
        """Become uninitialized, with the configuration only."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def forget(self) -> None:
        """Become a copy: called in a forked child."""
        self._begin()


class Participant(Closing):
    """A sender or a receiver.

    Copied, deep-copied or pickled, it becomes `uninitialized`: a copy carries the configuration, and neither owes nor
    awaits an answer. Pipe ends are carried only while multiprocessing spawns a process. In a forked child every
    inherited participant counts as a copy.
    """

    _driver: SenderDriver | ReceiverDriver

    def __init__(self, scheme: SchemeServices) -> None:
        self._scheme = scheme
        self._model_id = "policy"
        self._start_over()

    def _start_over(self) -> None:
        self._context = Context()
        self._begin()
        forget_after_fork(self)

    @abc.abstractmethod
    def _begin(self) -> None:
        """Become `uninitialized`, with only the scheme and the model's id."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Close for good because ``error`` was raised: what `with` does when an exception leaves its block."""

    def _close_after(self, error: BaseException) -> None:
        self.fail(error)

    def require_open(self, asked: str) -> None:
        """Raises StateError: it is closed. ``asked`` is the method that the user called."""
        self._driver.require_open(asked)

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        """Set the object on which models are found (referenced weakly), and which model is meant.

        Raises StateError: another model's id is given after the links were laid.
        """
        if model_id is not None and model_id != self._model_id:
            if self.state is not State.UNINITIALIZED:
                raise self._driver.refused("set_context", f"the links are laid for model {self._model_id!r} already.")
            self._model_id = self._driver.model_id = model_id
        self._context.set(context)

    _set_context = set_context

    @property
    def state(self) -> State:
        """One of the five states."""
        return self._driver.machine.state

    @property
    def model_id(self) -> str:
        """The name of the model, the same in the trainer and the worker."""
        return self._model_id

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self._scheme, "model_id": self._model_id, "carried": self._carried()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._scheme = state["scheme"]
        self._model_id = state["model_id"]
        self._start_over()
        self._restore(state["carried"])

    @abc.abstractmethod
    def _carried(self) -> Any:
        """What a copy carries besides the scheme and the model's id."""

    @abc.abstractmethod
    def _restore(self, carried: Any) -> None:
        """Restore what `_carried` returned, in the copy."""

    def forget(self) -> None:
        """Become a copy: called in a forked child, which sends no Bye and closes nothing of its parent's."""
        self._start_over()


def is_clean(error: BaseException) -> bool:
    """Whether an exception only ends a program or a generator: nothing failed."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def pipes_travel() -> bool:
    """Whether pipe ends may be carried: a process is being spawned now. Any other copy would share the descriptor."""
    return multiprocessing.context.get_spawning_popen() is not None


def require_worker_id(worker_id: Any, argument: str = "worker_id") -> int:
    """The worker's id as an int; numpy's integers are accepted.

    Raises ConfigurationError: it is not an int of 0 or more.
    """
    number = _whole(worker_id)
    if number is None:
        raise ConfigurationError(
            f"{argument}= is {worker_id!r}: a worker's id is an int of 0 or more. Nothing has changed."
        )
    return number


def worker_ids_of(worker_ids: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """The ids that a send's ``worker_ids`` names; None: all.

    Raises:
        ConfigurationError: one of them is no id.
    """
    if worker_ids is None:
        return None
    several = isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str | bytes)
    given: Iterable[Any] = worker_ids if several else (worker_ids,)  # type: ignore[assignment]
    return tuple(require_worker_id(worker_id, "worker_ids") for worker_id in given)


def require_whole(value: Any, argument: str, what: str) -> int:
    """The value as an int of 0 or more; numpy's integers are accepted.

    Raises ConfigurationError: it is no int of 0 or more.
    """
    number = _whole(value)
    if number is None:
        raise ConfigurationError(f"{argument}= is {value!r}: give {what}, an int of 0 or more. Nothing has changed.")
    return number


def require_fence(value: Any, what: str = "the incarnation to rise above") -> int:
    """The value as an incarnation that a new one can be above.

    Raises ConfigurationError: it is no int of 0 or more, or no incarnation is above it.
    """
    fence = require_whole(value, "fence", what)
    if fence > MAX_FENCE:
        raise ConfigurationError(
            f"fence= is {fence}: it is so large that no incarnation is above it. Nothing has changed."
        )
    return fence


def expected_number(value: Any) -> int | None:
    """The value of ``expected_workers`` as an int; None if none was given.

    Raises ConfigurationError: it is no number of workers.
    """
    return None if value is None else require_whole(value, "expected_workers", "the number of workers")


def _whole(value: Any) -> int | None:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return number if number >= 0 else None


def require_name(value: Any, argument: str) -> str:
    """The value, checked to be a str that a message can carry, not empty. Raises ConfigurationError: it is not."""
    if not isinstance(value, str) or not value:
        raise ConfigurationError(
            f"{argument}= is {value!r}: give the model's name, a str, the same in the trainer and the worker. "
            "Nothing has changed."
        )
    try:
        fits = len(value.encode()) <= MAX_NAME_NBYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ConfigurationError(
            f"{argument}= is {value[:40]!r}, of {len(value)} characters: give a name that UTF-8 encodes in at most "
            f"{MAX_NAME_NBYTES} bytes. Nothing has changed."
        )
    return value


class Missing(enum.Enum):
    """The value of an attribute that a context does not have."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING


def optional(context: Any, name: str) -> Any:
    """Return the context's attribute, or MISSING if it has none of that name."""
    try:
        return getattr(context, name)
    except AttributeError:
        return MISSING


def held(context: Any) -> Callable[[], Any]:
    """Return a function that returns the context, without keeping it alive.

    A context that does not support weak references is kept alive.

    Raises (the returned function):
        ConfigurationError: the context was garbage-collected.
    """
    if context is None:
        return lambda: None
    try:
        reference = weakref.ref(context)
    except TypeError:
        return lambda: context
    kind = type(context).__name__
    return lambda: _alive(reference(), kind)


def _alive(context: Any, kind: str) -> Any:
    if context is None:
        raise ConfigurationError(
            f"the context (a {kind}) was garbage-collected, because a scheme keeps only a weak reference to it. Keep "
            "it alive while weights are sent."
        )
    return context


class SchemeServices(Sources, Protocol):
    """A scheme, as its senders and receivers see it."""

    @property
    def apply_mode(self) -> Mode:
        """How arrived weights become live."""

    @property
    def applied_selection(self) -> Selection | None:
        """Which weights of a worker's model are received; None: all."""

    @property
    def packer(self) -> Packer:
        """A new packer, with the type of buffer that suits the scheme's links."""

    def lay_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over ``endpoint`` (a pipe's end, or a context that has one) to ``peer``, a name for messages."""

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Call ``accept`` with each link over which a sender reaches us at ``endpoint``, including the first.

        It may be called at once, and later from any thread. Call the returned function to stop listening.
        """

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``."""

    def transport_of(self, receiver: Any, endpoint: Any) -> Any:
        """One of TorchRL's transport classes over ``receiver``, which listens at ``endpoint``."""
