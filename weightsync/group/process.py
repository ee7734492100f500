"""A worker's process: how it is started, watched, and ended with all that it has started."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
from multiprocessing.context import BaseContext
from typing import Any, Final

from torch import Tensor, nn

from weightsync.clock import Deadline
from weightsync.errors import ConfigurationError
from weightsync.group.worker import Job, work
from weightsync.transports.process import started_at, watching

#: Seconds that the kernel gets to end a process that was killed.
_REAP_SECONDS: Final = 5.0


class WorkerProcess:
    """A process that runs one life of a worker. It has a session of its own, so that its children are ended with it.

    Args:
        context: a multiprocessing context.
        job: what it does.

    Raises:
        Exception: the job cannot be pickled, or the system starts no more processes.
    """

    def __init__(self, context: BaseContext, job: Job) -> None:
        name = f"weightsync worker {job.index}"
        self.process: Any = context.Process(target=work, args=(job,), name=name)  # type: ignore[attr-defined]
        self.process.start()
        self._pid: int = self.process.pid
        self._watch = watching(self._pid, started_at(self._pid) or 0)

    def fileno(self) -> int:
        """Readable once the process is dead."""
        return self._watch.fileno()

    @property
    def dead(self) -> bool:
        """Whether it is dead. Its pipes may be open all the same, where a child of its own has inherited them."""
        return self._watch.dead

    def how_it_ended(self) -> str:
        """In words, once it is dead."""
        self.process.join(_REAP_SECONDS)
        code: int | None = self.process.exitcode
        if code is None:
            return "its process is dead"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code} before its function had returned"

    def kill(self) -> None:
        """Kill the process and those that it has started. They may already be dead."""
        if not self._watch.dead:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)  # its session, if it has come so far as to have one

    def close(self) -> None:
        """Kill what is left, and let go of everything."""
        self.kill()
        self.process.join(_REAP_SECONDS)
        self._watch.close()
        with contextlib.suppress(ValueError):  # it still runs: the kernel does not end it
            self.process.close()


class CopiedModel:
    """Makes a worker's model of the trainer's: a copy without its weights, which the first version brings.

    Args:
        model: the trainer's.

    Raises:
        ConfigurationError: it cannot be copied or pickled.
    """

    def __init__(self, model: nn.Module) -> None:
        bare: dict[int, Any] = {}
        for parameter in model.parameters():
            bare[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        for buffer in model.buffers():
            bare[id(buffer)] = _on_host(buffer)
        try:
            # Plain pickle: multiprocessing's would put tensors into shared memory.
            self._pickled = pickle.dumps(copy.deepcopy(model, bare))
        except Exception as error:
            raise ConfigurationError(
                f"the model {type(model).__name__} cannot be copied to workers ({type(error).__name__}: {error}): give "
                "make_model=, a function that makes one."
            ) from error

    def __call__(self) -> nn.Module:
        """A new model. Its parameters are on the meta device."""
        model: nn.Module = pickle.loads(self._pickled)
        return model


def _on_host(buffer: Tensor) -> Tensor:
    return buffer.detach().cpu().clone()


def end_all(processes: list[WorkerProcess], deadline: Deadline) -> None:
    """Give processes until the deadline to end by themselves, and kill those that have not."""
    for process in processes:
        process.process.join(deadline.nap)
    for process in processes:
        process.kill()
