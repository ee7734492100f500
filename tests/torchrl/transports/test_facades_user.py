"""A user's own transports under `WeightSender.send`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
import torch
from fleet import PATIENCE

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    Evidence,
    InitialSyncTransport,
    MPTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    OutcomeKind,
    RefusedError,
    SharedMemTransport,
    StateError,
    TransportBackend,
    WeightSyncScheme,
    WorkerLostError,
)
from weightsync.testing import FakeClock


class Postbox:
    """A user's transport, with only the three methods of generation A."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.threads: set[str] = set()

    def send_weights(self, model_id: str, weights: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.sent.append((model_id, weights))

    def receive_weights(self, timeout: float = 1.0) -> Any:
        return self.sent.pop(0) if self.sent else None

    def check_connection(self) -> bool:
        return True


class PostboxB(Postbox):
    """A user's transport with generation B's signatures."""

    def send_weights(self, weights: Any) -> None:
        super().send_weights("?", weights)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any:
        return super().receive_weights()


class PostboxC(Postbox):
    """A user's transport with the signature of TorchRL's own queue transport."""

    def send_weights(self, weights: Any, model_id: str = "policy") -> None:
        super().send_weights(model_id, weights)


class Scheme(WeightSyncScheme):
    """A user's scheme, which overrides the documented method."""

    def create_transport(self, pipe_or_context: Any) -> Any:
        return pipe_or_context


class Piped(MultiProcessWeightSyncScheme):
    def create_transport(self, pipe_or_context: Any = None, **_: Any) -> Any:
        return pipe_or_context


def model(fill: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2,), fill)}


def test_transport_backend_names_the_three_methods() -> None:
    assert isinstance(Postbox(), TransportBackend)
    for ours in (MPTransport(), SharedMemTransport(), NoWeightSyncScheme().create_transport(None)):
        assert isinstance(ours, TransportBackend)
    assert not isinstance(object(), TransportBackend)
    assert isinstance(MPTransport(), InitialSyncTransport)
    assert isinstance(NoWeightSyncScheme().create_transport(None), InitialSyncTransport)
    assert not isinstance(Postbox(), InitialSyncTransport)


@pytest.mark.parametrize("scheme_class", [Scheme, Piped, MultiProcessWeightSyncScheme])
@pytest.mark.parametrize(("postbox", "sent_to"), [(Postbox, "value"), (PostboxB, "?"), (PostboxC, "value")])
def test_a_users_transport_works_under_send(scheme_class: Any, postbox: Any, sent_to: str) -> None:
    transports = [postbox(), postbox()]
    with scheme_class().create_sender() as sender:
        sender.set_context(None, "value")
        for index, transport in enumerate(transports):
            sender.register_worker(index, transport)
        for fill in (1.0, 2.0):
            report = sender.send(model(fill))

            assert {0, 1} == set(report)
            assert all((OutcomeKind.APPLIED, Evidence.CALL) == (o.kind, o.evidence) for o in report.outcomes.values())
        for transport in transports:
            assert [(sent_to, 1.0), (sent_to, 2.0)] == [
                (name, sent["weight"][0].item()) for name, sent in transport.sent
            ]
            assert len(transport.threads) == 1
            assert threading.main_thread().name not in transport.threads


def test_a_users_transport_may_declare_that_returning_means_applied() -> None:
    class Sure(Postbox):
        evidence = Evidence.ANSWER

    class Unsure(Postbox):
        evidence = "certainly"

    with Scheme().create_sender() as sender:
        sender.register_worker(0, Sure())
        assert Evidence.ANSWER is sender.send(model())[0].evidence
        with pytest.raises(ConfigurationError, match="Evidence"):
            sender.register_worker(1, Unsure())


def test_fault_14_send_async_over_a_blocking_transport_raises_and_changes_nothing() -> None:
    transport = Postbox()
    with Scheme().create_sender() as sender:
        sender.register_worker(0, transport)
        with pytest.raises(StateError, match="whose calls block"):
            sender.send_async(model())

        assert [] == transport.sent
        assert 1 == sender.send(model()).version


def test_an_error_of_a_users_transport_is_reported_with_traceback_and_others_are_served() -> None:
    class Broken(Postbox):
        def send_weights(self, model_id: str, weights: Any) -> None:
            raise ConnectionResetError("cut in two")

    fine = Postbox()
    with Scheme().create_sender() as sender:
        sender.register_worker(0, Broken())
        sender.register_worker(1, fine)
        with pytest.raises(RefusedError, match="cut in two") as caught:
            sender.send(model(2.0))

        outcome = caught.value.report[0]
        assert "in send_weights" in outcome.remote_traceback
        assert Evidence.CALL is outcome.evidence
        assert 1 == len(fine.sent)


def test_a_users_transport_that_is_not_connected_is_a_lost_worker() -> None:
    class Off(Postbox):
        def check_connection(self) -> bool:
            return False

    with Scheme().create_sender() as sender:
        sender.register_worker(0, Off())
        with pytest.raises(WorkerLostError, match="not connected"):
            sender.send(model())


class AsyncPostbox(Postbox):
    async def send_weights(self, model_id: str, weights: Any) -> None:
        self.sent.append((model_id, weights))


class AsyncCheck(Postbox):
    async def check_connection(self) -> bool:
        return False


@pytest.mark.parametrize(("transport", "name"), [(AsyncPostbox(), "send_weights"), (AsyncCheck(), "check_connection")])
def test_a_users_transport_that_is_asynchronous_is_refused(transport: Postbox, name: str) -> None:
    match = rf"{name}\(\) of {type(transport).__name__} is async"
    with Scheme().create_sender() as sender, pytest.raises(ConfigurationError, match=match):
        sender.register_worker(0, transport)


def test_a_send_weights_that_returns_an_awaitable_is_refused() -> None:
    class Later(Postbox):
        def send_weights(self, model_id: str, weights: Any) -> Any:
            return AsyncPostbox().send_weights(model_id, weights)

    with Scheme().create_sender() as sender:
        sender.register_worker(0, Later())
        with pytest.raises(RefusedError, match="returned an awaitable"):
            sender.send(model())


def test_a_stuck_transport_call_times_out_without_delaying_close_or_other_workers() -> None:
    release, fine = threading.Event(), Postbox()

    class Stuck(Postbox):
        def send_weights(self, model_id: str, weights: Any) -> None:
            release.wait(PATIENCE)

    sender = Scheme().create_sender()
    sender.register_worker(0, Stuck())
    sender.register_worker(1, fine)

    def pass_the_deadline() -> None:
        """Advance the clock past the deadline once the other worker has answered."""
        for _ in range(int(PATIENCE / 0.001)):
            if sender.workers[1].served:
                break
            time.sleep(0.001)
        clock.advance(60)

    passing = threading.Thread(target=pass_the_deadline)
    with FakeClock() as clock:
        passing.start()
        with pytest.raises(AckTimeoutError) as caught:
            sender.send(model(), timeout=60)
    passing.join()
    sender.close()
    release.set()

    assert (0,) == caught.value.pending
    assert 1 == len(fine.sent)


def test_a_process_can_exit_while_a_call_of_its_transport_is_stuck() -> None:
    program = """
        import threading, torch, weightsync
        class Stuck:
            def send_weights(self, model_id, weights): threading.Event().wait()
            def receive_weights(self, timeout=1.0): return None
            def check_connection(self): return True
        sender = weightsync.MultiProcessWeightSyncScheme().create_sender()
        sender.register_worker(0, Stuck())
        report = sender.send({"w": torch.ones(1)}, timeout=0.1, on_failure="report")
        print(report[0].kind.name)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=PATIENCE, check=True
    )

    assert "TIMED_OUT\n" == done.stdout
