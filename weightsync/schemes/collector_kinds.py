"""Which of TorchRL's collectors have workers that a scheme reaches."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from weightsync.engine.copies import MISSING, optional
from weightsync.errors import ConfigurationError
from weightsync.schemes.relay import is_torchrls


class WorkerKind(enum.Enum):
    """What the workers of a TorchRL collector are."""

    ACTORS = "Ray actors"
    OVER_RPC = "reached over RPC"
    RANKS = "ranks of torch.distributed"
    PROCESSES = "processes of this host"


#: By the first of these attributes that a collector has.
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


def refuse_out_of_reach(scheme: str, reached: WorkerKind | None, context: Any, given: Iterable[str]) -> None:
    """Refuse a TorchRL collector that the scheme could not serve: it would wait for workers that never connect.

    Args:
        scheme: the scheme's name, for the message.
        reached: the workers that it reaches; None: it needs none of the collector's.
        context: the context of `init_on_sender`.
        given: the keywords that say how the workers are reached: then the collector is not asked.

    Raises:
        ConfigurationError: the collector has other workers, or none.
    """
    if reached is None or any(given) or not is_torchrls(context):
        return
    kind, name = _kind_of(context), type(context).__name__
    if kind is None:
        raise ConfigurationError(
            f"a {name} has no workers, since it acts with the trainer's own policy: it needs no {scheme}. Leave "
            "weight_sync_schemes= out. Nothing was sent."
        )
    if kind is not reached:
        raise ConfigurationError(
            f"{scheme} does not reach the workers of a {name}, which are {kind.value}: give it {_SCHEMES[kind]}. "
            "Nothing was sent."
        )


def _kind_of(collector: Any) -> WorkerKind | None:
    return next((kind for name, kind in _KINDS.items() if optional(collector, name) is not MISSING), None)
