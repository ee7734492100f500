"""Judges a run of TLC: its exit code, its counts and the property it found violated must be as expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weightsync.model.config import Config
from weightsync.model.manifest import Configuration, Expected, Manifest
from weightsync.model.output import Counts, StatementKind, Step, Violation
from weightsync.model.places import unreached
from weightsync.model.process import Ending, Job, Outcome, by_hand
from weightsync.model.text import Library

#: The wording for violations of statements that have no name.
_NAMELESS = {
    StatementKind.DEADLOCK: "a deadlock",
    StatementKind.ASSUMPTION: "a false assumption",
    StatementKind.ASSERTION: "a false assertion",
}
#: TLC's exit codes with a verdict; 14 is a violated assertion. Other codes are errors.
_DECIDED = frozenset({*(expected.exit_code for expected in Expected), 14})
_SHOWN = {Expected.DEADLOCK: "a deadlock", Expected.ASSUMPTION: "a false assumption"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one configuration.

    Attributes:
        configuration: the configuration.
        job: the run.
        outcome: the result of the run; None if TLC was not run because the text contains a trap.
        found: the violations that TLC found, in words.
        complaints: what differs from what is expected; empty if nothing does.
        repin: the counts seen, if only the pinned counts differ, so that they may be pinned.
    """

    configuration: Configuration
    job: Job
    outcome: Outcome | None
    found: tuple[str, ...]
    complaints: tuple[str, ...]
    repin: Counts | None = None

    @property
    def as_expected(self) -> bool:
        """Whether everything is as expected."""
        return not self.complaints

    @property
    def undecided(self) -> bool:
        """Whether TLC ran and gave no verdict: it was killed, ran out of time, or met an error of its own."""
        run = self.outcome
        return run is not None and (
            run.exit_code not in _DECIDED or (run.exit_code == 0 and not run.findings.completed)
        )

    @property
    def summary(self) -> str:
        """The verdict in a few words, for a table."""
        if not self.as_expected:
            return "DIFFERS"
        return "holds" if self.configuration.expected is Expected.PASS else due(self.configuration)


def due(configuration: Configuration) -> str:
    """Return, in words, what TLC must find."""
    if configuration.violates:
        return _violated([configuration.violates])
    return _SHOWN.get(configuration.expected, "no error")


def _violated(names: Sequence[str]) -> str:
    return f"{' or '.join(names)} violated"


def judge(configuration: Configuration, job: Job, outcome: Outcome, library: Library) -> Verdict:
    """Compare the result of a run with the expected one."""
    words = (_describe_violation(violation, configuration, library) for violation in outcome.findings.violations)
    found = tuple(dict.fromkeys(words))
    complaints = list(_complaints(configuration, outcome, found))
    counts = outcome.findings.counts
    recount = () if complaints else tuple(_recounted(configuration, counts))
    repin = counts if recount else None
    return Verdict(configuration, job, outcome, found, (*complaints, *recount), repin)


def named(violation: Violation, root: str, config: Config, library: Library) -> str:
    """Return the name of the violated property; "A or B" if TLC does not say which of them it is."""
    if violation.kind in _NAMELESS:
        return _NAMELESS[violation.kind]
    if violation.subject.isidentifier():
        return violation.subject
    if violation.kind is StatementKind.TEMPORAL:
        names = [name for name in config.properties if library.is_temporal(root, name)] or list(config.properties)
    else:
        names = list(library.owners(root, config.checked, violation.subject)) or [violation.subject]
    return " or ".join(names)


def _describe_violation(violation: Violation, configuration: Configuration, library: Library) -> str:
    name = named(violation, configuration.module, configuration.config, library)
    return name if violation.kind in _NAMELESS else _violated([name])


def _complaints(configuration: Configuration, outcome: Outcome, found: Sequence[str]) -> Iterator[str]:
    findings = outcome.findings
    if outcome.ending is not Ending.EXITED:
        yield f"no verdict: {outcome.ending.value} after {outcome.seconds:.0f} s{_progress_text(outcome)}"
        return
    if findings.temporal and configuration.workers != 1:
        workers = configuration.workers
        yield f"temporal properties were checked with {workers} workers, which can miss a violation"
    if configuration.expected is Expected.PASS:
        yield from _should_hold(outcome, found)
    else:
        yield from _should_fail(configuration, outcome, found)


def _progress_text(outcome: Outcome) -> str:
    progress = outcome.findings.progress
    if progress is None:
        return ""
    return f" ({progress.distinct:,} distinct states so far, {progress.queue:,} in the queue)"


def _should_hold(outcome: Outcome, found: Sequence[str]) -> Iterator[str]:
    findings = outcome.findings
    if found:
        yield f"everything should hold, but TLC found {', '.join(found)} (exit code {outcome.exit_code})"
    elif outcome.exit_code != 0 or not findings.completed or findings.errors:
        yield f"no verdict: TLC exited with {outcome.exit_code}: {_output_text(outcome)}"
    elif findings.counts is None:
        yield "no verdict: TLC reported no counts"


def _should_fail(configuration: Configuration, outcome: Outcome, found: Sequence[str]) -> Iterator[str]:
    wanted, code = due(configuration), configuration.expected.exit_code
    if not found:
        result = "found no error" if outcome.findings.completed else f"printed: {_output_text(outcome)}"
        yield f"TLC should find {wanted}, but {result} (exit code {outcome.exit_code})"
    elif tuple(found) != (wanted,):
        yield f"TLC should find {wanted}, but found {', '.join(found)} (exit code {outcome.exit_code}){_hint(found)}"
    elif outcome.exit_code != code:
        yield f"TLC found {wanted}, but exited with {outcome.exit_code} instead of {code}"


def _hint(found: Sequence[str]) -> str:
    if any(" or " in name for name in found):
        return " (TLC does not say which: check each in its own configuration)"
    return ""


def _output_text(outcome: Outcome) -> str:
    lines = [*outcome.findings.errors, *outcome.loose]
    return " / ".join(" ".join(line.split()) for line in lines)[:2000] or "nothing"


def _recounted(configuration: Configuration, counts: Counts | None) -> Iterator[str]:
    pinned = configuration.pinned
    if pinned is None:
        if configuration.expected is Expected.PASS:
            yield f"no counts are pinned; {_REPIN} {configuration.name}"
        return
    seen = {} if counts is None else counts.known()
    differing = [
        f"{name} is {_format_count(seen.get(name))}, but {_format_count(wanted)} is pinned"
        for name, wanted in pinned.known().items()
        if seen.get(name) != wanted
    ]
    if differing:
        yield (
            f"the state graph has changed: {'; '.join(differing)}. "
            "The model, the table or TLC is different now: find out which (git diff tla spec), "
            f"and if the change is intended, {_REPIN} {configuration.name}"
        )


_REPIN = "pin the new counts with python spec/check.py model --pin"


def _format_count(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def explain(verdict: Verdict) -> Iterator[str]:
    """Yield lines that explain what differs from what is expected, and how to repeat the run."""
    yield f"{verdict.configuration.name}: {verdict.configuration.why}"
    for complaint in verdict.complaints:
        yield f"  {complaint}"
    if verdict.outcome is not None:
        for line in story(verdict.outcome.findings.trace):
            yield f"    {line}"
    yield f"  again:   weightsync check {verdict.configuration.name}"
    yield f"  by hand: {by_hand(verdict.configuration.name, verdict.job)}"


def story(trace: Iterable[Step]) -> Iterator[str]:
    """Yield the lines of a counterexample: each step, with the variables that it changes."""
    before: dict[str, str] = {}
    for step in trace:
        yield f"{step.number}. {step.action}"
        for name, value in step.values.items():
            if before.get(name) != value:
                yield f"     {name} = {' '.join(value.split())}"
        before = step.values or before


def vacuity(verdicts: Iterable[Verdict], planted: Sequence[str]) -> Iterator[str]:
    """Yield each action that no proof takes although one should, or that some proof takes although none should.

    Args:
        planted: actions that only reverts may take; some proof must take each of the others.
    """
    taken: dict[tuple[str, str, int], int] = {}
    for verdict in verdicts:
        if verdict.configuration.expected is Expected.PASS and verdict.outcome is not None:
            for action in verdict.outcome.findings.actions:
                place = action.module, action.name, action.line
                taken[place] = taken.get(place, 0) + action.taken
    for (module, name, line), count in taken.items():
        if name in planted and count:
            yield f"{module}.{name} (line {line}) is planted for reverts, but proofs take it"
        elif name not in planted and not count:
            yield f"{module}.{name} (line {line}) is never taken by any proof"


def idle(verdicts: Iterable[Verdict], manifest: Manifest) -> Iterator[str]:
    """Yield each part of the model that no proof evaluates although one should, or the other way round."""
    proofs = [each for each in verdicts if each.configuration.expected is Expected.PASS and each.outcome is not None]
    findings = [each.outcome.findings for each in proofs if each.outcome is not None]
    runs = [each.expressions for each in findings]
    library = Library(manifest.folder)
    modules = {action.module for each in findings for action in each.actions}
    known = {(each.definition, each.text) for each in manifest.idle}
    for part in unreached(runs, library, modules):
        if part.definition in manifest.planted:
            continue
        if (part.definition, part.text) not in known:
            yield f"{part.definition} (line {part.line}): no proof evaluates {part.text}"
        known.discard((part.definition, part.text))
    for definition, text in sorted(known):
        yield f"{definition}: listed as idle, but some proof evaluates it or it no longer exists: {text}"


def described(configuration: Configuration) -> dict[str, Any]:
    """Return a configuration as plain data, for `weightsync check --list --json`."""
    return {
        "name": configuration.name,
        "module": configuration.module,
        "config": configuration.config.text,
        "guarantees": list(configuration.guarantees),
        "kind": configuration.purpose.value,
        "expected": configuration.expected.value,
        "violates": configuration.violates,
        "pinned": asdict(configuration.pinned) if configuration.pinned else None,
        "set": configuration.tier.value,
    }


def record(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data, for `weightsync check --json`."""
    outcome = verdict.outcome
    data: dict[str, Any] = {
        **described(verdict.configuration),
        "as_expected": verdict.as_expected,
        "found": list(verdict.found),
        "complaints": list(verdict.complaints),
    }
    if outcome is not None:
        findings = outcome.findings
        data |= {
            "ending": outcome.ending.value,
            "exit_code": outcome.exit_code,
            "seconds": round(outcome.seconds, 2),
            "counts": asdict(findings.counts) if findings.counts else None,
            "trace": [asdict(step) for step in findings.trace],
            "actions": [asdict(action) for action in findings.actions],
            "warnings": list(findings.warnings),
            "errors": [*findings.errors, *outcome.loose] if verdict.complaints else list(findings.errors),
        }
    return data
