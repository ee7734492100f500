"""Renders `tla/Tables.tla`: the rows by which the states of the model's machines change."""

from __future__ import annotations

from collections.abc import Iterable

from protocolgen.source import Delivery, Protocol, Role

_WIDTH = 77
_HEAD = """\
\\* Generated from spec/protocol.toml by spec/generate.py. Do not edit.
\\* In AckProtocol.tla control state moves only through these rows.
"""


def render(protocol: Protocol) -> str:
    """Render `tla/Tables.tla`.

    Args:
        protocol: a checked protocol.

    Returns:
        A TLA+ module without constants or variables.
    """
    parts = [
        f"{' MODULE Tables '.center(_WIDTH - 2, '-')}\n{_HEAD}",
        _constants(protocol),
        _set("The states of both roles.", "States", (_text(state.name) for state in protocol.states)),
        *(part for role in protocol.roles for part in (_inputs(role), _rows(role))),
        _set("The kinds of a refusal.", "RefusalKinds", (_text(each.name) for each in protocol.refusals)),
        _set(
            "The deliveries that a transport may declare for its links.",
            "Deliveries",
            map(_delivery, protocol.deliveries),
        ),
        _set("<<id, name>>", "Guarantees", (_tuple(each.id, each.name) for each in protocol.guarantees)),
        *(_operators(role) for role in protocol.roles),
        "=" * _WIDTH + "\n",
    ]
    return "\n".join(parts)


def _constants(protocol: Protocol) -> str:
    return (
        f"ProtocolVersion == {protocol.version}\n"
        f"Initial == {_text(protocol.initial)}\n"
        f"Final == {_text(protocol.final)}\n"
    )


def _set(comment: str, name: str, members: Iterable[str]) -> str:
    body = ",\n".join(f"  {member}" for member in members)
    return f"\\* {comment}\n{name} == {{\n{body}\n}}\n"


def _inputs(role: Role) -> str:
    comment = f"The inputs of a {role.name}."
    return _set(comment, f"{role.name.capitalize()}Inputs", (_text(each.name) for each in role.inputs))


def _rows(role: Role) -> str:
    rows = (_tuple(row.source, row.input, row.target) for row in role.rows)
    return _set("<<from, input, to>>", f"{role.name.capitalize()}Rows", rows)


def _operators(role: Role) -> str:
    who = role.name.capitalize()
    return (
        f"\\* Is there a row, and where does it lead? {who}Next is defined only where {who}May holds.\n"
        "\\* TLC makes the function once; it would search the rows at each call.\n"
        f"{who}Leads ==\n"
        f"  [key \\in {{<<row[1], row[2]>> : row \\in {who}Rows}} |->\n"
        f"    (CHOOSE row \\in {who}Rows : <<row[1], row[2]>> = key)[3]]\n"
        f"{who}May(s, i) == <<s, i>> \\in DOMAIN {who}Leads\n"
        f"{who}Next(s, i) == {who}Leads[<<s, i>>]\n"
    )


def _delivery(delivery: Delivery) -> str:
    promises = ("reorders", delivery.reorders), ("duplicates", delivery.duplicates), ("loses", delivery.loses)
    fields = [f"{name} |-> {str(holds).upper()}" for name, holds in promises]
    return f"[name |-> {_text(delivery.name)}, {', '.join(fields)}]"


def _text(name: str) -> str:
    return f'"{name}"'


def _tuple(*names: str) -> str:
    return f"<<{', '.join(_text(name) for name in names)}>>"
