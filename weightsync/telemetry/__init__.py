"""What a scheme does, for OpenTelemetry (the extra `otel`) and Prometheus (the extra `prometheus`)."""

from __future__ import annotations

from weightsync.errors import ConfigurationError
from weightsync.schemes.base import WeightSyncScheme


def require_scheme(scheme: WeightSyncScheme, asked: str) -> None:
    """Check that this is a scheme.

    Raises:
        ConfigurationError: it is not, or is the class of one.
    """
    if not isinstance(scheme, WeightSyncScheme):
        raise ConfigurationError(
            f"{asked} was given {scheme!r}: give the scheme, such as RayWeightSyncScheme(), and not its sender or "
            "receiver; for a WorkerGroup, its `scheme`."
        )
