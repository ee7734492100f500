"""Work on large buffers in several threads.

A new thread may wait some milliseconds until the kernel gives it a core of its own; a thread that was asleep gets one
at once. So the threads that help stay from one copy to the next, for as long as a sender or receiver of this process
is open: see `Keeping`. A buffer is cut into more parts than there are threads, and each thread takes the next one, so
a helper that comes late costs nothing: the others have taken its share.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from queue import SimpleQueue
from typing import Final

import torch

#: The least number of bytes for which one more thread pays, and the size of the smallest part of a buffer.
LEAST: Final = 8 << 20
LEAST_PART: Final = 4 << 20
#: How many parts there are for each thread, if they are not too small then.
_PARTS_PER_THREAD: Final = 4

Part = tuple[int, int]
Work = Callable[[int, int], None]


def threads_for(nbytes: int) -> int:
    """How many threads are to work on so many bytes."""
    return max(1, min(torch.get_num_threads(), nbytes // LEAST))


def shares(nbytes: int, unit: int, threads: int) -> list[Part]:
    """Cut ``0:nbytes`` into parts of about equal size, several for each thread; all but the last end at a whole unit.

    For one thread there is one part.
    """
    count = 1 if threads == 1 else max(threads, min(_PARTS_PER_THREAD * threads, nbytes // LEAST_PART))
    cuts = {nbytes * number // count // unit * unit for number in range(count)}
    return list(pairwise([*sorted(cuts), nbytes]))


def in_threads(work: Work, parts: Iterable[Part], threads: int) -> None:
    """Call ``work(start, end)`` for each part, in as many threads, including this one.

    Returns, or raises, once all calls have ended. If others cannot be started, this thread does their share.

    Raises Exception: the first error that `work` raised. The other parts were still worked on.
    """
    job = _Job(work, parts)
    _helpers.begin(job, threads - 1)
    try:
        job.finish()
    finally:
        _helpers.end()
    if job.errors:
        raise job.failed()


def alone() -> bool:
    """Whether this is the only thread of the process, apart from helpers that wait for work."""
    return threading.active_count() == 1 + _helpers.resting


class Keeping:
    """Keeps the threads that help, until it is ended or its owner is gone."""

    def __init__(self, owner: object) -> None:
        self._key = object()
        _helpers.keep(self._key)
        # Called by the garbage collector, at any place in any thread: it waits for nothing.
        self._dropped = weakref.finalize(owner, _helpers.let_go, self._key)

    def end(self) -> None:
        """Release the threads for this owner: they end if it was the last one. Ending twice is allowed."""
        self._dropped.detach()
        _join(_helpers.let_go(self._key))


class _Job:
    """The parts of a buffer that no thread has begun, and the helpers that work on the others."""

    def __init__(self, work: Work, parts: Iterable[Part]) -> None:
        self._work = work
        self._left = deque(parts)
        #: What the work raised.
        self.errors: list[BaseException] = []
        #: The helpers that may be working on a part.
        self._helping: set[int] = set()
        #: Has an item for each that has ended. No lock is held here: Ctrl-C may interrupt the caller at any place.
        self._ended: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """In a helper: work on one part after another until none is left."""
        helper = threading.get_ident()
        self._helping.add(helper)
        try:
            self._work_on()
        finally:
            self._helping.discard(helper)
            self._ended.put(None)

    def finish(self) -> None:
        """Work on one part after another, and wait until no helper works on one.

        A helper that comes later finds no part, and keeps no buffer alive. If this is interrupted, no further part is
        begun, but it still waits: once it raises, nobody writes to the buffer.
        """
        try:
            self._work_on()
            self._wait()
        except BaseException:
            self._left.clear()
            self._wait()
            raise
        finally:
            del self._work

    def _wait(self) -> None:
        while self._helping:
            self._ended.get()

    def _work_on(self) -> None:
        while True:
            try:
                part = self._left.popleft()
            except IndexError:
                return
            self._guarded(*part)

    def _guarded(self, start: int, end: int) -> None:
        try:
            self._work(start, end)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that asked for the work
            self.errors.append(error)

    def failed(self) -> BaseException:
        """The first error. None is kept: its traceback refers to this, and so to the buffer."""
        first = self.errors[0]
        self.errors.clear()
        return first


class _Helpers:
    """The threads that help. They end once no owner keeps them and no work is under way."""

    #: The process that these are the helpers of.
    _process = 0

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: there are none, except those that this process has started itself."""
        if self._process == os.getpid():
            return
        # The garbage collector may call `let_go` in a thread that holds it.
        self._lock = threading.RLock()
        self._keys: set[object] = set()
        self._working = 0
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._process = os.getpid()

    def _own_lock(self) -> threading.RLock:
        """The lock. Others are called in a forked child before `forget` is, and what they inherit may be held."""
        self.forget()
        return self._lock

    @property
    def resting(self) -> int:
        """How many threads there are that wait for work; 0 while some is under way."""
        return 0 if self._working else len(self._threads)

    def keep(self, key: object) -> None:
        """Keep the threads until this key is let go."""
        with self._own_lock():
            self._keys.add(key)

    def let_go(self, key: object) -> list[threading.Thread]:
        """Do not keep the threads for this key any more. Returns those that end."""
        with self._own_lock():
            self._keys.discard(key)
            return self._ending()

    def begin(self, job: _Job, count: int) -> None:
        """Have up to so many threads help with a job."""
        with self._lock:
            self._working += 1
            jobs, missing = self._jobs, count - len(self._threads)
        try:
            # Without the lock: the garbage collector may call `let_go` in a thread that starts, which is waited for.
            started = list(_started(jobs, missing))
            with self._lock:
                self._threads += started
                helping = min(count, len(self._threads))
            for _ in range(helping):
                jobs.put(job)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The job is done."""
        with self._lock:
            self._working -= 1
            ending = self._ending()
        _join(ending)

    def _ending(self) -> list[threading.Thread]:
        if self._keys or self._working:
            return []
        ending, self._threads = self._threads, []
        jobs, self._jobs = self._jobs, SimpleQueue()
        jobs.put(None)
        return ending


def _started(jobs: SimpleQueue[_Job | None], count: int) -> Iterator[threading.Thread]:
    """Start so many threads that help, or as many as can be started now."""
    for _ in range(count):
        thread = threading.Thread(target=_serve, args=(jobs,), name="weightsync-copy", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        yield thread


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    """Help with one job after another, in a thread of its own."""
    while (job := jobs.get()) is not None:
        job.help()
        del job
    jobs.put(None)  # ends the next one, even one that is not counted because its start was interrupted


def _join(threads: Iterable[threading.Thread]) -> None:
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


_helpers: Final = _Helpers()
os.register_at_fork(after_in_child=_helpers.forget)
