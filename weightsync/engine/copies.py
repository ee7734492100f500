"""`Participant`, a sender or a receiver, and `Configured`, a scheme: how each is closed, copied, pickled and forked."""

from __future__ import annotations

import abc
import multiprocessing.context
import sys
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Final, Protocol, Self
from weakref import WeakSet

from weightsync.engine.context import Context
from weightsync.engine.packer import Packer, SendingServices
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol._tables import State
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.process import PerProcess, forget_after_fork
from weightsync.weights.selection import Selection
from weightsync.weights.target import Mode
from weightsync.weights.threads import Keeping


class Closing(abc.ABC):
    """Closes at the end of its `with` block. If an exception leaves the block, the other ends are notified of it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close for good."""

    @abc.abstractmethod
    def _close_on_error(self, error: BaseException) -> None:
        """Close for good because ``error`` was raised."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or is_clean(error):
            self.close()
        else:
            self._close_on_error(error)


class _ClosedAtExit(PerProcess):
    """What is closed when the program ends, before `multiprocessing` waits for the processes that it has started."""

    def _begin(self) -> None:
        self._open: WeakSet[Closing] = WeakSet()
        self._at_exit: Finalize | None = None

    def add(self, participant: Closing) -> None:
        """Close a participant when the program ends, unless it has been freed by then."""
        with self._lock:
            self._open.add(participant)
            if self._at_exit is None:
                self._at_exit = Finalize(None, self.end, exitpriority=_EXIT_PRIORITY)

    def end(self) -> None:
        """Close all; with the error that ends the program, if one does."""
        names = vars(sys)
        error = None if "ps1" in names else names.get("last_value")  # at a prompt, errors end nothing
        for one in list(self._open):
            one.__exit__(None if error is None else type(error), error, None)


#: Before the finalizers of multiprocessing's own objects.
_EXIT_PRIORITY: Final = 100
_closed_at_exit: Final = _ClosedAtExit()


def close_at_exit(participant: Closing) -> None:
    """Close a sender when the program ends, so that its workers end too: the program may be waiting for them."""
    _closed_at_exit.add(participant)


class Configured(Closing):
    """A scheme or a transport class. Copied, deep-copied, pickled or forked, it keeps its configuration only."""

    #: Attributes that a copy does not get; `_reset` sets them again.
    _not_copied: tuple[str, ...] = ()

    @abc.abstractmethod
    def _reset(self) -> None:
        """Become uninitialized, with the configuration only."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._not_copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def forget(self) -> None:
        """Become a copy: called in a forked child."""
        self._reset()


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
        self._threads = Keeping(self)
        self._reset()
        forget_after_fork(self)

    @abc.abstractmethod
    def _reset(self) -> None:
        """Become `uninitialized`, with only the scheme and the model's id."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """Close for good because ``error`` was raised: what `with` does when an exception leaves its block."""

    def _close_on_error(self, error: BaseException) -> None:
        self.fail(error)

    def require_open(self, method: str) -> None:
        """Raises StateError: it is closed. ``method`` is the method that the user called."""
        self._driver.require_open(method)

    def set_context(self, context: Any, model_id: str | None = None) -> None:
        """Set the object on which models are found, and which model is meant.

        Args:
            context: the object; it is referenced weakly.
            model_id: the model's id; None: unchanged.

        Raises:
            StateError: another model's id is given after the links were created. Nothing has changed.
        """
        if model_id is not None and model_id != self._model_id:
            if self.state is not State.UNINITIALIZED:
                raise self._driver.refused("set_context", f"the links of model {self._model_id!r} exist already.")
            self._model_id = self._driver.model_id = model_id
        self._context.set(context)

    _set_context = set_context

    def __repr__(self) -> str:
        version = f"version {self.version}" if self.version else "no version yet"
        return f"<{type(self).__name__} of {self._model_id!r}: {self.state.value}, {version}>"

    @property
    @abc.abstractmethod
    def version(self) -> int | None:
        """The newest version that was sent, or the one that is served; 0 or None: there is none."""

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


class SchemeServices(SendingServices, Protocol):
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

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link over ``endpoint`` (a pipe's end, or a context that has one) to ``peer``, a name for messages."""

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Call ``accept`` with each link over which a sender reaches us at ``endpoint``, including the first.

        It may be called at once, and later from any thread. Call the returned function to stop listening.
        """

    def user_messages(self, endpoint: Any) -> UserMessages:
        """The user's own messages on the pipe behind ``endpoint``."""

    def transport_of(self, receiver: Any, endpoint: Any) -> Any:
        """One of TorchRL's transport classes over ``receiver``, which listens at ``endpoint``."""
