"""Workers as processes: how each is started, reached, watched, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from weightsync.clock import Deadline
from weightsync.errors import GIVE_RESTARTS, ConfigurationError, TransportError
from weightsync.group.channel import TrainerEnd
from weightsync.group.function import name_of
from weightsync.group.launcher import GroupArguments, Launched
from weightsync.group.members import Running
from weightsync.group.stack_dump import StackDump, request
from weightsync.group.steps import Announced
from weightsync.group.worker import InheritedChannel, Job, work
from weightsync.schemes.pipes import PipeScheme
from weightsync.transports.process import signal_name, started_at, watching, without_interrupts

#: Seconds that the kernel gets to end a process that was killed.
_REAP_SECONDS: Final = 5.0
_GUARD_IT: Final = (
    'If your program has no `if __name__ == "__main__":` guard around the code that makes the group, add one: each '
    "worker imports the program"
)
_MOVE_IT: Final = (
    "Workers cannot import what is defined in a notebook or at a prompt, or in the __main__.py of a package, folder or "
    "zip file: put run=, make_model= and the model's class into a module and import them, or give "
    'ctx=multiprocessing.get_context("fork")'
)
#: What to do if the system refuses to start a process.
_REMEDIES: Final = {
    errno.EAGAIN: "Allow more processes and threads (`ulimit -u`, or the container's limit), or start fewer workers.",
    errno.EMFILE: "Run `ulimit -n 4096` before the trainer.",
    errno.ENOMEM: "Free memory, or start fewer workers.",
}


@contextlib.contextmanager
def _naming_the_limit(what: str) -> Iterator[None]:
    """Say what cannot be started, and what to do, if this process has reached a limit of the system."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        raise TransportError(f"{what} cannot be started: {error.strerror}. {_REMEDIES[error.errno]}") from error


def _is_imported(program: ModuleType) -> bool:
    """Whether workers import a program: it is neither a notebook nor typed at a prompt, and no `__main__.py`."""
    if program.__spec__ is not None:
        return program.__spec__.name.rpartition(".")[2] != "__main__"
    return Path(vars(program).get("__file__") or "").is_file()


class WorkerProcess:
    """A process that runs one life of a worker. It has a session of its own, so that its children are ended with it.

    Args:
        context: a multiprocessing context.
        job: what it does.
        dumps: where its stack can be read; belongs to the process from now on.

    Raises:
        ConfigurationError: the job cannot be pickled.
        TransportError: the process cannot be watched. It was killed.
        Exception: the system starts no more processes.
    """

    fate = "killed"

    def __init__(self, context: BaseContext, job: Job, dumps: Connection) -> None:
        self._dumps = dumps
        name = f"weightsync worker {job.index}"
        self.handle: Any = context.Process(target=work, args=(job,), name=name)  # type: ignore[attr-defined]
        start_method = context.get_start_method()
        # The fork server's processes are its children, and would keep what it began with.
        starting = contextlib.nullcontext() if start_method == "forkserver" else without_interrupts()
        try:
            with starting:
                self.handle.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigurationError(
                f"what worker {job.index} is to run cannot be pickled (run= is {name_of(job.plan.run)}; "
                f"{type(error).__name__}: {error}): define run= and make_model= at the top level of a module, not as a "
                "lambda or inside another function; or give "
                'ctx=multiprocessing.get_context("fork"). Nothing was started.'
            ) from error
        self._imports_program = start_method != "fork"
        self._pid: int = self.handle.pid
        try:
            self._watch = watching(self._pid, started_at(self._pid) or 0)
        except BaseException:
            self.handle.kill()
            self.handle.join(_REAP_SECONDS)
            raise

    def fileno(self) -> int:
        """Readable once the process is dead."""
        return self._watch.fileno()

    @property
    def dead(self) -> bool:
        """Whether it is dead. Its pipes may still be open, if a child of it has inherited them."""
        return self._watch.dead

    def how_it_ended(self, started: bool) -> str:
        """How it ended, in words, once it is dead: see `Process.how_it_ended`."""
        self.handle.join(_REAP_SECONDS)
        code: int | None = self.handle.exitcode
        if code is None:
            return "its process is dead"
        if code < 0:
            return f"its process was ended by {signal_name(-code)}"
        if started or not self._imports_program:
            return f"its process ended with exit code {code} before its function had returned"
        advice = _GUARD_IT if _is_imported(sys.modules["__main__"]) else _MOVE_IT
        return f"its process ended with exit code {code} before it had started; its stderr says why. {advice}"

    def stack_dump(self) -> StackDump:
        """Its main thread's stack: see `Process.stack_dump`."""
        return StackDump() if self._watch.dead else request(self._pid, self._dumps)

    def join(self, deadline: Deadline) -> None:
        """Wait until it is dead."""
        self.handle.join(deadline.nap)

    def kill(self) -> None:
        """Kill the process and those that it has started. They may already be dead."""
        if not self._watch.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)  # its session, if it got as far as to have one

    def close(self) -> None:
        """Kill what is left, and release all resources."""
        self.kill()
        self.handle.join(_REAP_SECONDS)
        self._watch.close()
        self._dumps.close()
        with contextlib.suppress(ValueError):  # it still runs: the kernel does not end it
            self.handle.close()


class ProcessLauncher:
    """Starts processes, which are reached over a pipe for weights and a socket pair for results.

    Args:
        scheme: shared memory, or pipes.
        asked: what the user has asked for.

    Raises:
        ConfigurationError: an argument is out of range, or not for processes.
    """

    remedy = GIVE_RESTARTS

    def __init__(self, scheme: PipeScheme, asked: GroupArguments) -> None:
        asked.refuse_others("actor_options")
        self.scheme = scheme
        self.size = asked.least_one_worker()
        self._plan = asked.plan()
        self._context: Any = multiprocessing.get_context("spawn") if asked.ctx is None else asked.ctx
        #: None: not open.
        self._announced: Announced | None = None

    def open(self) -> None:
        """Make the memory that announces versions: see `Launcher.open`."""
        with _naming_the_limit("The group"):
            self._announced = Announced()

    def reached(self, lives: Sequence[Launched]) -> Mapping[str, Any]:
        """See `Launcher.reached`."""
        return {"pipes": [life.endpoint for life in lives], "processes": [life.watched for life in lives]}

    def launch(self, index: int, restarts: int) -> Launched:
        """Start a process: see `Launcher.launch`."""
        with _naming_the_limit(f"Worker {index}"):
            return self._launch(index, restarts)

    def _launch(self, index: int, restarts: int) -> Launched:
        assert self._announced is not None
        ours, theirs = self._context.Pipe()
        near, far = socket.socketpair()
        dumps, dump_to = self._context.Pipe(duplex=False)
        with theirs, far, dump_to:
            reach, inherited = {"pipe": theirs}, InheritedChannel(far)
            job = Job(self._plan, index, restarts, self.scheme, reach, inherited, self._announced, dump_to)
            channel = TrainerEnd(near)
            try:
                process = WorkerProcess(self._context, job, dumps)
            except BaseException:
                channel.close()
                dumps.close()
                ours.close()
                raise
        return Launched(Running(process, channel, self._announced.announce), ours, process.handle)

    def close(self, unreached: Sequence[Launched]) -> None:
        """Close the pipes that the sender does not have, and drop the announcements."""
        self._announced = None
        for life in unreached:
            life.endpoint.close()
