"""Processes: whether a peer's process is alive, and what a forked child must drop.

Sibling processes inherit the ends of pipes, so a stream may never end. The process itself is watched instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import xxhash

from weightsync.clock import clock_id
from weightsync.errors import TransportError

#: How long a process may take to be dead once it has closed its descriptors, in milliseconds.
_DYING_MS = 100


class Forgettable(Protocol):
    """Holds a resource of the operating system that a forked child must not touch."""

    def forget(self) -> None:
        """In a forked child: close this process's copies of descriptors, and nothing of the parent's."""


_inherited: WeakSet[Forgettable] = WeakSet()


def forget_after_fork(holder: Forgettable) -> None:
    """Call ``holder.forget()`` in every child forked from this process."""
    _inherited.add(holder)


def _forget_all() -> None:
    holders, failed = list(_inherited), []
    _inherited.clear()
    for holder in holders:
        try:
            holder.forget()
        except Exception:  # noqa: BLE001 - it may need a descriptor, which the others have yet to close
            failed.append(holder)
    for holder in failed:
        holder.forget()


os.register_at_fork(after_in_child=_forget_all)


class PerProcess(ABC):
    """A value of one process, with a lock. Each forked child begins with a new value."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: begin with a new value."""
        self._lock = threading.Lock()
        self._begin()
        forget_after_fork(self)

    @abstractmethod
    def _begin(self) -> None:
        """Set the value that a process begins with."""


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start a process inside: it begins with SIGINT blocked.

    A terminal sends Ctrl-C to all of its processes, but only the trainer should handle it. Without this a process that
    still imports torch would print a traceback.
    """
    resource_tracker.ensure_running()  # if it started inside, it would unblock the signal
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def own_identity() -> tuple[int, int]:
    """This process's id, and its start in clock ticks since boot, as its Hello states them."""
    pid = os.getpid()
    try:
        return pid, _own_start(pid)
    except ProcessLookupError:
        return pid, 0


@lru_cache(maxsize=1)
def own_host() -> bytes:
    """Identifies this machine and pid namespace, in 16 bytes. A pid is unique only within them.

    Raises TransportError: the kernel does not say, since no descriptor is left, and a later call may succeed; or there
        is no /proc.
    """
    try:
        identity = f"{clock_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        hidden = isinstance(error, FileNotFoundError | PermissionError)
        remedy = f" Mount /proc here: this process has to read {error.filename}." if hidden else ""
        raise TransportError(f"This host's identity cannot be read: {error.strerror}.{remedy}") from error
    return xxhash.xxh3_128_digest(identity.encode())


@lru_cache(maxsize=1)
def own_network() -> str:
    """Identifies this machine and network namespace. Within them, processes reach each other over the loopback."""
    return xxhash.xxh3_128_hexdigest(f"{clock_id()} {os.readlink('/proc/self/ns/net')}".encode())


@lru_cache(maxsize=1)
def _own_start(pid: int) -> int:
    started = started_at(pid)
    if started is None:
        raise ProcessLookupError  # not cached: a later read may succeed
    return started


def started_at(pid: int) -> int | None:
    """When process ``pid`` started: as `read_start`, but None if that cannot be read."""
    try:
        return read_start(pid)
    except OSError:
        return None


def read_start(pid: int) -> int:
    """When process ``pid`` started, in clock ticks since boot.

    Raises OSError: it cannot be read, since that process has ended or no descriptor is left here.
    """
    return int(_status(pid)[19])


def _status(pid: int) -> list[bytes]:
    """What the kernel says about a process, from its state on. Raises OSError: as `read_start`."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # The second field is the program's name in parentheses, and may contain spaces and parentheses itself.
    return stat.rpartition(b")")[2].split()


def is_stopped(pid: int, started: int = 0) -> bool:
    """Whether a process is stopped, by a signal or a debugger; False also if that cannot be read.

    Args:
        started: its start as in `own_identity`: another start is another process. 0: unknown.
    """
    try:
        status = _status(pid)
    except OSError:
        return False
    return status[0] in {b"T", b"t"} and started in {0, int(status[19])}


def signal_name(number: int) -> str:
    """A signal as messages name it. Python has no names for most of the real-time ones."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ProcessWatch:
    """Watches one process for its death.

    In a forked child an inherited watch ends: it reports nothing.

    Args:
        started: its start as in `own_identity`: another start is another process. 0: unknown.
    """

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self._started = started
        #: Readable once the process is dead; -1 if there is nothing to wait for.
        self.fd = -1
        #: Whether it was found dead: `dead` looks again.
        self.found_dead = False
        self._poller = select.poll()
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.found_dead = True
        else:
            self._poller.register(self.fd, select.POLLIN)
            # Read after the pidfd was opened: from here on the number can no longer name another process.
            found = started_at(pid)
            self.found_dead = bool(started) and found is not None and found != started
            if self.found_dead:
                self.close()
            forget_after_fork(self)

    def fileno(self) -> int:
        """Readable once the process is dead; -1 if there is nothing to wait for."""
        return self.fd

    @property
    def dead(self) -> bool:
        """Whether the process has died."""
        return self._dies_within(0)

    def dies(self) -> bool:
        """Whether the process is dead, or is within 100 ms: it closes its descriptors some milliseconds before.

        This process itself is not waited for: it is alive.
        """
        return self.dead if self.pid == os.getpid() else self._dies_within(_DYING_MS)

    def _dies_within(self, milliseconds: int) -> bool:
        if not self.found_dead and self.fd >= 0:
            self.found_dead = bool(self._poller.poll(milliseconds))
        return self.found_dead

    @property
    def ending(self) -> str:
        """How the process ended, in words. Only its parent can read the exit status, until it has waited for it."""
        text = f"process {self.pid} is dead"
        try:
            status = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:  # it is no child of ours, or the parent has waited for it
            return text
        if status is None:
            return text
        if status.si_code == os.CLD_EXITED:
            return f"{text}: it ended with exit code {status.si_status}"
        return f"{text}: it was ended by {signal_name(status.si_status)}"

    def names(self, pid: int, started: int) -> bool:
        """Whether this is the process that is watched."""
        return (self.pid, self._started) == (pid, started)

    def close(self) -> None:
        """Stop watching. Closing twice is allowed."""
        if self.fd != -1:
            fd, self.fd = self.fd, -1  # first: after an interrupt its number may be another file's
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: stop watching."""
        self.close()

    def __del__(self) -> None:
        self.close()


def watching(pid: int, started: int) -> ProcessWatch:
    """A watch for that process.

    Raises:
        TransportError: it cannot be watched: no descriptor is left, this is not permitted, or no process can have that
            number.
    """
    try:
        return ProcessWatch(pid, started)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TransportError(f"Process {pid} cannot be watched: {why}.") from error
