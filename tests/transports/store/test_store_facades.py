"""`DistributedTransport` in both forms, and TorchRL's own keys."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fleet import PATIENCE, constants, filled, large
from store_fleet import StorePair, run_torchrl_worker_loop
from tensordict import TensorDict
from torch import nn

from weightsync import (
    ConfigurationError,
    DistributedTransport,
    DistributedWeightSyncScheme,
    WeightStrategy,
    WeightSyncScheme,
)


def weights(fill: float, rows: int = 300) -> TensorDict:
    """Weights of 120 KB, too large to travel in a message."""
    return TensorDict({"a": torch.full((rows, 100), fill), "b": TensorDict({"c": torch.full((3,), fill)})})


@pytest.fixture
def ends(store: Any) -> Iterator[tuple[DistributedTransport, DistributedTransport]]:
    """The trainer's and the worker's end, both in generation A's form."""
    made = DistributedTransport(store, 1), DistributedTransport(store, 1)
    yield made
    for end in made:
        end.close()


@pytest.mark.parametrize("sync", [True, False])
def test_generation_b_receives_into_its_buffer(store: Any, sync: bool) -> None:
    buffer = weights(0.0)
    trainer = DistributedTransport(weights_buffer=weights(0.0), store=store, rank=1, sync=sync)
    worker = DistributedTransport(weights_buffer=buffer, store=store, rank=1, sync=sync)
    with trainer, worker:
        trainer.send_weights_async(weights(3.0))
        assert worker.receive_weights() is buffer
        worker.send_ack()
        trainer.wait_ack()
        assert (buffer["a"] == 3.0).all()

        own, model = TensorDict(dict(large().state_dict())), large()
        trainer.send_weights_async(TensorDict(dict(large(5.0).state_dict())))
        received = worker.receive_weights(PATIENCE, weights=own, model=model, strategy=WeightStrategy("state_dict"))
        worker.send_ack()
        trainer.wait_ack()
        assert received is own
        assert {5.0} == constants(model)
        assert worker.receive_weights(timeout=0.05) is None


@pytest.mark.parametrize("options", [{}, {"weights_buffer": None}], ids=["A", "B"])
def test_receive_weights_returns_its_generations_form_with_and_without_a_buffer(store: Any, options: Any) -> None:
    trainer, worker = (DistributedTransport(store, 1, **options) for _ in range(2))
    with trainer, worker:
        for into in (weights(0.0), None):
            trainer.send_weights_async(weights(3.0))
            found = worker.receive_weights(PATIENCE, weights=into)
            worker.send_ack()
            trainer.wait_ack()
            model_id, received = ("policy", found) if options else found
            assert (model_id, (received["a"] == 3.0).all()) == ("policy", True)
            assert into is None or (into["a"] == 3.0).all()


def test_initial_weights_need_no_signalling_by_the_caller(store: Any) -> None:
    trainer = DistributedTransport(weights_buffer=weights(0.0), store=store, rank=1)
    worker = DistributedTransport(weights_buffer=weights(0.0), store=store, rank=1)
    with trainer, worker:
        thread = threading.Thread(target=trainer.send_initial_weights, args=(weights(4.0),))
        thread.start()
        received = worker.receive_initial_weights()
        thread.join(PATIENCE)

    assert (received["a"] == 4.0).all()


@pytest.mark.parametrize("form", ["A", "B"])
def test_initial_weights_are_not_written_to_torchrls_keys(store: Any, form: str) -> None:
    """A worker loop written for TorchRL would take them for an update, and hang."""
    given = {} if form == "A" else {"weights_buffer": weights(0.0)}
    trainer, worker = (DistributedTransport(store=store, rank=1, **given) for _ in range(2))
    with trainer, worker:
        thread = threading.Thread(target=trainer.send_initial_weights, args=(weights(4.0),))
        thread.start()
        store.set("NODE_1_in", "an instruction of the caller's own")
        received = worker.receive_initial_weights()
        thread.join(PATIENCE)
        assert (received["a"] == 4.0).all()
        assert b"an instruction of the caller's own" == store.get("NODE_1_in")
        assert not store.check(["NODE_1_out"])

        store.delete_key("NODE_1_in")
        trainer.send_weights_async(weights(5.0))
        assert b"update_weights" == store.get("NODE_1_in")


def test_the_first_weights_of_connect_are_not_written_to_torchrls_keys(store: Any) -> None:
    trainer, worker, model = DistributedWeightSyncScheme(), DistributedWeightSyncScheme(), large()
    with trainer, worker:
        worker.init_on_receiver(model_id="policy", store=store, rank=1, model=model)
        trainer.init_on_sender(model_id="policy", store=store, num_workers=1, model=large(2.0))
        thread = threading.Thread(target=worker.connect, kwargs={"timeout": PATIENCE})
        thread.start()
        trainer.connect(timeout=PATIENCE)
        thread.join(PATIENCE)
        assert {2.0} == constants(model)
        assert not store.check(["NODE_1_in"])
        assert not store.check(["NODE_1_out"])

        assert trainer.send(large(3.0), timeout=PATIENCE).ok
        assert b"update_weights" == store.get("NODE_1_in")
        assert b"updated" == store.get("NODE_1_out")


def test_an_unknown_instruction_raises_value_error(ends: Any, store: Any) -> None:
    store.set("NODE_1_in", "dance")

    with pytest.raises(ValueError, match="dance"):
        ends[1].receive_weights(timeout=0.1)
    assert ends[1].receive_weights(timeout=0.05) is None


def test_check_connection_tells_whether_the_user_has_a_process_group(store: Any) -> None:
    transport = DistributedTransport(store, 1)
    assert transport.check_connection() is False
    dist.init_process_group("gloo", store=dist.PrefixStore("own", store), rank=0, world_size=1)
    try:
        assert transport.check_connection() is True
    finally:
        dist.destroy_process_group()


def test_a_pickled_transport_connects_to_the_same_store_and_rank(ends: Any) -> None:
    copy = pickle.loads(pickle.dumps(ends[1]))
    with contextlib.closing(copy):
        ends[0].send_weights_async(weights(6.0))
        _, received = copy.receive_weights(timeout=PATIENCE)
        copy.send_ack()
        assert ends[0].wait_ack().ok
    assert (received["a"] == 6.0).all()


@pytest.mark.parametrize("form", ["pair", "transport", "a scheme of one's own"])
def test_store_and_rank_address_both_ends(store: Any, form: str) -> None:
    class Own(WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return DistributedTransport(*pipe_or_context)

    scheme = Own() if form.startswith("a scheme") else DistributedWeightSyncScheme()
    ends = [DistributedTransport(store, 1) if form == "transport" else (store, 1) for _ in range(2)]
    model = large()
    with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
        sender._register_worker(0, ends[0])
        receiver._register_model(model)
        receiver._register_worker_transport(ends[1])
        sender.send_async(large(2.0))
        assert receiver.receive(timeout=PATIENCE)
        assert sender.wait_async(timeout=PATIENCE).ok
    assert {2.0} == constants(model)


def test_a_second_receiver_of_a_model_for_the_same_rank_in_a_process_is_refused(store: Any) -> None:
    first, second, other = (DistributedWeightSyncScheme() for _ in range(3))
    with first, second, other:
        first.init_on_worker("policy", store=store, rank=1, model=large())
        with pytest.raises(ConfigurationError, match="rank 1 in this process: close that first"):
            second.init_on_worker("policy", store=store, rank=1, model=large())
        with pytest.raises(ConfigurationError, match="close that first"):
            DistributedTransport(store, 1).receive_weights(timeout=0)
        first.get_receiver().register_worker_transport((store, 1))  # the same receiver may listen again
        other.init_on_worker("critic", store=store, rank=1, model=large())
        first.close()
        second.init_on_worker("policy", store=store, rank=1, model=large())


# ------------------------------------------------------------------------------------------ TorchRL's own keys


def test_torchrls_keys_are_written_as_hints(store: Any) -> None:
    pair = StorePair(store)
    with contextlib.closing(pair):
        pair.sender.send_async()
        assert b"update_weights" == store.get("NODE_1_in")
        assert pair.receiver.receive(timeout=PATIENCE)
        assert pair.sender.wait_async(timeout=PATIENCE).ok
        assert b"updated" == store.get("NODE_1_out")


def test_sends_do_not_depend_on_the_hints(store: Any) -> None:
    pair = StorePair(store)
    with contextlib.closing(pair):
        store.set("NODE_1_in", "dance")
        store.set("NODE_1_out", "not updated at all")
        assert pair.sync().ok
        filled(pair.source, 2.0)
        store.delete_key("NODE_1_in")
        assert pair.sync().ok
        assert {2.0} == constants(pair.model)


def test_a_worker_loop_written_for_torchrl_receives_each_update_once(store: Any) -> None:
    """The loop starts after the initial weights, which are no update, and receives each update once."""
    worker, trainer, scheme = (
        DistributedTransport(store, 1),
        DistributedTransport(store, 1),
        DistributedWeightSyncScheme(),
    )
    seen: list[float] = []
    begun, go_on = threading.Event(), threading.Event()

    def serve() -> None:
        seen.append(float(worker.receive_initial_weights()["weight"][0, 0]))
        begun.set()
        assert go_on.wait(PATIENCE)
        seen.extend(run_torchrl_worker_loop(worker, 3))

    def of(fill: float) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((300, 100), fill)}

    with worker, trainer, scheme:  # the first trainer stays open: its goodbye would end the loop
        thread = threading.Thread(target=serve)
        thread.start()
        trainer.send_initial_weights(of(1.0))
        assert begun.wait(PATIENCE)
        assert not store.check(["NODE_1_in"]), "the loop would take it for an update, and hang"
        go_on.set()
        trainer.send_weights(of(2.0))
        scheme.init_on_sender("policy", store=store, num_workers=1, model=nn.Linear(100, 300, bias=False))
        for fill in (3.0, 4.0):
            scheme.get_sender().send(of(fill), timeout=PATIENCE)
        thread.join(PATIENCE)

        assert seen == [1.0, 2.0, 3.0, 4.0]
        assert not store.check(["NODE_1_in"])


def test_create_transport_takes_store_and_rank(store: Any) -> None:
    transport = DistributedWeightSyncScheme().create_transport(store, 2)

    assert isinstance(transport, DistributedTransport)
    assert (store, 2, True) == (transport.store, transport.rank, transport.sync)
    with pytest.raises(ValueError, match="no store"):
        DistributedWeightSyncScheme().create_transport().send_weights("policy", weights(1.0))
