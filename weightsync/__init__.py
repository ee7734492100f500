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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from weightsync.options import OnFailure, OnPending
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
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncError",
    "WeightSyncScheme",
    "WorkerLostError",
    "__version__",
]

# Importing torch and tensordict takes seconds. A name brings its module when it is first asked for, so that the command
# line, whose `check` needs neither, starts at once.
_HOMES = {
    name: home
    for home, names in {
        "_tables": ("Delivery", "RefusalKind", "State"),
        "errors": (
            "AckTimeoutError",
            "ConfigurationError",
            "LayoutError",
            "MissingExtraError",
            "ModelPathError",
            "ProtocolError",
            "RefusedError",
            "StateError",
            "SyncError",
            "TransportError",
            "WeightSyncError",
            "WorkerLostError",
        ),
        "layout": ("Layout",),
        "options": ("OnFailure", "OnPending"),
        "receiver": ("WeightReceiver",),
        "report": ("Evidence", "Outcome", "OutcomeKind", "SyncReport"),
        "schemes.base": ("WeightSyncScheme",),
        "schemes.none": ("NoWeightSyncScheme",),
        "schemes.pipes": ("MultiProcessWeightSyncScheme",),
        "schemes.shared": ("SharedMemWeightSyncScheme",),
        "sender": ("WeightSender",),
        "strategy": ("WeightStrategy",),
        "timing": ("Timeout",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
