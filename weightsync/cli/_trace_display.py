"""A sequence chart as text for a terminal, as SVG, and as JSON for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from xml.etree import ElementTree

from rich.text import Text

from weightsync.verify.chart import Chart, Row, RowKind

_LEAST_LANE: Final = 24
#: Columns of the time, before the lanes.
TIME_WIDTH: Final = 12
_STYLES = {
    RowKind.STEP: "",
    RowKind.REFUSED: "yellow",
    RowKind.REPORT: "bold",
    RowKind.MESSAGE: "cyan",
    RowKind.LOST: "red",
}
#: Sizes in the SVG, in pixels.
_LANE_PX, _ROW_PX, _LEFT_PX, _TOP_PX = 240, 22, 90, 50
_COLOURS = {
    RowKind.STEP: "#333333",
    RowKind.REFUSED: "#b36b00",
    RowKind.REPORT: "#000000",
    RowKind.MESSAGE: "#0b7285",
    RowKind.LOST: "#c92a2a",
}


def drawn(chart: Chart, width: int) -> Iterator[Text]:
    """Draw a chart for a terminal, line by line: the time in milliseconds, then the lanes.

    A message is an arrow between two lanes. A lane is at least 24 columns wide, whatever the width of the terminal.
    """
    room = max(_LEAST_LANE, (width - TIME_WIDTH) // len(chart.lanes))
    yield Text(" " * TIME_WIDTH + "".join(f" {_cut(name, room - 2):<{room - 1}}" for name in chart.lanes), style="bold")
    for row in chart.rows:
        line = Text(f"{row.at / 1e6:>{TIME_WIDTH - 3}.3f}   ")
        line.append(_lanes(row, len(chart.lanes), room).rstrip(), style=_STYLES[row.kind])
        yield line


def _lanes(row: Row, count: int, room: int) -> str:
    if row.kind is RowKind.MESSAGE and row.to != row.lane:
        first, last = sorted((row.lane, row.to))
        reach = (last - first) * room
        shaft = f" {_cut(row.text, reach - 6)} ".center(reach - 2, "─")
        arrow = f"├{shaft}▶│" if row.to > row.lane else f"◀{shaft}─┤"
        rest = " " * (room - 1) + "│".ljust(room) * (count - last - 1)
        return "│".ljust(room) * first + arrow + rest
    own = f"│ {_cut(row.text, room - 3)}".ljust(room)
    return "│".ljust(room) * row.lane + own + "│".ljust(room) * (count - row.lane - 1)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…"


def svg(chart: Chart) -> str:
    """Draw a chart as an SVG document: time downwards, one row of equal height for each event."""
    height = _TOP_PX + _ROW_PX * (len(chart.rows) + 1)
    root = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=str(_LEFT_PX + _LANE_PX * len(chart.lanes)),
        height=str(height),
    )
    root.set("font-family", "monospace")
    root.set("font-size", "11")
    for number, name in enumerate(chart.lanes):
        x = _x(number)
        _text(root, x, 24, name, "#000000", anchor="middle")
        _line(root, (x, _TOP_PX - 14), (x, height), "#adb5bd")
    for number, row in enumerate(chart.rows):
        _row(root, row, _TOP_PX + _ROW_PX * number + _ROW_PX // 2)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _row(root: ElementTree.Element, row: Row, y: int) -> None:
    colour = _COLOURS[row.kind]
    _text(root, 6, y + 4, f"{row.at / 1e6:.3f} ms", "#868e96")
    if row.kind is RowKind.MESSAGE and row.to != row.lane:
        begin, end = _x(row.lane), _x(row.to)
        _line(root, (begin, y), (end, y), colour)
        tip = -6 if end > begin else 6
        points = f"{end},{y} {end + tip},{y - 4} {end + tip},{y + 4}"
        ElementTree.SubElement(root, "polygon", points=points, fill=colour)
        _text(root, (begin + end) // 2, y - 3, row.text, colour, anchor="middle")
    else:
        ElementTree.SubElement(root, "circle", cx=str(_x(row.lane)), cy=str(y), r="3", fill=colour)
        _text(root, _x(row.lane) + 8, y + 4, row.text, colour)


def _x(lane: int) -> int:
    return _LEFT_PX + _LANE_PX * lane + _LANE_PX // 2


def _line(root: ElementTree.Element, begin: tuple[int, int], end: tuple[int, int], colour: str) -> None:
    places = {"x1": begin[0], "y1": begin[1], "x2": end[0], "y2": end[1]}
    ElementTree.SubElement(root, "line", {name: str(place) for name, place in places.items()}, stroke=colour)


def _text(root: ElementTree.Element, x: int, y: int, text: str, colour: str, *, anchor: str = "start") -> None:
    element = ElementTree.SubElement(root, "text", x=str(x), y=str(y), fill=colour)
    element.set("text-anchor", anchor)
    element.text = text


def perfetto(chart: Chart) -> str:
    """Write a chart in the trace event format, which Perfetto and Chrome's tracing page open.

    Each machine is a thread. Its states are slices, its steps instants, and messages are flows between slices.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
        for number, name in enumerate(chart.lanes)
    ]
    for state in chart.states:
        events.append(_event("X", state.name, state.lane, state.begin, dur=(state.end - state.begin) / 1e3))
    for number, row in enumerate(chart.rows):
        if row.kind is not RowKind.MESSAGE:
            events.append(_event("i", row.text, row.lane, row.at, s="t"))
            continue
        for phase, lane, at, name in (("s", row.lane, row.sent_at, "sends"), ("f", row.to, row.at, "gets")):
            # A flow starts and ends in a slice: one that lasts a microsecond.
            events.append(_event("X", f"{name} {row.text}", lane, at, dur=1))
            events.append(_event(phase, row.text, lane, at, id=number, cat="message", bp="e"))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _event(phase: str, name: str, lane: int, at: int, **more: object) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 1, "tid": lane, "ts": at / 1e3, **more}
