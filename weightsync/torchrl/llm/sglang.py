"""SGLang by TorchRL's names. The calls contain the tensors, so there is no group to join."""

from __future__ import annotations

from typing import Any, Literal

import torch

from weightsync.errors import ConfigurationError, EngineError, TransportError
from weightsync.options import switch
from weightsync.schemes.base import WeightSyncScheme
from weightsync.schemes.engines.http import HttpCalls
from weightsync.schemes.engines.sglang import SGLangEngine, SGLangPause
from weightsync.torchrl.llm.senders import EngineSender, EngineTransport, Metadata, at_least_one
from weightsync.weights.strategy import WeightStrategy

PauseMode = Literal["abort", "retract", "in_place"]


class SGLangCollectiveTransport(EngineTransport):
    """Sends to one SGLang server: see `SGLangEngine`.

    Args:
        server_url: the URL of the server.
        master_address: ignored: there is no group to join.
        master_port: ignored.
        rank: the rank of this process: 0, the trainer.
        world_size: the server's GPUs, and one for the trainer.
        device: ignored.
        timeout: seconds until `send_weights` ends.
        flush_cache_on_update: whether the server flushes its prefix cache; default: unless requests prevent it.
        pause_mode: what happens to requests in progress; default: "retract".

    Raises:
        ConfigurationError: (a ValueError) another rank, a flush without ``pause_mode="abort"``, or an argument of
            another type.
    """

    def __init__(
        self,
        server_url: str,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        device: torch.device | str | int | None = None,
        timeout: float = 300.0,
        flush_cache_on_update: bool | None = None,
        pause_mode: PauseMode | None = None,
    ) -> None:
        if rank != 0:
            raise ConfigurationError(f"rank= is {rank}: the trainer is rank 0, and the server receives by itself.")
        gpus = at_least_one(world_size, "world_size")
        pause = _pause(flush_cache_on_update, pause_mode)
        flush = flush_cache_on_update is not False
        self._engine = SGLangEngine(server_url, tp_size=max(1, gpus - 1), pause=pause, flush_cache=flush)
        super().__init__(timeout)

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Create a link to the server. The weights bring their own dtypes and shapes."""
        self._connect(self._engine)


class SGLangWeightSyncScheme(WeightSyncScheme):
    """One SGLang server as the worker: see `SGLangEngine`.

    Args:
        server_url: the URL of the server.
        master_address: ignored: there is no group to join.
        master_port: ignored.
        num_gpus: the server's tensor-parallel size.
        strategy: "tensordict" (default) or "state_dict".
        device: ignored.
        flush_cache_on_update: see `SGLangCollectiveTransport`.
        pause_mode: see `SGLangCollectiveTransport`.

    Raises:
        ConfigurationError: (a ValueError) this is not the URL of a server, or ``num_gpus`` is not a whole number of at
            least 1, or a flush without ``pause_mode="abort"``.
    """

    def __init__(
        self,
        server_url: str,
        master_address: str | None = None,
        master_port: int | None = None,
        num_gpus: int = 1,
        strategy: WeightStrategy | str = "tensordict",
        device: torch.device | str | int = 0,
        flush_cache_on_update: bool | None = None,
        pause_mode: PauseMode | None = None,
    ) -> None:
        _pause(flush_cache_on_update, pause_mode)
        self.server_url = HttpCalls(server_url).url
        self.master_address, self.master_port = master_address, master_port
        self.num_gpus, self.device = at_least_one(num_gpus, "num_gpus"), device
        self.flush_cache_on_update, self.pause_mode = flush_cache_on_update, pause_mode
        super().__init__(strategy)

    @property
    def world_size(self) -> int:
        """The trainer and the server's GPUs."""
        return 1 + self.num_gpus

    def create_transport(self, *_: Any, **__: Any) -> SGLangCollectiveTransport:
        """A transport to the server."""
        return SGLangCollectiveTransport(
            self.server_url,
            self.master_address or "localhost",
            self.master_port or 0,
            0,
            self.world_size,
            self.device,
            flush_cache_on_update=self.flush_cache_on_update,
            pause_mode=self.pause_mode,
        )

    def create_sender(self) -> SGLangWeightSender:  # type: ignore[override]
        """A sender to the server."""
        return SGLangWeightSender(self)

    def create_receiver(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """None: the server receives on its own."""
        return


class SGLangWeightSender(EngineSender):
    """Sends to one SGLang server: see `SGLangWeightSyncScheme.create_sender`."""

    _scheme: SGLangWeightSyncScheme

    def init_all_workers_group(self, model_metadata: Metadata) -> None:
        """Create a link to the server."""
        self._transport = self._transport or self._scheme.create_transport()
        self._transport.init_all_workers_group(model_metadata)

    def flush_cache(self) -> bool:
        """Have the server flush its prefix cache; False: it did not, since it is not idle or cannot be reached."""
        try:
            HttpCalls(self._scheme.server_url).post("flush_cache")
        except (EngineError, TransportError):
            return False
        return True


def _pause(flush: bool | None, mode: PauseMode | None) -> SGLangPause:
    if flush is not None:
        switch(flush, "flush_cache_on_update")
    pause = SGLangPause(mode or SGLangPause.RETRACT)
    if flush and pause is not SGLangPause.ABORT:
        raise ConfigurationError(
            f"flush_cache_on_update=True needs pause_mode='abort', and it is {pause.value!r}: SGLang flushes when it "
            "is idle."
        )
    return pause
