"""TorchRL-compatible weight synchronisation, on a protocol model-checked in TLA+.

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
import sys
from typing import TYPE_CHECKING, Any

from weightsync import names

if TYPE_CHECKING:
    from weightsync.clock import Timeout as Timeout
    from weightsync.engine.events import EventKind as EventKind
    from weightsync.engine.events import Subscription as Subscription
    from weightsync.engine.events import SyncEvent as SyncEvent
    from weightsync.engine.events import SyncPhase as SyncPhase
    from weightsync.engine.events import SyncRole as SyncRole
    from weightsync.engine.receiver import WeightReceiver as WeightReceiver
    from weightsync.engine.sender import WeightSender as WeightSender
    from weightsync.errors import AckTimeoutError as AckTimeoutError
    from weightsync.errors import AuthenticationError as AuthenticationError
    from weightsync.errors import ConfigurationError as ConfigurationError
    from weightsync.errors import EngineError as EngineError
    from weightsync.errors import LayoutError as LayoutError
    from weightsync.errors import MissingExtraError as MissingExtraError
    from weightsync.errors import ModelBusyError as ModelBusyError
    from weightsync.errors import ModelPathError as ModelPathError
    from weightsync.errors import NonFiniteError as NonFiniteError
    from weightsync.errors import PartlyLoadedError as PartlyLoadedError
    from weightsync.errors import ProtocolError as ProtocolError
    from weightsync.errors import RefusedError as RefusedError
    from weightsync.errors import ResultTimeoutError as ResultTimeoutError
    from weightsync.errors import SenderClosed as SenderClosed
    from weightsync.errors import StaleWeightsError as StaleWeightsError
    from weightsync.errors import StateError as StateError
    from weightsync.errors import SyncError as SyncError
    from weightsync.errors import TransportError as TransportError
    from weightsync.errors import WeightSyncError as WeightSyncError
    from weightsync.errors import WorkerFailedError as WorkerFailedError
    from weightsync.errors import WorkerLostError as WorkerLostError
    from weightsync.group.channel import WorkerResult as WorkerResult
    from weightsync.group.group import WorkerGroup as WorkerGroup
    from weightsync.group.ranks import run_worker as run_worker
    from weightsync.group.worker import Worker as Worker
    from weightsync.options import OnFailure as OnFailure
    from weightsync.options import OnPending as OnPending
    from weightsync.options import OnStale as OnStale
    from weightsync.options import Verify as Verify
    from weightsync.options import WireDtype as WireDtype
    from weightsync.protocol._tables import Delivery as Delivery
    from weightsync.protocol._tables import RefusalKind as RefusalKind
    from weightsync.protocol._tables import State as State
    from weightsync.protocol.report import Evidence as Evidence
    from weightsync.protocol.report import Outcome as Outcome
    from weightsync.protocol.report import OutcomeKind as OutcomeKind
    from weightsync.protocol.report import SyncReport as SyncReport
    from weightsync.schemes.base import WeightSyncScheme as WeightSyncScheme
    from weightsync.schemes.distributed import DistributedWeightSyncScheme as DistributedWeightSyncScheme
    from weightsync.schemes.engines.carrier import Carrier as Carrier
    from weightsync.schemes.engines.client import Engine as Engine
    from weightsync.schemes.engines.ipc import VLLMIPCCarrier as VLLMIPCCarrier
    from weightsync.schemes.engines.nccl import SGLangNCCLCarrier as SGLangNCCLCarrier
    from weightsync.schemes.engines.nccl import VLLMNCCLCarrier as VLLMNCCLCarrier
    from weightsync.schemes.engines.scheme import EngineWeightSyncScheme as EngineWeightSyncScheme
    from weightsync.schemes.engines.sglang import SGLangEngine as SGLangEngine
    from weightsync.schemes.engines.vllm import VLLMEngine as VLLMEngine
    from weightsync.schemes.none import NoWeightSyncScheme as NoWeightSyncScheme
    from weightsync.schemes.peers.base import InitialSyncTransport as InitialSyncTransport
    from weightsync.schemes.peers.base import TransportBackend as TransportBackend
    from weightsync.schemes.pipes import MultiProcessWeightSyncScheme as MultiProcessWeightSyncScheme
    from weightsync.schemes.ray import RayWeightSyncScheme as RayWeightSyncScheme
    from weightsync.schemes.ray import WeightSyncActor as WeightSyncActor
    from weightsync.schemes.ray_module import RayModuleTransformReceiver as RayModuleTransformReceiver
    from weightsync.schemes.ray_module import RayModuleTransformScheme as RayModuleTransformScheme
    from weightsync.schemes.ray_module import RayModuleTransformSender as RayModuleTransformSender
    from weightsync.schemes.registry import WeightSyncBackend as WeightSyncBackend
    from weightsync.schemes.registry import register_weight_sync_backend as register_weight_sync_backend
    from weightsync.schemes.rpc import RPCWeightSyncScheme as RPCWeightSyncScheme
    from weightsync.schemes.sharded import send_sharded as send_sharded
    from weightsync.schemes.shared import SharedMemWeightSyncScheme as SharedMemWeightSyncScheme
    from weightsync.torchrl.transports.distributed import DistributedTransport as DistributedTransport
    from weightsync.torchrl.transports.mp import MPTransport as MPTransport
    from weightsync.torchrl.transports.none import NoTransport as NoTransport
    from weightsync.torchrl.transports.ray import RayActorTransport as RayActorTransport
    from weightsync.torchrl.transports.ray import RayTransport as RayTransport
    from weightsync.torchrl.transports.rpc import RPCTransport as RPCTransport
    from weightsync.torchrl.transports.shared import SharedMemTransport as SharedMemTransport
    from weightsync.torchrl.updaters.base import WeightUpdaterBase as WeightUpdaterBase
    from weightsync.torchrl.updaters.local import MultiProcessedWeightUpdater as MultiProcessedWeightUpdater
    from weightsync.torchrl.updaters.local import RemoteModuleWeightUpdater as RemoteModuleWeightUpdater
    from weightsync.torchrl.updaters.local import VanillaWeightUpdater as VanillaWeightUpdater
    from weightsync.torchrl.updaters.ray import RayWeightUpdater as RayWeightUpdater
    from weightsync.weights.layout import Layout as Layout
    from weightsync.weights.loader import Loader as Loader
    from weightsync.weights.model_path import _resolve_model as _resolve_model
    from weightsync.weights.strategy import WeightStrategy as WeightStrategy

__version__ = "0.1.0"

# Importing torch and tensordict takes seconds. A name brings its module when it is first asked for, so that the command
# line, whose `check` needs neither, starts at once.
_HOMES = {
    "Delivery": "protocol._tables",
    "RefusalKind": "protocol._tables",
    "State": "protocol._tables",
    "InitialSyncTransport": "schemes.peers.base",
    "TransportBackend": "schemes.peers.base",
    "MPTransport": "torchrl.transports.mp",
    "NoTransport": "torchrl.transports.none",
    "SharedMemTransport": "torchrl.transports.shared",
    "RayActorTransport": "torchrl.transports.ray",
    "RayTransport": "torchrl.transports.ray",
    "DistributedTransport": "torchrl.transports.distributed",
    "AckTimeoutError": "errors",
    "AuthenticationError": "errors",
    "ConfigurationError": "errors",
    "EngineError": "errors",
    "LayoutError": "errors",
    "MissingExtraError": "errors",
    "ModelBusyError": "errors",
    "ModelPathError": "errors",
    "NonFiniteError": "errors",
    "PartlyLoadedError": "errors",
    "ProtocolError": "errors",
    "RefusedError": "errors",
    "SenderClosed": "errors",
    "StateError": "errors",
    "SyncError": "errors",
    "TransportError": "errors",
    "WeightSyncError": "errors",
    "WorkerLostError": "errors",
    "ResultTimeoutError": "errors",
    "StaleWeightsError": "errors",
    "WorkerFailedError": "errors",
    "WorkerGroup": "group.group",
    "WorkerResult": "group.channel",
    "Worker": "group.worker",
    "run_worker": "group.ranks",
    "Layout": "weights.layout",
    "Loader": "weights.loader",
    "OnFailure": "options",
    "OnPending": "options",
    "OnStale": "options",
    "Verify": "options",
    "WireDtype": "options",
    "_resolve_model": "weights.model_path",
    "EventKind": "engine.events",
    "Subscription": "engine.events",
    "SyncEvent": "engine.events",
    "SyncPhase": "engine.events",
    "SyncRole": "engine.events",
    "WeightReceiver": "engine.receiver",
    "Evidence": "protocol.report",
    "Outcome": "protocol.report",
    "OutcomeKind": "protocol.report",
    "SyncReport": "protocol.report",
    "WeightSyncScheme": "schemes.base",
    "DistributedWeightSyncScheme": "schemes.distributed",
    "Engine": "schemes.engines.client",
    "EngineWeightSyncScheme": "schemes.engines.scheme",
    "SGLangEngine": "schemes.engines.sglang",
    "Carrier": "schemes.engines.carrier",
    "VLLMEngine": "schemes.engines.vllm",
    "VLLMIPCCarrier": "schemes.engines.ipc",
    "VLLMNCCLCarrier": "schemes.engines.nccl",
    "SGLangNCCLCarrier": "schemes.engines.nccl",
    "NoWeightSyncScheme": "schemes.none",
    "MultiProcessWeightSyncScheme": "schemes.pipes",
    "RayWeightSyncScheme": "schemes.ray",
    "RayModuleTransformReceiver": "schemes.ray_module",
    "RayModuleTransformScheme": "schemes.ray_module",
    "RayModuleTransformSender": "schemes.ray_module",
    "WeightSyncActor": "schemes.ray",
    "WeightSyncBackend": "schemes.registry",
    "register_weight_sync_backend": "schemes.registry",
    "RPCTransport": "torchrl.transports.rpc",
    "RPCWeightSyncScheme": "schemes.rpc",
    "send_sharded": "schemes.sharded",
    "SharedMemWeightSyncScheme": "schemes.shared",
    "WeightSender": "engine.sender",
    "WeightStrategy": "weights.strategy",
    "Timeout": "clock",
    "WeightUpdaterBase": "torchrl.updaters.base",
    "MultiProcessedWeightUpdater": "torchrl.updaters.local",
    "RemoteModuleWeightUpdater": "torchrl.updaters.local",
    "VanillaWeightUpdater": "torchrl.updaters.local",
    "RayWeightUpdater": "torchrl.updaters.ray",
}

# Before all other finders: they take a folder without modules, left under a former name, for a namespace package.
sys.meta_path.insert(0, names.FormerModuleFinder())

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


names.lookup = __getattr__
