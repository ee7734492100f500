"""Traces are checked against the guarantees without the machines' logic, so faults of the pure halves are found too.

The replay of a trace uses the pure halves, so it would accept what a faulty half does. Here, moments of a replayed run
are changed to what a faulty half would have made of them, and each breach must be reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed
from recorded import recorded

from weightsync.engine.recorder import LineKind
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import SenderInput, State
from weightsync.protocol.messages import Ack, SlotRef, Update
from weightsync.protocol.report import Evidence
from weightsync.verify.guarantees import breaches
from weightsync.verify.judging import machines_in, runs_of
from weightsync.verify.lines import Finding, read_file
from weightsync.verify.replaying import Machine, Moment

Wanted = Callable[[Moment], bool]
OTHER = b"\x01" * 16
#: An incarnation above all others.
LATE = 2**100


class Run:
    """A recorded run whose moments can be changed."""

    def __init__(self, file: Path) -> None:
        [self.network] = runs_of(machines_in([read_file(file)]))

    def find(self, role: str, wanted: Wanted) -> tuple[Machine, int]:
        """The first moment of a machine in this role that satisfies a condition."""
        machines = [machine for machine in self.network.machines if machine.role == role]
        return next((m, i) for m in machines for i, moment in enumerate(m.moments) if wanted(moment))

    def change(self, role: str, wanted: Wanted, **how: Callable[[Moment], Any]) -> None:
        """Change fields of the first such moment."""
        machine, index = self.find(role, wanted)
        moment = machine.moments[index]
        machine.moments[index] = replace(moment, **{name: of(moment) for name, of in how.items()})

    def drop(self, role: str, wanted: Wanted) -> None:
        """Remove the first such moment."""
        machine, index = self.find(role, wanted)
        del machine.moments[index]

    def breaches(self) -> list[Finding]:
        return list(breaches(self.network))

    def reported(self) -> list[str]:
        """The rule of each breach."""
        return [found.rule for found in self.breaches()]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("good"))


@pytest.fixture
def run(file: Path) -> Run:
    return Run(file)


def takes(*events: type, version: int | None = None) -> Wanted:
    """A condition: the moment is a step by one of these events.

    If a version is given, it is the newest that is served or sent after the step.
    """

    def wanted(moment: Moment) -> bool:
        newest = moment.after.served or (0, 0) if isinstance(moment.after, receiving.ReceiverData) else None
        version_after = moment.after.version if newest is None else newest[1]
        return moment.step is not None and isinstance(moment.event, events) and version in (None, version_after)

    return wanted


def counts(moment: Moment) -> bool:
    """A condition: an ack is taken as an answer to the outstanding version."""
    acked = isinstance(moment.event, sending.Answer) and isinstance(moment.event.message, Ack)
    return acked and moment.step is not None and moment.step.input is SenderInput.REPLY


def leaves(version: int, worker: int) -> Wanted:
    """A condition: the version is sent to the worker, over the worker's first link."""
    return lambda m: (
        m.line.what is LineKind.SENT and m.link == worker + 1 and getattr(m.message, "version", 0) == version
    )


def after(**data: Any) -> dict[str, Callable[[Moment], Any]]:
    return {"after": lambda moment: changed(moment.after, **data)}


def answer(**what: Any) -> dict[str, Callable[[Moment], Any]]:
    """Change the answer that an event carries."""
    return {"event": lambda moment: changed(moment.event, answer=changed(moment.event.answer, **what))}


def with_event_message(**what: Any) -> dict[str, Callable[[Moment], Any]]:
    """Change the message that an event carries."""
    return {"event": lambda moment: changed(moment.event, message=changed(moment.event.message, **what))}


def with_message(**what: Any) -> dict[str, Callable[[Moment], Any]]:
    return {"message": lambda moment: changed(moment.message, **what)}


def effect(kind: type, make: Callable[[Any], Any]) -> dict[str, Callable[[Moment], Any]]:
    """Replace each effect of this kind by what `make` returns."""

    def other(moment: Moment) -> Any:
        assert moment.step is not None
        return changed(moment.step, effects=[make(e) if isinstance(e, kind) else e for e in moment.step.effects])

    return {"step": other}


def has_effect(kind: type) -> Wanted:
    return lambda moment: moment.step is not None and any(isinstance(each, kind) for each in moment.step.effects)


def concluded(**what: Any) -> dict[str, Callable[[Moment], Any]]:
    return effect(sending.Conclude, lambda each: changed(each, outstanding=changed(each.outstanding, **what)))


def greets(due: int) -> dict[str, Callable[[Moment], Any]]:
    return effect(sending.Greet, lambda each: changed(each, due=due))


def arrives(moment: Moment) -> bool:
    return moment.line.what is LineKind.RECEIVED and isinstance(moment.message, Update)


def rejoins(moment: Moment) -> bool:
    return isinstance(moment.event, sending.Join) and moment.before.due_all > 0 and moment.step is not None


SENDS, APPLIED = takes(sending.SendAsync, version=2), takes(receiving.Applied, version=2)
#: Each breach, and its fault: the role of the machine, the moment that is changed, and the change.
WRONG: dict[str, tuple[str, Wanted, dict[str, Callable[[Moment], Any]]]] = {
    "G1 AckNamesItsVersion: version 2 is applied, but its ack names 9": ("receiver", APPLIED, answer(version=9)),
    "G1 AckNamesItsVersion: version 1 is sent with two digests": (
        "sender",
        leaves(1, worker=1),
        with_message(digest=OTHER),
    ),
    "G1 AckNamesItsVersion: an ack for another sender counts": ("sender", counts, with_event_message(incarnation=1)),
    "G2 AckedMeansServed: digest 0101": ("receiver", APPLIED, answer(digest=OTHER)),
    "G2 AckedMeansServed: no digest was applied": ("receiver", APPLIED, answer(digest=b"")),
    "G2 AckedMeansServed: the ack names the digest of other weights": (
        "sender",
        counts,
        with_event_message(digest=OTHER),
    ),
    "G2 AckedMeansServed: the ack names no digest": ("sender", counts, with_event_message(digest=b"")),
    "G2 AckedMeansServed: worker 0 counts as APPLIED, but has not applied version 9": (
        "sender",
        counts,
        with_event_message(version=9),
    ),
    "G4 ServingIsMonotone: its fence falls": ("receiver", APPLIED, after(fence=0)),
    "G4 ServingIsMonotone: version 0 is served after": (
        "receiver",
        APPLIED,
        {"after": lambda moment: changed(moment.after, served=(moment.after.served[0], 0))},
    ),
    "G4 ServingIsMonotone: version 2 is served after": (
        "receiver",
        APPLIED,
        {"after": lambda moment: changed(moment.after, fence=moment.after.served[0] + 1)},
    ),
    "G5 OneOutstanding: a version is dispatched while": (
        "sender",
        SENDS,
        {"before": lambda moment: changed(moment.before, outstanding=moment.after.outstanding)},
    ),
    "G5 OneOutstanding: a version is dispatched": (
        "sender",
        SENDS,
        {"before": lambda moment: changed(moment.before, version=3)},
    ),
    "G6 RefusalKeepsServing: a refusal changes": (
        "receiver",
        takes(receiving.Refused),
        {"before": lambda moment: changed(moment.before, served=(1, 1))},
    ),
    "G6 RefusalKeepsServing: the served version changes, but nothing": ("receiver", arrives, after(served=(LATE, 9))),
    "G7 OnlyTargetsChange: version 3 is sent to [1], which is no target of it": (
        "sender",
        leaves(2, worker=1),
        with_message(version=3),
    ),
    "G9 ClosedIsFinal: a closed machine takes another step": (
        "receiver",
        APPLIED,
        {"state_before": lambda _: State.CLOSED},
    ),
    "G9 ClosedIsFinal: a closed machine": ("sender", SENDS, {"state_before": lambda _: State.CLOSED}),
    "G11 OutcomesAreTrue: version 1 is over": ("sender", has_effect(sending.Conclude), concluded(owed={0: 1})),
    "G11 OutcomesAreTrue: version 1 is over, but its outcomes are those of []": (
        "sender",
        has_effect(sending.Conclude),
        concluded(outcomes={}),
    ),
    "G12 LateJoinerCatchesUp: version 2 is due to it, but 0": ("sender", rejoins, greets(0)),
    "G12 LateJoinerCatchesUp: version 2 is due to it, but 9": ("sender", rejoins, greets(9)),
}


def test_a_correct_run_breaches_no_guarantee(run: Run) -> None:
    assert run.breaches() == []


@pytest.mark.parametrize("breach", WRONG)
def test_each_fault_of_a_pure_half_is_reported_as_a_breach_of_its_guarantee(run: Run, breach: str) -> None:
    role, wanted, how = WRONG[breach]
    machine, index = run.find(role, wanted)
    line = machine.moments[index].line

    run.change(role, wanted, **how)

    assert (line, breach) in [(each.line, f"{each.rule}: {each.what}"[: len(breach)]) for each in run.breaches()]


def test_a_served_version_that_never_arrived_is_reported(run: Run) -> None:
    run.drop("receiver", arrives)

    [found] = run.breaches()

    assert (found.rule, found.what) == ("G2 AckedMeansServed", "version 1 never arrived")


def test_an_ack_that_names_another_slot_than_the_update_is_reported(run: Run) -> None:
    run.change("receiver", arrives, **with_message(digest=b"", slot=SlotRef(segment=1, seal=OTHER)))

    assert run.reported() == ["G2 AckedMeansServed"]


def never(run: Run) -> None:
    """Let the worker whose ack counts first not have applied version 1."""
    run.drop("receiver", takes(receiving.Applied))


def too_late(run: Run) -> None:
    """Let the worker apply version 1 only after its ack has counted."""
    machine, index = run.find("sender", counts)
    time = machine.moments[index].line.time
    run.change(
        "receiver",
        takes(receiving.Applied),
        line=lambda moment: replace(moment.line, fields={**moment.line.fields, "t": time + 1}),
    )


@pytest.mark.parametrize("wrong", [never, too_late])
def test_an_ack_that_counts_before_its_worker_applied_the_version_is_reported(
    run: Run, wrong: Callable[[Run], None]
) -> None:
    wrong(run)
    assert run.reported() == ["G2 AckedMeansServed"]


def test_a_late_apply_is_not_reported_if_the_workers_clock_differs(run: Run) -> None:
    too_late(run)
    run.find("receiver", takes(receiving.Applied))[0].clock = "another host's"
    assert run.reported() == []


def acked_by_a_returned_call(run: Run) -> None:
    """Let the ack rest on a call that returned, and not on a receiver's answer."""
    run.change("sender", counts, **with_event_message(evidence=Evidence.CALL))


def worker_trace_has_a_finding(run: Run) -> None:
    """Give the worker's trace a finding of its own. What the worker did after it is unknown."""
    machine, index = run.find("receiver", arrives)
    machine.finding = Finding(machine.moments[index].line, "it is not as it must be")


def worker_recording_ended(run: Run) -> None:
    """End the recording of the worker. What the worker did after it is unknown."""
    machine, _ = run.find("receiver", arrives)
    machine.ended = 0
    machine.moments = [moment for moment in machine.moments if moment.state is not State.CLOSED]


@pytest.mark.parametrize("excuse", [acked_by_a_returned_call, worker_trace_has_a_finding, worker_recording_ended])
def test_a_missing_apply_is_not_reported_if_the_workers_actions_are_unknown(
    run: Run, excuse: Callable[[Run], None]
) -> None:
    never(run)
    excuse(run)
    assert run.reported() == []


# -------------------------------------------------------------------------------------------- the network


def update_arrives(version: int) -> Wanted:
    """A condition: the update of this version arrives."""
    return lambda m: m.line.what is LineKind.RECEIVED and isinstance(m.message, Update) and m.message.version == version


def test_an_update_lost_on_an_ordered_link_is_reported_when_a_later_one_arrives(run: Run) -> None:
    machine, index = run.find("receiver", update_arrives(1))
    link = machine.moments[index].link
    assert any(update_arrives(2)(moment) and moment.link == link for moment in machine.moments)
    run.drop("receiver", update_arrives(1))

    [found] = run.network.findings()

    assert "Update of version 1, sent before it" in found.what
    assert "has not arrived" in found.what
    assert found.allowed == ("this link promises ORDERED",)


def test_an_ack_lost_on_an_ordered_link_is_reported_when_a_later_answer_arrives(run: Run) -> None:
    run.drop(
        "sender", lambda m: m.line.what is LineKind.RECEIVED and isinstance(m.message, Ack) and m.message.version == 1
    )

    [found] = run.network.findings()

    assert "Ack of version 1, sent before it" in found.what


def too_early(run: Run) -> None:
    """Let version 1 arrive before it is sent."""
    run.change(
        "receiver", update_arrives(1), line=lambda moment: replace(moment.line, fields={**moment.line.fields, "t": 0})
    )


def test_a_message_that_arrives_before_it_was_sent_is_reported(run: Run) -> None:
    too_early(run)

    [found] = run.network.findings()

    assert "it arrived before it was sent" in found.what


def test_an_early_arrival_is_not_reported_if_the_workers_clock_differs(run: Run) -> None:
    too_early(run)
    run.find("receiver", update_arrives(1))[0].clock = "another host's"

    assert list(run.network.findings()) == []


def test_an_update_of_a_sender_without_a_handshake_on_its_link_is_reported(run: Run) -> None:
    run.change("receiver", update_arrives(1), **with_message(incarnation=LATE))

    [found] = run.network.findings()

    assert found.what == f"no handshake of incarnation {LATE} arrived"
