"""The former home of `weightsync.torchrl.updaters`."""

import warnings

from weightsync.torchrl.updaters import MultiProcessedWeightUpdater as MultiProcessedWeightUpdater
from weightsync.torchrl.updaters import RayWeightUpdater as RayWeightUpdater
from weightsync.torchrl.updaters import RemoteModuleWeightUpdater as RemoteModuleWeightUpdater
from weightsync.torchrl.updaters import VanillaWeightUpdater as VanillaWeightUpdater
from weightsync.torchrl.updaters import WeightUpdaterBase as WeightUpdaterBase

warnings.warn(
    "weightsync.updaters is now weightsync.torchrl.updaters: import from there.", DeprecationWarning, stacklevel=2
)
