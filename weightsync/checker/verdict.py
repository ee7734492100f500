"""What a run of TLC means: its exit code, its counts and the very property violated must be as expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weightsync.checker.manifest import Configuration
from weightsync.checker.output import Action, Counts, Kind, Step, Violation
from weightsync.checker.process import Ending, Job, Outcome, by_hand
from weightsync.checker.text import Config, Library

#: What TLC exits with when it has found that a statement of each kind does not hold.
EXIT_CODES = {
    Kind.ASSUMPTION: 10,
    Kind.DEADLOCK: 11,
    Kind.INVARIANT: 12,
    Kind.ACTION: 13,
    Kind.TEMPORAL: 13,
    Kind.ASSERTION: 14,
}
#: How violations of statements without a name are called.
_NAMELESS = {Kind.DEADLOCK: "Deadlock", Kind.ASSUMPTION: "Assumption", Kind.ASSERTION: "Assertion"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one configuration.

    Attributes:
        configuration: which.
        job: what was run.
        outcome: what TLC gave; None if it was not run, since the text has a trap.
        violated: names of the properties that were found violated.
        complaints: what is not as expected; empty if all is.
        repin: whether nothing but the pinned counts is the matter, so that `--pin` may set them.
    """

    configuration: Configuration
    job: Job
    outcome: Outcome | None
    violated: tuple[str, ...]
    complaints: tuple[str, ...]
    repin: Counts | None = None

    @property
    def as_expected(self) -> bool:
        """Whether everything is as expected."""
        return not self.complaints

    @property
    def summary(self) -> str:
        """One or two words for a table."""
        if not self.as_expected:
            return "DIFFERS"
        return f"violates {self.configuration.violates}" if self.configuration.violates else "holds"


def judge(configuration: Configuration, job: Job, outcome: Outcome, library: Library) -> Verdict:
    """Compare what TLC gave with what it must give."""
    config = Config.read(job.folder / job.config)
    candidates = [_names(violation, configuration, config, library) for violation in outcome.findings.violations]
    violated = tuple(dict.fromkeys(" or ".join(names) for names in candidates))
    complaints = list(_complaints(configuration, outcome, violated))
    counts = outcome.findings.counts
    recount = () if complaints else tuple(_recounted(configuration, counts))
    repin = counts if recount or not complaints else None
    return Verdict(configuration, job, outcome, violated, (*complaints, *recount), repin)


def _names(violation: Violation, configuration: Configuration, config: Config, library: Library) -> tuple[str, ...]:
    root = configuration.module_name
    if violation.kind in _NAMELESS:
        return (_NAMELESS[violation.kind],)
    if violation.kind is Kind.TEMPORAL:
        temporal = tuple(name for name in config.properties if library.is_temporal(root, name))
        return temporal or config.properties
    if violation.subject.isidentifier():
        return (violation.subject,)
    listed = (*config.invariants, *config.properties)
    return library.owners(root, listed, violation.subject) or (violation.subject,)


def _complaints(configuration: Configuration, outcome: Outcome, violated: Sequence[str]) -> Iterator[str]:
    findings = outcome.findings
    if outcome.ending is not Ending.EXITED:
        yield f"no verdict: {outcome.ending.value} after {outcome.seconds:.0f} s{_so_far(outcome)}"
        return
    if findings.temporal and configuration.workers != 1:
        workers = configuration.workers
        yield f"temporal properties were checked by {workers} workers, which can miss a violation"
    if configuration.violates is None:
        yield from _should_hold(outcome, violated)
    else:
        yield from _should_fail(configuration.violates, outcome, violated)


def _so_far(outcome: Outcome) -> str:
    progress = outcome.findings.progress
    if progress is None:
        return ""
    return f" ({progress.distinct:,} distinct states so far, {progress.queue:,} in the queue)"


def _should_hold(outcome: Outcome, violated: Sequence[str]) -> Iterator[str]:
    findings = outcome.findings
    if violated:
        found = f"{', '.join(violated)} violated (exit code {outcome.exit_code})"
        yield f"everything should hold, and TLC found {found}"
    elif outcome.exit_code != 0 or not findings.completed or findings.errors:
        yield f"no verdict: TLC exited with {outcome.exit_code}: {_said(outcome)}"
    elif findings.counts is None:
        yield "no verdict: TLC gave no counts"


def _should_fail(expected: str, outcome: Outcome, violated: Sequence[str]) -> Iterator[str]:
    findings = outcome.findings
    if not violated:
        said = "found no error" if findings.completed else f"said: {_said(outcome)}"
        yield f"{expected} should be violated, and TLC {said} (exit code {outcome.exit_code})"
    elif tuple(violated) != (expected,):
        yield f"{expected} should be violated, and TLC found {', '.join(violated)} violated{_hint(violated)}"
    elif outcome.exit_code != EXIT_CODES[findings.violations[0].kind]:
        wanted = EXIT_CODES[findings.violations[0].kind]
        yield f"{expected} is violated, but TLC exited with {outcome.exit_code} where {wanted} is due"


def _hint(violated: Sequence[str]) -> str:
    if any(" or " in name for name in violated):
        return " (TLC does not say which: give each a configuration of its own)"
    return ""


def _said(outcome: Outcome) -> str:
    lines = [*outcome.findings.errors, *outcome.loose]
    return " / ".join(" ".join(line.split()) for line in lines)[:2000] or "nothing"


def _recounted(configuration: Configuration, counts: Counts | None) -> Iterator[str]:
    pinned = configuration.pinned
    if pinned is None:
        if configuration.violates is None:
            yield f"no counts are pinned; {_REPIN} {configuration.name}"
        return
    differing = [
        f"{name} is {_shown(counts, name)} and {_shown(pinned, name)} is pinned"
        for name in ("generated", "distinct", "depth")
        if getattr(pinned, name) is not None and getattr(pinned, name) != getattr(counts, name, None)
    ]
    if differing:
        yield (
            f"the state graph is another one: {'; '.join(differing)}. "
            "The model, the table or TLC has changed: look at what did (git diff tla spec), "
            f"and if it is meant, {_REPIN} {configuration.name}"
        )


_REPIN = "pin what TLC counts now by weightsync check --pin"


def _shown(counts: Counts | None, name: str) -> str:
    value = getattr(counts, name, None)
    return "unknown" if value is None else f"{value:,}"


def explain(verdict: Verdict) -> Iterator[str]:
    """Yield the lines that tell what is not as expected, and how to run it by hand."""
    yield f"{verdict.configuration.name}: {verdict.configuration.why}"
    for complaint in verdict.complaints:
        yield f"  {complaint}"
    if verdict.outcome is not None:
        for line in story(verdict.outcome.findings.trace):
            yield f"    {line}"
    yield f"  again:   weightsync check {verdict.configuration.name}"
    yield f"  by hand: {by_hand(verdict.job)}"


def story(trace: Iterable[Step]) -> Iterator[str]:
    """Yield a counterexample, each step with the variables that it changed."""
    before: dict[str, str] = {}
    for step in trace:
        yield f"{step.number}. {step.action}"
        for name, value in step.values.items():
            if before.get(name) != value:
                yield f"     {name} = {' '.join(value.split())}"
        before = step.values or before


def never_taken(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Return the actions that no configuration of those that hold ever took, as `Module.Action`."""
    taken: dict[tuple[str, str, int], int] = {}
    for verdict in verdicts:
        if verdict.configuration.violates is None and verdict.outcome is not None:
            for action in verdict.outcome.findings.actions:
                place = _place(action)
                taken[place] = taken.get(place, 0) + action.taken
    return tuple(f"{module}.{name} (line {line})" for (module, name, line), count in taken.items() if not count)


def _place(action: Action) -> tuple[str, str, int]:
    return action.module, action.name, action.line
