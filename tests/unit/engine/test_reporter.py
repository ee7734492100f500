"""A report has everything that the driver knows of a version, with times, and has it once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from scripted import EPOCH, Fleet, Scripted, Telling, ack, hello, packed, refusal

from weightsync import RefusedError, TransportError, WorkerLostError
from weightsync.clock import Stopwatch
from weightsync.engine.reporter import MOST_SUPERSEDED, Reporter
from weightsync.options import WireDtype
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Bye
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport
from weightsync.testing import FakeClock

PENDING, TIMED_OUT = Outcome(kind=OutcomeKind.PENDING), OutcomeKind.TIMED_OUT


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    """A clock that a test moves. It starts at 0, so that times are exact."""
    with FakeClock() as clock:
        clock._started = 0.0, clock._started[1]
        yield clock


class Reported:
    """A fleet, its reporter, and the reports that were recorded."""

    def __init__(self, *links: Any) -> None:
        self.fleet = Fleet(*links)
        self.driver = self.fleet.driver
        self.reporter = Reporter(self.driver)
        self.recorded: list[SyncReport] = []
        self.driver.reported = self.recorded.append  # type: ignore[method-assign]

    def sends(self, pack_s: float = 0.0, targets: tuple[int, ...] | None = None) -> int:
        """Dispatch a version. Returns its number."""
        sent = packed()
        sent.pack_s, sent.wire_dtype = pack_s, WireDtype.BFLOAT16
        version = self.driver.dispatch(pure.SendAsync(targets), sent)
        self.reporter.dispatched(sent, Stopwatch())
        return version

    def concluded(self, version: int) -> SyncReport:
        """Wait for a version. Returns its report."""
        assert version not in self.driver.concluded
        self.driver.take(pure.Wait())
        assert version in self.driver.concluded
        report = self.reporter.concluded(version)
        assert version not in self.driver.concluded
        assert self.recorded[-1] is report
        return report

    def gives_up(self, version: int) -> SyncReport:
        self.driver.take(pure.Abandon())
        report = self.reporter.concluded(version)
        self.reporter.superseded(report)
        return report


def reason_of(made: Reported, worker: int) -> list[str]:
    return made.reporter.so_far(TIMED_OUT)[worker].reason.split("; ")


# --------------------------------------------------------------------------------------------------- what is known


def test_the_report_of_an_outstanding_update_has_answered_and_owing_workers(clock: FakeClock) -> None:
    made = Reported(Scripted(), Scripted())
    made.sends(pack_s=2.0)
    clock.advance(3.0)
    made.fleet.receives(1, replace(ack(1), seconds=0.5))
    clock.advance(4.0)
    report = made.reporter.so_far(OutcomeKind.PENDING)

    applied = Outcome(kind=OutcomeKind.APPLIED, evidence=Evidence.ANSWER, apply_s=0.5)
    expected = SyncReport(
        model_id="policy",
        version=1,
        incarnation=EPOCH,
        outcomes={0: PENDING, 1: applied},
        nbytes=packed().nbytes,
        wire_dtype=WireDtype.BFLOAT16,
        pack_s=2.0,
        connect_s=7.0,
        transfer_s=0.0,
        apply_s=0.5,
    )
    assert report == expected
    assert (list(report), made.recorded) == ([0, 1], [report])

    made.fleet.receives(0, hello())
    clock.advance(5.0)
    assert made.reporter.so_far(OutcomeKind.PENDING) == replace(expected, connect_s=7.0, transfer_s=5.0)
    made.fleet.receives(0, replace(ack(1), seconds=0.25))
    report = made.concluded(1)
    assert (report.outcomes, report.apply_s) == ({0: replace(applied, apply_s=0.25), 1: applied}, 0.5)
    assert (report.pack_s, report.connect_s, report.transfer_s) == (2.0, 7.0, 5.0)
    assert report.nbytes == packed().nbytes


def test_lost_removed_and_untargeted_workers_do_not_count_in_connect_s(clock: FakeClock) -> None:
    made = Reported(Scripted(), Scripted(), Scripted())
    made.sends(targets=(0, 1))
    made.fleet.receives(0, hello())
    clock.advance(3.0)
    made.fleet.links[1].raises["receive"] = TransportError("cut")
    made.driver.pump()
    report = made.reporter.so_far(OutcomeKind.PENDING)
    assert (report.connect_s, report.transfer_s, report.apply_s) == (0.0, 3.0, 0.0)
    assert report[1] == Outcome(kind=OutcomeKind.LOST, reason="cut")

    made.driver.remove(1, "not needed")
    assert made.reporter.so_far(OutcomeKind.PENDING).connect_s == 0.0


def test_a_worker_that_comes_back_during_its_update_does_not_count_in_connect_s(clock: FakeClock) -> None:
    made = Reported(Scripted(), Scripted(), Scripted())
    for worker in (0, 1, 2):
        made.fleet.receives(worker, hello())
    clock.advance(1.0)
    made.sends()
    made.fleet.receives(1, ack(1))
    clock.advance(2.0)
    for worker in (0, 1):  # worker 0 owed an answer, worker 1 had answered
        made.driver.join(worker, Scripted())
    made.driver.remove(2, "not needed")
    made.driver.join(2, Scripted())
    clock.advance(4.0)
    report = made.concluded(1)

    assert [report[worker].kind for worker in (0, 1, 2)] == [OutcomeKind.LOST, OutcomeKind.APPLIED, OutcomeKind.LOST]
    assert (report.connect_s, report.transfer_s) == (0.0, 6.0)


def test_the_size_is_reported_although_the_only_target_was_removed() -> None:
    made = Reported(Scripted(), Scripted())
    made.sends(targets=(0,))
    made.driver.remove(0, "not needed")

    assert made.concluded(1).nbytes == packed().nbytes > 0
    assert made.driver.packed(1) is None


def test_a_report_between_the_dispatch_and_its_recording_has_no_times(clock: FakeClock) -> None:
    made = Reported(Scripted())
    made.driver.dispatch(pure.SendAsync(None), packed())
    report = made.reporter.so_far(OutcomeKind.PENDING)

    assert (report.version, report.nbytes, report.pack_s, report.connect_s) == (1, 0, 0.0, 0.0)
    assert report.wire_dtype is None


def test_without_an_outstanding_update_the_report_is_empty() -> None:
    made = Reported(Scripted())
    empty = SyncReport(model_id="policy", version=None, incarnation=EPOCH, outcomes={})

    assert made.reporter.so_far(OutcomeKind.PENDING) == made.reporter.empty() == empty


def test_workers_that_left_or_did_not_catch_up_are_in_the_next_report() -> None:
    made = Reported(Scripted(), Scripted())
    made.sends(targets=(0,))
    made.fleet.receives(1, Bye(model_id="policy", incarnation=EPOCH, reason="enough"))
    late = Scripted()
    made.driver.take(pure.Abandon())
    made.reporter.concluded(1)
    made.sends()
    made.driver.take(pure.Abandon())
    made.reporter.concluded(2)
    made.driver.join(2, late)
    late.receives(refusal(2))
    made.driver.pump()
    made.sends(targets=(0,))
    assert made.reporter.so_far(OutcomeKind.PENDING).not_caught_up == {}
    made.fleet.receives(0, ack(3), Bye(model_id="policy", incarnation=EPOCH, reason="done"))
    assert made.reporter.so_far(OutcomeKind.PENDING).left == {0: "done"}
    report = made.concluded(3)

    assert report.left == {0: "done"}
    assert {worker: outcome.reason for worker, outcome in report.not_caught_up.items()} == {2: "no"}
    assert report.connect_s == 0.0


def test_reports_after_a_superseded_update_have_workers_that_left_or_did_not_catch_up() -> None:
    made = Reported(Scripted(), Scripted())
    made.fleet.sends()
    for worker in (0, 1):
        made.fleet.receives(worker, ack(1))
    made.driver.concluded.clear()
    late = Scripted()
    made.driver.join(2, late)
    made.sends(targets=(0,))
    late.receives(refusal(1))
    made.fleet.receives(1, Bye(model_id="policy", incarnation=EPOCH, reason="enough"))

    def told(report: SyncReport) -> tuple[dict[int, str], list[int]]:
        return dict(report.left), list(report.not_caught_up)

    everything = {1: "enough"}, [2]
    assert told(made.gives_up(2)) == everything
    assert told(made.reporter.empty()) == everything
    lost = made.reporter.add_report(WorkerLostError("all lost", lost={}))
    assert told(lost.report) == everything
    made.sends(targets=(0,))
    assert told(made.reporter.so_far(TIMED_OUT)) == everything
    assert told(made.gives_up(3)) == everything, "superseded once more"
    made.sends(targets=(0,))
    made.fleet.receives(0, ack(4), Bye(model_id="policy", incarnation=EPOCH, reason="done"))
    made.driver.take(pure.Wait())
    assert told(made.reporter.concluded(4)) == ({0: "done", 1: "enough"}, [2])
    assert told(made.reporter.empty()) == ({}, [])
    assert [told(report) for report in made.recorded[-2:]] == [({}, []), ({0: "done"}, [])], "the trace has each once"


# ------------------------------------------------------------------------------------------------- what is owed


def test_a_timed_out_outcome_says_everything_known_of_the_worker(clock: FakeClock) -> None:
    made = Reported(Scripted(), Telling())
    made.sends()
    assert reason_of(made, 0) == [
        "never connected",
        "is its process running, has it called init_on_worker() or init_on_receiver() (each worker with its own "
        "worker_idx=), and does it call receive() (which raises there as long as it finds no model)?",
    ]
    made.fleet.receives(0, hello())
    made.fleet.receives(1, ack(1))
    clock.advance(2.0)
    made.driver.take(pure.Abandon())
    made.sends()

    silent = "it was last heard from 2.0 s ago"
    connected = "connected, but has not answered"
    assert reason_of(made, 0) == [
        connected,
        "it is not known to serve a version",
        silent,
        "whether it has read the update is unknown",
    ]
    assert reason_of(made, 1) == [
        connected,
        "it last served version 1",
        silent,
        "it has read the update, and has not applied it yet: a step or a loader may be running",
        "it is asleep",
    ]
    assert made.reporter.so_far(TIMED_OUT)[0].kind is TIMED_OUT
    assert made.reporter.so_far(OutcomeKind.PENDING).outcomes == {0: PENDING, 1: PENDING}


# --------------------------------------------------------------------------------------- updates before this one


def test_superseded_versions_are_reported_until_a_later_update_to_their_worker_concludes() -> None:
    made = Reported(Scripted(), Scripted())
    made.sends()
    made.fleet.receives(1, ack(1))
    made.gives_up(1)
    made.sends()
    report = made.reporter.so_far(OutcomeKind.PENDING)
    assert report.superseded == {0: (1,)}
    assert made.gives_up(2).superseded == {0: (1,)}
    made.sends(targets=(1,))
    assert made.reporter.so_far(OutcomeKind.PENDING).superseded == {1: (2,)}
    made.fleet.receives(1, ack(3))
    assert made.concluded(3).superseded == {1: (2,)}

    made.sends()
    for worker in (0, 1):
        made.fleet.receives(worker, ack(4))
    assert made.concluded(4).superseded == {0: (1, 2)}
    assert made.reporter._superseded == {}


def test_the_number_of_superseded_versions_in_a_report_is_bounded() -> None:
    made = Reported(Scripted())
    for version in range(1, MOST_SUPERSEDED + 4):
        made.sends()
        made.gives_up(version)
    made.sends()

    assert made.reporter.so_far(OutcomeKind.PENDING).superseded == {0: tuple(range(4, MOST_SUPERSEDED + 4))}


@pytest.mark.parametrize("how", ["removed", "goodbye"])
def test_a_worker_that_is_added_again_has_no_superseded_versions_from_before(how: str) -> None:
    made = Reported(Scripted(), Scripted())
    made.sends()
    made.gives_up(1)
    if how == "removed":
        made.driver.remove(1, "not needed")
    else:
        made.fleet.receives(1, Bye(model_id="policy", incarnation=EPOCH, reason="enough"))
    made.driver.join(1, Scripted())
    made.sends()

    assert made.reporter.so_far(OutcomeKind.PENDING).superseded == {0: (1,)}


def test_a_report_is_the_previous_of_the_next_reports_until_one_is_delivered() -> None:
    made = Reported(Scripted(), Scripted())
    made.sends()
    made.driver.take(pure.Abandon())
    before = made.reporter.concluded(1)

    assert made.reporter.empty().previous is before
    made.sends()
    assert made.reporter.so_far(OutcomeKind.PENDING).previous is before
    assert made.reporter.so_far(OutcomeKind.PENDING).previous is before
    made.reporter.delivered()
    assert made.reporter.so_far(OutcomeKind.PENDING).previous is None
    assert made.reporter.empty().previous is None


def test_an_undelivered_failure_is_reported_after_a_later_update_was_superseded() -> None:
    made = Reported(Scripted(), Scripted())
    made.sends()
    made.driver.take(pure.Abandon())
    before = made.reporter.concluded(1)
    made.sends()
    made.driver.take(pure.Abandon())
    given_up = made.reporter.concluded(2)
    made.reporter.delivered()
    made.reporter.superseded(given_up)

    made.sends()
    report = made.reporter.so_far(OutcomeKind.PENDING)
    assert report.previous is before
    assert report.superseded == {0: (2,), 1: (2,)}


def test_a_refusal_of_an_update_that_is_then_superseded_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = Reported(Scripted(), Scripted(), Scripted())
    made.fleet.links[2].raises["receive"] = TransportError("cut")
    made.sends()
    made.fleet.receives(1, refusal(1))
    made.gives_up(1)
    (logged,) = caplog.messages
    assert "the previous update: version 1 of 'policy' did not reach 3 of 3 workers" in logged
    assert "worker 1: REFUSED (no)" in logged
    assert "send again" not in logged, "it advises what is too late for a version that a newer one has superseded"
    assert "add_worker()" not in logged

    made.sends()
    made.fleet.receives(1, refusal(2))
    made.reporter.so_far(TIMED_OUT)
    made.gives_up(2)
    made.sends()
    made.gives_up(3)
    assert caplog.messages == [logged], "a caller was told, or the next report says it again"


def test_workers_that_left_or_were_removed_are_not_logged_as_failures(caplog: pytest.LogCaptureFixture) -> None:
    made = Reported(Scripted(), Scripted())
    made.driver.goodbye_level = 0
    made.sends()
    made.driver.remove(0, "not needed")
    made.fleet.receives(1, Bye(model_id="policy", incarnation=EPOCH, reason="enough"))
    again = Scripted()
    made.driver.join(1, again)

    assert made.gives_up(1).of(OutcomeKind.LOST) == (0, 1)
    assert caplog.messages == []


def test_a_lost_workers_traceback_is_in_one_delivered_report_and_later_ones_refer_to_it() -> None:
    made = Reported(Scripted(), Scripted())

    def sent(report: SyncReport) -> tuple[str, str]:
        made.reporter.delivered()
        return str(report), str(report.error())

    made.sends(targets=(0,))
    failed = replace(refusal(0, RefusalKind.FAILED), reason="RuntimeError: boom", remote_traceback="in step")
    made.fleet.receives(1, failed)
    made.fleet.receives(0, ack(1))
    made.concluded(1)
    made.sends()
    assert "in step" in str(made.reporter.so_far(OutcomeKind.PENDING))
    made.reporter.delivered()  # that of send_async(), which does not count as having told the failure
    given_up = made.gives_up(2)  # no caller gets this report
    assert "in step" in str(given_up)
    made.sends()
    made.fleet.receives(0, ack(3))
    assert all("in step" in text for text in sent(made.concluded(3)))
    made.sends()
    made.fleet.receives(0, ack(4))
    report = made.concluded(4)
    for text in sent(report):
        assert "LOST (it failed: RuntimeError: boom; its traceback is in the report of version 3)" in text
        assert "in step" not in text
    assert (report[1].remote_traceback, report.to_dict()["reported_before"]) == ("in step", {"1": 3})

    again = Scripted()
    made.driver.join(1, again)
    again.receives(failed)
    made.driver.pump()
    made.sends()
    made.fleet.receives(0, ack(5))
    assert "in step" in sent(made.concluded(5))[1]
    made.driver.remove(0, "not needed")
    lost = made.reporter.add_report(WorkerLostError("all lost", lost={1: "boom"}))
    assert "its traceback is in the report of version 5" in str(lost.report)


@pytest.mark.parametrize("targets", [None, (1,)])
def test_an_update_not_sent_in_time_names_the_workers_that_the_previous_one_awaits(
    targets: tuple[int, ...] | None,
) -> None:
    made = Reported(Scripted(), Scripted())
    applied = Outcome(kind=OutcomeKind.APPLIED)
    late = Outcome(kind=TIMED_OUT)
    before = SyncReport(model_id="policy", version=7, incarnation=EPOCH, outcomes={0: applied, 1: late})

    reason = "not sent: time was up while version 7 still awaited worker 1"
    outcomes = dict.fromkeys((0, 1) if targets is None else targets, Outcome(kind=TIMED_OUT, reason=reason))
    assert made.reporter.not_sent(before, targets) == replace(before, version=None, outcomes=outcomes, previous=before)


def test_a_send_without_live_targets_reports_the_reason_of_each() -> None:
    made = Reported(Scripted(), Scripted())
    made.fleet.links[0].raises["receive"] = TransportError("cut")
    made.fleet.receives(1, refusal(0))
    lost, refused = WorkerLostError("all lost", lost={0: "cut", 9: "gone"}), RefusedError("refused", refused={1: "no"})

    assert made.reporter.add_report(lost) is lost
    assert lost.report.outcomes == {0: Outcome(kind=OutcomeKind.LOST, reason="cut")}
    assert made.reporter.add_report(refused) is refused
    assert {worker: outcome.kind for worker, outcome in refused.report.outcomes.items()} == {1: OutcomeKind.REFUSED}
    assert (lost.report.version, lost.report.incarnation) == (None, EPOCH)
    assert made.recorded == [lost.report, refused.report]


def test_only_lost_workers_whose_traceback_is_in_an_earlier_report_are_in_reported_before() -> None:
    made = Reported(Scripted(), Scripted(), Scripted())
    made.sends()
    made.fleet.links[0].raises["receive"] = TransportError("cut")
    made.fleet.receives(1, replace(refusal(0, RefusalKind.FAILED), remote_traceback="in step"))
    refused = replace(refusal(1), remote_traceback="in loader")
    for report in (made.reporter.so_far(TIMED_OUT), made.reporter.so_far(TIMED_OUT)):  # a caller waits twice
        made.reporter.delivered()
        assert report.reported_before == {}
    made.fleet.receives(2, refused)
    assert made.concluded(1).reported_before == {}
    made.reporter.delivered()

    made.sends()
    made.fleet.receives(2, replace(refused, version=2))
    report = made.concluded(2)
    assert (report.of(OutcomeKind.LOST), report.of(OutcomeKind.REFUSED)) == ((0, 1), (2,))
    assert report.reported_before == {1: 1}
    assert "in loader" in str(report)


# ----------------------------------------------------------------------------- what an abandoned update leaves behind


def _failed(fleet: Fleet, worker: int) -> None:
    fleet.receives(worker, replace(refusal(0, RefusalKind.FAILED), remote_traceback="in step"))


def test_reports_refer_to_all_earlier_tracebacks_even_after_a_superseded_update() -> None:
    made = Reported(Scripted(), Scripted(), Scripted())
    for version, failing in ((1, 1), (2, 2)):
        made.sends()
        _failed(made.fleet, failing)
        made.fleet.receives(0, ack(version))
        if version == 1:
            made.fleet.receives(2, ack(version))
        made.concluded(version)
        made.reporter.delivered()
    made.sends()
    made.gives_up(3)
    made.sends()
    made.fleet.receives(0, ack(4))

    assert made.concluded(4).reported_before == {1: 1, 2: 2}


@pytest.mark.parametrize(("owing", "before"), [(OutcomeKind.PENDING, {}), (TIMED_OUT, {1: 1})])
def test_a_pending_report_does_not_count_as_having_reported_a_traceback(
    owing: OutcomeKind, before: dict[int, int]
) -> None:
    made = Reported(Scripted(), Scripted())
    made.sends()
    _failed(made.fleet, 1)
    made.reporter.so_far(owing)
    made.reporter.delivered()
    made.fleet.receives(0, ack(1))
    made.concluded(1)  # the caller was interrupted and did not get the report
    made.sends()

    assert made.reporter.so_far(TIMED_OUT).reported_before == before


def test_a_send_without_live_targets_refers_to_the_report_that_has_the_traceback() -> None:
    made = Reported(Scripted(), Scripted())
    lost = {1: "boom"}
    made.sends(targets=(0,))
    _failed(made.fleet, 1)
    first = made.reporter.add_report(WorkerLostError("all lost", lost=lost)).report
    again = made.reporter.add_report(WorkerLostError("all lost", lost=lost)).report
    assert (first.reported_before, again.reported_before) == ({}, {1: 0})

    made = Reported(Scripted(), Scripted())
    made.sends()
    _failed(made.fleet, 1)
    made.fleet.receives(0, ack(1))
    made.concluded(1)
    made.reporter.delivered()
    assert made.reporter.add_report(WorkerLostError("all lost", lost=lost)).report.reported_before == {1: 1}


def test_workers_that_left_during_a_superseded_update_are_in_the_next_reports() -> None:
    made = Reported(Scripted(), Scripted())
    made.sends(targets=(0,))
    made.fleet.receives(1, Bye(model_id="policy", incarnation=EPOCH, reason="enough"))
    made.gives_up(1)
    made.sends(targets=(0,))

    assert made.reporter.so_far(TIMED_OUT).left == {1: "enough"}
    made.fleet.receives(0, ack(2))
    made.driver.take(pure.Wait())
    assert made.reporter.concluded(2).left == {1: "enough"}


def test_the_contents_of_two_undelivered_reports_are_in_the_next_one() -> None:
    made = Reported(Scripted())
    refused = Outcome(kind=OutcomeKind.REFUSED, reason="no")
    for worker in (1, 2):
        withheld = replace(made.reporter.empty(), left={worker: "enough"}, not_caught_up={worker + 2: refused})
        made.reporter.carry(withheld)

    report = made.reporter.empty()
    assert (dict(report.left), dict(report.not_caught_up)) == ({1: "enough", 2: "enough"}, {3: refused, 4: refused})


def test_the_log_of_a_superseded_update_does_not_mention_the_update_before_it(caplog: pytest.LogCaptureFixture) -> None:
    made = Reported(Scripted(), Scripted())
    made.sends()
    made.fleet.receives(0, refusal(1))
    made.driver.take(pure.Abandon())
    made.reporter.concluded(1)  # no caller got this report, so the next one has its contents
    made.sends()
    made.fleet.receives(1, refusal(1), refusal(2))
    made.gives_up(2)

    (logged,) = caplog.messages
    assert "version 2" in logged
    assert "version 1" not in logged
