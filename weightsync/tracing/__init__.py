"""Record what every sender and receiver does, for `weightsync verify`: see ``docs/tracing.md``."""

from weightsync.engine.recorder import record as record
