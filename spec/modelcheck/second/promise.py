"""A second reading of the promise of WeightSync.tla: the user's view of a state, and the steps allowed in it."""

from __future__ import annotations

from typing import NamedTuple

from modelcheck.second.bounds import Bounds
from modelcheck.second.steps import Step
from modelcheck.second.words import Node
from weightsync.protocol._tables import State

_NONE = (0, 0)
_PHASES = {State.PENDING_ASYNC.value: "outstanding", State.AWAITING_ACK.value: "waited", State.CLOSED.value: "closed"}


#: The outcomes that a worker can have right after a dispatch.
_DISPATCHED = {"NONE", "LOST", "REFUSED", "PENDING"}


class Sent(NamedTuple):
    """The user's view of one sender."""

    incarnation: int
    phase: str
    version: int
    outcomes: tuple[str, ...]
    did: frozenset[int]


class Promised(NamedTuple):
    """The user's view of a state: the version that each worker serves, and each sender."""

    served: tuple[tuple[int, int], ...]
    senders: tuple[Sent, ...]


def seen(node: Node) -> Promised:
    """The user's view of a state."""
    senders = (
        Sent(
            data.incarnation,
            "dead" if life == "dead" else _PHASES.get(state, "idle"),
            data.version,
            data.out.outcomes,
            data.out.did,
        )
        for state, life, data in zip(node.sstate, node.slife, node.sdata, strict=True)
    )
    return Promised(tuple(receiver.served[:2] for receiver in node.rdata), tuple(senders))


def starts(bounds: Bounds, node: Node) -> bool:
    """Whether a state is an initial state of the promise: nothing is connected, sent or served."""
    nothing = Sent(0, "idle", 0, ("NONE",) * bounds.workers, frozenset())
    return seen(node) == Promised((_NONE,) * bounds.workers, (nothing,) * bounds.senders)


def refines(bounds: Bounds, step: Step) -> bool:
    """Whether a step leaves the user's view unchanged, or changes it as the promise allows."""
    old, new = seen(step.old), seen(step.new)
    return old == new or _served(old, new) or (old.served == new.served and _sender_moved(old, new))


def _changed(old: tuple[object, ...], new: tuple[object, ...]) -> list[int]:
    return [place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]


def _served(old: Promised, new: Promised) -> bool:
    """Whether one worker moves to a newer version, which its sender records, or stops serving."""
    moved = _changed(old.served, new.served)
    if len(moved) != 1:
        return False
    [w] = moved
    incarnation, version = served = new.served[w]
    if served == _NONE:
        return old.senders == new.senders
    if served <= old.served[w]:
        return False
    return any(
        sender.incarnation == incarnation != 0
        and 1 <= version <= sender.version
        and new.senders == (*old.senders[:s], _noted(sender, version, w + 1), *old.senders[s + 1 :])
        for s, sender in enumerate(old.senders)
    )


def _noted(sender: Sent, version: int, w: int) -> Sent:
    current = version == sender.version and sender.phase in ("outstanding", "waited")
    return sender._replace(did=sender.did | {w}) if current else sender


def _sender_moved(old: Promised, new: Promised) -> bool:
    """Whether one sender connects, sends, gets an answer, begins or ends a wait, gives up, closes or dies."""
    moved = _changed(old.senders, new.senders)
    if len(moved) != 1:
        return False
    [s] = moved
    before, after = old.senders[s], new.senders[s]
    others = {sender.incarnation for place, sender in enumerate(old.senders) if place != s}
    return (
        _connects(before, after, others)
        or _sends(before, after)
        or _is_answered(before, after)
        or _waits(before, after)
        or _gives_up(before, after)
        or after == before._replace(phase="dead", outcomes=("NONE",) * len(before.outcomes), did=frozenset())
    )


def _connects(before: Sent, after: Sent, others: set[int]) -> bool:
    fresh = before.phase == "idle" and before.incarnation == 0 and after.incarnation not in {0, *others}
    return fresh and after == before._replace(incarnation=after.incarnation)


def _sends(before: Sent, after: Sent) -> bool:
    """G5, G11: a send, with nothing outstanding before, a new version, and at least one answer owed."""
    free = before.phase == "idle" and before.incarnation != 0
    said = after.phase in ("outstanding", "waited") and _DISPATCHED.issuperset(after.outcomes)
    fresh = before._replace(version=before.version + 1, did=frozenset(), phase=after.phase, outcomes=after.outcomes)
    return free and said and "PENDING" in after.outcomes and after == fresh


def _is_answered(before: Sent, after: Sent) -> bool:
    """G1, G2: an answer. APPLIED only for a worker that has served the version; only the last answer ends a wait."""
    moved = _changed(before.outcomes, after.outcomes)
    if len(moved) != 1:
        return False
    [w] = moved
    said = after.outcomes[w]
    if before.outcomes[w] != "PENDING" or said not in ("APPLIED", "REFUSED", "LOST"):
        return False
    if said == "APPLIED" and w + 1 not in before.did:
        return False
    ends = before.phase == "waited" and before.outcomes.count("PENDING") == 1
    noted = before._replace(outcomes=after.outcomes)
    return after == (noted._replace(phase="idle", did=frozenset()) if ends else noted)


def _waits(before: Sent, after: Sent) -> bool:
    """A wait begins, or finds no answer owed. A deadline or an exception ends the wait, but not the update."""
    if before.phase == "waited":
        return after == before._replace(phase="outstanding")
    if before.phase != "outstanding":
        return False
    if "PENDING" in before.outcomes:
        return after == before._replace(phase="waited")
    return after == before._replace(phase="idle", did=frozenset())


def _gives_up(before: Sent, after: Sent) -> bool:
    """G9: the caller abandons the update, or closes the sender for good."""
    may = after.phase == "closed" or (after.phase == "idle" and before.phase == "outstanding")
    outcomes = tuple("ABANDONED" if each == "PENDING" else each for each in before.outcomes)
    given_up = before._replace(phase=after.phase, outcomes=outcomes, did=frozenset())
    return may and before.phase not in ("closed", "dead") and after == given_up
