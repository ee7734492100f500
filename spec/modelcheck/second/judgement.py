"""Poses the question of a configuration to the second checker, and compares the result with TLC's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from modelcheck.second.bounds import Bounds
from modelcheck.second.dump import MOST_NODES, Dump, Dumped
from modelcheck.second.examination import DEADLOCK, Broken, Question, examine, unread
from modelcheck.second.labelling import PROTOCOL
from modelcheck.second.liveness import ENDINGS
from weightsync.model.config import Config
from weightsync.model.manifest import Configuration, Expected, Purpose
from weightsync.model.output import Counts
from weightsync.model.text import Library
from weightsync.model.verdict import Verdict

_MARGIN = 500


@dataclass(frozen=True, slots=True)
class SecondVerdict:
    """The result for one configuration.

    Attributes:
        first: TLC's verdict on it.
        counts: the counts of the graph, or None if no graph was read completely.
        nodes: the number of nodes that were read.
        edges: the number of labelled edges that were read.
        broken: the properties that do not hold.
        left_out: why it was not examined, or empty.
        complaints: the disagreements with TLC. Empty if they agree.
        seconds: the time that the examination took.
    """

    first: Verdict
    counts: Counts | None = None
    nodes: int = 0
    edges: int = 0
    broken: tuple[Broken, ...] = ()
    left_out: str = ""
    complaints: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the result agrees with TLC's verdict."""
        return not self.complaints

    @property
    def found(self) -> str:
        """The result, worded as TLC's."""
        return ", ".join(map(_words, self.broken)) or "all holds"


def question_of(config: Config) -> Question:
    """The question that a configuration poses.

    Raises:
        ConfigurationError: its constants are not those of the protocol.
    """
    return Question(Bounds.read(config.constants), config.specification, config.checked, config.deadlock)


def reason_to_leave_out(configuration: Configuration, library: Library) -> str:
    """Why the second checker leaves a configuration out, or an empty text if it does not."""
    homes = [library.resolve(configuration.module, name) for name in ("Next", configuration.config.specification)]
    if any(home is None or home.module != PROTOCOL for home in homes):
        return f"its actions are not those of {PROTOCOL}.tla"
    if configuration.expected is Expected.ASSUMPTION:
        return "a false assumption has no graph"
    if configuration.pinned and configuration.pinned.distinct > MOST_NODES:
        return _too_large(configuration.pinned.distinct)
    if configuration.purpose is Purpose.CANARY:
        missing = unread(question_of(configuration.config))
        return f"no second reading of {', '.join(missing)}" if missing else ""
    return ""


def nodes_to_read(first: Verdict, question: Question) -> int:
    """The number of nodes to read: with a known violation, about twice as many as TLC needed to find it."""
    counts = first.outcome.findings.counts if first.outcome else None
    if first.configuration.expected is Expected.PASS or counts is None or not shows_early(question):
        return MOST_NODES
    return min(MOST_NODES, 2 * counts.distinct + _MARGIN)


def shows_early(question: Question) -> bool:
    """Whether a part of the graph may be enough to show a violation. Liveness needs the whole graph."""
    return not any(name in ENDINGS for name in question.names)


def _too_large(states: int) -> str:
    return f"{states:,} states or more; {MOST_NODES:,} are read at most"


def judge_again(first: Verdict, question: Question, dump: Dump, seconds: float) -> SecondVerdict:
    """Examine the graph of a configuration, and compare the result with TLC's.

    Raises:
        ConfigurationError: a property has no second reading.
    """
    if dump.became is Dumped.PART:
        if first.configuration.expected is Expected.PASS or not shows_early(question):
            return SecondVerdict(first, left_out=_too_large(len(dump.graph.nodes)), seconds=seconds)
        question = replace(question, deadlock=False)
    broken = tuple(examine(dump.graph, question))
    complaints = (*_disagreements(first, broken), *_recounted(first, dump.counts))
    return SecondVerdict(
        first, dump.counts, len(dump.graph.nodes), len(dump.graph.edges), broken, "", complaints, seconds
    )


def _words(broken: Broken) -> str:
    return "a deadlock" if broken.name == DEADLOCK else f"{broken.name} violated"


def _disagreements(first: Verdict, broken: tuple[Broken, ...]) -> Iterator[str]:
    """Yield the disagreements. TLC stops at the first violation, so it may have found only one of several."""
    ours = [_words(each) for each in broken]
    if first.outcome is None:
        yield "TLC was not run"
    for word in first.found:
        names = word.removesuffix(" violated").split(" or ")
        if word not in ours and not any(f"{name} violated" in ours for name in names):
            yield f"TLC found {word}; the second checker found {', '.join(ours) or 'that all holds'}"
    if ours and not first.found:
        yield f"TLC found that all holds; the second checker found {', '.join(ours)}"


def _recounted(first: Verdict, counts: Counts | None) -> Iterator[str]:
    """Yield a complaint if the graph of a proof, which TLC explores completely, differs in size from TLC's."""
    if first.configuration.expected is Expected.PASS and first.outcome and first.outcome.findings.counts != counts:
        yield f"TLC checked a graph of {first.outcome.findings.counts}, and printed one of {counts}"


def story(verdict: SecondVerdict) -> Iterator[str]:
    """Yield lines with the disagreements, and the path to each violation."""
    yield f"{verdict.first.configuration.name}: {verdict.first.configuration.why}"
    for complaint in verdict.complaints:
        yield f"  {complaint}"
    for broken in verdict.broken:
        yield f"  {_words(broken)} after"
        for number, (action, *arguments) in enumerate(broken.path, 1):
            yield f"    {number}. {action}({', '.join(map(_argument, arguments))})"
        if broken.lasting:
            yield f"    and then forever, in {broken.lasting} states"


def _argument(value: object) -> str:
    return f"{{{', '.join(map(str, sorted(value)))}}}" if isinstance(value, frozenset) else str(value)
