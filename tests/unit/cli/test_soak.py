"""`weightsync soak`: a run of each action finds nothing, and planted faults are found."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from fleet import PATIENCE
from rpc_processes import run_in_own_process
from typer.testing import CliRunner

from weightsync import ConfigurationError, OutcomeKind, TransportError
from weightsync.cli._app import build
from weightsync.cli.soak import soak as command
from weightsync.local_workers import LocalWorker, SchemeName
from weightsync.soak import run
from weightsync.soak.members import RpcMembers
from weightsync.soak.run import WEIGHTS, Action, Soak, Tally, Usage
from weightsync.soak.worker import Look, Request, SoakModel, _Worker


class EachActionSoak(Soak):
    """A soak that takes each action once, in the order of the enum, and ends."""

    def run_each(self, *actions: Action) -> Tally:
        rest = list(actions or Action)
        self._random.choices = lambda *_: [rest.pop(0)]  # type: ignore[method-assign, assignment]

        def progress(tally: Tally) -> None:
            if not rest:
                raise KeyboardInterrupt

        return self.run(3600.0, progress)


@pytest.mark.untraced("counts descriptors, and a recording has one")
@pytest.mark.parametrize(
    "scheme",
    [
        SchemeName.SHARED,
        SchemeName.PROCESS,
        pytest.param(SchemeName.DISTRIBUTED, marks=pytest.mark.gloo),
        pytest.param(SchemeName.RPC, marks=pytest.mark.rpc),
        pytest.param(SchemeName.RAY, marks=(pytest.mark.ray, pytest.mark.timeout(600))),
    ],
)
def test_a_run_of_each_action_finds_no_fault_and_leaks_nothing(scheme: SchemeName, forkserver: Any) -> None:
    if scheme is SchemeName.RPC:
        run_in_own_process(
            forkserver, take_each_action, scheme, "fork"
        )  # another fork server would import torch once more
    else:
        take_each_action(scheme)


def take_each_action(scheme: SchemeName, method: str = "forkserver") -> None:
    soak = EachActionSoak(scheme, workers=2, nbytes=1 << 18)
    soak._context = soak._setup._context = multiprocessing.get_context(method)
    tally = soak.run_each()

    assert tally.findings == []
    assert dict(tally.actions) == dict.fromkeys(Action, 1)
    assert tally.outcomes[OutcomeKind.REFUSED] == 1
    assert tally.outcomes[OutcomeKind.APPLIED] > len(Action)
    assert tally.reads > 0
    assert tally.before is not None
    assert tally.after is not None
    assert (tally.after.threads, tally.after.children) == (tally.before.threads, tally.before.children)
    if scheme not in (SchemeName.RAY, SchemeName.RPC):  # these close connections later, in threads of their own
        torchs_own = 2 if scheme is SchemeName.DISTRIBUTED else 0  # torch keeps them after the first store
        assert tally.after.descriptors <= tally.before.descriptors + torchs_own


@pytest.fixture
def soak() -> Iterator[EachActionSoak]:
    return EachActionSoak(SchemeName.SHARED, workers=2, nbytes=1 << 12)


def test_a_worker_that_serves_other_weights_than_it_acked_is_found(
    soak: EachActionSoak, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "_next_value", _forgetful(soak))

    tally = soak.run_each(Action.SEND)

    assert any("but serves version" in finding for finding in tally.findings), tally.findings


def _forgetful(soak: Soak) -> object:
    """Return a function that fills the weights with a value other than the one it returns."""

    def next_value() -> float:
        soak.tally.versions += 1
        soak._model.set(-7.0)
        return float(soak.tally.versions)

    return next_value


def test_an_outcome_that_is_not_allowed_is_found(soak: EachActionSoak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MAY_DIE", frozenset({OutcomeKind.TIMED_OUT}))

    tally = soak.run_each(Action.KILL)

    assert any("worker" in finding and "version" in finding for finding in tally.findings), tally.findings


def test_a_model_with_weights_of_two_versions_is_not_whole() -> None:
    model = SoakModel(1 << 12, 3.0)
    assert model.is_whole()

    next(model.parameters()).data[5] = 4.0

    assert not model.is_whole()
    assert sum(parameter.nbytes for parameter in model.parameters()) == 1 << 12
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_a_worker_that_has_lost_its_link_still_answers_its_trainer() -> None:
    class Unlinked:
        version = None
        serving = staticmethod(contextlib.nullcontext)

        def receive(self, timeout: float) -> None:
            raise TransportError("the link is lost")

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        for request in (Request.LOOK, None):
            ours.send(request)
        _Worker(Unlinked(), SoakModel(8), theirs).run()  # type: ignore[arg-type]
        assert ours.recv() == Look(None, 0.0, 1, 0)


def test_over_rpc_workers_are_killed_only_while_spare_workers_wait(
    soak: EachActionSoak, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[list[Action]] = []
    monkeypatch.setattr(soak._random, "choices", lambda actions, _: chosen.append(actions) or [Action.SEND])
    soak._setup = RpcMembers(SchemeName.RPC, 8, soak._context, 2)
    soak._setup._waiting = deque()

    soak._next_action()
    soak._setup._waiting.append((3, LocalWorker("worker 2", print, (), soak._context)))
    soak._next_action()

    assert [Action.KILL in each for each in chosen] == [False, True]
    assert [len(each) for each in chosen] == [len(Action) - 1, len(Action)]


@pytest.mark.parametrize("seed", range(5))
def test_every_action_is_taken_once_before_any_is_repeated(seed: int) -> None:
    soak = Soak(SchemeName.SHARED, workers=2, nbytes=8, seed=seed)
    taken = []
    for _ in range(3 * len(Action)):
        taken.append(soak._next_action())
        soak.tally.actions[taken[-1]] += 1

    assert set(taken[: len(Action)]) == set(Action)
    assert Action.SEND in taken[len(Action) :]


def test_a_soak_needs_two_workers_and_a_weight_for_every_action() -> None:
    assert set(WEIGHTS) == set(Action)
    with pytest.raises(ConfigurationError, match="at least 2"):
        Soak(SchemeName.SHARED, workers=1)


def _sleep(channel: Connection) -> None:
    channel.send("works")
    threading.Event().wait()


def test_a_worker_whose_start_was_interrupted_runs_nothing_and_ends_with_its_trainer(forkserver: Any) -> None:
    worker = LocalWorker("worker 0", _sleep, (), forkserver)
    worker.process.start()  # as if Ctrl-C arrived before this returned
    assert not worker.channel.poll(0.5)
    worker.channel.close()
    worker._far_end.close()
    worker.join(PATIENCE)

    assert worker.process.exitcode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_soak_ended_by_a_signal_cleans_up_and_has_the_signals_exit_code(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def run(*_: Any) -> Tally:
        try:
            os.kill(os.getpid(), number)
            threading.Event().wait(PATIENCE)
        except SystemExit:
            sys.exit(1)  # as Ray's handler does
        finally:
            ended.append(True)
        return Tally()

    monkeypatch.setattr(Soak, "run", run)
    done = CliRunner().invoke(build(), ["soak"])

    assert (done.exit_code, ended) == (128 + number, [True])


def test_an_infinite_size_is_a_usage_error() -> None:
    done = CliRunner().invoke(build(), ["soak", "--mib", "inf"])

    assert done.exit_code == 2


@pytest.mark.parametrize("option", ["minutes", "mib"])
def test_nan_is_a_usage_error_although_the_range_check_of_click_accepts_it(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Soak, "run", lambda *_: pytest.fail("the soak ran"))

    with pytest.raises(typer.BadParameter, match="not a number"):
        command(**{option: math.nan})


def test_findings_give_exit_code_1_and_json_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Tally(versions=3, findings=["worker 0 lied"], before=Usage(1, 2, 3, 0), after=Usage(1, 9, 3, 0))
    monkeypatch.setattr(Soak, "run", lambda *_: found)

    done = CliRunner().invoke(build(), ["soak", "--json", str(tmp_path / "soak.json")])

    record = json.loads((tmp_path / "soak.json").read_text())
    assert done.exit_code == 1
    assert "FOUND: worker 0 lied" in done.output
    assert (record["findings"], record["usage"]["descriptors"], record["versions"]) == (["worker 0 lied"], [2, 9], 3)
