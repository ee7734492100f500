"""Worker processes of this machine, as the bench, the demo and the soak start them. None outlives the run."""

from __future__ import annotations

import contextlib
import enum
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import BaseContext
from typing import Any

from weightsync import MissingExtraError, TransportError

#: How many seconds workers have to end by themselves.
STOP_TIMEOUT = 3.0
#: The most workers of the demo and the soak: more than any machine has cores for.
MOST_WORKERS = 1000
#: The first message to a worker process.
_WORK = "work"
#: How many seconds a call of torch's RPC may take.
CALL_TIMEOUT = 60.0


class SchemeName(enum.StrEnum):
    """The schemes that the demo and the soak run over."""

    SHARED = "shared"
    PROCESS = "process"
    RAY = "ray"
    RPC = "rpc"
    DISTRIBUTED = "distributed"


class LocalWorkerError(TransportError):
    """A worker process failed, ended, or did not answer in time.

    Attributes:
        reason: what happened.
        remote_traceback: the traceback of the worker's exception; empty: it raised none.
    """

    def __init__(self, name: str, reason: str, remote_traceback: str = "") -> None:
        super().__init__("\n".join(filter(None, (f"{name} {reason}", remote_traceback))))
        self.reason = reason
        self.remote_traceback = remote_traceback


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's last answer: the error that ended it."""

    reason: str
    remote_traceback: str


class LocalWorker:
    """A worker process with a pipe for requests and answers, which carries no weights.

    The request None asks it to end.

    Args:
        name: names the worker in errors.
        work: ``work(channel, *arguments)`` runs in the process, until the request None, or EOFError or OSError of the
            channel: the trainer is gone.
        arguments: what else `work` is given.
        context: a multiprocessing context.
    """

    def __init__(self, name: str, work: Callable[..., None], arguments: Sequence[Any], context: BaseContext) -> None:
        self.name = name
        self.channel, self._far_end = context.Pipe()
        make: Any = context
        self.process = make.Process(target=enter, args=(work, self._far_end, *arguments), name=name, daemon=True)

    @property
    def pid(self) -> int:
        """The id of the process, once it is started."""
        pid: int = self.process.pid
        return pid

    def start(self) -> None:
        """Start the process, and let it work."""
        with self._far_end:  # closed in this process, so that the pipe ends with the worker
            self.process.start()
        with contextlib.suppress(OSError):  # it has ended already: whoever asks it is told
            self.channel.send(_WORK)

    def is_alive(self) -> bool:
        """Whether the process runs."""
        alive: bool = self.process.is_alive()
        return alive

    def ask(self, request: Any) -> None:
        """Send a request.

        Raises:
            LocalWorkerError: the worker has ended.
        """
        try:
            self.channel.send(request)
        except OSError as error:
            raise LocalWorkerError(self.name, "has ended.") from error

    def answer(self, timeout: float) -> Any:
        """The worker's next answer.

        Raises:
            LocalWorkerError: it failed, ended, or has not answered in time.
        """
        try:
            if not self.channel.poll(timeout):
                raise LocalWorkerError(self.name, f"has not answered within {timeout:g} s.")
            answer = self.channel.recv()
        except (EOFError, ConnectionResetError, BrokenPipeError) as error:
            raise LocalWorkerError(self.name, "has ended.") from error
        if isinstance(answer, Failure):
            raise LocalWorkerError(self.name, f"failed: {answer.reason}", answer.remote_traceback)
        return answer

    def kill(self) -> None:
        """Send the process SIGKILL."""
        self.process.kill()

    def join(self, timeout: float) -> None:
        """Wait until the process has ended."""
        self.process.join(timeout)

    def close(self) -> None:
        """Kill the process, and let go of its pipe."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()
            self.process.close()
        self.channel.close()
        self._far_end.close()


def stop(workers: Sequence[LocalWorker], timeout: float = STOP_TIMEOUT) -> None:
    """Ask all workers to end, and kill those that do not."""
    until = time.monotonic() + timeout
    running = [worker for worker in workers if worker.process.pid is not None]
    try:
        for worker in running:
            with contextlib.suppress(LocalWorkerError):
                worker.ask(None)
        for worker in running:
            worker.join(max(0.0, until - time.monotonic()))
    finally:
        for worker in workers:
            worker.close()


def enter(work: Callable[..., None], channel: connection.Connection, *arguments: Any) -> None:
    """Run a worker process until its function returns or the trainer is gone."""
    import torch  # noqa: PLC0415 - takes seconds, and the trainer may have something to show before

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C, and then ends the workers
    torch.set_num_threads(1)
    try:
        channel.recv()  # `_WORK`: the trainer knows this process, and ends it
    except (EOFError, OSError):
        return  # Ctrl-C came while it started
    with report_failures(channel):
        work(channel, *arguments)
    # Threads of TorchRL's and of torch's RPC would keep the process.
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def report_failures(channel: connection.Connection) -> Iterator[None]:
    """Report an error of a worker to the trainer, if that is still there."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported to the trainer
        with contextlib.suppress(OSError):
            channel.send(Failure(f"{type(error).__name__}: {error}", traceback.format_exc().rstrip()))


def start_forkserver(modules: Sequence[str]) -> None:
    """Start the process that workers are forked from. It imports their modules once for all of them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    resource_tracker.ensure_running()  # if it started below, it would unblock the signal
    # Ctrl-C goes to all processes of the terminal, but only the trainer should handle it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def store(port: int = 0, timeout: float = 60.0, world_size: int | None = None) -> Any:
    """A store of torch.distributed on this machine: a new one, or the one that listens at a port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - for one scheme

    return TCPStore("127.0.0.1", port, world_size, port == 0, timedelta(seconds=timeout), wait_for_workers=False)


@contextlib.contextmanager
def rpc_address() -> Iterator[str]:
    """The init address of a torch RPC world; it is valid inside the context."""
    with tempfile.TemporaryDirectory(prefix="weightsync-rpc-") as folder:
        yield f"file://{folder}/rendezvous"


def rpc_name(rank: int) -> str:
    """The name of a process in torch's RPC; the trainer is rank 0."""
    return f"worker{rank - 1}" if rank else "trainer"


def join_rpc(address: str, rank: int, world_size: int, call_timeout: float = CALL_TIMEOUT) -> None:
    """Join torch's RPC, and wait until all other processes have joined."""
    from torch.distributed import rpc  # noqa: PLC0415 - for one scheme

    # Over TCP: RPC's shared memory transport polls without pause in every process.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=address, rpc_timeout=call_timeout, _transports=["uv"], _channels=["basic"]
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # from torch itself
        rpc.init_rpc(rpc_name(rank), rank=rank, world_size=world_size, rpc_backend_options=options)  # type: ignore[no-untyped-call]


def leave_rpc() -> None:
    """Leave torch's RPC without waiting for the others, because some of them may be dead."""
    from torch.distributed import rpc  # noqa: PLC0415 - for one scheme

    rpc.shutdown(graceful=False)


@contextlib.contextmanager
def joined_rpc(address: str, world_size: int, timeout: float, call_timeout: float = CALL_TIMEOUT) -> Iterator[None]:
    """Be the trainer of a world of torch's RPC, whose workers call `join_rpc`.

    It joins in a thread, because torch cannot be interrupted and waits half an hour for a worker that has died.

    Raises:
        TransportError: the workers have not joined in time, or the trainer itself could not join.
    """
    failed: list[Exception] = []

    def join() -> None:
        try:
            join_rpc(address, 0, world_size, call_timeout)
        except Exception as error:  # noqa: BLE001 - raised below, in the caller's thread
            failed.append(error)

    joining = threading.Thread(target=join, name="join-rpc", daemon=True)
    joining.start()
    joining.join(timeout)
    if joining.is_alive():
        # This also happens in a process that used RPC before, because torch waits for the old workers.
        raise TransportError(f"the workers have not joined torch's RPC within {timeout:g} s.")
    if failed:
        raise TransportError(f"the trainer could not join torch's RPC: {failed[0]}") from failed[0]
    try:
        yield
    finally:
        leave_rpc()


@contextlib.contextmanager
def running_ray(feature: str, **settings: Any) -> Iterator[Any]:
    """Ray, as a module. It is started here unless it already runs in this process, and then ends with the context.

    Args:
        feature: what needs it, for the error.
        settings: more arguments of ``ray.init``.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray  # noqa: PLC0415 - an extra that takes seconds to import
        import ray.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("ray", feature) from error
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default of 15 starves its workers on a machine that is busy with other programs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    fixed: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    # A short path, because it contains Ray's sockets, whose paths are limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="ws", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ended = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address="local", _temp_dir=folder, **fixed, **settings)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, ended)  # Ray's own handler aborts the process
            yield ray
        finally:
            ray.shutdown()
