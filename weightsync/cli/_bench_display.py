"""The output of `weightsync bench`: live rows on a terminal, a line a case elsewhere, and tables at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.bench import Case, Change, Label, Payload, Results, Verdict, noise
from weightsync.bench.reporting import (
    CASE_COLUMNS,
    COMPARED_COLUMNS,
    TARGET_COLUMNS,
    Rows,
    case_rows,
    compared_rows,
    left_out,
    ms,
    reached,
    target_rows,
    title,
)

_STYLES = {
    Verdict.REACHED.value: "green",
    Verdict.MISSED.value: "red",
    Change.FASTER.value: "green",
    Change.SLOWER.value: "red",
    Verdict.NOISY.value: "yellow",
}


class Display:
    """Shows how a run goes."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._live = Live(console=screen, refresh_per_second=4, transient=True) if screen.is_terminal else None
        self._cases = self._done = self._rounds = 0
        self._began = time.monotonic()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def began(self, cases: int) -> None:
        """The number of cases is known."""
        self._cases = cases

    def setting_up(self, payload: Payload, workers: int) -> None:
        """A case is being set up."""
        self._rounds = 0
        self._now = f"case {self._done + 1} of {self._cases}: payload {payload.name}, {workers} workers"
        self._show(Text(f"{self._now}: setting up"))
        if self._live is None:
            self._screen.print(f"{self._seconds}  {self._now}", markup=False, highlight=False)

    def measured(self, samples: Mapping[Label, Sequence[float]], share: float) -> None:
        """A round has ended: show the medians so far."""
        self._rounds += 1
        if self._rounds == 1 and self._live is None:
            said = f"{len(samples)} contenders carry weights, by digest; they are timed now"
            self._screen.print(f"{self._seconds}  {said}", highlight=False)
        table = Table("", "median", "sends", box=None, pad_edge=False)
        for label, times in samples.items():
            table.add_row(str(label), ms(statistics.median(times)), str(len(times)))
        bar = ProgressBar(total=1.0, completed=share, width=40)
        self._show(Group(Text(f"{self._seconds}  {self._now}"), bar, table))

    def ended(self, case: Case) -> None:
        """A case has ended."""
        self._done += 1
        if self._live is None:
            said = f"{self._rounds} sends of each were timed" if case.measured else case.left_out["all"]
            self._screen.print(f"{self._seconds}  {said}", highlight=False)

    @property
    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:4.0f} s"

    def _show(self, what: Text | Group) -> None:
        if self._live is not None:
            self._live.update(what)


def show(screen: Console, results: Results) -> None:
    """Print all tables, what was left out, and whether the machine was quiet enough."""
    for case in results.cases:
        if case.measured:
            screen.print(Text(f"\n{title(case)}", style="bold"))
            screen.print(_table(CASE_COLUMNS, case_rows(case, results.noise_limit)))
    rows = target_rows(results)
    if rows:
        screen.print(Text("\nTargets", style="bold"))
        screen.print(_table(TARGET_COLUMNS, rows))
    for line in ("", reached(results), *left_out(results), *_noise_lines(results)):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def _noise_lines(results: Results) -> list[str]:
    noisy = noise(results)
    if not any(case.measured for case in results.cases):
        return []
    if not noisy:
        return [f"The machine was quiet enough: no floor's interquartile range is above {results.noise_limit:.0%}."]
    lead = f"Too noisy to tell: floors whose interquartile range is above {results.noise_limit:.0%} of the median."
    return [f"{lead} Ratios to them are in brackets. Repeat when the machine is quiet.", *noisy]


def show_compared(screen: Console, first: Results, second: Results) -> None:
    """Print how a second run's medians compare with the first's."""
    rows = compared_rows(first, second)
    if not rows:
        screen.print("The two files have no case in common.")
        return
    screen.print(_table(COMPARED_COLUMNS, rows))
    screen.print(
        "The factor is of ratios to the floor where both runs have one, else of times. Same: the quartiles overlap.",
        highlight=False,
        soft_wrap=True,
    )


def _table(columns: Sequence[str], rows: Rows) -> Table:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return table
