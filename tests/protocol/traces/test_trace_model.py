"""TLC can follow recorded runs through AckProtocol.tla, and cannot follow forged ones."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed
from recorded import Cast, judged, model, recorded
from skipping import require_tlc

import weightsync
from weightsync.engine import recorder
from weightsync.model.toolchain import Toolchain
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import State
from weightsync.protocol.messages import Ack
from weightsync.protocol.report import Outcome, OutcomeKind
from weightsync.verify import follow, tlc
from weightsync.verify.naming import Bounds, RecordedAction
from weightsync.verify.tlc import Modelled, accepted_of, modelled

pytestmark = pytest.mark.tlc


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    return require_tlc("Whether TLC follows recorded runs")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Modelled:
    [run] = judged(recorded(tmp_path_factory.mktemp("good"))).runs
    return modelled(run, Bounds())


def test_tlc_follows_the_recorded_run_and_none_of_its_illegal_forgeries(tools: Toolchain, good: Modelled) -> None:
    forgeries = [*_dropped(good), *_swapped(good), *_forged(good)]
    accepted = accepted_of(tools, [good, *(trace for _, trace in forgeries)])

    assert 1 in accepted
    assert len(forgeries) > 400
    followed = [forgeries[number - 2][0] for number in sorted(accepted - {1})]
    assert [how for how in followed if how.partition("'a': '")[2].partition("'")[0] not in HARMLESS_ACTIONS] == []


def _dropped(good: Modelled) -> Iterator[tuple[str, Modelled]]:
    """Runs without one event, after which its machine has further events."""
    for number, act in enumerate(good.acts):
        later = any(_machine_of(each) == _machine_of(act) for each in good.acts[number + 1 :])
        if act.action["a"] != "Copy" and later:
            yield f"without {act.action}", replace(good, acts=[*good.acts[:number], *good.acts[number + 1 :]])


#: Actions that may as well not have happened, or have happened later: late messages (an ack that comes before the
#: answer to the handshake completes the handshake; an answer that is not owed), a loss that a takeover comes before,
#: events that are a machine's last or happen twice.
HARMLESS_ACTIONS = {"AnswerHello", "AnswerRefusal", "LinkDown", "Wait", "CloseReceiver"}


def _machine_of(act: RecordedAction) -> tuple[Any, ...]:
    return act.action.get("who"), act.action.get("s" if act.action.get("who") == "s" else "w")


def _swapped(good: Modelled) -> Iterator[tuple[str, Modelled]]:
    """Runs in which two successive events of one machine change places."""
    for number, act in enumerate(good.acts):
        after = next(
            (i for i in range(number + 1, len(good.acts)) if _machine_of(good.acts[i]) == _machine_of(act)), None
        )
        if after is not None:
            acts = list(good.acts)
            acts[number], acts[after] = acts[after], acts[number]
            yield f"{act.action} after {good.acts[after].action}", replace(good, acts=acts)


COMPARED_FIELDS = {"st", "inc", "v", "all", "members", "out", "link", "fence", "decided", "pending", "served", "answer"}


def _forged(good: Modelled) -> Iterator[tuple[str, Modelled]]:
    """Runs that end with an event of which one recorded value is changed."""
    for number, act in enumerate(good.acts):
        for name, value in act.action.items():
            free = name == "out" and not act.action["reported"]
            if name in COMPARED_FIELDS and not free:
                forged = RecordedAction(act.line, {**act.action, name: _other(value)})
                yield f"{name} of {act.action}", replace(good, acts=[*good.acts[:number], forged])


def _other(value: Any) -> Any:
    match value:
        case str():
            return "closed" if value != "closed" else "ready"
        case tuple():
            return (_other(value[0]), *value[1:])
        case _:
            return value + 1


# ------------------------------------------------------------------- a fault in a pure half, which Python shares


def _refusals_count_as_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sending._outcome
    applied = Outcome(kind=OutcomeKind.APPLIED)
    monkeypatch.setattr(sending, "_outcome", lambda message: before(message) if isinstance(message, Ack) else applied)


def _joiners_are_due_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sending._join

    def lazy(data: Any, worker: int, link: int) -> Any:
        after, effects = before(data, worker, link)
        return changed(after, workers={**after.workers, worker: changed(after.workers[worker], catching=0)}), effects

    monkeypatch.setattr(sending, "_join", lazy)


@pytest.mark.parametrize("fault", [_refusals_count_as_applied, _joiners_are_due_nothing])
def test_the_model_refuses_a_run_with_a_faulty_pure_half_and_names_the_line(
    tools: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    verdict = judged(recorded(tmp_path))
    assert verdict.findings == (), "Python steps the same pure half"

    followed = follow(tools, verdict.runs)

    assert followed.accepted == 0
    [finding] = followed.findings
    event = finding.line.fields["event"]["is"]
    assert event == {"_refusals_count_as_applied": "Answer", "_joiners_are_due_nothing": "Join"}[fault.__name__]


def test_runs_beyond_the_bounds_of_the_model_are_counted_as_left_out(tools: Toolchain, tmp_path: Path) -> None:
    verdict = judged(recorded(tmp_path))

    assert follow(tools, verdict.runs, Bounds(versions=2)).left_out == {"more than 2 versions": 1}


def _below_a_known_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender is fenced and closed. A third one, whose clock is behind, connects without that fence.

    Its incarnation is therefore not above the fence.
    """
    cast, successor = Cast(), weightsync.WeightSender(weightsync.MultiProcessWeightSyncScheme())
    cast.sender.connect()
    cast.receive()
    cast.create_link(successor, 0)
    successor.connect()
    cast.receive(0)
    cast.sender.poll()
    cast.sender.close()
    monkeypatch.setattr("weightsync.engine.sender.new_incarnation", lambda fence: fence + 1)
    late = weightsync.WeightSender(cast.scheme)
    cast.create_link(late, 0)
    late.connect()
    cast.receive(0)
    successor.close()
    late.close()
    cast.close()


def test_a_run_with_a_sender_below_a_closed_senders_fence_is_counted_as_left_out(
    tools: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = judged(recorded(tmp_path, lambda: _below_a_known_fence(monkeypatch)))
    assert verdict.findings == ()

    followed = follow(tools, verdict.runs)

    reason = "a sender does not rise above a fence that a closed sender was told"
    assert (followed.findings, followed.left_out) == ([], {reason: 1})


def _sends(count: int) -> None:
    cast = Cast()
    for value in range(count):
        cast.sender.send_async(model(float(value)))
        cast.receive()
        cast.sender.wait_async()
    cast.close()


def test_following_is_checked_on_runs_that_cover_every_action_and_the_other_runs_go_in_batches(
    tools: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 2, 3):
        recorded(tmp_path / f"{count}", lambda count=count: _sends(count))
    folders = (recorded(tmp_path / "long").parent, *(tmp_path / f"{count}" for count in (1, 2, 3)))
    runs = [run for folder in folders for run in judged(folder).runs]
    shipped, asked = tlc._run, list[tuple[bool, int]]()
    every_action = {act.action["a"] for run in runs for act in modelled(run, Bounds()).acts}

    def run(tools: Toolchain, traces: Any, config: str, jvms: tlc.Jvms) -> str:
        of_following = "OnlyTheModels" in config
        asked.append((of_following, len(traces)))
        if of_following:
            assert {act.action["a"] for trace in traces for act in trace.acts} == every_action
        return shipped(tools, traces, config, jvms)

    monkeypatch.setattr(tlc, "_run", run)
    monkeypatch.setattr(tlc, "_BATCH", 1)
    followed = follow(tools, runs)

    assert followed.ways == 4
    assert (followed.accepted, followed.left_out) == (len(runs), {})
    assert sorted(asked) == [(False, 1), (False, 1), (True, 2)]


# -------------------------------------------------------------- workers that are killed before they write what they did


def _receive_until_killed(event: type | tuple[()], end: Any) -> None:
    """The main function of a worker that receives once. It is killed before it records `event`, if that is a type."""
    shipped = recorder.MachineTrace.tell

    def tell(self: recorder.MachineTrace, what: recorder.LineKind, model_id: str, **said: Any) -> None:
        if isinstance(said.get("event"), event):
            os.kill(os.getpid(), signal.SIGKILL)
        shipped(self, what, model_id, **said)

    recorder.MachineTrace.tell = tell  # type: ignore[method-assign]
    receiver = weightsync.WeightReceiver(weightsync.MultiProcessWeightSyncScheme())
    receiver.register_model(model())
    receiver.register_worker_transport(end)
    receiver.receive(30.0)


@pytest.mark.parametrize("event", [receiving.HelloArrived, receiving.Answered], ids=lambda each: each.__name__)
def test_a_worker_killed_before_it_recorded_its_last_step_is_followed_and_so_is_its_restart(
    tools: Toolchain, tmp_path: Path, event: type
) -> None:
    context = multiprocessing.get_context("fork")
    with recorder.record(tmp_path):
        sender = weightsync.WeightSender(weightsync.MultiProcessWeightSyncScheme())
        for until in (event, ()):
            ours, theirs = context.Pipe()
            child = context.Process(target=_receive_until_killed, args=(until, theirs))
            child.start()
            theirs.close()
            sender.add_worker(0, ours)
            sender.send(model(1.0), on_failure="report")
            child.join(30)
        sender.close()
    runs = [run for run in judged(tmp_path).runs if len(run.machines) > 1]

    followed = follow(tools, runs)

    assert [(finding.line.place, finding.what) for finding in followed.findings] == []
    assert (followed.accepted, followed.left_out) == (1, {})
    assert [machine.role for run in runs for machine in run.machines].count("receiver") == 2


def test_an_ack_that_was_sent_without_the_workers_knowledge_is_followed(
    tools: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.engine.receiver_driver.Steady", type("Unsteady", (), {}))
    monkeypatch.setattr("weightsync.engine.receiver_driver.flush", lambda link: False)
    verdict = judged(recorded(tmp_path, lambda: _sends(1)))
    [run] = verdict.runs
    closed = [moment for each in run.machines for moment in each.moments if isinstance(moment.event, receiving.Close)]
    assert {moment.state_before for moment in closed} == {State.AWAITING_ACK}

    followed = follow(tools, verdict.runs)

    assert (followed.accepted, followed.findings, followed.left_out) == (1, [], {})
