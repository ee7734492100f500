"""Every error of weightsync, as a tree.

    WeightSyncError(RuntimeError)
      StateError                         the call is not allowed in this state; nothing changed
      SyncError                          some workers did not apply the update; carries .report
        AckTimeoutError(TimeoutError)    .pending; the update can still be waited for
        WorkerLostError(ConnectionError) .lost
        RefusedError                     .refused, with the workers' own tracebacks
      WorkerFailedError                  a worker of a group raised or died: .remote_traceback
      ResultTimeoutError(TimeoutError)   a group's workers gave no result in time
      StaleWeightsError                  in a worker of a group: its weights are too old for a step
      ModelBusyError(TimeoutError)       in a worker: the model was in use until the timeout; nothing changed
      PartlyLoadedError                  raised by your loader: the engine holds parts of two versions
      EngineError                        in an outcome's reason: an engine answered a call with an error; .status
      ConfigurationError(ValueError)     missing or contradictory arguments, unknown worker ids, unsupported types
      ModelPathError(AttributeError)     .part that did not resolve
      MissingExtraError(ImportError)     .extra to install
      LayoutError(KeyError, ValueError)  .missing, .unexpected, .mismatched: names, shapes or dtypes differ
      NonFiniteError(ArithmeticError)    in the trainer, with check_finite=True: .tensors have NaN or infinite values
      ProtocolError                      a peer violated the protocol or speaks another version of it; .unread bytes
      TransportError(ConnectionError)    a link failed; the library's own exception is its __cause__
        AuthenticationError              a peer has a different key or none; its message was discarded
        SenderClosed                     in a worker: the trainer closed the link cleanly

Every error can be pickled, because errors cross processes. Every message says what happened, to which worker and
version, and what to do next.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final


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
    # __new__ must come from the builtin class that defines the instance layout, which need not be first in the MRO.
    builtin: Any = kind
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    error: WeightSyncError = builtin.__new__(kind)
    error.__dict__.update(state)
    error.args = (state["message"],)
    return error


class StateError(WeightSyncError):
    """The state does not allow this call. Nothing has changed.

    What to do: call one of `allowed` first; the message names them, and `steps` shows how the machine reached this
    state.

    Attributes:
        machine: what refused the call: "sender" or "receiver", or what uses one, such as "scheme" or "worker group".
        state: its state.
        asked: the method that was called.
        allowed: the methods that may be called now.
        steps: the last steps of a sender or receiver, oldest first: (input, state before, state after). Else empty.
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
        allows = f" and allows {', '.join(map(_call_text, allowed))}" if allowed else ""
        reason = f"{hint} Nothing has changed: {where}{allows}." if hint else f"{where}{allows}. Nothing has changed."
        super().__init__(f"{_call_text(asked)}: {reason}")
        self.machine = machine
        self.state = state
        self.asked = asked
        self.allowed: tuple[str, ...] = tuple(allowed)
        self.steps: tuple[tuple[str, str, str], ...] = tuple(steps)


def _call_text(method: str) -> str:
    return f"{method}()" if method.isidentifier() else method


class SyncError(WeightSyncError):
    """Some workers did not apply the update.

    What to do: look at `report.outcomes`, worker by worker; or pass ``on_failure="report"`` and decide yourself.

    Attributes:
        report: the `SyncReport`, with one outcome per worker. None: the call sends nothing (`await_workers`, `connect`
            in a worker or without weights), or another rank has the report (`send_sharded`).
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class AckTimeoutError(SyncError, TimeoutError):
    """Some workers did not answer before the deadline. The update stays outstanding and can be waited for again.

    What to do: `wait_async()` again, or `abandon()` the update. The message says when each worker was last heard
    from, and whether it has read the update: a worker that has not read it does not call `receive()`.

    In a worker `connect()` raises it if no first version arrived in time, and `run_worker()` if no group was started.
    Either may be called again.

    Attributes:
        pending: ids of the workers that have not answered; empty in a worker.
    """

    def __init__(self, message: str, report: Any = None, pending: Sequence[int] = ()) -> None:
        super().__init__(message, report)
        self.pending: tuple[int, ...] = tuple(pending)


class WorkerLostError(SyncError, ConnectionError):
    """Links to workers were lost. The version those workers serve is unknown until they rejoin.

    What to do: `remove_worker()` for a worker that is gone for good; `add_worker()` with a new link for one that
    lives or was started again. It then receives the latest version addressed to it.

    Attributes:
        lost: maps the id of each lost worker to the reason.
        fence: the highest incarnation a worker reported, if a newer sender took it over; else None.
    """

    def __init__(
        self,
        message: str,
        report: Any = None,
        lost: Mapping[int, str] | None = None,
        fence: int | None = None,
    ) -> None:
        super().__init__(message, report)
        self.lost: dict[int, str] = dict(lost or {})
        self.fence = fence


class RefusedError(SyncError):
    """Workers refused the update, and serve what they served before.

    If your own method or loader raised, what it had changed before that is unknown.

    What to do: read the worker's reason, and its traceback in the report. Other names, shapes or dtypes: give trainer
    and worker the same model. No memory or descriptors: free some in the worker, and send again.

    Attributes:
        refused: maps the id of each worker that refused to the reason, with the worker's traceback if it raised.
    """

    def __init__(self, message: str, report: Any = None, refused: Mapping[int, str] | None = None) -> None:
        super().__init__(message, report)
        self.refused: dict[int, str] = dict(refused or {})


#: What to do about a worker that failed in a group without restarts.
GIVE_RESTARTS: Final = "Give the group max_restarts= to have failed workers restarted."


class WorkerFailedError(WeightSyncError):
    """A worker of a `WorkerGroup` has failed. The other workers keep running.

    It is raised if the worker will not be restarted. `WorkerGroup.failures` also has the failures of restarted workers.

    What to do: read `remote_traceback` and fix the function that the worker runs, or give the group `max_restarts`.

    Attributes:
        worker: its index.
        reason: why it ended: its exception, or how its process died.
        remote_traceback: the traceback of its exception; for a process that was killed because it gave no result, the
            stack of its main thread; else empty.
        version: the version that it served; None if it served none, or if that is unknown.
        restarts: how often it had been restarted.
    """

    def __init__(
        self,
        worker: int,
        reason: str,
        remote_traceback: str = "",
        version: int | None = None,
        restarts: int = 0,
        *,
        next_step: str = GIVE_RESTARTS,
    ) -> None:
        served = "" if version is None else f" while it served version {version}"
        after = f" after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""
        advice = f"Any other workers keep running. {next_step}"
        if reason.endswith("SIGKILL"):
            advice = f"If you did not kill it, the machine may have run out of memory: see the kernel's log. {advice}"
        lines = [
            f"worker {worker} failed{after}{served}: {reason}",
            remote_traceback.rstrip(),
            advice,
        ]
        super().__init__("\n".join(line for line in lines if line))
        self.worker = worker
        self.reason = reason
        self.remote_traceback = remote_traceback
        self.version = version
        self.restarts = restarts


class ResultTimeoutError(WeightSyncError, TimeoutError):
    """No worker of a `WorkerGroup` gave a result in time. The workers keep running.

    What to do: call `results()` again, with a longer timeout; or give the group a `deadline` for each worker.
    """


class StaleWeightsError(WeightSyncError):
    """In a worker of a `WorkerGroup`: its weights are too old for a step. The step has not begun.

    What to do: wait for a newer version (``on_stale="block"`` does), or give the group a larger ``max_staleness``.

    Attributes:
        version: the version that the worker serves, or None.
        behind: how many versions it is behind the newest one announced.
        limit: the group's ``max_staleness``.
    """

    def __init__(self, version: int | None, behind: int, limit: int) -> None:
        super().__init__(
            f"this worker serves version {version}, which is {behind} behind the newest one announced; "
            f"max_staleness is {limit}. The step has not begun: wait for a newer version, or give the group "
            'on_stale="block", which waits for one.'
        )
        self.version = version
        self.behind = behind
        self.limit = limit


class ModelBusyError(WeightSyncError, TimeoutError):
    """The model was in use until the timeout, or the same thread was applying weights to it. Nothing has changed.

    What to do: end forward passes before the call, or give it a longer timeout. If a hook of yours made the call, such
    as `set_extra_state()`, make it after the hook has returned.
    """


class PartlyLoadedError(WeightSyncError):
    """Your loader raises this if it failed after it had begun to change its engine, which then serves no whole version.

    The receiver closes, and the trainer reports the worker as LOST with this message. Any other exception means that
    the engine still serves the previous version: it is reported as REFUSED.

    What to do: reload the engine, and add the worker again.
    """


#: HTTP statuses of calls that were turned away: the engine has begun nothing.
_REJECTED: Final = frozenset({401, 403, 404, 405, 409, 413, 415, 422, 429})
#: The first and the last status of a redirect. Redirects are not followed.
_REDIRECTS: Final = (300, 399)


class EngineError(WeightSyncError):
    """An inference engine answered a call with an error. The reason of a REFUSED or LOST outcome contains it.

    What to do: read the engine's answer in the message, and its log. The reason of a LOST outcome says whether the
    engine stays paused: start the engine again, and call `add_worker()`.

    Attributes:
        status: the HTTP status; 0 if there is none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def began_nothing(self) -> bool:
        """Whether the status says that the call was rejected or redirected, and so changed nothing."""
        return self.status in _REJECTED or _REDIRECTS[0] <= self.status <= _REDIRECTS[1]


class ConfigurationError(WeightSyncError, ValueError):
    """An argument is missing, contradictory, unknown or of an unsupported type. Nothing has changed.

    What to do: correct the argument that the message names.
    """


class ModelPathError(WeightSyncError, AttributeError):
    """A model path such as ``"env.transform[0]"`` does not resolve.

    What to do: compare the path with the worker's own objects; `part` is the first part that does not exist.

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

    What to do: install the extra that the message names. `weightsync doctor` lists what works here.

    Attributes:
        extra: the extra that installs it.
    """

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}': pip install 'weightsync[{extra}]'.")
        self.extra = extra


class LayoutError(WeightSyncError, KeyError, ValueError):
    """The names, shapes or dtypes of weights and destination differ. Nothing has changed.

    What to do: compare `missing`, `unexpected` and `mismatched`. A `WeightStrategy` of your own can bridge them, or the
    ``name_map=`` of a loader. `TensorDict.from_module()` has the buffers that are not persistent too, which are not
    sent: pass the module instead.

    Attributes:
        missing: names that the destination has and the weights lack.
        unexpected: names that the weights have and the destination lacks.
        mismatched: maps a tensor's name to the difference, e.g. ``"shape (3,), expected (4,)"``.
    """

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing: tuple[str, ...] = tuple(missing)
        self.unexpected: tuple[str, ...] = tuple(unexpected)
        self.mismatched: dict[str, str] = dict(mismatched or {})


class NonFiniteError(WeightSyncError, ArithmeticError):
    """Weights that were to be sent have NaN or infinite values, with ``check_finite=True``. No version was sent.

    What to do: look at the trainer's loss and gradients; the workers keep the version that they serve. If such values
    belong there (the mask of an attention layer has infinite ones), keep them in buffers that are not persistent, or
    leave them out by ``names=``.

    Attributes:
        tensors: maps the name of each such tensor to two counts: its NaN values, and its infinite values.
    """

    def __init__(self, message: str, tensors: Mapping[str, tuple[int, int]] | None = None) -> None:
        super().__init__(message)
        self.tensors: dict[str, tuple[int, int]] = dict(tensors or {})


class ProtocolError(WeightSyncError):
    """A peer violated the protocol or speaks another version of it. Its link is closed.

    What to do: run the same release of weightsync at both ends, and let nothing else write to the pipe or port.

    Attributes:
        unread: the bytes that could not be decoded.
    """

    def __init__(self, message: str, unread: bytes = b"") -> None:
        super().__init__(message)
        self.unread = unread


class TransportError(WeightSyncError, ConnectionError):
    """A link failed. If another library raised, its exception is the ``__cause__``.

    What to do: look at ``__cause__``. In a worker, end or reconnect; its weights stay as they are. `weightsync doctor`
    tests what the schemes need.
    """


class AuthenticationError(TransportError):
    """A peer has a different key or none, or its message was altered in transit. The message was discarded.

    What to do: give both ends the same key; see SECURITY.md. A link raises this error. `send()` raises
    `WorkerLostError`, whose reason is this error's text; the worker only logs a warning, and waits for a trainer that
    has its key.
    """


class SenderClosed(TransportError):
    """In a worker: the sender closed its link cleanly. A sender that crashes raises a plain `TransportError`.

    What to do: end the worker, or connect it to a new trainer.
    """


def with_type(error: BaseException) -> str:
    """An exception as the last line of its traceback has it: its type and, if it has one, its text."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reason_of(error: BaseException) -> str:
    """An exception as the reason of an outcome: its text; with its type in front if it is not weightsync's own."""
    return str(error) if isinstance(error, WeightSyncError) else with_type(error)


def sentence(text: str) -> str:
    """A text, which may be anyone's, as a sentence: with one full stop, or the ``?`` or ``!`` that it ends with."""
    text = text.rstrip(" \n.,:;")
    return text if text.endswith(("?", "!")) else f"{text}."


def thread_not_started(name: str, error: RuntimeError) -> TransportError:
    """The error for a thread that the system does not start. ``error`` is what `Thread.start` raised."""
    return TransportError(f"The thread for {name} cannot be started: {error}.")


def raw_pipe() -> None:
    """Raise: a frame was unpickled as a user message. See `weightsync.transports.pipe.framing`.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        "A weightsync frame was read from the raw pipe, so its link has lost it. While a scheme uses a pipe, read your "
        "own messages with receiver.pipe.recv() in a worker and with sender.pipe(worker_id).recv() in the trainer. "
        "Call init_on_worker() before you read from the pipe."
    )


def warn_renamed(former: str, name: str) -> None:
    """Warn that a public name was used under its former name."""
    warnings.warn(f"{former} is now {name}; the former name will be removed.", DeprecationWarning, stacklevel=3)
