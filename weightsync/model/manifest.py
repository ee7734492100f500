"""The model's manifest: its configurations, what each must give, and what their bounds leave out."""

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
#: The keys of what TLC counts.
COUNTS = ("generated", "distinct", "depth")


class Tier(Enum):
    """When a configuration is run."""

    QUICK = "quick"
    ALL = "all"

    def covers(self, other: Tier) -> bool:
        """Whether what is of the other tier is run with this one too."""
        return self in (Tier.ALL, other)


class Purpose(Enum):
    """What a configuration is there for."""

    PROOF = "proof"  #: everything in it holds
    CANARY = "canary"  #: a situation that must be reachable, so that proofs speak of something
    CHECKER = "checker"  #: TLC itself must say no
    REVERT = "revert"  #: a rule is taken out, and TLC must find what it prevents
    PLANTED = "planted"  #: a wrong step is planted, and TLC must find that a property refuses it
    UNFAIR = "unfair"  #: a fairness conjunct is taken out, and TLC must find a caller who waits for ever


class Expected(Enum):
    """What TLC must say. Values are the manifest's words."""

    PASS = "pass"
    ASSUMPTION = "assumption"
    DEADLOCK = "deadlock"
    SAFETY = "safety"
    LIVENESS = "liveness"

    @property
    def exit_code(self) -> int:
        """TLC's exit code for it."""
        return _EXIT_CODES[self]

    @property
    def named(self) -> bool:
        """Whether it is a property with a name that must be found violated."""
        return self in (Expected.SAFETY, Expected.LIVENESS)


_EXIT_CODES = {
    Expected.PASS: 0,
    Expected.ASSUMPTION: 10,
    Expected.DEADLOCK: 11,
    Expected.SAFETY: 12,
    # TLC gives an action property that is violated the same exit code as a temporal one.
    Expected.LIVENESS: 13,
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration of the model.

    Attributes:
        name: what it is called on the command line.
        module: its root module.
        config: what TLC is given besides.
        purpose: what it is there for.
        tier: when it is run.
        expected: what TLC must say.
        violates: the property that must be found violated, if one must.
        why: what it covers, or why it must fail.
        guarantees: ids of the guarantees it speaks of.
        workers: TLC's threads.
        timeout: seconds until it is given up.
        pinned: the counts it must give; None if none are pinned.
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
    """A part of the model that no proof evaluates, and should not.

    Attributes:
        definition: the definition that it is a part of.
        text: what it says, in one line.
        reason: why that is right.
    """

    definition: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All configurations of a model.

    Attributes:
        folder: where the model lies.
        configurations: in the order of the file.
        bounds: what the bounds leave out, as printed below the verdicts.
        planted: actions that only the reverts may take.
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

        Raises:
            ConfigurationError: if it is not there, or does not say what it must; the entry is named.
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
            what = f"names {', '.join(sorted(twice))} twice" if twice else "has no [[configuration]]"
            raise ConfigurationError(f"The manifest {folder / MANIFEST} {what}.")
        bounds = str(document.get("bounds", {}).get("text", "")).strip()
        coverage = document.get("coverage", {})
        return cls(folder, found, bounds, tuple(coverage.get("planted", ())), _idle(folder, coverage))

    def select(self, names: Iterable[str]) -> tuple[Configuration, ...]:
        """Return the configurations of these names, in the order of the file.

        Raises:
            ConfigurationError: if one is unknown.
        """
        wanted = set(names)
        known = {found.name for found in self.configurations}
        if wanted - known:
            missing = ", ".join(sorted(wanted - known))
            raise ConfigurationError(f"No configuration is named {missing}: weightsync check --list shows them.")
        return tuple(found for found in self.configurations if found.name in wanted)

    def tier(self, tier: Tier) -> tuple[Configuration, ...]:
        """Return the quick configurations, or all."""
        return tuple(found for found in self.configurations if tier.covers(found.tier))


def _idle(folder: Path, coverage: Mapping[str, Any]) -> tuple[Idle, ...]:
    try:
        return tuple(Idle(**entry) for entry in coverage.get("idle", ()))
    except TypeError as error:
        raise ConfigurationError(f"The manifest {folder / MANIFEST} is wrong under coverage.idle: {error}.") from error


def find_model(package: Path = _PACKAGE) -> Path:
    """Return the model's folder: beside the package in a checkout, else inside it.

    Raises:
        ConfigurationError: if there is neither.
    """
    for folder in (package.parent / "tla", package / "tla"):
        if (folder / MANIFEST).is_file():
            return folder
    raise ConfigurationError(f"No model lies in {package.parent / 'tla'} or {package / 'tla'} ({MANIFEST}).")


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
        raise ConfigurationError(f"Configuration {name} lacks {error} in the manifest.") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"Configuration {name} is wrong in the manifest: {error}.") from error


_KEYS = {
    "name", "module", "kind", "set", "expected", "violates", "covers", "guarantees", "workers", "timeout",
    *COUNTS, *CONFIG_KEYS,
}  # fmt: skip


def _checked(configuration: Configuration) -> Configuration:
    if (configuration.expected is Expected.PASS) is not (configuration.purpose is Purpose.PROOF):
        raise ValueError("a proof passes, and nothing else does")
    if configuration.expected.named is (configuration.violates is None):
        raise ValueError("violates is given where expected is safety or liveness, and nowhere else")
    return configuration


def _pinned(entry: Mapping[str, Any]) -> Counts | None:
    if not any(key in entry for key in COUNTS):
        return None
    depth = entry.get("depth")
    return Counts(int(entry["generated"]), int(entry["distinct"]), None if depth is None else int(depth))
