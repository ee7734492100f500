"""Which thread is in a method of a group: others are refused meanwhile, and may only close the group."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from weightsync.clock import Deadline
from weightsync.errors import StateError, WeightSyncError
from weightsync.group.advice import refusal
from weightsync.protocol._tables import State
from weightsync.transports.base import SLICE

#: Seconds that `Calls.end_others` waits at most: a call notices within a poll that its group is closed.
_LEAVE_SECONDS: Final = 2 * SLICE


class ClosedMeanwhile(Exception):
    """The group was closed while a call of another method was under way. That call raises StateError."""


class Call:
    """A call of a method, by this thread.

    Args:
        asked: the method.
    """

    def __init__(self, asked: str) -> None:
        self.asked = asked
        self.thread = threading.current_thread()
        self.over = threading.Event()
        #: The other thread that has closed the group meanwhile.
        self.closed_by: threading.Thread | None = None


class Calls:
    """The calls of one group's methods that are under way."""

    def __init__(self) -> None:
        #: In the order in which they began. Those of one thread are nested: a signal handler has made the later ones.
        self.under_way: dict[Call, None] = {}
        #: Held by the thread that closes the group.
        self.closing = threading.RLock()

    def end_others(self) -> None:
        """Wait until other threads have left, but not for long. The group's state is CLOSED, which they notice."""
        deadline, own = Deadline(_LEAVE_SECONDS), threading.current_thread()
        others = [call for call in list(self.under_way) if call.thread is not own]
        for call in others:
            call.closed_by = own
        for call in others:
            call.over.wait(deadline.remaining)


class Group(Protocol):
    """What uses `in_one_thread`."""

    _calls: Calls
    _state: State


_G = TypeVar("_G", bound=Group)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate[_G, _P], _R]


def in_one_thread(method_name: str) -> Callable[[_Method[_G, _P, _R]], _Method[_G, _P, _R]]:
    """Decorate a method of a group that only one thread may be in. `method_name` is for the user.

    It raises StateError: another thread is in such a method; or has closed the group meanwhile, or a signal handler
    has.
    """

    def decorate(method: _Method[_G, _P, _R]) -> _Method[_G, _P, _R]:
        @functools.wraps(method)
        def call(group: _G, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            this_call, calls = Call(method_name), group._calls
            try:
                calls.under_way[this_call] = None
                first, *_ = tuple(calls.under_way)  # a copy: another thread may change it meanwhile
                if first.thread is not this_call.thread:
                    raise _taken(group, method_name, first)
                return method(group, *args, **kwargs)
            except ClosedMeanwhile:
                raise refusal(State.CLOSED, method_name) from None
            except Exception as error:
                if this_call.closed_by is None or isinstance(error, WeightSyncError):
                    raise
                raise refusal(State.CLOSED, method_name) from error  # it met something that was released
            finally:
                # One call: what a signal handler raises cannot come before it.
                calls.under_way.pop(this_call, None)
                this_call.over.set()

        return call

    return decorate


def _taken(group: Group, method_name: str, other_call: Call) -> StateError:
    hint = (
        f"thread {other_call.thread.name!r} is in {other_call.asked}() of this group, and only one thread at a time "
        "may use a group. Make both calls in the same thread. close() may be called in any."
    )
    return StateError("worker group", group._state.value, method_name, ("close",), hint)
