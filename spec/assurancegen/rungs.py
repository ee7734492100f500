"""The rungs of the verification ladder, each with the numbers from its own files."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from modelcheck.mutants import Ledger

from assurancegen.sources import Recorded
from weightsync.model.manifest import Manifest, Purpose

_FAMILIES = ("Pipe", "Slots", "Store", "Calls")
_BESIDE = ("Backlog", "Shared", "Delta", "Parts", "Fanout", "Kernels", "Loader")


def table(root: Path, manifest: Manifest) -> Iterator[str]:
    """The table of the rungs: for each its name, what it catches, and its size."""
    yield "| rung | what it catches | size |"
    yield "|---|---|---|"
    for name, catches, size in _rungs(root, manifest):
        yield f"| {name} | {catches} | {size} |"


def _rungs(root: Path, manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    yield from _configurations(manifest)
    yield _families(manifest)
    yield _challenges(manifest)
    yield _group(manifest)
    yield _beside(manifest)
    yield _inductive(manifest)
    yield _mutants(root)
    yield _graphs(root)
    yield _replayed(root)
    yield (
        "traces (`pytest`, `weightsync verify`)",
        "a driver, a recorder or an order of events that the pure halves, or the model in TLC, do not allow",
        f"{Recorded(root).all()} when last counted; every run is checked against the protocol",
    )
    yield _code_mutants(root)
    yield _driver_mutants(root)


def _configurations(manifest: Manifest) -> Iterator[tuple[str, str, str]]:
    """A row for each kind of configuration that TLC runs."""
    kinds, states = _tally(manifest, {each.module for each in manifest.configurations})
    yield (
        "TLC's proofs (`weightsync check --all`)",
        "a protocol that breaks a guarantee",
        f"{kinds[Purpose.PROOF]} configurations, {states:,} distinct states",
    )
    yield (
        "reverts and unfair runs",
        "a property that is too weak, a rule or a fairness that is not needed",
        f"{kinds[Purpose.REVERT]} runs without one rule, {kinds[Purpose.UNFAIR]} without one fairness condition",
    )
    yield (
        "planted faults (`tla/MCPlant.tla`, `tla/MCPromise.tla`)",
        "a property, or a clause of the promise, that is vacuous",
        f"{kinds[Purpose.PLANTED]} properties that no removed rule violates, each with a fault that violates it; "
        "for each clause of the promise a step that it refuses",
    )
    yield (
        "canaries",
        "a vacuous proof, a checker that accepts everything",
        f"{kinds[Purpose.CANARY]} situations that must be reachable, {kinds[Purpose.CHECKER]} runs that must fail",
    )


def _tally(manifest: Manifest, modules: Container[str]) -> tuple[Counter[Purpose], int]:
    """For the configurations of these modules: how many there are of each purpose, and the sum of pinned states."""
    of = [each for each in manifest.configurations if each.module in modules]
    return Counter(each.purpose for each in of), sum(each.pinned.distinct for each in of if each.pinned)


def _proofs(kinds: Counter[Purpose], states: int) -> str:
    """A cell of the table: the proofs, canaries and removed rules of some modules."""
    return (
        f"{kinds[Purpose.PROOF]} proofs, {states:,} distinct states; {kinds[Purpose.CANARY]} canaries, "
        f"{kinds[Purpose.REVERT]} rules removed"
    )


def _families(manifest: Manifest) -> tuple[str, str, str]:
    kinds, states = _tally(manifest, _FAMILIES)
    return (
        "families of transports (`tla/Pipe.tla`, `Slots.tla`, `Store.tla`, `Calls.tla`), part of the three rows above",
        "a transport that guarantees less than the protocol assumes",
        f"{kinds[Purpose.PROOF]} proofs that each refines AckProtocol, {states:,} distinct states; "
        f"{kinds[Purpose.CANARY]} canaries, {kinds[Purpose.REVERT]} rules removed",
    )


def _challenges(manifest: Manifest) -> tuple[str, str, str]:
    kinds, states = _tally(manifest, ("Challenge",))
    return (
        "challenges under a shared key (`tla/Challenge.tla`); the code under random attackers",
        "a message from somebody without the key that is accepted",
        _proofs(kinds, states),
    )


def _group(manifest: Manifest) -> tuple[str, str, str]:
    kinds, states = _tally(manifest, ("Group",))
    return (
        "worker groups (`tla/Group.tla`); the code by `tests/unit/group`",
        "a step with weights that are too old, a result that names other versions, a wait that never ends",
        _proofs(kinds, states),
    )


def _beside(manifest: Manifest) -> tuple[str, str, str]:
    kinds, states = _tally(manifest, _BESIDE)
    return (
        f"what lies beside the protocol ({', '.join(f'`{name}.tla`' for name in _BESIDE)}), part of the first rows too",
        "a fast path that gives up a guarantee",
        f"{_proofs(kinds, states)}. `tla/README.md` says what compares each module with the code",
    )


def _inductive(manifest: Manifest) -> tuple[str, str, str]:
    kinds, states = _tally(manifest, ("MCInductive",))
    return (
        "an inductive invariant (`tla/Inductive.tla`), part of the first rows too",
        "a violation that no run of bounded length reaches",
        f"{states:,} states, all of the right type that satisfy it, with at most two messages in flight; "
        f"{kinds[Purpose.REVERT]} rules removed",
    )


def _replayed(root: Path) -> tuple[str, str, str]:
    data = json.loads((root / "weightsync" / "testing" / "replay.json").read_text(encoding="utf-8"))
    of = data["configurations"].values()
    paths = sum(len(each["paths"]) for each in of)
    return (
        "replay (`weightsync.testing.check_transport`)",
        "a transport over which the machines diverge from the model, a driver that diverges from its machine",
        f"{len(of)} configurations, {paths} paths that cover every edge of both roles, over each transport",
    )


def _code_mutants(root: Path) -> tuple[str, str, str]:
    kept = tomllib.loads((root / "tests" / "protocol" / "mutation" / "survivors.toml").read_text(encoding="utf-8"))
    unhunted = kept["unhunted"]
    rest = f"; not hunted yet: {len(unhunted)} functions" if unhunted else ""
    page = "`code-mutants.md` there"
    return (
        "mutants of the code (`tests/protocol/mutation`)",
        "a test or a graph that does not check what the machines do",
        f"{kept['killed']} of {kept['mutants']} killed, the others explained ({page}){rest}",
    )


def _driver_mutants(root: Path) -> tuple[str, str, str]:
    kept = tomllib.loads((root / "tests" / "protocol" / "mutation" / "driven.toml").read_text(encoding="utf-8"))
    mutants, killed = (sum(score[what] for score in kept["scores"].values()) for what in ("mutants", "killed"))
    unhunted = kept.get("unhunted", [])
    open_ones = sum(each["reason"] == "not-reviewed" for each in kept["survivor"])
    others = f"{open_ones} that live not reviewed yet, the others explained" if open_ones else "the others explained"
    rest = f"; not hunted yet: {len(unhunted)} functions" if unhunted else ""
    page = "`driver-mutants.md` there"
    return (
        "mutants of the drivers and of the payload's path (`tests/protocol/mutation`)",
        "a test that does not check what they do",
        f"{killed} of {mutants} killed, {others} ({page}){rest}",
    )


def _read_graphs(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / "tests" / "protocol" / "graph" / "digests.json").read_text(encoding="utf-8")))


def graphs(root: Path) -> Iterator[str]:
    """The table of the compared graphs, with their bounds."""
    yield "| graph | bounds | nodes | labelled edges | compared in |"
    yield "|---|---|---|---|---|"
    for name, each in _read_graphs(root).items():
        yield f"| {name} | {each['bounds']} | {each['nodes']:,} | {each['edges']:,} | {each['compared']} |"


def _mutants(root: Path) -> tuple[str, str, str]:
    ledger = Ledger.read(root / "spec" / "modelcheck" / "mutants.toml")
    score = ledger.score
    return (
        "mutants of `tla/AckProtocol.tla` (`python spec/check.py mutants`)",
        "a missing property: a change of the protocol's model that no check notices",
        f"{score.killed} of {score.valid} killed by a property or a canary, the others explained "
        "(`spec/modelcheck/mutants.toml`)",
    )


def _graphs(root: Path) -> tuple[str, str, str]:
    graphs = _read_graphs(root).values()
    nodes, edges = (sum(each[what] for each in graphs) for what in ("nodes", "edges"))
    return (
        "graph equality (`tests/protocol/graph`)",
        "code that differs from the model: a missing, additional or incomplete transition",
        f"{len(graphs)} configurations, {nodes:,} nodes and {edges:,} labelled edges, equal to TLC's",
    )
