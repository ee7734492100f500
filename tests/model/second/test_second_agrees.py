"""TLC and the second checker agree on what holds and what is violated, and a disagreement is an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from modelcheck.second import Dumped, DumpError, GraphRun, Model, SecondSuite, judge_again, question_of, story
from skipping import require_tlc

from weightsync.model import Counts, Expected, Manifest, Suite, Toolchain, Verdict, find_model
from weightsync.model.config import Config
from weightsync.model.output import Findings
from weightsync.model.process import Ending, Job
from weightsync.model.process import Outcome as Ended

pytestmark = [pytest.mark.tlc, pytest.mark.timeout(300)]

FOUND = {
    "MCWorld": "all holds",
    "MCDuplicates": "all holds",
    "MCCanaryStaleAck": "NoStaleAck violated",
    "MCWithoutWaitSettled": "EverySendEnds violated",
    "MCWithoutRefusalIsNoAck": "AckedMeansServed violated",
    "MCUnfairReads": "EverySendEnds violated",
    "MCCheckerDeadlock": "a deadlock",
    "MCCheckerFalse": "Impossible violated",
}


class Unobserved:
    def started(self, configuration: object) -> None: ...
    def progressed(self, configuration: object, progress: object) -> None: ...
    def ended(self, verdict: object) -> None: ...


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return require_tlc("THE SECOND CHECKER")


@pytest.fixture(scope="module")
def model() -> Manifest:
    return Manifest.read(find_model())


def _forged_verdict(model: Manifest, name: str, *found: str, counts: Counts | None = None) -> Verdict:
    """A forged verdict of TLC."""
    [configuration] = model.select([name])
    outcome = Ended(Ending.EXITED, 0, Findings(counts=counts or configuration.pinned), 0.0)
    return Verdict(configuration, Job(model.folder, "MC", configuration.config.text), outcome, found, ())


def config_of(model: Manifest, name: str) -> Config:
    return model.select([name])[0].config


def _run(toolchain: Toolchain, model: Manifest, name: str, most: int = 10_000) -> GraphRun:
    constants = config_of(model, name).constants
    return GraphRun(toolchain, Model(model.folder, "MC", constants), most=most)


def test_tlc_and_the_second_checker_find_the_same(toolchain: Toolchain, model: Manifest) -> None:
    chosen = model.select([*FOUND, "MCCheckerAssume"])
    calls: list[str] = []
    first = Suite(toolchain, model, Unobserved()).run(chosen)
    second = SecondSuite(toolchain, model, lambda verdict: calls.append(verdict.first.configuration.name)).run(first)

    assert [verdict.complaints for verdict in second] == [()] * len(chosen)
    found = {verdict.first.configuration.name: verdict.found for verdict in second if not verdict.left_out}
    assert found == FOUND
    assert sorted(calls) == sorted(configuration.name for configuration in chosen)
    assert all(verdict.counts for verdict in second if verdict.first.configuration.expected is Expected.PASS)


def test_a_violation_that_only_one_checker_finds_is_a_complaint(toolchain: Toolchain, model: Manifest) -> None:
    dump = _run(toolchain, model, "MCCanaryStaleAck").run()
    question = question_of(config_of(model, "MCCanaryStaleAck"))

    blind = judge_again(_forged_verdict(model, "MCCanaryStaleAck"), question, dump, 0.0)
    assert blind.complaints == ("TLC found that all holds; the second checker found NoStaleAck violated",)
    assert list(story(blind))[-1].split(". ")[1] == "AnswerAck(1, 1, 1, 1)"

    seeing = _forged_verdict(model, "MCCanaryStaleAck", "TypeOK violated")
    [complaint] = judge_again(seeing, replace(question, names=("TypeOK",)), dump, 0.0).complaints
    assert complaint == "TLC found TypeOK violated; the second checker found that all holds"


def test_a_proof_of_a_graph_with_other_counts_is_a_complaint(toolchain: Toolchain, model: Manifest) -> None:
    dump = _run(toolchain, model, "MCWorld").run()
    question = question_of(config_of(model, "MCWorld"))
    assert judge_again(_forged_verdict(model, "MCWorld"), question, dump, 0.0).agrees

    [complaint] = judge_again(_forged_verdict(model, "MCWorld", counts=Counts(1, 2, 3)), question, dump, 0.0).complaints
    assert "TLC checked a graph of" in complaint


def test_a_dump_without_one_of_its_steps_raises_dump_error(
    toolchain: Toolchain, model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(toolchain, model, "MCCanaryStaleAck")
    feed = run._reader.feed
    lines: list[str] = []

    def forgetful(line: str) -> None:
        lines.append(line)
        if "STEP" not in line or sum("STEP" in each for each in lines) != 7:
            feed(line)

    monkeypatch.setattr(run._reader, "feed", forgetful)
    with pytest.raises(DumpError, match="a step was lost"):
        run.run()


def test_a_partial_dump_has_the_states_that_tlc_found_first(toolchain: Toolchain, model: Manifest) -> None:
    whole = _run(toolchain, model, "MCDuplicates").run()
    part = _run(toolchain, model, "MCDuplicates", most=50).run()
    assert (whole.became, part.became, len(part.graph.nodes)) == (Dumped.WHOLE, Dumped.PART, 51)
    assert part.graph.nodes == whole.graph.nodes[:51]

    question = question_of(config_of(model, "MCDuplicates"))
    assert "are read at most" in judge_again(_forged_verdict(model, "MCDuplicates"), question, part, 0.0).left_out


def test_a_stopped_dump_leaves_no_temporary_files(
    toolchain: Toolchain, model: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = _run(toolchain, model, "MCSubset", most=10**6)
    feed = run._reader.feed

    def stopping(line: str) -> None:
        feed(line)
        if run._reader.printed == 100:
            run.stop()

    monkeypatch.setattr(run._reader, "feed", stopping)
    with pytest.raises(DumpError, match="stopped"):
        run.run()
    assert list(tmp_path.iterdir()) == []
