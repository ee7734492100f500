"""The configurations whose graphs are compared, and their committed digests.

`python tests/graph/configurations.py` searches again and writes the digests, and the table in docs/graphs.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from search import digest, search

from weightsync.checker.second import Bounds

DIGESTS = Path(__file__).with_name("digests.json")


def _bounds(features: str, delivery: str = "", **counts: int) -> Bounds:
    least = {"senders": 1, "workers": 1, "max_version": 1, "max_link": 1} | counts
    clocks = {"max_clock": least["senders"]} | least
    return Bounds(features=frozenset(features.split()), links=frozenset(delivery.split()), **clocks)


#: Small enough for every run; together they have every feature of the model.
SMALL = {
    "two workers": _bounds("subset", workers=2),
    "two versions": _bounds("async deadline interrupt abandon refuse", max_version=2),
    "crashes": _bounds("crash async", max_version=2, max_link=2),
    "losses": _bounds("wrong break refuse", max_version=2, max_link=2),
    "ends": _bounds("remove bye close abandon broken async", max_link=2),
    "lingering": _bounds("wrong async", "Lingers", max_version=2, max_link=2),
    "reordered": _bounds("refuse abandon async", "Reorders", max_version=2),
    "duplicated": _bounds("refuse deadline", "Reorders Duplicates", max_version=2),
    "lost": _bounds("deadline", "Reorders Duplicates Loses", max_version=2),
    "copies": _bounds("copy refuse stray", senders=2),
    "successors": _bounds("copy misfit close death", senders=2),
    "two workers, two versions, a crash": _bounds("crash", workers=2, max_version=2, max_link=2),
}

#: For `make verify`.
LARGE: dict[str, Bounds] = {}

CONFIGURATIONS = SMALL | LARGE


def committed() -> dict[str, Any]:
    """The committed digests, by configuration."""
    return dict(json.loads(DIGESTS.read_text(encoding="utf-8")))


def regenerate(names: list[str]) -> None:
    """Search again and write the digests, of all configurations or of those named."""
    found = committed() if names else {}
    for name, bounds in CONFIGURATIONS.items():
        if not names or name in names:
            found[name] = digest(search(bounds))
    ordered = {name: found[name] for name in CONFIGURATIONS if name in found}
    DIGESTS.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    regenerate(sys.argv[1:])
