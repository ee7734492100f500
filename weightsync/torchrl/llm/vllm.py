"""vLLM's weight transfer by TorchRL's names."""

from __future__ import annotations

from typing import Any

import torch

from weightsync.clock import Timeout
from weightsync.errors import ConfigurationError
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.engines.carrier import Carrier
from weightsync.schemes.engines.nccl import VLLMNCCLCarrier
from weightsync.schemes.engines.vllm import VLLMEngine
from weightsync.torchrl.llm.senders import EngineSender, EngineTransport, Metadata, at_least_one
from weightsync.weights.strategy import WeightStrategy


def _checked(carrier: Carrier | None) -> Carrier | None:
    """Raise ConfigurationError: this is neither a carrier nor None."""
    if carrier is not None and not isinstance(carrier, Carrier):
        raise ConfigurationError(f"carrier= is {carrier!r}: give a Carrier, the object that moves the tensors.")
    return carrier


class VLLMCollectiveTransport(EngineTransport):
    """Sends to one vLLM engine: see `VLLMEngine`.

    Args:
        master_address: the address of the group in which the carrier is rank 0; the carrier sends it to the engine.
        master_port: its port.
        rank: the rank of this process: 0, the trainer; None at the engine.
        world_size: the size of the group.
        device: the carrier's.
        vllm_engine: the engine, a Ray actor that holds one, or the URL of a server.
        carrier: transfers the tensors to the engine's workers; default: a `VLLMNCCLCarrier` of this group.
        timeout: seconds until `send_weights` ends; None: forever; default: `WEIGHTSYNC_TIMEOUT` or 60.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        rank: int | None,
        world_size: int,
        device: torch.device | str | int | None = None,
        vllm_engine: Any = None,
        *,
        carrier: Carrier | None = None,
        timeout: float | Timeout | None = Timeout.DEFAULT,
    ) -> None:
        super().__init__(timeout)
        self.master_address, self.master_port = master_address, master_port
        self.rank, self.world_size, self.device = rank, world_size, device
        self._engine, self._carrier = vllm_engine, _checked(carrier)

    def init_all_workers_group(self, model_metadata: Metadata, gpus_per_replica: int | None = None) -> None:
        """In the trainer: create a link to the engine. At the first send, engine and carrier join their group.

        Raises:
            ConfigurationError: there is no engine; or no carrier, and no vLLM or CUDA device here.
        """
        if self.rank is None:
            return  # the engine joins when the trainer calls it
        if self._engine is None:
            raise ConfigurationError(
                "init_all_workers_group() needs vllm_engine=: the URL of a server, a vLLM engine, or a Ray actor that "
                "holds one."
            )
        self._carrier = self._carrier or VLLMNCCLCarrier(
            self.world_size,
            master_address=self.master_address,
            master_port=self.master_port or None,
            device=self.device,
        )
        self._connect(VLLMEngine(self._engine, self._carrier))

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        """Return None at once: the engine's workers receive by themselves."""
        return


class VLLMWeightSyncScheme(WeightSyncScheme):
    """One vLLM engine as the worker: see `VLLMEngine`.

    Args:
        master_address: the address of the group in which the carrier is rank 0; default: "localhost".
        master_port: its port; default: a free one.
        gpus_per_replica: GPUs of each replica of the engine.
        num_replicas: how many replicas there are.
        strategy: "tensordict" (default) or "state_dict".
        device: the carrier's.
        carrier: transfers the tensors to the engine's workers; default: a `VLLMNCCLCarrier` of this group.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int = 1,
        num_replicas: int = 1,
        strategy: WeightStrategy | str = "tensordict",
        device: torch.device | str | int = 0,
        *,
        carrier: Carrier | None = None,
    ) -> None:
        self.master_address = master_address or "localhost"
        self.master_port = master_port
        self.gpus_per_replica = at_least_one(gpus_per_replica, "gpus_per_replica")
        self.num_replicas, self.device = at_least_one(num_replicas, "num_replicas"), device
        self.carrier = _checked(carrier)
        super().__init__(strategy)

    def create_transport(self, *_: Any, vllm_engine: Any = None, rank: int | None = 0, **__: Any) -> Any:
        """A transport to an engine."""
        return VLLMCollectiveTransport(
            self.master_address,
            self.master_port or 0,
            rank,
            1 + self.num_replicas * self.gpus_per_replica,
            self.device,
            vllm_engine,
            carrier=self.carrier,
        )

    def create_sender(self) -> VLLMWeightSender:  # type: ignore[override]
        """A sender to the engine that `init_all_workers_group` gets."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: Any) -> VLLMWeightReceiver:  # type: ignore[override]
        """The engine's end, which receives on its own."""
        return VLLMWeightReceiver(self, vllm_engine)


class VLLMWeightSender(EngineSender):
    """Sends to one vLLM engine: see `VLLMWeightSyncScheme.create_sender`."""

    _scheme: VLLMWeightSyncScheme

    def init_all_workers_group(self, model_metadata: Metadata, vllm_engine: Any = None) -> None:
        """Create a link to the engine: see `VLLMCollectiveTransport.init_all_workers_group`."""
        transport = self._scheme.create_transport(vllm_engine=vllm_engine)
        transport.init_all_workers_group(model_metadata, gpus_per_replica=self._scheme.gpus_per_replica)
        if self._transport is not None:
            self._transport.shutdown()
        self._transport = transport


class VLLMWeightReceiver:
    """The engine's end: vLLM's own workers receive and apply when the sender calls the engine.

    Args:
        scheme: the scheme that made it.
        vllm_engine: the engine.
    """

    def __init__(self, scheme: VLLMWeightSyncScheme, vllm_engine: Any) -> None:
        self._scheme = scheme
        self._engine = vllm_engine

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Do nothing: the engine joins when the trainer calls it."""

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Do nothing: the engine has applied what its workers received."""

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """False: nothing is received here."""
        return False
