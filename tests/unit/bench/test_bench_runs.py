"""Runs of the bench: a correct transfer is timed, an incorrect one is an error, and nothing outlives a run."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_workers
import pytest
import torch
from commands import assert_all_gone, marked, running
from skipping import require_modules
from typer.testing import CliRunner

from weightsync import ConfigurationError
from weightsync.bench import BenchError, Case, Floor, Kind, Label, Payload, Results, SchemeName, Settings
from weightsync.bench import running as bench_running
from weightsync.bench.floors import FloorWorkers
from weightsync.bench.models import Source, digest_of_model
from weightsync.bench.running import missing, run
from weightsync.bench.settings import PAYLOADS, payloads
from weightsync.cli._app import build

LOCAL = {Floor.PING.value, Floor.MEMCPY.value, Floor.COPY_OUT.value, Floor.TCP.value}
TINY = PAYLOADS["S"]


class Listening:
    """An observer that records the course of a run."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def began(self, cases: int) -> None:
        self.calls.append(f"{cases} cases")

    def setting_up(self, payload: Payload, workers: int) -> None:
        self.calls.append(f"{payload.name} for {workers}")

    def measured(self, samples: Mapping[Label, Sequence[float]], share: float) -> None:
        self.calls.append("round")

    def ended(self, case: Case) -> None:
        self.calls.append("ended")


@pytest.fixture(autouse=True)
def started(forkserver: object) -> None:
    """Fork the workers from the process that all tests share."""


def measure(*schemes: SchemeName, **options: Any) -> Case:
    settings = Settings(**{"payloads": (TINY,), "workers": (1,), "rounds": 2, **options, "schemes": schemes})
    (case,) = run(settings, Listening()).cases
    return case


def labels(case: Case, kind: Kind) -> set[str]:
    return {each.label.name for each in case.measured if each.label.kind is kind}


@pytest.mark.gloo
def test_every_contender_of_a_case_is_timed_equally_often_and_its_calls_are_counted() -> None:
    chosen = (SchemeName.SHARED, SchemeName.PROCESS, SchemeName.DISTRIBUTED)
    case = measure(*chosen, workers=(2,), verify=("default",))

    assert labels(case, Kind.FLOOR) == LOCAL | {Floor.GLOO.value, Floor.GLOO_PING.value}
    assert labels(case, Kind.SCHEME) == {"shared", "process", "distributed"}
    assert labels(case, Kind.ASYNC) == {"shared"}
    assert {each.count for each in case.measured} == {2}
    assert all(0 < each.low <= each.median <= each.high for each in case.measured)
    for each in case.measured:
        if each.label.kind is Kind.SCHEME:
            assert each.label.verify == case.default_verify
            assert each.trainer_calls
            assert each.worker_calls
    assert (case.nbytes, case.tensors, case.workers, dict(case.left_out)) == (2**16, 10, 2, {})


@pytest.mark.torchrl
@pytest.mark.filterwarnings("ignore:Creating .* is deprecated:DeprecationWarning")  # a warning of TorchRL's own
def test_torchrls_own_schemes_are_measured() -> None:
    require_modules("torchrl", what="TORCHRL'S SCHEMES IN THE BENCH", extra="torchrl")
    case = measure(SchemeName.TORCHRL_PIPE, SchemeName.TORCHRL_SHARED)

    assert labels(case, Kind.TORCHRL) == {"torchrl-multiprocess", "torchrl-shared"}
    assert all(each.count == 2 for each in case.measured)


@pytest.mark.ray
def test_ray_is_measured_with_its_floor(cluster: object) -> None:
    case = measure(SchemeName.RAY, verify=("default",))

    assert labels(case, Kind.FLOOR) == LOCAL | {Floor.RAY.value}
    assert labels(case, Kind.SCHEME) == {"ray"}


def test_a_run_reports_its_progress_to_its_observer() -> None:
    listening = Listening()
    run(Settings((PAYLOADS["E"],), (1,), (SchemeName.PROCESS,), ("layout",), rounds=1), listening)

    assert listening.calls == ["1 cases", "E for 1", "round", "ended"]


# --------------------------------------------------------------------------------------- what is no measurement


def test_weights_that_did_not_arrive_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.bench.schemes.serve", bench_workers.serves_other_weights_than_it_acks)

    with pytest.raises(BenchError, match="process, layout: the weights did not arrive at worker 0"):
        measure(SchemeName.PROCESS, verify=("layout",))


def test_a_floor_that_copies_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.bench.floors.FloorWorkers.copy_out", lambda self: None)

    with pytest.raises(BenchError, match="copy-out: the weights did not arrive at worker 0, 1"):
        measure(SchemeName.PROCESS, verify=("layout",), workers=(2,))


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (bench_workers.never_starts, "process, layout: worker 0 has ended"),
        (bench_workers.raises, "process, layout: worker 0 failed: ZeroDivisionError: planted"),
    ],
)
def test_a_worker_that_ends_or_fails_is_named(worker: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.bench.schemes.serve", worker)

    with pytest.raises(BenchError, match=said):
        measure(SchemeName.PROCESS, verify=("layout",))


def test_the_contender_whose_worker_is_killed_while_it_is_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FloorWorkers.copy_out

    def killing(floors: FloorWorkers) -> None:
        for process in floors.workers.processes:
            process.kill()
            process.join()
        honest(floors)

    monkeypatch.setattr(FloorWorkers, "copy_out", killing)

    with pytest.raises(BenchError, match=r"memcpy \+ copy-out: a worker has ended: floors: worker 0 \(process"):
        measure(SchemeName.PROCESS, verify=("layout",))


def test_schemes_that_are_not_installed_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_running, "installed", lambda name: False)

    assert missing(Settings()) == {
        "ray": "Ray is not installed (weightsync[ray])",
        "torchrl-multiprocess": "TorchRL is not installed (weightsync[torchrl])",
        "torchrl-shared": "TorchRL is not installed (weightsync[torchrl])",
    }
    with pytest.raises(ConfigurationError, match="nothing can be measured: Ray is not installed"):
        measure(SchemeName.RAY)
    case = measure(SchemeName.PROCESS, SchemeName.RAY, verify=("layout",), rounds=1)
    assert labels(case, Kind.SCHEME) == {"process"}
    assert set(case.left_out) == {"ray"}


def test_a_case_that_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_running, "available_memory", lambda: 2**16)
    case = measure(SchemeName.PROCESS)

    assert case.measured == ()
    assert "choose fewer schemes or workers" in case.left_out["all"]


# ---------------------------------------------------------------------------------------------- models


def test_a_payload_has_its_stated_size_and_each_change_alters_its_digest() -> None:
    source = Source(TINY, "cpu")
    seen = set()
    for _ in range(5):
        source.change()
        seen.add(digest_of_model(source.model))

    assert (source.nbytes, source.tensors, len(seen)) == (2**16, 10, 5)


@pytest.mark.parametrize("factory", ["channels_last", "transposed", "empty_first"])
def test_each_change_alters_a_users_model_with_any_kind_of_first_tensor(factory: str) -> None:
    source = Source(Payload(factory, 0, 0, f"bench_workers:{factory}"), "cpu")
    seen = set()
    for _ in range(5):
        source.change()
        seen.add(digest_of_model(source.model))

    assert len(seen) == 5


def test_each_change_alters_tied_weights_too() -> None:
    source = Source(Payload("tied", 0, 0, "bench_workers:tied"), "cpu")
    before = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}

    source.change()

    assert [name for name, tensor in source.model.state_dict().items() if torch.equal(tensor, before[name])] == []


def test_a_users_own_model_is_measured() -> None:
    case = measure(SchemeName.SHARED, payloads=payloads(None, "bench_workers:two_layers"), verify=("layout",), rounds=1)

    assert (case.payload, case.nbytes, case.tensors) == ("bench_workers:two_layers", 4 * (15 + 5 + 10 + 2), 4)
    assert labels(case, Kind.SCHEME) == {"shared"}


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("no_such_module:model", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("bench_workers:no_such_factory", "AttributeError: module 'bench_workers' has no attribute 'no_such_factory'"),
        ("./bench_workers:two_layers", "TypeError: .* relative import"),
        ("bench_workers:TINY", "TypeError: 'int' object is not callable"),
        ("bench_workers:no_module", "TypeError: it returned a str"),
        ("bench_workers:wants_a_width", "TypeError: .* missing 1 required positional argument: 'width'"),
        ("bench_workers:lacks_an_attribute", "AttributeError: module 'torch.nn' has no attribute 'planted'"),
        ("bench_workers:exits", "SystemExit: 0"),
        ("bench_workers:without_memory", "NotImplementedError: Cannot copy out of meta tensor"),
        ("bench_workers:one_number_everywhere", "RuntimeError: .* more than one element"),
        ("bench_workers:without_weights", "ValueError: it has no floating-point weights to change"),
    ],
)
def test_a_factory_without_a_usable_model_is_refused_with_a_command_to_try_it(factory: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        Source(Payload(factory, 0, 0, factory), "cpu")

    module, _, name = factory.partition(":")
    assert f"--model {factory}: " in str(refused.value)
    assert f'python -c "from {module} import {name}; print({name}())"' in str(refused.value)


def test_a_factory_that_is_not_found_is_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_running, "start_forkserver", lambda *_: pytest.fail("a process was started"))

    with pytest.raises(ConfigurationError, match="No module named 'no_such_module'"):
        measure(SchemeName.PROCESS, payloads=payloads(None, "no_such_module:model"))


# ---------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("rest", [[], ["--json", "-"]])
def test_append_without_a_json_file_is_refused(rest: list[str]) -> None:
    refused = CliRunner().invoke(build(), ["bench", "--append", *rest])

    assert isinstance(refused.exception, ConfigurationError)
    assert "--append needs --json FILE" in str(refused.exception)


def test_the_command_writes_its_results_and_appends_other_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    runner, path = CliRunner(), tmp_path / "a.json"
    for payload in ("E", "S"):
        arguments = f"bench --payloads {payload} --workers 1 --schemes process --verify layout --rounds 1".split()
        shown = runner.invoke(build(), [*arguments, "--json", str(path), "--append", "--note", "a test"])
        assert shown.exit_code == 0, shown.output

    assert [case.payload for case in Results.read(path).cases] == ["E", "S"]
    assert Results.read(path).machine["note"] == "a test"
    assert re.search(r"case 1 of 1: payload S, 1 workers", shown.output)
    assert re.search(r"process, layout +[\d.]+ ms", shown.output)

    compared = runner.invoke(build(), ["bench", "--compare", str(path), str(path)])
    assert compared.exit_code == 0, compared.output
    assert re.search(r"S +1 +process, layout .* 1\.00 \(in floors\) +same", compared.output)


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("weightsync.bench.running.run", lambda *_: pytest.fail("it measures"))
    shown = CliRunner().invoke(build(), ["bench", "--plot", str(tmp_path / "a.png")])

    assert "weightsync bench --plot needs the extra 'plot'" in str(shown.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "no/a.png"], "the picture cannot be written to no/a.png"),
        (["--append", "--json", "a.json"], "results of different machines are not joined"),
    ],
)
def test_results_that_could_not_be_written_or_joined_are_not_measured(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(json.dumps(Results({"cores": "0"}, 0.25, ()).record()))
    monkeypatch.setattr("weightsync.bench.running.run", lambda *_: pytest.fail("it measures"))

    refused = CliRunner().invoke(build(), ["bench", *arguments])

    assert isinstance(refused.exception, ConfigurationError)
    assert said in str(refused.exception)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_results_are_shown_although_a_file_cannot_be_written_in_the_end(
    option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_modules("matplotlib", what="WHAT THE BENCH SHOWS WITHOUT ITS PICTURE", extra="plot")
    folder = tmp_path / "folder"
    folder.mkdir()
    why = {"all": "takes about 9 GiB and 1 GiB are free"}

    def measured(*_: object) -> Results:
        folder.rmdir()
        return Results({"cores": "2"}, 0.25, (Case("G", 8, 1, 1, "cpu", 1, "auto", "weightsync bench", (), why),))

    monkeypatch.setattr("weightsync.bench.running.run", measured)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(build(), ["bench", option, str(folder / "a.png")])

    assert isinstance(shown.exception, ConfigurationError)
    assert "left out: G with 1 worker: takes about 9 GiB and 1 GiB are free." in shown.output


@pytest.mark.rpc
@pytest.mark.timeout(300)  # on a loaded machine its processes take most of a minute to start
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_every_process_ends_when_the_command_is_interrupted_or_killed(end: signal.Signals) -> None:
    chosen = ("--payloads", "S", "--verify", "layout", "--schemes", "process,rpc")
    endless = ("--seconds", "600", "--rounds", "1000000")
    with running("bench", *chosen, *endless, begun="7 contenders carry weights, by digest") as (process, mark):
        assert len(marked(mark)) >= 7, "this one, and two workers each of the floors, of RPC and of the pipes"
        (os.kill if end is signal.SIGKILL else os.killpg)(process.pid, end)
        assert process.stdout is not None
        rest = process.stdout.read()

        assert process.wait(60) == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[end]
        assert_all_gone(mark)
        if end is signal.SIGINT:
            assert rest.splitlines()[-1] == "weightsync: interrupted; all workers have ended."
            assert "Traceback" not in rest
