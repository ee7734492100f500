"""The former home of `weightsync.engine.recorder`."""

import warnings

from weightsync.engine.recorder import Recorder as Recorder
from weightsync.engine.recorder import record as record

warnings.warn(
    "weightsync.tracing is now weightsync.engine.recorder: import from there.", DeprecationWarning, stacklevel=2
)
