"""Which of TorchRL's collectors have workers that a scheme reaches, and the processes of these workers."""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from weightsync.clock import Deadline, Timeout
from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, WorkerLostError
from weightsync.schemes.relay import is_torchrl_collector
from weightsync.transports.wakeup import DeferredProcess


class WorkerKind(enum.Enum):
    """What the workers of a TorchRL collector are."""

    ACTORS = "Ray actors"
    OVER_RPC = "reached over RPC"
    RANKS = "ranks of torch.distributed"
    PROCESSES = "processes of this host"


#: What a collector's workers are, by the first of these attributes that it has.
_KINDS = {
    "remote_collectors": WorkerKind.ACTORS,
    "collector_infos": WorkerKind.OVER_RPC,
    "tcp_port": WorkerKind.RANKS,
    "num_workers": WorkerKind.PROCESSES,
}
_SCHEMES = {
    WorkerKind.ACTORS: "RayWeightSyncScheme()",
    WorkerKind.OVER_RPC: "RPCWeightSyncScheme()",
    WorkerKind.RANKS: "DistributedWeightSyncScheme()",
    WorkerKind.PROCESSES: "SharedMemWeightSyncScheme() or MultiProcessWeightSyncScheme()",
}


def refuse_out_of_reach(scheme: str, reachable_kind: WorkerKind | None, context: Any, keywords: Iterable[str]) -> None:
    """Refuse a TorchRL collector that the scheme could not serve: it would wait for workers that never connect.

    Args:
        scheme: the scheme's name, for the message.
        reachable_kind: the workers that it reaches; None: it needs none of the collector's.
        context: the context of `init_on_sender`.
        keywords: the keywords that say how the workers are reached. If one is given, the collector is not checked.

    Raises:
        ConfigurationError: the collector has other workers, or none.
    """
    if reachable_kind is None or any(keywords) or not is_torchrl_collector(context):
        return
    kind, name = _kind_of(context), type(context).__name__
    if kind is None:
        raise ConfigurationError(
            f"a {name} has no workers, since it acts with the trainer's own policy: it needs no {scheme}. Leave "
            "weight_sync_schemes= out. Nothing was sent."
        )
    if kind is not reachable_kind:
        raise ConfigurationError(
            f"{scheme} does not reach the workers of a {name}, which are {kind.value}: give it {_SCHEMES[kind]}. "
            "Nothing was sent."
        )


def _kind_of(collector: Any) -> WorkerKind | None:
    return next((kind for name, kind in _KINDS.items() if optional(collector, name) is not MISSING), None)


def collector_processes(context: Any, workers: Iterable[int]) -> dict[int, DeferredProcess]:
    """By worker id: what finds the process of a TorchRL collector's worker. Empty if it has none on this host.

    The collector starts them after `init_on_sender`, before `connect`.
    """
    if not has_processes(context):
        return {}
    collector = weakref.ref(context)
    return {worker: DeferredProcess(partial(_started_process, collector, worker)) for worker in workers}


def _started_process(collector: weakref.ref[Any], worker: int) -> Any:
    """The process of a worker; None: it has not been started yet."""
    processes = optional(collector(), "procs")
    return processes[worker] if isinstance(processes, list) and worker < len(processes) else None


def await_own_workers(context: Any, model_id: str) -> None:
    """Wait until a TorchRL collector has connected its scheme to its own processes, or is shut down.

    Its constructor connects it, after it has connected the schemes of ``weight_recv_schemes=``: the first version may
    have arrived by then.
    """
    scheme = context._weight_sync_schemes.get(model_id) if has_processes(context) else None
    deadline, pause = Deadline(Timeout.START), threading.Event()
    while scheme is not None and not (scheme.synchronized_on_sender or deadline.passed):
        if optional(context, "_shutdown_complete") is True:
            return
        pause.wait(0.05)


def note_worker_errors(error: WorkerLostError, context: Any) -> None:
    """Add to an error what the lost workers of a TorchRL collector raised: the collector will not read it any more."""
    pipes = optional(context, "pipes") if has_processes(context) else None
    if not isinstance(pipes, list):
        return
    for worker in error.lost:
        said = _next_pipe_message(pipes[worker]) if worker < len(pipes) else None
        if isinstance(said, Mapping) and said.get("error"):
            error.add_note(f"worker {worker} raised {said.get('exception_type')}: {said.get('exception_msg')}")


def _next_pipe_message(pipe: Any) -> Any:
    """The next message in a collector's own pipe; None: there is none."""
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


def has_processes(context: Any) -> bool:
    """Whether this is a TorchRL collector whose workers are processes of this host."""
    return is_torchrl_collector(context) and _kind_of(context) is WorkerKind.PROCESSES
