"""Programs from TorchRL's documentation of both generations run with only the import changed to weightsync."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from fleet import PATIENCE
from tensordict import TensorDict
from torch import nn

from weightsync import MPTransport, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightStrategy


def policy_of(fill: float) -> nn.Linear:
    policy = nn.Linear(4, 2)
    with torch.no_grad():
        policy.weight.fill_(fill)
        policy.bias.fill_(fill)
    return policy


def sums(policy: nn.Module) -> tuple[float, float]:
    return policy.weight.sum().item(), policy.bias.sum().item()


def result_of(process: Any, results: Any) -> Any:
    """The result of a worker process, which must then end without an error."""
    assert results.poll(PATIENCE)
    answer = results.recv()
    process.join(PATIENCE)
    assert process.exitcode == 0
    return answer


# ------------------------------------------------------------------- A: multiprocess, with manual transports


def worker_by_hand(child_pipe: Any, results: Any) -> None:
    policy = policy_of(0.0)
    scheme = MultiProcessWeightSyncScheme(strategy="state_dict")
    receiver = scheme.create_receiver()
    receiver.register_model(policy)
    receiver.register_worker_transport(child_pipe)

    result = receiver._transport.receive_weights(timeout=PATIENCE)
    if result is not None:
        _model_id, weights = result
        receiver.apply_weights(weights)
    results.send(sums(policy))


def worker_of_the_pipe(child_pipe: Any, results: Any) -> None:
    policy = policy_of(0.0)
    receiver = MultiProcessWeightSyncScheme(strategy="state_dict").create_receiver()
    receiver.register_model(policy)
    receiver.register_worker_transport(child_pipe)
    if receiver._transport.pipe.poll(PATIENCE):
        data, message = receiver._transport.pipe.recv()
        if message == "update_weights":
            _model_id, weights = data
            receiver.apply_weights(weights)
    results.send(sums(policy))


def worker_of_the_loop(child_pipe: Any, results: Any) -> None:
    policy = policy_of(0.0)
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_worker(model_id="policy", pipe=child_pipe, model=policy)
    receiver = scheme.get_receiver()
    while not receiver.receive(timeout=0.05):
        pass
    results.send(sums(policy))


@pytest.mark.parametrize("worker", [worker_by_hand, worker_of_the_pipe, worker_of_the_loop])
@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_generation_a_multiprocess_programs_run(forkserver: Any, worker: Any, strategy: str) -> None:
    policy = policy_of(1.0)
    scheme = MultiProcessWeightSyncScheme(strategy=strategy)
    sender = scheme.create_sender()
    parent_pipe, child_pipe = forkserver.Pipe()
    sender.register_worker(worker_idx=0, pipe_or_context=parent_pipe)
    results, theirs = forkserver.Pipe()
    process = forkserver.Process(target=worker, args=(child_pipe, theirs))
    process.start()
    weights = policy.state_dict() if strategy == "state_dict" else TensorDict.from_module(policy)
    sender.update_weights(weights)

    assert result_of(process, results) == (8.0, 2.0)
    sender.close()


# -------------------------------------------------------------------------- A: multiprocess, bare transports


def worker_of_transports(child_pipe: Any, results: Any) -> None:
    policy, transport = policy_of(0.0), MPTransport(child_pipe)
    for _ in range(3):
        while (received := transport.receive_weights(timeout=1.0)) is None:
            pass
        WeightStrategy("state_dict").apply_weights(policy, received[1])
        transport.send_ack("updated")
    results.send(sums(policy))


def test_a_generation_a_program_with_bare_transports_runs(forkserver: Any) -> None:
    ours, theirs = forkserver.Pipe()
    results, far = forkserver.Pipe()
    process = forkserver.Process(target=worker_of_transports, args=(theirs, far))
    process.start()
    transport = MPTransport(ours, timeout=PATIENCE)
    transport.send_weights("policy", policy_of(1.0).state_dict())
    for fill in (2.0, 3.0):
        transport.send_weights_async("policy", policy_of(fill).state_dict())
        transport.wait_ack()

    assert transport.check_connection()
    assert result_of(process, results) == (24.0, 6.0)
    transport.close()


# ---------------------------------------------------------------------------------------- A: shared memory


def worker_of_shared_memory(child_pipe: Any, results: Any) -> None:
    policy = policy_of(0.0)
    scheme = SharedMemWeightSyncScheme(strategy="tensordict")
    receiver = scheme.create_receiver()
    receiver.register_model(policy)
    receiver.register_worker_transport(child_pipe)
    seen = []
    while len(seen) < 2:
        if receiver.receive(timeout=0.05):
            seen.append(sums(policy))
    results.send(seen)


def test_a_generation_a_shared_memory_program_runs(forkserver: Any) -> None:
    policy = policy_of(0.0)
    scheme = SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)
    sender = scheme.create_sender()
    parent_pipe, child_pipe = forkserver.Pipe()
    sender.register_worker(worker_idx=0, pipe_or_context=parent_pipe)
    results, theirs = forkserver.Pipe()
    process = forkserver.Process(target=worker_of_shared_memory, args=(child_pipe, theirs))
    process.start()
    weights = TensorDict.from_module(policy)
    for fill in (2.0, 3.0):
        with torch.no_grad():
            weights["weight"].fill_(fill)
            weights["bias"].fill_(fill)
        sender.update_weights(weights)

    assert result_of(process, results) == [(16.0, 4.0), (24.0, 6.0)]
    sender.close()


# -------------------------------------------------------------------- B: one scheme on both sides


def worker_of_the_scheme(scheme: Any, worker_idx: int, results: Any) -> None:
    model = policy_of(0.0)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker_idx)
    scheme.connect(worker_idx=worker_idx)
    results.send(sums(model))
    while sums(model) != (24.0, 6.0):  # the background thread updates it
        model(torch.ones(4))
    results.send(sums(model))
    results.recv()
    scheme.shutdown()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("scheme_class", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_standalone_generation_b_program_runs(forkserver: Any, scheme_class: Any, method: str) -> None:
    context = forkserver if method == "forkserver" else multiprocessing.get_context("fork")
    policy = policy_of(2.0)
    scheme = scheme_class()
    scheme.init_on_sender(
        model_id="policy",
        weights=TensorDict.from_module(policy),
        devices=[torch.device("cpu")] * 2,
        num_workers=2,
    )
    pipes = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=worker_of_the_scheme, args=(scheme, i, pipes[i][1])) for i in range(2)]
    for worker in workers:
        worker.start()
    scheme.connect()
    for ours, _ in pipes:
        assert ours.poll(PATIENCE)
        assert ours.recv() == (16.0, 4.0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(3.0)
    scheme.send()  # the weights given at init share the policy's memory
    for ours, _ in pipes:
        assert ours.poll(PATIENCE)
        assert ours.recv() == (24.0, 6.0)
        ours.send("done")
    for worker in workers:
        worker.join(PATIENCE)
        assert worker.exitcode == 0
    scheme.shutdown()
