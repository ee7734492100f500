"""The model's manifest: its configurations, the expected result of each, and what their bounds leave out."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from weightsync.errors import ConfigurationError
from weightsync.model.config import CONFIG_KEYS, Config, Groups
from weightsync.model.output import Counts

MANIFEST = "manifest.toml"
_PACKAGE = Path(__file__).resolve().parent.parent
_DEFAULT_TIMEOUT = 1800.0
#: The keys of TLC's counts.
COUNTS = ("generated", "distinct", "depth")


class Tier(Enum):
    """When a configuration is run."""

    QUICK = "quick"
    ALL = "all"

    def covers(self, other: Tier) -> bool:
        """Whether running this tier includes the configurations of the other."""
        return self in (Tier.ALL, other)


class Purpose(Enum):
    """The purpose of a configuration."""

    PROOF = "proof"  #: everything it checks must hold
    CANARY = "canary"  #: a situation must be reachable, or proofs about it would be vacuous
    CHECKER = "checker"  #: TLC must report an error, to show that it would
    REVERT = "revert"  #: a rule is removed, and TLC must find the violation that it prevents
    PLANTED = "planted"  #: a wrong step is planted, and TLC must find that it violates a property
    UNFAIR = "unfair"  #: a fairness condition is removed, and TLC must find a caller that waits forever


class Expected(Enum):
    """The result that TLC must report, with the values that the manifest uses."""

    PASS = "pass"
    ASSUMPTION = "assumption"
    DEADLOCK = "deadlock"
    SAFETY = "safety"
    LIVENESS = "liveness"

    @property
    def exit_code(self) -> int:
        """TLC's exit code for this result."""
        return _EXIT_CODES[self]

    @property
    def named(self) -> bool:
        """Whether TLC must find a violation of a named property."""
        return self in (Expected.SAFETY, Expected.LIVENESS)


_EXIT_CODES = {
    Expected.PASS: 0,
    Expected.ASSUMPTION: 10,
    Expected.DEADLOCK: 11,
    Expected.SAFETY: 12,
    # A violated action property has the same exit code as a temporal one.
    Expected.LIVENESS: 13,
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration of the model.

    Attributes:
        name: its name on the command line.
        module: its root module.
        config: TLC's configuration.
        purpose: its purpose.
        tier: when it is run.
        expected: the result that TLC must report.
        violates: the property that TLC must find violated, if any.
        why: what it covers, or why it must fail.
        guarantees: ids of the guarantees it is about.
        workers: how many threads TLC uses.
        timeout: seconds after which the run is stopped.
        pinned: the counts it must have; None if none are pinned.
    """

    name: str
    module: str
    config: Config
    purpose: Purpose
    tier: Tier
    expected: Expected
    violates: str | None
    why: str
    guarantees: tuple[str, ...]
    workers: int
    timeout: float
    pinned: Counts | None


@dataclass(frozen=True, slots=True)
class Idle:
    """A part of the model that no proof should evaluate.

    Attributes:
        definition: the definition that contains it.
        text: its text, in one line.
        reason: why no proof should evaluate it.
    """

    definition: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All configurations of a model.

    Attributes:
        folder: the model's folder.
        configurations: the configurations, in the order of the file.
        bounds: what the bounds leave out; printed below the verdicts.
        planted: actions that only reverts may take.
        idle: parts that no proof may evaluate.
    """

    folder: Path
    configurations: tuple[Configuration, ...]
    bounds: str
    planted: tuple[str, ...]
    idle: tuple[Idle, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's manifest.

        Raises ConfigurationError: it is missing or malformed; the error names the entry.
        """
        try:
            document = tomllib.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigurationError(f"The manifest {folder / MANIFEST} cannot be read: {error}.") from error
        entries = document.get("configuration", [])
        groups = Groups.read(document)
        found = tuple(_configuration(entry, groups) for entry in entries)
        names = [configuration.name for configuration in found]
        twice = {name for name in names if names.count(name) > 1}
        if twice or not found:
            what = f"has {', '.join(sorted(twice))} twice" if twice else "has no [[configuration]]"
            raise ConfigurationError(f"The manifest {folder / MANIFEST} {what}.")
        bounds = str(document.get("bounds", {}).get("text", "")).strip()
        coverage = document.get("coverage", {})
        return cls(folder, found, bounds, tuple(coverage.get("planted", ())), _idle(folder, coverage))

    def select(self, names: Iterable[str]) -> tuple[Configuration, ...]:
        """Return the configurations with these names, in the order of the file.

        Raises ConfigurationError: a name is unknown.
        """
        wanted = set(names)
        known = {found.name for found in self.configurations}
        if wanted - known:
            missing = ", ".join(sorted(wanted - known))
            raise ConfigurationError(f"There is no configuration {missing}: weightsync check --list shows all of them.")
        return tuple(found for found in self.configurations if found.name in wanted)

    def tier(self, tier: Tier) -> tuple[Configuration, ...]:
        """Return the configurations of a tier: the quick ones, or all."""
        return tuple(found for found in self.configurations if tier.covers(found.tier))


def _idle(folder: Path, coverage: Mapping[str, Any]) -> tuple[Idle, ...]:
    try:
        return tuple(Idle(**entry) for entry in coverage.get("idle", ()))
    except TypeError as error:
        raise ConfigurationError(f"The manifest {folder / MANIFEST} is wrong under coverage.idle: {error}.") from error


def find_model(package: Path = _PACKAGE) -> Path:
    """Return the model's folder: beside the package in a checkout, else inside it.

    Raises ConfigurationError: it is in neither place.
    """
    for folder in (package.parent / "tla", package / "tla"):
        if (folder / MANIFEST).is_file():
            return folder
    raise ConfigurationError(
        f"There is no model in {package.parent / 'tla'} or {package / 'tla'}: {MANIFEST} is in neither."
    )


def _configuration(entry: Mapping[str, Any], groups: Groups) -> Configuration:
    name = str(entry.get("name", "(without a name)"))
    unknown = set(entry) - _KEYS
    if unknown:
        raise ConfigurationError(f"Configuration {name} has unknown keys in the manifest: {sorted(unknown)}.")
    try:
        return _checked(
            Configuration(
                name=entry["name"],
                module=entry["module"],
                config=groups.config(entry),
                purpose=Purpose(entry["kind"]),
                tier=Tier(entry["set"]),
                expected=Expected(entry["expected"]),
                violates=entry.get("violates"),
                why=entry["covers"],
                guarantees=tuple(entry.get("guarantees", ())),
                workers=int(entry.get("workers", 1)),
                timeout=float(entry.get("timeout", _DEFAULT_TIMEOUT)),
                pinned=_pinned(entry),
            )
        )
    except KeyError as error:
        raise ConfigurationError(f"Configuration {name} has no {error} in the manifest.") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"Configuration {name} is wrong in the manifest: {error}.") from error


_KEYS = {
    "name", "module", "kind", "set", "expected", "violates", "covers", "guarantees", "workers", "timeout",
    *COUNTS, *CONFIG_KEYS,
}  # fmt: skip


def _checked(configuration: Configuration) -> Configuration:
    if (configuration.expected is Expected.PASS) is not (configuration.purpose is Purpose.PROOF):
        raise ValueError("expected is pass for a proof, and only for a proof")
    if configuration.expected.named is (configuration.violates is None):
        raise ValueError("violates is required if expected is safety or liveness, and not allowed otherwise")
    return configuration


def _pinned(entry: Mapping[str, Any]) -> Counts | None:
    if not any(key in entry for key in COUNTS):
        return None
    depth = entry.get("depth")
    return Counts(int(entry["generated"]), int(entry["distinct"]), None if depth is None else int(depth))
