"""`MPTransport`: the methods of TorchRL's class over one pipe, without its faults."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from fleet import PATIENCE, constants, small
from tensordict import TensorDict

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    DistributedTransport,
    Evidence,
    LayoutError,
    MPTransport,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    RPCTransport,
    SenderClosed,
    SharedMemTransport,
    State,
    StateError,
    TransportError,
    WeightStrategy,
    WorkerLostError,
)
from weightsync.clock import Deadline
from weightsync.torchrl.transports import facade


def filled(fill: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), fill), "bias": torch.full((2,), fill)}


def value(weights: Any) -> float:
    (found,) = {entry for tensor in weights.values() for entry in tensor.flatten().tolist()}
    return found


class Ends:
    """The transports of a trainer and a worker over one pipe."""

    def __init__(self, timeout: float = PATIENCE) -> None:
        self.pipes = multiprocessing.Pipe()
        self.trainer, self.worker = MPTransport(self.pipes[0], timeout), MPTransport(self.pipes[1])

    def close(self) -> None:
        for end in (self.trainer, self.worker, *self.pipes):
            end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def hurried() -> Iterator[Ends]:
    made = Ends(timeout=0.02)
    yield made
    made.close()


@pytest.fixture
def queues() -> Iterator[list[Any]]:
    made = [multiprocessing.Queue(), multiprocessing.Queue()]
    yield made
    for queue in made:
        queue.close()
        queue.join_thread()


# ------------------------------------------------------------------------------------------------- the methods


@pytest.mark.parametrize(
    ("args", "kwargs", "model_id"),
    [
        (("value", filled(1.0)), {}, "value"),
        ((filled(1.0),), {}, "policy"),
        ((filled(1.0), "value"), {}, "value"),
        ((), {"weights": filled(1.0)}, "policy"),
        ((), {"model_id": "value", "weights": filled(1.0)}, "value"),
        ((filled(1.0),), {"model_id": "value"}, "value"),
        (("value",), {"weights": filled(1.0)}, "value"),
    ],
)
def test_argument_forms_of_both_generations_are_accepted(ends: Ends, args: Any, kwargs: Any, model_id: str) -> None:
    ends.trainer.send_weights_async(*args, **kwargs)

    assert model_id == ends.worker.receive_weights()[0]
    ends.worker.send_ack()
    assert ends.trainer.wait_ack().model_id == model_id


def test_received_weights_have_the_structure_of_the_sent_ones(ends: Ends) -> None:
    nested = {"layer": {"weight": torch.ones(2)}}
    for weights in (filled(1.0), nested, TensorDict(nested), small(2.0)):
        ends.trainer.send_weights_async(weights)
        _, found = ends.worker.receive_weights()
        ends.worker.send_ack()
        ends.trainer.wait_ack()

        wanted = weights if isinstance(weights, dict | TensorDict) else weights.state_dict()
        assert wanted.keys() == found.keys()
        WeightStrategy().apply_weights(weights, found)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("policy", filled(1.0)), {"model_id": "policy"}),
        ((filled(1.0),), {"weights": filled(2.0)}),
        (("policy",), {"model_id": "value"}),
    ],
)
def test_an_argument_that_is_given_twice_is_refused(ends: Ends, args: Any, named: Any) -> None:
    for send in (ends.trainer.send_weights, ends.trainer.send_weights_async):
        with pytest.raises(ConfigurationError, match="Nothing was sent"):
            send(*args, **named)


@pytest.mark.parametrize("weights", [None, 3, "policy", [torch.ones(2)]])
def test_sending_objects_that_are_not_weights_raises_value_error_and_sends_nothing(ends: Ends, weights: Any) -> None:
    with pytest.raises(ValueError, match=r"Nothing was sent|not supported"):
        ends.trainer.send_weights(weights)

    assert ends.worker.receive_weights(0.01) is None


def test_several_models_over_one_pipe_are_acked_separately(ends: Ends) -> None:
    for model_id in ("policy", "value"):
        ends.trainer.send_weights_async(model_id, filled(1.0))
    for _ in range(2):
        ends.worker.receive_weights()
        ends.worker.send_ack()

    assert ["policy", "value"] == [ends.trainer.wait_ack().model_id for _ in range(2)]
    with pytest.raises(StateError, match=r"Transport.*send_weights_async"):
        ends.trainer.wait_ack()


def test_receive_weights_can_write_into_a_buffer_and_a_model(ends: Ends) -> None:
    buffer, model = filled(0.0), torch.nn.Linear(3, 2)
    ends.trainer.send_weights_async(filled(4.0))

    ends.worker.receive_weights(weights=buffer, model=model, strategy=WeightStrategy("state_dict"))
    ends.worker.send_ack()

    assert ends.trainer.wait_ack().ok
    assert 4.0 == value(buffer) == value(model.state_dict())


def test_a_model_is_written_only_with_a_strategy_and_a_buffer_without_a_model(ends: Ends) -> None:
    buffer, model = filled(0.0), torch.nn.Linear(3, 2)
    kept = constants(model)
    for fill, into in ((1.0, {"model": model}), (2.0, {"weights": buffer, "strategy": "state_dict"})):
        ends.trainer.send_weights_async(filled(fill))
        ends.worker.receive_weights(**into)
        ends.worker.send_ack()
        assert ends.trainer.wait_ack().ok

    assert (constants(model), value(buffer)) == (kept, 2.0)


def test_weights_that_do_not_fit_a_buffer_are_refused_and_the_sender_is_told(ends: Ends) -> None:
    buffer = {"weight": torch.zeros(1)}
    ends.trainer.send_weights_async(filled(4.0))

    with pytest.raises(LayoutError):
        ends.worker.receive_weights(weights=buffer)

    assert 0.0 == value(buffer)
    with pytest.raises(RefusedError, match="do not fit"):
        ends.trainer.wait_ack()


@pytest.mark.parametrize(("width", "height"), [(9, 2), (3, 9)])
def test_weights_that_fit_only_a_buffer_or_only_a_model_change_neither(ends: Ends, width: int, height: int) -> None:
    buffer = {"weight": torch.zeros(2, width), "bias": torch.zeros(2)}
    model = torch.nn.Linear(3, height)
    kept = constants(model)
    ends.trainer.send_weights_async(filled(4.0))

    with pytest.raises(LayoutError):
        ends.worker.receive_weights(weights=buffer, model=model, strategy=WeightStrategy())

    assert (value(buffer), constants(model)) == (0.0, kept)
    with pytest.raises(RefusedError, match="do not fit"):
        ends.trainer.wait_ack()


def test_setup_on_the_receiver_writes_the_first_weights_into_buffer_and_model(ends: Ends) -> None:
    buffer, model = filled(0.0), torch.nn.Linear(3, 2)
    ends.trainer.send_weights_async(filled(4.0))

    found = ends.worker.setup_connection_and_weights_on_receiver(
        worker_idx=0, weights=buffer, model=model, strategy="state_dict"
    )

    assert 4.0 == value(found[1]) == value(buffer) == value(model.state_dict())


def test_the_default_receive_timeout_is_one_second_in_generation_a_and_none_in_b(
    ends: Ends, queues: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []

    def noted(timeout: Any) -> Deadline:
        waits.append(timeout)
        return Deadline(0.0)

    monkeypatch.setattr(facade, "Deadline", noted)
    for worker in (ends.worker, MPTransport(*queues)):
        assert worker.receive_weights() is None
    ends.worker.timeout = 7.0
    assert ends.worker.setup_connection_and_weights_on_receiver(worker_idx=0) is None

    assert [1.0, None, 7.0] == waits


class Renaming(WeightStrategy):
    """A user's strategy, which may rename the entries that it applies."""


def test_a_model_is_not_written_if_a_users_strategy_cannot_fill_the_buffer(ends: Ends) -> None:
    buffer, model = {"weight": torch.zeros(2, 9), "bias": torch.zeros(2)}, torch.nn.Linear(3, 2)
    kept = constants(model)
    ends.trainer.send_weights_async(filled(4.0))

    with pytest.raises(LayoutError):
        ends.worker.receive_weights(weights=buffer, model=model, strategy=Renaming())

    assert (value(buffer), constants(model)) == (0.0, kept)
    with pytest.raises(RefusedError, match="do not fit"):
        ends.trainer.wait_ack()


class Interrupted(WeightStrategy):
    """A strategy that is interrupted by Ctrl-C while it writes."""

    def apply_weights(self, destination: object, weights: object, inplace: bool = True) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_weights_are_written_is_reported_to_the_sender_at_once(ends: Ends) -> None:
    ends.trainer.send_weights_async(filled(4.0))

    with pytest.raises(KeyboardInterrupt):
        ends.worker.receive_weights(model=torch.nn.Linear(3, 2), strategy=Interrupted())

    with pytest.raises(RefusedError, match="KeyboardInterrupt"):
        ends.trainer.wait_ack()


def test_receive_weights_takes_a_strategy_by_its_name(ends: Ends) -> None:
    model = torch.nn.Linear(3, 2)
    ends.trainer.send_weights_async(filled(4.0))
    with pytest.raises(ConfigurationError, match="no strategy 'tensor_dict'"):
        ends.worker.receive_weights(model=model, strategy="tensor_dict")

    ends.worker.receive_weights(model=model, strategy="state_dict")  # the failed call has not consumed the update
    ends.worker.send_ack()

    assert ends.trainer.wait_ack().ok
    assert 4.0 == value(model.state_dict())


def test_receive_weights_returns_each_update_once(ends: Ends) -> None:
    ends.trainer.send_weights_async(filled(1.0))

    assert ends.worker.receive_weights() is not None
    assert ends.worker.receive_weights(0.01) is None
    ends.worker.send_ack()
    with pytest.raises(StateError, match="answered already"):
        ends.worker.send_ack()


def test_a_worker_that_receives_late_gets_the_newest_version(hurried: Ends) -> None:
    for fill in (1.0, 2.0):
        with pytest.raises(AckTimeoutError):
            hurried.trainer.send_weights(filled(fill))

    assert 2.0 == value(hurried.worker.receive_weights()[1])


def test_send_weights_checks_its_timeout_and_can_return_a_failed_report(hurried: Ends, queues: list[Any]) -> None:
    for trainer in (hurried.trainer, MPTransport(*queues, 0.02)):
        report = trainer.send_weights(filled(1.0), on_failure="report")
        assert OutcomeKind.TIMED_OUT is report[0].kind
        with pytest.raises(ConfigurationError, match="timeout= is '1'"):
            trainer.send_weights(filled(2.0), timeout="1")
        trainer.close()


def drained(pipe: Connection) -> list[bytes]:
    """What is still in a pipe, which is empty then."""
    return list(iter(lambda: pipe.recv_bytes() if pipe.poll() else b"", b""))


def test_a_closed_transport_neither_sends_nor_receives(ends: Ends) -> None:
    pipes = [Connection(os.dup(pipe.fileno())) for pipe in ends.pipes]  # stay open
    ends.trainer.send_weights_async(filled(1.0))
    assert ends.worker.receive_weights() is not None
    ends.worker.close()
    ends.trainer.close()
    assert [bool(drained(pipe)) for pipe in pipes] == [True, True]  # the goodbyes

    for call in (
        ends.worker.receive_weights,
        ends.worker.send_ack,
        functools.partial(ends.trainer.send_weights, filled(2.0)),
        functools.partial(ends.trainer.send_weights_async, filled(2.0)),
        ends.trainer.wait_ack,
    ):
        with pytest.raises(StateError, match="closed"):
            call()
    assert [drained(pipe) for pipe in pipes] == [[], []]


def test_a_closed_trainer_ends_a_receive_without_timeout(ends: Ends) -> None:
    ends.trainer.send_weights_async(filled(1.0))
    ends.worker.receive_weights()
    ends.worker.send_ack()
    ends.trainer.close()
    ends.pipes[0].close()

    with pytest.raises(TransportError):
        ends.worker.receive_weights(timeout=None)


def _closing(worker: MPTransport) -> Any:
    """Close the transport, as another thread may, while this one looks for updates."""
    worker.close()
    return []


def test_a_wait_ends_when_the_transport_is_closed(ends: Ends, queues: list[Any], monkeypatch: Any) -> None:
    for worker in (ends.worker, MPTransport(*queues)):
        monkeypatch.setattr(worker, "_arrived", functools.partial(_closing, worker))
        with pytest.raises(StateError, match="the MPTransport is closed and allows close"):
            worker.receive_weights(timeout=None)


def test_a_wait_of_another_thread_ends_at_once_when_the_transport_is_closed(ends: Ends, queues: list[Any]) -> None:
    for worker in (ends.worker, MPTransport(*queues)):
        with ThreadPoolExecutor(1) as beside:
            receiving = beside.submit(worker.receive_weights, PATIENCE)
            with pytest.raises(StillWaiting):
                receiving.result(0.05)
            worker.close()
            with pytest.raises(StateError, match="closed"):
                receiving.result(PATIENCE / 2)


def test_an_error_that_leaves_a_with_block_is_reported_to_the_trainer(ends: Ends) -> None:
    def work() -> None:
        with ends.worker:
            ends.worker.receive_weights()
            raise LookupError("the worker's own")

    ends.trainer.send_weights_async(filled(1.0))
    with pytest.raises(LookupError, match="the worker's own"):
        work()

    with pytest.raises(WorkerLostError, match="the worker's own"):
        ends.trainer.wait_ack()


def test_closing_during_a_receive_keeps_the_users_error_and_later_calls_say_closed(ends: Ends) -> None:
    class Closing(WeightStrategy):
        def apply_weights(self, *_: Any, **__: Any) -> None:
            ends.worker.close()
            raise LookupError("the user's own")

    ends.trainer.send_weights_async(filled(1.0))
    with pytest.raises(LookupError, match=r"^the user's own$"):
        ends.worker.receive_weights(timeout=PATIENCE, model=small(), strategy=Closing("state_dict"))

    ends.trainer.close()
    for call in (ends.worker.send_ack, ends.trainer.wait_ack, ends.trainer.check_ack):
        with pytest.raises(StateError, match="the MPTransport is closed and allows close"):
            call()


def test_a_pickled_transport_keeps_its_timeout_but_no_outstanding_updates(ends: Ends) -> None:
    ends.trainer.send_weights_async(filled(1.0))
    state = {name: entry for name, entry in ends.trainer.__getstate__().items() if name != "_given"}

    assert not {"_senders", "_outstanding", "_channel"} & state.keys()
    assert 5 == pickle.loads(pickle.dumps(MPTransport(timeout=5))).timeout


# ------------------------------------------------------------------------------------------------- the pipe


def test_fault_06_user_messages_keep_their_order_and_are_unchanged(ends: Ends) -> None:
    mine = [("reset", {"seed": 3}), (None, "updated"), b"bytes"]
    ends.trainer.pipe.send(mine[0])
    ends.trainer.send_weights_async(filled(1.0))
    ends.trainer.pipe.send(mine[1])
    ends.trainer.pipe.send(mine[2])

    found = [ends.worker.pipe.recv() for _ in range(4)]

    assert [mine[0], mine[1], mine[2]] == [found[0], found[2], found[3]]
    assert "update_weights" == found[1][1]
    ends.worker.send_ack()
    assert ends.trainer.wait_ack().ok


def test_fault_06_receive_weights_leaves_user_messages_in_the_pipe(ends: Ends) -> None:
    ends.trainer.pipe.send("before")
    ends.trainer.send_weights_async(filled(1.0))

    assert 1.0 == value(ends.worker.receive_weights()[1])
    ends.worker.send_ack()
    assert ends.trainer.wait_ack().ok
    assert "before" == ends.worker.pipe.recv()
    assert not ends.worker.pipe.poll()


def test_an_ack_text_without_a_pending_update_is_a_user_message(ends: Ends) -> None:
    ends.worker.pipe.send((None, "updated"))

    assert (None, "updated") == ends.trainer.pipe.recv()


@pytest.mark.parametrize("mine", [np.ones(3), (np.ones(3), "updated"), (None, np.ones(3))])
def test_numpy_arrays_in_user_messages_are_not_taken_for_acks(ends: Ends, mine: Any) -> None:
    ends.trainer.send_weights_async("policy", filled(1.0))
    ends.worker.pipe.recv()  # the worker owes an ack for this update
    ends.worker.pipe.send(mine)
    assert repr(ends.trainer.pipe.recv()) == repr(mine)
    assert ends.trainer.pipe.poll() is False


def test_the_pipe_of_a_closed_trainer_raises_eof_error_after_the_last_message(ends: Ends) -> None:
    ends.trainer.pipe.send("last words")
    ends.pipes[0].close()
    ends.trainer.close()

    assert "last words" == ends.worker.pipe.recv()
    assert ends.worker.pipe.poll(PATIENCE)
    with pytest.raises(EOFError):
        ends.worker.pipe.recv()


def test_poll_waits_for_an_update_that_is_sent_later(ends: Ends) -> None:
    assert not ends.worker.pipe.poll(0.01)
    later = threading.Timer(0.05, lambda: ends.trainer.send_weights_async(filled(1.0)))
    later.start()

    assert ends.worker.pipe.poll(PATIENCE)
    later.join()


def test_recv_waits_for_an_update_that_is_sent_later(ends: Ends) -> None:
    later = threading.Timer(0.05, lambda: ends.trainer.send_weights_async(filled(1.0)))
    later.start()

    assert 1.0 == value(ends.worker.pipe.recv()[0][1])
    later.join()


def test_bytes_sent_by_the_user_pass_unchanged(ends: Ends) -> None:
    ends.trainer.pipe.send_bytes(b"mine")
    ends.trainer.send_weights_async(filled(1.0))

    assert ends.worker.pipe.recv_bytes() == b"mine"
    assert 1.0 == value(ends.worker.pipe.recv()[0][1])


# ------------------------------------------------------------------------------------- the receiver's `_transport`


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_the_transport_of_a_receiver_behaves_like_torchrls_in_a_worker_loop(strategy: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    model = small()
    with MultiProcessWeightSyncScheme(strategy) as there, MultiProcessWeightSyncScheme(strategy) as here:
        there.init_on_sender("policy", pipes=[ours])
        here.init_on_worker("policy", pipe=theirs, model=model)
        receiver = here.get_receiver()
        there.get_sender().send_async(small(5.0))
        assert receiver._transport.pipe.poll(PATIENCE)
        (model_id, weights), message = receiver._transport.pipe.recv()
        assert ("policy", "update_weights", State.PENDING_ASYNC) == (model_id, message, receiver.state)
        assert {0.0} == constants(model)
        receiver.apply_weights(weights)

        report = there.get_sender().wait_async()
        assert (OutcomeKind.APPLIED, Evidence.ANSWER) == (report[0].kind, report[0].evidence)
        assert ({5.0}, 1) == (constants(model), receiver.version)


def test_the_transport_of_a_receiver_acks_an_update_taken_from_the_receiver(ends: Ends) -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", pipe=ends.pipes[1], model=small())
        transport = scheme.get_receiver()._transport
        for ack in (transport.send_ack, lambda: transport.pipe.send((None, "updated"))):
            ends.trainer.send_weights_async(small(5.0))
            assert scheme.get_receiver().take_update(PATIENCE) is not None
            ack()
            assert ends.trainer.wait_ack().ok


def test_applying_other_weights_by_hand_refuses_the_pending_update() -> None:
    ours, theirs = multiprocessing.Pipe()
    model = small()
    with MultiProcessWeightSyncScheme() as scheme, MPTransport(ours) as trainer:
        scheme.init_on_worker("policy", pipe=theirs, model=model)
        receiver = scheme.get_receiver()
        trainer.send_weights_async(small(5.0))
        _, weights = receiver._transport.receive_weights(PATIENCE)
        next(iter(weights.values())).add_(1)
        receiver.apply_weights(weights)

        with pytest.raises(RefusedError, match="by hand"):
            trainer.wait_ack()
        assert receiver.version is None


def test_a_received_update_is_applied_although_a_newer_version_was_sent_meanwhile() -> None:
    ours, theirs = multiprocessing.Pipe()
    model = small()
    with MultiProcessWeightSyncScheme() as scheme, MPTransport(ours, timeout=0.02) as trainer:
        scheme.init_on_worker("policy", pipe=theirs, model=model)
        receiver = scheme.get_receiver()
        with pytest.raises(AckTimeoutError):
            trainer.send_weights(small(1.0))
        _, weights = receiver._transport.receive_weights(PATIENCE)
        with pytest.raises(AckTimeoutError):
            trainer.send_weights(small(2.0))
        receiver.apply_weights(weights)
        assert ({1.0}, 1) == (constants(model), receiver.version)

        assert receiver.receive(PATIENCE)
        assert ({2.0}, 2) == (constants(model), receiver.version)
        assert trainer.wait_ack().version == 2


# ---------------------------------------------------------------------------------------------------- faults


def receive_and_hang(pipe: Connection, received: Any) -> None:
    transport = MPTransport(pipe)
    transport.receive_weights(PATIENCE)
    received.set()
    signal.pause()


def test_fault_02_a_worker_that_dies_ends_the_wait_at_once_and_raises(forkserver: Any) -> None:
    ours, theirs = forkserver.Pipe()
    spare = Connection(os.dup(theirs.fileno()))  # keeps the pipe open, so that the trainer reads no end of file
    received = forkserver.Event()
    worker = forkserver.Process(target=receive_and_hang, args=(theirs, received))
    worker.start()
    theirs.close()

    def kill() -> None:
        received.wait(PATIENCE)
        worker.kill()

    with MPTransport(ours, timeout=PATIENCE) as trainer:
        trainer.send_weights_async(filled(1.0))
        killer = threading.Thread(target=kill)
        killer.start()

        with pytest.raises(WorkerLostError, match=r"dead|closed"):
            trainer.wait_ack()
    killer.join()
    worker.join()
    spare.close()


# ----------------------------------------------------------------------------------------- generation B: queues


def test_without_an_ack_queue_async_sends_work_and_send_weights_is_refused(queues: list[Any]) -> None:
    with MPTransport(queues[0]) as trainer, MPTransport(queues[0]) as worker:
        for fill in (1.0, 2.0):
            trainer.send_weights_async(filled(fill))
        with pytest.raises(ConfigurationError, match="ack_queue"):
            trainer.send_weights(filled(3.0))

        # The queue's own thread writes, so the first update may be read before the second has arrived.
        fills = iter(lambda: value(worker.receive_weights(timeout=PATIENCE)), 2.0)
        assert set(fills) <= {1.0}


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_a_closed_trainer_ends_a_receive_over_queues(queues: list[Any], timeout: float | None) -> None:
    with MPTransport(*queues) as worker:
        with MPTransport(*queues) as trainer:
            trainer.send_weights_async(filled(1.0))
            worker.receive_weights()
            worker.send_ack()
            trainer.wait_ack(timeout=PATIENCE)

        given_up = threading.Timer(PATIENCE / 2, worker.close)
        given_up.start()
        with pytest.raises(SenderClosed):
            worker.receive_weights(timeout=timeout)
        given_up.cancel()
        given_up.join()

        # Later calls raise at once.
        with pytest.raises(SenderClosed, match="To receive from another sender, make a new transport, over a new pipe"):
            worker.receive_weights(timeout=0.0)


def test_a_transport_over_queues_is_connected_and_has_no_pipe(queues: list[Any]) -> None:
    for transport in (MPTransport(*queues), MPTransport(weight_queue=queues[0], ack_queue=queues[1])):
        assert transport.check_connection()
        with pytest.raises(ConfigurationError, match="no pipe"):
            _ = transport.pipe
    assert not MPTransport(ack_queue=queues[1]).check_connection()


def test_a_queue_keeps_user_messages(queues: list[Any]) -> None:
    with MPTransport(*queues) as trainer, MPTransport(*queues) as worker:
        mine = ["mine", b"mine", b""]
        for each in mine:
            queues[0].put(each)
        trainer.send_weights_async(filled(1.0))

        assert 1.0 == value(worker.receive_weights(timeout=PATIENCE))
        assert mine == list(worker._queue("receiver").user_messages)


@pytest.mark.parametrize("kind", [MPTransport, SharedMemTransport, DistributedTransport, RPCTransport])
def test_constructors_check_the_timeout(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^timeout= is '10': give a number of seconds"):
        kind(timeout="10")


def test_the_positional_timeout_of_generation_a_may_be_a_numpy_number() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, MPTransport(ours, np.int64(7)) as transport:  # type: ignore[arg-type]
        assert transport.timeout == 7
        assert transport.check_connection()


def test_check_connection_is_false_for_an_object_that_is_no_pipe() -> None:
    assert not MPTransport("a pipe").check_connection()
