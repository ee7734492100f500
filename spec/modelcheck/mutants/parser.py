"""Parses definitions of a model into trees, with tree-sitter and its grammar of TLA+.

Constructs that have no kind in `syntax` are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import tree_sitter
import tree_sitter_tlaplus

from modelcheck.mutants.syntax import Kind, Node, name
from weightsync.errors import ConfigurationError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the grammar passes its address as an int
    _PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_tlaplus.language()))

#: Types of the marks between the parts of a node, which add nothing to the node's type.
_MARKS = frozenset(
    {
        "all_map_to", "bullet_conj", "bullet_disj", "case_arrow", "case_box", "def_eq", "langle_bracket", "maps_to",
        "rangle_bracket", "set_in",
    }
)  # fmt: skip


def parse(body: str) -> Node:
    """Parse a definition's body. Its comments must be blanked, and its first line indented as in the module.

    Raises:
        ConfigurationError: if it is not TLA+, or has a construct without a kind. The message names the place.
    """
    root = _PARSER.parse(f"---- MODULE M ----\nX ==\n{body}\n====\n".encode()).root_node
    for wrong in _errors(root):
        raise _unreadable(wrong)
    [definition] = [part for part in root.named_children[0].named_children if part.type == "operator_definition"]
    return _node(definition).parts[0]


def _errors(node: tree_sitter.Node) -> Iterator[tree_sitter.Node]:
    if node.is_error or node.is_missing:
        yield node
    for part in node.children if node.has_error else ():
        yield from _errors(part)


def _unreadable(node: tree_sitter.Node) -> ConfigurationError:
    line, column = node.start_point
    near = " ".join(_text(node).split())[:80]
    return ConfigurationError(
        f"The model's text cannot be read in line {line - 1} of a definition, column {column + 1}: {node.type} {near}"
    )


def _node(node: tree_sitter.Node) -> Node:
    reader = _READERS.get(node.type)
    if reader is None:
        raise _unreadable(node)
    return reader(node)


def _text(node: tree_sitter.Node | None) -> str:
    return str(node.text, "utf-8") if node is not None and node.text is not None else ""


def _operands(node: tree_sitter.Node) -> list[tree_sitter.Node]:
    return [part for part in node.named_children if part.type not in _MARKS]


def _parts(nodes: list[tree_sitter.Node]) -> tuple[Node, ...]:
    return tuple(_node(node) for node in nodes)


def _leaf(kind: Kind) -> Callable[[tree_sitter.Node], Node]:
    return lambda node: Node(kind, _text(node))


def _plain(kind: Kind) -> Callable[[tree_sitter.Node], Node]:
    """A reader of expressions that consist only of their operands."""
    return lambda node: Node(kind, "", _parts(_operands(node)))


def _headed(kind: Kind) -> Callable[[tree_sitter.Node], Node]:
    """A reader of expressions that begin with a name or a quantifier."""

    def read(node: tree_sitter.Node) -> Node:
        head, *rest = _operands(node)
        return Node(kind, _text(head), _parts(rest))

    return read


def _only(node: tree_sitter.Node) -> Node:
    [inside] = _operands(node)
    return _node(inside)


def _infix(node: tree_sitter.Node) -> Node:
    left, right = (_node(part) for part in (node.children[0], node.children[-1]))
    operator = _text(node.child_by_field_name("symbol"))
    kind = {"/\\": Kind.AND, "\\/": Kind.OR}.get(operator)
    if kind is None:
        return Node(Kind.INFIX, operator, (left, right))
    return Node(kind, "", (*(left.parts if left.kind is kind else (left,)), right))


def _prefix(node: tree_sitter.Node) -> Node:
    return Node(Kind.PREFIX, _text(node.child_by_field_name("symbol")), (_node(node.children[-1]),))


def _postfix(node: tree_sitter.Node) -> Node:
    if _text(node.child_by_field_name("symbol")) != "'":
        raise _unreadable(node)
    return Node(Kind.PRIME, "", (_node(node.children[0]),))


def _bullets(kind: Kind) -> Callable[[tree_sitter.Node], Node]:
    """A reader of bulleted lists. A list of one item becomes the item, and nested lists of the same kind are joined."""

    def read(node: tree_sitter.Node) -> Node:
        items = _parts(_operands(node))
        flat = tuple(part for item in items for part in (item.parts if item.kind is kind else (item,)))
        return flat[0] if len(flat) == 1 else Node(kind, "", flat)

    return read


def _bound(node: tree_sitter.Node) -> Node:
    *names, over = _operands(node)
    return Node(Kind.BOUND, ", ".join(map(_text, names)), (_node(over),))


def _choose(node: tree_sitter.Node) -> Node:
    chosen, over, that = _operands(node)
    return Node(Kind.CHOOSE, "", (Node(Kind.BOUND, _text(chosen), (_node(over),)), _node(that)))


def _fair(node: tree_sitter.Node) -> Node:
    variables, action = _operands(node)
    return Node(Kind.CALL, f"{_text(node.children[0])}{_text(variables)}", (_node(action),))


def _field(node: tree_sitter.Node) -> Node:
    record, field = _operands(node)
    return Node(Kind.FIELD, _text(field), (_node(record),))


def _fields(kind: Kind, inner: Kind) -> Callable[[tree_sitter.Node], Node]:
    def read(node: tree_sitter.Node) -> Node:
        parts = _operands(node)
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return Node(kind, "", tuple(Node(inner, _text(field), (_node(value),)) for field, value in pairs))

    return read


def _update(node: tree_sitter.Node) -> Node:
    specifier, value = _operands(node)
    place = name("!")
    for step in specifier.named_children:
        parts = _operands(step)
        if step.type == "except_update_fn_appl":
            place = Node(Kind.INDEX, "", (place, *_parts(parts)))
        else:
            place = Node(Kind.FIELD, _text(parts[0]), (place,))
    return Node(Kind.UPDATE, "", (place, _node(value)))


_READERS: dict[str, Callable[[tree_sitter.Node], Node]] = {
    **dict.fromkeys(("identifier_ref", "boolean", "boolean_set", "prev_func_val"), _leaf(Kind.NAME)),
    "nat_number": _leaf(Kind.NUMBER),
    "string": _leaf(Kind.STRING),
    **dict.fromkeys(("parentheses", "conj_item", "disj_item"), _only),
    "conj_list": _bullets(Kind.AND),
    "disj_list": _bullets(Kind.OR),
    "bound_infix_op": _infix,
    "bound_prefix_op": _prefix,
    "bound_postfix_op": _postfix,
    "bound_op": _headed(Kind.CALL),
    "fairness": _fair,
    "bounded_quantification": _headed(Kind.QUANTIFIED),
    "quantifier_bound": _bound,
    "choose": _choose,
    "if_then_else": _plain(Kind.IF),
    "case": _plain(Kind.CASE),
    "case_arm": _plain(Kind.ARM),
    "other_arm": _plain(Kind.OTHER),
    "let_in": _plain(Kind.LET),
    "operator_definition": _headed(Kind.LOCAL),
    "function_evaluation": _plain(Kind.INDEX),
    "record_value": _field,
    "except": _plain(Kind.EXCEPT),
    "except_update": _update,
    "record_literal": _fields(Kind.RECORD, Kind.ENTRY),
    "set_of_records": _fields(Kind.RECORDS, Kind.MEMBERS),
    "function_literal": _plain(Kind.FUNCTION),
    "set_of_functions": _plain(Kind.FUNCTIONS),
    "finite_set_literal": _plain(Kind.SET),
    "set_filter": _plain(Kind.FILTER),
    "set_map": _plain(Kind.MAP),
    "tuple_literal": _plain(Kind.TUPLE),
}
