"""The properties that TLC checks in each configuration, and the counts pinned for it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from modelcheck.second.bounds import LINKS, Bounds
from weightsync.model.config import Value
from weightsync.model.manifest import COUNTS, MANIFEST, Configuration, Manifest, Purpose
from weightsync.model.output import Counts

#: The modules whose configurations check the properties of AckProtocol.tla over its own actions.
OF_THE_PROTOCOL = ("MC", "MCHunt", "MCGivenUp", "MCInductive")
#: Modules without the protocol: the steps of the promise, a sender's backlog, kernels, a worker group's results and
#: steps, a loader, deltas, parts, a fan-out, and the exchange of challenges.
_WITHOUT_IT = ("MCPromise", "Backlog", "Kernels", "Group", "Loader", "Delta", "Parts", "Fanout", "Challenge")
#: Constants that configurations of the transport families leave out, since their modules set them.
_OF_A_FAMILY: dict[str, Value] = {**dict.fromkeys(LINKS, False), "Without": [], "Unfair": []}
_COUNT_LINE = re.compile(rf"(?:{'|'.join(COUNTS)}) *=")


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration, and what TLC checks in it.

    Attributes:
        configuration: its entry in the manifest.
        properties: the invariants and properties that are checked in it.
        bounds: its constants.
    """

    configuration: Configuration
    properties: tuple[str, ...]
    bounds: Bounds

    @property
    def name(self) -> str:
        """The configuration's name."""
        return self.configuration.name

    @property
    def states(self) -> int:
        """The distinct states that are pinned."""
        return self.configuration.pinned.distinct if self.configuration.pinned else 0

    def allows(self, features: Iterable[str]) -> bool:
        """Whether the configuration has one of these features, or none is named."""
        wanted = set(features)
        return not wanted or bool(wanted & self.bounds.features)


def proofs(manifest: Manifest, modules: Iterable[str] | None = None) -> tuple[Checked, ...]:
    """The manifest's proofs and what TLC checks in each, in the order of the manifest.

    Args:
        manifest: names the configurations.
        modules: only the proofs of these root modules. None: of all modules that contain the protocol.

    Raises:
        ConfigurationError: a constant of the protocol is missing, or is not a plain value.
    """
    wanted = None if modules is None else set(modules)
    found = (each for each in manifest.configurations if each.purpose is Purpose.PROOF)
    of = (each for each in found if each.module not in _WITHOUT_IT)
    return tuple(_checked(each) for each in of if wanted is None or each.module in wanted)


def _checked(configuration: Configuration) -> Checked:
    config = configuration.config
    return Checked(configuration, config.checked, Bounds.read({**_OF_A_FAMILY, **config.constants}))


def pin(manifest: Manifest, seen: Mapping[str, Counts]) -> Manifest:
    """Write counts into the manifest's text, leave all else unchanged, and return the manifest read again.

    Args:
        manifest: the manifest to rewrite.
        seen: a configuration's name to its counts.
    """
    path = manifest.folder / MANIFEST
    head, *tables = re.split(r"(?m)^(?=\[\[configuration\]\])", path.read_text(encoding="utf-8"))
    rewritten = [_repinned(table, seen) for table in tables]
    path.write_text("".join([head, *rewritten]), encoding="utf-8")
    return Manifest.read(manifest.folder)


def _repinned(table: str, seen: Mapping[str, Counts]) -> str:
    name = tomllib.loads(table)["configuration"][0]["name"]
    if name not in seen:
        return table
    fresh = [f"{key} = {count}\n" for key, count in seen[name].known().items()]
    lines = table.splitlines(keepends=True)
    old = [place for place, line in enumerate(lines) if _COUNT_LINE.match(line)]
    said = [place for place, line in enumerate(lines) if line.strip() and not line.startswith("#")]
    kept = [[] if place in old else [line] for place, line in enumerate(lines)]
    kept[old[0] if old else said[-1]] += fresh
    return "".join(line for group in kept for line in group)
