"""Relays: a worker with workers of its own acks a version once these are updated, and reports their outcomes."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest
import torch
from duo import Duo, beside, reader
from fleet import PATIENCE
from tensordict import TensorDictBase
from torch import nn

from weightsync import (
    ModelPathError,
    OutcomeKind,
    SharedMemWeightSyncScheme,
    State,
    SyncError,
    SyncReport,
    WeightSyncError,
)
from weightsync.clock import Deadline
from weightsync.engine.background import Background
from weightsync.protocol.report import Outcome
from weightsync.weights.target import Target


class Manager:
    """The context of a worker with workers of its own, which records the versions passed on to these."""

    def __init__(self, duo: Duo) -> None:
        self.duo = duo
        self.asked: list[tuple[str, set[float]]] = []
        self.versions: list[int | None] = []
        self.result: Any = None

    def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> Any:
        self.asked.append((model_id, set(policy_or_weights["mark"].tolist())))
        self.versions.append(self.duo.receiving.get_receiver().version)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def manager(scheme_class: Any) -> Any:
    duo = Duo(scheme_class, strategy="tensordict")
    made = Manager(duo)
    duo.connect(context=made)
    yield made
    duo.end()


def nested(kind: OutcomeKind) -> SyncReport:
    return SyncReport(model_id="policy", version=3, incarnation=1, outcomes={0: Outcome(kind=kind, reason="so it is")})


def test_a_relay_passes_on_the_first_version(manager: Manager) -> None:
    assert manager.asked == [("policy", {1.0})]


def test_g2_a_relay_does_not_pass_on_other_weights_registered_before_it_relayed_a_version(
    manager: Manager,
) -> None:
    manager.result = nested(OutcomeKind.APPLIED)
    duo, receiver = manager.duo, manager.duo.receiving.get_receiver()
    busy = contextlib.ExitStack()
    busy.enter_context(receiver.serving())
    with beside(lambda: duo.send(2.0, timeout=PATIENCE, on_failure="report")) as sent:
        while receiver._served.staged is None:
            assert not sent
        receiver.driver.lock.acquire()  # the reader cannot yet pass on the version that the next forward swaps in
        busy.close()
        assert duo.model() == {2.0}
        receiver.register_model(reader(7.0))
        receiver.driver.lock.release()

    assert sent[0][0].kind is OutcomeKind.APPLIED
    assert sent[0][0].nested[0].kind is OutcomeKind.ABANDONED
    assert "other weights" in sent[0][0].nested[0].reason
    assert manager.asked == [("policy", {1.0})]


class Unconnected:
    """The scheme for a collector's own workers, not yet connected."""

    def __init__(self) -> None:
        self.reads = 0
        self.connected = False

    @property
    def synchronized_on_sender(self) -> bool:
        self.reads += 1
        return self.connected


@pytest.mark.parametrize("what", ["it has connected", "it was shut down"])
def test_relaying_the_first_version_waits_for_the_collectors_own_schemes(what: str, scheme_class: Any) -> None:
    """TorchRL's collectors connect the schemes by which they receive before the schemes for their own workers."""
    duo = Duo(scheme_class, strategy="tensordict")
    made: Any = Manager(duo)
    made.num_workers, own = 1, Unconnected()
    made._weight_sync_schemes = {"policy": own}
    duo.arrive(context=made)
    with beside(lambda: duo.sending.connect(timeout=PATIENCE)):
        duo.receiving.connect(worker_idx=0, timeout=PATIENCE)
        while not own.reads:
            assert made.asked == []
        assert made.asked == []
        if what == "it has connected":
            own.connected = True
        else:
            made._shutdown_complete = True

    assert made.asked == [("policy", {1.0})]
    duo.end()


def test_a_context_set_before_init_is_called_with_each_version(scheme_class: Any) -> None:
    """TorchRL's InferenceServer sets the context in this way, and counts versions by these calls."""
    duo = Duo(scheme_class, strategy="tensordict")
    duo.receiving.context = made = Manager(duo)
    duo.connect()
    duo.send(2.0)

    assert duo.receiving.context is made
    assert made.asked == [("policy", {1.0}), ("policy", {2.0})]
    duo.end()


def test_a_version_is_live_before_it_is_relayed_and_the_relays_report_is_nested(manager: Manager) -> None:
    manager.result = nested(OutcomeKind.APPLIED)

    report = manager.duo.send(2.0)

    assert manager.asked[-1] == ("policy", {2.0})
    assert manager.versions[-1] == 2
    assert report.ok
    assert report[0].nested == manager.result


def test_the_ack_waits_until_the_version_is_relayed(manager: Manager) -> None:
    go_on = threading.Event()
    manager.result = None
    shipped = Manager.update_policy_weights_

    def slowly(**given: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return shipped(manager, **given)

    manager.update_policy_weights_ = slowly  # type: ignore[method-assign]
    with beside(lambda: manager.duo.send(2.0, timeout=PATIENCE)) as sent:
        while manager.duo.receiving.get_receiver().version != 2:
            assert not sent
        assert manager.duo.model() == {2.0}
        assert manager.duo.receiving.get_receiver().state is State.AWAITING_ACK
        assert not sent
        go_on.set()

    assert sent[0].ok


def test_a_send_raises_unless_all_workers_of_a_relay_applied_the_version(manager: Manager) -> None:
    manager.result = nested(OutcomeKind.TIMED_OUT)

    with pytest.raises(SyncError, match="it forwards to") as raised:
        manager.duo.send(2.0)

    assert raised.value.report[0].kind is OutcomeKind.APPLIED
    assert raised.value.report[0].nested[0].kind is OutcomeKind.TIMED_OUT
    assert manager.duo.model() == {2.0}


def test_g11_an_async_relay_method_that_is_never_awaited_is_not_a_success(manager: Manager) -> None:
    async def never() -> None:
        raise AssertionError

    manager.result = never()

    with pytest.raises(SyncError, match="the method is async, and nothing here awaits it"):
        manager.duo.send(2.0)


def test_a_report_raised_by_a_relay_is_nested_in_the_senders_report(manager: Manager) -> None:
    manager.result = nested(OutcomeKind.LOST).error()

    report = manager.duo.send(2.0, on_failure="report")

    assert report[0].nested == nested(OutcomeKind.LOST)
    assert not report.ok


@pytest.mark.parametrize("error", [ZeroDivisionError("planted"), SyncError("planted")], ids=["any", "without a report"])
def test_any_other_relay_error_is_reported_and_the_worker_serves_the_version(
    manager: Manager, error: Exception
) -> None:
    manager.result = error

    with pytest.raises(SyncError, match="planted") as raised:
        manager.duo.send(2.0)

    outcome = raised.value.report[0]
    assert outcome.kind is OutcomeKind.APPLIED
    assert (outcome.nested.model_id, outcome.nested.version) == ("policy", 2)
    assert outcome.nested[0].kind is OutcomeKind.ABANDONED
    assert repr(error) in outcome.nested[0].reason
    assert "update_policy_weights_" in outcome.nested[0].remote_traceback
    assert manager.duo.model() == {2.0}
    manager.result = "a result that is no report is ignored"
    report = manager.duo.send(3.0)
    assert report.ok
    assert report[0].nested is None


def test_a_forward_that_swaps_leaves_relaying_to_the_background_reader(manager: Manager) -> None:
    stop = threading.Event()

    def serve() -> set[float]:
        seen: set[float] = set()
        while not stop.is_set():
            seen |= manager.duo.model()
        return seen

    with beside(serve) as seen:
        reports = [manager.duo.send(float(fill), timeout=PATIENCE) for fill in range(2, 40)]
        stop.set()

    assert all(report.ok for report in reports)
    assert [values for _, values in manager.asked] == [{float(fill)} for fill in range(1, 40)]
    assert 39.0 in seen[0] | manager.duo.model()


class CollectorWithoutWorkers:
    """Like a TorchRL collector without workers of its own, which has the method but no scheme for its workers."""

    def __init__(self, schemes: Any) -> None:
        self._weight_sync_schemes = schemes

    def update_policy_weights_(self, **_: Any) -> None:
        raise AssertionError("it would write into its own policy")


@pytest.mark.parametrize("schemes", [None, {}, {"value": object()}])
def test_a_collector_without_workers_is_not_asked_to_relay(schemes: Any) -> None:
    duo = Duo(SharedMemWeightSyncScheme)
    leaf = CollectorWithoutWorkers(schemes)
    duo.connect(context=leaf)

    assert duo.send(2.0)[0].nested is None
    duo.end()


class CollectorWithWorkers(CollectorWithoutWorkers):
    """Like a TorchRL collector with workers of its own, whose schemes take a TensorDict."""

    handed: Any = None

    def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> None:  # type: ignore[override]
        self.handed = policy_or_weights


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_a_collector_with_workers_gets_a_tensordict_with_any_strategy(strategy: str) -> None:
    duo = Duo(SharedMemWeightSyncScheme, strategy=strategy)
    branch = CollectorWithWorkers({"policy": object()})
    duo.connect(context=branch)

    assert isinstance(branch.handed, TensorDictBase)
    assert set(branch.handed["mark"].tolist()) == {1.0}
    duo.end()


def test_a_context_that_is_not_a_torchrl_collector_gets_weights_in_the_strategys_form() -> None:
    duo = Duo(SharedMemWeightSyncScheme, strategy="state_dict")
    plain = CollectorWithWorkers(None)
    del plain._weight_sync_schemes
    duo.connect(context=plain)

    assert type(plain.handed) is dict
    assert set(plain.handed["mark"].tolist()) == {1.0}
    duo.end()


class CollectorWithoutPolicy(CollectorWithWorkers):
    """A collector without a policy, whose workers make their own. It raises the error of TorchRL's collectors."""

    policy = None

    def get_model(self, model_id: str) -> Any:
        raise ValueError(f"No policy found for model_id {model_id!r}")


def test_a_collector_without_a_model_relays_the_weights_and_acks_with_their_digest() -> None:
    duo = Duo(SharedMemWeightSyncScheme)
    relaying = CollectorWithoutPolicy({"policy": object()})
    duo.connect(context=relaying, model=None)

    report = duo.send(2.0)

    receiver = duo.receiving.get_receiver()
    assert report[0].kind is OutcomeKind.APPLIED
    assert set(relaying.handed["mark"].tolist()) == {2.0}
    handed = relaying.handed.flatten_keys(".")
    assert {name: tensor.shape for name, tensor in handed.items()} == {
        name: tensor.shape for name, tensor in duo.source.state_dict().items()
    }
    assert receiver.digest() == Target(duo.source).digest()
    duo.send(3.0)
    assert set(handed["mark"].tolist()) == {2.0}, "weights that were passed on must not be overwritten"
    duo.end()


def test_a_collector_with_neither_model_nor_workers_raises_model_path_error() -> None:
    duo = Duo(SharedMemWeightSyncScheme)
    leaf = CollectorWithoutPolicy({"value": object()})
    duo.arrive(context=leaf, model=None)

    with pytest.raises(ModelPathError, match="'policy' is None"):
        duo.receiving.get_receiver().target()
    duo.end()


class WithNotes(nn.Module):
    """A module with extra state."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.register_buffer("mark", torch.full((3,), fill))

    def get_extra_state(self) -> Any:
        return {"notes": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("no worker has this model")


def test_a_relay_without_a_model_refuses_extra_state_that_it_cannot_pass_on() -> None:
    duo = Duo(SharedMemWeightSyncScheme, make=WithNotes)
    relaying = CollectorWithoutPolicy({"policy": object()})

    with pytest.raises(WeightSyncError, match=r"on to its own workers, but the extra state of \[''\] cannot"):
        duo.connect(context=relaying, model=None)

    assert relaying.handed is None
    duo.end()


def test_connect_raises_at_once_if_the_first_version_was_refused_before_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the background reader refused the version early, `connect` used to wait until its deadline."""
    start = Background.start

    def start_and_be_refused(background: Background) -> None:
        start(background)
        until = Deadline(PATIENCE)
        while not background._receiver.last_refusal and not until.passed:
            time.sleep(0.001)

    monkeypatch.setattr(Background, "start", start_and_be_refused)
    duo = Duo(SharedMemWeightSyncScheme, make=WithNotes)

    with pytest.raises(WeightSyncError, match=r"on to its own workers, but the extra state of \[''\] cannot"):
        duo.connect(context=CollectorWithoutPolicy({"policy": object()}), model=None)

    duo.end()


def test_a_relay_without_a_model_refuses_the_names_argument() -> None:
    duo = Duo(SharedMemWeightSyncScheme)

    with pytest.raises(WeightSyncError, match=r"has no model 'policy' of its own: .* Give names= to these"):
        duo.connect(context=CollectorWithoutPolicy({"policy": object()}), model=None, names=["weight"])

    duo.end()


class Counting(CollectorWithoutWorkers):
    """A collector without workers that counts versions, with which it tags its trajectories."""

    policy_version_tracker = object()
    counted = 0
    error: Exception | None = None

    def increment_version(self) -> None:
        if self.error is not None:
            raise self.error
        self.counted += 1


def test_a_collector_that_counts_versions_counts_each_before_the_ack() -> None:
    duo = Duo(SharedMemWeightSyncScheme)
    counting = Counting(None)
    duo.connect(context=counting)
    counted = [counting.counted]

    for fill in (2.0, 3.0):
        assert duo.send(fill).ok
        counted.append(counting.counted)

    assert counted == [1, 2, 3]
    counting.error = ZeroDivisionError("planted")
    with pytest.raises(SyncError, match="planted") as raised:
        duo.send(4.0)
    nested = raised.value.report[0].nested
    assert (nested.model_id, nested.version, nested[0].kind) == ("policy", 4, OutcomeKind.ABANDONED)
    duo.end()


def test_outcomes_from_a_relays_own_workers_reach_the_root_sender(scheme_class: Any) -> None:
    """If the lowest worker refuses a version, the middle worker's send raises, and so does the root's."""
    top = Duo(scheme_class)
    low = Duo(scheme_class)

    class Middle:
        def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> SyncReport:
            report: SyncReport = low.sending.send(policy_or_weights)
            return report

    low.connect()
    middle = Middle()
    top.connect(context=middle)

    report = top.send(2.0)
    assert report[0].nested[0].kind is OutcomeKind.APPLIED
    assert low.model() == {2.0}

    low.receiving.model = reader().double()
    with pytest.raises(SyncError, match="float64"):
        top.send(3.0)
    assert top.model() == {3.0}
    top.end()
    low.end()
