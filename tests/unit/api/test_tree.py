"""The error tree: base classes, pickling and messages."""

from __future__ import annotations

import copy
import pickle

import pytest
from msgspec.structs import replace

from weightsync import errors
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport


def report(**kinds: OutcomeKind) -> SyncReport:
    outcomes = {int(name[1:]): Outcome(kind=kind, reason=f"why{name}") for name, kind in kinds.items()}
    return SyncReport(model_id="policy", version=3, incarnation=9, outcomes=outcomes)


EXAMPLES = [
    errors.WeightSyncError("what happened"),
    errors.StateError("sender", "closed", "send", ["close"], "Make one.", steps=[("CLOSE", "ready", "closed")]),
    errors.SyncError("mixed", report(w0=OutcomeKind.LOST, w1=OutcomeKind.REFUSED)),
    errors.AckTimeoutError("late", report(w0=OutcomeKind.TIMED_OUT), [0]),
    errors.WorkerLostError("gone", None, {1: "killed"}, 7),
    errors.RefusedError("no", None, {1: "misfit"}),
    errors.ModelBusyError("served"),
    errors.PartlyLoadedError("layer 7 of 32"),
    errors.EngineError("the engine was answered 500", 500),
    errors.ConfigurationError("bad"),
    errors.ModelPathError("no such part", "a.b", "b"),
    errors.MissingExtraError("cli", "The command line"),
    errors.WorkerFailedError(1, "ValueError: a pole fell", "Traceback ...", 3, 1),
    errors.ResultTimeoutError("nothing came"),
    errors.StaleWeightsError(1, 3, 2),
    errors.LayoutError("differs", ["a"], ["b"], {"c": "shape"}),
    errors.NonFiniteError("not finite", {"a": (1, 0)}),
    errors.ProtocolError("broken", b"\x00"),
    errors.TransportError("cut"),
    errors.AuthenticationError("another key"),
    errors.SenderClosed("said goodbye"),
]

#: The base classes that the reference documents: our errors must keep them.
BASES = {
    errors.WeightSyncError: (RuntimeError,),
    errors.AckTimeoutError: (errors.SyncError, TimeoutError),
    errors.WorkerLostError: (errors.SyncError, ConnectionError),
    errors.RefusedError: (errors.SyncError,),
    errors.ModelBusyError: (TimeoutError,),
    errors.ConfigurationError: (ValueError,),
    errors.ModelPathError: (AttributeError,),
    errors.MissingExtraError: (ImportError,),
    errors.ResultTimeoutError: (TimeoutError,),
    errors.LayoutError: (KeyError, ValueError),
    errors.NonFiniteError: (ArithmeticError,),
    errors.TransportError: (ConnectionError,),
    errors.AuthenticationError: (errors.TransportError,),
    errors.SenderClosed: (errors.TransportError, ConnectionError),
}


def test_every_error_has_an_example() -> None:
    declared = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)}

    assert {type(example) for example in EXAMPLES} == declared


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_survives_pickling_and_copying(error: errors.WeightSyncError) -> None:
    for clone in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(clone) is type(error)
        assert vars(clone) == vars(error)
        assert str(clone) == str(error) == error.message


@pytest.mark.parametrize(("kind", "bases"), BASES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_errors_keep_their_documented_base_classes(kind: type, bases: tuple[type, ...]) -> None:
    for base in (*bases, errors.WeightSyncError, RuntimeError):
        assert issubclass(kind, base)


def test_a_state_error_names_the_object_its_state_the_call_and_the_allowed_calls() -> None:
    hinted = errors.StateError("sender", "closed", "send", ["close"], "this sender is closed. Make a new one.")
    bare = errors.StateError("scheme", "uninitialized", "get_sender", ["init_on_sender", "close"])

    assert str(hinted) == (
        "send(): this sender is closed. Make a new one. Nothing has changed: the sender is closed and allows close()."
    )
    assert str(bare) == (
        "get_sender(): the scheme is uninitialized and allows init_on_sender(), close(). Nothing has changed."
    )


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (OutcomeKind.TIMED_OUT, errors.AckTimeoutError),
        (OutcomeKind.LOST, errors.WorkerLostError),
        (OutcomeKind.REFUSED, errors.RefusedError),
        (OutcomeKind.ABANDONED, errors.SyncError),
    ],
)
def test_failures_of_one_kind_raise_their_own_error(kind: OutcomeKind, error: type[errors.SyncError]) -> None:
    failed = report(w0=OutcomeKind.APPLIED, w1=kind)

    with pytest.raises(error) as caught:
        failed.raise_on_failure()

    assert type(caught.value) is error
    assert caught.value.report is failed
    assert "version 3 of 'policy' did not reach 1 of 2 workers" in str(caught.value)
    assert "worker 1" in str(caught.value)
    assert "whyw1" in str(caught.value)


def test_workers_with_the_same_outcome_are_reported_once() -> None:
    why = {worker: Outcome(kind=OutcomeKind.REFUSED, reason="too small") for worker in (0, 1, 2, 5, 7, 8)}
    outcomes = {**why, 3: Outcome(kind=OutcomeKind.APPLIED), 4: Outcome(kind=OutcomeKind.APPLIED)}
    report = SyncReport(model_id="policy", version=1, incarnation=9, outcomes=dict(sorted(outcomes.items())))

    assert str(report).startswith(
        "version 1 of 'policy' [workers 0-2, 5, 7-8: REFUSED (too small), worker 3: APPLIED, worker 4: APPLIED] "
    )
    assert "\n  workers 0-2, 5, 7-8: REFUSED (too small)\n" in str(report.error())


def test_the_last_line_of_a_traceback_does_not_repeat_the_reason() -> None:
    outcome = Outcome(
        kind=OutcomeKind.REFUSED, reason="too small", remote_traceback="  at f()\nLayoutError: too small\n"
    )

    assert str(outcome) == "REFUSED (too small)\n  at f()\nLayoutError"


def test_failures_of_several_kinds_raise_a_sync_error() -> None:
    with pytest.raises(errors.SyncError) as caught:
        report(w0=OutcomeKind.LOST, w1=OutcomeKind.REFUSED).raise_on_failure()

    assert type(caught.value) is errors.SyncError


def test_g11_only_applied_pending_and_skipped_do_not_raise() -> None:
    report(w0=OutcomeKind.APPLIED, w1=OutcomeKind.PENDING, w2=OutcomeKind.SKIPPED).raise_on_failure()

    assert not report(w0=OutcomeKind.APPLIED, w1=OutcomeKind.PENDING).ok
    assert report(w0=OutcomeKind.APPLIED).ok


def test_the_error_does_not_call_a_worker_that_said_goodbye_a_member() -> None:
    lost = {0: Outcome(kind=OutcomeKind.LOST, reason="dead"), 1: Outcome(kind=OutcomeKind.LOST, reason="said goodbye")}
    both = SyncReport(model_id="policy", version=1, incarnation=9, outcomes=lost, left={1: "it was closed"})
    gone = replace(both, outcomes={1: lost[1]})

    for report, remains in ((both, True), (gone, False)):
        text = str(report.error())
        assert ("A lost worker stays a member" in text) is remains
        assert "A worker that said goodbye is no longer a member" in text


def test_the_error_of_a_fenced_sender_has_the_fence() -> None:
    outcome = Outcome(kind=OutcomeKind.LOST, reason="FENCED", fence=12)
    report = SyncReport(model_id="policy", version=1, incarnation=9, outcomes={0: outcome})

    with pytest.raises(errors.WorkerLostError) as caught:
        report.raise_on_failure()

    assert caught.value.fence == 12
