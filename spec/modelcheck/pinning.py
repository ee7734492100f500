"""Writes the counts that TLC gave into a manifest."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

from weightsync.model.manifest import COUNTS, MANIFEST, Manifest
from weightsync.model.output import Counts

_COUNT_LINE = re.compile(rf"(?:{'|'.join(COUNTS)}) *=")


def pin(manifest: Manifest, seen: Mapping[str, Counts]) -> Manifest:
    """Write counts into the manifest's text, all else in it as it was, and return it read anew.

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
