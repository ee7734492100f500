"""The rules of links, and how broken rules are reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from weightsync.protocol._tables import Delivery


class Rule(Enum):
    """What the contract of `weightsync.transports.base.Link` requires."""

    GENUINE = "what arrives is what was sent, field by field"
    ARRIVES = "a message arrives, or the link breaks"
    ONCE = "a message arrives once"
    ORDER = "messages arrive in the order in which they were sent"
    PAYLOAD = "the payload's bytes arrive unchanged"
    PINNED = "a buffer is pinned as long as the link or the worker may read it"
    UNPINNED = "a buffer is unpinned once it is no longer read"
    NEVER_BLOCKS = "no method of a link blocks"
    WAKES = "a waitable is readable while there is something to receive, or the link is dead"
    QUIET = "no waitable stays readable when there is nothing to receive"
    DEATH_REPORTED = "the end of the peer, or of the link, makes `receive` raise TransportError"
    LAST_WORDS = "what was readable before a death is delivered first"
    LIVES = "a link lives until one of its ends is given up, or it is cut"
    CLOSED = "a closed link raises TransportError, has no waitables, and may be closed again"
    FREED = "closing both ends frees every descriptor and thread that they have begun"
    OWN_ERRORS = "a link raises TransportError, ProtocolError and ConfigurationError only, where its contract says so"
    STATE = "sender and receiver are where the protocol says, after every step"
    DECLARED = "what an adapter cannot reach is declared, with the reason"


class RuleViolation(AssertionError):
    """A rule was broken just now. Used inside the kit.

    Args:
        rule: the rule that was broken.
        what: how it was broken, in words.
    """

    def __init__(self, rule: Rule, what: str) -> None:
        super().__init__(f"{rule.name} ({rule.value}): {what}")
        self.rule = rule
        self.what = what


@dataclass(frozen=True, slots=True)
class Broken:
    """A broken rule, with where and how it was broken."""

    rule: Rule
    scenario: str
    #: What the kit did in this scenario; the rule was broken at the last step.
    steps: Sequence[str]
    what: str

    def __str__(self) -> str:
        last = f"step {len(self.steps)}, {self.steps[-1]}" if self.steps else "at the start"
        return f"{self.rule.name}: {self.rule.value}.\n  in {self.scenario!r}, {last}:\n  {self.what}"


@dataclass(frozen=True, slots=True)
class Conformance:
    """The result of `check_transport`."""

    delivery: Delivery | None
    #: The scenarios that passed.
    passed: Sequence[str]
    broken: Sequence[Broken]
    #: The scenarios that the adapter declared unreachable, with its reasons.
    unreachable: Mapping[str, str]
    #: The scenarios that do not apply to the declared delivery, with the reason.
    beside: Mapping[str, str]
    #: For each role, how many edges of the model's graph were replayed, and how many there are.
    covered: Mapping[str, tuple[int, int]]
    #: The edges that were not replayed, in words, each with the reason.
    unreached: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether no rule was broken."""
        return not self.broken

    def __str__(self) -> str:
        name = self.delivery.name if self.delivery else "unknown"
        lines = [f"delivery {name}: {len(self.passed)} scenarios passed, {len(self.broken)} rules broken"]
        lines += [f"- {each}" for each in self.broken]
        lines += [f"- not reached: {scenario}: {why}" for scenario, why in self.unreachable.items()]
        lines += [f"- does not apply: {scenario}: {why}" for scenario, why in self.beside.items()]
        for role, (taken, of) in self.covered.items():
            lines += [f"- {taken} of {of} edges of the {role}'s graph were replayed"] if of else []
        for why, count in Counter(self.unreached.values()).items():
            lines += [f"- {count} edges were not reached: {why}"]
        return "\n".join(lines)


class Nonconforming(AssertionError):
    """An adapter breaks rules.

    Attributes:
        conformance: the whole result.
    """

    def __init__(self, conformance: Conformance) -> None:
        super().__init__(str(conformance))
        self.conformance = conformance

    @property
    def rules(self) -> set[Rule]:
        """The rules that were broken."""
        return {broken.rule for broken in self.conformance.broken}
