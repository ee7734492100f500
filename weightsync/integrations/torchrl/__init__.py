"""The former home of `weightsync.torchrl.collectors`."""

import warnings

from weightsync.torchrl.collectors import accept as accept

warnings.warn(
    "weightsync.integrations.torchrl is now weightsync.torchrl.collectors: import from there.",
    DeprecationWarning,
    stacklevel=2,
)
