"""Writes runs in TLA+ and has TLC follow them over the actions of AckProtocol.tla, many runs in one JVM."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Self

from weightsync.errors import WeightSyncError
from weightsync.model.manifest import find_model
from weightsync.model.process import FOLDER_PREFIX
from weightsync.model.toolchain import Toolchain
from weightsync.verify.acting import SenderActs, WorkerActs
from weightsync.verify.judging import Run
from weightsync.verify.lines import Finding
from weightsync.verify.naming import BeyondTheModelError, Bounds, Naming, RecordedAction, Value

RULE = "the model, by TLC"
_SECONDS = 300.0
_ACCEPTED = re.compile(r'<<"ACCEPT", (\d+)>>')
_REACHED = re.compile(r'<<"REACHED", (\d+), (\d+)>>')
_INVARIANTS = ("TypeOK", "Consistent", "EveryMessageHasARow", "NoTornRead", "RefusalKeepsServing")
_PROPERTIES = (
    "OnlyRows",
    "AckNamesItsVersion",
    "AckedMeansServed",
    "ServingIsMonotone",
    "OneOutstanding",
    "ServedChangesByApplied",
    "OnlyTargetsChange",
    "ClosedIsFinal",
    "OutcomesAreTrue",
)
#: Checks the wrapper, not the runs. It costs more than all other properties, so only the first batch has it, with about
#: one run per action.
_FOLLOWING_PROPERTY = "OnlyTheModels"
#: How many events one JVM follows, and how many JVMs run at once: each uses one core, and up to 2 GB.
_BATCH = 4000
_MAX_JVMS = 2


class TlcFailedError(WeightSyncError):
    """In `weightsync verify`, TLC failed before it had followed the traces to their end.

    What to do: read TLC's output in the message. Without ``--tlc`` the traces can still be checked.
    """


@dataclass
class Followed:
    """The result of TLC for runs."""

    #: Runs that were followed to their ends, and how many of them were different.
    accepted: int = 0
    ways: int = 0
    #: Events of the different runs.
    events: int = 0
    findings: list[Finding] = field(default_factory=list)
    #: Runs that the model cannot follow, by reason.
    left_out: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """How much was followed, and what was left to the Python checker."""
        left_out = ", ".join(f"{count} ({why})" for why, count in self.left_out.most_common())
        followed = f"TLC followed {self.accepted} runs to their ends ({self.ways} different, of {self.events} events)"
        refused = f", {len(self.findings)} not" if self.findings else ""
        return f"{followed}{refused}; left out: {left_out or 'none'}."

    def record(self) -> dict[str, Any]:
        """The whole result, as JSON."""
        findings = [finding.record() for finding in self.findings]
        counts = {"accepted": self.accepted, "ways": self.ways, "events": self.events, "left_out": dict(self.left_out)}
        return {**counts, "findings": findings}


def follow(tools: Toolchain, runs: Sequence[Run], bounds: Bounds | None = None) -> Followed:
    """Have TLC follow runs that the Python checker found to conform; equal runs are followed once.

    Raises TlcFailedError: TLC failed.
    """
    followed, ways = Followed(), dict[str, list[Modelled]]()
    for run in runs:
        try:
            trace = modelled(run, bounds or Bounds())
        except BeyondTheModelError as error:
            followed.left_out[str(error)] += 1
        else:
            ways.setdefault(trace.text, []).append(trace)
    if ways:
        every_action, others = _with_every_action(ways)
        batches = [every_action, *_batches(others)]
        checked = [(_FOLLOWING_PROPERTY,), *repeat((), len(batches) - 1)]
        with ThreadPoolExecutor(_MAX_JVMS) as pool, Jvms() as jvms:
            found = pool.map(partial(_accepted_in_batch, tools, jvms), batches, checked)
            for batch, accepted in zip(batches, found, strict=True):
                _count(tools, jvms, batch, accepted, followed)
    return followed


class Jvms:
    """The JVMs that follow runs, in several threads. All have ended with the context, however that is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[str]] = []
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._over = True
            for process in self._started:
                process.kill()
            for process in self._started:  # the pool does not wait for a thread whose start a signal interrupted
                process.wait()

    def run(self, command: Sequence[str], folder: Path) -> tuple[int, str]:
        """Run one; returns its exit code and its output. Raises subprocess.TimeoutExpired: it took too long."""
        with self._lock:
            if self._over:
                raise TlcFailedError("TLC was ended before it had followed all traces.")
            process = subprocess.Popen(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
            )
            self._started.append(process)
        with process:
            try:
                output, _ = process.communicate(timeout=_SECONDS)
            finally:
                process.kill()
        return process.returncode, output


def _with_every_action(ways: Mapping[str, list[Modelled]]) -> tuple[list[list[Modelled]], list[list[Modelled]]]:
    """Small runs that together take every action that any run takes, and the other runs. Both by size."""
    met: set[Value] = set()
    chosen, others = list[list[Modelled]](), list[list[Modelled]]()
    for text in sorted(ways, key=lambda text: (ways[text][0].size, text)):
        actions = {act.action["a"] for act in ways[text][0].acts}
        (others if actions <= met else chosen).append(ways[text])
        met |= actions
    return chosen, others


def _batches(ways: Sequence[list[Modelled]]) -> Iterator[list[list[Modelled]]]:
    """Group different runs into batches. A batch takes the largest constants of its runs, so small ones go together."""
    batch: list[list[Modelled]] = []
    events = 0
    for alike in ways:
        acts = len(alike[0].acts)
        if batch and events + acts > _BATCH:
            yield batch
            batch, events = [], 0
        batch.append(alike)
        events += acts
    if batch:
        yield batch


def _accepted_in_batch(
    tools: Toolchain, jvms: Jvms, batch: Sequence[Sequence[Modelled]], more: Sequence[str]
) -> set[int]:
    return accepted_of(tools, [alike[0] for alike in batch], more, jvms)


def _count(
    tools: Toolchain, jvms: Jvms, batch: Sequence[Sequence[Modelled]], accepted: set[int], followed: Followed
) -> None:
    followed.accepted += sum(len(alike) for number, alike in enumerate(batch, 1) if number in accepted)
    followed.ways += len(accepted)
    followed.events += sum(len(alike[0].acts) for alike in batch)
    refused = [alike[0] for number, alike in enumerate(batch, 1) if number not in accepted]
    followed.findings += _find_refusals(tools, jvms, refused) if refused else []


def accepted_of(
    tools: Toolchain, traces: Sequence[Modelled], more: Sequence[str] = (), jvms: Jvms | None = None
) -> set[int]:
    """Which of the traces, counted from 1, TLC follows to their ends. Raises TlcFailedError: TLC failed."""
    output = _run(tools, traces, _config(traces, (), more), jvms or Jvms())
    return {int(number) for number in _ACCEPTED.findall(output)}


def _find_refusals(tools: Toolchain, jvms: Jvms, refused: Sequence[Modelled]) -> list[Finding]:
    """How far the model could follow each run that it refused."""
    reached: Counter[int] = Counter()
    for number, at in _REACHED.findall(_run(tools, refused, _config(refused, ("Reached",), ()), jvms)):
        reached[int(number)] = max(reached[int(number)], int(at))
    findings = []
    for number, trace in enumerate(refused, 1):
        act = trace.acts[min(reached[number], len(trace.acts) - 1)]
        what = f"the model cannot take {act.action['a']} here, or not with this result"
        findings.append(Finding(act.line, what, (f"the actions of AckProtocol.tla; this is {act.action}",), RULE))
    return findings


def _run(tools: Toolchain, traces: Sequence[Modelled], config: str, jvms: Jvms) -> str:
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for module in ("AckProtocol", "Tables", "WeightSync", "Trace"):
            shutil.copy(find_model() / f"{module}.tla", folder)
        (folder / "TraceData.tla").write_text(data_module(traces), encoding="utf-8")
        (folder / "Trace.cfg").write_text(config, encoding="utf-8")
        try:
            exit_code, output = jvms.run(_command(tools, folder), folder)
        except subprocess.TimeoutExpired as error:
            raise TlcFailedError(f"TLC did not follow {len(traces)} traces within {_SECONDS:.0f} s.") from error
    if exit_code != 0:
        raise TlcFailedError(f"TLC failed on {len(traces)} traces (exit {exit_code}):\n{_message_of(output)}")
    return output


def _command(tools: Toolchain, folder: Path) -> list[str]:
    jvm = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx2g", "-Xss64m", f"-Djava.io.tmpdir={folder}"]
    tlc = ["-workers", "1", "-metadir", str(folder / "meta"), "-config", "Trace.cfg", "Trace.tla"]
    return [str(tools.java), *jvm, "-cp", str(tools.jar), "tlc2.TLC", *tlc]


def _message_of(output: str) -> str:
    lines = [line for line in output.splitlines() if not line.startswith("<<")]
    return "\n".join(lines[-40:])


def _config(traces: Sequence[Modelled], invariants: Sequence[str], properties: Sequence[str]) -> str:
    def most(sizes: Sequence[int]) -> int:
        return max(1, *sizes)

    senders, workers = most([t.senders for t in traces]), most([t.workers for t in traces])
    constants = {
        "Senders": literal(frozenset(range(1, senders + 1))),
        "Workers": literal(frozenset(range(1, workers + 1))),
        "MaxVersion": str(most([t.versions for t in traces])),
        "MaxLink": str(most([t.links for t in traces])),
        "MaxClock": str(senders),
        **dict.fromkeys(("Reorders", "Duplicates", "Loses", "Lingers"), "TRUE"),
        "Without": "{}",
        "Unfair": "{}",
    }
    lines = ["SPECIFICATION FollowSpec", "CHECK_DEADLOCK FALSE", "CONSTANTS"]
    lines += [f"  {name} = {value}" for name, value in constants.items()]
    lines += ["  Features <- AllFeatures"]
    lines += ["INVARIANTS", *(f"  {name}" for name in (*_INVARIANTS, *invariants))]
    return "\n".join([*lines, "PROPERTIES", *(f"  {name}" for name in (*_PROPERTIES, *properties)), ""])


@dataclass
class Modelled:
    """A run as the model's events, with the constants that it needs."""

    run: Run
    acts: list[RecordedAction]
    senders: int
    workers: int
    versions: int
    links: int

    @property
    def size(self) -> int:
        """How large the model's constants must be for it. The cost of an event for TLC grows with them."""
        return self.senders * self.workers * self.links * self.versions

    @property
    def text(self) -> str:
        """Its events in TLA+."""
        return ",\n".join(literal(act.action) for act in self.acts)


def modelled(run: Run, bounds: Bounds) -> Modelled:
    """The model's events of a run, in the order of time. Raises BeyondTheModelError: the model cannot follow it."""
    names = Naming(run, bounds)
    acts: list[tuple[int, RecordedAction]] = []
    for name, number in names.senders.items():
        acts += SenderActs(names).of(names.network.by_name[name], number)
    for worker in set(names.worker_of.values()):
        acts += WorkerActs(names).of(worker)
    acts.sort(key=lambda act: act[0])
    if len(acts) > bounds.events:
        raise BeyondTheModelError(f"more than {bounds.events} events")
    ordered = [act for _, act in acts]
    return Modelled(run, ordered, len(names.senders), len(names.workers), names.versions, names.deepest)


def literal(value: Value) -> str:
    """A value in TLA+."""
    match value:
        case bool():
            return "TRUE" if value else "FALSE"
        case int():
            return str(value)
        case str():
            return f'"{value}"'
        case tuple():
            return f"<<{', '.join(map(literal, value))}>>"
        case frozenset():
            return f"{{{', '.join(map(literal, sorted(value)))}}}"
    return f"[{', '.join(f'{name} |-> {literal(each)}' for name, each in value.items())}]"


def data_module(traces: Sequence[Modelled]) -> str:
    """`TraceData.tla`: the traces as one literal."""
    literals = ",\n".join(f"<<\n{trace.text}\n>>" for trace in traces)
    return f"---- MODULE TraceData ----\nTraces == <<\n{literals}\n>>\n====\n"
