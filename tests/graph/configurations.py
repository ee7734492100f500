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


def _bounds(
    senders: int, workers: int, versions: int, links: int, features: str, delivery: str = "", *, clocks: int = 0
) -> Bounds:
    features_, delivery_ = frozenset(features.split()), frozenset(delivery.split())
    return Bounds(senders, workers, versions, links, clocks or senders, features_, delivery_)


#: Small enough for every run; together they have every feature of the model.
SMALL = {
    "two workers": _bounds(1, 2, 1, 1, "subset"),
    "two versions": _bounds(1, 1, 2, 1, "async deadline interrupt abandon refuse"),
    "crashes": _bounds(1, 1, 2, 2, "crash async"),
    "losses": _bounds(1, 1, 2, 2, "wrong break refuse"),
    "ends": _bounds(1, 1, 1, 2, "remove bye close abandon broken async"),
    "lingering": _bounds(1, 1, 2, 2, "wrong async", "Lingers"),
    "reordered": _bounds(1, 1, 2, 1, "refuse abandon async", "Reorders"),
    "duplicated": _bounds(1, 1, 2, 1, "refuse deadline", "Reorders Duplicates"),
    "lost": _bounds(1, 1, 2, 1, "deadline", "Reorders Duplicates Loses"),
    "copies": _bounds(2, 1, 1, 1, "copy refuse stray"),
    "successors": _bounds(2, 1, 1, 1, "copy misfit close death"),
    "two workers, two versions, a crash": _bounds(1, 2, 2, 2, "crash"),
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
