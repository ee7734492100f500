"""Generation B over torch.distributed: one scheme object, `connect`, `send`, a background reader."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Crew, WorkerSetup, filled, free_port, large
from torch import nn

from weightsync import ConfigurationError, DistributedWeightSyncScheme, WeightSyncScheme


class FakeCollector:
    """A context that resembles a collector with a policy."""

    def __init__(self, policy: nn.Module, **attributes: Any) -> None:
        self.policy = policy
        self.__dict__.update(attributes)


def init_and_connect(setup: WorkerSetup, rank: int) -> None:
    """Initialise and connect the worker's side, with the scheme that was passed to this process."""
    setup.kept["context"] = FakeCollector(large())
    setup.scheme.init_on_receiver(model_id="policy", context=setup.kept["context"], worker_idx=rank)
    setup.scheme.connect(timeout=PATIENCE)


def value_of(setup: WorkerSetup, wanted: float) -> float:
    """Wait until the background reader has set the first weight to ``wanted``, or for PATIENCE. Returns the weight."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and setup.kept["context"].policy[0].weight[0, 0].item() != wanted:
        time.sleep(0.01)
    value: float = setup.kept["context"].policy[0].weight[0, 0].item()
    return value


def leave(setup: WorkerSetup) -> None:
    setup.scheme.shutdown()


@pytest.mark.parametrize("sync", [True, False])
def test_a_scheme_passed_to_worker_processes_connects_to_the_trainers_store(crew: Crew, sync: bool) -> None:
    policy = large(1.0)
    scheme = DistributedWeightSyncScheme(sync=sync)
    context = FakeCollector(policy, num_workers=2)
    scheme.init_on_sender(model_id="policy", context=context)
    workers = crew.start(scheme, 2)
    for index, worker in enumerate(workers):
        worker.tell(init_and_connect, index + 1)
    scheme.connect(timeout=PATIENCE)
    for worker in workers:
        worker.answer()
        assert 1.0 == worker.do(value_of, 1.0)

    filled(policy, 2.0)
    scheme.send(timeout=PATIENCE)
    for worker in workers:
        assert 2.0 == worker.do(value_of, 2.0)
        worker.do(leave)
    scheme.shutdown()


def test_a_worker_with_a_scheme_of_its_own_connects_by_store_info() -> None:
    model = large()
    scheme, own = DistributedWeightSyncScheme(), DistributedWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", num_workers=1, model=large(3.0))
    own.init_on_receiver(model_id="policy", store_info=scheme.get_store_info(), worker_idx=1, model=model)
    scheme.get_sender().send_async()
    own.connect(timeout=PATIENCE)
    assert scheme.get_sender().wait_async(timeout=PATIENCE).ok

    assert torch.equal(torch.full_like(model[0].weight, 3.0), model[0].weight)
    own.shutdown()
    scheme.shutdown()


def test_worker_idx_0_is_refused_since_the_trainer_is_rank_0(store: Any) -> None:
    with pytest.raises(ConfigurationError, match="the trainer is rank 0"):
        DistributedWeightSyncScheme().init_on_receiver(model_id="policy", store=store, worker_idx=0, model=large())


def test_a_torchrl_collectors_shared_policy_gets_private_memory(store: Any) -> None:
    """TorchRL's launcher passes one policy in shared memory to all workers, and each must apply versions by itself."""
    policy = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    policy[1].weight = policy[0].weight
    policy.share_memory()
    before, shared = list(policy.parameters()), policy[0].weight.detach()
    with DistributedWeightSyncScheme() as scheme:
        context = FakeCollector(policy, _weight_sync_schemes=None, get_model=lambda _: policy)
        scheme.init_on_receiver(model_id="policy", context=context, store=store, worker_idx=1)
        shared.fill_(7.0)

        assert not (policy[0].weight == 7.0).any()
        assert policy[1].weight is policy[0].weight
        assert all(now is then and not now.is_shared() for now, then in zip(policy.parameters(), before, strict=True))


def test_the_stores_port_is_the_collectors_tcp_port_plus_two() -> None:
    port = free_port()
    context = FakeCollector(large(), num_workers=1, tcp_port=str(port - 2))
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", context=context)

        assert port == scheme.get_store_info()["port"]


def test_the_store_gets_any_free_port_if_tcp_port_plus_two_is_not_a_port() -> None:
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", context=FakeCollector(large(), num_workers=1, tcp_port="65535"))
        assert scheme.get_store_info()["port"]


def test_the_schemes_own_store_listens_at_the_interface_named_by_gloo_socket_ifname(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "198.51.100.1")  # not an address of this host
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", context=FakeCollector(large(), num_workers=1))
        assert scheme.get_store_info()["host"] == "127.0.0.1"


def test_a_tcp_port_that_is_not_a_number_is_refused() -> None:
    with DistributedWeightSyncScheme() as scheme, pytest.raises(ConfigurationError, match="tcp_port is 'a port'"):
        scheme.init_on_sender(model_id="policy", context=FakeCollector(large(), num_workers=1, tcp_port="a port"))


def test_from_backend_distributed_returns_the_scheme() -> None:
    scheme = WeightSyncScheme.from_backend("distributed", sync=False, timeout=60.0)

    assert isinstance(scheme, DistributedWeightSyncScheme)
    assert ("gloo", False, 60.0) == (scheme.backend, scheme.sync, scheme.timeout)
