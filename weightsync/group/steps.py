"""A worker's steps: none begins with weights that are too old, and each result names the versions of its steps."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, Final, Protocol
from weakref import finalize

from torch import nn

from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.serving_lock import Hook
from weightsync.errors import SenderClosed, StaleWeightsError, TransportError, sentence
from weightsync.group.channel import Held, Released
from weightsync.options import OnStale

logger = logging.getLogger("weightsync")

#: After so many results without any step, the model is probably used in a way that counts none.
_RESULTS_BEFORE_WARNING: Final = 2
_NO_STEP: Final = (
    "this worker has put results, and has begun no step: they name no version, its weights may change in the middle "
    "of a call, and max_staleness does not hold. A step is a call of worker.model itself (its forward); put "
    "`with worker.step():` around calls of its other methods, or of its submodules. This warning is logged once."
)
_PUT_IN_A_STEP: Final = (
    "this worker has put a result inside a step, that is, in a `with worker.step():` block or a forward. While put() "
    "waits for the trainer, the step goes on and no version can go live; so if the trainer is inside send(), both wait "
    "until its deadline. Call put() after the block. This warning is logged once."
)

#: Seconds after which a worker that waits for a newer version looks again whether it still has to.
LOOK_SECONDS: Final = 0.1


class Announcements(Protocol):
    """What a worker knows of what the trainer has announced.

    A version is announced once it has been dispatched, so a worker that waits for it waits for a version in flight, or
    for one that the trainer sends once an answer has arrived. The trainer reads answers while it waits for results.
    """

    @property
    def version(self) -> int:
        """The newest version announced; 0 if none was."""


class Trainer(Protocol):
    """What a worker's steps ask of the trainer, and tell it."""

    @property
    def stopped(self) -> bool:
        """Whether the worker is to return."""

    def mention(self, word: Held | Released) -> None:
        """Tell the trainer, as soon as it reads. Raises SenderClosed: it has closed the group, or is dead."""

    def flush(self) -> None:
        """Tell the trainer what it could not be told yet. Raises SenderClosed: as `mention`."""


class Announced:
    """The newest version that the trainer has announced: one number in memory that it shares with its workers.

    Where there is such memory, no message is needed: a worker sees it at its next step however much lies unread in its
    pipe. Elsewhere the worker's channel brings it.

    The memory has no name: `multiprocessing` would have it in /dev/shm, which some containers lack.

    Args:
        fd: the descriptor of the trainer's memory, in a worker process that was sent it; None: new memory. The trainer
            alone writes it.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = os.memfd_create("weightsync-group", os.MFD_CLOEXEC) if fd is None else fd
        finalize(self, os.close, self._fd)
        if fd is None:
            os.ftruncate(self._fd, ctypes.sizeof(ctypes.c_uint64))
        self._number = ctypes.c_uint64.from_buffer(mmap.mmap(self._fd, ctypes.sizeof(ctypes.c_uint64)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _sent, (DupFd(self._fd),)

    @property
    def version(self) -> int:
        """The version; 0 if none was announced."""
        return self._number.value

    def announce(self, version: int) -> None:
        """In the trainer: this version is dispatched."""
        self._number.value = max(version, self._number.value)


def _sent(passed: Any) -> Announced:
    """In a worker process that was sent it. `multiprocessing` has passed its descriptor."""
    return Announced(passed.detach())


@dataclass(frozen=True, slots=True)
class Staleness:
    """How far behind a worker may be when it begins a step, and what it does if it is further behind."""

    limit: int | None
    on_stale: OnStale


class Steps:
    """The steps of one worker.

    A step is an outermost forward of the model, or a block of `step`. Nested ones belong to the outer step, whose
    version is fixed.

    Args:
        receiver: the worker's; a background thread receives for it.
        announced: what the trainer has announced, as far as this worker knows.
        staleness: how old a version may be.
        trainer: the way to it.
    """

    def __init__(
        self, receiver: WeightReceiver, announced: Announcements, staleness: Staleness, trainer: Trainer
    ) -> None:
        self._trainer = trainer
        self._receiver = receiver
        self._announced = announced
        self._staleness = staleness
        self._lock = threading.RLock()  # re-entrant: a signal handler may put a result too
        self._versions: list[int] = []
        self._is_old = False  # the result that these versions belong to was put
        self._without_a_step = 0
        self._warned = False

    @contextlib.contextmanager
    def guard(self, model: nn.Module) -> Iterator[None]:
        """In a block, count the outermost forwards of the model as steps. A rank may go on using its model after it."""
        begins = model.register_forward_pre_hook(
            _BeginStepHook(self), prepend=True
        )  # before a staged version is swapped in
        acts = model.register_forward_pre_hook(_RecordVersionHook(self))  # after that
        try:
            yield
        finally:
            begins.remove()
            acts.remove()

    @contextlib.contextmanager
    def step(self) -> Iterator[int | None]:
        """Begin a step, and keep one version in all of it: see `Worker.step`."""
        self.begin()
        with self._receiver.serving() as version:
            self.acts()
            yield version

    def begin(self) -> None:
        """Wait, or raise, if the version served is too old.

        Raises:
            StaleWeightsError: it is, and `OnStale.RAISE` was chosen.
            SenderClosed: the group was stopped or closed while it waited.
            TransportError: the trainer is gone.
        """
        limit = self._staleness.limit
        if limit is None or self._receiver.serves_here:  # the version of a step under way does not change
            return
        if self._behind > limit:
            with self._receiver.serving():
                pass  # a version that has arrived, and was kept waiting by the step before, goes live
        behind = self._behind
        if behind > limit and self._staleness.on_stale is OnStale.RAISE:
            raise StaleWeightsError(self._receiver.version, behind, limit)
        if behind > limit:
            self._trainer.mention(Held())  # its deadline does not count meanwhile
            try:
                self._await_newer(limit)
            except BaseException:  # such as that of a signal handler, which the function may catch
                with contextlib.suppress(SenderClosed):
                    self._trainer.mention(Released())
                raise
            self._trainer.mention(Released())

    def _await_newer(self, limit: int) -> None:
        while self._behind > limit:
            if self._trainer.stopped:
                raise SenderClosed("the group was stopped while this worker waited for a newer version.")
            self._trainer.flush()
            try:
                self._receiver.receive(LOOK_SECONDS)
            except TransportError as error:
                raise gone(self._receiver, error, "while this worker waited for a newer version") from None

    @property
    def _behind(self) -> int:
        return self._announced.version - (self._receiver.version or 0)

    def acts(self) -> None:
        """The version served is in use: the next result names it."""
        version = self._receiver.version
        with self._lock:
            if self._is_old:
                self._versions, self._is_old = [], False
            if version is not None and version not in self._versions:
                self._versions.append(version)

    def warn_inside(self) -> None:
        """Log, once, that this thread puts a result inside a step, if it does."""
        if self._receiver.serves_here and not self._warned:
            self._warned = True
            logger.warning(_PUT_IN_A_STEP)

    def versions(self) -> tuple[int, ...]:
        """The versions of the steps since the last call, oldest first; where there were none, those of the last."""
        with self._lock:
            self._is_old = True
            self._without_a_step += not self._versions
            if self._without_a_step == _RESULTS_BEFORE_WARNING:
                logger.warning(_NO_STEP)
            return tuple(self._versions)


def gone(receiver: WeightReceiver, error: TransportError, when: str) -> TransportError:
    """``error``, which a receiver raised because it has no trainer any more, in the words of a group."""
    driver = receiver.driver
    if not driver.ended:
        return error
    return driver.ended_error(f"the trainer was lost {when}: {sentence(driver.ended)}")


class _BeginStepHook(Hook):
    """Before a forward, and before a staged version goes live for it."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __call__(self, *_: Any) -> None:
        self._steps.begin()


class _RecordVersionHook(Hook):
    """Before a forward, whose version is settled."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __call__(self, *_: Any) -> None:
        self._steps.acts()
