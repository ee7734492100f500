"""`SharedMemTransport`: copy targets, and workers, which get the weights over their pipes instead."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from fleet import PATIENCE, constants, small
from tensordict import TensorDict

from weightsync import (
    ConfigurationError,
    LayoutError,
    MPTransport,
    OutcomeKind,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    State,
    StateError,
    TransportError,
    WeightStrategy,
)
from weightsync.transports.pipe.link import PipeLink


def filled(fill: float) -> TensorDict:
    return TensorDict({"weight": torch.full((2, 3), fill), "bias": torch.full((2,), fill)}, [])


def values(weights: Any) -> set[float]:
    return {entry for tensor in weights.values() for entry in tensor.flatten().tolist()}


@pytest.fixture
def pipes() -> Iterator[list[Any]]:
    made = [multiprocessing.Pipe() for _ in range(2)]
    yield made
    for ours, theirs in made:
        ours.close()
        theirs.close()


# ----------------------------------------------------------------------------------------------- copy targets


def test_a_send_without_workers_fills_the_buffer_in_place() -> None:
    buffer = filled(0.0).share_memory_()
    transport = SharedMemTransport({"policy": buffer})
    where = buffer["weight"].data_ptr()

    report = transport.send_weights("policy", filled(3.0))

    assert ({3.0}, where, 0) == (values(buffer), buffer["weight"].data_ptr(), len(report))


def test_without_workers_both_sends_accept_the_model_id_in_every_argument_form() -> None:
    transport = SharedMemTransport(known := {})
    for send in (transport.send_weights, transport.send_weights_async):
        for args, named in (
            (("value", filled(1.0)), {}),
            ((filled(2.0), "value"), {}),
            ((filled(3.0),), {"model_id": "value"}),
            ((), {"model_id": "value", "weights": filled(4.0)}),
        ):
            (wanted,) = (values(given) for given in (*args, *named.values()) if given != "value")
            report = send(*args, **named)
            assert ("value", 0, wanted) == (report.model_id, len(report), values(known["value"]))

    assert {"value"} == known.keys()
    assert ("policy", 0) == (transport.check_ack().model_id, len(transport.check_ack()))


@pytest.mark.parametrize("strategy", ["state_dict", WeightStrategy()])
def test_receive_weights_without_a_pipe_applies_only_with_buffer_model_and_strategy(strategy: Any) -> None:
    transport, buffer, model = SharedMemTransport(), filled(3.0), torch.nn.Linear(3, 2)
    before = constants(model)
    assert transport.receive_weights(timeout=PATIENCE) is None
    assert transport.receive_weights(weights=buffer, model=model) is None
    assert transport.receive_weights(weights=buffer, strategy=strategy) is None
    assert transport.receive_weights(model=model, strategy=strategy) is None
    assert before == constants(model)

    assert transport.receive_weights(weights=buffer, model=model, strategy=strategy) is buffer
    assert {3.0} == constants(model)


def test_the_first_send_of_a_model_creates_a_shared_buffer_that_later_sends_fill() -> None:
    transport = SharedMemTransport(known := {})
    transport.send_weights("policy", filled(1.0))
    buffer = known["policy"]
    transport.send_weights(filled(2.0))

    assert ({2.0}, True) == (values(known["policy"]), known["policy"] is buffer)
    assert all(tensor.is_shared() for tensor in buffer.values())


class Scaled(torch.nn.Linear):
    """A layer with state beside its tensors."""

    def __init__(self, scale: float) -> None:
        super().__init__(2, 2)
        self.scale = scale

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale = state


def test_a_models_buffer_has_the_extra_state_of_each_of_its_modules() -> None:
    transport = SharedMemTransport(known := {})
    source, model = (torch.nn.Sequential(Scaled(scale), Scaled(2 * scale)) for scale in (1.0, 0.0))
    transport.send_weights(source)

    transport.receive_weights(weights=known["policy"], model=model, strategy="tensordict")
    assert [1.0, 2.0] == [layer.scale for layer in model]


def test_an_unregistered_model_without_auto_register_raises_key_error_listing_the_known() -> None:
    transport = SharedMemTransport({"value": filled(0.0)}, auto_register=False)

    for send in (transport.send_weights, transport.send_weights_async):
        with pytest.raises(KeyError, match="value"):
            send("policy", filled(1.0))
    transport.register_weights("policy", filled(0.0))
    transport.send_weights("policy", filled(1.0))


def test_weights_that_do_not_fit_leave_the_buffer_as_it_was() -> None:
    buffer = filled(1.0)
    with pytest.raises(LayoutError):
        SharedMemTransport({"policy": buffer}).send_weights("policy", {"weight": torch.zeros(2)})

    assert {1.0} == values(buffer)


def test_a_transport_of_a_scheme_fills_the_schemes_buffers() -> None:
    scheme = SharedMemWeightSyncScheme()
    scheme.create_transport(None).send_weights("policy", filled(2.0))

    assert {2.0} == values(scheme.policy_weights["policy"])
    with pytest.raises(KeyError):
        SharedMemWeightSyncScheme(auto_register=False).create_transport(None).send_weights("policy", filled(2.0))


def test_wait_ack_without_workers_raises_state_error() -> None:
    transport = SharedMemTransport()
    transport.send_weights(filled(1.0))

    with pytest.raises(StateError):
        transport.wait_ack()
    assert transport.receive_weights() is None
    assert transport.send_ack() is None


# --------------------------------------------------------------------------------------------------- workers


def test_workers_get_each_version_over_their_pipes_and_ack_it(pipes: list[Any]) -> None:
    buffer = filled(0.0)
    with SharedMemTransport({"policy": buffer}) as trainer:
        workers = [SharedMemTransport() for _ in pipes]
        for worker, (ours, theirs) in zip(workers, pipes, strict=True):
            trainer.register_pipe(ours)
            worker.register_pipe(theirs)
        for fill in (1.0, 2.0):
            trainer.send_weights_async("policy", filled(fill))
            for worker in workers:
                assert {fill} == values(worker.receive_weights()[1])
                worker.send_ack()
            assert (0, 1) == tuple(trainer.wait_ack())
            assert {fill} == values(buffer)
        assert trainer.check_connection()
    for worker in workers:
        worker.close()


def test_arguments_of_a_call_also_apply_to_workers_behind_pipes(pipes: list[Any]) -> None:
    with SharedMemTransport(timeout=0.02) as trainer, SharedMemTransport() as worker:
        trainer.register_pipe(pipes[0][0])
        worker.register_pipe(pipes[0][1])
        trainer.send_weights_async(model_id="value", weights=filled(1.0))
        buffer, model = filled(0.0), torch.nn.Linear(3, 2)
        assert "value" == worker.receive_weights(PATIENCE, weights=buffer, model=model, strategy="state_dict")[0]
        assert {1.0} == values(buffer) == constants(model)
        worker.send_ack("done")
        trainer.timeout = PATIENCE
        assert trainer.check_ack("done").model_id == "value"

        trainer.timeout = 0.02
        report = trainer.send_weights(model_id="value", weights=filled(2.0), on_failure="report")
        assert ("value", OutcomeKind.TIMED_OUT) == (report.model_id, report[0].kind)
        assert "value" == worker.receive_weights(PATIENCE)[0]
        for call in (
            lambda: trainer.send_weights("value", filled(3.0), timeout="1"),
            lambda: worker.receive_weights("1"),
        ):
            with pytest.raises(ConfigurationError, match="timeout= is '1'"):
                call()


@pytest.mark.parametrize(("strategy", "kind"), [("state_dict", dict), ("tensordict", TensorDict)])
def test_a_module_arrives_in_the_form_of_the_trainers_strategy(pipes: list[Any], strategy: str, kind: type) -> None:
    with SharedMemTransport(strategy=strategy) as trainer, SharedMemTransport() as worker:
        trainer.register_pipe(pipes[0][0])
        worker.register_pipe(pipes[0][1])
        trainer.send_weights_async(small(1.0))

        assert isinstance(worker.receive_weights(PATIENCE)[1], kind)


def test_a_worker_whose_pipe_is_registered_later_gets_the_latest_version(pipes: list[Any]) -> None:
    with SharedMemTransport() as trainer, MPTransport(pipes[0][1]) as first, MPTransport(pipes[1][1]) as second:
        trainer.register_pipe(pipes[0][0])
        trainer.send_weights_async(filled(1.0))
        trainer.register_pipe(pipes[1][0])
        for worker in (first, second):
            assert {1.0} == values(worker.receive_weights(PATIENCE)[1])
            worker.send_ack()

        assert trainer.wait_ack().ok
        with pytest.raises(ConfigurationError, match="already"):
            trainer.register_pipe(pipes[0][0])


def test_a_pipe_whose_registration_failed_for_some_models_can_be_registered_again(
    pipes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe used to count as registered, and the models after the failure never reached its worker."""
    links = count(1)

    def failing(*given: Any, **named: Any) -> Any:
        if next(links) == 2:
            raise TransportError("No file descriptor to wait on.")
        return PipeLink(*given, **named)

    with SharedMemTransport() as trainer:
        trainer.register_pipe(pipes[0][0])
        for name in ("policy", "value"):
            trainer.send_weights_async(name, filled(1.0))
        monkeypatch.setattr("weightsync.torchrl.transports.shared.PipeLink", failing)
        with pytest.raises(TransportError, match="No file descriptor"):
            trainer.register_pipe(pipes[1][0])
        trainer.register_pipe(pipes[1][0])
        assert [sender.worker_ids for sender in trainer._senders.values()] == [(0, 1), (0, 1)]
        with pytest.raises(ConfigurationError, match="already"):
            trainer.register_pipe(pipes[1][0])


def test_fault_07_a_worker_serves_a_version_until_it_receives_the_next(pipes: list[Any]) -> None:
    model = small()
    with SharedMemWeightSyncScheme() as scheme, SharedMemTransport(timeout=0.02) as trainer:
        trainer.register_pipe(pipes[0][0])
        scheme.init_on_worker("policy", pipe=pipes[0][1], model=model)
        receiver = scheme.get_receiver()
        trainer.send_weights_async(small(1.0))
        assert receiver.receive(PATIENCE)
        assert trainer.wait_ack(timeout=PATIENCE).ok
        with pytest.raises(TimeoutError):
            trainer.send_weights(small(2.0))

        assert ({1.0}, State.READY) == (constants(model), receiver.state)
        assert receiver.receive(PATIENCE)
        assert {2.0} == constants(model)


# ---------------------------------------------------------------------------------------------- generation B


@pytest.mark.parametrize("named", [(), ("per_worker",), ("params_map", "init_queues", "per_worker")])
def test_generation_b_gives_each_worker_its_own_buffer(named: tuple[str, ...]) -> None:
    buffers = {0: filled(0.0), 1: filled(0.0)}
    queues: dict[int, queue.Queue[Any]] = {0: queue.Queue(), 1: queue.Queue()}
    transport = SharedMemTransport()
    with pytest.raises(RuntimeError):
        _ = transport.unique_weights
    given = {"params_map": dict(buffers), "init_queues": queues, "per_worker": True}
    transport.register_weights(
        *(given[name] for name in given if name not in named), **{name: given[name] for name in named}
    )
    transport.setup_connection_and_weights_on_sender()
    found = transport.setup_connection_and_weights_on_receiver(worker_idx=1, timeout=PATIENCE)
    transport.send_weights(filled(2.0), [1])

    assert [buffers[0], buffers[1]] == transport.unique_weights
    assert ({0.0}, {2.0}) == (values(buffers[0]), values(buffers[1]))
    assert found is buffers[1]
    with pytest.raises(RuntimeError):
        transport.setup_connection_and_weights_on_receiver(worker_idx=2)

    transport.send_weights({0: filled(3.0), 1: filled(4.0)})
    assert ({3.0}, {4.0}) == (values(buffers[0]), values(buffers[1]))


def test_generation_b_a_worker_applies_its_buffer_only_with_a_model_and_a_strategy() -> None:
    queues: dict[int, queue.Queue[Any]] = {1: queue.Queue()}
    transport = SharedMemTransport()
    transport.register_weights({1: (buffer := filled(3.0))}, queues)
    written, kept = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = constants(kept)
    for model, strategy in ((written, "state_dict"), (kept, None), (None, "state_dict")):
        transport.setup_connection_and_weights_on_sender()
        found = transport.setup_connection_and_weights_on_receiver(worker_idx=1, model=model, strategy=strategy)
        assert found is buffer

    assert ({3.0}, before) == (constants(written), constants(kept))
    with pytest.raises(queue.Empty):
        transport.setup_connection_and_weights_on_receiver(worker_idx=1, timeout=0.01)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), {}),
        (("policy",), {}),
        ((), {"model_id": "policy"}),
        ((), {"model_id": "policy", "params_map": {0: filled(0.0)}}),
        ((), {"weights": filled(0.0)}),
        (("policy",), {"params_map": {0: filled(0.0)}}),
        (("policy", filled(0.0)), {"params_map": {0: filled(0.0)}}),
        (("policy", filled(0.0)), {"init_queues": {0: None}}),
        (({0: filled(0.0)},), {"params_map": {0: filled(0.0)}}),
        (({0: filled(0.0)}, {0: None}), {"init_queues": {0: None}}),
        (([filled(0.0)],), {}),
    ],
)
def test_register_weights_refuses_arguments_of_neither_generation(given: Any, named: Any) -> None:
    transport = SharedMemTransport(known := {})

    with pytest.raises(ConfigurationError, match=r"takes \(model_id, weights\), or"):
        transport.register_weights(*given, **named)
    assert not known
    with pytest.raises(StateError):
        _ = transport.unique_weights


def test_fault_07_a_send_to_one_worker_of_a_common_buffer_is_refused() -> None:
    buffer, transport = filled(0.0), SharedMemTransport()
    transport.register_weights({0: buffer, 1: buffer}, {0: None, 1: None})
    assert 1 == len(transport.unique_weights)

    with pytest.raises(ValueError, match="would also change others"):
        transport.send_weights(filled(1.0), [0])
    assert {0.0} == values(buffer)


@pytest.mark.parametrize("weights", [filled(1.0), {0: filled(1.0)}, {0: filled(1.0), 1: filled(2.0)}])
def test_fault_07_a_per_worker_send_into_a_common_buffer_must_name_both_workers(weights: Any) -> None:
    buffer, transport = filled(0.0), SharedMemTransport()
    transport.register_weights({0: buffer, 1: buffer, 2: filled(0.0)}, per_worker=True)

    with pytest.raises(ValueError, match="would also change others"):
        transport.send_weights(weights, None if isinstance(weights, dict) else [0, 2])
    assert {0.0} == values(buffer)

    transport.send_weights(filled(3.0), [1, 0])
    assert {3.0} == values(buffer)


@pytest.fixture
def own_buffers() -> tuple[SharedMemTransport, dict[int, TensorDict]]:
    """A transport with a buffer for each of two workers."""
    buffers = {0: filled(0.0), 1: filled(0.0)}
    transport = SharedMemTransport()
    transport.register_weights(buffers, {0: queue.Queue(), 1: queue.Queue()}, per_worker=True)
    return transport, buffers


def test_send_weights_async_also_fills_the_workers_buffers(
    own_buffers: tuple[SharedMemTransport, dict[int, TensorDict]],
) -> None:
    """The method used to fill a new buffer, which no worker reads."""
    transport, buffers = own_buffers

    for send in (
        lambda: transport.send_weights_async(filled(3.0)),
        lambda: transport.send_weights_async(weights={0: filled(3.0), 1: filled(3.0)}),
    ):
        send()
        assert [{3.0}, {3.0}] == [values(buffer) for buffer in buffers.values()]
        transport.send_weights(filled(0.0))


def test_per_worker_weights_of_which_one_does_not_fit_change_no_buffer(
    own_buffers: tuple[SharedMemTransport, dict[int, TensorDict]],
) -> None:
    transport, buffers = own_buffers

    with pytest.raises(LayoutError, match="do not fit"):
        transport.send_weights({0: filled(3.0), 1: {"weight": torch.zeros(2)}})

    assert [{0.0}, {0.0}] == [values(buffer) for buffer in buffers.values()]


def test_a_closed_transport_changes_no_workers_buffer(
    own_buffers: tuple[SharedMemTransport, dict[int, TensorDict]],
) -> None:
    transport, buffers = own_buffers
    transport.close()

    with pytest.raises(StateError, match="closed"):
        transport.send_weights(filled(3.0))

    assert {0.0} == values(buffers[0])


def test_worker_ids_after_a_none_argument_are_refused_instead_of_ignored(
    own_buffers: tuple[SharedMemTransport, dict[int, TensorDict]],
) -> None:
    transport, buffers = own_buffers

    with pytest.raises(ConfigurationError, match="Nothing was sent"):
        transport.send_weights(filled(3.0), None, [1])

    assert [{0.0}, {0.0}] == [values(buffer) for buffer in buffers.values()]


@pytest.mark.parametrize("given", [(filled(3.0), [0, 2]), ({0: filled(3.0), 2: filled(3.0)},)])
def test_a_send_to_a_worker_without_a_buffer_changes_no_workers_buffer(
    own_buffers: tuple[SharedMemTransport, dict[int, TensorDict]], given: Any
) -> None:
    transport, buffers = own_buffers
    with pytest.raises(ConfigurationError, match=r"for workers \[2\]"):
        transport.send_weights(*given)
    transport.register_weights(buffers, {0: queue.Queue(), 1: queue.Queue()})  # not per_worker
    with pytest.raises(ConfigurationError, match="per_worker=True"):
        transport.send_weights(filled(3.0), [0])
    assert [{0.0}, {0.0}] == [values(buffer) for buffer in buffers.values()]

    report = transport.send_weights(weights=filled(3.0))
    assert ("policy", 0, {3.0}) == (report.model_id, len(report), values(buffers[1]))


def test_per_worker_buffers_and_pipes_cannot_be_combined(
    own_buffers: tuple[SharedMemTransport, dict[int, TensorDict]], pipes: list[Any]
) -> None:
    """Workers with pipes used to get nothing, and no report said so."""
    with pytest.raises(ConfigurationError, match="in one way"):
        own_buffers[0].register_pipe(pipes[0][0])
    with SharedMemTransport() as transport:
        transport.register_pipe(pipes[0][0])
        with pytest.raises(ConfigurationError, match="in one way"):
            transport.register_weights(params_map={0: filled(0.0)})
