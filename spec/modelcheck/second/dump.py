"""The state graph of a configuration, from one run of TLC that prints every step and is parsed meanwhile."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from modelcheck.second.graph import Graph
from modelcheck.second.labelling import MODULE, labelling_config, labelling_module
from modelcheck.second.reading import GraphReader
from weightsync.errors import WeightSyncError
from weightsync.model.config import Value
from weightsync.model.output import Counts, Findings
from weightsync.model.process import FOLDER_PREFIX, Ending, Job, Size, TlcRun
from weightsync.model.text import Library
from weightsync.model.toolchain import Toolchain

#: The most nodes that are read of a graph.
MOST_NODES = 150_000


_TIMEOUT = 1800.0


@dataclass(frozen=True, slots=True)
class Model:
    """The model whose graph is dumped.

    Attributes:
        folder: the folder of the modules.
        root: the root module.
        constants: their values.
        following: the name of its next-state relation.
    """

    folder: Path
    root: str
    constants: Mapping[str, Value]
    following: str = "Next"


class Dumped(Enum):
    """The result of a dump."""

    WHOLE = "whole"
    #: Only the nodes that TLC met first, since the graph has more than were asked for.
    PART = "part"


class DumpError(WeightSyncError):
    """TLC did not print its whole graph, or printed a graph of another size than it counted."""


@dataclass(frozen=True, slots=True)
class Dump:
    """A graph as TLC printed it.

    Attributes:
        graph: the graph, or the part that was read.
        became: whether it is the whole graph.
        counts: TLC's counts, if it is the whole graph.
    """

    graph: Graph
    became: Dumped
    counts: Counts | None


class GraphRun:
    """One dump of a graph. `run` blocks until it has ended. `stop`, from any thread, ends it early."""

    def __init__(self, toolchain: Toolchain, model: Model, size: Size = Size.SMALL, most: int = MOST_NODES) -> None:
        self._model = model
        self._most = most
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True)
        job = Job(Path(self._folder.name), MODULE, labelling_config(model.constants), timeout=_TIMEOUT, size=size)
        self._run = TlcRun(toolchain, job)
        self._reader = GraphReader()
        self._enough = False

    def run(self) -> Dump:
        """Run TLC and read its graph.

        Raises:
            DumpError: TLC failed, or its counts differ from the graph that it printed.
            ConfigurationError: the model cannot be labelled.
        """
        with self._folder as folder:
            self._write(Path(folder))
            outcome = self._run.run(lambda _: None, self._read)
        if self._enough:
            return Dump(self._reader.graph, Dumped.PART, None)
        if outcome.ending is not Ending.EXITED or outcome.exit_code != 0 or not outcome.findings.completed:
            said = " / ".join([*outcome.findings.errors, *outcome.loose])[-2000:]
            raise DumpError(
                f"TLC printed no whole graph ({outcome.ending.value}, exit code {outcome.exit_code}): {said}"
            )
        return Dump(self._reader.graph, Dumped.WHOLE, self._counted(outcome.findings))

    def stop(self) -> None:
        """Kill the JVM. `run` raises soon after."""
        self._run.stop()

    def _write(self, folder: Path) -> None:
        for module in self._model.folder.glob("*.tla"):
            shutil.copy(module, folder)
        text = labelling_module(Library(self._model.folder), self._model.root, self._model.following)
        (folder / f"{MODULE}.tla").write_text(text, encoding="utf-8")

    def _read(self, line: str) -> None:
        if self._enough:
            return
        self._reader.feed(line)
        if len(self._reader.graph.nodes) > self._most:
            self._enough = True
            self._run.stop()

    def _counted(self, findings: Findings) -> Counts:
        graph = self._reader.graph
        read = Counts(self._reader.printed + 1, len(graph.nodes), graph.depth)
        if findings.counts != read:
            raise DumpError(f"TLC counted {findings.counts} and printed {read}: a step was lost, or printed twice.")
        return read
