"""Breadth-first search over the model network, and over TLC's own graph of the same configuration."""

from __future__ import annotations

import re
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import values
from actions import Label, projected, start, successors
from network import Bounds

Node = Any
Graph = tuple[frozenset[Node], frozenset[tuple[Node, Label, Node]]]


def search(bounds: Bounds) -> Graph:
    """Every projected node that the shipped halves reach, and every labelled edge."""
    first = start(bounds)
    nodes = {first: projected(first, bounds)}
    edges = set()
    todo = deque([first])
    while todo:
        world = todo.popleft()
        for label, after in successors(world, bounds):
            if after not in nodes:
                nodes[after] = projected(after, bounds)
                todo.append(after)
            edges.add((nodes[world], label, nodes[after]))
    return frozenset(nodes.values()), frozenset(edges)


# ------------------------------------------------------------------------------------------- TLC's own graph

_DISJUNCT = re.compile(r"^  \\/ \\E (?P<bound>.*?) : (?P<action>\w+)\((?P<args>[^)]*)\)", re.MULTILINE | re.DOTALL)


def labelling_module(protocol: str) -> str:
    """A module that prints every step as ``<<"EDGE", labels, state, state>>``, made from `Next` itself."""
    body = protocol[protocol.index("\nNext ==") :]
    body = body[: body.index("\n-----")]
    found = _DISJUNCT.findall(body)
    assert len(found) == body.count("\n  \\/ "), "a disjunct of Next was not understood"
    labels = [
        f'  UNION {{IF {action}({args}) THEN {{<<"{action}", {args}>>}} ELSE {{}} : {_bounds(bound)}}}'
        for bound, action, args in found
    ]
    return "\n".join(
        [
            "---- MODULE MCGraph ----",
            "EXTENDS MC, TLC",
            "Labels ==",
            " \\cup\n".join(labels),
            'Edge == PrintT(<<"EDGE", Labels, vars, vars\'>>)',
            "====",
        ]
    )


def _bounds(bound: str) -> str:
    """`x, y \\in S, z \\in T` with one set for each name, as a set comprehension wants it."""
    return " ".join(bound.split())


def run_tlc(java: Path, jar: Path, model: Path, config: str, folder: Path) -> str:
    """TLC's output for a configuration with the labelling module."""
    for source in model.glob("*.tla"):
        (folder / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    protocol = (model / "AckProtocol.tla").read_text(encoding="utf-8")
    (folder / "MCGraph.tla").write_text(labelling_module(protocol), encoding="utf-8")
    (folder / "MCGraph.cfg").write_text(config, encoding="utf-8")
    command = [
        str(java), "-XX:+UseSerialGC", "-Xmx2g", f"-Djava.io.tmpdir={folder}", "-cp", str(jar), "tlc2.TLC",
        "-workers", "1", "-metadir", str(folder / "meta"), "-config", "MCGraph.cfg", "MCGraph.tla",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    return run.stdout


def graph_of(output: str) -> tuple[Graph, list[frozenset[Label]]]:
    """The graph that TLC printed, and the label sets of all its edges."""
    nodes, edges, labels = set(), set(), []
    for named, before, after in values.edges_in(output):
        nodes |= {before, after}
        edges |= {(before, label, after) for label in named}
        labels.append(named)
    return (frozenset(nodes), frozenset(edges)), labels


def difference(ours: Graph, theirs: Graph) -> str:
    """The first edge that one graph has and the other has not, in words; empty: they are equal."""
    for who, one, other in (("the code", ours, theirs), ("the model", theirs, ours)):
        more = [edge for edge in one[1] - other[1] if edge[0] in other[0]]
        if more:
            before, label, after = min(more, key=repr)
            pairs = zip(VARIABLES, before, after, strict=True)
            changed = [f"  {name}: {old!r} -> {new!r}" for name, old, new in pairs if old != new]
            return "\n".join([f"only {who} has {label}, which changes", *changed])
    return "" if ours == theirs else "they have the same edges, but other nodes"


VARIABLES = ("sstate", "sdata", "slife", "blocked", "rstate", "rdata", "letters", "answers", "gone")
