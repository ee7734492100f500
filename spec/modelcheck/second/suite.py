"""Runs the second checks, a few at a time, and formats their verdicts.

No JVM outlives the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from rich.text import Text

from modelcheck.second.dump import DumpError, GraphRun, Model
from modelcheck.second.judgement import (
    SecondVerdict,
    judge_again,
    nodes_to_read,
    question_of,
    reason_to_leave_out,
)
from weightsync.model.manifest import Manifest
from weightsync.model.process import Size
from weightsync.model.suite import cores
from weightsync.model.text import Library
from weightsync.model.toolchain import Toolchain
from weightsync.model.verdict import Verdict

_MOST_AT_ONCE = 2
_FEW_STATES = 20_000


class SecondSuite:
    """Examines configurations that TLC has judged.

    Args:
        toolchain: Java and TLC.
        manifest: the model's manifest.
        ended: called with each verdict, in the caller's thread.
    """

    def __init__(self, toolchain: Toolchain, manifest: Manifest, ended: Callable[[SecondVerdict], None]) -> None:
        self._toolchain = toolchain
        self._manifest = manifest
        self._ended = ended
        self._library = Library(manifest.folder)
        self._runs: list[GraphRun] = []
        self._stopped = False

    def run(self, verdicts: Sequence[Verdict]) -> list[SecondVerdict]:
        """Examine them all, the largest first, and return the verdicts in the order asked for.

        If the call ends early, even by an interrupt, the JVMs are ended and their folders removed first.

        Raises:
            ConfigurationError: a property has no second reading.
        """
        largest_first = sorted(range(len(verdicts)), key=lambda place: -_states(verdicts[place]))
        done: dict[int, SecondVerdict] = {}
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, cores())) as pool:
            waiting: dict[Future[SecondVerdict], int] = {}
            try:
                for place in largest_first:
                    waiting[pool.submit(self._examine, verdicts[place])] = place
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        done[waiting.pop(future)] = future.result()
                        self._ended(future.result())
            finally:
                self._stop()
        return [done[place] for place in range(len(verdicts))]

    def _examine(self, first: Verdict) -> SecondVerdict:
        started = time.monotonic()
        configuration = first.configuration
        reason = reason_to_leave_out(configuration, self._library)
        if reason:
            return SecondVerdict(first, left_out=reason)
        question = question_of(configuration.config)
        size = Size.SMALL if _states(first) < _FEW_STATES else Size.LARGE
        model = Model(self._manifest.folder, configuration.module, configuration.config.constants)
        run = GraphRun(self._toolchain, model, size, nodes_to_read(first, question))
        self._runs.append(run)
        try:
            if self._stopped:
                run.stop()
            dump = run.run()
        except DumpError as error:
            return SecondVerdict(first, complaints=(str(error),), seconds=time.monotonic() - started)
        finally:
            self._runs.remove(run)
        return judge_again(first, question, dump, time.monotonic() - started)

    def _stop(self) -> None:
        self._stopped = True
        for run in list(self._runs):
            run.stop()


def _states(verdict: Verdict) -> int:
    pinned = verdict.configuration.pinned
    return pinned.generated if pinned else 0


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
    """Yield the summary: how many verdicts agree, and what was left out."""
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
