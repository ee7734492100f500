"""What a run of TLC means: its exit code, its counts and the very property violated must be as expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weightsync.model.config import Config
from weightsync.model.manifest import Configuration, Expected, Manifest
from weightsync.model.output import Counts, Kind, Step, Violation
from weightsync.model.places import unreached
from weightsync.model.process import Ending, Job, Outcome, by_hand
from weightsync.model.text import Library

#: How violations of statements without a name are called.
_NAMELESS = {Kind.DEADLOCK: "a deadlock", Kind.ASSUMPTION: "a false assumption", Kind.ASSERTION: "a false assertion"}
_SHOWN = {Expected.DEADLOCK: "a deadlock", Expected.ASSUMPTION: "a false assumption"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one configuration.

    Attributes:
        configuration: which.
        job: what was run.
        outcome: what TLC gave; None if it was not run, since the text has a trap.
        found: what TLC found amiss, in words.
        complaints: what is not as expected; empty if all is.
        repin: the counts seen, if nothing but the pinned ones is the matter, so that they may be pinned.
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
    def summary(self) -> str:
        """One or two words for a table."""
        if not self.as_expected:
            return "DIFFERS"
        return "holds" if self.configuration.expected is Expected.PASS else due(self.configuration)


def due(configuration: Configuration) -> str:
    """Return what TLC must find, in words."""
    if configuration.violates:
        return _violated([configuration.violates])
    return _SHOWN.get(configuration.expected, "no error")


def _violated(names: Sequence[str]) -> str:
    return f"{' or '.join(names)} violated"


def judge(configuration: Configuration, job: Job, outcome: Outcome, library: Library) -> Verdict:
    """Compare what TLC gave with what it must give."""
    words = (_worded(violation, configuration, library) for violation in outcome.findings.violations)
    found = tuple(dict.fromkeys(words))
    complaints = list(_complaints(configuration, outcome, found))
    counts = outcome.findings.counts
    recount = () if complaints else tuple(_recounted(configuration, counts))
    repin = counts if recount else None
    return Verdict(configuration, job, outcome, found, (*complaints, *recount), repin)


def named(violation: Violation, root: str, config: Config, library: Library) -> str:
    """Return what is violated by its name in the configuration; "A or B" where TLC does not say which."""
    if violation.kind in _NAMELESS:
        return _NAMELESS[violation.kind]
    if violation.subject.isidentifier():
        return violation.subject
    if violation.kind is Kind.TEMPORAL:
        names = [name for name in config.properties if library.is_temporal(root, name)] or list(config.properties)
    else:
        names = list(library.owners(root, config.checked, violation.subject)) or [violation.subject]
    return " or ".join(names)


def _worded(violation: Violation, configuration: Configuration, library: Library) -> str:
    name = named(violation, configuration.module, configuration.config, library)
    return name if violation.kind in _NAMELESS else _violated([name])


def _complaints(configuration: Configuration, outcome: Outcome, found: Sequence[str]) -> Iterator[str]:
    findings = outcome.findings
    if outcome.ending is not Ending.EXITED:
        yield f"no verdict: {outcome.ending.value} after {outcome.seconds:.0f} s{_so_far(outcome)}"
        return
    if findings.temporal and configuration.workers != 1:
        workers = configuration.workers
        yield f"temporal properties were checked by {workers} workers, which can miss a violation"
    if configuration.expected is Expected.PASS:
        yield from _should_hold(outcome, found)
    else:
        yield from _should_fail(configuration, outcome, found)


def _so_far(outcome: Outcome) -> str:
    progress = outcome.findings.progress
    if progress is None:
        return ""
    return f" ({progress.distinct:,} distinct states so far, {progress.queue:,} in the queue)"


def _should_hold(outcome: Outcome, found: Sequence[str]) -> Iterator[str]:
    findings = outcome.findings
    if found:
        yield f"everything should hold, and TLC found {', '.join(found)} (exit code {outcome.exit_code})"
    elif outcome.exit_code != 0 or not findings.completed or findings.errors:
        yield f"no verdict: TLC exited with {outcome.exit_code}: {_said(outcome)}"
    elif findings.counts is None:
        yield "no verdict: TLC gave no counts"


def _should_fail(configuration: Configuration, outcome: Outcome, found: Sequence[str]) -> Iterator[str]:
    wanted, code = due(configuration), configuration.expected.exit_code
    if not found:
        said = "found no error" if outcome.findings.completed else f"said: {_said(outcome)}"
        yield f"TLC should find {wanted}, and {said} (exit code {outcome.exit_code})"
    elif tuple(found) != (wanted,):
        yield f"TLC should find {wanted}, and found {', '.join(found)} (exit code {outcome.exit_code}){_hint(found)}"
    elif outcome.exit_code != code:
        yield f"TLC found {wanted}, but exited with {outcome.exit_code} where {code} is due"


def _hint(found: Sequence[str]) -> str:
    if any(" or " in name for name in found):
        return " (TLC does not say which: give each a configuration of its own)"
    return ""


def _said(outcome: Outcome) -> str:
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
        f"{name} is {_shown(seen.get(name))} and {_shown(wanted)} is pinned"
        for name, wanted in pinned.known().items()
        if seen.get(name) != wanted
    ]
    if differing:
        yield (
            f"the state graph is another one: {'; '.join(differing)}. "
            "The model, the table or TLC has changed: look at what did (git diff tla spec), "
            f"and if it is meant, {_REPIN} {configuration.name}"
        )


_REPIN = "pin what TLC counts now by python spec/check.py model --pin"


def _shown(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def explain(verdict: Verdict) -> Iterator[str]:
    """Yield the lines that tell what is not as expected, and how to run it by hand."""
    yield f"{verdict.configuration.name}: {verdict.configuration.why}"
    for complaint in verdict.complaints:
        yield f"  {complaint}"
    if verdict.outcome is not None:
        for line in story(verdict.outcome.findings.trace):
            yield f"    {line}"
    yield f"  again:   weightsync check {verdict.configuration.name}"
    yield f"  by hand: {by_hand(verdict.configuration.name, verdict.job)}"


def story(trace: Iterable[Step]) -> Iterator[str]:
    """Yield a counterexample, each step with the variables that it changed."""
    before: dict[str, str] = {}
    for step in trace:
        yield f"{step.number}. {step.action}"
        for name, value in step.values.items():
            if before.get(name) != value:
                yield f"     {name} = {' '.join(value.split())}"
        before = step.values or before


def vacuity(verdicts: Iterable[Verdict], planted: Sequence[str]) -> Iterator[str]:
    """Yield each action whose steps are not as they should be over all proofs together.

    Args:
        verdicts: of runs that counted their actions.
        planted: actions that only the reverts may take; every other must be taken by some proof.
    """
    taken: dict[tuple[str, str, int], int] = {}
    for verdict in verdicts:
        if verdict.configuration.expected is Expected.PASS and verdict.outcome is not None:
            for action in verdict.outcome.findings.actions:
                place = action.module, action.name, action.line
                taken[place] = taken.get(place, 0) + action.taken
    for (module, name, line), count in taken.items():
        if name in planted and count:
            yield f"{module}.{name} (line {line}) is planted for reverts, and proofs take it"
        elif name not in planted and not count:
            yield f"{module}.{name} (line {line}) is never taken by any proof"


def idle(verdicts: Iterable[Verdict], manifest: Manifest) -> Iterator[str]:
    """Yield each part of the model that no proof evaluates and should, or that one evaluates and should not.

    Args:
        verdicts: of runs that counted their expressions.
        manifest: says which parts no proof evaluates.
    """
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
            yield f"{part.definition} (line {part.line}): no proof ever evaluates: {part.text}"
        known.discard((part.definition, part.text))
    for definition, text in sorted(known):
        yield f"{definition}: some proof evaluates, or there is no more, what should be idle: {text}"
