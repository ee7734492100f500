"""A second reading of the properties of messages, dispatches and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from modelcheck.second.bounds import Bounds
from modelcheck.second.steps import Step, StepProperty
from modelcheck.second.words import NEW_RECEIVER, NO_LINK, Entry, Message, Word
from weightsync.protocol._tables import RefusalKind, State

_CLOSED, _AWAITING = State.CLOSED.value, State.AWAITING_ACK.value
_REFUSALS = {kind.name for kind in RefusalKind}
_LAST_WORDS = {"BYE", "REFUSED", "FENCED", "FAILED"}
_ENDED = ("LOST", "REFUSED")


def _pairs(bounds: Bounds) -> Iterator[tuple[int, int]]:
    return product(bounds.all_senders, bounds.all_workers)


def _link(m: Message | Word) -> tuple[int, int, int]:
    return (m.s, m.w, m.k)


def _keeps(step: Step, s: int) -> bool:
    """Whether the sender stays alive, and is not closed after the step."""
    place = s - 1
    return step.old.slife[place] == step.new.slife[place] == "alive" and step.new.sstate[place] != _CLOSED


def messages_are_read(bounds: Bounds, step: Step) -> bool:
    """A message to a worker that disappears from an open link was read, alone, and had its effect."""
    if "Loses" in bounds.links:
        return True
    gone = step.old.messages - step.new.messages
    for m in gone:
        stays = step.old.is_open(*_link(m)) and step.new.is_open(*_link(m))
        if not stays or step.old.is_gone(m.s, m.w) or step.new.is_gone(m.s, m.w):
            continue
        alone = sum(_link(n) == _link(m) for n in gone) == 1
        first = "Reorders" in bounds.links or all(m.p <= n.p for n in step.old.messages if _link(n) == _link(m))
        if not (alone and first and _did(step, m)):
            return False
    return True


def _did(step: Step, m: Message) -> bool:
    """Whether a message had its effect: a handshake, a newer version, a stale one, or the decided one again."""
    old, new = step.old.receiver(m.w), step.new.receiver(m.w)
    if new.link != (m.s, m.k):
        return False
    if m.v == 0:
        return True
    key = (step.old.sender(m.s).incarnation, m.v, m.p)
    said = {(n.kind, (n.inc, n.v, n.p)) for n in step.new.answers if _link(n) == _link(m)}
    if old.link != (m.s, m.k):
        return False
    if key[:2] == old.decided[:2]:
        return old.answer in {"DEFERRED"} | {kind for kind, _ in said} and new == old
    if key[:2] < max(old.decided[:2], old.pending[:2]):
        return ("STALE", key) in said and new == old
    return key[:2] == old.pending[:2] or new.pending == key


def answers_are_read(bounds: Bounds, step: Step) -> bool:
    """A message to a sender that disappears from an open link was read, alone, and had the effect that it names."""
    if "Loses" in bounds.links or _is_cut(bounds, step):
        return True
    gone, come = step.old.answers - step.new.answers, step.new.answers - step.old.answers
    for m in gone:
        unclaimed = any(n.inc == m.inc and n.s != m.s for n in come)
        if _keeps(step, m.s) and not unclaimed and not _heard(bounds, step, m, not come and gone == {m}):
            return False
    return True


def _is_still(step: Step) -> bool:
    """Whether only the messages in flight to senders change."""
    return step.old._replace(answers=step.new.answers) == step.new


def _is_cut(bounds: Bounds, step: Step) -> bool:
    """Whether the step loses answers of one link, which may happen if it broke or is about to be given up."""
    links = {_link(m) for m in step.old.answers - step.new.answers}
    if "cut" not in bounds.features or not _is_still(step) or len(links) > 1:
        return False
    return all(
        step.old.is_open(*link) and (step.old.is_gone(*link[:2]) or "wrong" in bounds.features) for link in links
    )


def network_keeps_its_word(bounds: Bounds, step: Step) -> bool:
    """If only messages to senders change, at most one disappears unless a link is cut, and a new one was moved."""
    if not _is_still(step):
        return True
    gone, come = step.old.answers - step.new.answers, step.new.answers - step.old.answers
    if len(gone) > 1 and "Loses" not in bounds.links and not _is_cut(bounds, step):
        return False
    from_where = step.old.answers if "Duplicates" in bounds.links else gone
    unclaimed = [n for n in come if n.inc != step.old.sender(n.s).incarnation]
    return all(
        step.old.is_open(*_link(n))
        and any(m._replace(s=n.s) == n and m.inc == step.old.sender(m.s).incarnation for m in from_where)
        for n in unclaimed
    )


def far_ends_close_for_a_reason(bounds: Bounds, step: Step) -> bool:
    """The far end of an open link closes with its worker, by another sender, by a rejection, or as the link breaks."""
    return "break" in bounds.features or all(
        not _far_end_closes(step, s, w) or _has_reason(step, s, w) for s, w in _pairs(bounds)
    )


def _far_end_closes(step: Step, s: int, w: int) -> bool:
    link = (s, w, step.old.entry(s, w).link)
    stays = step.old.is_open(*link) and step.new.is_open(*link)
    return stays and step.new.is_gone(s, w) and not step.old.is_gone(s, w)


def _has_reason(step: Step, s: int, w: int) -> bool:
    k = step.old.entry(s, w).link
    before, after = step.old.receiver(w), step.new.receiver(w)
    if step.new.rstate[w - 1] == _CLOSED or (before != NEW_RECEIVER and after == NEW_RECEIVER):
        return True
    rejected = any(_link(m) == (s, w, k) and m.v == 0 and m.kind in _LAST_WORDS - {"BYE"} for m in step.new.answers)
    return rejected or (before.link == (s, k) and after.link != NO_LINK and after.link[0] != s)


def _heard(bounds: Bounds, step: Step, m: Word, alone: bool) -> bool:
    before, after = step.old.entry(m.s, m.w), step.new.entry(m.s, m.w)
    if m.k != before.link:
        return not alone or step.new.sender(m.s) == step.old.sender(m.s)
    own = m.inc == step.old.sender(m.s).incarnation
    if own and alone and m.kind in _REFUSALS and m.v == 0 and after.link_state == "UP":
        return False
    if not step.new.is_open(*_link(m)):
        return True
    first = "Reorders" in bounds.links or all(m.p <= n.p for n in step.old.answers if _link(n) == _link(m))
    if not own:
        return alone and first and step.new.sender(m.s) == step.old.sender(m.s)
    return alone and first and _counts(step, m, before, after)


def _counts(step: Step, m: Word, before: Entry, after: Entry) -> bool:
    if m.kind == "HELLO" and after.link_state != "UP":
        return False
    outcome = step.new.outcome(m.s, m.w)
    if step.old.owed(m.s, m.w) == m.k and m.v == step.old.sender(m.s).version:
        wanted = {"ACK": "APPLIED"} | dict.fromkeys(_REFUSALS, "REFUSED")
        if after.link_state != "UP" or wanted.get(m.kind, outcome) != outcome:
            return False
        if m.kind == "ACK" and after.served != m.v:
            return False
    if m.v and m.v == before.catching:
        caught = (after.catching, after.link_state) == (0, "UP")
        return caught and (m.kind != "ACK" or after.served == m.v)
    return True


def dispatches_reach_their_targets(bounds: Bounds, step: Step) -> bool:
    """A dispatch is sent to each target that can be reached, and each target with an open link owes an answer."""
    for s in bounds.all_senders:
        old, new = step.old.sender(s), step.new.sender(s)
        if old.serial == new.serial:
            continue
        targets = {w for w in bounds.all_workers if new.out.outcomes[w - 1] != "NONE"}
        members = {w for w in bounds.all_workers if old.members[w - 1].link_state != "NONE"}
        whole = (new.serial, new.out.version, new.incarnation) == (old.serial + 1, new.version, old.incarnation)
        to_all = new.dueAll == old.dueAll or (new.dueAll == new.version and targets == members)
        waits = step.new.blocked[s - 1] is (step.new.sstate[s - 1] == _AWAITING)
        if not (whole and to_all and waits and all(_sent(step, s, w, w in targets) for w in bounds.all_workers)):
            return False
    return True


def _sent(step: Step, s: int, w: int, target: bool) -> bool:
    entry, version = step.old.entry(s, w), step.new.sender(s).version
    outcome = "NONE" if not target else entry.link_state if entry.link_state in _ENDED else "PENDING"
    pending = outcome == "PENDING"
    if step.new.entry(s, w) != (entry._replace(due=version) if target else entry):
        return False
    if (step.new.outcome(s, w), step.new.owed(s, w)) != (outcome, entry.link if pending else 0):
        return False
    message = Message(s, w, entry.link, version, step.new.sender(s).serial)
    return not pending or step.old.is_gone(s, w) or message in step.new.messages


def links_begin_whole(bounds: Bounds, step: Step) -> bool:
    """A new link has a new number. Its Hello and its worker's missed version are sent, unless its far end is closed."""
    return all(step.new.slife[s - 1] != "alive" or _begins(bounds, step, s, w) for s, w in _pairs(bounds))


def _begins(bounds: Bounds, step: Step, s: int, w: int) -> bool:
    old, new, before, after = step.old.sender(s), step.new.sender(s), step.old.entry(s, w), step.new.entry(s, w)
    created = after.link != before.link
    due = max(old.dueAll, before.due)
    if created and (
        before.link_state not in ("NONE", *_ENDED) or after != Entry(before.link + 1, "EXPECTED", 0, due, due, 0)
    ):
        return False
    arrived = before.link_state == "EXPECTED" and not created
    if before.link_state != after.link_state and {"EXPECTED": not created, "UP": not arrived}.get(
        after.link_state, False
    ):
        return False
    connects = old.incarnation != new.incarnation
    if connects and not any(entry.link_state != "NONE" for entry in old.members):
        return False
    opens = connects and old.incarnation == 0 and before.link_state != "NONE"
    if opens and not all(new.incarnation > fence for fence in _known_fences(bounds, step)):
        return False
    begins = created and old.incarnation != 0
    return not (begins or opens) or _greeted(step, s, w, after.due if begins else 0)


def _known_fences(bounds: Bounds, step: Step) -> Iterator[int]:
    """The fences that closed senders were told."""
    return (step.old.entry(t, w).fence for t, w in _pairs(bounds) if step.old.sstate[t - 1] == _CLOSED)


def _greeted(step: Step, s: int, w: int, due: int) -> bool:
    if step.old.rstate[w - 1] == _CLOSED:
        return step.new.is_gone(s, w)
    sent = {m.v for m in step.new.messages if _link(m) == (s, w, step.new.entry(s, w).link)}
    return {0, due} <= sent and not step.new.is_gone(s, w)


def links_end_whole(bounds: Bounds, step: Step) -> bool:
    """A link that ends owes no answer, keeps the version due to its worker, and records the fence if that ended it."""
    return all(not _keeps(step, s) or _stays_or_ends(bounds, step, s, w) for s, w in _pairs(bounds))


def _stays_or_ends(bounds: Bounds, step: Step, s: int, w: int) -> bool:
    before, after = step.old.entry(s, w), step.new.entry(s, w)
    link = (s, w, before.link)
    ends = step.old.is_open(*link) and after.link_state in ("NONE", *_ENDED)
    if after.fence not in (before.fence, 0):
        fenced = {m.fence for m in step.old.answers if _link(m) == link and m.kind == "FENCED"}
        if after.fence not in fenced:
            return False
    if before.link_state in _ENDED and after.link_state not in (before.link_state, "EXPECTED", "NONE"):
        return False
    if after.link_state == "REFUSED" != before.link_state and not ends:
        return False
    if ends:
        return _ends(bounds, step, s, w)
    if step.old.is_gone(s, w) and not step.new.is_gone(s, w):
        return False
    same = before[:2] == after[:2]
    return not same or (after.fence == before.fence and (after.served == before.served or after.link_state == "UP"))


def _ends(bounds: Bounds, step: Step, s: int, w: int) -> bool:
    before, after, owed = step.old.entry(s, w), step.new.entry(s, w), step.old.owed(s, w)
    heard = [m for m in step.old.answers if _link(m) == (s, w, before.link)]
    outcome = "REFUSED" if after.link_state == "REFUSED" else "LOST"
    if step.new.owed(s, w) or step.new.is_gone(s, w) or (owed and step.new.outcome(s, w) != outcome):
        return False
    own = {m.kind for m in heard if m.v == 0 and m.inc == step.old.sender(s).incarnation}
    if not _ends_as_heard(
        after.link_state, own, heeded="Reorders" not in bounds.links and "wrong" not in bounds.features
    ):
        return False
    left = {(m.s, m.w) for m in step.new.messages} | {(m.s, m.w) for m in step.new.answers}
    if "Lingers" not in bounds.links and (s, w) in left:
        return False
    if after.link_state in _ENDED and (after.link, after.due, after.served) != (before.link, before.due, before.served):
        return False
    if step.old.is_gone(s, w):
        return "Reorders" in bounds.links or all(m.kind in _LAST_WORDS and m.v == 0 for m in heard)
    read = [m for m in heard if m not in step.new.answers]
    return "wrong" in bounds.features or any(m.kind in _LAST_WORDS and m.v == 0 for m in read)


def _ends_as_heard(link_state: str, words: set[str], *, heeded: bool) -> bool:
    """Only a goodbye ends a membership, and only a refusal makes a link REFUSED. If ``heeded``, they always do."""
    word = {"BYE": "NONE", "REFUSED": "REFUSED"}
    if any(link_state == ending and kind not in words for kind, ending in word.items()):
        return False
    return not heeded or all(link_state == {"FAILED": "LOST", **word}.get(kind, link_state) for kind in words)


DELIVERIES: Mapping[str, StepProperty] = {
    "MessagesAreRead": messages_are_read,
    "AnswersAreRead": answers_are_read,
    "NetworkKeepsItsWord": network_keeps_its_word,
    "FarEndsCloseForAReason": far_ends_close_for_a_reason,
    "DispatchesReachTheirTargets": dispatches_reach_their_targets,
    "LinksBeginWhole": links_begin_whole,
    "LinksEndWhole": links_end_whole,
}
