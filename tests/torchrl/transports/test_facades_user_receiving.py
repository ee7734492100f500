"""A user's own scheme as in TorchRL's documentation, and a user's own transports under `WeightReceiver`."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from typing import Any

import pytest
import torch
from clocks import advancing_clock
from fleet import PATIENCE, constants, small

from weightsync import (
    ConfigurationError,
    DistributedWeightSyncScheme,
    Evidence,
    MPTransport,
    MultiProcessWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
    TransportError,
    WeightSender,
    WeightSyncScheme,
)
from weightsync.engine.sender_driver import SenderDriver


class InProcessTransport:
    """A user's transport inside one process, with only the methods of TorchRL's protocol."""

    def __init__(self) -> None:
        self.sent: queue.Queue[Any] = queue.Queue()

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.sent.put((model_id, weights))

    def receive_weights(self, timeout: float | None = 1.0) -> Any:
        try:
            return self.sent.get(timeout=timeout)
        except queue.Empty:
            return None

    def check_connection(self) -> bool:
        return True


class Acking(InProcessTransport):
    """A user's transport whose send returns only after the worker's ack."""

    evidence = Evidence.ANSWER

    def __init__(self) -> None:
        super().__init__()
        self.acks: queue.Queue[str] = queue.Queue()

    def send_weights(self, model_id: str, weights: Any) -> None:
        super().send_weights(model_id, weights)
        answer = self.acks.get(timeout=PATIENCE)
        if answer != "updated":
            raise RuntimeError(answer)

    def send_ack(self, message: str = "updated") -> None:
        self.acks.put(message)


class InProcessTransportB(InProcessTransport):
    """A user's transport with generation B's signatures."""

    def send_weights(self, weights: Any) -> None:  # type: ignore[override]
        self.sent.put(weights)

    def receive_weights(self, timeout: float | None = None, *, weights: Any = None, **_: Any) -> Any:
        return super().receive_weights(timeout)


class Untimed(InProcessTransport):
    """A user's transport whose `receive_weights` has no timeout and does not wait."""

    def receive_weights(self) -> Any:  # type: ignore[override]
        return super().receive_weights(0.001)


class Own(WeightSyncScheme):
    """A user's scheme as in TorchRL's documentation, with only `create_transport`."""

    def create_transport(self, pipe_or_context: Any) -> Any:
        return MPTransport(pipe_or_context)


class OwnShared(WeightSyncScheme):
    def create_transport(self, pipe_or_context: Any) -> Any:
        transport = SharedMemTransport()
        transport.register_pipe(pipe_or_context)
        return transport


class Given(WeightSyncScheme):
    """A user's scheme whose context has the transport."""

    def create_transport(self, pipe_or_context: Any) -> Any:
        return pipe_or_context["transport"]


# -------------------------------------------------------------------------------------- a user's own scheme


@pytest.mark.parametrize("scheme_class", [Own, OwnShared])
def test_a_users_scheme_works_over_torchrls_transports(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    model = small()
    with scheme_class().create_sender() as sender, scheme_class().create_receiver() as receiver:
        sender._register_worker(0, ours)
        receiver._register_model(model)
        receiver._register_worker_transport(theirs)
        sender.send_async(small(2.0))
        assert receiver.receive(timeout=PATIENCE)

        assert sender.wait_async()[0].evidence is Evidence.ANSWER
        assert constants(model) == {2.0}
        assert isinstance(receiver._transport, MPTransport)
        sender.pipe(0).send("a word of my own")
        assert receiver.pipe.recv() == "a word of my own"


def test_a_worker_loop_works_over_a_users_scheme() -> None:
    ours, theirs = multiprocessing.Pipe()
    model = small()
    with Own().create_sender() as sender, Own().create_receiver() as receiver:
        sender._register_worker(0, ours)
        receiver._register_model(model)
        receiver._register_worker_transport(theirs)
        sender.send_async(small(2.0))
        (_, weights), message = receiver._transport.pipe.recv()
        receiver.apply_weights(weights)

        assert (message, sender.wait_async().ok) == ("update_weights", True)
        assert constants(model) == {2.0}


def test_a_transport_without_workers_cannot_be_registered_as_a_worker() -> None:
    class Nobody(WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any:
            return SharedMemTransport()

    with Nobody().create_sender() as sender, pytest.raises(ConfigurationError, match="reaches 0 workers"):
        sender.register_worker(0, "somebody")


# ----------------------------------------------------------------------------------- a user's own transport


def joined(scheme: Any, transport: Any, model: Any) -> tuple[Any, Any]:
    """A sender and a receiver over one transport."""
    endpoint = {"transport": transport} if isinstance(scheme, Given) else transport
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    sender._register_worker(0, endpoint)
    receiver._register_model(model)
    receiver._register_worker_transport(endpoint)
    return sender, receiver


SCHEMES = [
    *(Given, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme),
    *(DistributedWeightSyncScheme, RPCWeightSyncScheme),
]


@pytest.mark.parametrize("scheme_class", SCHEMES)
@pytest.mark.parametrize("way", [InProcessTransport, InProcessTransportB, Untimed])
def test_a_receiver_receives_through_a_users_transport(scheme_class: Any, way: Any) -> None:
    transport, model = way(), small()
    sender, receiver = joined(scheme_class(), transport, model)
    with sender, receiver:
        assert receiver.receive(timeout=0) is False
        for version, fill in enumerate((1.0, 2.0), start=1):
            assert sender.send(small(fill))[0].evidence is Evidence.CALL
            assert receiver.receive(timeout=PATIENCE)
            assert (receiver.version, constants(model)) == (version, {fill})
        assert receiver._transport is transport


def serving(receiver: Any, times: int) -> threading.Thread:
    """Start a worker's loop, which receives this many times, in a thread."""

    def loop() -> None:
        for _ in range(times):
            receiver.receive(timeout=PATIENCE)

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def test_a_users_transport_acks_after_the_swap_and_reports_refusals() -> None:
    model = small()
    sender, receiver = joined(Given(), Acking(), model)
    with sender, receiver:
        worker = serving(receiver, 2)
        assert sender.send(small(3.0))[0].evidence is Evidence.ANSWER
        assert constants(model) == {3.0}
        with pytest.raises(RuntimeError, match="not applied"):
            sender.send({"other": torch.ones(2)})
        worker.join(PATIENCE)

        assert constants(model) == {3.0}
        assert receiver.version == 1


def test_applied_weights_are_acked_although_the_receiver_closes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed, wait, close = threading.Event(), SenderDriver.wait, WeightSender.close

    def late(driver: SenderDriver, timeout: float | None, *given: Any) -> Any:
        """Make the thread that waits for the receiver's answer look for it only after the receiver is closed."""
        if timeout != 0.0 and threading.current_thread().name.startswith("weightsync transport of"):
            closed.wait(PATIENCE)
        return wait(driver, timeout, *given)

    def closing(sender: WeightSender) -> None:
        close(sender)
        closed.set()

    monkeypatch.setattr(SenderDriver, "wait", late)
    monkeypatch.setattr(WeightSender, "close", closing)
    transport, receiver = Acking(), Given().create_receiver()
    receiver.register_model(small())
    receiver.register_worker_transport({"transport": transport})
    transport.sent.put(("policy", small(3.0).state_dict()))
    with receiver:
        assert receiver.receive(timeout=PATIENCE)

    assert transport.acks.get(timeout=PATIENCE) == "updated"


def test_weights_of_another_model_are_not_applied_and_the_sender_is_told() -> None:
    transport, model = Acking(), small()
    sender, receiver = joined(Given(), transport, model)
    with sender, receiver:
        with pytest.raises(RuntimeError, match="weights of model 'critic'"):
            transport.send_weights("critic", small(3.0))

        assert constants(model) == {0.0}


@pytest.mark.parametrize("error", [ConnectionResetError("cut in two"), SystemExit("cut in two")])
def test_an_error_of_a_users_transport_is_raised_by_receive_as_transport_error(error: BaseException) -> None:
    class Broken(InProcessTransport):
        def receive_weights(self, timeout: float | None = 1.0) -> Any:
            raise error

    receiver = Given().create_receiver()
    receiver.register_model(small())
    receiver.register_worker_transport({"transport": Broken()})
    with receiver, pytest.raises(TransportError, match=f"{type(error).__name__}: cut in two"):
        receiver.receive(timeout=PATIENCE)


def test_a_users_transport_that_is_asynchronous_is_refused() -> None:
    class Later(InProcessTransport):
        async def receive_weights(self, timeout: float | None = 1.0) -> Any:
            """Never awaited."""

    receiver = Given().create_receiver()
    receiver.register_model(small())
    with receiver, pytest.raises(ConfigurationError, match=r"receive_weights\(\) of Later is async"):
        receiver.register_worker_transport({"transport": Later()})


def test_a_stuck_receive_weights_call_delays_neither_receive_nor_close() -> None:
    release, asked = threading.Event(), threading.Event()

    class Stuck(InProcessTransport):
        def receive_weights(self, timeout: float | None = 1.0) -> Any:
            asked.set()
            release.wait(PATIENCE)

    receiver = Given().create_receiver()
    receiver.register_model(small())
    receiver.register_worker_transport({"transport": Stuck()})
    with advancing_clock(1.0):
        assert asked.wait(PATIENCE)
        assert receiver.receive(timeout=0.5) is False
        receiver.close()
    release.set()


def test_generation_b_receives_through_a_users_transport_in_the_background() -> None:
    class GivenByContext(Given):
        def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
            super().init_on_receiver(model_id=model_id, context=context, **kwargs)

        def _endpoint(self, keywords: Any, context: Any, model_id: str) -> Any:
            return {"transport": context}

    transport, model = Acking(), small()
    with GivenByContext() as scheme:
        scheme.init_on_receiver(model_id="policy", context=transport, model=model)
        sending = threading.Thread(target=transport.send_weights, args=("policy", small(4.0)))
        sending.start()
        scheme.connect(timeout=PATIENCE)
        sending.join(PATIENCE)

        assert constants(model) == {4.0}
