"""What a run of the demo is asked to do, and the constants of its making."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import weightsync
from weightsync import ConfigurationError

#: The name under which the policy travels.
MODEL_ID = "policy"
#: Environments over all workers; each gets its share, at least one.
ENVIRONMENTS = 16
#: Steps of each environment in one chunk.
CHUNK_STEPS = 32
#: Chunks that a worker may be ahead of the trainer.
CHUNKS_AHEAD = 1
#: Steps of experience for one update of the policy.
BATCH_STEPS = 512
#: Experience that lies further back than so many versions is dropped.
MAX_STALENESS = 8
#: Episodes in the mean return that is shown.
MEAN_OVER = 20
#: CartPole-v1 counts as solved above this mean return; the highest possible is 500.
SOLVED = 475.0
#: Updates in a row that must find it solved before the run ends early.
STAYS_SOLVED = 15
#: Half way, where a worker is killed, is half of the time or this mean return, whichever comes first.
HALF_WAY = 150.0
#: Updates that must follow the loss of a worker.
UPDATES_AFTER_LOSS = 20
#: Seconds for the workers to start, import torch and apply their first version.
START_TIMEOUT = 60.0
#: Seconds for a worker to apply a version, to send experience, or to prove what it serves.
WORKER_TIMEOUT = 15.0


class SchemeName(enum.Enum):
    """The schemes that the demo runs over."""

    SHARED = "shared"
    PIPE = "pipe"
    RAY = "ray"
    RPC = "rpc"
    DISTRIBUTED = "distributed"

    @property
    def words(self) -> str:
        """What it moves the weights over, in words."""
        return _WORDS[self]

    def build(self) -> weightsync.WeightSyncScheme:
        """A new scheme of this kind."""
        match self:
            case SchemeName.SHARED:
                return weightsync.SharedMemWeightSyncScheme()
            case SchemeName.PIPE:
                return weightsync.MultiProcessWeightSyncScheme()
            case SchemeName.RAY:
                return weightsync.RayWeightSyncScheme()
            case SchemeName.RPC:
                return weightsync.RPCWeightSyncScheme()
            case SchemeName.DISTRIBUTED:
                return weightsync.DistributedWeightSyncScheme()


_WORDS = {
    SchemeName.SHARED: "shared memory",
    SchemeName.PIPE: "pipes",
    SchemeName.RAY: "Ray",
    SchemeName.RPC: "torch.distributed.rpc",
    SchemeName.DISTRIBUTED: "torch.distributed",
}


class SyncMode(enum.Enum):
    """Whether the trainer stands and waits for each sync."""

    #: `send`: the trainer goes on when every worker has answered.
    BLOCKING = "blocking"
    #: `send_async`, and `wait_async` only before the next one: the sync overlaps with training.
    OVERLAPPED = "async"


class Casualty(enum.Enum):
    """Whether a worker is killed half way."""

    NONE = "none"
    #: The last worker gets SIGKILL half way.
    ONE = "one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the demo.

    Attributes:
        scheme: what the weights travel over.
        workers: how many rollout processes act.
        sync: whether the trainer waits for each sync.
        seconds: the longest that training may take, in seconds, the start of the workers included.
        seed: what all randomness is derived from. Processes race, so two runs with one seed still differ.
        casualty: whether a worker is killed half way.

    Raises:
        ConfigurationError: no workers, no time, or nobody would survive.
    """

    scheme: SchemeName = SchemeName.SHARED
    workers: int = 2
    sync: SyncMode = SyncMode.BLOCKING
    seconds: float = 90.0
    seed: int = 0
    casualty: Casualty = Casualty.NONE

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"the demo needs at least 1 worker, not {self.workers}.")
        if not self.seconds > 0:
            raise ConfigurationError(f"the demo needs more than 0 seconds, not {self.seconds:g}.")
        if self.seed < 0:
            raise ConfigurationError(f"a seed is 0 or more, not {self.seed}.")
        if self.casualty is Casualty.ONE and self.workers == 1:
            raise ConfigurationError("killing a worker needs at least 2: one to lose and one to go on with.")

    @property
    def environments(self) -> int:
        """How many environments each worker steps."""
        return max(1, ENVIRONMENTS // self.workers)
