"""`WeightUpdaterBase`: the steps of a push and their order, and the outcome that it reports for each worker."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from updaters_support import Pending, Recorder, constant, raises, weights

from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    Evidence,
    Outcome,
    OutcomeKind,
    RefusedError,
    State,
    StateError,
    SyncError,
    TransportError,
    WeightUpdaterBase,
    WorkerLostError,
)

CPU, META = torch.device("cpu"), torch.device("meta")


def kinds(report: Any) -> dict[Any, OutcomeKind]:
    return {worker: outcome.kind for worker, outcome in report.outcomes.items()}


APPLIED, REFUSED, LOST = OutcomeKind.APPLIED, OutcomeKind.REFUSED, OutcomeKind.LOST
TIMED_OUT, SKIPPED = OutcomeKind.TIMED_OUT, OutcomeKind.SKIPPED

# --------------------------------------------------------------------------------------------- the hooks' order


def test_a_push_gets_maps_and_syncs_each_worker_in_order() -> None:
    updater = Recorder([0, 1])

    report = updater.push_weights()

    got = updater.log[1][1]
    assert updater.log == [
        "get",
        ("map", got),
        ("skip?", 0),
        ("skip?", 1),
        ("sync", 0, got),
        ("sync", 1, got),
    ]
    assert kinds(report) == {0: APPLIED, 1: APPLIED}
    assert {outcome.evidence for outcome in report.outcomes.values()} == {Evidence.CALL}
    assert report.ok
    assert report.version == 1
    assert report.nbytes == 12


def test_calling_an_updater_pushes_weights() -> None:
    updater = Recorder([0, 1])
    given = weights(2.0)

    report = updater(given, worker_ids=1)

    assert kinds(report) == {1: APPLIED}
    assert updater.log == [("map", given), ("skip?", 1), ("sync", 1, given)]


def test_calling_an_updater_accepts_the_options_of_push_weights() -> None:
    updater = Recorder([0, 1], worker_0=Pending(), worker_1=raises(KeyError("x")))

    assert kinds(updater(timeout=0.01, on_failure="report")) == {0: TIMED_OUT, 1: REFUSED}
    assert kinds(updater(worker_ids=1, on_failure="report")) == {1: REFUSED}
    with pytest.raises(AckTimeoutError):
        updater(worker_ids=0, timeout=0.01)


def test_without_worker_ids_one_call_serves_all_workers() -> None:
    updater = Recorder(None)

    report = updater.push_weights()

    assert updater.synced == [None]
    assert kinds(report) == {0: APPLIED}
    assert not any(entry[0] == "skip?" for entry in updater.log)


def test_a_modules_weights_are_extracted_and_a_dict_is_passed_unchanged() -> None:
    updater = Recorder([0])
    flat = {"layer.weight": torch.ones(2)}

    updater.push_weights(nn.Linear(2, 1))
    updater.push_weights(flat)

    extracted, as_it_is = (entry[2] for entry in updater.log if entry[0] == "sync")
    assert isinstance(extracted, TensorDict)
    assert set(extracted.keys()) == {"weight", "bias"}
    assert not extracted["weight"].requires_grad
    assert as_it_is is flat


def test_the_result_of_an_overridden_getter_is_not_checked() -> None:
    class Own(Recorder):
        def _get_server_weights(self) -> Any:
            time.sleep(0.01)

    updater = Own([0])
    report = updater.push_weights()

    assert updater.log[-1] == ("sync", 0, None)
    assert (report.ok, report.nbytes, report.pack_s >= 0.01, report.apply_s > 0) == (True, 0, True, True)


@pytest.mark.parametrize("given", [3, "weights", [torch.ones(2)]])
def test_other_types_of_weights_are_refused(given: Any) -> None:
    updater = Recorder([0])

    with pytest.raises(ConfigurationError, match="Nothing was pushed"):
        updater.push_weights(given)

    assert updater.log == [("map", given)]  # the mapping may accept other types


# --------------------------------------------------------------------------------------------------- worker ids


@pytest.mark.parametrize(
    ("known", "given", "called"),
    [
        ([0, 1, 2], None, [0, 1, 2]),
        ([0, 1, 2], 2, [2]),
        ([0, 1, 2], torch.tensor(2), [2]),
        ([0, 1, 2], [2, 0], [2, 0]),
        ([0, 1, 2], (1, 1), [1]),
        ([CPU, META], None, [CPU, META]),
        ([CPU, META], META, [META]),
        ([CPU, META], [CPU], [CPU]),
        ([CPU, META], "meta", [META]),
        (None, 7, [7]),
        (None, [CPU, META], [CPU, META]),
    ],
)
def test_worker_ids_are_ints_or_devices_one_or_a_list(known: Any, given: Any, called: list[Any]) -> None:
    updater = Recorder(known)

    report = updater.push_weights(worker_ids=given)

    assert updater.synced == called
    assert kinds(report) == dict.fromkeys(called, APPLIED)


@pytest.mark.parametrize("given", ["meta", META])
def test_a_device_matches_a_worker_id_by_its_name(given: Any) -> None:
    updater = Recorder(["cpu", "meta"])

    assert kinds(updater.push_weights(worker_ids=given)) == {"meta": APPLIED}
    assert updater.synced == ["meta"]


@pytest.mark.parametrize("given", [[], 3, [0, 3], CPU, "cuda:0", "nonsense", 1.5, True, [False], None.__class__])
def test_empty_or_unknown_worker_ids_are_a_value_error(given: Any) -> None:
    updater = Recorder([0, 1])

    with pytest.raises(ValueError, match="Nothing was pushed"):
        updater.push_weights(worker_ids=given)

    assert updater.log == []


def test_the_error_for_an_unknown_worker_id_names_those_that_there_are() -> None:
    for updater, those in ((Recorder([0, 1]), "0, 1"), (Recorder([]), "none")):
        with pytest.raises(ConfigurationError, match=rf"^unknown worker ids 3: there are {those}\. Nothing was pushed"):
            updater.push_weights(worker_ids=3)


@pytest.mark.parametrize("given", [None, [0], 0])
@pytest.mark.parametrize("ids", [2, "01"])
def test_all_worker_ids_that_returns_no_list_is_named_in_the_error(ids: Any, given: Any) -> None:
    updater = Recorder()
    updater.all_worker_ids = lambda: ids  # type: ignore[method-assign]

    with pytest.raises(
        ConfigurationError, match=rf"^all_worker_ids\(\) of Recorder returned {ids!r}: .* a list of ids"
    ):
        updater.push_weights(worker_ids=given)

    assert updater.log == []


def test_an_updater_of_no_workers_has_an_empty_report() -> None:
    report = Recorder([]).push_weights()

    assert report.outcomes == {}
    assert report.version is None


def test_workers_whose_ids_are_devices_and_numbers_are_told_apart() -> None:
    updater = Recorder([torch.device("meta"), 0, 1])

    for worker in (torch.device("meta"), 0, 1):
        assert kinds(updater.push_weights(worker_ids=worker)) == {worker: APPLIED}
    assert kinds(updater.push_weights()) == {torch.device("meta"): APPLIED, 0: APPLIED, 1: APPLIED}


@pytest.mark.parametrize("interrupted", [False, True])
def test_later_pushes_work_after_a_worker_could_not_be_added(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = Recorder()
    if interrupted:
        monkeypatch.setattr(updater._pushes._sender, "add_worker", lambda *_: raises(KeyboardInterrupt())())
    with pytest.raises((ConfigurationError, KeyboardInterrupt)):
        updater.push_weights(worker_ids=7 if interrupted else -1)
    monkeypatch.undo()

    assert kinds(updater.push_weights(worker_ids=7)) == {7: APPLIED}
    assert kinds(updater.push_weights()) == {0: APPLIED}


# --------------------------------------------------------------------------------------------------------- skips


def test_skipped_workers_are_in_the_report() -> None:
    updater = Recorder([0, 1, 2])
    updater.skipped = {1}

    report = updater.push_weights()

    assert kinds(report) == {0: APPLIED, 1: SKIPPED, 2: APPLIED}
    assert report.failed == ()
    assert updater.synced == [0, 2]


def test_all_skipped_is_a_normal_return() -> None:
    updater = Recorder([0, 1])
    updater.skipped = {0, 1}
    ran: list[int] = []
    updater.register_post_hook(lambda: ran.append(1))

    report = updater.push_weights()

    assert kinds(report) == {0: SKIPPED, 1: SKIPPED}
    assert {outcome.reason for outcome in report.outcomes.values()} == {"it was not its turn"}
    assert report.version is None
    assert updater.synced == []
    assert ran == [1]
    updater.skipped.clear()
    pushed = updater.push_weights()
    updater.skipped = {0, 1}
    report = updater.push_weights()
    assert (report.model_id, report.incarnation) == (pushed.model_id, pushed.incarnation)


# ------------------------------------------------------------------------------------------------------ failures


def test_a_worker_that_fails_is_reported_after_all_others_were_served() -> None:
    updater = Recorder([0, 1, 2], worker_1=raises(ZeroDivisionError("by zero")))

    with pytest.raises(RefusedError, match="worker 1") as failure:
        updater.push_weights()

    assert updater.synced == [0, 1, 2]
    assert kinds(failure.value.report) == {0: APPLIED, 1: REFUSED, 2: APPLIED}
    assert "ZeroDivisionError: by zero" in failure.value.refused[1]
    assert "updaters_support.py" in failure.value.report[1].remote_traceback
    assert failure.value.report[1].evidence is Evidence.CALL
    assert "add_worker" not in str(failure.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionResetError("gone"), "the call failed: ConnectionResetError: gone"),
        (EOFError(), "the call failed: EOFError"),
        (TransportError("the link failed"), "the link failed"),
    ],
)
def test_a_worker_whose_call_raises_a_connection_error_is_lost(error: Exception, message: str) -> None:
    updater = Recorder([0, 1, 2], worker_0=raises(error))

    with pytest.raises(WorkerLostError) as failure:
        updater.push_weights()

    assert updater.synced == [0, 1, 2]
    assert failure.value.lost.keys() == {0}
    assert message in failure.value.lost[0]
    assert kinds(failure.value.report) == {0: LOST, 1: APPLIED, 2: APPLIED}


def test_a_lost_worker_is_called_again_by_the_next_push() -> None:
    updater = Recorder([0, 1], worker_0=raises(ConnectionError("gone")))
    for _ in range(2):
        assert kinds(updater.push_weights(on_failure="report")) == {0: LOST, 1: APPLIED}
    updater.does.clear()

    assert kinds(updater.push_weights()) == {0: APPLIED, 1: APPLIED}
    assert len(updater._pushes._sender.workers) == 2  # its former links are forgotten


def test_each_push_to_only_lost_workers_raises_with_a_report() -> None:
    updater = Recorder([CPU], worker_cpu=raises(ConnectionError("gone")))

    for _ in range(2):
        with pytest.raises(WorkerLostError) as failure:
            updater.push_weights()
        assert failure.value.lost.keys() == {CPU}
        assert kinds(failure.value.report) == {CPU: LOST}


def test_failures_of_several_kinds_are_a_sync_error() -> None:
    updater = Recorder([0, 1], worker_0=raises(ConnectionError("gone")), worker_1=raises(KeyError("x")))

    with pytest.raises(SyncError) as failure:
        updater.push_weights()

    assert type(failure.value) is SyncError
    assert kinds(failure.value.report) == {0: LOST, 1: REFUSED}


def test_on_failure_report_returns_the_report_instead_of_raising() -> None:
    updater = Recorder([0, 1], worker_0=raises(KeyError("x")))

    report = updater.push_weights(on_failure="report")

    assert report.failed == (0,)
    assert not report.ok


def test_if_the_getter_raises_no_worker_is_called() -> None:
    class Broken(Recorder):
        def _get_server_weights(self) -> Any:
            raise LookupError("no weights")

    updater = Broken([0])

    with pytest.raises(LookupError, match="no weights"):
        updater.push_weights()

    assert updater.synced == []
    assert updater.state is State.UNINITIALIZED


# ----------------------------------------------------------------------------------------- calls that take longer


def resolve(future: Future[None], error: Exception | None = None) -> None:
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def test_futures_are_waited_for_together() -> None:
    first, second = Pending(), Pending()
    updater = Recorder([0, 1, 2], worker_0=first, worker_1=second)
    both_begun = threading.Event()

    def end() -> None:
        both_begun.wait(30)
        resolve(second.futures[0], ValueError("no"))
        resolve(first.futures[0])

    def begun() -> None:
        both_begun.set()

    updater.does["worker_2"] = begun
    thread = threading.Thread(target=end)
    thread.start()

    with pytest.raises(RefusedError) as failure:
        updater.push_weights(timeout=30)
    thread.join()

    assert kinds(failure.value.report) == {0: APPLIED, 1: REFUSED, 2: APPLIED}


def test_a_cancelled_future_is_a_refusal() -> None:
    pending = Pending()
    updater = Recorder([0], worker_0=lambda: (pending(), pending.futures[0].cancel())[0])

    assert "cancelled" in updater.push_weights(on_failure="report", timeout=30)[0].reason


def test_a_call_that_does_not_end_is_an_ack_timeout() -> None:
    pending = Pending()
    updater = Recorder([0, 1], worker_0=pending)

    with pytest.raises(AckTimeoutError) as failure:
        updater.push_weights(timeout=0.05)

    assert failure.value.pending == (0,)
    assert kinds(failure.value.report) == {0: TIMED_OUT, 1: APPLIED}
    assert "next push" in str(failure.value)
    assert "wait_async" not in str(failure.value)
    assert updater.state is State.PENDING_ASYNC


def test_the_default_timeout_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "0.05")

    with pytest.raises(TimeoutError):
        Recorder([0], worker_0=Pending()).push_weights()


def test_a_push_after_a_timeout_abandons_the_earlier_push_and_ignores_its_late_result() -> None:
    pending = Pending()
    updater = Recorder([0], worker_0=pending)
    with pytest.raises(AckTimeoutError):
        updater.push_weights(timeout=0.05)

    updater.does["worker_0"] = lambda: (resolve(pending.futures[0]), pending())[1]
    with pytest.raises(AckTimeoutError) as failure:
        updater.push_weights(timeout=0.05)

    assert failure.value.report.version == 2
    resolve(pending.futures[1])
    updater.does.clear()
    assert updater.push_weights().version == 3


def test_g11_a_call_that_fails_after_its_push_timed_out_is_logged_by_the_next_push(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pending = Pending()
    updater = Recorder([0, 1], worker_1=pending)
    with pytest.raises(AckTimeoutError):
        updater.push_weights(timeout=0.05)
    resolve(pending.futures[0], ValueError("no room for them"))
    updater.does.clear()

    assert updater.push_weights().ok
    assert [record.levelname for record in caplog.records if "no room for them" in record.message] == ["WARNING"]


def test_an_unresponsive_worker_gets_at_most_two_calls_and_later_the_newest_weights() -> None:
    pending = Pending()
    updater = Recorder([0], worker_0=pending)
    for fill in (1.0, 2.0, 3.0):
        with pytest.raises(AckTimeoutError):
            updater.push_weights(weights(fill), timeout=0.01)
    assert len(pending.futures) == 2

    updater.does.clear()
    timer = threading.Timer(0.1, lambda: [resolve(future) for future in pending.futures])
    timer.start()
    report = updater.push_weights(weights(4.0), timeout=30)
    timer.join()

    assert report.ok
    assert [constant(entry[2]) for entry in updater.log if entry[0] == "sync"] == [{1.0}, {2.0}, {4.0}]


def test_a_call_that_waits_for_earlier_ones_is_not_made_once_its_push_has_ended() -> None:
    pending = Pending()
    updater = Recorder([0], worker_0=pending)
    for fill in (1.0, 2.0, 3.0):
        with pytest.raises(AckTimeoutError):
            updater.push_weights(weights(fill), timeout=0.01)
    updater.does.clear()
    for future in pending.futures:
        resolve(future)

    assert updater.push_weights(weights(4.0), timeout=30).ok
    assert [constant(entry[2]) for entry in updater.log if entry[0] == "sync"] == [{1.0}, {2.0}, {4.0}]


def test_the_next_push_first_waits_for_a_push_whose_wait_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Pending()
    updater = Recorder([0], worker_0=pending)
    sender = updater._pushes._sender
    honest = sender.wait_async

    def interrupted(**_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sender, "wait_async", interrupted)
    with pytest.raises(KeyboardInterrupt):
        updater.push_weights()
    monkeypatch.setattr(sender, "wait_async", honest)

    resolve(pending.futures[0], ValueError("the first push's"))
    with pytest.raises(RefusedError, match="the first push's"):
        updater.push_weights()

    assert len(pending.futures) == 1
    updater.does.clear()
    assert updater.push_weights().ok


def test_the_wait_for_an_interrupted_push_ends_at_the_next_pushs_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Pending()
    updater = Recorder([0], worker_0=pending)
    with monkeypatch.context() as patch:
        patch.setattr(updater._pushes._sender, "wait_async", lambda **_: raises(KeyboardInterrupt())())
        with pytest.raises(KeyboardInterrupt):
            updater.push_weights()

    with pytest.raises(AckTimeoutError):
        updater.push_weights(timeout=0.01)
    assert len(pending.futures) == 1
    resolve(pending.futures[0])
    updater.does.clear()
    assert updater.push_weights().ok


def test_an_interrupted_call_does_not_stop_the_calls_to_other_workers() -> None:
    updater = Recorder([0, 1, 2], worker_1=raises(KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        updater.push_weights()

    assert updater.synced == [0, 1, 2]
    updater.does.clear()
    assert updater.push_weights().ok


# ------------------------------------------------------------------------------------------- one push at a time


def test_a_second_thread_that_pushes_while_the_first_waits_gets_a_state_error() -> None:
    pending = Pending()
    updater = Recorder([0], worker_0=pending)
    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(updater.push_weights(timeout=30)))
    thread.start()
    while updater.state is not State.AWAITING_ACK:
        threading.Event().wait(0.001)

    with pytest.raises(StateError, match="One push at a time"):
        updater.push_weights()
    resolve(pending.futures[0])
    thread.join()

    assert len(pending.futures) == 1
    assert reports[0].ok


def test_a_second_thread_is_refused_at_once_while_a_call_blocks() -> None:
    inside, leave = threading.Event(), threading.Event()
    updater = Recorder([0], worker_0=lambda: (inside.set(), leave.wait(30))[0])
    thread = threading.Thread(target=updater.push_weights)
    thread.start()
    assert inside.wait(30)

    with pytest.raises(StateError):
        updater.push_weights()
    leave.set()
    thread.join()

    assert updater.synced == [0]


# ---------------------------------------------------------------------------------------------------- post-hooks


def test_post_hooks_run_after_the_push_in_order_without_arguments() -> None:
    updater = Recorder([0])
    for name in "abc":
        updater.register_post_hook(lambda name=name: updater.log.append(name))

    updater.push_weights()

    assert updater.log[-3:] == ["a", "b", "c"]
    assert updater.synced == [0]
    assert len(updater.post_hooks) == 3


def test_no_post_hook_runs_after_a_push_that_raised() -> None:
    updater = Recorder([0], worker_0=raises(KeyError("x")))
    updater.register_post_hook(lambda: updater.log.append("hook"))

    with pytest.raises(RefusedError):
        updater.push_weights()
    assert "hook" not in updater.log

    updater.push_weights(on_failure="report")
    assert updater.log[-1] == "hook"


def test_an_error_of_a_post_hook_is_raised_after_the_weights_were_pushed() -> None:
    updater = Recorder([0])
    updater.register_post_hook(raises(LookupError("hook")))
    updater.register_post_hook(lambda: updater.log.append("behind it"))

    with pytest.raises(LookupError, match="hook"):
        updater.push_weights()

    assert updater.synced == [0]
    assert "behind it" not in updater.log


@pytest.mark.parametrize(
    "where", ["post_hook", "_get_server_weights", "_maybe_map_weights", "_sync_weights_with_worker"]
)
def test_no_hook_may_start_a_push(where: str) -> None:
    updater = Recorder([0])
    refused: list[StateError] = []

    def push(*_: Any, **__: Any) -> None:
        with pytest.raises(StateError) as failure:
            updater.push_weights()
        refused.append(failure.value)

    if where == "post_hook":
        updater.register_post_hook(push)
    else:
        setattr(updater, where, push)
    report = updater.push_weights()

    assert len(refused) == 1
    assert report.version == 1
    assert updater.push_weights().version == 2


async def sleeper(*_: Any) -> None:
    """An async hook, whose body would never run."""


class Sleeper:
    """An async hook that is a callable object."""

    async def __call__(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("hook", [3, sleeper, Sleeper()])
def test_post_hooks_that_are_async_or_not_callable_are_refused(hook: Any) -> None:
    updater = Recorder([0])
    with pytest.raises(ConfigurationError, match="a post-hook is a plain function without arguments, not "):
        updater.register_post_hook(hook)

    assert updater.post_hooks == []


# ------------------------------------------------------------------------------------------------ copies and forks


class NoCallsUpdater(WeightUpdaterBase):
    """An updater that makes no calls."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        pass


def hook() -> None:
    """A hook that can be pickled."""


@pytest.mark.parametrize("copied", [lambda u: pickle.loads(pickle.dumps(u)), copy.copy, copy.deepcopy])
def test_a_copy_keeps_configuration_and_hooks_but_no_push_state(copied: Any) -> None:
    updater = NoCallsUpdater("mine")
    updater.register_post_hook(hook)
    updater.register_collector(updater)
    updater.push_weights({})

    made = copied(updater)
    made.register_post_hook(hook)

    assert made.name == "mine"
    assert made.collectors is None
    assert len(updater.post_hooks) == 1
    assert made.state is State.UNINITIALIZED
    assert updater.state is State.READY
    assert made.push_weights({}).version == 1
    assert made._pushes is not updater._pushes


def test_a_forked_child_can_push_while_its_parent_is_pushing() -> None:
    updater = Recorder([0])

    def child() -> None:
        updater.does.clear()
        assert updater.state is State.UNINITIALIZED
        assert updater.push_weights().version == 1

    processes: list[Any] = []

    def fork() -> None:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        processes.append(process)

    updater.does["worker_0"] = fork
    updater.push_weights()

    assert [process.exitcode for process in processes] == [0]


def test_only_sync_weights_with_worker_must_be_overridden() -> None:
    with pytest.raises(TypeError, match="_sync_weights_with_worker"):
        WeightUpdaterBase()  # type: ignore[abstract]

    assert NoCallsUpdater("x").push_weights({}).outcomes == {
        0: Outcome(kind=APPLIED, evidence=Evidence.CALL, apply_s=pytest.approx(0.0, abs=5.0))  # type: ignore[arg-type]
    }
