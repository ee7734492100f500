"""The mutation operators: each yields the replacements of one node of a definition.

An operator imitates a kind of mistake: a missing or negated guard, a field that is not updated, a wrong constant, a
message kept or dropped, a set too wide or too narrow, a count off by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from modelcheck.mutants.syntax import Kind, Node, Path, name

_TRUE = name("TRUE")
_SAME = name("@")
#: Families of words. Replacing a word by the next one of its family gives a plausible mistake.
_FAMILIES = (
    ("NONE", "EXPECTED", "UP", "LOST"),
    ("PENDING", "APPLIED", "REFUSED", "ABANDONED"),
    ("HELLO", "ACK", "BYE"),
    ("SUPERSEDED", "STALE", "FENCED"),
    ("uninitialized", "ready", "pending_async", "awaiting_ack", "closed"),
    ("alive", "dead", "unborn"),
    ("SEND", "SEND_ASYNC"), ("WAIT", "WAIT_SETTLED"), ("REPLY", "SETTLED", "CAUGHT_UP"), ("DEADLINE", "ABANDON"),
    ("CONNECT", "JOIN"), ("REMOVE", "CLOSE"), ("REJECTED", "TAKEOVER", "DUPLICATE"), ("UPDATE", "NEWER"),
    ("ANSWERED", "LINK_DOWN"), ("BROKEN", "ARRIVED"),
)  # fmt: skip
_SWAPPED = {"=": "#", "#": "=", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "\\in": "\\notin", "\\notin": "\\in"}
#: The operators that test whether there is a row. Such a guard is only dropped or negated as a whole.
_ASKED = ("SenderMay", "ReceiverMay")
#: Names that occur only where a rule can be removed.
_FOR_REVERTS = {"IfNot", "Rule"}
#: Arguments of an Entry or a Word that have no empty value.
_NOT_NOTHING = ("s", "w", "k", "kind", "answer")
_NUMBERS = {"0": "1", "1": "0"}
#: For each operator on sets and numbers, the operands that may replace the whole expression.
_SIDES = {"\\cup": (0, 1), "\\": (0,), "\\cap": (0, 1), "+": (0,), "-": (0,)}


@dataclass(frozen=True, slots=True)
class Site:
    """A node and its surroundings.

    Attributes:
        node: the node.
        path: its place in the definition.
        above: its ancestors, from the top.
        primed: the variables that each definition assigns.
    """

    node: Node
    path: Path
    above: tuple[Node, ...]
    primed: Mapping[str, frozenset[str]]

    @property
    def parent(self) -> Node | None:
        """The parent of the node."""
        return self.above[-1] if self.above else None

    def assigns(self) -> frozenset[str]:
        """Return the variables that the node assigns."""
        return assigned(self.node, self.primed)


def assigned(node: Node, primed: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the variables that a formula assigns, directly or in a definition that it uses."""
    found: set[str] = set()
    for _, part in node.walk():
        if part.kind is Kind.PRIME:
            found.add(part.parts[0].text)
        elif part.kind in (Kind.CALL, Kind.NAME):
            found |= primed.get(part.text, frozenset())
        elif part.kind is Kind.PREFIX and part.text == "UNCHANGED":
            found |= part.parts[0].names()
    return frozenset(found)


def keep(site: Site) -> Iterator[Node]:
    """Omit an update: its variables stay unchanged."""
    variables = sorted(site.assigns())
    unchanged = site.node.kind is Kind.PREFIX and site.node.text == "UNCHANGED"
    if not _conjunct(site) or not variables or unchanged or _composed(site.node) or _fairness(site):
        return
    yield Node(Kind.PREFIX, "UNCHANGED", (Node(Kind.TUPLE, "", tuple(name(one) for one in variables)),))


def drop(site: Site) -> Iterator[Node]:
    """Omit a guard."""
    if _conjunct(site) and _guards(site):
        yield _TRUE


def negate(site: Site) -> Iterator[Node]:
    """Negate a guard."""
    if _conjunct(site) and _guards(site):
        yield Node(Kind.PREFIX, "~", (site.node,))


def compare(site: Site) -> Iterator[Node]:
    """Negate a comparison, or make it off by one."""
    node = site.node
    if node.kind is Kind.INFIX and node.text in _SWAPPED and not site.assigns() and not _conjunct(site):
        yield Node(Kind.INFIX, _SWAPPED[node.text], node.parts)


def stay(site: Site) -> Iterator[Node]:
    """Leave one of several updated fields unchanged."""
    new_value = site.parent is not None and site.parent.kind is Kind.UPDATE and site.path[-1] == 1
    if new_value and site.node != _SAME and len(site.above[-2].parts) > 2:
        yield _SAME


def alternative(site: Site) -> Iterator[Node]:
    """Omit one of the branches of an IF or a CASE."""
    if site.node.kind is Kind.IF and "Rule" not in site.node.parts[0].names():
        yield from site.node.parts[1:]
    elif site.node.kind is Kind.CASE and len(site.node.parts) > 2:
        for place, arm in enumerate(site.node.parts):
            if arm.kind is Kind.ARM:
                yield Node(Kind.CASE, "", (*site.node.parts[:place], *site.node.parts[place + 1 :]))


def either(site: Site) -> Iterator[Node]:
    """Omit one of several alternatives of a condition."""
    if site.node.kind is Kind.OR and not any(names_rule(part) for part in site.node.parts):
        for place, part in enumerate(site.node.parts):
            if part.names() & _FOR_REVERTS:
                continue
            rest = (*site.node.parts[:place], *site.node.parts[place + 1 :])
            yield rest[0] if len(rest) == 1 else Node(Kind.OR, "", rest)


def narrow(site: Site) -> Iterator[Node]:
    """Omit a part of a condition inside an expression."""
    parent = site.parent
    inside = parent is not None and parent.kind is Kind.AND and not _binds(site.node)
    if inside and not site.assigns() and not _conjunct(site):
        yield _TRUE


def side(site: Site) -> Iterator[Node]:
    """Replace an operation on sets or numbers by one of its operands."""
    if site.node.kind is Kind.INFIX:
        for place in _SIDES.get(site.node.text, ()):
            yield site.node.parts[place]


def larger(site: Site) -> Iterator[Node]:
    """Replace a maximum by one of its arguments."""
    if site.node.kind is Kind.CALL and site.node.text == "Max":
        yield from site.node.parts


def sieve(site: Site) -> Iterator[Node]:
    """Omit the filter of a set."""
    if site.node.kind is Kind.FILTER:
        yield site.node.parts[0].parts[0]


def network(site: Site) -> Iterator[Node]:
    """Drop a post, drop a receive, keep messages on an ended link, or skip a close."""
    if site.parent is not None and site.parent.kind is Kind.INFIX and site.parent.parts[0].kind is Kind.PRIME:
        return
    kept = {"Posted": 0, "Taken": 0}
    if site.node.kind is Kind.CALL and site.node.text in kept:
        yield site.node.parts[kept[site.node.text]]
    whole = {"AnswersLeft": "answers", "MessagesLeft": "messages", "MessagesBut": "messages", "Gone": "gone"}
    if site.node.kind is Kind.CALL and site.node.text in whole and not _conjunct(site):
        yield name(whole[site.node.text])


def number(site: Site) -> Iterator[Node]:
    """Make a number off by one."""
    if site.node.kind is Kind.NUMBER and site.node.text in _NUMBERS and not _index(site):
        yield Node(Kind.NUMBER, _NUMBERS[site.node.text])


def word(site: Site) -> Iterator[Node]:
    """Replace a word by another of its family."""
    if site.node.kind is not Kind.STRING or (site.parent is not None and site.parent.text in _ASKED):
        return
    plain = site.node.text.strip('"')
    for family in _FAMILIES:
        if plain in family:
            yield Node(Kind.STRING, f'"{family[(family.index(plain) + 1) % len(family)]}"')
            return


def truth(site: Site) -> Iterator[Node]:
    """Swap TRUE and FALSE."""
    if site.node in (_TRUE, name("FALSE")) and not _conjunct(site):
        yield name("FALSE" if site.node == _TRUE else "TRUE")


def unfair(site: Site) -> Iterator[Node]:
    """Omit a fairness condition."""
    if site.node.kind is Kind.CALL and site.node.text.startswith(("WF_", "SF_")):
        yield _TRUE


def forget(site: Site) -> Iterator[Node]:
    """Replace an argument of an Entry or a Word by its empty value."""
    parent = site.parent
    handed = parent is not None and parent.kind is Kind.CALL and parent.text in ("Entry", "Word")
    if handed and site.node.kind in (Kind.FIELD, Kind.NAME) and site.node.text not in _NOT_NOTHING:
        yield Node(Kind.NUMBER, "0") if site.node.text != "key" else name("NoPayload")


def _conjunct(site: Site) -> bool:
    """Whether the node is a conjunct of an action, which assigns some variable."""
    if not site.above:
        return False
    shells = (Kind.AND, Kind.LET, Kind.QUANTIFIED, Kind.IF, Kind.CASE, Kind.ARM, Kind.OTHER)
    if any(part.kind not in shells for part in site.above) or _condition(site):
        return False
    parent = site.above[-1]
    alone = parent.kind is not Kind.AND
    return bool(site.assigns()) if alone else bool(assigned(parent, site.primed))


def _condition(site: Site) -> bool:
    parts = [*site.above, site.node]
    for place, step in enumerate(site.path):
        above, below = parts[place], parts[place + 1]
        if (above.kind in (Kind.IF, Kind.ARM) and step == 0) or below.kind in (Kind.LOCAL, Kind.BOUND):
            return True
    return False


def _guards(site: Site) -> bool:
    return not site.assigns() and site.node != _TRUE and site.node.kind is not Kind.AND and not _binds(site.node)


def _binds(node: Node) -> bool:
    """Whether a guard only selects the message that an argument of the action names: m.k = k."""
    return (
        node.kind is Kind.INFIX
        and node.text == "="
        and node.parts[0].kind is Kind.FIELD
        and node.parts[1].kind is Kind.NAME
        and node.parts[0].text == node.parts[1].text
    )


def names_rule(node: Node) -> bool:
    """Whether a node is only a rule's name or its negation."""
    return "Rule" in node.names() and node.names() <= {"Rule"}


def settled(node: Node) -> bool | None:
    """Return the value of a condition while no rule is removed, or None if that is not certain."""
    if names_rule(node):
        return node.kind is not Kind.PREFIX
    if node.kind in (Kind.OR, Kind.AND):
        deciding = node.kind is Kind.OR
        if any(settled(part) is deciding for part in node.parts):
            return deciding
    return None


def _composed(node: Node) -> bool:
    return node.kind in (
        Kind.AND, Kind.OR, Kind.LET, Kind.QUANTIFIED, Kind.CASE, Kind.ARM, Kind.OTHER, Kind.IF
    )  # fmt: skip


def _fairness(site: Site) -> bool:
    return any(part.text.startswith(("WF_", "SF_")) for part in (*site.above, site.node))


def _index(site: Site) -> bool:
    """Whether the number is an index of a tuple, for which another number makes no sense."""
    return site.parent is not None and site.parent.kind is Kind.INDEX


OPERATORS: Mapping[str, Callable[[Site], Iterator[Node]]] = {
    "keep": keep,
    "drop": drop,
    "negate": negate,
    "compare": compare,
    "stay": stay,
    "alternative": alternative,
    "either": either,
    "narrow": narrow,
    "side": side,
    "larger": larger,
    "sieve": sieve,
    "network": network,
    "number": number,
    "word": word,
    "truth": truth,
    "forget": forget,
    "unfair": unfair,
}
