"""This process's connection to Ray, and the end of that connection, which Ray's own futures do not report."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final

from weightsync.errors import MissingExtraError, TransportError, thread_not_started
from weightsync.transports.process import forget_after_fork

logger = logging.getLogger("weightsync")

#: Seconds between two checks whether Ray is still running, while calls are in flight.
PERIOD: Final = 0.05

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: What Ray says of an actor that died, one indented line each: its class, id, pid and address.
_FACTS = re.compile(r"\.((?:\n\t\w+: [^\n]*)+)\n")


def require_ray(what: str) -> Any:
    """The module `ray`, imported at first use. Raises MissingExtraError: Ray is not installed."""
    try:
        importlib.import_module("ray.exceptions")
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError("ray", what) from error


def own_actor() -> str:
    """The id of the actor that this process is; empty if it is not an actor."""
    ray = require_ray("RayWeightSyncScheme")
    return (ray.get_runtime_context().get_actor_id() or "") if ray.is_initialized() else ""


def is_ray_client() -> bool:
    """Whether this process is connected to its cluster by a Ray Client (``ray://``)."""
    return bool(importlib.import_module("ray.util.client").ray.is_connected())


def plain(text: str) -> str:
    """Ray's message without terminal colours; the facts of an actor that died are in brackets, on its first line."""
    return _FACTS.sub(_in_brackets, _COLOURS.sub("", text).strip())


def _in_brackets(facts: re.Match[str]) -> str:
    return f" ({', '.join(line.strip() for line in facts[1].strip().splitlines())}). "


def failure_in_actor(error: BaseException) -> tuple[str, str] | None:
    """The reason and the traceback of a call that the actor has run to its end; None: it did not, as far as is known.

    Its method has raised; or what it raised or returned cannot be unpickled in this process.
    """
    exceptions = require_ray("RayWeightSyncScheme").exceptions
    # Ray raises it inside a generator, which wraps a StopIteration in a RuntimeError, and a StopAsyncIteration too.
    if type(error) is RuntimeError and isinstance(error.__cause__, exceptions.RayTaskError):
        error = error.__cause__
    trace = plain(str(error))
    # The last line that says something: the traceback of an exception group ends with a rule.
    said = (line.strip(" |") for line in reversed(trace.splitlines()) if line.strip(" |+-"))
    # Not its repr(): that may be the actor's own, which can raise, since Ray puts other `args` into the error.
    reason = next(said, type(error).__name__)
    if isinstance(error, (exceptions.RayTaskError, vars(exceptions).get("UnserializableException", ()))):
        return reason, trace
    # Ray has a traceback of its own only if it failed in this process.
    if isinstance(error, exceptions.RaySystemError) and error.traceback_str:
        return f"its method has ended, but the trainer cannot unpickle what it returned or raised: {reason}", trace
    return None


class Session:
    """The Ray session in which a link was created. An actor of another session is not the same."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._key = _session_key(require_ray("RayWeightSyncScheme"))

    def require(self) -> Any:
        """The module `ray`, connected to that session.

        Raises:
            TransportError: Ray is not connected to it, or no longer. Any other call would make Ray start a new cluster.
        """
        ray = require_ray("RayWeightSyncScheme")
        key = _session_key(ray)
        if key is None:
            raise TransportError(
                f"Ray is not running in this process: {self._peer} cannot be reached. Call ray.init()."
            )
        self._key = self._key or key
        if key != self._key:
            raise TransportError(
                f"The link to {self._peer} was created in a Ray session that has ended. Create a new one: "
                "by add_worker(), for a WorkerGroup by a new group, for a RayWeightUpdater by this "
                "session's actors in its remote_collectors."
            )
        return ray


def _session_key(ray: Any) -> tuple[str, str] | None:
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_job_id(), context.get_node_id()


class ActorWatch:
    """Ends the calls in flight once Ray is shut down here. Its thread lives while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Future[Any], str] = {}
        self._pending_actions: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        forget_after_fork(self)

    def watch(self, call: Future[Any], peer: str) -> None:
        """Watch a call to ``peer`` until it is over or `leave` is called.

        Raises TransportError: the thread cannot be started.
        """
        with self._lock:
            self._calls[call] = peer
            try:
                self._require_thread()
            except TransportError:
                del self._calls[call]
                raise
        call.add_done_callback(self.leave)

    def _require_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightsync-ray", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                raise thread_not_started("watching Ray's calls", error) from error

    def leave(self, call: Future[Any]) -> None:
        """Stop watching a call."""
        with self._lock:
            self._calls.pop(call, None)

    def call_soon(self, act: Callable[[], None]) -> None:
        """Have ``act`` called after a pause, on behalf of a call that is watched, or was until its link was closed."""
        with (
            self._lock,
            contextlib.suppress(TransportError),
        ):  # without a thread it is called once another call is watched
            self._pending_actions.append(act)
            self._require_thread()

    def _run(self) -> None:
        ray, pause = require_ray("RayWeightSyncScheme"), threading.Event()
        while True:
            with self._lock:
                actions, self._pending_actions = self._pending_actions, []
                if not self._calls and not actions:
                    self._thread = None
                    return
            for action in actions:
                try:
                    action()
                except Exception:
                    logger.exception("a call to an actor could not be repeated; the other calls are still watched")
            if not ray.is_initialized():
                self._end_all()
            pause.wait(PERIOD)

    def _end_all(self) -> None:
        with self._lock:
            ended, self._calls = self._calls, {}
        for call, peer in ended.items():
            settle(call, error=TransportError(f"Ray was shut down before {peer} had answered."))

    def forget(self) -> None:
        """In a forked child: drop the calls, which are the parent's."""
        self._lock = threading.Lock()
        self._calls, self._pending_actions = {}, []
        self._thread = None


def settle(call: Future[Any], result: Any = None, error: Exception | None = None) -> None:
    """Complete a call, unless it was completed at the same moment."""
    try:
        if error is None:
            call.set_result(result)
        else:
            call.set_exception(error)
    except InvalidStateError:
        return


_KEPT_AT_EXIT: list[Any] = []


def keep_if_ray_ended(holder: Any) -> None:
    """Drop an object that holds references, unless Ray is shutting down: then Ray would end the process."""
    if not require_ray("RayWeightSyncScheme").is_initialized():
        _KEPT_AT_EXIT.append(holder)


#: The one watch of this process.
ACTOR_WATCH: Final = ActorWatch()
