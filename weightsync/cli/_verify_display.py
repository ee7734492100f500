"""What `weightsync verify` shows: a row a run, then the lines that are wrong, in words."""

from __future__ import annotations

from rich.table import Table

from weightsync.verify import Judgement, Run, Verdict

_STYLES = {Judgement.CONFORMS: "green", Judgement.DOES_NOT: "red"}
#: Rows that are shown; the rest is counted.
_ROWS = 40


def results(verdict: Verdict) -> Table:
    """A row a run: its machines, its lines, and whether it conforms. Those that do not come first."""
    table = Table("run", "senders", "receivers", "events", "verdict", box=None, pad_edge=False)
    rows = sorted(enumerate(verdict.runs, 1), key=lambda row: row[1].judgement is Judgement.CONFORMS)
    for number, run in rows[:_ROWS]:
        counts = [sum(machine.role == role for machine in run.machines) for role in ("sender", "receiver")]
        style = _STYLES[run.judgement]
        table.add_row(str(number), *map(str, counts), str(run.events), f"[{style}]{_verdict(run)}[/]")
    return table


def _verdict(run: Run) -> str:
    said = run.judgement.value
    if not run.findings:
        return said
    line = run.findings[0].line
    return f"{said}: {line.path.name}:{line.number}"


def summary(verdict: Verdict) -> str:
    """How much was judged, and what was not seen."""
    counted = f"{len(verdict.runs)} runs, {verdict.events} events, {len(verdict.files)} files"
    unseen = sum(len(run.unseen) for run in verdict.runs)
    said = "all conform" if verdict.conforms else f"{len(verdict.findings)} lines do not conform"
    missing = f"; {unseen} messages came from machines that are in no file given, or behind its end" if unseen else ""
    return f"{counted}: {said}{missing}."
