"""Paths that cover every edge of a graph, or of its role projections."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from replaygen.graph import NEEDS, Graph, Spot, Step

LONGEST: Final = 60


def cover(graph: Graph, whole: bool) -> list[list[Step]]:
    """Paths from the start that cover every edge. Paths that need no scenario come first, then those that need one."""
    done: set[Any] = set()
    paths: list[list[Step]] = []
    for allowed in (set(), *({need} for need in NEEDS), set(NEEDS)):
        reach = _restricted(graph, allowed | {""})
        while path := _path(graph.first, reach, done, whole):
            paths.append(path)
    return paths


def _restricted(graph: Graph, allowed: set[str]) -> dict[Spot, list[Step]]:
    return {spot: [step for step in steps if step.needs in allowed] for spot, steps in graph.steps.items()}


def _keys(spot: Spot, step: Step, whole: bool) -> tuple[Any, ...]:
    return (spot, step.label) if whole else step.role or ()


def _path(first: Spot, steps: dict[Spot, list[Step]], done: set[Any], whole: bool) -> list[Step]:
    """One path with at least one new edge; empty if there is none."""
    path: list[Step] = []
    spot = first
    while len(path) < LONGEST:
        found = _nearest(spot, steps, done, whole)
        if not found:
            break
        for step in found:
            done.add(_keys(spot, step, whole))
            path.append(step)
            spot = step.to
    return path


def _nearest(spot: Spot, steps: dict[Spot, list[Step]], done: set[Any], whole: bool) -> list[Step]:
    """The shortest path to a new edge, including that edge."""
    came: dict[Spot, tuple[Spot, Step] | None] = {spot: None}
    todo = deque([spot])
    while todo:
        here = todo.popleft()
        for step in steps[here]:
            key = _keys(here, step, whole)
            if key and key not in done:
                return [*_way(here, came), step]
            if step.to not in came:
                came[step.to] = (here, step)
                todo.append(step.to)
    return []


def _way(spot: Spot, came: dict[Spot, tuple[Spot, Step] | None]) -> list[Step]:
    way: list[Step] = []
    while (back := came[spot]) is not None:
        spot, step = back
        way.append(step)
    return way[::-1]
