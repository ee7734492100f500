"""`make protocol`: renders and pins everything derived from spec/protocol.toml, then lists what is left to write.

The steps, each a command that can be run alone: the tables and pages, the frames on the wire, the graphs of the shipped
machines, the paths that are replayed over transports, TLC's counts, and the assurance page. The first step that fails
ends the run with its reason. ``--quick`` leaves out the large graphs and the long proofs; ``--since REVISION`` compares
the names in protocol.toml with those of another revision than HEAD; ``--only-names`` pins nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "spec/protocol.toml"
#: Rendered or pinned files, which are not edited by hand.
_FOLLOW = frozenset(
    [
        "weightsync/protocol/_tables.py",
        "tla/Tables.tla",
        "docs/protocol.md",
        "docs/assurance.md",
        "docs/scenarios.md",
        SOURCE,
    ]
)
_TEXTS = frozenset({".py", ".tla", ".md"})
#: The tables of protocol.toml whose names other files repeat.
_NAMED = ("refusal_kind", "state", "delivery")
_BY_HAND = """\
by hand, after every change:
  spec/README.md           the guards in words
  tla/AckProtocol.tla      the guards, and an action for each new row or kind; for a new rule its revert (Without)
  weightsync/protocol/     the guards as pure functions; weightsync/protocol/messages.py a message's new fields
  spec/modelcheck/second/  the second reading; weightsync/verify/ what a trace may contain
  tests/protocol/graph/             senders.py, receivers.py and refusing.py: the events that the search tries
afterwards, because they take long:
  python spec/check.py mutants --share 1/20 --pin     the model's new mutants; write by hand why one may survive
  pytest --trace-counts tests/protocol/traces/recorded.json   how much of the suite is recorded, for docs/assurance.md
  make test verify-quick"""


def commands(quick: bool) -> Iterator[tuple[str, list[str]]]:
    """The title and the command of each step."""
    python = sys.executable
    small = ["--small"] if quick else []
    everything = [] if quick else ["--all"]
    yield "the tables and pages", [python, "spec/generate.py"]
    yield "the frames on the wire", [python, "tests/transports/pipe/golden.py"]
    yield "the graphs of the shipped machines", [python, "tests/protocol/graph/configurations.py", *small]
    yield "the paths that adapters replay", [python, "spec/replay.py"]
    yield "TLC's counts", [python, "spec/check.py", "model", "--pin", *everything]
    yield "the charts", [python, "spec/charts.py"]
    yield "the assurance page", [python, "spec/assurance.py"]


def run(quick: bool) -> bool:
    """Run every step; return False if one failed."""
    for what, command in commands(quick):
        print(f"== {what}: {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{what}: failed. Fix what it reports, and run `make protocol` again.")
            return False
    if quick:
        print("left out: the large graphs and the long proofs. Run `make protocol` before a merge.")
    return True


def names(text: str) -> dict[str, set[str]]:
    """The names in protocol.toml, by kind: refusal kinds, states, deliveries, each role's inputs."""
    document = tomllib.loads(text)
    found = {table: {entry["name"] for entry in document.get(table, ())} for table in _NAMED}
    for role in ("sender", "receiver"):
        found[f"{role} input"] = {row["input"] for row in document[role]["row"]}
    return found


def fresh(before: Mapping[str, set[str]], now: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The new names, by kind."""
    return {what: added for what, all_names in now.items() if (added := all_names - before.get(what, set()))}


def lacking(name: str, others: set[str], texts: Mapping[str, str]) -> list[str]:
    """The files that contain at least two of the other names, but not this one."""
    return [
        path
        for path, text in texts.items()
        if sum(_contains(text, other) for other in others) > 1 and not _contains(text, name)
    ]


def _contains(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def written() -> dict[str, str]:
    """The hand-written files of this repository, by path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [path for path in listed.splitlines() if Path(path).suffix in _TEXTS and path not in _FOLLOW]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths if (ROOT / path).is_file()}


def still_to_write(since: str) -> Iterator[str]:
    """Yield the lines that list what must be written by hand."""
    old = subprocess.run(
        ["git", "show", f"{since}:{SOURCE}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    now = names((ROOT / SOURCE).read_text(encoding="utf-8"))
    texts = written()
    for what, added in fresh(names(old), now).items():
        for name in sorted(added):
            yield f"{what} {name} is new since {since}. These files contain others of its kind, but not it:"
            yield from (f"  {path}" for path in lacking(name, now[what] - added, texts))
    yield _BY_HAND


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=f"Renders and pins everything derived from {SOURCE}.")
    parser.add_argument("--quick", action="store_true", help="leave out the large graphs and the long proofs")
    parser.add_argument("--since", default="HEAD", metavar="REVISION", help="the revision to compare names with")
    parser.add_argument("--only-names", action="store_true", help="pin nothing, only list what must be written by hand")
    options = parser.parse_args(arguments)
    done = options.only_names or run(options.quick)
    for line in still_to_write(options.since):
        print(line)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
