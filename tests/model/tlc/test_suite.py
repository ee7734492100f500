"""Whole runs of the checker on the small model: it fails when it must, and leaves nothing behind."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from modelcheck.checked import pin
from tlc_support import Recorder

from weightsync.model import Counts, Coverage, Manifest, Suite, Tier, Toolchain, Verdict, vacuity
from weightsync.model.process import Ending, Job, TlcRun, archived
from weightsync.model.toolchain import probed

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(180)]


def run(toolchain: Toolchain, manifest: Manifest, recorder: Recorder, *names: str) -> list[Verdict]:
    return Suite(toolchain, manifest, recorder).run(manifest.select(names))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_all_quick_configurations_are_as_expected_and_reported_to_the_observer(
    toolchain: Toolchain, manifest: Manifest, recorder: Recorder
) -> None:
    chosen = manifest.tier(Tier.QUICK)

    verdicts = Suite(toolchain, manifest, recorder).run(chosen)

    assert [(found.name, ()) for found in chosen] == [
        (verdict.configuration.name, verdict.complaints) for verdict in verdicts
    ]
    assert {("started", found.name) for found in chosen} <= set(recorder.seen)
    assert {("ended", found.name) for found in chosen} <= set(recorder.seen)


def test_many_runs_share_an_archive_of_tlcs_classes_and_few_runs_use_none(
    toolchain: Toolchain, manifest: Manifest, recorder: Recorder
) -> None:
    bare = replace(toolchain, options=())
    with archived(bare, runs=2) as few:
        assert few == bare
    with archived(bare, runs=300) as many:
        (option,) = many.options
        archive = Path(option.partition("=")[2])
        # With -Xshare:on, a JVM that cannot use it does not start.
        assert probed(many.java, "-Xshare:on", option, "-cp", str(many.jar))
        verdicts = Suite(many, manifest, recorder).run(manifest.tier(Tier.QUICK))

    assert all(verdict.as_expected for verdict in verdicts)
    assert not archive.exists()


def test_a_wrong_pinned_count_fails(toolchain: Toolchain, manifest: Manifest, specs: Path, recorder: Recorder) -> None:
    edit(specs / "manifest.toml", "distinct = 5", "distinct = 6")

    [verdict] = run(toolchain, Manifest.read(specs), recorder, "Holds")

    assert "distinct is 5, but 6 is pinned" in verdict.complaints[0]


def test_a_wrong_violated_property_fails(
    toolchain: Toolchain, manifest: Manifest, specs: Path, recorder: Recorder
) -> None:
    edit(specs / "manifest.toml", 'violates = "Small"', 'violates = "TypeOK"')

    [verdict] = run(toolchain, Manifest.read(specs), recorder, "TooSmall")

    assert "TLC should find TypeOK violated, but found Small violated" in verdict.complaints[0]


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        (("/\\ n < Max", "/\\ n <= Max"), "TLC found TypeOK violated"),
        (("/\\ n < Max", "/\\ n < Max - 1"), "TLC found a deadlock"),
        (("/\\ n = Max", "/\\ n >= Max - 1"), "TLC found Ends or Settles violated"),
        (("/\\ ~done", "/\\ n # 1 \\/ done"), "TLC found a deadlock"),
        (("/\\ UNCHANGED done\n\nFinish", "/\\ done' \\in {done, n = 2}\n\nFinish"), "the state graph has changed"),
    ],
)
def test_a_mutated_guard_or_update_is_caught(
    toolchain: Toolchain, manifest: Manifest, recorder: Recorder, edited: tuple[str, str], said: str
) -> None:
    edit(manifest.folder / "Counter.tla", *edited)

    [verdict] = run(toolchain, manifest, recorder, "Holds")

    assert said in " ".join(verdict.complaints)


def test_an_expression_that_tlc_gets_wrong_is_refused_before_tlc_runs(
    toolchain: Toolchain, manifest: Manifest, specs: Path, recorder: Recorder
) -> None:
    edit(specs / "Counter.tla", "n' = n + 1", "n' = [[i \\in 1..2 |-> n] EXCEPT ![1] = n + 1][1]")

    [verdict] = run(toolchain, manifest, recorder, "Holds")

    assert verdict.outcome is None
    assert re.match(r"Counter\.tla line \d+: EXCEPT on a function literal", verdict.complaints[0])


def test_temporal_properties_with_two_workers_are_refused(
    toolchain: Toolchain, manifest: Manifest, specs: Path, recorder: Recorder
) -> None:
    edit(specs / "manifest.toml", "generated = 6", "workers = 2\ngenerated = 6")

    [verdict] = run(toolchain, Manifest.read(specs), recorder, "Holds")

    assert verdict.outcome is None
    assert "Ends, Settles: temporal" in verdict.complaints[0]


def test_a_model_that_does_not_parse_is_no_verdict(
    toolchain: Toolchain, manifest: Manifest, specs: Path, recorder: Recorder
) -> None:
    edit(specs / "Counter.tla", "/\\ n < Max", "/\\ n < < Max")

    [verdict] = run(toolchain, manifest, recorder, "Holds")

    assert verdict.complaints[0].startswith("no verdict: TLC exited with 150")
    assert "Parse Error" in verdict.complaints[0]


def test_a_run_that_times_out_is_no_verdict(
    toolchain: Toolchain, manifest: Manifest, specs: Path, recorder: Recorder
) -> None:
    edit(specs / "manifest.toml", "constants = { Max = 2000 }", "constants = { Max = 2000000000 }")
    manifest = Manifest.read(specs)
    [configuration] = manifest.select(["HoldsLarger"])

    [verdict] = Suite(toolchain, manifest, recorder).run([replace(configuration, timeout=2.0)])

    assert verdict.complaints[0].startswith("no verdict: timed out after 2 s")


def test_pinning_writes_the_counts_and_nothing_else(
    toolchain: Toolchain, manifest: Manifest, specs: Path, recorder: Recorder
) -> None:
    before = (specs / "manifest.toml").read_text()
    edit(specs / "manifest.toml", "generated = 6\ndistinct = 5\ndepth = 5\n", "")
    [verdict] = run(toolchain, Manifest.read(specs), recorder, "Holds")
    assert "no counts are pinned" in verdict.complaints[0]
    assert verdict.repin is not None

    pinned = pin(Manifest.read(specs), {"Holds": verdict.repin})

    assert before == (specs / "manifest.toml").read_text()
    assert Counts(6, 5, 5) == pinned.select(["Holds"])[0].pinned


def test_coverage_finds_the_action_that_is_never_taken(
    toolchain: Toolchain, manifest: Manifest, recorder: Recorder
) -> None:
    verdicts = Suite(toolchain, manifest, recorder, Coverage.COUNTED).run(manifest.select(["Holds", "HoldsLarger"]))

    assert list(vacuity(verdicts, [])) == ["Counter.Reset (line 23) is never taken by any proof"]


def test_a_stopped_run_leaves_no_temporary_folder(
    toolchain: Toolchain, specs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    edit(specs / "manifest.toml", "constants = { Max = 2000 }", "constants = { Max = 2000000000 }")
    [configuration] = Manifest.read(specs).select(["HoldsLarger"])
    endless = TlcRun(toolchain, Job(specs, "Counter", configuration.config.text))
    begun = threading.Event()
    threading.Thread(target=lambda: (begun.wait(30), endless.stop())).start()

    outcome = endless.run(lambda _: begun.set())

    assert Ending.STOPPED is outcome.ending
    assert list(tmp_path.glob("weightsync-tlc-*")) == []


def test_a_run_stopped_before_it_starts_does_not_start(toolchain: Toolchain, specs: Path) -> None:
    never = TlcRun(toolchain, Job(specs, "Counter", "SPECIFICATION Spec\nCONSTANT Max = 3\n"))
    never.stop()

    assert Ending.STOPPED is never.run(lambda _: None).ending
