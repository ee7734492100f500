"""TorchRL's collectors take our schemes as their own.

    import weightsync.integrations.torchrl  # or: from weightsync.integrations.torchrl import accept; accept()

    collector = MultiSyncCollector(..., weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})

A collector asks whether a scheme is a `torchrl.weight_update.WeightSyncScheme`; `accept` registers ours as virtual
subclasses of that abstract class. Nothing of TorchRL is changed or replaced.
"""

from __future__ import annotations

from weightsync.errors import MissingExtraError
from weightsync.schemes.base import WeightSyncScheme


def accept() -> type[WeightSyncScheme]:
    """Have ``isinstance(scheme, torchrl.weight_update.WeightSyncScheme)`` say yes to all our schemes. Twice is allowed.

    Returns:
        The base of our schemes.

    Raises:
        MissingExtraError: (an ImportError) TorchRL is not installed.
    """
    try:
        import torchrl.weight_update as theirs  # noqa: PLC0415 - imported where it is used
    except ImportError as error:
        raise MissingExtraError("torchrl", "to be taken by TorchRL's collectors") from error
    theirs.WeightSyncScheme.register(WeightSyncScheme)
    return WeightSyncScheme


accept()
