"""A curve in braille: two by four dots a character."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_BLANK = 0x2800
#: The bit of each dot, by column and by row from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_COLOURS = ("green", "green3", "chartreuse3", "yellow3", "gold3", "orange3", "dark_orange3", "red3")


def chart(points: Sequence[tuple[int, float]], top: float, width: int, height: int) -> list[Text]:
    """Draw a curve from 0 to its last point.

    Args:
        points: (x, y), by rising x.
        top: the y at the upper edge; the lower edge is 0.
        width: in characters.
        height: in characters.

    Returns:
        The lines, from the top.
    """
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(_resampled(points, 2 * width)):
        if value is None:
            continue
        row = round((1.0 - min(max(value / top, 0.0), 1.0)) * (4 * height - 1))
        for dot in _between(before, row):
            cells[dot // 4][column // 2] |= _DOTS[column % 2][dot % 4]
        before = row
    return [
        Text("".join(chr(_BLANK + cell) for cell in line), style=_COLOURS[i * len(_COLOURS) // height])
        for i, line in enumerate(cells)
    ]


def _between(before: int | None, row: int) -> range:
    """The dots of one column, joined to the one before."""
    if before is None or abs(before - row) <= 1:
        return range(row, row + 1)
    return range(before + 1, row + 1) if before < row else range(row, before)


def _resampled(points: Sequence[tuple[int, float]], columns: int) -> list[float | None]:
    """The mean of each column; a column without points continues the one before."""
    sums, counts = [0.0] * columns, [0] * columns
    last = points[-1][0] if points else 1
    for x, y in points:
        column = min(columns - 1, x * columns // (last + 1))
        sums[column] += y
        counts[column] += 1
    found: list[float | None] = []
    for total, count in zip(sums, counts, strict=True):
        found.append(total / count if count else (found[-1] if found else None))
    return found
