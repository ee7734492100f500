"""The former name of `weightsync.transports.buffers`."""

import warnings

from weightsync.transports.buffers import Buffer as Buffer
from weightsync.transports.buffers import Mapping as Mapping
from weightsync.transports.buffers import NoRoom as NoRoom
from weightsync.transports.buffers import Pool as Pool
from weightsync.transports.buffers import Segment as Segment
from weightsync.transports.buffers import Storage as Storage
from weightsync.transports.buffers import anonymous as anonymous

warnings.warn(
    "weightsync.transports.memory is now weightsync.transports.buffers: import from there.",
    DeprecationWarning,
    stacklevel=2,
)
