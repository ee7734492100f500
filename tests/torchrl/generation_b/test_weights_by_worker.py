"""Sends with different weights for each worker: one call, several versions, one report."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from duo import beside
from fleet import PATIENCE, constants, filled
from msgspec.structs import replace
from torch import nn

from weightsync import (
    ConfigurationError,
    LayoutError,
    MultiProcessWeightSyncScheme,
    NonFiniteError,
    RefusedError,
    SyncError,
)
from weightsync.clock import Deadline
from weightsync.options import OnFailure
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport
from weightsync.schemes import worker_set
from weightsync.schemes.worker_set import send_to_groups


def small(fill: float) -> nn.Module:
    """A layer whose every weight is this number."""
    return filled(nn.Linear(2, 2), fill)


class Trio:
    """A trainer and three workers in this process. ``make`` creates a model filled with a number."""

    def __init__(
        self,
        registered: nn.Module | None = None,
        *,
        sync: bool = True,
        make: Callable[[float], nn.Module] = small,
        **options: Any,
    ) -> None:
        pipes = [multiprocessing.Pipe() for _ in range(3)]
        self.models = [make(0.0) for _ in pipes]
        self.sending = MultiProcessWeightSyncScheme(sync=sync, per_worker_weights=True)
        self.sending.init_on_sender("policy", pipes=[ours for ours, _ in pipes], model=registered, **options)
        self.workers = [MultiProcessWeightSyncScheme() for _ in pipes]
        for index, (worker, (_, theirs)) in enumerate(zip(self.workers, pipes, strict=True)):
            given = {"model": self.models[index], "names": options.get("names")}
            worker.init_on_receiver(model_id="policy", pipe=theirs, worker_idx=index, **given)
        threads = [threading.Thread(target=worker.connect) for worker in self.workers]
        for thread in threads:
            thread.start()
        self.sending.connect(timeout=PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)

    def served(self) -> list[set[float]]:
        """The distinct values in each worker's model."""
        return [constants(model) for model in self.models]

    def close(self) -> None:
        self.sending.close()
        for worker in self.workers:
            worker.shutdown()


@contextlib.contextmanager
def trio(registered: nn.Module | None = None, **options: Any) -> Iterator[Trio]:
    made = Trio(registered, **options)
    try:
        yield made
    finally:
        made.close()


def test_a_worker_that_left_unnoticed_is_named_in_the_report_and_the_others_are_served() -> None:
    with trio(small(0.0)) as three:
        three.workers[2].close()
        report = three.sending.send({0: small(1.0), 1: small(2.0), 2: small(3.0)}, timeout=PATIENCE)

        assert three.served()[:2] == [{1.0}, {2.0}]
    assert report.ok
    assert set(report.outcomes) == {0, 1}
    assert set(report.left) == {2}


@pytest.mark.parametrize("before", [0, 1])
def test_a_worker_that_left_is_in_the_merged_report_of_sends_to_the_others(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves before the send to the first worker, or between the sends to the two: then the last report has it."""
    real, left = worker_set._send_reporting, []

    def leaving(send: Any, group: Any, deadline: Deadline) -> SyncReport:
        if group[1] == [before]:
            three.workers[2].close()
        report = real(send, group, deadline)
        left.append(set(report.left))
        return report

    monkeypatch.setattr(worker_set, "_send_reporting", leaving)
    with trio(small(0.0)) as three:
        report = three.sending.send({0: small(1.0), 1: small(2.0)}, timeout=PATIENCE)

        assert three.served()[:2] == [{1.0}, {2.0}]
    assert left == ([{2}, set()] if before == 0 else [set(), {2}])
    assert report.ok
    assert set(report.left) == {2}


def test_a_worker_that_left_and_was_added_again_gets_its_own_weights_with_the_others() -> None:
    with trio(small(0.0)) as three:
        three.workers[1].shutdown()
        sender = three.sending.get_sender()
        while 1 in sender.worker_ids:
            sender.poll()
        ours, theirs = multiprocessing.Pipe()
        again, three.models[1] = MultiProcessWeightSyncScheme(), small(0.0)
        three.workers[1] = again
        again.init_on_receiver(model_id="policy", pipe=theirs, worker_idx=1, model=three.models[1])
        sender.add_worker(1, ours)
        with beside(again.connect):
            report = three.sending.send({0: small(5.0), 1: small(6.0), 2: small(7.0)}, timeout=PATIENCE)

        assert set(report.outcomes) == {0, 1, 2}
        assert three.served() == [{5.0}, {6.0}, {7.0}]


def test_the_reports_of_sends_to_several_groups_are_merged_into_one() -> None:
    applied = Outcome(kind=OutcomeKind.APPLIED)
    of = {"model_id": "policy", "incarnation": 1}
    older, earlier, later = (SyncReport(version=version, outcomes={}, **of) for version in (2, 4, 5))
    first = SyncReport(
        **{**of, "version": 6, "outcomes": {1: applied}, "nbytes": 8, "payload_nbytes": {1: 4}, "previous": earlier},
        **{"pack_s": 1.0, "connect_s": 2.0, "transfer_s": 3.0, "apply_s": 4.0, "superseded": {1: (3,)}},
        **{"not_caught_up": {7: applied}, "left": {8: "ended"}, "reported_before": {9: 1}},
    )
    none = SyncReport(version=None, outcomes={}, previous=replace(later, previous=older), **of)
    last = SyncReport(
        **{**of, "version": 7, "outcomes": {0: applied}, "nbytes": 16, "payload_nbytes": {0: 5}},
        **{"pack_s": 0.5, "connect_s": 0.25, "transfer_s": 0.5, "apply_s": 3.0, "superseded": {0: (3, 4)}},
    )
    found: Any = iter([first, RefusedError("its error has the report", last), none])
    asked: list[Any] = []

    def send(*given: Any) -> SyncReport:
        asked.append(given)
        each = next(found)
        if isinstance(each, RefusedError):
            raise each
        return each

    groups, deadline = [("a", [1, 2]), ("b", [0, 8]), ("c", [3])], Deadline(None)
    report = send_to_groups(send, groups, deadline, OnFailure.RAISE, lambda: [0, 1, 2, 3])

    failing = OnFailure.REPORT
    assert asked == [("a", [1, 2], deadline, failing), ("b", [0], deadline, failing), ("c", [3], deadline, failing)]
    assert [*report] == [0, 1]
    assert report == SyncReport(
        **{**of, "version": 7, "outcomes": {0: applied, 1: applied}, "nbytes": 24, "payload_nbytes": {1: 4, 0: 5}},
        **{"pack_s": 1.5, "connect_s": 2.25, "transfer_s": 3.5, "apply_s": 4.0, "superseded": {1: (3,), 0: (3, 4)}},
        **{"not_caught_up": {7: applied}, "left": {8: "ended"}, "reported_before": {9: 1}},
        previous=replace(later, previous=replace(older, previous=earlier)),
    )
    found = iter([none, none])
    assert send_to_groups(send, groups[:2], deadline, OnFailure.RAISE, lambda: [0, 1]).version is None
    found = iter([none, RefusedError("it has no report"), RefusedError("nor has this one")])
    with pytest.raises(RefusedError, match="it has no report") as raised:
        send_to_groups(send, groups, deadline, OnFailure.REPORT, lambda: [0, 1])
    assert "either: nor has this one" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("bad", "options", "error"),
    [(nn.Linear(7, 7), {}, LayoutError), (small(float("nan")), {"check_finite": True}, NonFiniteError)],
)
def test_unsendable_weights_for_one_worker_do_not_stop_the_sends_to_the_others(
    bad: nn.Module, options: Any, error: type[Exception]
) -> None:
    with trio(small(0.0), **options) as three:
        with pytest.raises(error) as raised:
            three.sending.send({0: small(1.0), 1: bad, 2: small(3.0)}, timeout=PATIENCE)

        assert three.served() == [{1.0}, {0.0}, {3.0}]
    (note,) = raised.value.__notes__
    assert "The other groups were sent theirs: version 3" in note
    assert "worker 0: APPLIED, worker 2: APPLIED" in note


def test_unsendable_weights_for_the_first_worker_stop_the_whole_send() -> None:
    with trio(small(0.0)) as three:
        with pytest.raises(LayoutError, match="No version was sent"):
            three.sending.send({0: nn.Linear(7, 7), 1: small(2.0), 2: small(3.0)}, timeout=PATIENCE)

        assert three.served() == [{0.0}] * 3


def test_the_error_names_all_weights_that_cannot_be_sent() -> None:
    with trio(small(0.0)) as three, pytest.raises(LayoutError, match="7, 7") as raised:
        three.sending.send({0: small(1.0), 1: nn.Linear(7, 7), 2: nn.Linear(5, 5)}, timeout=PATIENCE)

    assert "5, 5" in raised.value.__notes__[0]


def test_with_sync_false_a_refusal_by_one_worker_is_raised() -> None:
    """With `sync=False`, the second worker's update settles that of the first in the same call."""
    with trio(sync=False) as three:
        with pytest.raises(SyncError) as raised:
            three.sending.send({0: nn.Linear(7, 7), 1: small(2.0), 2: small(3.0)}, timeout=PATIENCE)
        three.sending.get_sender().wait_async(timeout=PATIENCE)

        assert three.served() == [{0.0}, {2.0}, {3.0}]
    report = raised.value.report
    before = report.previous
    assert before[0].kind is OutcomeKind.REFUSED
    assert report[2].kind is OutcomeKind.PENDING


class Adapted(nn.Module):
    """A base with adapters of one value. Merging changes nothing, as in a new LoRA model."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.base = small(0.0)
        self.lora_a = small(fill)

    def merge_and_unload(self) -> nn.Module:
        return self.base


class WithSparseBase(nn.Module):
    """A base whose weights cannot be sent, with adapters."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.register_buffer("base", torch.eye(2).to_sparse())
        self.lora_a = small(fill)


@pytest.mark.parametrize("make", [Adapted, WithSparseBase])
def test_workers_get_their_own_selected_weights_whatever_the_other_tensors_are(make: Any) -> None:
    with trio(make(0.0), make=make, names="lora_*") as three:
        report = three.sending.send({0: make(1.0), 1: make(2.0), 2: make(1.0)}, timeout=PATIENCE)

        assert [constants(model.lora_a) for model in three.models] == [{1.0}, {2.0}, {1.0}]
    assert report.ok
    assert report.version == 3, "two versions after the first: workers with equal weights share one"


def init_options(fill: float) -> dict[str, Any]:
    """The arguments with which `init_on_sender` gets weights for each worker."""
    return {"params_map": {worker: dict(small(fill + worker).state_dict()) for worker in range(3)}}


@pytest.mark.parametrize("removed", [True, False])
def test_init_weights_of_a_worker_that_left_do_not_stop_sends_to_the_others(removed: bool) -> None:
    with trio(**init_options(1.0)) as three:
        three.workers[2].close()
        if removed:
            three.sending.get_sender().remove_worker(2)
        three.sending.send(timeout=PATIENCE)
        report = three.sending.send(timeout=PATIENCE)

        assert three.served()[:2] == [{1.0}, {2.0}]
    assert report.ok
    assert set(report.outcomes) == {0, 1}


def test_weights_for_unknown_workers_only_are_refused_with_their_ids() -> None:
    with contextlib.closing(Trio()) as trio, pytest.raises(ConfigurationError, match=r"some for \[7\].*\[0, 1, 2\]"):
        trio.sending.send({7: small(1.0)})


def test_init_weights_cannot_be_sent_once_every_worker_has_left() -> None:
    with trio(**init_options(1.0)) as three:
        for worker in range(3):
            three.sending.get_sender().remove_worker(worker)

        with pytest.raises(ConfigurationError, match="no worker to send them to"):
            three.sending.send(timeout=PATIENCE)
        with pytest.raises(ConfigurationError, match=r"some for \[2\], which are not among"):
            three.sending.send(worker_ids=2, timeout=PATIENCE)


def test_workers_may_leave_before_connect_sends_the_init_weights() -> None:
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    with MultiProcessWeightSyncScheme() as sending, MultiProcessWeightSyncScheme() as worker:
        sending.init_on_sender("policy", pipes=[ours for ours, _ in pipes], **init_options(1.0))
        for left in (0, 2):
            sending.get_sender().remove_worker(left)
        model = small(0.0)
        worker.init_on_receiver(model_id="policy", pipe=pipes[1][1], worker_idx=1, model=model)
        with beside(lambda: sending.connect(timeout=PATIENCE)):
            worker.connect(timeout=PATIENCE)

        assert constants(model) == {2.0}
