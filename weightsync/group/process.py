"""Workers as processes: how each is started, reached, watched, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from weakref import WeakSet, finalize

from weightsync.clock import Deadline
from weightsync.engine.driver import Shield
from weightsync.errors import GIVE_RESTARTS, ConfigurationError, TransportError
from weightsync.group.channel import TrainerEnd
from weightsync.group.function import name_of
from weightsync.group.launcher import GroupArguments, Launched
from weightsync.group.members import MemberState, Running
from weightsync.group.stack_dump import StackDump, request
from weightsync.group.steps import Announced
from weightsync.group.worker import InheritedChannel, Job, work
from weightsync.schemes.pipes import PipeScheme
from weightsync.transports.process import forget_after_fork, signal_name, started_at, watching, without_interrupts

#: Seconds that the kernel gets to end a process that was killed.
_REAP_SECONDS: Final = 5.0
#: Descriptors that this process needs while it starts a worker, with some to spare.
_START_DESCRIPTORS: Final = 20
#: Descriptors of a link to a worker. The links are created once all workers are started.
_LINK_DESCRIPTORS: Final = 3
#: What to do if the system refuses to start a process.
_REMEDIES: Final = {
    errno.EAGAIN: "Allow more processes and threads (`ulimit -u`, or the container's limit), or start fewer workers.",
    errno.ENOMEM: "Free memory, or start fewer workers.",
}
_GUARD_IT: Final = (
    'If your program has no `if __name__ == "__main__":` guard around the code that makes the group, add one: each '
    "worker imports the program"
)
_MOVE_IT: Final = (
    "Workers cannot import what is defined in a notebook or at a prompt, or in the __main__.py of a package, folder or "
    "zip file: put run=, make_model= and the model's class into a module and import them, or give "
    'ctx=multiprocessing.get_context("fork")'
)


def _is_imported(program: ModuleType) -> bool:
    """Whether workers import a program: it is neither a notebook nor typed at a prompt, and no `__main__.py`."""
    if program.__spec__ is not None:
        return program.__spec__.name.rpartition(".")[2] != "__main__"
    return Path(vars(program).get("__file__") or "").is_file()


class _JobInMemory:
    """A job that a process gets in shared memory, and unpickles there as the job itself.

    `multiprocessing` writes arguments into a pipe. If they are large, it waits there, without a deadline, until the
    process has read them, and it imports the program and torch first.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __reduce__(self) -> tuple[Any, ...]:
        data = ForkingPickler.dumps(self._job)
        memory = os.memfd_create("weightsync-job", os.MFD_CLOEXEC)
        finalize(self, os.close, memory)  # the process has its own descriptor by then
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
        return _unpickle_job, (DupFd(memory),)


def _unpickle_job(passed: Any) -> Job:
    """In the worker process: the job. `multiprocessing` has passed the memory's descriptor."""
    with open(passed.detach(), "rb") as file:
        file.seek(0)
        job: Job = ForkingPickler.loads(file.read())
    return job


class WorkerProcess:
    """A process that runs one life of a worker. It has a session of its own, so that its children are ended with it.

    Args:
        context: a multiprocessing context.
        job: what it does.
        dumps: where its stack can be read; belongs to the process from now on.

    Raises:
        ConfigurationError: the job cannot be pickled.
        OSError: the system starts no more processes.
    """

    fate = "killed"

    def __init__(self, context: BaseContext, job: Job, dumps: Connection) -> None:
        self._dumps = dumps
        #: From then on its number may be another process's.
        self._closed = False
        name = f"weightsync worker {job.index}"
        start_method = context.get_start_method()
        sent = job if start_method == "fork" else _JobInMemory(job)
        self.handle: Any = context.Process(target=work, args=(sent,), name=name)  # type: ignore[attr-defined]
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
        return self._closed or self._watch.dead

    def how_it_ended(self, state: MemberState) -> str:
        """How it ended, in words, once it is dead: see `Process.how_it_ended`."""
        self.handle.join(_REAP_SECONDS)
        code: int | None = self.handle.exitcode
        if code is None:
            return "its process is dead"
        if code < 0:
            return f"its process was ended by {signal_name(-code)}"
        if state is not MemberState.STARTING or not self._imports_program:
            return f"its process ended with exit code {code} before its function had returned"
        advice = _GUARD_IT if _is_imported(sys.modules["__main__"]) else _MOVE_IT
        return f"its process ended with exit code {code} before it had started; its stderr says why. {advice}"

    def stack_dump(self) -> StackDump:
        """Its main thread's stack: see `Process.stack_dump`."""
        return StackDump() if self.dead else request(self._pid, self._dumps)

    def join(self, deadline: Deadline) -> None:
        """Wait until it is dead."""
        while not self.dead and not deadline.passed:
            self.handle.join(deadline.nap)

    def kill(self) -> None:
        """Kill the process and those that it has started. They may already be dead."""
        if self._closed:
            return
        if not self.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)  # its session, if it got as far as to have one

    def close(self) -> None:
        """Kill what is left, and release all resources."""
        self.kill()
        self.handle.join(_REAP_SECONDS)
        self._closed = True
        self._watch.close()
        self._dumps.close()
        with contextlib.suppress(ValueError):  # it still runs: the kernel does not end it
            self.handle.close()


class ProcessLauncher:
    """Starts processes, which are reached over a pipe for weights and a socket pair for results.

    Args:
        scheme: shared memory, or pipes.
        arguments: what the user has asked for.

    Raises:
        ConfigurationError: an argument is out of range, or not for processes.
    """

    remedy = GIVE_RESTARTS

    def __init__(self, scheme: PipeScheme, arguments: GroupArguments) -> None:
        arguments.refuse_others("actor_options")
        self.scheme = scheme
        self.size = arguments.least_one_worker()
        self._plan = arguments.plan()
        self._context: Any = multiprocessing.get_context("spawn") if arguments.ctx is None else arguments.ctx
        #: None: not open.
        self._announced: Announced | None = None
        #: The trainer's ends of the pipes for weights.
        self._links: WeakSet[Connection[Any, Any]] = WeakSet()
        forget_after_fork(self)

    def forget(self) -> None:
        """In a forked child, such as a worker: it must not hold open the pipe by whose end it notices that we died."""
        for link in self._links:
            link.close()

    def open(self) -> None:
        """Make the memory that announces versions: see `Launcher.open`."""
        with Shield(lambda: None):  # what a handler raises leaves no descriptor open
            _require_descriptors(0, _START_DESCRIPTORS)
            try:
                self._announced = Announced()
            except OSError as error:
                raise _start_error(0, error) from error

    def init_arguments(self, lives: Sequence[Launched]) -> Mapping[str, Any]:
        """See `Launcher.init_arguments`."""
        return {"pipes": [life.endpoint for life in lives], "processes": [life.watched for life in lives]}

    def launch(self, index: int, restarts: int) -> Launched:
        """Start a process: see `Launcher.launch`."""
        assert self._announced is not None
        _require_descriptors(index, _START_DESCRIPTORS if restarts else _START_DESCRIPTORS + _LINK_DESCRIPTORS * index)
        try:
            return self._launch_process(index, restarts, self._announced)
        except TransportError:  # an OSError too
            raise
        except OSError as error:
            raise _start_error(index, error) from error

    def _launch_process(self, index: int, restarts: int, announced: Announced) -> Launched:
        with contextlib.ExitStack() as our_ends, contextlib.ExitStack() as worker_ends:
            link, far_link = self._context.Pipe()
            our_ends.enter_context(link)
            self._links.add(link)
            worker_ends.enter_context(far_link)
            near, far = socket.socketpair()
            our_ends.enter_context(near)
            worker_ends.enter_context(far)
            dumps, dump_to = self._context.Pipe(duplex=False)
            our_ends.enter_context(dumps)
            worker_ends.enter_context(dump_to)
            job = Job(
                self._plan, index, restarts, self.scheme, {"pipe": far_link}, InheritedChannel(far), announced, dump_to
            )
            channel = TrainerEnd(near)
            our_ends.callback(channel.close)
            process = WorkerProcess(self._context, job, dumps)
            our_ends.pop_all()
        return Launched(Running(process, channel, announced.announce), link, process.handle)

    def close(self, unreached: Sequence[Launched]) -> None:
        """Close the pipes that the sender does not have, and drop the announcements."""
        self._announced = None
        for life in unreached:
            life.endpoint.close()


def _require_descriptors(index: int, count: int) -> None:
    """Raise TransportError, before anything is opened for a worker, unless this process can open so many descriptors.

    Where they run out while a process starts, `multiprocessing` leaves pipes open.
    """
    descriptors: list[int] = []
    try:
        while len(descriptors) < count:
            descriptors += os.pipe()
    except OSError as error:
        raise _start_error(index, error) from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _start_error(index: int, error: OSError) -> TransportError:
    reason = f"{error.strerror or error}. {_REMEDIES.get(error.errno or 0, '')}".rstrip()
    if error.errno == errno.EMFILE:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        reason = (
            f"too few are left of the {limit} file descriptors that this process may have. Raise that limit "
            "(`ulimit -n`), or start fewer workers."
        )
    return TransportError(f"worker {index} cannot be started: {reason}")
