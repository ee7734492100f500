"""One check for each of the guarantees G1 to G12: a scenario that the shipped code passes and broken code fails.

Each check drives real senders and receivers over in-process links, and decides when each message arrives.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import pytest
import torch
from local_links import LocalLink, Network, Pace, local_pair

from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import StateError, SyncError, WeightSyncError
from weightsync.protocol._tables import State
from weightsync.protocol.report import OutcomeKind
from weightsync.schemes.base import WeightSyncScheme
from weightsync.transports.base import Payloads
from weightsync.weights.target import Mode


class Inner(torch.nn.Module):
    """A module with extra state, which may refuse a change of it."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.refuses = refuses
        self.extra = 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise RuntimeError("no")
        self.extra = state


class Policy(torch.nn.Module):
    """A model of which each version sets all parts to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16))
        self.first = Inner()
        self.second = Inner()

    @property
    def held(self) -> set[int]:
        """The numbers that its parts hold."""
        return {self.first.extra, self.second.extra, *map(int, self.weight.tolist())}


def weights(number: int) -> dict[str, Any]:
    """Weights in which every part has the given number."""
    return {
        "weight": torch.full((16,), float(number)),
        "first._extra_state": number,
        "second._extra_state": number,
    }


class LocalScheme(WeightSyncScheme):
    """A scheme whose endpoints already are links."""

    def create_transport(self, pipe_or_context: Any) -> LocalLink:
        return pipe_or_context

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> LocalLink:
        return endpoint


class Worker:
    """A receiver and its model."""

    def __init__(self, mode: Mode = Mode.COPY) -> None:
        scheme = LocalScheme()
        scheme.apply_mode = mode
        self.policy = Policy()
        self.receiver = WeightReceiver(scheme)
        self.receiver.register_model(self.policy)

    def receive_and_apply(self) -> None:
        """Apply what has arrived; errors are ignored."""
        with contextlib.suppress(WeightSyncError):
            self.receiver.receive(timeout=0)


def linked(sender: WeightSender, id: int, worker: Worker, payloads: Payloads = Payloads.INLINE) -> Network:
    """Add a worker to a sender over a link, whose network delivers messages only on request."""
    near, far = local_pair(pace=Pace.HELD, payloads=payloads)
    sender.add_worker(id, near)
    worker.receiver.register_worker_transport(far)
    return near.network


def connected(*workers: Worker, fence: int = 0, payloads: Payloads = Payloads.INLINE) -> Any:
    """A connected sender with these workers, and the network of each link."""
    sender = WeightSender(LocalScheme())
    networks = [linked(sender, id, worker, payloads) for id, worker in enumerate(workers)]
    sender.connect(fence=fence)
    return sender, *networks


def check_g1() -> None:
    """An ack of version 1 that arrives while version 2 is outstanding does not count for version 2."""
    worker = Worker()
    sender, network = connected(worker)
    sender.send_async(weights(1))
    network.deliver_all()
    worker.receive_and_apply()
    sender.abandon()
    sender.send_async(weights(2))
    for parcel in network.in_flight[:2]:  # the worker's Hello and its ack; the update stays in flight
        network.deliver(parcel)

    report = sender.poll()

    assert report is not None
    assert report.version == 2
    assert report[0].kind is OutcomeKind.PENDING
    assert worker.receiver.version == 1


def check_g2() -> None:
    """A version whose swap fails is not reported as applied."""
    worker = Worker()
    sender, network = connected(worker)
    worker.policy.second.refuses = True
    sender.send_async(weights(1))
    network.deliver_all()
    worker.receive_and_apply()
    network.deliver_all()

    report = sender.poll()

    assert report is not None
    applied = report[0].kind is OutcomeKind.APPLIED
    assert applied == (worker.policy.held == {1})
    assert report[0].kind is OutcomeKind.REFUSED


def check_g3() -> None:
    """The slot that a worker maps is not written until the worker has acked a newer version, however many are sent."""
    worker = Worker(Mode.MAP)
    sender, network = connected(worker, payloads=Payloads.SHARED)
    sender.send_async(weights(1))
    network.deliver_all()
    worker.receive_and_apply()
    assert worker.policy.held == {1}
    network.deliver_all()

    for number in range(2, 6):
        sender.send_async(weights(number), on_pending="supersede")
        assert worker.policy.held == {1}


def check_g4() -> None:
    """A newer sender's first version replaces any version of an older one, which cannot replace it in turn."""
    worker = Worker()
    old, network = connected(worker)
    for number in (1, 2, 3):
        old.send_async(weights(number), on_pending="supersede")
        network.deliver_all()
        worker.receive_and_apply()
        network.deliver_all()
    new, network = connected(worker, fence=old.incarnation)
    new.send_async(weights(10))
    network.deliver_all()
    worker.receive_and_apply()
    assert (worker.receiver.incarnation, worker.receiver.version) == (new.incarnation, 1)
    assert worker.policy.held == {10}

    network = linked(old, 0, worker)
    old.send_async(weights(4), on_pending="supersede")
    network.deliver_all()
    worker.receive_and_apply()

    assert (worker.receiver.incarnation, worker.receiver.version) == (new.incarnation, 1)
    assert worker.policy.held == {10}


def check_g5() -> None:
    """A second send is refused while one is outstanding, and changes nothing."""
    worker = Worker()
    sender, network = connected(worker)
    sender.send_async(weights(1))

    for send in (sender.send, sender.send_async):
        refused = False
        try:
            send(weights(2), timeout=0)
        except StateError:
            refused = True
        assert refused

    assert sender.version == 1
    network.deliver_all()
    worker.receive_and_apply()
    assert worker.policy.held == {1}


def check_g6() -> None:
    """A refused update leaves the previous version unchanged."""
    worker = Worker()
    sender, network = connected(worker)
    sender.send_async(weights(1))
    network.deliver_all()
    worker.receive_and_apply()
    network.deliver_all()
    assert worker.policy.held == {1}
    worker.policy.second.refuses = True
    sender.send_async(weights(2), on_pending="supersede")
    network.deliver_all()
    worker.receive_and_apply()

    assert worker.policy.held == {1}
    assert worker.receiver.version == 1


def check_g7() -> None:
    """A worker that is not a target does not change."""
    target, other = Worker(), Worker()
    sender, to_target, to_other = connected(target, other)
    sender.send_async(weights(1), [0])
    for network, worker in ((to_target, target), (to_other, other)):
        network.deliver_all()
        worker.receive_and_apply()

    assert target.policy.held == {1}
    assert other.policy.held == {0}
    assert other.receiver.version is None


def check_g8() -> None:
    """A copied sender is uninitialized, and its original is unaffected."""
    worker = Worker()
    sender, network = connected(worker)
    sender.send_async(weights(1))
    before = sender.state, sender.version, sender.workers

    copied = pickle.loads(pickle.dumps(sender))

    assert copied.state is State.UNINITIALIZED
    assert (copied.version, copied.incarnation, dict(copied.workers)) == (0, 0, {})
    assert copied.poll() is None
    assert (sender.state, sender.version, sender.workers) == before
    network.deliver_all()
    worker.receive_and_apply()
    network.deliver_all()
    assert sender.wait_async(timeout=0).ok


def check_g9() -> None:
    """A closed receiver applies nothing, not even an update that had already arrived; a closed sender sends nothing."""
    worker = Worker()
    sender, network = connected(worker)
    sender.send_async(weights(1))
    network.deliver_all()
    with worker.receiver.serving():
        assert not worker.receiver.receive(timeout=0)
    assert worker.receiver.state is State.PENDING_ASYNC
    worker.receiver.close()

    worker.receive_and_apply()
    with contextlib.suppress(WeightSyncError):
        worker.receiver.apply_weights(weights(2))

    assert worker.policy.held == {0}
    assert worker.receiver.state is State.CLOSED
    sender.close()
    with pytest.raises(StateError):
        sender.send(weights(3))
    assert sender.state is State.CLOSED


def check_g10() -> None:
    """A wait ends at its deadline, and an answer stops being owed when its worker is lost."""
    worker, silent = Worker(), Worker()
    sender, network, _ = connected(worker, silent)
    sender.send_async(weights(1))
    network.cut()

    report = sender.poll()

    assert report is not None
    assert report[0].kind is OutcomeKind.LOST
    final = sender.wait_async(timeout=0, on_failure="report")
    assert (final[0].kind, final[1].kind) == (OutcomeKind.LOST, OutcomeKind.TIMED_OUT)
    assert sender.state is State.PENDING_ASYNC


def check_g11() -> None:
    """A wait returns only if every target applied; if a worker refuses, it raises and names that worker."""
    worker, other = Worker(), Worker()
    sender, *networks = connected(worker, other)
    worker.policy.second.refuses = True
    sender.send_async(weights(1))
    for network, each in zip(networks, (worker, other), strict=True):
        network.deliver_all()
        each.receive_and_apply()
        network.deliver_all()

    raised: SyncError | None = None
    try:
        sender.wait_async(timeout=0)
    except SyncError as error:
        raised = error

    assert raised is not None
    assert raised.report.failed == (0,)
    assert raised.report[1].kind is OutcomeKind.APPLIED


def check_g12() -> None:
    """A late joiner serves nothing until it has caught up; then it serves the latest version that was sent to all."""
    early, late = Worker(), Worker()
    sender, network = connected(early)
    for number in (1, 2):
        sender.send_async(weights(number), on_pending="supersede")
        network.deliver_all()
        early.receive_and_apply()
        network.deliver_all()

    network = linked(sender, 1, late)
    assert late.receiver.version is None
    network.deliver_all()
    late.receive_and_apply()

    assert late.receiver.version == 2
    assert late.policy.held == {2}
