"""The output of `weightsync demo`: a live panel on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weightsync.demo import Phase, RunState, SchemeName, Verdict, WorkerState
from weightsync.protocol.sender import LinkState

_FRAMES_PER_SECOND = 6
_SECONDS_PER_LINE = 2.0
_HIGHEST_RETURN = 500.0
_WIDEST = 100
_NOTES_SHOWN = 4
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
    ended, shown = threading.Event(), 0

    def show(*lines: str) -> None:
        console.print(*lines, sep="\n", soft_wrap=True, markup=False, highlight=False)

    def show_state() -> None:
        nonlocal shown
        news, shown = state.notes[shown:], len(state.notes)
        show(*(f"          {note}" for note in news), plain_line(state))

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


def live_display(console: Console, state: RunState) -> Live:
    """Draw a panel several times a second while the context lasts."""
    width = min(console.width, _WIDEST)
    return Live(console=console, get_renderable=lambda: panel(state, width), refresh_per_second=_FRAMES_PER_SECOND)


def _title(state: RunState) -> str:
    settings = state.settings
    workers = f"{settings.workers} worker" + "s" * (settings.workers != 1)
    sync = "asynchronous" if settings.overlap else "blocking"
    return f"CartPole-v1, {workers} over {_MEDIA[settings.scheme]}, {sync} sync, seed {settings.seed}"


def plain_line(state: RunState) -> str:
    """The current state of a run, in one line."""
    name, version = _sender(state)
    if state.phase is Phase.STARTING:
        return f"          {state.phase.value}, {state.elapsed:.0f} s: trainer {name}"
    workers = []
    for worker in state.workers:
        behind = _versions_behind(state, worker)
        words = worker.state if behind is None else f"{worker.state} v{worker.version} ({behind} behind)"
        workers.append(f"worker {worker.index} " + ("LOST" if _link(state, worker) is LinkState.LOST else words))
    transfer = state.report.transfer_s if state.report else 0.0
    return (
        f"{state.elapsed:6.1f} s  {state.phase.value}  mean return {_number(state.last_mean)}  {state.steps:,} steps  "
        f"trainer {name} v{version}  {', '.join(workers)}  sync {_ms(transfer)}"
    )


def _sender(state: RunState) -> tuple[str, int]:
    """The state of the trainer's sender, and the last version it sent."""
    return (state.sender.state.value, state.sender.version) if state.sender else ("uninitialized", 0)


def _versions_behind(state: RunState, worker: WorkerState) -> int | None:
    """How many versions a worker is behind the trainer; None if it serves none yet."""
    return None if worker.version is None else max(0, _sender(state)[1] - worker.version)


def _link(state: RunState, worker: WorkerState) -> LinkState | None:
    """The state of the sender's link to a worker; None: there is no link yet."""
    entry = state.sender.workers.get(worker.index) if state.sender else None
    return entry.link_state if entry else None


def panel(state: RunState, width: int) -> RenderableType:
    """The current state of a run, as a panel of the given width."""
    notes = [Text(note.splitlines()[0], style="yellow") for note in state.notes[-_NOTES_SHOWN:]]
    parts = Group(_title(state), "", _machines(state), "", _figures(state), "", *notes)
    subtitle = None if state.phase is Phase.ENDED else "[dim]Ctrl-C ends it"
    return Panel(parts, title="weightsync demo", subtitle=subtitle, border_style="blue", width=width, padding=(1, 2))


def _figures(state: RunState) -> Table:
    """How far the time and the training are, and what the syncs cost."""
    starting, mean, report = state.phase is Phase.STARTING, state.last_mean, state.report
    pack, transfer, apply = (report.pack_s, report.transfer_s, report.apply_s) if report else (0.0, 0.0, 0.0)
    size = decimal(report.nbytes if report else 0)
    limit = "" if starting else f" of {state.settings.seconds:.0f} s"
    grid = Table.grid("", "", padding=(0, 2))
    grid.add_row(
        f"{state.phase.value} {state.elapsed:.0f} s{limit}", _bar(state.elapsed, state.settings.seconds, starting)
    )
    grid.add_row(f"mean return {_number(mean)}", _bar(mean or 0.0, _HIGHEST_RETURN))
    grid.add_row("last sync", f"packed in {_ms(pack)}, answered after {_ms(transfer)}, applied in {_ms(apply)}")
    grid.add_row("so far", f"{state.syncs:,} syncs of {size}, {decimal(state.applied_bytes)} applied")
    grid.add_row(
        "experience", f"{state.staleness:.1f} versions old when used, {state.dropped:,} steps dropped as too old"
    )
    return grid


def _bar(value: float, most: float, pulse: bool = False) -> ProgressBar:
    return ProgressBar(total=most, completed=min(value, most), width=40, pulse=pulse)


def _machines(state: RunState) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for heading in ("machine", "state", "link"):
        table.add_column(heading, min_width=9)
    for heading in ("version", "behind", "steps", "episodes"):
        table.add_column(heading, justify="right", min_width=7)
    name, version = _sender(state)
    table.add_row("trainer", _styled(name), "", str(version), "", f"{state.steps:,}", f"{len(state.returns):,}")
    for worker in state.workers:
        link, behind = _link(state, worker), _versions_behind(state, worker)
        table.add_row(
            f"worker {worker.index}",
            _styled("unknown" if link is LinkState.LOST else worker.state),
            "" if link is None else _styled(link.value),
            "" if worker.version is None else str(worker.version),
            Text("" if behind is None else str(behind), style="red" if behind and behind > 1 else ""),
            f"{worker.steps:,}",
            f"{worker.episodes:,}",
        )
    return table


def proof_table(state: RunState) -> Table:
    """The table of each machine's final version and digest."""
    table = Table("machine", "verdict", title="Final version and digest of each machine", title_justify="left")
    table.add_column("version", justify="right")
    table.add_column("digest of its weights", min_width=32, overflow="fold")
    table.add_row("trainer", "sent last", str(state.sent.version), state.sent.digest.hex())
    for worker, verdict, _ in state.verdicts:
        found = (str(worker.proof.version), worker.proof.digest.hex()) if worker.proof else ("unknown", "unknown")
        style = _STYLES.get(verdict.value, "bold red")
        table.add_row(f"worker {worker.index}", Text(verdict.value, style=style), *found)
    return table


def summary(state: RunState) -> Iterator[Text]:
    """The result of the run in a few lines."""
    yield Text(
        f"trained: mean return {_number(state.last_mean)} over the last 20 episodes, {_number(state.first_mean)} over "
        f"the first; {state.updates:,} updates, {state.steps:,} steps, {len(state.returns):,} episodes, "
        f"{state.elapsed:.1f} s"
    )
    killed, proved = state.of(Verdict.KILLED), len(state.of(Verdict.PROVED))
    for index in killed:
        reason = state.workers[index].lost
        yield Text(f"lost: worker {index} was killed half way on request, and is reported LOST ({reason})")
    for failure in state.failures:
        yield Text(f"FAILED: {failure}", style="bold red")
    if not state.failures:
        who = (f"all {proved}" if proved > 1 else "the only") + (" remaining" if killed else "")
        noun = "workers serve" if proved > 1 else "worker serves"
        yield Text(f"proved: {who} {noun} version {state.sent.version}, by digest", style="bold green")


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, "dim"))


def _number(value: float | None) -> str:
    return "none yet" if value is None else f"{value:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
