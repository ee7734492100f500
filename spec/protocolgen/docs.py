"""Renders tables and diagrams, inserts them between the markers of a Markdown file, and writes or compares pages.

A marked part begins with ``<!-- generated: NAME -->`` and ends with ``<!-- /generated -->``, each on its own line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from protocolgen.source import SAME, Protocol, Role, Row, SpecError

_OPENING = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
_PART = re.compile(
    r"^(<!-- generated: (\S+) -->\n)((?:(?!<!-- generated: ).*\n)*?)(<!-- /generated -->)$", re.MULTILINE
)


def sections(protocol: Protocol) -> dict[str, str]:
    """Render every part that a Markdown file may contain, by name.

    Args:
        protocol: a checked protocol.

    Returns:
        Name to Markdown text.
    """
    parts = {
        "states": _states(protocol),
        "input-kinds": _table("kind", "meaning", rows=((each.name, each.meaning) for each in protocol.kinds)),
        "messages": _messages(protocol),
        "refusals": _table("kind", "meaning", rows=((each.name, each.meaning) for each in protocol.refusals)),
        "deliveries": _deliveries(protocol),
        "guarantees": _guarantees(protocol),
    }
    for role in protocol.roles:
        parts[f"{role.name}-inputs"] = _inputs(role)
        parts[f"{role.name}-rows"] = _rows(role)
        parts[f"{role.name}-diagram"] = _diagram(protocol, role)
    return parts


def fill(path: str, text: str, parts: Mapping[str, str]) -> str:
    """Return a Markdown file with its marked parts rendered again.

    Args:
        path: the file's name, for complaints.
        text: its contents.
        parts: as `sections` returns them.

    Returns:
        The new contents; text outside the markers is unchanged.

    Raises:
        SpecError: a marker names an unknown part, or has no end.
    """
    wanted, found = _OPENING.findall(text), [match[1] for match in _PART.findall(text)]
    unknown = [name for name in wanted if name not in parts]
    if unknown:
        raise SpecError([f"{path}: no part is called '{name}' (there are: {', '.join(parts)})" for name in unknown])
    if wanted != found:
        open_ended = next(name for name in wanted if wanted.count(name) > found.count(name))
        raise SpecError([f"{path}: the generated part '{open_ended}' does not end"])
    return _PART.sub(lambda match: f"{match[1]}\n{parts[match[2]]}\n{match[4]}", text)


def _table(*heads: str, rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(_cell(text) for text in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _states(protocol: Protocol) -> str:
    rows = ((_code(state.name), state.sender, state.receiver) for state in protocol.states)
    return _table("state", "sender", "receiver", rows=rows)


def _inputs(role: Role) -> str:
    rows = ((_code(each.name), each.kind, each.meaning) for each in role.inputs)
    return _table("input", "kind", "meaning", rows=rows)


def _rows(role: Role) -> str:
    by_place: dict[str, list[Row]] = {}
    for row in role.rows:
        by_place.setdefault(row.place, []).append(row)
    return _table("in state", "input", "to", rows=map(_row, by_place.values()))


def _row(rows: list[Row]) -> tuple[str, str, str]:
    stays = all(row.source == row.target for row in rows)
    target = SAME if stays and len(rows) > 1 else _code(rows[0].target)
    return _code(*(row.source for row in rows)), _code(rows[0].input), target


def _messages(protocol: Protocol) -> str:
    rows = (
        (_code(each.name), ", ".join(each.speakers), _code(*each.fields), each.meaning) for each in protocol.messages
    )
    return _table("message", "sent by", "fields", "meaning", rows=rows)


def _deliveries(protocol: Protocol) -> str:
    rows = (
        (_code(each.name), _yes(each.reorders), _yes(each.duplicates), _yes(each.loses), each.meaning)
        for each in protocol.deliveries
    )
    return _table("delivery", "reorders", "duplicates", "loses", "meaning", rows=rows)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _guarantees(protocol: Protocol) -> str:
    rows = ((each.id, _code(each.name), each.meaning) for each in protocol.guarantees)
    return _table("id", "guarantee", "what is promised", rows=rows)


def _diagram(protocol: Protocol, role: Role) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {protocol.initial}"]
    kinds = {each.name: each.kind for each in role.inputs}
    for kind in protocol.kinds:
        edges = _edges(row for row in role.rows if kinds[row.input] == kind.name)
        if edges:
            lines.append(f"    %% {kind.name}")
        lines += [f"    {source} --> {target} : {', '.join(names)} ({kind.name})" for (source, target), names in edges]
    return "\n".join([*lines, f"    {protocol.final} --> [*]", "```"]) + "\n"


def _edges(rows: Iterable[Row]) -> list[tuple[tuple[str, str], list[str]]]:
    """The arrows of the diagram: inputs with the same source and target share one."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        edges.setdefault((row.source, row.target), []).append(row.input)
    return list(edges.items())


def keep(page: Path, text: str, arguments: Sequence[str], otherwise: str) -> int:
    """Write the page, or with ``--check`` only compare it.

    Args:
        page: its path.
        text: what it should contain.
        arguments: those of the command line.
        otherwise: what is printed if it differs.

    Returns:
        The exit status: 0 the page is up to date, 1 it differs.
    """
    if "--check" not in arguments:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(otherwise)
    return 1
