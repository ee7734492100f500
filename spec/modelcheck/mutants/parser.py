"""Reads definitions of a model into trees.

It knows the TLA+ that our modules are written in: bulleted lists by their columns, IF, CASE, LET, quantifiers, sets,
functions, records, EXCEPT and the usual operators. What else it meets it refuses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from modelcheck.mutants.syntax import Kind, Node, name
from weightsync.errors import ConfigurationError

_TOKEN = re.compile(
    r'"[^"]*"|\d+|\w+|\|->|<=>|==|=>|~>|<<|>>|/\\|\\/|<=|>=|\.\.|\[\]|->|\\[a-zA-Z]+|[-=#<>~+*,:()\[\]{}@\'!.\\]'
)
_BULLETS = {"/\\": Kind.AND, "\\/": Kind.OR}
#: How tightly an infix operator binds.
_INFIX = {
    "=>": 1, "<=>": 2, "~>": 2, "/\\": 3, "\\/": 3,
    **dict.fromkeys(("=", "#", "<", ">", "<=", ">=", "\\in", "\\notin", "\\subseteq"), 5),
    **dict.fromkeys(("\\cup", "\\cap", "\\"), 8), "..": 9, "\\X": 10, "+": 11, "-": 11,
}  # fmt: skip
_PREFIX = {"~": 4, "UNCHANGED": 12, "SUBSET": 8, "DOMAIN": 9, "ENABLED": 12}
_END = "end of text"


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    column: int


def parse(body: str) -> Node:
    """Read a definition's body, comments blanked, its first line starting in the column where it stands.

    Raises:
        ConfigurationError: if it is no TLA+ that this reader knows; the place is named.
    """
    parser = _Parser(_tokens(body))
    node = parser.expression(0)
    parser.take(_END)
    return node


def _tokens(body: str) -> list[_Token]:
    found = []
    for match in _TOKEN.finditer(body):
        column = match.start() - (body.rfind("\n", 0, match.start()) + 1)
        found.append(_Token(match.group(), column))
    return found


class _Parser:
    """Operator precedence, with bulleted lists: a token at or left of the innermost bullet's column ends its item."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._place = 0
        self._margin = -1

    def peek(self, ahead: int = 0) -> str:
        place = self._place + ahead
        if place >= len(self._tokens) or self._tokens[place].column <= self._margin:
            return _END
        return self._tokens[place].text

    def take(self, wanted: str = "") -> str:
        found = self.peek()
        if wanted and found != wanted:
            near = " ".join(token.text for token in self._tokens[max(0, self._place - 8) : self._place + 3])
            raise ConfigurationError(f"The model's text cannot be read: {wanted} is due, not {found}, near: {near}")
        self._place += 1
        return found

    def accept(self, wanted: str) -> bool:
        if self.peek() == wanted:
            self._place += 1
            return True
        return False

    def expression(self, floor: int) -> Node:
        left = self._bullets() if self.peek() in _BULLETS else self._operand()
        while (binding := _INFIX.get(self.peek(), 0)) > floor:
            left = self._infix(left, self.take(), binding)
        return left

    def _infix(self, left: Node, operator: str, binding: int) -> Node:
        right = self.expression(binding)
        kind = _BULLETS.get(operator)
        if kind is None:
            return Node(Kind.INFIX, operator, (left, right))
        return Node(kind, "", (*(left.parts if left.kind is kind else (left,)), right))

    def _bullets(self) -> Node:
        bullet, column, outer = self.peek(), self._tokens[self._place].column, self._margin
        items = []
        while self.peek() == bullet and self._tokens[self._place].column == column:
            self._place += 1
            self._margin = column
            items.append(self.expression(0))
            self._margin = outer
        kind = _BULLETS[bullet]
        flat = [part for item in items for part in (item.parts if item.kind is kind else (item,))]
        return flat[0] if len(flat) == 1 else Node(kind, "", tuple(flat))

    def _operand(self) -> Node:
        word = self.peek()
        if word in _PREFIX:
            self.take()
            return Node(Kind.PREFIX, word, (self.expression(_PREFIX[word]),))
        special = _SPECIAL.get(word)
        if special is not None:
            self.take()
            node = special(self, word)
        else:
            node = self._atom()
        return self._tail(node)

    def _atom(self) -> Node:
        word = self.take()
        if word.startswith('"'):
            return Node(Kind.STRING, word)
        if word.isdigit():
            return Node(Kind.NUMBER, word)
        if word != "@" and not re.fullmatch(r"\w+", word):
            self._place -= 1
            self.take("an expression")
        if self.accept("("):
            return Node(Kind.CALL, word, self._listed(")"))
        return name(word)

    def _tail(self, node: Node) -> Node:
        while True:
            if self.accept("["):
                node = Node(Kind.INDEX, "", (node, *self._listed("]")))
            elif self.accept("."):
                node = Node(Kind.FIELD, self.take(), (node,))
            elif self.accept("'"):
                node = Node(Kind.PRIME, "", (node,))
            else:
                return node

    def _listed(self, closing: str) -> tuple[Node, ...]:
        items: list[Node] = []
        while not self.accept(closing):
            if items:
                self.take(",")
            items.append(self.expression(0))
        return tuple(items)

    def _bounds(self, closing: str) -> tuple[Node, ...]:
        bounds = []
        while not self.accept(closing):
            names = [self.take()]
            while self.accept(","):
                names.append(self.take())
            self.take("\\in")
            bounds.append(Node(Kind.BOUND, ", ".join(names), (self.expression(0),)))
            self.accept(",")
        return tuple(bounds)

    def grouped(self, _word: str) -> Node:
        node = self.expression(0)
        self.take(")")
        return node

    def sequence(self, _word: str) -> Node:
        return Node(Kind.TUPLE, "", self._listed(">>"))

    def quantified(self, word: str) -> Node:
        bounds = self._bounds(":")
        return Node(Kind.QUANTIFIED, word, (*bounds, self.expression(0)))

    def choose(self, _word: str) -> Node:
        return Node(Kind.CHOOSE, "", (*self._bounds(":"), self.expression(0)))

    def conditional(self, _word: str) -> Node:
        condition = self.expression(0)
        self.take("THEN")
        then = self.expression(0)
        self.take("ELSE")
        return Node(Kind.IF, "", (condition, then, self.expression(0)))

    def cases(self, _word: str) -> Node:
        arms = [self._arm()]
        while self.accept("[]"):
            arms.append(self._arm())
        return Node(Kind.CASE, "", tuple(arms))

    def _arm(self) -> Node:
        if self.accept("OTHER"):
            self.take("->")
            return Node(Kind.OTHER, "", (self.expression(0),))
        guard = self.expression(0)
        self.take("->")
        return Node(Kind.ARM, "", (guard, self.expression(0)))

    def let(self, _word: str) -> Node:
        parts = []
        while not self.accept("IN"):
            head = self.take()
            self.take("==")
            parts.append(Node(Kind.LOCAL, head, (self.expression(0),)))
        return Node(Kind.LET, "", (*parts, self.expression(0)))

    def braces(self, _word: str) -> Node:
        if self.accept("}"):
            return Node(Kind.SET)
        first = self.expression(0)
        if not self.accept(":"):
            rest = self._listed("}") if self.accept(",") else self._nothing("}")
            return Node(Kind.SET, "", (first, *rest))
        if first.kind is Kind.INFIX and first.text == "\\in":
            bound = Node(Kind.BOUND, str(first.parts[0]), (first.parts[1],))
            node = Node(Kind.FILTER, "", (bound, self.expression(0)))
            self.take("}")
            return node
        return Node(Kind.MAP, "", (first, *self._bounds("}")))

    def _nothing(self, closing: str) -> tuple[Node, ...]:
        self.take(closing)
        return ()

    def brackets(self, _word: str) -> Node:
        if self.peek(1) in ("|->", ":"):
            return self._record()
        if self.peek(1) in ("\\in", ","):
            bounds = self._bounds("|->")
            return self._closed(Node(Kind.FUNCTION, "", (*bounds, self.expression(0))))
        base = self.expression(0)
        if self.accept("->"):
            return self._closed(Node(Kind.FUNCTIONS, "", (base, self.expression(0))))
        self.take("EXCEPT")
        updates: list[Node] = []
        while not self.accept("]"):
            if updates:
                self.take(",")
            updates.append(self._update())
        return Node(Kind.EXCEPT, "", (base, *updates))

    def _closed(self, node: Node) -> Node:
        self.take("]")
        return node

    def _update(self) -> Node:
        self.take("!")
        place = self._tail(name("!"))
        self.take("=")
        return Node(Kind.UPDATE, "", (place, self.expression(0)))

    def _record(self) -> Node:
        outer, inner = (Kind.RECORD, Kind.ENTRY) if self.peek(1) == "|->" else (Kind.RECORDS, Kind.MEMBERS)
        parts = []
        while True:
            field = self.take()
            self.take()
            parts.append(Node(inner, field, (self.expression(0),)))
            if not self.accept(","):
                return self._closed(Node(outer, "", tuple(parts)))


_SPECIAL = {
    "(": _Parser.grouped,
    "<<": _Parser.sequence,
    "\\E": _Parser.quantified,
    "\\A": _Parser.quantified,
    "CHOOSE": _Parser.choose,
    "IF": _Parser.conditional,
    "CASE": _Parser.cases,
    "LET": _Parser.let,
    "{": _Parser.braces,
    "[": _Parser.brackets,
}
