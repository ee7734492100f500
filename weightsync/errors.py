"""Every error of weightsync, as a tree.

    WeightSyncError(RuntimeError)
      StateError                         asked in the wrong state; nothing changed
      SyncError                          a send that did not reach everybody; carries .report
        AckTimeoutError(TimeoutError)    .pending; the update can still be waited for
        WorkerLostError(ConnectionError) .lost
        RefusedError                     .refused, with the workers' own tracebacks
      ModelBusyError(TimeoutError)       in a worker: the model was served all the time; nothing changed
      ConfigurationError(ValueError)     input missing or contradictory, no or unknown worker ids, an unsupported type
      ModelPathError(AttributeError)     .part that did not resolve
      MissingExtraError(ImportError)     .extra to install
      LayoutError(KeyError, ValueError)  .missing, .unexpected, .mismatched: names, shapes, dtypes that do not fit
      ProtocolError                      a peer broke the protocol, or speaks another version of it; .unread bytes
      TransportError(ConnectionError)    a link failed; a foreign exception is its __cause__
        AuthenticationError              a peer has another key, or none; nothing of it was believed
        SenderClosed                     in a worker: the trainer closed the link, in good order

Each can be pickled, since errors cross processes, and each message says what happened, to which worker and
version, and what to do next.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any


class WeightSyncError(RuntimeError):
    """The root of every error that weightsync raises."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(kind: type[WeightSyncError], state: dict[str, Any]) -> WeightSyncError:
    # An exception is made by the builtin that lays out its instances, which is not the first in its MRO.
    builtin: Any = kind
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    error: WeightSyncError = builtin.__new__(kind)
    error.__dict__.update(state)
    error.args = (state["message"],)
    return error


class StateError(WeightSyncError):
    """Asked in a state that does not allow it. Nothing has changed.

    Attributes:
        machine: who refused, "sender" or "receiver".
        state: the state it is in.
        asked: the method that was called.
        allowed: the methods that may be called now.
        steps: the last steps of the machine, oldest first: (input, state before, state after).
    """

    def __init__(
        self,
        machine: str,
        state: str,
        asked: str,
        allowed: Sequence[str],
        hint: str = "",
        *,
        steps: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        where = f"the {machine} is {state}"
        allows = f" and allows {', '.join(map(_call, allowed))}" if allowed else ""
        reason = f"{hint} Nothing has changed: {where}{allows}." if hint else f"{where}{allows}. Nothing has changed."
        super().__init__(f"{_call(asked)}: {reason}")
        self.machine = machine
        self.state = state
        self.asked = asked
        self.allowed = tuple(allowed)
        self.steps = tuple(steps)


def _call(method: str) -> str:
    return f"{method}()" if method.isidentifier() else method


class SyncError(WeightSyncError):
    """A send that did not reach everybody.

    Attributes:
        report: the `SyncReport`: what became of each worker.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class AckTimeoutError(SyncError, TimeoutError):
    """Workers had not answered by the deadline. The update stays outstanding and can be waited for again.

    Attributes:
        pending: ids of the workers that had not answered.
    """

    def __init__(self, message: str, report: Any = None, pending: Sequence[int] = ()) -> None:
        super().__init__(message, report)
        self.pending = tuple(pending)


class WorkerLostError(SyncError, ConnectionError):
    """Links were lost; what those workers serve is unknown until they rejoin.

    Attributes:
        lost: worker id to the reason.
        fence: the highest incarnation that a worker reported, if it was lost to a newer sender; else None.
    """

    def __init__(
        self,
        message: str,
        report: Any = None,
        lost: Mapping[int, str] | None = None,
        fence: int | None = None,
    ) -> None:
        super().__init__(message, report)
        self.lost = dict(lost or {})
        self.fence = fence


class RefusedError(SyncError):
    """Workers refused the update and still serve what they served.

    Attributes:
        refused: worker id to the reason, with the worker's own traceback where there is one.
    """

    def __init__(self, message: str, report: Any = None, refused: Mapping[int, str] | None = None) -> None:
        super().__init__(message, report)
        self.refused = dict(refused or {})


class ModelBusyError(WeightSyncError, TimeoutError):
    """The model was being served until time was up, so that nothing could be written into it. Nothing has changed."""


class ConfigurationError(WeightSyncError, ValueError):
    """An argument is missing, contradictory, unknown or of an unsupported type. Nothing has changed."""


class ModelPathError(WeightSyncError, AttributeError):
    """A model path such as ``"env.transform[0]"`` does not resolve.

    Attributes:
        path: the whole path.
        part: the part that did not resolve.
    """

    def __init__(self, message: str, path: str = "", part: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.part = part


class MissingExtraError(WeightSyncError, ImportError):
    """An optional package is not installed.

    Attributes:
        extra: the extra that brings it.
    """

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}': pip install 'weightsync[{extra}]'.")
        self.extra = extra


class LayoutError(WeightSyncError, KeyError, ValueError):
    """Names, shapes or dtypes do not fit. Nothing has changed.

    Attributes:
        missing: names that the destination has and the weights lack.
        unexpected: names that the weights have and the destination lacks.
        mismatched: name to how it differs, e.g. ``"shape (3,) where (4,) is wanted"``.
    """

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})


class ProtocolError(WeightSyncError):
    """A peer broke the protocol, or speaks another version of it. Its link is taken down.

    Attributes:
        unread: the bytes that could not be understood.
    """

    def __init__(self, message: str, unread: bytes = b"") -> None:
        super().__init__(message)
        self.unread = unread


class TransportError(WeightSyncError, ConnectionError):
    """A link failed. Where another library raised, its exception is the cause."""


class AuthenticationError(TransportError):
    """A peer has another key, or none, or what came over a link was changed on its way. Nothing of it was believed."""


class SenderClosed(TransportError):
    """In a worker: the sender closed its link in good order. A sender that crashed is a `TransportError` alone."""


def raw_pipe() -> None:
    """What our frames call if somebody unpickles them: see `weightsync.transports.pipe.framing`.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        "A frame of weightsync's was read from the raw pipe, and is lost to the link that it was for. While a scheme "
        "uses a pipe, read your own messages by receiver.pipe.recv() in a worker, and by sender.pipe(worker_id).recv() "
        "in the trainer. A process that reads before its scheme does is to call init_on_worker() first."
    )


def warn_renamed(former: str, name: str) -> None:
    """Warn whoever uses a public name by its former name."""
    warnings.warn(f"{former} is now {name}; the former name will be removed.", DeprecationWarning, stacklevel=3)
