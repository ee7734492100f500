"""The output of `weightsync demo`: a live panel on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.demo import Phase, Result, RunState, SchemeName, Verdict, WorkerState

_FRAMES_PER_SECOND = 6
_SECONDS_PER_LINE = 2.0
_HIGHEST_RETURN = 500.0
_WIDEST = 100
_CHART_LINES = range(4, 11)
_LINES_BESIDE_CHART = 19
_NOTES_SHOWN = 4
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("green", "green3", "chartreuse3", "yellow3", "gold3", "orange3", "dark_orange3", "red3")
_STYLES = {
    "ready": "green",
    "pending_async": "cyan",
    "awaiting_ack": "yellow",
    "up": "green",
    "expected": "yellow",
    "lost": "bold red",
    Verdict.PROVED.value: "bold green",
    Verdict.KILLED.value: "yellow",
}
_MEDIA = {
    SchemeName.SHARED: "shared memory",
    SchemeName.PROCESS: "pipes",
    SchemeName.RAY: "Ray",
    SchemeName.RPC: "torch.distributed.rpc",
    SchemeName.DISTRIBUTED: "torch.distributed",
}


@contextlib.contextmanager
def plain_display(console: Console, state: RunState) -> Iterator[None]:
    """Print a line every few seconds, for logs, while the context lasts."""
    ended = threading.Event()
    notes_shown = 0

    def show(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    def show_state() -> None:
        nonlocal notes_shown
        for note in state.notes[notes_shown:]:
            show(f"          {note}")
            notes_shown += 1
        show(plain_line(state))

    def repeat() -> None:
        while not ended.wait(_SECONDS_PER_LINE):
            show_state()

    show(f"weightsync demo  {_title(state)}")
    thread = threading.Thread(target=repeat, name="display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show_state()


@contextlib.contextmanager
def live_display(console: Console, state: RunState) -> Iterator[None]:
    """Draw a panel several times a second while the context lasts."""

    def draw() -> RenderableType:
        return panel(state, min(console.width, _WIDEST), console.height)

    with Live(console=console, get_renderable=draw, refresh_per_second=_FRAMES_PER_SECOND):
        yield


def _title(state: RunState) -> str:
    settings = state.settings
    workers = f"{settings.workers} worker" + "s" * (settings.workers != 1)
    sync = "asynchronous" if settings.overlap else "blocking"
    return f"CartPole-v1, {workers} over {_MEDIA[settings.scheme]}, {sync} sync, seed {settings.seed}"


def plain_line(state: RunState) -> str:
    """The current state of a run, in one line."""
    name, version = _sender(state)
    if state.phase is Phase.STARTING:
        return f"          {state.phase.value}, {state.age:.0f} s: trainer {name}"
    workers = []
    for index, worker in enumerate(state.workers):
        behind = _behind(state, worker)
        words = worker.state if behind is None else f"{worker.state} v{worker.version} ({behind} behind)"
        workers.append(f"worker {index} " + ("LOST" if _link(state, index) == "lost" else words))
    transfer = state.report.transfer_s if state.report else 0.0
    return (
        f"{state.elapsed:6.1f} s  {state.phase.value}  mean return {_number(state.last_mean)}  {state.steps:,} steps  "
        f"trainer {name} v{version}  {', '.join(workers)}  sync {_ms(transfer)}"
    )


def _sender(state: RunState) -> tuple[str, int]:
    """The state of the trainer's sender, and the last version it sent."""
    return (state.sender.state.value, state.sender.version) if state.sender else ("uninitialized", 0)


def _behind(state: RunState, worker: WorkerState) -> int | None:
    """How many versions a worker is behind the trainer; None if it serves none yet."""
    return None if worker.version is None else max(0, _sender(state)[1] - worker.version)


def _link(state: RunState, index: int) -> str:
    entry = state.sender.workers.get(index) if state.sender else None
    return entry.link_state.value if entry else "none"


def panel(state: RunState, width: int, height: int) -> RenderableType:
    """The current state of a run, as a panel of the given width; on a low terminal the chart is lower."""
    notes = [Text(note.splitlines()[0], style="yellow") for note in state.notes[-_NOTES_SHOWN:]]
    spare = height - _LINES_BESIDE_CHART - len(state.workers) - len(notes)
    chart_height = min(max(spare, _CHART_LINES[0]), _CHART_LINES[-1])
    parts = [Text(_title(state)), _clock(state, width), Text(), *chart(state, width - 14, chart_height), Text()]
    parts += [_machines(state), Text(), _syncs(state), *([Text(), *notes] if notes else [])]
    return Panel(
        Group(*parts),
        title=Text("weightsync demo", style="bold"),
        title_align="left",
        subtitle=Text("Ctrl-C ends it", style="dim") if state.phase is not Phase.ENDED else None,
        subtitle_align="right",
        border_style="blue",
        width=width,
        padding=(1, 2),
    )


def _clock(state: RunState, width: int) -> RenderableType:
    starting, seconds = state.phase is Phase.STARTING, state.settings.seconds
    bar = ProgressBar(total=seconds, completed=min(state.elapsed, seconds), width=max(10, width - 50), pulse=starting)
    time = f"{state.age:.0f} s" if starting else f"{state.elapsed:.0f} s of at most {seconds:.0f} s"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text(state.phase.value, style="bold"), bar, Text(time, style="cyan"))
    return grid


def chart(state: RunState, width: int, height: int) -> list[Text]:
    """The mean return over the steps learned from, with its axes."""
    levels = [round(value / _HIGHEST_RETURN * height * 8) for value in _resampled(state.curve, width)]
    mean = (_number(state.last_mean), "bold"), (" of 500", "dim")
    lines = [Text.assemble("mean return of the last 20 episodes  ", *mean)]
    for i in range(height):
        label = {0: "500 ┤", height // 2: "250 ┤"}.get(i, "    │")
        row = "".join(_BLOCKS[min(max(level - 8 * (height - 1 - i), 0), 8)] for level in levels)
        lines.append(Text.assemble((label, "dim"), (row, _COLOURS[i * len(_COLOURS) // height])))
    axis = f"  0 └ {state.steps:,} steps, {len(state.returns):,} episodes, {state.updates:,} updates"
    return [*lines, Text(axis, style="dim")]


def _resampled(points: Sequence[tuple[int, float]], columns: int) -> list[float]:
    """The mean of the points in each column; a column without points continues the one before."""
    groups: list[list[float]] = [[] for _ in range(columns)]
    for x, y in points:
        groups[(columns - 1) * x // points[-1][0]].append(y)
    means: list[float] = []
    for group in groups:
        means.append(sum(group) / len(group) if group else (means[-1] if means else 0.0))
    return means


def _machines(state: RunState) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading, width in (("machine", 9), ("state", 13), ("version", 0), ("behind", 0), ("link", 8)):
        table.add_column(heading, justify="left" if width else "right", min_width=width)
    for heading in ("steps", "episodes"):
        table.add_column(heading, justify="right", min_width=8)
    name, version = _sender(state)
    table.add_row("trainer", _styled(name), str(version), "", "", f"{state.steps:,}", "")
    for index, worker in enumerate(state.workers):
        link, behind = _link(state, index), _behind(state, worker)
        table.add_row(
            f"worker {index}",
            _styled("unknown" if link == "lost" else worker.state),
            "" if worker.version is None else str(worker.version),
            Text("" if behind is None else str(behind), style="red" if behind and behind > 1 else ""),
            "" if link == "none" else _styled(link),
            f"{worker.steps:,}",
            f"{worker.episodes:,}",
        )
    return table


def _syncs(state: RunState) -> Table:
    report = state.report
    last, size = "none yet", 0
    if report:
        last = f"packed in {_ms(report.pack_s)}, answered after {_ms(report.transfer_s)}"
        last, size = f"{last}, applied in {_ms(report.apply_s)}", report.nbytes
    grid = Table.grid(padding=(0, 2))
    for label, words in (
        ("last sync", last),
        ("so far", f"{state.syncs:,} syncs of {decimal(size)}, {decimal(state.applied_bytes)} applied"),
        (
            "experience",
            f"{state.staleness:.1f} versions old when used, {state.dropped:,} steps dropped as too old",
        ),
    ):
        grid.add_row(Text(label, style="dim"), words)
    return grid


def proof_table(result: Result) -> Table:
    """The table of each machine's final version and digest."""
    table = Table(title="Final version and digest of each machine", title_justify="left", header_style="bold")
    for heading in ("machine", "verdict"):
        table.add_column(heading)
    table.add_column("version", justify="right")
    table.add_column("digest of its weights", min_width=32, overflow="fold")
    table.add_row("trainer", "sent last", str(result.sent.version), result.sent.digest.hex())
    for worker in result.workers:
        verdict = worker.verdict.value
        found = (str(worker.proof.version), worker.proof.digest.hex()) if worker.proof else ("unknown", "unknown")
        table.add_row(f"worker {worker.index}", Text(verdict, style=_STYLES.get(verdict, "bold red")), *found)
    return table


def summary(result: Result) -> Iterator[Text]:
    """The result of the run in a few lines."""
    state = result.state
    yield Text(
        f"trained: mean return {_number(state.last_mean)} over the last 20 episodes, {_number(state.first_mean)} over "
        f"the first; {state.updates:,} updates, {state.steps:,} steps, {len(state.returns):,} episodes, "
        f"{state.elapsed:.1f} s"
    )
    killed, proved = result.of(Verdict.KILLED), len(result.of(Verdict.PROVED))
    for index in killed:
        reason = result.workers[index].reason
        yield Text(f"lost: worker {index} was killed half way on request, and is reported LOST ({reason})")
    for failure in result.failures:
        yield Text(f"FAILED: {failure}", style="bold red")
    if not result.failures:
        who = (f"all {proved}" if proved > 1 else "the only") + (" remaining" if killed else "")
        noun = "workers serve" if proved > 1 else "worker serves"
        yield Text(f"proved: {who} {noun} version {result.sent.version}, by digest", style="bold green")


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, "dim"))


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
