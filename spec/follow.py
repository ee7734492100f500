"""`make protocol`: renders and pins all that follows from spec/protocol.toml, then names what is still to be written.

Steps, each by the command that a person could run: the tables and pages, the frames of the wire, the graphs of the
shipped machines, the paths that are replayed over adapters, TLC's counts, and the page of what is proved. The first
that refuses ends it, with the reason. ``--quick`` leaves out the large graphs and the long proofs, and says so;
``--since REVISION`` compares the names in protocol.toml with another revision's than HEAD; ``--only-names`` pins
nothing.
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
#: Rendered or pinned: nobody writes in them.
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
#: The tables of protocol.toml whose names others repeat.
_NAMED = ("refusal_kind", "state", "delivery")
_BY_HAND = """\
by hand, whatever has changed:
  spec/README.md           the guards in words
  tla/AckProtocol.tla      the guards, and an action for each new row or kind; for a new rule its revert (Without)
  weightsync/protocol/     the guards as pure functions; weightsync/protocol/messages.py a message's new fields
  spec/modelcheck/second/  the second reading; weightsync/checker/traces/ what a trace may tell
  tests/protocol/graph/             senders.py, receivers.py and refusing.py: the events that the search tries
afterwards, since they take long:
  python spec/check.py mutants --share 1/20 --pin     the model's new mutants; a person writes why one may live
  pytest --trace-counts tests/protocol/traces/recorded.json   how much of the suite is recorded, for docs/assurance.md
  make test verify-quick"""


def commands(quick: bool) -> Iterator[tuple[str, list[str]]]:
    """What each step says of itself, and its command."""
    python = sys.executable
    small = ["--small"] if quick else []
    everything = [] if quick else ["--all"]
    yield "the tables and pages", [python, "spec/generate.py"]
    yield "the frames of the wire", [python, "tests/transports/pipe/golden.py"]
    yield "the graphs of the shipped machines", [python, "tests/protocol/graph/configurations.py", *small]
    yield "the paths that adapters replay", [python, "spec/replay.py"]
    yield "TLC's counts", [python, "spec/check.py", "model", "--pin", *everything]
    yield "the charts", [python, "spec/charts.py"]
    yield "the page of what is proved", [python, "spec/assurance.py"]


def run(quick: bool) -> bool:
    """Take every step; false where one refused."""
    for what, command in commands(quick):
        print(f"== {what}: {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{what}: refused. Mend what it says, and run `make protocol` again.")
            return False
    if quick:
        print("left out: the large graphs and the long proofs. Run `make protocol` before a merge.")
    return True


def names(text: str) -> dict[str, set[str]]:
    """What protocol.toml names, by what it is: refusal kinds, states, deliveries, each role's inputs."""
    told = tomllib.loads(text)
    found = {table: {entry["name"] for entry in told.get(table, ())} for table in _NAMED}
    for role in ("sender", "receiver"):
        found[f"{role} input"] = {row["input"] for row in told[role]["row"]}
    return found


def fresh(before: Mapping[str, set[str]], now: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The names that are new, by what they are."""
    return {what: added for what, all_names in now.items() if (added := all_names - before.get(what, set()))}


def lacking(name: str, others: set[str], texts: Mapping[str, str]) -> list[str]:
    """The files that name at least two of the others, and not this one."""
    return [
        path
        for path, text in texts.items()
        if sum(_says(text, other) for other in others) > 1 and not _says(text, name)
    ]


def _says(text: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def written() -> dict[str, str]:
    """The files of this repository that people write, by path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [path for path in listed.splitlines() if Path(path).suffix in _TEXTS and path not in _FOLLOW]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths if (ROOT / path).is_file()}


def still_to_write(since: str) -> Iterator[str]:
    """What a person must look at, line by line."""
    old = subprocess.run(
        ["git", "show", f"{since}:{SOURCE}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    now = names((ROOT / SOURCE).read_text(encoding="utf-8"))
    texts = written()
    for what, added in fresh(names(old), now).items():
        for name in sorted(added):
            yield f"{what} {name} is new since {since}. These name others of its kind, and not it:"
            yield from (f"  {path}" for path in lacking(name, now[what] - added, texts))
    yield _BY_HAND


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=f"Renders and pins all that follows from {SOURCE}.")
    parser.add_argument("--quick", action="store_true", help="leave out the large graphs and the long proofs")
    parser.add_argument("--since", default="HEAD", metavar="REVISION", help="what names are compared with")
    parser.add_argument("--only-names", action="store_true", help="pin nothing, say what a person must write")
    options = parser.parse_args(arguments)
    done = options.only_names or run(options.quick)
    for line in still_to_write(options.since):
        print(line)
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
