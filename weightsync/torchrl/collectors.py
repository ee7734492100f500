"""TorchRL's collectors take our schemes and updaters as their own.

    import weightsync.torchrl.collectors  # or: from weightsync.torchrl.collectors import accept; accept()

    collector = MultiSyncCollector(..., weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})

A collector asks whether a scheme is a `torchrl.weight_update.WeightSyncScheme`, and whether an updater is a
`torchrl.collectors.WeightUpdaterBase`; `accept` registers ours as virtual subclasses of these abstract classes. Nothing
of TorchRL is changed or replaced. An updater that is made after TorchRL's collectors were imported is taken without it.
"""

from __future__ import annotations

from weightsync.errors import MissingExtraError
from weightsync.schemes.base import WeightSyncScheme
from weightsync.torchrl.updaters import WeightUpdaterBase


def accept() -> type[WeightSyncScheme]:
    """Have ``isinstance(scheme, torchrl.weight_update.WeightSyncScheme)`` say yes to all our schemes, and the same for
    updaters. Twice is allowed.

    Returns:
        The base of our schemes.

    Raises:
        MissingExtraError: (an ImportError) TorchRL is not installed.
    """
    try:
        import torchrl.collectors.weight_update as their_updaters  # noqa: PLC0415 - imported where it is used
        import torchrl.weight_update as theirs  # noqa: PLC0415 - imported where it is used
    except ImportError as error:
        raise MissingExtraError("torchrl", "to be taken by TorchRL's collectors") from error
    theirs.WeightSyncScheme.register(WeightSyncScheme)
    their_updaters.WeightUpdaterBase.register(WeightUpdaterBase)
    return WeightSyncScheme


accept()
