"""What `weightsync demo` says in the end, and how it writes numbers."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from weightsync.demo import Result, Verdict

_VERDICTS = {Verdict.PROVED: "bold green", Verdict.KILLED: "yellow"}


def proof_table(result: Result) -> Table:
    """Who serves what in the end."""
    table = Table(title="What each machine holds in the end", title_justify="left", header_style="bold")
    for heading in ("machine", "verdict"):
        table.add_column(heading)
    table.add_column("version", justify="right")
    table.add_column("digest of its weights", min_width=32, overflow="fold")
    table.add_row("trainer", "sent last", str(result.version), result.digest.hex())
    for fate in result.fates:
        table.add_row(
            f"worker {fate.index}",
            Text(fate.verdict.value, style=_VERDICTS.get(fate.verdict, "bold red")),
            "unknown" if fate.proof is None else str(fate.proof.version),
            "unknown" if fate.proof is None else fate.proof.digest.hex(),
        )
    return table


def summary(result: Result) -> list[Text]:
    """What came of the run, in a few lines."""
    lines = [
        Text(
            f"trained: mean return {number(result.last_mean)} over the last 20 episodes, {number(result.first_mean)} "
            f"over the first; {result.updates:,} updates, {result.steps:,} steps, {result.episodes:,} episodes, "
            f"{result.seconds:.1f} s"
        )
    ]
    proved = len(result.of(Verdict.PROVED))
    lines += [
        Text(f"lost: worker {fate.index} was killed half way as asked, and is reported LOST ({fate.words})")
        for fate in result.fates
        if fate.verdict is Verdict.KILLED
    ]
    if result.shortcomings:
        return [*lines, *(Text(f"FAILED: {text}", style="bold red") for text in result.shortcomings)]
    who = f"all {proved}" if proved > 1 else "the one"
    rest = " remaining" if result.of(Verdict.KILLED) else ""
    noun = "workers serve" if proved > 1 else "worker serves"
    return [*lines, Text(f"proved: {who}{rest} {noun} version {result.version}, by digest", style="bold green")]


def number(value: float | None) -> str:
    """A mean return, if there is one."""
    return "none yet" if value is None else f"{value:.1f}"


def ms(seconds: float) -> str:
    """A time, in milliseconds."""
    return f"{seconds * 1000:.1f} ms"


def size(count: float) -> str:
    """A size, in the unit that suits it."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
