"""The model that a worker serves, and its lock: forwards share it, a swap holds it alone."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final
from weakref import ref

from msgspec import Struct
from torch import nn

from weightsync.clock import Deadline, Stopwatch
from weightsync.engine.copies import SchemeServices
from weightsync.engine.forks import FORK_PATIENCE, Fork, forks
from weightsync.engine.listening import Listening
from weightsync.engine.receiver_driver import Pending, ReceiverDriver
from weightsync.errors import ConfigurationError, LayoutError, ModelBusyError
from weightsync.protocol import receiver as pure
from weightsync.weights.layout import Layout
from weightsync.weights.loader import Loader, LoaderTarget
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.reading import read_live
from weightsync.weights.relay import Relay, RelayTarget
from weightsync.weights.target import Mode, Staged, Target

logger = logging.getLogger("weightsync")

#: A forward waits this many seconds for other forwards to end, so that a staged version can go live; then it runs
#: concurrently with them. Without this bound, a forward that waits for a forward in another thread would never end.
PATIENCE: Final = 1.0

#: Seconds. New forwards wait for a version to go live only in the first `PATIENCE` seconds of each period. Otherwise a
#: long `serving` block would slow down each forward in other threads.
_PERIOD: Final = 10.0


class ServingBlock:
    """A `serving` block that has not ended: its generator alone keeps it."""


#: Who serves: the call of a forward, a block, or a fork. It counts as long as that exists; None counts until `leave`.
ServingEntry = FrameType | ref[ServingBlock] | ref[Fork] | None


class ServingLock:
    """Shared by the threads that serve a model, which may nest; a swap holds it alone."""

    def __init__(self) -> None:
        # If no thread waits, the lock is used directly: a Condition's methods would add Python calls to every forward.
        # A signal's handler may fork, and so enter, in the thread that holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        #: How many threads wait to change the model.
        self._queued = 0
        #: When a forward first gave way to them, since the model was changed last.
        self._queued_since: Stopwatch | None = None
        self._serving: defaultdict[int, list[ServingEntry]] = defaultdict(list)
        self._swapping: int | None = None

    def enter(self, entry: ServingEntry = None) -> None:
        """Begin to serve; waits for a swap to end, and for threads that wait to change the model.

        Args:
            entry: the call or the block that serves. If it ends without `leave`, its entry no longer counts.
        """
        ident = threading.get_ident()
        with self._lock:
            if (self._queued or self._swapping is not None) and self._swapping != ident and ident not in self._serving:
                if self._queued:
                    self._wait_for(lambda: not self._queued, self.patience())
                self._wait_for(lambda: self._swapping is None, None)
            self._serving[ident].append(entry)

    def enter_to_fork(self, seconds: float | None, entry: ServingEntry, served: ServedModel) -> None:
        """As `enter`, but wait at most this long for a swap, and for forwards in a slot. The model leaves the slot."""
        ident = threading.get_ident()
        with self._lock:  # held until the model has moved
            no_other_forwards = self._wait_for(lambda: self._may_fork(ident, served), seconds)
            if self._swapping not in (None, ident):
                served.warn_of_fork_amid_swap()
                return
            self._serving[ident].append(entry)
            if no_other_forwards:
                self._queued_since = None  # forwards give way to the next version as if this fork had not waited
            served.leave_host_slot(no_other_forwards)

    def _may_fork(self, ident: int, served: ServedModel) -> bool:
        still = self._swapping is None and not served.in_slot
        return still or self._swapping == ident or self._is_free(except_thread=ident)

    def patience(self) -> float:
        """Seconds for which a new forward now waits for others to end, or for threads that wait to change the model."""
        if self._queued_since is None:
            self._queued_since = Stopwatch()
        return max(0.0, PATIENCE - self._queued_since.seconds % _PERIOD)

    def leave(self, entry: ServingEntry = None) -> None:
        """End what began with this entry, in whichever thread; None: what this thread began last, if anything.

        Blocks of one thread may end in any order (tasks of asyncio), and in another thread (generators).
        """
        with self._lock:
            if entry is None:
                self._end_entry(threading.get_ident())
                return
            for thread, entries in list(self._serving.items()):
                if entry in entries:
                    self._end_entry(thread, entries.index(entry))

    def leave_forward(self) -> None:
        """End the forward that this thread began last. Do nothing if it began before its model was guarded."""
        ident = threading.get_ident()
        with self._lock:
            if ident in self._serving and isinstance(self._serving[ident][-1], FrameType):
                self._end_entry(ident)

    def _end_entry(self, thread: int, index: int = -1) -> None:
        """End one of the things that a thread began, if there is any."""
        if thread not in self._serving:
            return
        self._serving[thread].pop(index)
        if not self._serving[thread]:
            del self._serving[thread]
            if self._waiters:
                self._changed.notify_all()

    def _wait_for(self, is_met: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``is_met()``, with the lock held; False: time is up."""
        self._waiters += 1
        try:
            return self._changed.wait_for(is_met, timeout)
        finally:
            self._waiters -= 1

    def serves_here(self) -> bool:
        """Whether this thread serves the model."""
        return threading.get_ident() in self._serving

    def begin_swap(self, timeout: float | None) -> bool:
        """Take the lock alone, until `end_swap`, if nobody serves the model within ``timeout`` seconds.

        Returns:
            Whether it was taken. A thread that serves the model itself does not get it.
        """
        ident = threading.get_ident()
        with self._lock:
            free = (self._swapping is None and not self._serving) or self._is_free()
            if self._swapping == ident or ident in self._serving:
                return False
            if not (free or (timeout != 0.0 and self._wait_for(self._is_free, timeout))):
                return False
            self._swapping, self._queued_since = ident, None
            return True

    def queue(self) -> None:
        """Note that this thread waits to change the model, until `leave_queue`: new forwards give way to it."""
        with self._lock:
            self._queued += 1

    def leave_queue(self) -> None:
        """Note that this thread has changed the model, or no longer waits to."""
        with self._lock:
            self._queued -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, deadline: Deadline, method: str) -> Iterator[None]:
        """Hold the lock exclusively, except for this thread's own forwards. Waits for all other threads.

        Raises ModelBusyError: other threads used the model until then, or this thread is changing it.
        """
        ident = threading.get_ident()
        with self._lock:
            if self._swapping == ident:
                raise ModelBusyError(
                    f"{method}(): this thread is applying weights, and called a hook, such as set_extra_state(), that "
                    "made this call. Nothing has changed; make the call when the hook has returned."
                )
        try:
            with self._lock:
                self._wait_until_free(ident, deadline, method)
                self._swapping, self._queued_since = ident, None
            yield
        finally:
            if self._swapping == ident:
                self.end_swap()

    def _wait_until_free(self, ident: int, deadline: Deadline, method: str) -> None:
        self._queued += 1
        try:
            while not self._wait_for(lambda: self._is_free(except_thread=ident), deadline.nap):
                if deadline.passed:
                    raise ModelBusyError(
                        f"{method}(): other threads used the model until the timeout (a forward, or a serving() "
                        "block). Nothing has changed; call it again, or give it a longer timeout=."
                    )
        finally:
            self._queued -= 1
            self._changed.notify_all()

    def end_swap(self) -> None:
        """Let others serve the model again."""
        with self._lock:
            self._swapping = None
            if self._waiters:
                self._changed.notify_all()

    def _is_free(self, except_thread: int | None = None) -> bool:
        if self._swapping is not None:
            return False
        for thread, entries in list(self._serving.items()):
            entries[:] = [entry for entry in entries if not _has_ended(entry)]
            if not entries:
                del self._serving[thread]
        return all(thread == except_thread for thread in self._serving)


def _has_ended(entry: ServingEntry) -> bool:
    """Whether a call or block has ended. A KeyboardInterrupt may skip our hook, or the end of a block."""
    if not isinstance(entry, FrameType):
        return entry is not None and entry() is None
    try:
        entry.clear()
    except RuntimeError:
        return False  # it is still running
    return True


class Hook:
    """One of the two hooks of a guarded module. In a copy of the module they do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return NoopHook, ()


class NoopHook:
    """A hook of a copied module: it does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def calling_frame() -> FrameType:
    """The frame of the call that runs the hook."""
    return sys._getframe(2)


def compiled_frame() -> FrameType:
    """The frame of the compiled call that runs the hook: past those of torch's compiler, and of the hook itself."""
    frame = sys._getframe(1)
    ours = frame.f_globals["__name__"]
    while frame.f_back is not None and _is_hook_or_compiler(frame.f_globals.get("__name__", ""), ours):
        frame = frame.f_back
    return frame


def _is_hook_or_compiler(module: str, ours: str) -> bool:
    return module == ours or module.startswith("torch._dynamo")


class StagedVersion(Struct, frozen=True):
    """A version that has been verified and staged, and only has to be swapped in."""

    pending: Pending
    staged: Staged
    digest: bytes
    seconds: float


class ServedModel:
    """The model that arrived weights are applied to, given as an object or as a path on the context."""

    def __init__(
        self, services: SchemeServices, driver: ReceiverDriver, listening: Listening, context: Callable[[], Any]
    ) -> None:
        self._services = services
        self._driver = driver
        self._listening = listening
        self._context = context
        #: The model; a path that was never resolved; or None: none is registered.
        self.model: Any = None
        #: Where the model is found on the context, if it was registered by a path. It is resolved again at each use.
        self.path: str | None = None
        #: The target for the model, into which versions are swapped; None: not needed yet.
        self.target: Target | None = None
        #: `target`, while its tensors may be in memory that other processes share: see `unshare`.
        self.shared: Target | None = None
        #: Whether a loader was served, now or before: its pages of a slot hide what the trainer writes there.
        self._had_loader = False
        #: What is staged for `target`; None: nothing.
        self.staged: StagedVersion | None = None
        #: The digest of the version that was applied last; empty if it came without one.
        self.applied = b""
        #: Its layout, in which digests are computed.
        self.layout: Layout | None = None
        #: Who serves the model now, and who may change it.
        self.serving = ServingLock()

    @property
    def apply_mode(self) -> Mode:
        """How arrived weights become live. A loader may have written into the views of them that it got."""
        return Mode.MAP if self._had_loader else self._services.apply_mode

    def restore_path(self, path: str | None) -> None:
        """In a copy of the receiver: take the path of its model; None: the model was given as an object."""
        self.model = self.path = path

    def serve(self, model: Any, path: str | None, deadline: Deadline) -> None:
        """Serve another model.

        Args:
            path: where the model was found on the context; None if it was given as an object.

        Raises:
            ModelBusyError: they served it until then; nothing has changed.
            ConfigurationError, LayoutError: weights cannot be applied to it.
        """
        with self.serving.alone(deadline, "register_model"):
            self._guard(model)  # before anything changes: it may take no hooks
            with self._driver.lock:
                self._replace(model, path)
                self.unshare()

    def unshare(self) -> None:
        """Move a new model out of memory that other processes share. No other thread may be serving it."""
        if self.shared is not None:
            self.shared.unshare()
            self.shared = None

    def _replace(self, model: Any, path: str | None) -> None:
        """Serve another model; the caller holds the driver's lock."""
        served = self._served_digest()
        if self.target is not None:
            self.target.leave()  # also where the model stays: the next target does not know what lies in a slot
        self.model, self.path = model, path
        self.target = self.staged = self.shared = None
        try:
            if not isinstance(model, str):
                self._make_target()
        finally:
            if self._driver.data.served and not self._serves(served):
                self._driver.take(pure.Invalidate())

    def leave_device(self) -> None:
        """Have the model leave its slot on a device, where other processes see what is written, when it is closed."""
        try:
            if self.target is not None:
                self.target.leave_device()
        except Exception as error:  # noqa: BLE001 - the device may be full, or have failed: it is closed all the same
            logger.warning(
                "model %r stays in a slot that other workers read, so nothing may be written into it: %r",
                *(self._driver.model_id, error),
            )

    def begin_fork(self, seconds: float | None, fork: ref[Fork]) -> None:
        """Let no version go live until `end_fork`, and have the model leave its slot on the host."""
        self.serving.queue()  # forwards that begin now would be waited for too
        try:
            self.serving.enter_to_fork(seconds, fork, self)
        finally:
            self.serving.leave_queue()

    def end_fork(self, fork: ref[Fork]) -> None:
        """In the parent: go on, and wake a thread that waits to swap."""
        self.serving.leave(fork)
        if self._driver.data.pending is not None:
            self._driver.waker.fire()

    @property
    def in_slot(self) -> bool:
        """Whether the model is in a slot on the host, where it cannot stay in a forked child."""
        return self.target is not None and self.target.in_slot

    def leave_host_slot(self, no_other_forwards: bool) -> None:
        """Have the model leave its slot on the host before a fork: a child cannot answer for it. It uses no device."""
        try:
            if self.in_slot and not no_other_forwards:
                raise ModelBusyError(f"forwards in other threads did not end within {FORK_PATIENCE:g} seconds")
            if self.target is not None and self.in_slot:
                self.target.leave()
        except Exception as error:  # noqa: BLE001 - there may be no memory left: Python forks all the same
            logger.error(
                "model %r: the process forks while the model is in shared memory that its trainer writes again: %r. "
                "In the child, load its weights again before you use it.",
                *(self._driver.model_id, error),
            )

    def warn_of_fork_amid_swap(self) -> None:
        """Warn of a fork that could not wait for a swap any longer."""
        logger.warning(
            "model %r: the process forks while a version goes live, which took longer than %g seconds. In the child, "
            "the model may hold parts of two versions: load its weights again there before you use it.",
            *(self._driver.model_id, FORK_PATIENCE),
        )

    def _guard(self, model: Any) -> None:
        if self._listening.background_reader is not None:
            self._listening.background_reader.model_set(model)

    def _serves(self, digest: bytes) -> bool:
        """Whether the model holds exactly the weights of that digest, as far as it can be read: a loader cannot."""
        if digest and self.target is not None:
            with contextlib.suppress(ConfigurationError, LayoutError):
                return self.target.digest(self.layout) == digest
        return False

    def _served_digest(self) -> bytes:
        """The digest of the version served; empty if it is unknown, or none is served."""
        if not self._driver.data.served:
            return b""
        # If it came without a digest, it is what the model before holds.
        if self.applied or self.target is None:
            return self.applied
        with contextlib.suppress(ConfigurationError, LayoutError):  # the model before cannot be read any more
            return self.target.digest(self.layout)
        return b""

    def destination(self) -> Target:
        """What weights are applied to now.

        Raises ConfigurationError, LayoutError, ModelPathError: no model is registered, or its path leads to none.
        """
        self.follow_path()
        if self.target is not None:
            return self.target
        with self._driver.lock:  # another thread may be making it
            return self.target if self.target is not None else self._make_target()

    def follow_path(self) -> None:
        """Resolve the model's path again, if it was registered by one: it may lead to another model by now."""
        if self.path is None:
            return
        try:
            model = _resolve_model(self._context(), self.path)
        except ConfigurationError:
            if isinstance(self.model, str):
                raise
            return  # the context was garbage-collected; the model found on it earlier is still alive
        if isinstance(self.model, str):
            self._find(model)
        elif model is not self.model:
            # While other threads serve the previous model, nothing could be applied anyway; the next use tries again.
            with contextlib.suppress(ModelBusyError):
                self.serve(model, self.path, Deadline(0))

    def _find(self, model: Any) -> None:
        """Serve the model found at the path for the first time. No weights change, so threads may be inside serving().

        Another thread may have found it at the same time.
        """
        with self._driver.lock:
            if not isinstance(self.model, str):
                return
            self._replace(model, self.path)
        self._guard(model)
        # Otherwise a swap does it: a kernel of a thread that serves may be reading where the tensors are.
        with contextlib.suppress(ModelBusyError), self.serving.alone(Deadline(0), "receive"), self._driver.lock:
            self.unshare()

    def _make_target(self) -> Target:
        if self.model is None:
            raise ConfigurationError(
                f"no model is registered for {self._driver.model_id!r}: call register_model() with a module, a "
                "TensorDict, a dict or a path on the context."
            )
        self.target = target = self._target_of(self.model)
        self._driver.layout, self._driver.devices = target.demanded, target.devices
        forks.add(self)
        return target

    def _target_of(self, model: Any) -> Target:
        selection = self._services.applied_selection
        match model:
            case Relay() if selection is not None:
                raise ConfigurationError(
                    f"this worker has no model {self._driver.model_id!r} of its own: it only passes weights on to its "
                    "own workers. Give names= to these workers, or give this worker the model."
                )
            case Relay():
                return RelayTarget(model)
            case Loader():
                self._had_loader = True
                return LoaderTarget(model, self._pending_version)
        target = Target(model, self._services.apply_mode, read_live if selection is None else selection.read)
        if isinstance(model, nn.Module):
            self.shared = target
        return target

    def _pending_version(self) -> int:
        pending = self._driver.pending
        assert pending is not None
        return pending.update.version
