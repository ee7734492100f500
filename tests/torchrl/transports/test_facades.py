"""Behaviour common to TorchRL's transport classes, over pipes, queues and a store, and without a peer."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fleet import PATIENCE
from tensordict import TensorDict

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    DistributedTransport,
    DistributedWeightSyncScheme,
    Evidence,
    MPTransport,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    RayActorTransport,
    RayTransport,
    RefusedError,
    RPCTransport,
    RPCWeightSyncScheme,
    StateError,
    WeightSyncError,
)
from weightsync.transports.calls.client import Answers, CallLink
from weightsync.transports.ray.session import require_ray


def weights(fill: float) -> dict[str, torch.Tensor]:
    """Weights of 120 KB, more than a store carries in a message."""
    return {"weight": torch.full((300, 100), fill), "bias": torch.full((3,), fill)}


class Ends:
    """The transports of a trainer and a worker, driven by one thread."""

    def __init__(self, kind: str) -> None:
        self._opened = contextlib.ExitStack()
        self.gives_id = kind != "queues"
        self.trainer, self.worker = getattr(self, f"_over_{kind}")()
        for end in (self.trainer, self.worker):
            self._opened.callback(end.close)

    def _over_pipe(self) -> tuple[Any, Any]:
        ours, theirs = (self._opened.enter_context(end) for end in multiprocessing.Pipe())
        return MPTransport(ours), MPTransport(theirs)

    def _over_queues(self) -> tuple[Any, Any]:
        queues = multiprocessing.Queue(), multiprocessing.Queue()
        for queue in queues:
            self._opened.callback(queue.join_thread)
            self._opened.callback(queue.close)
        return MPTransport(*queues), MPTransport(*queues)

    def _over_store(self) -> tuple[Any, Any]:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        return DistributedTransport(store, 1), DistributedTransport(store, 1)

    def sent(self, fill: float = 1.0) -> None:
        """Send an update and receive it at the worker, without an ack."""
        self.trainer.send_weights_async("policy", weights(fill))
        assert self.received() == {fill}

    def received(self) -> set[float]:
        """The distinct values of the next weights that arrive."""
        received = self.worker.receive_weights(timeout=PATIENCE)
        model_id, found = received if self.gives_id else ("policy", received)
        assert "policy" == model_id
        return {value for tensor in found.values() for value in tensor.flatten().tolist()}

    def close(self) -> None:
        self._opened.close()


@pytest.fixture(params=["pipe", "queues", pytest.param("store", marks=pytest.mark.gloo)])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    made.trainer.timeout = PATIENCE
    yield made
    made.close()


def test_one_thread_drives_both_ends(ends: Ends) -> None:
    for fill in (1.0, 2.0):
        assert OutcomeKind.PENDING is ends.trainer.send_weights_async("policy", weights(fill))[0].kind
        assert ends.received() == {fill}
        ends.worker.send_ack()
        report = ends.trainer.wait_ack()

        assert (OutcomeKind.APPLIED, Evidence.CALL) == (report[0].kind, report[0].evidence)


def test_send_weights_returns_when_the_ack_has_arrived(ends: Ends) -> None:
    found: list[set[float]] = []

    def work() -> None:
        found.append(ends.received())
        ends.worker.send_ack()

    thread = threading.Thread(target=work)
    thread.start()
    report = ends.trainer.send_weights("policy", weights(3.0))
    thread.join(PATIENCE)

    assert (report.ok, found) == (True, [{3.0}])


def test_fault_02_a_wait_ends_at_its_timeout_and_a_later_wait_accepts_the_late_ack(ends: Ends) -> None:
    ends.trainer.timeout = 0.02
    with pytest.raises(TimeoutError) as caught:
        ends.trainer.send_weights("policy", weights(1.0))

    assert (0,) == caught.value.pending
    ends.received()
    ends.worker.send_ack()
    ends.trainer.timeout = PATIENCE
    assert 1 == ends.trainer.wait_ack().version


def test_wait_ack_and_send_ack_without_a_pending_update_raise_state_error(ends: Ends) -> None:
    with pytest.raises(StateError):
        ends.trainer.wait_ack()
    with pytest.raises(StateError):
        ends.worker.send_ack()


def test_receive_weights_returns_none_at_its_timeout(ends: Ends) -> None:
    assert ends.worker.receive_weights(timeout=0.01) is None


@pytest.mark.parametrize("ends", ["pipe", pytest.param("store", marks=pytest.mark.gloo)], indirect=True)
def test_fault_13_a_second_send_while_one_is_outstanding_is_a_runtime_error(ends: Ends) -> None:
    """Not over queues, where the second send supersedes the first."""
    ends.sent()
    for send in (ends.trainer.send_weights, ends.trainer.send_weights_async):
        with pytest.raises(
            StateError, match=rf"^{send.__name__}\(\): version 1 of 'policy' is outstanding. wait_ack\(\)"
        ):
            send("policy", weights(2.0))
    ends.worker.send_ack()

    assert 1 == ends.trainer.wait_ack().version


def test_check_ack_accepts_the_expected_ack_text(ends: Ends) -> None:
    for text in ("updated", "registered"):
        ends.sent()
        ends.worker.send_ack(text)

        assert 0 in ends.trainer.check_ack(text)


@pytest.mark.parametrize(("said", "expected"), [("other", "updated"), ("updated", "other"), ("one", "other")])
def test_check_ack_raises_runtime_error_for_another_ack_text(ends: Ends, said: str, expected: str) -> None:
    ends.sent()
    ends.worker.send_ack(said)

    with pytest.raises(RuntimeError, match=said):
        ends.trainer.check_ack(expected)


def test_an_ack_text_other_than_updated_is_a_refusal(ends: Ends) -> None:
    ends.sent()
    ends.worker.send_ack("no room")

    with pytest.raises(RefusedError, match="no room"):
        ends.trainer.wait_ack()


# ------------------------------------------------------------------------------------------ transports without a peer

#: Functions that make transports without a peer, and what their errors say is missing.
ALONE = {
    "pipe": (MPTransport, "no pipe"),
    "pipe, with a timeout": (lambda: MPTransport(None, timeout=1.0), "no pipe"),
    "pipe, by its scheme": (lambda: MultiProcessWeightSyncScheme().create_transport(), "no pipe"),
    "rpc": (RPCTransport, "no collector"),
    "rpc, without a collector": (lambda: RPCTransport(None, None, None), "no collector"),
    "rpc, a worker's": (lambda: RPCTransport(worker_rank=1), "no collector"),
    "rpc, by its scheme": (
        lambda: RPCWeightSyncScheme().create_transport(collector_info=None, collector_rref=None, collector_class=None),
        "no collector",
    ),
    "store": (DistributedTransport, "no store or no rank"),
    "store, without a rank": (lambda: DistributedTransport(object()), "no store or no rank"),
    "store, without a store": (lambda: DistributedTransport(None, 1), "no store or no rank"),
    "store, of generation B": (lambda: DistributedTransport(weights_buffer=TensorDict(weights(0.0))), "no store or no"),
    "store, by its scheme": (
        lambda: DistributedWeightSyncScheme("gloo", sync=True).create_transport(store=None, rank=1),
        "no store or no rank",
    ),
    "ray": (RayTransport, "no actor"),
    "ray, an actor's": (RayActorTransport, "no actor"),
}


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.ray if "ray" in name else ()) for name in ALONE])
def alone(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A transport without a peer, and what its error says is missing."""
    make, lacks = ALONE[request.param]
    transport = make()
    yield transport, lacks
    transport.close()


def test_fault_05_sends_of_a_transport_without_a_peer_raise(alone: tuple[Any, str]) -> None:
    """TorchRL's transport returned None."""
    transport, lacks = alone
    # Without an actor, the Ray facade only checks whether Ray is initialised, which another test may have done.
    in_a_cluster = type(transport) is RayTransport and require_ray("RayTransport").is_initialized()
    assert transport.check_connection() is in_a_cluster
    for send in (transport.send_weights, transport.send_weights_async):
        with pytest.raises(ConfigurationError, match=lacks):
            send("policy", weights(1.0))
    with pytest.raises(StateError):
        transport.wait_ack()


def test_an_rpc_transport_without_calls_receives_nothing() -> None:
    for transport in (RPCTransport(), RPCTransport(worker_rank=1)):
        with transport:
            assert transport.receive_weights(timeout=0.01) is None


@pytest.mark.parametrize("given", [{}, {"weights_buffer": TensorDict(weights(0.0))}], ids=["A", "B"])
def test_the_setup_methods_of_a_distributed_transport_do_nothing(given: Any) -> None:
    transport = DistributedTransport(**given)

    assert transport.setup_connection_and_weights_on_sender() is None
    assert transport.setup_connection_and_weights_on_receiver(worker_idx=0) is None


def test_copies_of_an_rpc_transport_keep_the_collectors_address() -> None:
    with RPCTransport("w0", collector_class=Ends) as transport:
        for made in (copy.deepcopy(transport), pickle.loads(pickle.dumps(transport))):
            assert made.collector == transport.collector
            with pytest.raises(StateError):
                made.wait_ack()


# ------------------------------------------------------------------------------------- another actor, meanwhile


class SilentActors:
    """In place of the links to Ray actors: no actor answers."""

    def __init__(self) -> None:
        self.linked: list[Any] = []
        self.when_one_closes: Callable[[], Any] | None = None

    def create(self, actor: Any, methods: Any, model_id: str, peer: str) -> CallLink:
        self.linked.append(actor)
        return CallLink(self, peer)

    def start(self, message: Any, payload: Any) -> Answers:
        return Future()

    def close(self) -> None:
        call, self.when_one_closes = self.when_one_closes, None
        if call is not None:
            call()


@pytest.fixture
def to_actor() -> Iterator[tuple[RayActorTransport, SilentActors]]:
    with RayActorTransport("first") as transport:
        actors = transport._links = SilentActors()
        transport.send_weights_async(weights(1.0))
        yield transport, actors


def test_a_send_while_set_actor_closes_the_former_links_goes_to_the_new_actor(to_actor: Any) -> None:
    transport, actors = to_actor
    actors.when_one_closes = lambda: transport.send_weights_async(weights(2.0))

    transport.set_actor("second")

    assert actors.linked == ["first", "second"]
    with pytest.raises(AckTimeoutError):
        transport.wait_ack(timeout=0.0)


def test_a_wait_that_set_actor_ends_leaves_the_update_sent_since_outstanding(
    to_actor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, _ = to_actor

    def end_late(**_: Any) -> None:
        """The wait in another thread ends, after this thread has sent to the new actor."""
        transport.set_actor("second")
        transport.send_weights_async(weights(2.0))
        raise WeightSyncError("abandoned")

    monkeypatch.setattr(transport._senders["policy"], "wait_async", end_late)
    with pytest.raises(WeightSyncError, match="abandoned"):
        transport.wait_ack()

    with pytest.raises(AckTimeoutError):
        transport.wait_ack(timeout=0.0)
