"""The options of a demo run."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightsync import ConfigurationError

#: The name under which the policy is sent.
MODEL_ID = "policy"
#: The number of environments over all workers; each worker gets an equal share, at least one.
ENVIRONMENTS = 16
#: Steps of each environment in one chunk of experience.
CHUNK_STEPS = 32
#: Seconds for the workers to start, import torch and apply their first version.
START_TIMEOUT = 60.0
#: Seconds for a worker to apply a version, to send experience, or to prove its version.
WORKER_TIMEOUT = 15.0


class SchemeName(enum.Enum):
    """The schemes that the demo runs over."""

    SHARED = "shared"
    PIPE = "pipe"
    RAY = "ray"
    RPC = "rpc"
    DISTRIBUTED = "distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the demo.

    Attributes:
        scheme: the scheme that sends the weights.
        workers: the number of rollout processes.
        overlap: send with `send_async`, so that the sync overlaps with training, instead of `send`.
        seconds: the longest time to train.
        seed: for weights, environments and actions. Processes race, so two runs with the same seed still differ.
        kill_worker: whether to kill the last worker half way.

    Raises ConfigurationError: there are no workers, no time, or a negative seed, or no worker would survive.
    """

    scheme: SchemeName = SchemeName.SHARED
    workers: int = 2
    overlap: bool = False
    seconds: float = 90.0
    seed: int = 0
    kill_worker: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigurationError(f"the demo needs at least 1 worker, not {self.workers}.")
        if not self.seconds > 0:
            raise ConfigurationError(f"the demo needs more than 0 seconds, not {self.seconds:g}.")
        if self.seed < 0:
            raise ConfigurationError(f"the demo's seed must be 0 or more, not {self.seed}.")
        if self.kill_worker and self.workers == 1:
            raise ConfigurationError("--kill-worker needs at least 2 workers: one to kill and one to continue with.")
