"""The trainer's side of the workers: starting, querying and ending them. No worker outlives the trainer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch import nn

from weightsync import MissingExtraError, TransportError, WeightSyncScheme
from weightsync.demo.learning import Chunk
from weightsync.demo.state import MODEL_ID, START_TIMEOUT, Proof, SchemeName, Settings
from weightsync.demo.worker import Failure, RayWorker, Request, join_rpc, rpc_name, work

#: An answer of a worker. The first one is its process id; None means that the worker has ended.
Answer = int | Chunk | Proof | Failure | None
#: How many seconds workers have to end by themselves.
_STOP_TIMEOUT = 3.0


def start_workers(settings: Settings, scheme: WeightSyncScheme, model: nn.Module) -> ProcessWorkers | RayWorkers:
    """Start the workers, and initialise the scheme on the trainer's side.

    Raises:
        MissingExtraError: Ray is chosen, but not installed.
        TransportError: the workers did not start.
    """
    workers = RayWorkers() if settings.scheme is SchemeName.RAY else ProcessWorkers()
    try:
        workers.start(settings, scheme, model)
    except BaseException:
        scheme.close()
        workers.close()
        raise
    return workers


class ProcessWorkers:
    """Worker processes on this machine. Each has its own pipe for requests and answers, besides the scheme's link."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self._processes: list[BaseProcess] = []
        self._channels: dict[int, connection.Connection] = {}
        self._cleanup = contextlib.ExitStack()

    def start(self, settings: Settings, scheme: WeightSyncScheme, model: nn.Module) -> None:
        """Start the processes, each with a copy of the scheme, and wait until all of them run."""
        context = multiprocessing.get_context("forkserver")
        rpc_address = None
        if settings.scheme is SchemeName.RPC:
            folder = self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-"))
            rpc_address = f"file://{folder}/rendezvous"
        far_ends = []
        for index in range(settings.workers):
            self._channels[index], far = context.Pipe()
            far_ends.append(far)
            arguments = (index, settings, scheme, far, rpc_address)
            self._processes.append(context.Process(target=work, args=arguments, name=f"worker-{index}", daemon=True))
        if rpc_address is None:  # before the processes start, so that each inherits its end of the link
            scheme.init_on_sender(MODEL_ID, model=model, **self._sender_arguments(settings))
        for process, far in zip(self._processes, far_ends, strict=True):
            with far:  # closed in this process, so that the pipe ends with the worker
                process.start()
        self._await_started(settings.workers)
        if rpc_address is not None:
            self._join_rpc(rpc_address, settings.workers + 1)
            names = [rpc_name(rank) for rank in range(1, settings.workers + 1)]
            scheme.init_on_sender(MODEL_ID, model=model, collector_infos=names)

    def _sender_arguments(self, settings: Settings) -> dict[str, Any]:
        """With `processes`, the sender notices at once if a worker dies, even before the handshake."""
        arguments: dict[str, Any] = {"num_workers": settings.workers, "processes": self._processes}
        if settings.scheme is SchemeName.DISTRIBUTED:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415 - for this scheme

            limit = timedelta(seconds=START_TIMEOUT)
            arguments["store"] = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        return arguments

    def _join_rpc(self, address: str, world_size: int) -> None:
        """Join in a thread, because torch cannot be interrupted and waits half an hour for a worker that has died."""
        from torch.distributed import rpc  # noqa: PLC0415 - only this scheme needs it

        joining = threading.Thread(target=join_rpc, args=(address, 0, world_size), name="join-rpc", daemon=True)
        joining.start()
        joining.join(START_TIMEOUT)
        if joining.is_alive():
            # This also happens in a process that used RPC before, because torch waits for the old workers.
            raise TransportError(f"the workers have not joined torch's RPC within {START_TIMEOUT:g} s.")
        # Leave without waiting for the others, because some of them may be dead.
        self._cleanup.callback(rpc.shutdown, graceful=False)

    def _await_started(self, count: int) -> None:
        """Wait for the first answer of each worker."""
        until = time.monotonic() + START_TIMEOUT
        while len(self.pids) < count:
            answers = self.answers(max(0.0, until - time.monotonic()))
            for index, answer in answers:
                if not isinstance(answer, int):
                    reason = f": {answer.reason}" if isinstance(answer, Failure) else "."
                    raise TransportError(f"worker {index} ended while it was starting{reason}")
                self.pids[index] = answer
            if not answers:
                raise TransportError(f"{count - len(self.pids)} workers have not started within {START_TIMEOUT:g} s.")

    def ask(self, index: int, request: Request) -> None:
        """Send a request to a worker, unless it has ended."""
        if index in self._channels:
            with contextlib.suppress(OSError):
                self._channels[index].send(request)

    def answers(self, timeout: float) -> list[tuple[int, Answer]]:
        """Wait for answers; None as an answer means that the worker has ended. Empty: there were none in time."""
        ready = connection.wait(self._channels.values(), timeout)
        return [(index, self._read(index)) for index, channel in list(self._channels.items()) if channel in ready]

    def _read(self, index: int) -> Answer:
        try:
            answer: Answer = self._channels[index].recv()
            return answer
        except (EOFError, OSError):
            self._channels.pop(index).close()
            return None

    def kill(self, index: int) -> None:
        """Send a worker SIGKILL."""
        self._processes[index].kill()

    def close(self) -> None:
        """Ask all workers to stop, and kill those that do not."""
        running = [process for process in self._processes if process.pid is not None]
        until = time.monotonic() + _STOP_TIMEOUT
        try:
            for index in self._channels:
                self.ask(index, Request.STOP)
            for process in running:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in running:
                process.kill()
                process.join()
            for channel in self._channels.values():
                channel.close()
            self._cleanup.close()


class RayWorkers:
    """Workers as Ray actors. Ray is started for them unless it already runs in this process."""

    def __init__(self) -> None:
        try:
            import ray  # noqa: PLC0415 - an extra that takes seconds to import
            import ray.exceptions  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("ray", "weightsync demo --scheme ray") from error
        self._ray: Any = ray
        self.pids: list[int] = []
        self._actors: list[Any] = []
        #: The worker of each pending call.
        self._calls: dict[Any, int] = {}
        self._cleanup = contextlib.ExitStack()

    def start(self, settings: Settings, scheme: WeightSyncScheme, model: nn.Module) -> None:
        """Start Ray and the actors, and wait until all of them run."""
        if not self._ray.is_initialized():
            self._start_ray()
        actor = self._ray.remote(num_cpus=0)(RayWorker)
        self._actors = [actor.remote(index, settings) for index in range(settings.workers)]
        try:
            self.pids = self._ray.get([each.pid.remote() for each in self._actors], timeout=START_TIMEOUT)
        except self._ray.exceptions.RayError as error:
            raise TransportError(f"Ray has not started the workers: {error}") from error
        scheme.init_on_sender(MODEL_ID, model=model, remote_collectors=self._actors)

    def _start_ray(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # A short path, because it contains Ray's sockets, whose paths are limited to 107 characters.
        folder = tempfile.TemporaryDirectory(prefix="ws", dir="/tmp", ignore_cleanup_errors=True)
        self._cleanup.enter_context(folder)
        self._cleanup.callback(self._ray.shutdown)
        self._ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=200 * 2**20,
            _temp_dir=folder.name,
        )

    def ask(self, index: int, request: Request) -> None:
        """Call the actor; `answers` gives the result."""
        self._calls[self._actors[index].answer.remote(request)] = index

    def answers(self, timeout: float) -> list[tuple[int, Answer]]:
        """Wait for the results of calls; None as an answer means that the actor has died. Empty: none came in time."""
        done = self._ray.wait(list(self._calls), timeout=timeout)[0] if self._calls else []
        return [(self._calls.pop(call), self._result(call)) for call in done]

    def _result(self, call: Any) -> Answer:
        try:
            answer: Answer = self._ray.get(call)
            return answer
        except self._ray.exceptions.RayTaskError as error:
            return Failure(f"{type(error.cause).__name__}: {error.cause}", str(error))
        except self._ray.exceptions.RayError:
            return None

    def kill(self, index: int) -> None:
        """Send an actor's process SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[index], signal.SIGKILL)

    def close(self) -> None:
        """End all actors, and Ray if it was started here."""
        with self._cleanup:
            for actor in self._actors:
                self._ray.kill(actor)
