"""Weight updaters, by TorchRL's names: they push weights to workers by calls.

base     WeightUpdaterBase: what all share, and what a subclass may override
local    copies in this process
pushes   one push at a time, over the machines of a sender; calls: a worker's call as a link
ray      pushes to Ray actors
"""

from weightsync.torchrl.updaters.base import WeightUpdaterBase
from weightsync.torchrl.updaters.local import (
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    VanillaWeightUpdater,
)
from weightsync.torchrl.updaters.ray import RayWeightUpdater

__all__ = [
    "MultiProcessedWeightUpdater",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]
