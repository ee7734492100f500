"""Workers that are Ray actors, on a Ray of the demo's own unless one is running in this process already."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from weightsync import ConfigurationError, MissingExtraError, TransportError
from weightsync.demo.fleet import GRACE, Body, Gone, Inbox, Listener
from weightsync.demo.settings import START_TIMEOUT, Settings
from weightsync.demo.wire import Collect, Failure, FromWorker, Prove, Stop, ToWorker

#: Ray asks nobody on the network, and does not hide GPUs from actors that asked for none.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OBJECT_STORE_NBYTES = 200 * 2**20


class RayFleet:
    """Starts the workers and ends them.

    A worker is a serial actor: it collects a chunk, or takes up a version, one after the other. A thread for each gives
    it the trainer's commands in turn, and takes in what comes of them.

    Args:
        settings: how many workers, and what they are told.
        heard: called with each message, in the thread that reads it.
        body: must be None: these workers are no processes of ours.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigurationError: a body is given.
        TransportError: the actors did not start.
    """

    def __init__(self, settings: Settings, heard: Listener, body: Body | None) -> None:
        if body is not None:
            raise ConfigurationError("body= says what processes run, but over Ray the workers are actors.")
        self._session = _Session()
        self.size = settings.workers
        self.inbox: Inbox = queue.SimpleQueue()
        self._heard = heard
        self._actors: list[Any] = []
        self._orders: list[queue.SimpleQueue[ToWorker]] = [queue.SimpleQueue() for _ in range(self.size)]
        self._threads: list[threading.Thread] = []
        try:
            self._pids = self._start(settings)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: Settings) -> list[int]:
        from weightsync.demo.ray_actor import RayRollout  # noqa: PLC0415 - torch takes seconds

        ray = self._session.ray
        kind = ray.remote(num_cpus=0)(RayRollout)
        self._actors = [kind.remote(index, settings) for index in range(self.size)]
        try:
            pids: list[int] = ray.get([actor.pid.remote() for actor in self._actors], timeout=START_TIMEOUT)
        except ray.exceptions.RayError as error:
            raise TransportError(f"Ray has not started the workers: {error}") from error
        for index in range(self.size):
            thread = threading.Thread(target=self._serve, args=(index,), name=f"reader-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return pids

    def _serve(self, index: int) -> None:
        """Do what is ordered, until told to stop or the worker is gone."""
        ray, actor = self._session.ray, self._actors[index]
        try:
            while True:
                match self._orders[index].get():
                    case Collect(chunks):
                        for _ in range(chunks):
                            status, chunk = ray.get(actor.collect.remote())
                            self._said(index, status, chunk.writable())
                    case Prove():
                        self._said(index, ray.get(actor.prove.remote()))
                    case Stop():
                        break
        except ray.exceptions.RayTaskError as error:
            self._said(index, Failure(f"{type(error.cause).__name__}: {error.cause}", str(error)))
        except ray.exceptions.RayError:
            pass  # it is dead, or Ray is
        self.inbox.put((index, Gone()))

    def _said(self, index: int, *messages: FromWorker) -> None:
        for message in messages:
            self._heard(index, message)
            self.inbox.put((index, message))

    @property
    def pids(self) -> Sequence[int | None]:
        """The process id of each worker."""
        return self._pids

    def arguments(self) -> dict[str, Any]:
        """What `init_on_sender` is to be given to reach them."""
        return {"remote_collectors": self._actors}

    def tell(self, index: int, message: ToWorker) -> None:
        """Order something; a worker that is gone does not get it."""
        self._orders[index].put(message)

    def kill(self, index: int) -> None:
        """Send a worker SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[index], signal.SIGKILL)

    def close(self) -> None:
        """End all workers, and Ray if it was started here."""
        try:
            for index, actor in enumerate(self._actors):
                self.tell(index, Stop())
                self._session.ray.kill(actor)
            for thread in self._threads:
                thread.join(GRACE)
        finally:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Session:
    """The Ray that runs in this process, or one on this machine alone, which ends with the demo."""

    def __init__(self) -> None:
        try:
            import ray  # noqa: PLC0415 - an extra, and it takes seconds
            import ray.exceptions  # noqa: PLC0415
        except ImportError as error:
            raise MissingExtraError("ray", "weightsync demo --scheme ray") from error
        self.ray: Any = ray
        self._undo = contextlib.ExitStack()
        if ray.is_initialized():
            return
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        for name, value in _ENVIRONMENT.items():
            if name not in os.environ:
                os.environ[name] = value
                self._undo.callback(os.environ.pop, name, None)
        # Short: Ray's sockets lie below it, and their names may have 107 characters.
        folder = tempfile.mkdtemp(prefix="ws", dir="/tmp")
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        self._undo.callback(self.ray.shutdown)
        self.ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=_OBJECT_STORE_NBYTES,
            _temp_dir=folder,
        )

    def close(self) -> None:
        """Leave things as they were."""
        self._undo.close()
