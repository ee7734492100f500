"""Worker loops from TorchRL's documentation, in processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from fleet import PATIENCE
from torch import nn

from weightsync import (
    AckTimeoutError,
    Evidence,
    MPTransport,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    WorkerLostError,
)


def weights(fill: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 4), fill), "bias": torch.full((2,), fill)}


def total(policy: nn.Module) -> float:
    return sum(parameter.sum().item() for parameter in policy.parameters())


# ------------------------------------------------------------------------------------------------- the loops


def loop_of_a_receiver(connection: Connection, scheme_class: Any = MultiProcessWeightSyncScheme) -> None:
    """The main loop of a collector, which gets commands and updates over one pipe."""
    policy = nn.Linear(4, 2)
    scheme = scheme_class()
    scheme.init_on_worker(model_id="policy", pipe=connection, model=policy)
    receiver = scheme.get_receiver()
    pipe = receiver._transport.pipe
    while True:
        if not pipe.poll(0.05):
            continue
        data, message = pipe.recv()
        if message == "update_weights":
            _, given = data
            receiver.apply_weights(given)
        elif message == "sum":
            pipe.send((total(policy), "sum"))
        elif message == "close":
            return


def loop_of_a_shared_receiver(connection: Connection) -> None:
    loop_of_a_receiver(connection, SharedMemWeightSyncScheme)


def loop_that_acks_by_its_own_message(connection: Connection) -> None:
    """A loop that applies weights with a strategy, and acks with a message of its own, as TorchRL's loops do."""
    policy, strategy = nn.Linear(4, 2), WeightStrategy(extract_as="state_dict")
    transport = MPTransport(connection)
    while True:
        data, message = transport.pipe.recv()
        if message == "update_weights":
            strategy.apply_weights(policy, data[1])
            transport.pipe.send((None, "updated"))
        elif message == "sum":
            transport.pipe.send((total(policy), "sum"))
        elif message == "close":
            return


def loop_of_verbs(connection: Connection) -> None:
    """A loop that receives and acks with the transport's methods, and reads commands in between."""
    policy = nn.Linear(4, 2)
    transport = MPTransport(connection)
    while True:
        found = transport.receive_weights(timeout=0.05)
        if found is not None:
            policy.load_state_dict(found[1])
            transport.send_ack()
        elif transport.pipe.poll():
            _, message = transport.pipe.recv()
            if message == "close":
                return
            transport.pipe.send((total(policy), message))


def loop_that_fails(connection: Connection) -> None:
    transport = MPTransport(connection)
    with pytest.raises(KeyError):
        transport.receive_weights(PATIENCE, model=nn.Linear(3, 3), strategy=WeightStrategy())
    transport.pipe.recv()


def loop_over_queues(weight_queue: Any, ack_queue: Any) -> None:
    policy = nn.Linear(4, 2)
    transport = MPTransport(weight_queue, ack_queue)
    for _ in range(2):
        transport.receive_weights(PATIENCE, model=policy, strategy=WeightStrategy())
        transport.send_ack()
    assert total(policy) == 20.0
    transport.close()


# ------------------------------------------------------------------------------------------------- the trainer


class Job:
    """A worker process that runs a loop, and the trainer's end of its pipe."""

    def __init__(self, forkserver: Any, loop: Callable[[Connection], None]) -> None:
        self.pipe, theirs = forkserver.Pipe()
        self.process: multiprocessing.process.BaseProcess = forkserver.Process(target=loop, args=(theirs,))
        self.process.start()
        theirs.close()

    def end(self) -> int | None:
        self.process.join(PATIENCE)
        self.pipe.close()
        return self.process.exitcode


@pytest.fixture
def job(forkserver: Any) -> Iterator[Callable[[Callable[[Connection], None]], Job]]:
    jobs: list[Job] = []

    def start(loop: Callable[[Connection], None]) -> Job:
        jobs.append(Job(forkserver, loop))
        return jobs[-1]

    yield start
    for made in jobs:
        made.process.kill()
        made.end()


LOOPS = {
    loop_of_a_receiver: Evidence.ANSWER,
    loop_of_a_shared_receiver: Evidence.ANSWER,
    loop_that_acks_by_its_own_message: Evidence.CALL,
    loop_of_verbs: Evidence.CALL,
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("transport_class", [MPTransport, SharedMemTransport])
def test_worker_loops_written_for_torchrls_messages_keep_working(job: Any, loop: Any, transport_class: Any) -> None:
    worker = job(loop)
    trainer = transport_class() if transport_class is SharedMemTransport else transport_class(worker.pipe)
    if transport_class is SharedMemTransport:
        trainer.register_pipe(worker.pipe)
    with trainer:
        for fill in (1.0, 2.0):
            report = trainer.send_weights("policy", weights(fill), timeout=PATIENCE)
            trainer.pipe.send((None, "sum"))
            assert trainer.pipe.poll(PATIENCE)

            assert (OutcomeKind.APPLIED, LOOPS[loop]) == (report[0].kind, report[0].evidence)
            assert (10 * fill, "sum") == trainer.pipe.recv()
        trainer.pipe.send((None, "close"))
        assert worker.end() == 0


def test_the_sender_of_a_scheme_drives_the_same_worker_loop(job: Any) -> None:
    worker = job(loop_of_verbs)
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe])
        report = scheme.get_sender().send(weights(3.0), timeout=PATIENCE)
        pipe = scheme.get_sender().pipe(0)
        pipe.send((None, "sum"))

        assert Evidence.CALL is report[0].evidence
        assert (30.0, "sum") == pipe.recv()
        pipe.send((None, "close"))
        assert worker.end() == 0


def test_fault_03_a_worker_that_cannot_apply_is_reported_to_the_trainer_with_its_traceback(job: Any) -> None:
    worker = job(loop_that_fails)
    with MPTransport(worker.pipe) as trainer:
        with pytest.raises(RefusedError, match="do not fit") as caught:
            trainer.send_weights(weights(1.0), timeout=PATIENCE)
        assert "apply_weights" in caught.value.report[0].remote_traceback
        trainer.pipe.send((None, "close"))
        assert worker.end() == 0


def test_fault_02_a_stopped_worker_times_out_and_acks_after_it_resumes(job: Any) -> None:
    worker = job(loop_of_a_receiver)
    with MPTransport(worker.pipe, timeout=PATIENCE) as trainer:
        trainer.send_weights(weights(1.0))
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(AckTimeoutError):
            trainer.send_weights(weights(2.0), timeout=0.3)
        os.kill(worker.process.pid, signal.SIGCONT)

        assert trainer.wait_ack().version == 2
        trainer.pipe.send((None, "close"))
        assert worker.end() == 0


@pytest.mark.parametrize("loop", [loop_of_a_receiver, loop_of_verbs], ids=lambda loop: loop.__name__)
def test_fault_02_a_killed_worker_is_lost_at_once(job: Any, loop: Any) -> None:
    worker = job(loop)
    with MPTransport(worker.pipe, timeout=PATIENCE) as trainer:
        trainer.send_weights(weights(1.0))
        os.kill(worker.process.pid, signal.SIGSTOP)
        trainer.send_weights_async(weights(2.0))
        killer = threading.Timer(0.2, worker.process.kill)
        killer.start()

        with pytest.raises(WorkerLostError):
            trainer.wait_ack()
    killer.join()


def test_a_worker_loop_over_generation_b_queues_works(forkserver: Any) -> None:
    queues = forkserver.Queue(), forkserver.Queue()
    process = forkserver.Process(target=loop_over_queues, args=queues)
    process.start()
    with MPTransport(*queues, timeout=PATIENCE) as trainer:
        for fill in (1.0, 2.0):
            trainer.send_weights_async(weights(fill))
            assert trainer.wait_ack().ok
    process.join(PATIENCE)
    for queue in queues:
        queue.close()
        queue.join_thread()

    assert process.exitcode == 0
    del process, queues, queue, trainer
    gc.collect()  # the semaphores of the queues have names until then
