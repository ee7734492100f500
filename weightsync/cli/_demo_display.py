"""What `weightsync demo` shows: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.cli._demo_chart import chart
from weightsync.cli._demo_words import ms, number, size
from weightsync.demo import Board, Phase, SyncMode, SyncView, View, WorkerView

_FRAMES_PER_SECOND = 6
_SECONDS_PER_LINE = 2.0
_HIGHEST_RETURN = 500.0
_WIDEST = 100
_HIGHEST_CHART = 10
_LOWEST_CHART = 4
_LINES_BESIDE_CHART = 19
_NOTES_SHOWN = 4
_STYLES = {
    "ready": "green",
    "pending_async": "cyan",
    "awaiting_ack": "yellow",
    "up": "green",
    "expected": "yellow",
    "lost": "bold red",
}


class PlainDisplay:
    """A line every few seconds, for logs.

    Args:
        console: where to print.
        board: what there is to show.
    """

    def __init__(self, console: Console, board: Board) -> None:
        self._console = console
        self._board = board
        self._ended = threading.Event()
        self._told = 0
        self._thread = threading.Thread(target=self._tell, name="display", daemon=True)

    def __enter__(self) -> Self:
        self._print(f"weightsync demo  {described(self._board.view())}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._line()

    def _tell(self) -> None:
        while not self._ended.wait(_SECONDS_PER_LINE):
            self._line()

    def _line(self) -> None:
        view = self._board.view()
        for note in view.notes[self._told :]:
            self._print(f"          {note}")
        self._told = len(view.notes)
        self._print(plain_line(view))

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)


class LiveDisplay:
    """One panel, drawn anew several times a second by a thread of its own.

    Args:
        console: a terminal.
        board: what there is to show.
    """

    def __init__(self, console: Console, board: Board) -> None:
        self._live = Live(
            console=console,
            get_renderable=lambda: panel(board.view(), min(console.width, _WIDEST), console.height),
            refresh_per_second=_FRAMES_PER_SECOND,
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


# ------------------------------------------------------------------------------------------------ plain


def described(view: View) -> str:
    """What is run, in one line."""
    settings = view.settings
    sync = "asynchronous" if settings.sync is SyncMode.OVERLAPPED else "blocking"
    workers = f"{settings.workers} worker" + "s" * (settings.workers != 1)
    return f"CartPole-v1, {workers} over {settings.scheme.words}, {sync} sync, seed {settings.seed}"


def plain_line(view: View) -> str:
    """A run at one moment, in one line."""
    if view.phase is Phase.STARTING:
        return f"          {view.phase.value}, {view.age:.0f} s: trainer {view.sender_state}"
    workers = ", ".join(_worker_words(worker) for worker in view.workers)
    return (
        f"{view.elapsed:6.1f} s  {view.phase.value}  mean return {number(view.mean_return)}  {view.steps:,} steps  "
        f"trainer {view.sender_state} v{view.version}  {workers}  sync {ms(view.sync.transferring)}"
    )


def _worker_words(worker: WorkerView) -> str:
    if worker.standing == "lost":
        return f"worker {worker.index} LOST"
    if worker.version is None:
        return f"worker {worker.index} {worker.state}"
    return f"worker {worker.index} {worker.state} v{worker.version} ({worker.staleness} behind)"


# ------------------------------------------------------------------------------------------------- live


def panel(view: View, width: int, height: int) -> RenderableType:
    """A run at one moment, as a panel of so many columns; where there are fewer lines, the chart is lower."""
    notes = [Text(note.splitlines()[0], style="yellow") for note in view.notes[-_NOTES_SHOWN:]]
    spare = height - _LINES_BESIDE_CHART - len(view.workers) - len(notes)
    parts: list[RenderableType] = [
        Text(described(view)),
        _clock(view, width),
        Text(),
        *_curve(view, width, spare),
        Text(),
        _machines(view),
    ]
    parts += [Text(), _syncs(view)]
    if notes:
        parts += [Text(), *notes]
    return Panel(
        Group(*parts),
        title=Text("weightsync demo", style="bold"),
        title_align="left",
        subtitle=Text("Ctrl-C ends it", style="dim") if view.phase is not Phase.ENDED else None,
        subtitle_align="right",
        border_style="blue",
        width=width,
        padding=(1, 2),
    )


def _clock(view: View, width: int) -> RenderableType:
    seconds = view.settings.seconds
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=seconds,
        completed=min(view.elapsed, seconds),
        width=max(10, width - 50),
        pulse=view.phase is Phase.STARTING,
    )
    grid.add_row(
        Text(view.phase.value, style="bold"),
        bar,
        Text(_time(view), style="cyan"),
    )
    return grid


def _time(view: View) -> str:
    if view.phase is Phase.STARTING:
        return f"{view.age:.0f} s"
    return f"{view.elapsed:.0f} s of at most {view.settings.seconds:.0f} s"


def _curve(view: View, width: int, spare: int) -> list[Text]:
    height = min(_HIGHEST_CHART, max(_LOWEST_CHART, spare))
    title = Text.assemble(
        "mean return of the last 20 episodes  ", (number(view.mean_return), "bold"), (" of 500", "dim")
    )
    lines = chart(view.curve, _HIGHEST_RETURN, max(10, width - 14), height)
    labels = {0: "500 ┤", height // 2: "250 ┤"}
    drawn = [Text.assemble((labels.get(i, "    │"), "dim"), line) for i, line in enumerate(lines)]
    foot = Text(f"  0 └ {view.steps:,} steps, {view.episodes:,} episodes, {view.updates:,} updates", style="dim")
    return [title, *drawn, foot]


def _machines(view: View) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("machine", min_width=9)
    table.add_column("state", min_width=13)
    for heading in ("version", "behind"):
        table.add_column(heading, justify="right")
    table.add_column("link", min_width=8)
    for heading in ("steps", "episodes"):
        table.add_column(heading, justify="right", min_width=8)
    table.add_row("trainer", _styled(view.sender_state), str(view.version), "", "", f"{view.steps:,}", "")
    for worker in view.workers:
        table.add_row(*_machine(worker))
    return table


def _machine(worker: WorkerView) -> list[str | Text]:
    lost = worker.standing == "lost"
    behind = "" if worker.staleness is None else str(worker.staleness)
    return [
        f"worker {worker.index}",
        Text("unknown", style="dim") if lost else _styled(worker.state),
        "" if worker.version is None else str(worker.version),
        Text(behind, style="red" if worker.staleness and worker.staleness > 1 else ""),
        "" if worker.standing == "none" else _styled(worker.standing),
        f"{worker.steps:,}",
        f"{worker.episodes:,}",
    ]


def _syncs(view: View) -> Table:
    sync: SyncView = view.sync
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text("last sync", style="dim"),
        f"prepared in {ms(sync.preparing)}, answered after {ms(sync.transferring)}, applied in {ms(sync.applying)}"
        if sync.count
        else "none yet",
    )
    grid.add_row(
        Text("so far", style="dim"),
        f"{sync.count:,} syncs of {size(sync.nbytes)}, {size(sync.total_bytes)} taken up",
    )
    grid.add_row(
        Text("experience", style="dim"),
        f"{view.staleness:.1f} versions old when learned from, {view.dropped:,} steps dropped as too old",
    )
    return grid


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, "dim"))
