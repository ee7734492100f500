"""The configurations whose graphs are compared, and their committed digests.

`python tests/protocol/graph/configurations.py [--small | NAME...]` searches again and writes the digests;
`python spec/assurance.py` shows them in docs/assurance.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "spec"))  # where this is not run by pytest

from modelcheck.second import Bounds
from search import digest, search

DIGESTS = Path(__file__).with_name("digests.json")


def _bounds(features: str, delivery: str = "", **counts: int) -> Bounds:
    least = {"senders": 1, "workers": 1, "max_version": 1, "max_link": 1} | counts
    clocks = {"max_clock": least["senders"]} | least
    return Bounds(features=frozenset(features.split()), links=frozenset(delivery.split()), **clocks)


#: Small enough for every run. Together they have every feature of the model.
SMALL = {
    "two workers": _bounds("async subset", workers=2),
    "one of two leaves": _bounds("bye", workers=2),
    "two versions": _bounds("async deadline interrupt abandon refuse", max_version=2),
    "crashes": _bounds("crash async", max_version=2, max_link=2),
    "losses": _bounds("wrong break refuse", max_version=2, max_link=2),
    "ends": _bounds("remove bye close abandon broken async fail", max_link=2),
    "lingering": _bounds("wrong async", "Lingers", max_version=2, max_link=2),
    "cut off": _bounds("crash wrong cut bye refuse", "Lingers", max_link=2),
    "reordered": _bounds("refuse abandon async", "Reorders", max_version=2),
    "duplicated": _bounds("refuse deadline", "Reorders Duplicates", max_version=2),
    "lost": _bounds("deadline", "Reorders Duplicates Loses", max_version=2),
    "copies": _bounds("copy refuse stray", senders=2),
    "one of two is removed": _bounds("remove wrong", workers=2),
    "written over by hand": _bounds("invalidate refuse bye", "Reorders Duplicates", max_version=2),
    "written over by hand, two links": _bounds("invalidate wrong defer", max_link=2),
    "deferred answers": _bounds("defer async abandon wrong bye", max_version=2, max_link=2),
    "deferred answers, copies": _bounds("defer copy", senders=2),
    "successors": _bounds("copy misfit close death", senders=2),
    "two workers, two versions, a crash": _bounds("crash", workers=2, max_version=2, max_link=2),
}

_EVERYTHING = "async deadline refuse abandon wrong crash"

#: For `make verify`.
LARGE = {
    "two workers, sends to some": _bounds("async subset refuse abandon", workers=2, max_version=2),
    "two workers, copies": _bounds("copy", senders=2, workers=2),
    "copies take over": _bounds("copy wrong", senders=2, max_version=2, max_link=2),
    "copies, and workers that crash": _bounds("copy crash", senders=2, max_link=2),
    "goodbyes that go astray": _bounds("copy stray bye", senders=2),
    "a worker won back": _bounds("copy close", senders=3, max_clock=2),
    "ordered, everything": _bounds(_EVERYTHING, "Lingers", max_version=2, max_link=2),
    "reordered, everything": _bounds(_EVERYTHING, "Reorders Lingers", max_version=2, max_link=2),
    "duplicated, everything": _bounds(_EVERYTHING, "Reorders Duplicates Lingers", max_version=2, max_link=2),
    "lost, everything": _bounds(_EVERYTHING, "Reorders Duplicates Loses Lingers", max_version=2),
}

CONFIGURATIONS = SMALL | LARGE


def in_words(bounds: Bounds) -> str:
    """The bounds of a configuration in words."""
    return bounds.words


def committed() -> dict[str, Any]:
    """The committed digests, by configuration."""
    return dict(json.loads(DIGESTS.read_text(encoding="utf-8")))


def regenerate(names: list[str]) -> None:
    """Search again and write the digests, of all configurations or of those named."""
    found = committed() if names else {}
    for name, bounds in CONFIGURATIONS.items():
        if not names or name in names:
            often = "every commit" if name in SMALL else "make verify"
            found[name] = {"bounds": in_words(bounds), "compared": often} | digest(search(bounds))
    ordered = {name: found[name] for name in CONFIGURATIONS if name in found}
    DIGESTS.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    regenerate(list(SMALL) if sys.argv[1:] == ["--small"] else sys.argv[1:])
