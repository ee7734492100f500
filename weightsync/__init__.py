"""Model weights from a trainer to its workers, over a protocol that a model checker has checked.

A scheme makes both sides. In the trainer::

    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender("policy", pipes=trainer_ends, model=policy)
    report = scheme.get_sender().send()          # returns once every worker serves it, or raises

In a worker::

    scheme.init_on_worker("policy", pipe=worker_end, model=policy)
    receiver = scheme.get_receiver()
    while acting:
        receiver.receive()                       # between forward passes; True: a new version is live
"""

from weightsync._tables import Delivery, RefusalKind, State
from weightsync.errors import (
    AckTimeoutError,
    ConfigurationError,
    LayoutError,
    MissingExtraError,
    ModelPathError,
    ProtocolError,
    RefusedError,
    StateError,
    SyncError,
    TransportError,
    WeightSyncError,
    WorkerLostError,
)
from weightsync.layout import Layout
from weightsync.options import OnFailure, OnPending, Verify
from weightsync.receiver import WeightReceiver
from weightsync.report import Evidence, Outcome, OutcomeKind, SyncReport
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.none import NoWeightSyncScheme
from weightsync.schemes.pipes import MultiProcessWeightSyncScheme
from weightsync.schemes.shared import SharedMemWeightSyncScheme
from weightsync.sender import WeightSender
from weightsync.strategy import WeightStrategy
from weightsync.timing import Timeout

__version__ = "0.1.0"

__all__ = [
    "AckTimeoutError",
    "ConfigurationError",
    "Delivery",
    "Evidence",
    "Layout",
    "LayoutError",
    "MissingExtraError",
    "ModelPathError",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "OnFailure",
    "OnPending",
    "Outcome",
    "OutcomeKind",
    "ProtocolError",
    "RefusalKind",
    "RefusedError",
    "SharedMemWeightSyncScheme",
    "State",
    "StateError",
    "SyncError",
    "SyncReport",
    "Timeout",
    "TransportError",
    "Verify",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncError",
    "WeightSyncScheme",
    "WorkerLostError",
    "__version__",
]
