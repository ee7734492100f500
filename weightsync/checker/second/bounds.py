"""The constants of a configuration: how many of what, what may happen, what is taken out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from weightsync.checker.text import Config
from weightsync.errors import ConfigurationError

LINKS = ("Reorders", "Duplicates", "Loses", "Lingers")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The constants of AckProtocol.tla.

    Attributes:
        senders: sender 1 is there from the start, the others are copies or successors.
        workers: their receivers.
        max_version: dispatches of each sender.
        max_link: links that a sender lays to one worker.
        max_clock: clocks read 1..max_clock.
        features: what may happen.
        links: how links misbehave, of `LINKS`.
        without: rules taken out.
        unfair: fairness conjuncts taken out.
    """

    senders: int
    workers: int
    max_version: int
    max_link: int
    max_clock: int
    features: frozenset[str]
    links: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    unfair: frozenset[str] = frozenset()

    @classmethod
    def read(cls, config: Config) -> Bounds:
        """The constants of a configuration file.

        Raises:
            ConfigurationError: one is missing, or not written as `text` writes it.
        """
        given = " ".join(config.entries.get("CONSTANT", ()))
        return cls(
            senders=_count(given, "Senders"),
            workers=_count(given, "Workers"),
            max_version=_number(given, "MaxVersion"),
            max_link=_number(given, "MaxLink"),
            max_clock=_number(given, "MaxClock"),
            features=_strings(given, "Features"),
            links=frozenset(name for name in LINKS if _word(given, name) == "TRUE"),
            without=_strings(given, "Without"),
            unfair=_strings(given, "Unfair"),
        )

    @property
    def all_senders(self) -> range:
        """1..senders."""
        return range(1, self.senders + 1)

    @property
    def all_workers(self) -> range:
        """1..workers."""
        return range(1, self.workers + 1)

    @property
    def words(self) -> str:
        """How many of what, and what may happen, as a reader of a table wants it."""
        counts = [
            _counted(self.senders, "sender"),
            _counted(self.workers, "worker"),
            _counted(self.max_version, "version"),
            _counted(self.max_link, "link"),
        ]
        may = f"; {', '.join(sorted(self.features))}" if self.features else ""
        links = f"; links: {', '.join(sorted(name.lower() for name in self.links))}" if self.links else ""
        return ", ".join(counts) + may + links

    def reaches(self, least: Bounds) -> bool:
        """Whether they are no smaller than `least` in any respect, and links misbehave in just the same way."""
        counts = ("senders", "workers", "max_version", "max_link", "max_clock")
        larger = all(getattr(self, name) >= getattr(least, name) for name in counts)
        return larger and self.features >= least.features and self.links == least.links

    @property
    def text(self) -> str:
        """The constants as TLC reads them."""
        return "\n".join(
            [
                "CONSTANTS",
                f"  Senders = {_set(map(str, self.all_senders))}",
                f"  Workers = {_set(map(str, self.all_workers))}",
                f"  MaxVersion = {self.max_version}",
                f"  MaxLink = {self.max_link}",
                f"  MaxClock = {self.max_clock}",
                *(f"  {name} = {str(name in self.links).upper()}" for name in LINKS),
                f"  Features = {_set(map(json.dumps, sorted(self.features)))}",
                f"  Without = {_set(map(json.dumps, sorted(self.without)))}",
                f"  Unfair = {_set(map(json.dumps, sorted(self.unfair)))}",
                "",
            ]
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _set(members: Iterable[str]) -> str:
    return f"{{{', '.join(members)}}}"


def _given(text: str, name: str, pattern: str) -> str:
    found = re.search(rf"\b{name} = {pattern}", text)
    if found is None:
        raise ConfigurationError(f"The configuration gives no {name}, or not as a plain value.")
    return found.group(1)


def _word(text: str, name: str) -> str:
    return _given(text, name, r"(\w+)")


def _number(text: str, name: str) -> int:
    return int(_given(text, name, r"(\d+)"))


def _count(text: str, name: str) -> int:
    members = sorted(map(int, re.findall(r"\d+", _given(text, name, r"\{([^}]*)\}"))))
    if members != list(range(1, len(members) + 1)):
        raise ConfigurationError(f"The configuration's {name} are {members}, not 1..n.")
    return len(members)


def _strings(text: str, name: str) -> frozenset[str]:
    return frozenset(re.findall(r'"(\w+)"', _given(text, name, r"\{([^}]*)\}")))
