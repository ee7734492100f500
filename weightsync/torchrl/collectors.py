"""Makes TorchRL's collectors accept our schemes and updaters as their own.

    import weightsync.torchrl.collectors  # or: from weightsync.torchrl.collectors import accept; accept()

    collector = MultiSyncCollector(..., weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})

A collector checks that a scheme is a `torchrl.weight_update.WeightSyncScheme`, and that an updater is a
`torchrl.collectors.WeightUpdaterBase`; `accept` registers ours as virtual subclasses of these abstract classes. Nothing
in TorchRL is changed or replaced.

An updater that is made after TorchRL's collectors were imported is accepted without this module.
"""

from __future__ import annotations

from weightsync.errors import MissingExtraError
from weightsync.schemes.base import WeightSyncScheme
from weightsync.torchrl.updaters import WeightUpdaterBase


def accept() -> type[WeightSyncScheme]:
    """Make our schemes pass ``isinstance(scheme, torchrl.weight_update.WeightSyncScheme)``, and our updaters the same
    check of TorchRL's. Calling it twice is allowed.

    Returns:
        The base of our schemes.

    Raises:
        MissingExtraError: (an ImportError) TorchRL is not installed.
    """
    try:
        import torchrl.collectors.weight_update as their_updaters  # noqa: PLC0415 - imported where it is used
        import torchrl.weight_update as theirs  # noqa: PLC0415 - imported where it is used
    except ImportError as error:
        raise MissingExtraError("torchrl", "Using weightsync's schemes in TorchRL's collectors") from error
    theirs.WeightSyncScheme.register(WeightSyncScheme)
    their_updaters.WeightUpdaterBase.register(WeightUpdaterBase)
    return WeightSyncScheme


accept()
