"""`RPCTransport` without a scheme."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleet import PATIENCE, WorkerSetup, constants, filled, receive, small
from rpc_fleet import World, attempt, listen, retire
from tensordict import TensorDict
from test_rpc_collectors import Collector, Raising, shown
from torch.distributed import rpc

from weightsync import (
    ConfigurationError,
    Evidence,
    RefusedError,
    RPCTransport,
    RPCWeightSyncScheme,
    StateError,
    WorkerLostError,
)


@pytest.fixture
def trainer(world: World) -> Any:
    yield world.trainer
    world.trainer.do(retire)


def reach(setup: WorkerSetup, kind: Any, name: str = "w0", by_scheme: bool = False) -> bool:
    """Create a transport to a new collector. Returns whether it is connected."""
    rref = rpc.remote(name, kind)
    info = rpc.get_worker_info(name)
    if by_scheme:
        made = RPCWeightSyncScheme().create_transport(
            collector_info=info, collector_rref=rref, collector_class=kind, worker_rank=1
        )
    else:
        made = RPCTransport(info, rref, kind)
    setup.kept["rrefs"], setup.kept["transport"] = [rref], made
    return bool(made.check_connection())


def push(setup: WorkerSetup, fill: float, *, with_id: bool = True) -> Any:
    weights = small(fill).state_dict()
    transport = setup.kept["transport"]
    return transport.send_weights("policy", weights) if with_id else transport.send_weights(weights)


def push_async(setup: WorkerSetup, fill: float) -> Any:
    return setup.kept["transport"].send_weights_async("policy", small(fill).state_dict())


def acked(setup: WorkerSetup) -> Any:
    return setup.kept["transport"].wait_ack(timeout=PATIENCE)


@pytest.mark.parametrize("by_scheme", [False, True], ids=["made", "by_scheme"])
def test_send_weights_updates_the_collector(trainer: Any, by_scheme: bool) -> None:
    assert trainer.do(reach, Collector, "w0", by_scheme)
    report = trainer.do(push, 3.0)

    assert report.outcomes[0].evidence is Evidence.CALL
    assert trainer.do(shown)[1] == {3.0}
    assert trainer.do(push_one_argument, 4.0).ok
    assert trainer.do(shown)[1] == {4.0}


def push_one_argument(setup: WorkerSetup, fill: float) -> Any:
    return push(setup, fill, with_id=False)


def test_the_asynchronous_form_is_awaited_by_wait_ack(trainer: Any) -> None:
    trainer.do(reach, Collector)
    trainer.do(push_async, 5.0)
    assert isinstance(trainer.do(attempt, push, 6.0), StateError)

    assert trainer.do(acked).ok
    assert trainer.do(shown)[1] == {5.0}
    assert isinstance(trainer.do(attempt, acked), StateError)


def test_a_collector_that_raises_is_reported(trainer: Any) -> None:
    trainer.do(reach, Raising)

    assert isinstance(trainer.do(attempt, push, 1.0), RefusedError)


def test_a_transport_with_only_a_worker_rank_sends_to_a_weightsync_receiver(world: World, trainer: Any) -> None:
    world.workers[0].do(listen)
    trainer.do(reach_rank, 1)
    trainer.tell(push, 7.0)
    assert world.workers[0].do(receive)

    assert trainer.answer().outcomes[0].evidence is Evidence.ANSWER
    trainer.do(retire)
    world.workers[0].do(retire)


def reach_rank(setup: WorkerSetup, rank: int, key: str | None = None) -> None:
    setup.kept["transport"] = RPCTransport(rank, key=key)


def test_both_ends_may_be_transports(world: World, trainer: Any) -> None:
    trainer.do(reach_rank, 2)
    trainer.do(push_async, 8.0)

    assert world.workers[1].do(take_by_hand) == ("policy", {8.0})
    assert trainer.do(acked).outcomes[0].evidence is Evidence.CALL
    world.workers[1].do(retire)


def test_receive_weights_with_a_worker_rank_behaves_as_in_generation_b(world: World, trainer: Any) -> None:
    trainer.do(reach_rank, 2)
    trainer.do(push_async, 9.0)

    assert world.workers[1].do(take_as_b) == {9.0}
    assert trainer.do(acked).ok
    world.workers[1].do(retire)


def take_as_b(setup: WorkerSetup) -> set[float]:
    transport = setup.kept["transport"] = RPCTransport(worker_rank=1)
    buffers = small().state_dict()
    transport.receive_weights(timeout=PATIENCE, weights=buffers)
    transport.send_ack()
    return {value for tensor in buffers.values() for value in tensor.flatten().tolist()}


@pytest.mark.parametrize(
    ("key", "reason"), [(None, "this process has none"), ("another", "has another key")], ids=["none", "other"]
)
def test_a_transport_with_a_key_delivers_only_to_one_with_the_same_key(
    world: World, trainer: Any, key: str | None, reason: str
) -> None:
    worker = world.workers[1]
    worker.do(listen_by_hand, "the key")
    trainer.do(reach_rank, 2, key)
    error = trainer.do(attempt, push, 66.0)
    assert isinstance(error, WorkerLostError)
    assert reason in str(error)
    assert worker.do(receive_nothing)
    trainer.do(retire)

    trainer.do(reach_rank, 2, "the key")
    trainer.do(push_async, 8.0)
    assert worker.do(take_by_hand) == ("policy", {8.0})
    assert trainer.do(acked).ok
    worker.do(retire)


def listen_by_hand(setup: WorkerSetup, key: str) -> None:
    setup.kept["transport"] = RPCTransport(key=key)
    assert receive_nothing(setup)


def receive_nothing(setup: WorkerSetup) -> bool:
    return setup.kept["transport"].receive_weights(timeout=0) is None


def take_by_hand(setup: WorkerSetup) -> tuple[str, set[float]]:
    """Receive with the transport that there is, or with a new one, and ack."""
    transport = setup.kept.setdefault("transport", RPCTransport())
    model_id, weights = transport.receive_weights(timeout=PATIENCE)
    model = filled(small(), 0.0)
    model.load_state_dict(dict(weights) if not isinstance(weights, TensorDict) else weights.flatten_keys(".").to_dict())
    transport.send_ack()
    return model_id, constants(model)


def test_sending_without_initialised_rpc_is_refused() -> None:
    with RPCTransport("w0") as transport, pytest.raises(ConfigurationError, match="not initialised"):
        transport.send_weights("policy", {"a": torch.zeros(1)})


def test_receive_weights_of_the_sending_end_returns_none() -> None:
    with RPCTransport("w0") as transport:
        assert transport.receive_weights() is None
