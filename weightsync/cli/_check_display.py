"""The output of `weightsync check`: live rows on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.model import Configuration, Expected, Progress, Verdict, due

_REFRESHES_PER_SECOND = 4
_BAR_WIDTH = 24


@dataclass(slots=True)
class _Row:
    configuration: Configuration
    since: float = field(default_factory=time.monotonic)
    progress: Progress | None = None
    at: float = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.since


class Display:
    """Prints a line for each configuration that ends; on a terminal also a row for each run in progress, below them.

    Args:
        console: where to print.
        total: how many configurations there are.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._rows: dict[str, _Row] = {}
        rate = _REFRESHES_PER_SECOND
        live = Live(console=console, get_renderable=self._render, refresh_per_second=rate, transient=True)
        self._live = live if console.is_terminal else contextlib.nullcontext()

    def __enter__(self) -> Self:
        self._console.print(f"{self._total} configurations to check")
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def started(self, configuration: Configuration) -> None:
        """Add a row."""
        self._rows[configuration.name] = _Row(configuration)

    def progressed(self, configuration: Configuration, progress: Progress) -> None:
        """Update a row."""
        row = self._rows[configuration.name]
        if row.progress != progress:
            row.progress, row.at = progress, row.elapsed

    def ended(self, verdict: Verdict) -> None:
        """Remove the row and print the verdict."""
        self._rows.pop(verdict.configuration.name, None)
        self._done += 1
        self._console.print(Text(f"[{self._done}/{self._total}] ") + verdict_line(verdict), soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for row in list(self._rows.values()):
            table.add_row(
                Text(row.configuration.name, style="bold"),
                _bar(row),
                Text(_states(row)),
                Text(f"{row.elapsed:5.0f} s", style="cyan"),
            )
        return table


def _bar(row: _Row) -> ProgressBar:
    pinned = row.configuration.pinned
    if row.progress is None or pinned is None or row.configuration.expected is not Expected.PASS:
        return ProgressBar(total=None, pulse=True, width=_BAR_WIDTH)
    return ProgressBar(total=pinned.distinct, completed=min(_estimate(row), pinned.distinct), width=_BAR_WIDTH)


def _estimate(row: _Row) -> int:
    """Estimate the number of distinct states, because TLC reports it only once a minute."""
    assert row.progress is not None
    rate = row.progress.distinct / max(row.at, 1.0)
    return round(row.progress.distinct + rate * (row.elapsed - row.at) * (row.progress.queue > 0))


def _states(row: _Row) -> str:
    if row.progress is None:
        return "exploring"
    if not row.progress.queue:
        return f"{row.progress.distinct:,} states, checking temporal properties"
    return f"{row.progress.distinct:,} states, {row.progress.queue:,} in the queue (at {row.at:.0f} s)"


def verdict_line(verdict: Verdict) -> Text:
    """Return a verdict in one line."""
    mark, style = ("ok", "green") if verdict.as_expected else ("DIFFERS", "bold red")
    line = Text.assemble((mark, style), f"  {verdict.configuration.name}")
    counts = _counts(verdict)
    if counts:
        line.append(f"  {counts} distinct states")
    line.append(f"  {_seconds(verdict)}", style="cyan")
    if verdict.configuration.expected is not Expected.PASS and verdict.as_expected:
        line.append(f"  {due(verdict.configuration)}, as expected", style="dim")
    for complaint in verdict.complaints:
        line.append(f"\n    {complaint}", style="red")
    return line


def _counts(verdict: Verdict) -> str:
    counts = verdict.outcome.findings.counts if verdict.outcome else None
    return f"{counts.distinct:,}" if counts else ""


def _seconds(verdict: Verdict) -> str:
    return f"{verdict.outcome.seconds:.1f} s" if verdict.outcome else "not run"


def results(verdicts: Iterable[Verdict]) -> Table:
    """Return the table of verdicts."""
    table = Table(title="TLC's verdicts", title_justify="left", header_style="bold")
    table.add_column("configuration", overflow="fold")
    table.add_column("distinct states", justify="right")
    table.add_column("time", justify="right")
    table.add_column("verdict", overflow="fold")
    table.add_column("guarantees", overflow="fold")
    for verdict in verdicts:
        style = "green" if verdict.as_expected else "bold red"
        table.add_row(
            verdict.configuration.name,
            _counts(verdict),
            _seconds(verdict),
            Text(verdict.summary, style=style),
            " ".join(verdict.configuration.guarantees),
        )
    return table


def summary(verdicts: Sequence[Verdict], seconds: float) -> Text:
    """Return the line with the overall result."""
    right = sum(verdict.as_expected for verdict in verdicts)
    line = f"{right} of {len(verdicts)} configurations are as expected, in {seconds:.0f} s."
    return Text(line, style="bold green" if right == len(verdicts) else "bold red")


def listing(configurations: Sequence[Configuration]) -> Table:
    """Return the table of configurations for ``--list``."""
    table = Table(header_style="bold")
    for heading in ("configuration", "kind", "set", "TLC must find", "guarantees", "purpose"):
        table.add_column(heading, overflow="fold")
    for found in configurations:
        table.add_row(
            found.name, found.purpose.value, found.tier.value, due(found), " ".join(found.guarantees), Text(found.why)
        )
    return table
