"""What `spec/check.py model --second` shows: a line for each configuration, and at the end what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from modelcheck.second import SecondVerdict


def second_line(verdict: SecondVerdict) -> Text:
    """Return a second verdict in one line."""
    name = verdict.first.configuration.name
    if verdict.left_out:
        return Text.assemble(("left out", "yellow"), f"  {name}  {verdict.left_out}")
    mark, style = ("agrees", "green") if verdict.agrees else ("DISAGREES", "bold red")
    whole = "" if verdict.counts else " (as many as show it)"
    line = Text.assemble((mark, style), f"  {name}  {verdict.nodes:,} states, {verdict.edges:,} edges{whole}")
    line.append(f"  {verdict.seconds:.1f} s", style="cyan")
    line.append(f"  {verdict.found}", style="dim")
    return line


def second_summary(verdicts: Sequence[SecondVerdict], seconds: float) -> Iterator[Text]:
    """Yield the lines that count."""
    examined = [verdict for verdict in verdicts if not verdict.left_out]
    agreeing = sum(verdict.agrees for verdict in examined)
    edges = sum(verdict.edges for verdict in examined)
    yield Text(
        f"The second checker agrees with TLC on {agreeing} of {len(examined)} configurations "
        f"({edges:,} edges), in {seconds:.0f} s.",
        style="bold green" if agreeing == len(examined) else "bold red",
    )
    for verdict in verdicts:
        if verdict.left_out:
            yield Text(f"  not examined: {verdict.first.configuration.name}: {verdict.left_out}")
