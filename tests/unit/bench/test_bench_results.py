"""Evaluation of the bench's numbers: JSON, ratios, targets, noise, comparison, the page and the picture."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import performance
import pytest
import skipping
import torch
from protocolgen.source import SpecError

from weightsync import ConfigurationError, MissingExtraError
from weightsync.bench import (
    Case,
    Change,
    Floor,
    Kind,
    Label,
    Measured,
    Results,
    SchemeName,
    Settings,
    Verdict,
    compare,
    noise,
    ratio,
    running,
    targets,
)
from weightsync.bench.reporting import case_rows, compared_rows, left_out, plot, reached, target_rows
from weightsync.bench.schemes import make_scheme
from weightsync.bench.settings import MIB, PAYLOADS, Device, members, numbers, payloads
from weightsync.cli._app import write_report
from weightsync.weights.target import Mode

SHARED, PIPE = Label("shared", Kind.SCHEME, "digest"), Label("process", Kind.SCHEME, "digest")


def took(label: Label, milliseconds: float, spread: float = 0.0, **calls: int) -> Measured:
    """A record whose quartiles are ``spread`` times the median apart."""
    median = milliseconds / 1000
    return Measured(label, 9, median, median * (1 - spread / 2), median * (1 + spread / 2), **calls)


def floor(name: Floor, milliseconds: float, spread: float = 0.0) -> Measured:
    return took(Label(name.value, Kind.FLOOR), milliseconds, spread)


def case(*measured: Measured, payload: str = "L", workers: int = 2, threads: int = 1, device: str = "cpu") -> Case:
    chosen = PAYLOADS[payload]
    counts = (chosen.nbytes, chosen.tensors, workers, device, threads)
    return Case(payload, *counts, "digest", "weightsync bench", measured, {"ray": "Ray is not installed"})


def results(*cases: Case, **machine: str) -> Results:
    return Results({"processor": "a processor", "cores": "2", **machine}, 0.25, cases)


# ------------------------------------------------------------------------------------------------------ JSON


def test_results_survive_writing_and_reading(tmp_path: Path) -> None:
    written = results(case(floor(Floor.MEMCPY, 40), took(SHARED, 44, 0.1, trainer_calls=150, worker_calls=90)))
    write_report(written.record(), tmp_path / "a.json")

    assert Results.read(tmp_path / "a.json") == written
    assert json.loads((tmp_path / "a.json").read_text())["schema"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no results"),
        ("not JSON", "holds no results"),
        ('{"schema": 1, "machine": {}, "noise_limit": 0.25, "cases": [{"payload": "L"}]}', "holds no results"),
        ('{"schema": 1, "machine": {}, "noise_limit": 0.25, "cases": {}}', "holds no results"),
        ("[" * 100_000, "holds no results"),
        ('{"schema": 99}', "is of schema 99, and this weightsync reads 1: measure again"),
    ],
)
def test_a_file_without_valid_results_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        Results.read(tmp_path / "a.json")


def test_results_with_text_in_place_of_a_number_are_refused_when_they_are_read(tmp_path: Path) -> None:
    record = results(case(took(SHARED, 90))).record()
    record["cases"][0]["measured"][0]["median"] = "90 ms"
    (tmp_path / "a.json").write_text(json.dumps(record))

    with pytest.raises(ConfigurationError, match=r"holds no results .*Expected `float`, got `str`.*median"):
        Results.read(tmp_path / "a.json")


@pytest.mark.parametrize("median", [0, -1.0, float("nan")])
def test_results_with_a_time_that_is_not_positive_are_refused_when_they_are_read(median: float, tmp_path: Path) -> None:
    record = results(case(took(SHARED, 90))).record()
    record["cases"][0]["measured"][0]["median"] = median
    (tmp_path / "a.json").write_text(json.dumps(record))

    with pytest.raises(ConfigurationError, match=r"holds no results .*Expected `float` > 0.0 .*median"):
        Results.read(tmp_path / "a.json")


def test_a_later_run_of_a_case_replaces_the_earlier_one_and_other_cases_stay() -> None:
    slow, quick = case(took(SHARED, 90)), case(took(SHARED, 50))
    others = case(took(PIPE, 70)), case(took(SHARED, 60), workers=4)

    joined = results(slow, *others, note="before").joined(results(quick, note="after"))

    assert joined.cases == (*others, quick)
    assert joined.machine["note"] == "after"


def test_results_of_different_machines_are_not_joined() -> None:
    with pytest.raises(ConfigurationError, match=r"different machines are not joined \(cores: 2 and 16\)"):
        results().joined(results(cores="16"))


def test_results_of_one_machine_are_joined_although_only_one_run_used_its_gpu() -> None:
    on_cpu, on_gpu = results(case(took(SHARED, 40))), results(case(took(SHARED, 4), device="cuda"), gpu="a GPU")

    for joined in (on_cpu.joined(on_gpu), on_gpu.joined(on_cpu)):
        assert joined.machine == on_gpu.machine
        assert {each.device for each in joined.cases} == {"cpu", "cuda"}
    with pytest.raises(ConfigurationError, match=r"not joined \(gpu: a GPU and another\)"):
        on_cpu.joined(on_gpu).joined(results(gpu="another"))


# -------------------------------------------------------------------------------------- ratios, noise, targets


@pytest.mark.parametrize(
    ("label", "payload", "wanted"),
    [
        (SHARED, "S", Floor.PING),
        (SHARED, "T", Floor.MEMCPY),
        (PIPE, "M", Floor.COPY_OUT),
        (Label("torchrl-shared", Kind.TORCHRL), "L", Floor.MEMCPY),
        (Label("torchrl-multiprocess", Kind.TORCHRL), "S", Floor.PING),
        (Label("distributed", Kind.SCHEME, "digest"), "S", Floor.GLOO_PING),
        (Label("distributed", Kind.SCHEME, "digest"), "M", Floor.GLOO),
        (Label("rpc", Kind.SCHEME, "digest"), "L", Floor.RPC),
        (Label("ray", Kind.SCHEME, "digest"), "L", Floor.RAY),
        (Label("shared", Kind.ASYNC, "digest"), "S", Floor.MEMCPY),
    ],
)
def test_a_ratio_uses_the_floor_of_the_contenders_path(label: Label, payload: str, wanted: Floor) -> None:
    floors = [floor(each, 10.0 * number) for number, each in enumerate(Floor, 1)]
    measured = took(label, 60)
    found = ratio(case(*floors, measured, payload=payload), measured, 0.25)

    assert found.floor is not None
    assert found.floor.label.name == wanted.value
    assert found.value == pytest.approx(60 / (10.0 * (list(Floor).index(wanted) + 1)))


@pytest.mark.parametrize(
    ("device", "wanted"), [("cuda", Floor.D2D), ("cuda-to-cpu", Floor.D2H), ("cpu-to-cuda", Floor.H2D)]
)
def test_on_a_gpu_the_floor_is_the_copy_that_the_path_needs(device: str, wanted: Floor) -> None:
    measured = took(SHARED, 6)
    found = ratio(case(*(floor(each, 1) for each in Floor), measured, device=device), measured, 0.25)

    assert found.floor is not None
    assert found.floor.label.name == wanted.value


def test_a_floor_that_was_not_measured_gives_no_ratio() -> None:
    found = ratio(case(took(SHARED, 6)), took(SHARED, 6), 0.25)
    assert (found.floor, found.value, found.noisy) == (None, None, False)


@pytest.mark.parametrize(
    ("measured", "spread", "verdict"),
    [
        (44.0, 0.0, Verdict.REACHED),  # 1.10 is the target
        (45.0, 0.0, Verdict.MISSED),
        (44.0, 0.3, Verdict.NOISY),
        (45.0, 0.3, Verdict.NOISY),
        (80.0, 0.3, Verdict.MISSED),  # missed by the quartiles too
        (20.0, 0.3, Verdict.REACHED),
    ],
)
def test_a_target_with_a_noisy_floor_is_judged_only_if_the_quartiles_agree(
    measured: float, spread: float, verdict: Verdict
) -> None:
    found = results(case(floor(Floor.MEMCPY, 40, spread), took(SHARED, measured)))

    (line,) = targets(found)

    assert (line.verdict, line.limit, line.unit) == (verdict, 1.1, "x memcpy")
    assert noise(found) == ([] if spread == 0 else ["L, 2 workers: memcpy 30%"])
    assert f"1 {verdict.value}" in reached(found)


def test_targets_depend_on_threads_verification_calls_and_the_device() -> None:
    threaded = case(floor(Floor.MEMCPY, 40), took(SHARED, 50), threads=8)
    layout = case(took(SHARED, 50), took(Label("shared", Kind.SCHEME, "layout"), 40), payload="M")
    calls = case(took(SHARED, 1, trainer_calls=211, worker_calls=150), payload="E")
    gpu = case(took(SHARED, 0.7), device="cuda")

    found = targets(results(threaded, layout, calls, gpu))

    assert [(line.unit, line.value, line.limit, line.verdict) for line in found] == [
        ("x memcpy", 1.25, 1.3, Verdict.REACHED),
        ("x the send with verify=layout", pytest.approx(1.25), 1.3, Verdict.REACHED),
        ("calls in the trainer", 211, 210, Verdict.MISSED),
        ("calls in a worker", 150, 150, Verdict.REACHED),
        ("ms", pytest.approx(0.7), 0.6, Verdict.MISSED),
    ]


def test_the_tables_mark_noisy_values_and_list_what_was_left_out() -> None:
    measured = case(floor(Floor.MEMCPY, 40, 0.3), took(SHARED, 44, trainer_calls=1234))

    assert case_rows(measured, 0.25) == [
        ("memcpy", "40 ms", "34 ms to 46 ms", "", "", "", "", ""),
        ("shared, digest", "44 ms", "44 ms to 44 ms", "(1.1)", "(1.1)", "memcpy", "1,234", ""),
    ]
    assert target_rows(results(measured)) == [
        ("L", "2", "shared, digest", "1.1", "at most 1.1 x memcpy", "too noisy to tell")
    ]
    assert left_out(results(measured, measured)) == ["left out: ray: Ray is not installed."]


# ------------------------------------------------------------------------------------------------ comparison


@pytest.mark.parametrize(
    ("memcpy", "shared", "change", "factor"),
    [
        ((40, 0.0), (44, 0.0), Change.SAME, 1.0),
        ((80, 0.0), (88, 0.0), Change.SAME, 1.0),  # a slower machine: the ratio is the same
        ((40, 0.0), (80, 0.1), Change.SLOWER, 80 / 44),
        ((40, 0.0), (30, 0.1), Change.FASTER, 30 / 44),
        ((40, 0.0), (48, 0.3), Change.SAME, 48 / 44),  # the quartiles overlap
        ((40, 0.4), (80, 0.1), Change.NOISY, 80 / 44),
    ],
)
def test_two_runs_are_compared_in_units_of_their_own_floors(
    memcpy: tuple[float, float], shared: tuple[float, float], change: Change, factor: float
) -> None:
    first = results(case(floor(Floor.MEMCPY, 40), took(SHARED, 44)), case(took(PIPE, 9), workers=8))
    second = results(case(floor(Floor.MEMCPY, *memcpy), took(SHARED, *shared)), cores="16")

    of_memcpy, of_shared = compare(first, second)

    assert (of_shared.change, of_shared.factor) == (change, pytest.approx(factor))
    assert (of_memcpy.in_floors, of_shared.in_floors) == (False, True)
    assert compared_rows(first, second)[1][-1] == change.value


def test_absolute_times_are_compared_although_another_floor_is_noisy() -> None:
    first, second = (results(case(floor(Floor.MEMCPY, 40, 0.6), floor(Floor.TCP, time))) for time in (10, 30))

    of_memcpy, of_tcp = compare(first, second)

    assert (of_tcp.in_floors, of_tcp.change, of_tcp.factor) == (False, Change.SLOWER, pytest.approx(3.0))
    assert of_memcpy.change is Change.SAME


def test_contenders_whose_floor_one_run_lacks_are_compared_by_their_times() -> None:
    with_floor, without = case(floor(Floor.MEMCPY, 40), took(SHARED, 44)), case(took(SHARED, 88))

    for first, second, factor in ((with_floor, without, 2.0), (without, with_floor, 0.5), (without, without, 1.0)):
        (found,) = compare(results(first), results(second))
        assert (found.in_floors, found.factor) == (False, pytest.approx(factor))


def test_runs_are_compared_by_the_larger_of_their_limits_of_noise() -> None:
    first, second = (results(case(floor(Floor.MEMCPY, 40, 0.3), took(SHARED, time))) for time in (44, 440))
    tolerant = replace(second, noise_limit=0.5)

    changes = [compare(*pair)[1].change for pair in ((first, second), (first, tolerant), (tolerant, first))]

    assert changes == [Change.NOISY, Change.SLOWER, Change.FASTER]


# -------------------------------------------------------------------------------------------------- settings


def test_comma_separated_options_become_settings_and_an_equivalent_command() -> None:
    settings = Settings(
        payloads("T, S", "mine:model"), numbers("1,4"), members(SchemeName, "process,shared"), ("layout",)
    )

    assert [each.name for each in settings.payloads] == ["T", "S", "mine:model"]
    assert settings.command == (
        "weightsync bench --payloads T,S --model mine:model --workers 1,4 --schemes process,shared --verify layout "
        "--device cpu --threads 1 --seconds 20 --rounds 50"
    )
    assert dataclasses.replace(settings, noise_limit=0.5).command == f"{settings.command} --noise-limit 0.5"
    assert PAYLOADS["L"].nbytes == 256 * MIB
    assert [each.name for each in payloads(None, "mine:model")] == ["mine:model"]


def test_the_largest_payload_is_sent_only_if_it_is_named() -> None:
    assert "G" not in [each.name for each in (*payloads(None, None), *Settings().payloads)]
    assert [each.nbytes for each in payloads("G", None)] == [2048 * MIB]


@pytest.mark.parametrize(
    ("device", "mode"),
    [(Device.CPU, Mode.MAP), (Device.CUDA, Mode.MAP_ON_DEVICE), (Device.CUDA_TO_CPU, Mode.MAP)],
)
def test_the_shared_scheme_maps_weights_on_the_host_and_on_a_gpu(device: Device, mode: Mode) -> None:
    with make_scheme(SchemeName.SHARED, "auto", device) as scheme:
        assert scheme.apply_mode is mode


@pytest.mark.parametrize(("free", "fits"), [(2**40, True), (2**30, False)])
def test_a_case_that_does_not_fit_on_the_gpu_is_too_large(
    monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
    monkeypatch.setattr(running, "available_memory", lambda: 2**40)
    chosen = Settings(device=Device.CUDA, schemes=(SchemeName.SHARED, SchemeName.PROCESS))
    situation: Any = SimpleNamespace(
        settings=chosen, chosen=lambda name: True, workers=2, source=SimpleNamespace(nbytes=256 * MIB)
    )
    assert (running._too_large(situation) == "") is fits
    assert fits or "GiB of the GPU and 1 are free" in running._too_large(situation)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: payloads("X", None), "'X' is not a payload of the bench: choose from E, S, M, L, T, G."),
        (lambda: members(SchemeName, "pigeon"), "'pigeon' is not a scheme"),
        (lambda: numbers("1,two"), "not a list of whole numbers"),
        (lambda: payloads(None, "model"), "not of the form module:factory"),
        (lambda: payloads(None, "./models/small.py:make"), "not of the form module:factory: give a module's name"),
        (lambda: payloads(None, ".small:make"), "not of the form module:factory: give a module's name"),
        (lambda: Settings(workers=(0,)), "at least 1 worker"),
        (lambda: Settings(workers=(1, 10**9)), "at most 1000 workers"),
        (lambda: Settings(threads=10**5), "at most 1000 .* 1000 threads"),
        (lambda: Settings(seconds=float("nan")), "more than 0 seconds"),
        (lambda: Settings(noise_limit=float("inf")), "a finite noise limit above 0"),
        (lambda: Settings(noise_limit=float("nan")), "a finite noise limit above 0"),
        (lambda: Settings(payloads=()), "at least one payload"),
        (lambda: Settings(verify=("md5",)), "'md5' is not a value of --verify of the bench: choose from default, auto"),
    ],
)
def test_wrong_settings_are_refused(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigurationError, match=said):
        make()


# ----------------------------------------------------------------------------------------- the page, the picture


def test_the_page_is_rendered_from_the_stored_results_and_an_outdated_page_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / performance.RESULTS).mkdir(parents=True)
    page = tmp_path / performance.PAGE
    old = (f"<!-- generated: {part} -->\nold\n<!-- /generated -->\n" for part in ("summary", "results"))
    page.write_text("# P\n" + "".join(old))
    one = case(floor(Floor.MEMCPY, 40), took(SHARED, 44), workers=1)
    on_gpu = case(floor(Floor.D2D, 1), took(SHARED, 2), workers=1, device="cuda")
    found = results(one, case(floor(Floor.MEMCPY, 40), took(SHARED, 55)), on_gpu)
    write_report(found.record(), tmp_path / performance.RESULTS / "two-cores.json")

    assert performance.main(["--check"], tmp_path) == 1
    assert "run `python spec/performance.py`" in capsys.readouterr().out
    assert performance.main([], tmp_path) == 0
    assert performance.main(["--check"], tmp_path) == 0
    summary, stored = page.read_text().split("### Results: two-cores")
    on_cpu, on_gpu_too = summary.split("**two-cores** (cuda, 1 worker, 1 thread in the trainer)")
    for part in ("**two-cores** (1 worker, 1 thread in the trainer)", "| shared | 44 ms |"):
        assert part in on_cpu
    assert "| shared | 2 ms |" in on_gpu_too
    assert "55 ms" not in summary
    for part in ("| shared, digest | 44 ms |", "| shared, digest | 55 ms |", "```sh\nweightsync bench\n```"):
        assert part in stored


def test_a_stored_result_that_names_a_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / performance.RESULTS).mkdir(parents=True)
    with pytest.raises(SpecError, match="has no results"):
        performance.read(tmp_path)
    found = results(case(), note="measured in /home/somebody")
    write_report(found.record(), tmp_path / performance.RESULTS / "a.json")
    with pytest.raises(SpecError, match="names a path or a host"):
        performance.read(tmp_path)


def test_a_picture_without_the_plot_extra_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"weightsync bench --plot needs the extra 'plot'"):
        plot(results(), tmp_path / "a.png")


def test_the_picture_has_the_sizes_on_its_left_and_the_numbers_of_workers_on_its_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    skipping.require_modules("matplotlib", what="THE BENCH'S PICTURE", extra="plot")
    figure: Any = importlib.import_module("matplotlib.figure").Figure
    drawn: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, path, **_: drawn.append((self, path)))
    unverified = Label("shared", Kind.SCHEME, "layout")

    def measured(payload: str, workers: int, milliseconds: float) -> Case:
        times = floor(Floor.MEMCPY, milliseconds / 2), took(SHARED, milliseconds, 0.2), took(unverified, milliseconds)
        return case(*times, payload=payload, workers=workers)

    plot(
        results(
            measured("L", 4, 60), measured("L", 1, 40), measured("S", 4, 2), measured("S", 1, 1), measured("T", 4, 9)
        ),
        tmp_path / "a.png",
    )
    ((picture, path),) = drawn
    left, right = picture.axes
    (legend,) = picture.legends

    assert path == tmp_path / "a.png"
    assert [(axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) for axes in (left, right)] == [
        ("4 workers", "bytes", "ms"),
        ("payload L", "workers", "ms"),
    ]
    assert [(axes.get_xscale(), axes.get_yscale()) for axes in (left, right)] == [("log", "log"), ("linear", "log")]
    names = [str(label) for label in (Label("memcpy", Kind.FLOOR), SHARED, unverified)]
    assert [text.get_text() for text in legend.get_texts()] == names
    for axes, at, times in (
        (left, [PAYLOADS["S"].nbytes, PAYLOADS["L"].nbytes], [2.0, 60.0]),  # T has too many tensors
        (right, [1, 4], [40.0, 60.0]),
    ):
        assert [line.get_label() for line in axes.lines] == names
        assert [line.get_linestyle() for line in axes.lines] == ["--", "-", "-"]
        assert len({line.get_marker() for line in axes.lines[1:]}) == 2
        assert axes.lines[1].get_color() == axes.lines[2].get_color() != axes.lines[0].get_color()
        for line, share in zip(axes.lines, (0.5, 1.0, 1.0), strict=True):
            assert list(line.get_xdata()) == at
            assert list(line.get_ydata()) == pytest.approx([share * time for time in times])
        assert axes.collections[1].get_paths()[0].get_extents().ymax == pytest.approx(1.1 * max(times))  # the quartile


def test_a_picture_is_written_as_png_and_an_empty_or_unwritable_one_is_refused(tmp_path: Path) -> None:
    skipping.require_modules("matplotlib", what="THE BENCH'S PICTURE", extra="plot")
    contenders = (floor(Floor.MEMCPY, 40), took(SHARED, 44, 0.2))
    cases = [case(*contenders, workers=workers) for workers in (1, 4)]
    drawn = results(*cases, case(*contenders, payload="S", workers=4))

    plot(drawn, tmp_path / "a.png")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigurationError, match="nothing to draw"):
        plot(dataclasses.replace(drawn, cases=()), tmp_path / "b.png")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        plot(drawn, tmp_path / "no_such_folder" / "a.png")
