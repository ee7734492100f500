"""The model that a worker serves, and its lock: forwards share it, a swap holds it alone."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from weightsync.clock import Deadline
from weightsync.engine.copies import SchemeServices
from weightsync.engine.listening import Listening
from weightsync.engine.receiver_driver import Pending, ReceiverDriver
from weightsync.errors import ConfigurationError, LayoutError, ModelBusyError
from weightsync.protocol import receiver as pure
from weightsync.weights.model_path import _resolve_model
from weightsync.weights.relay import Relay, RelayTarget
from weightsync.weights.target import Mode, Staged, Target

#: Seconds that a forward waits for those under way, so that a staged version goes live, before it runs beside them.
#: Without a bound, a forward that waits for another forward of the same model in another thread would never end.
PATIENCE: Final = 1.0


class ServingLock:
    """Shared by the threads that serve a model, which may nest; a swap holds it alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._serving: defaultdict[int, list[FrameType | None]] = defaultdict(list)
        self._swapping: int | None = None

    def enter(self, frame: FrameType | None = None) -> None:
        """Begin to serve; waits for a swap to end.

        Args:
            frame: the call that serves. If it ends without `leave`, its entry no longer counts.
        """
        own = threading.get_ident()
        with self._changed:
            if own not in self._serving:
                self._changed.wait_for(lambda: self._swapping in (None, own))
            self._serving[own].append(frame)

    def leave(self) -> None:
        """End what this thread began last, if anything."""
        own = threading.get_ident()
        with self._changed:
            entries = self._serving.get(own)
            if entries:
                entries.pop()
                if not entries:
                    del self._serving[own]
                    self._changed.notify_all()

    def mine(self) -> bool:
        """Whether this thread serves the model."""
        return threading.get_ident() in self._serving

    @contextlib.contextmanager
    def swapping(self, timeout: float | None = 0.0) -> Iterator[bool]:
        """Hold the lock alone, if nobody serves the model within ``timeout`` seconds. Yields whether that is so.

        A thread that serves the model itself does not get it.
        """
        own, got = threading.get_ident(), False
        with self._changed:
            if self._swapping != own and own not in self._serving:
                got = self._changed.wait_for(self._free, timeout)
                if got:
                    self._swapping = own
        try:
            yield got
        finally:
            if got:
                self._end()

    @contextlib.contextmanager
    def alone(self, deadline: Deadline, asked: str) -> Iterator[None]:
        """Hold the lock alone, beside what this thread itself serves. Waits for all other threads.

        Raises ModelBusyError: other threads served the model until then.
        """
        own = threading.get_ident()
        with self._changed:
            outer = self._swapping == own
            if not outer:
                self._await_free(own, deadline, asked)
                self._swapping = own
        try:
            yield
        finally:
            if not outer:
                self._end()

    def _await_free(self, own: int, deadline: Deadline, asked: str) -> None:
        while not self._changed.wait_for(lambda: self._free(besides=own), deadline.nap):
            if deadline.passed:
                raise ModelBusyError(
                    f"{asked}(): other threads served the model until time was up (a forward, or a serving() block). "
                    "Nothing has changed; call it again, or give it a longer timeout=."
                )

    def _end(self) -> None:
        with self._changed:
            self._swapping = None
            self._changed.notify_all()

    def _free(self, besides: int | None = None) -> bool:
        if self._swapping is not None:
            return False
        for thread, entries in list(self._serving.items()):
            entries[:] = [frame for frame in entries if not _over(frame)]
            if not entries:
                del self._serving[thread]
        return all(thread == besides for thread in self._serving)


def _over(frame: FrameType | None) -> bool:
    """Whether a call has ended. torch skips our hook when a KeyboardInterrupt ends a forward."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False  # it is still running
    return True


class Hook:
    """One of the two hooks of a guarded module. In a copy of the module they do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, ()


class Inert:
    """A hook of a copied module: it does nothing."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


def calling_frame() -> FrameType:
    """The frame of the call that runs the hook."""
    return sys._getframe(2)


@dataclass(frozen=True, slots=True)
class Ready:
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
        #: The model as something that weights can be swapped into; None: not needed yet.
        self.target: Target | None = None
        #: What is staged for `target`; None: nothing.
        self.staged: Ready | None = None
        #: The digest of the version that was applied last; empty: it came without one.
        self.applied = b""
        #: Who serves the model now, and who may change it.
        self.serving = ServingLock()

    @property
    def apply_mode(self) -> Mode:
        """How arrived weights become live."""
        return self._services.apply_mode

    def copy_of(self, path: str | None) -> None:
        """Become the copy of a model that was registered by ``path``; None: it was registered as an object."""
        self.model = self.path = path

    def serve(self, model: Any, path: str | None, deadline: Deadline) -> None:
        """Serve another model.

        Args:
            path: where the model was found on the context; None: it was given as an object.

        Raises:
            ModelBusyError: they served it until then; nothing has changed.
            ConfigurationError, LayoutError: weights cannot be applied to it.
        """
        with self.serving.alone(deadline, "register_model"), self._driver.lock:
            served = self._served_digest()
            self.model, self.path = model, path
            self.target = self.staged = None
            try:
                if not isinstance(model, str):
                    self._make_target()
            finally:
                if self._driver.data.served and not self._serves(served):
                    self._driver.take(pure.Invalidate())
        if self._listening.background_reader is not None:
            self._listening.background_reader.model_set(model)

    def _serves(self, digest: bytes) -> bool:
        """Whether the model holds exactly the weights of that digest."""
        return bool(digest) and self.target is not None and self.target.digest() == digest

    def _served_digest(self) -> bytes:
        """The digest of the version served; empty: it is unknown, or none is served."""
        if not self._driver.data.served:
            return b""
        # It came without a digest: then it is what the model before holds, which was served until now.
        if self.applied or self.target is None:
            return self.applied
        with contextlib.suppress(ConfigurationError, LayoutError):  # the model before cannot be read any more
            return self.target.digest()
        return b""

    def destination(self) -> Target:
        """What weights are applied to now.

        Raises ConfigurationError, LayoutError, ModelPathError: no model is registered, or its path leads to none.
        """
        self.follow_path()
        return self.target if self.target is not None else self._make_target()

    def follow_path(self) -> None:
        """Look again where the path leads, if the model was registered by one: another may be there by now."""
        if self.path is None:
            return
        try:
            found = _resolve_model(self._context(), self.path)
        except ConfigurationError:
            if isinstance(self.model, str):
                raise
            return  # the context was collected; the model found on it earlier is still alive
        if found is not self.model:
            # While other threads serve the model before, nothing could be applied anyway: the next use looks again.
            with contextlib.suppress(ModelBusyError):
                self.serve(found, self.path, Deadline(0))

    def _make_target(self) -> Target:
        if self.model is None:
            raise ConfigurationError(
                f"no model is registered for {self._driver.model_id!r}: call register_model() with a module, a "
                "TensorDict, a dict or a path on the context."
            )
        model = self.model
        target = RelayTarget(model) if isinstance(model, Relay) else Target(model, self._services.apply_mode)
        self.target = target
        self._driver.layout, self._driver.devices = target.demanded, target.devices
        return target
