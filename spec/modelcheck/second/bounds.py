"""The constants of a configuration: its bounds, its features, and the rules that are removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from weightsync.errors import ConfigurationError
from weightsync.model.config import Value

_Kind = TypeVar("_Kind")

LINKS = ("Reorders", "Duplicates", "Loses", "Lingers")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The constants of AckProtocol.tla.

    Attributes:
        senders: the number of senders. Sender 1 exists from the start, the others are copies or successors.
        workers: the number of workers.
        max_version: the greatest number of dispatches of each sender.
        max_link: the greatest number of links that a sender creates for one worker.
        max_clock: clocks read 1..max_clock.
        features: the kinds of events that may happen.
        links: the faults that links may have, of `LINKS`.
        without: the rules that are removed.
        unfair: the fairness conjuncts that are removed.
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
    def read(cls, constants: Mapping[str, Value]) -> Bounds:
        """Read the constants of a configuration.

        Raises:
            ConfigurationError: a constant is missing, or has the wrong type.
        """
        return cls(
            senders=_count(constants, "Senders"),
            workers=_count(constants, "Workers"),
            max_version=_given(constants, "MaxVersion", int),
            max_link=_given(constants, "MaxLink", int),
            max_clock=_given(constants, "MaxClock", int),
            features=_strings(constants, "Features"),
            links=frozenset(name for name in LINKS if _given(constants, name, bool)),
            without=_strings(constants, "Without"),
            unfair=_strings(constants, "Unfair"),
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
        """The bounds and features as text, for a table."""
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
        """Whether all bounds and features are at least those of ``least``, with the same faults of links."""
        counts = ("senders", "workers", "max_version", "max_link", "max_clock")
        larger = all(getattr(self, name) >= getattr(least, name) for name in counts)
        return larger and self.features >= least.features and self.links == least.links

    @property
    def constants(self) -> dict[str, Value]:
        """The constants, in the form that `read` takes."""
        return {
            "Senders": list(self.all_senders),
            "Workers": list(self.all_workers),
            "MaxVersion": self.max_version,
            "MaxLink": self.max_link,
            "MaxClock": self.max_clock,
            **{name: name in self.links for name in LINKS},
            "Features": sorted(self.features),
            "Without": sorted(self.without),
            "Unfair": sorted(self.unfair),
        }


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _given(constants: Mapping[str, Value], name: str, kind: type[_Kind]) -> _Kind:
    value = constants.get(name)
    if type(value) is not kind:
        raise ConfigurationError(f"The configuration's {name} is {value!r}, not of the kind {kind.__name__}.")
    return value


def _count(constants: Mapping[str, Value], name: str) -> int:
    members = _given(constants, name, list)
    if members != list(range(1, len(members) + 1)):
        raise ConfigurationError(f"The configuration's {name} are {members}, not 1..n.")
    return len(members)


def _strings(constants: Mapping[str, Value], name: str) -> frozenset[str]:
    return frozenset(map(str, _given(constants, name, list)))
