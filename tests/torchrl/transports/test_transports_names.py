"""The transport classes without a scheme: every row of the reference API."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, constants, small
from tensordict import TensorDict
from torch import nn

from weightsync import (
    DistributedWeightSyncScheme,
    MPTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    TransportBackend,
    WeightStrategy,
)


def plain(fill: float) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in small(fill).state_dict().items()}


def values(weights: Any) -> set[float]:
    flat = WeightStrategy("state_dict").extract_weights(weights)
    return {value for tensor in flat.values() for value in tensor.flatten().tolist()}


class Ends:
    """An MPTransport over each end of a pipe."""

    def __init__(self, timeout: float = PATIENCE) -> None:
        self.pipes = multiprocessing.Pipe()
        self.trainer, self.worker = (MPTransport(pipe, timeout=timeout) for pipe in self.pipes)

    def close(self) -> None:
        for transport in (self.trainer, self.worker):
            transport.close()
        for pipe in self.pipes:
            pipe.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def meanwhile(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# ------------------------------------------------------------------------------------------------ MPTransport


def test_mp_transport_check_connection_says_whether_the_pipe_is_open() -> None:
    ours, theirs = multiprocessing.Pipe()
    transport = MPTransport(ours)

    assert transport.check_connection() is True
    ours.close()
    assert transport.check_connection() is False
    theirs.close()


def test_mp_transport_pipe_yields_what_worker_loops_expect(ends: Ends) -> None:
    ends.trainer.send_weights_async("policy", plain(4.0))

    assert ends.worker.pipe.poll(PATIENCE)
    (model_id, weights), message = ends.worker.pipe.recv()
    assert (model_id, message, values(weights)) == ("policy", "update_weights", {4.0})
    with pytest.raises(TimeoutError):  # the update is pending until it is answered
        MPTransportWait(ends.trainer)
    ends.worker.send_ack()
    ends.trainer.wait_ack()


def MPTransportWait(transport: Any) -> None:
    """Call `wait_ack` with a short timeout."""
    before, transport.timeout = transport.timeout, 0.05
    try:
        transport.wait_ack()
    finally:
        transport.timeout = before


def test_mp_transport_behind_a_receiver_as_worker_loops_have_it() -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme, model = MultiProcessWeightSyncScheme(strategy="state_dict"), small()
    with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
        sender.register_worker(worker_idx=0, pipe_or_context=ours)
        receiver.register_model(model)
        receiver.register_worker_transport(theirs)
        sender.send_async(plain(5.0))
        model_id, weights = receiver._transport.receive_weights(timeout=PATIENCE)
        receiver.apply_weights(weights)

        assert sender.wait_async().ok
        assert (model_id, constants(model)) == ("policy", {5.0})


# ------------------------------------------------------------------------------------------ SharedMemTransport


def test_shared_mem_transport_without_workers_is_a_copy_target() -> None:
    buffer = TensorDict(plain(0.0))
    transport = SharedMemTransport({"policy": buffer})
    where = {name: tensor.data_ptr() for name, tensor in buffer.items()}
    transport.send_weights("policy", plain(3.0))

    assert values(buffer) == {3.0}
    assert {name: tensor.data_ptr() for name, tensor in buffer.items()} == where
    assert transport.check_connection() is True


def test_shared_mem_transport_register_weights_makes_a_copy_target() -> None:
    buffer, transport = TensorDict(plain(0.0)), SharedMemTransport()
    transport.register_weights("policy", buffer)
    transport.send_weights("policy", TensorDict(plain(2.0)))

    assert values(buffer) == {2.0}


def test_shared_mem_transport_with_auto_register_off_is_a_key_error_that_lists_the_known() -> None:
    transport = SharedMemTransport({"value": TensorDict(plain(0.0))}, auto_register=False)

    with pytest.raises(KeyError, match="value"):
        transport.send_weights("policy", plain(1.0))


def test_shared_mem_transport_hands_weights_to_its_workers_over_their_pipes() -> None:
    ours, theirs = multiprocessing.Pipe()
    transport, model = SharedMemTransport(), small()
    transport.register_pipe(ours)
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", pipe=theirs, model=model)
        for fill in (1.0, 2.0):
            thread = meanwhile(lambda: scheme.get_receiver().receive(timeout=PATIENCE))
            transport.send_weights("policy", plain(fill))
            thread.join(PATIENCE)

            assert constants(model) == {fill}
    transport.close()


def test_shared_mem_transport_receives_and_acks_as_a_worker() -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer, worker = SharedMemTransport(), SharedMemTransport()
    trainer.register_pipe(ours)
    worker.register_pipe(theirs)
    seen = []

    def work() -> None:
        seen.append(worker.receive_weights(timeout=PATIENCE))
        worker.send_ack("updated")

    thread = meanwhile(work)
    trainer.send_weights("policy", plain(2.0))
    thread.join(PATIENCE)

    assert values(seen[0][1]) == {2.0}
    for transport in (trainer, worker):
        transport.close()


# -------------------------------------------------------------------------------------------- TransportBackend


class Mailbox:
    """A user's transport, with only the three methods of generation A."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sent: list[tuple[str, Any]] = []

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.sent.append((model_id, weights))
        WeightStrategy().apply_weights(self.model, weights)

    def receive_weights(self, timeout: float | None = 1.0) -> tuple[str, Any] | None:
        return self.sent.pop(0) if self.sent else None

    def check_connection(self) -> bool:
        return True


class MailboxScheme(MultiProcessWeightSyncScheme):
    """A user's scheme, which reaches its workers over the user's own transport."""

    def create_transport(self, pipe_or_context: Any) -> Any:
        return Mailbox(pipe_or_context)


def test_transport_backend_is_a_protocol_of_its_methods() -> None:
    assert isinstance(Mailbox(small()), TransportBackend)
    assert not isinstance(object(), TransportBackend)
    assert isinstance(NoWeightSyncScheme().create_transport(None), TransportBackend)


def test_the_transport_that_sends_nothing_is_closed_like_any_other() -> None:
    with NoWeightSyncScheme().create_transport(None) as transport:
        transport.send_weights(small())
    transport.close()
    with pytest.raises(KeyError, match="lost"), transport:
        raise KeyError("lost")


def test_a_users_transport_works_under_send() -> None:
    models = [small(), small()]
    with MailboxScheme().create_sender() as sender:
        for index, model in enumerate(models):
            sender.register_worker(index, model)
        report = sender.send(small(3.0))

        assert [constants(model) for model in models] == [{3.0}, {3.0}]
        assert set(report) == {0, 1}


def test_send_async_over_a_users_transport_that_cannot_is_a_runtime_error() -> None:
    with MailboxScheme().create_sender() as sender:
        sender.register_worker(0, small())
        with pytest.raises(RuntimeError):
            sender.send_async(small(3.0))

        assert sender.send(small(2.0)).version is not None


def test_a_users_transport_that_raises_fails_its_worker_alone() -> None:
    class Broken(Mailbox):
        def send_weights(self, model_id: str, weights: Any) -> None:
            raise ConnectionResetError("cut")

    class Scheme(MailboxScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return pipe_or_context

    fine = Mailbox(small())
    with Scheme().create_sender() as sender:
        sender.register_worker(0, Broken(small()))
        sender.register_worker(1, fine)
        report = sender.send(small(2.0), on_failure="report")

        assert report.failed == (0,)
        assert "cut" in report[0].reason
        assert constants(fine.model) == {2.0}


# --------------------------------------------------------------------------------------------- create_transport


@pytest.mark.parametrize("scheme_class", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_create_transport_takes_a_pipe_by_position_or_keyword(scheme_class: Any) -> None:
    for give in (lambda pipe: ((pipe,), {}), lambda pipe: ((), {"pipe": pipe})):
        ours, theirs = multiprocessing.Pipe()
        positional, named = give(ours)
        transport = scheme_class().create_transport(*positional, **named)

        assert transport.check_connection() is True
        assert isinstance(transport, TransportBackend)
        transport.close()
        theirs.close()


# --------------------------------------------------------- the other schemes, without a peer


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "collector_infos"),
        ({"collector_infos": [1], "collector_rrefs": [], "collector_class": 1}, "collector_rrefs"),
    ],
)
def test_rpc_scheme_names_what_its_sender_misses(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RPCWeightSyncScheme().init_on_sender("policy", model=small(), **given)


def test_distributed_scheme_names_what_its_sides_miss() -> None:
    with pytest.raises(ValueError, match="store"):
        DistributedWeightSyncScheme().init_on_worker("policy", model=small(), rank=1)
    with pytest.raises(ValueError, match="rank"):
        DistributedWeightSyncScheme().init_on_worker("policy", model=small(), store=object())
