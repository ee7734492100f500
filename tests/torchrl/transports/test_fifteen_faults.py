"""The fifteen faults of TorchRL's implementation, each with tests that would fail on it."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import generation_b_cases as setups
import pytest
import torch
from fleet import PATIENCE, Crew, Pair, WorkerSetup, constants, filled, join, receive, small
from generation_b_cases import fleet_of
from torch import nn

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    Evidence,
    LayoutError,
    MPTransport,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    State,
    StateError,
    SyncError,
    WorkerLostError,
)
from weightsync.clock import Stopwatch


def plain(fill: float) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in small(fill).state_dict().items()}


# ------------------------------------------------------ 1: acks are bare strings, so a late ack satisfies the next send


def test_fault_01_a_late_ack_does_not_satisfy_the_next_send(pair: Pair) -> None:
    pair.sender.send_async(small(1.0))
    pair.sender.abandon()
    assert pair.receiver.receive(timeout=PATIENCE)
    pair.sender.send_async(small(2.0))
    with pytest.raises(AckTimeoutError):
        pair.sender.wait_async(timeout=0.05)

    assert (pair.receiver.version, constants(pair.model)) == (1, {1.0})
    assert pair.receiver.receive(timeout=PATIENCE)
    assert pair.sender.wait_async().version == 2


def test_fault_01_a_late_ack_of_a_standalone_transport_does_not_satisfy_the_next_wait() -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer, worker = MPTransport(ours, timeout=0.05), MPTransport(theirs)
    trainer.send_weights_async("policy", plain(1.0))
    worker.receive_weights(timeout=PATIENCE)
    with pytest.raises(TimeoutError):
        trainer.wait_ack()
    trainer.send_weights_async("policy", plain(2.0))
    worker.send_ack()  # of the first
    with pytest.raises(TimeoutError):
        trainer.wait_ack()
    worker.receive_weights(timeout=PATIENCE)
    worker.send_ack()

    assert trainer.wait_ack().version == 2
    for transport in (trainer, worker):
        transport.close()


# ------------------------------------------------------ 2: a send waits for dead workers, and a timeout is a success


def test_fault_02_a_dead_worker_ends_the_wait(scheme_class: Any, crew: Crew) -> None:
    (worker,) = crew.start(scheme_class())
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=small(1.0))
        worker.do(join)
        worker.tell(receive)
        scheme.get_sender().send(timeout=PATIENCE)
        worker.answer()
        worker.stop()
        scheme.get_sender().send_async()
        threading.Timer(0.2, worker.process.kill).start()
        stopwatch = Stopwatch()
        with pytest.raises(WorkerLostError):
            scheme.get_sender().wait_async(timeout=None)

        assert stopwatch.seconds < 10


def test_fault_02_a_dead_worker_is_reported_lost_in_generation_b(scheme_class: Any, crew: Crew) -> None:
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", model=small(1.0), devices=["cpu", "cpu"])
    workers = crew.start(scheme, 2)
    for index, worker in enumerate(workers):
        worker.tell(setups.enter, index)
    scheme.connect()
    for worker in workers:
        worker.answer()
    workers[0].kill()
    with pytest.raises(SyncError) as caught:
        scheme.send(small(2.0))

    assert caught.value.report[0].kind is OutcomeKind.LOST
    assert caught.value.report[1].kind is OutcomeKind.APPLIED
    assert workers[1].do(setups.holds) == {2.0}
    scheme.shutdown()
    workers[1].do(setups.ends)


def test_fault_02_a_timeout_raises_and_is_reported_as_timed_out(pair: Pair) -> None:
    with pytest.raises(AckTimeoutError) as late:
        pair.sender.send(timeout=0.01)

    assert late.value.report[0].kind is OutcomeKind.TIMED_OUT
    assert pair.sender.state is State.PENDING_ASYNC


# --------------------------------------------------- 3: a failed apply is only logged, or acked nevertheless


def test_fault_03_a_failed_apply_is_reported(pair: Pair) -> None:
    pair.model.more = small()
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=PATIENCE) is False

    with pytest.raises(RefusedError):
        pair.sender.wait_async(timeout=PATIENCE)
    assert pair.receiver.version is None


def test_fault_03_a_failed_apply_in_the_background_is_reported(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 2) as fleet:
        fleet.workers[1].do(grows)
        with pytest.raises(RefusedError) as refused:
            fleet.scheme.send(small(2.0))

        assert set(refused.value.refused) == {1}
        assert fleet.workers[0].do(setups.holds) == {2.0}


def grows(setup: WorkerSetup) -> None:
    setup.model.more = small(1.0)


# -------------------------------------------- 4: unpickling drops a pending update while its ack is in transit


def test_fault_04_a_copied_sender_has_nothing_pending_and_leaves_the_ack_to_the_original(pair: Pair) -> None:
    pair.sender.send_async(small(1.0))
    clone = pickle.loads(pickle.dumps(pair.sender))
    pair.receiver.receive(timeout=PATIENCE)

    assert clone.state is State.UNINITIALIZED
    with pytest.raises(StateError):
        clone.wait_async()
    assert pair.sender.wait_async(timeout=0).ok


# ---------------------------------------------------------------------- 5: a send without workers reports success


def test_fault_05_a_send_without_links_raises_state_error(scheme_class: Any) -> None:
    with pytest.raises(StateError):
        scheme_class().create_sender().send(small())


# ------------------------------------------------------- 6: messages that are not weights are read and dropped


def test_fault_06_another_message_survives_receive_weights() -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer, worker = MPTransport(ours), MPTransport(theirs)
    trainer.pipe.send(("not", "weights"))
    assert worker.receive_weights(timeout=0.05) is None
    trainer.send_weights_async("policy", plain(1.0))
    assert worker.receive_weights(timeout=PATIENCE) is not None
    worker.send_ack()
    trainer.wait_ack()

    assert worker.pipe.recv() == ("not", "weights")
    for transport in (trainer, worker):
        transport.close()


def test_fault_06_another_message_survives_receive(pair: Pair) -> None:
    pair.sender.pipe(0).send("mine")
    assert pair.receiver.receive(timeout=0.01) is False
    pair.sync()

    assert pair.receiver.pipe.recv() == "mine"


# ------------------------------------------------ 7: shared memory is written while workers read it, of all workers


def test_fault_07_a_workers_model_does_not_change_until_it_receives(pair: Pair) -> None:
    pair.sync()
    for fill in (2.0, 3.0, 4.0):
        pair.sender.send_async(small(fill), on_pending="supersede")

        assert constants(pair.model) == {1.0}


def test_fault_07_a_send_to_a_subset_changes_the_subset(three: Pair) -> None:
    three.sync()
    three.sync(small(2.0), worker_ids=[1])
    for receiver in three.receivers:
        receiver.receive(timeout=0)

    assert [constants(model) for model in three.models] == [{1.0}, {2.0}, {1.0}]


def test_fault_07_the_senders_own_tensors_are_not_the_workers(pair: Pair) -> None:
    pair.sync()
    filled(pair.source, 9.0)

    assert constants(pair.model) == {1.0}


# --------------------------------------------------------------- 8: a thread writes weights during a forward pass


class Slow(nn.Module):
    """A model whose forward reads its weights, creates a file, waits, and reads them again."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.inner = small(fill)
        self.begun = ""

    def forward(self) -> tuple[set[float], set[float]]:
        before = constants(self)
        Path(self.begun).touch()
        threading.Event().wait(0.5)
        return before, constants(self)


def runs(setup: WorkerSetup, begun: str) -> tuple[set[float], set[float]]:
    setup.model.begun = begun
    return setup.model()


def test_fault_08_no_forward_pass_sees_two_versions(scheme_class: Any, crew: Crew, tmp_path: Path) -> None:
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", model=Slow(1.0), devices=["cpu"])
    (worker,) = crew.start(scheme)
    worker.tell(setups.enter, 0, Slow)
    scheme.connect()
    worker.answer()
    worker.tell(runs, str(tmp_path / "begun"))
    while not (tmp_path / "begun").exists():
        pass
    assert scheme.send(Slow(2.0)).ok

    assert worker.answer() == ({1.0}, {1.0})
    assert worker.do(setups.holds) == {2.0}
    scheme.shutdown()
    worker.do(setups.ends)


# ----------------------------------------------- 9: a receive that fails has overwritten part of what is served


def test_fault_09_a_receive_that_times_out_or_fails_has_written_nothing(pair: Pair) -> None:
    pair.sync()
    assert pair.receiver.receive(timeout=0.001) is False
    damaged = plain(2.0)
    damaged["2.bias"] = torch.ones(7)
    pair.scheme.model = None  # or the trainer would refuse the weights, not the worker
    pair.sender.send_async(damaged)
    assert pair.receiver.receive(timeout=PATIENCE) is False

    assert (pair.receiver.version, constants(pair.model)) == (1, {1.0})


# -------------------------------------------------------- 10: weights of an unknown type become an empty update


@pytest.mark.parametrize("weights", [object(), 3, [1, 2], "no.such.model"])
def test_fault_10_unknown_weights_are_an_error(pair: Pair, weights: Any) -> None:
    with pytest.raises((ValueError, AttributeError)):
        pair.sender.send(weights)
    with pytest.raises((ValueError, AttributeError)):
        pair.sender.send_async(weights)

    assert (pair.sender.version, pair.sender.state) == (0, State.READY)


def test_fault_10_a_send_without_a_model_or_weights_is_an_error(scheme_class: Any) -> None:
    ours, _theirs = multiprocessing.Pipe()
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[ours])
        with pytest.raises(ConfigurationError):
            scheme.get_sender().send()

        assert scheme.get_sender().version == 0


def test_fault_10_empty_weights_fit_an_empty_model_only(pair: Pair) -> None:
    with pytest.raises(LayoutError, match=r"The weights have no tensors\. No version was sent"):
        pair.sender.send({})
    pair.scheme.model = None
    pair.sender.send_async({})
    pair.receiver.receive(timeout=PATIENCE)

    with pytest.raises(RefusedError):
        pair.sender.wait_async()


# -------------------------- 11: after an exception between two dispatches the sender does not know who was updated


def test_fault_11_an_exception_between_two_dispatches_is_one_workers_outcome(three: Pair) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    three.sender._driver._links[2].link.send = broken  # link 2 is worker 1's
    three.sender.send_async()
    assert three.sender.state is State.PENDING_ASYNC
    for index in (0, 2):
        assert three.receivers[index].receive(timeout=PATIENCE)
    report = three.sender.wait_async(on_failure="report")

    assert [report[i].kind for i in range(3)] == [OutcomeKind.APPLIED, OutcomeKind.LOST, OutcomeKind.APPLIED]
    assert "no room" in report[1].reason


# --------------------------------------- 13: calls from two threads, before init, after shutdown, and from a hook


def test_fault_13_a_second_thread_is_refused_while_the_first_waits(pair: Pair) -> None:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(pair.sender.send(timeout=PATIENCE)))
    thread.start()
    while pair.sender.state is not State.AWAITING_ACK:
        pass
    for call in (pair.sender.send, pair.sender.send_async, pair.sender.wait_async, pair.sender.abandon):
        with pytest.raises(StateError):
            call()
    pair.receiver.receive(timeout=PATIENCE)
    thread.join(PATIENCE)

    assert done[0].ok


def test_fault_13_nothing_is_sent_before_init_or_after_shutdown(scheme_class: Any) -> None:
    scheme = scheme_class()
    with pytest.raises(StateError):
        scheme.send(small())
    scheme.init_on_sender(model_id="policy", model=small(), devices=["cpu"])
    scheme.shutdown()
    with pytest.raises(StateError):
        scheme.send(small())


class Chatty(nn.Linear):
    """A module whose extra-state hook calls the sender that is setting the state."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.sender: Any = None
        self.states: list[str] = []

    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        for call in (self.sender.send, self.sender.send_async):
            try:
                call()
            except StateError as error:
                self.states.append(error.state)


def test_fault_13_an_extra_state_hook_cannot_send_while_its_update_is_outstanding(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    model = Chatty()
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours], model=Chatty())
        b.init_on_worker("policy", pipe=theirs, model=model)
        model.sender = a.get_sender()
        # One thread drives both ends, so that the hook runs while the update is outstanding.
        model.sender.send_async()
        b.get_receiver().receive(timeout=PATIENCE)

        assert model.states == ["pending_async", "pending_async"]


# -------------------------------------------------------------------------- 14: capabilities are guessed from names


class Mute:
    """A user's transport without `wait_ack`, `send_weights_async` or any other optional method."""

    def __init__(self) -> None:
        self.sent = 0

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.sent += 1

    def receive_weights(self, timeout: float | None = 1.0) -> None:
        return None

    def check_connection(self) -> bool:
        return True


class MuteScheme(MultiProcessWeightSyncScheme):
    def create_transport(self, pipe_or_context: Any) -> Any:
        return pipe_or_context


def test_fault_14_a_transport_without_acks_is_not_reported_as_answered() -> None:
    transport = Mute()
    with MuteScheme().create_sender() as sender:
        sender.register_worker(0, transport)
        with pytest.raises(RuntimeError):
            sender.send_async(small(1.0))
        assert transport.sent == 0
        report = sender.send(small(1.0), on_failure="report")

        assert transport.sent == 1
        assert report[0].evidence is not Evidence.ANSWER


# ------------------------------------------------------------- 15: flags and transports of one side on the other side


def test_fault_15_one_scheme_object_works_as_sender_and_receiver(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    model = small()
    with scheme_class() as scheme:
        scheme.init_on_worker("policy", pipe=theirs, model=model)
        scheme.init_on_sender("policy", pipes=[ours], model=small(3.0))
        scheme.get_sender().send_async()

        assert scheme.get_receiver().receive(timeout=PATIENCE)
        assert scheme.get_sender().wait_async().ok
        assert constants(model) == {3.0}


def test_fault_15_initialising_twice_is_refused_and_the_pair_keeps_working(pair: Pair) -> None:
    for again in (
        lambda: pair.scheme.init_on_sender("policy", pipes=[], model=small()),
        lambda: pair.schemes[0].init_on_worker("policy", pipe=None, model=small()),
    ):
        with pytest.raises(StateError):
            again()

    assert pair.sync().ok


def test_fault_15_a_scheme_copied_to_a_worker_carries_no_sender_state(pair: Pair, crew: Crew) -> None:
    (worker,) = crew.start(pair.scheme)  # already initialised here; the process gets a copy
    with type(pair.scheme)() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=small(2.0))
        worker.do(join)
        worker.tell(receive)

        assert scheme.get_sender().send(timeout=PATIENCE).ok
        assert worker.answer()
    assert pair.sync().ok


def test_fault_15_a_scheme_inherited_by_a_fork_is_uninitialized(pair: Pair) -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=tells, args=(theirs, pair))
    process.start()
    assert ours.poll(PATIENCE)

    assert ours.recv() == ["StateError", "uninitialized", "uninitialized"]
    process.join(PATIENCE)
    assert pair.sync().ok


def tells(pipe: Any, pair: Pair) -> None:
    try:
        pair.scheme.get_sender()
    except StateError as error:
        pipe.send([type(error).__name__, pair.sender.state.value, pair.receiver.state.value])
