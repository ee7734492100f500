"""`make protocol`: renders and pins everything derived from spec/protocol.toml, then lists what to write by hand.

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
#: Records of past changes and decisions, to which new names are not added.
_HISTORY = ("CHANGELOG.md", "docs/design/")
#: For each table of protocol.toml, the Python enum of its names. Members of other enums do not count.
_ENUMS = {
    "refusal_kind": "RefusalKind",
    "state": "State",
    "delivery": "Delivery",
    "sender input": "SenderInput",
    "receiver input": "ReceiverInput",
}
#: The order in which a change goes through the folders.
_ORDER = ("tla/", "weightsync/protocol/", "weightsync/", "spec/modelcheck/", "spec/", "tests/")
_BY_HAND = """\
written by hand, whatever has changed:
  spec/README.md           the guards in words
  tla/AckProtocol.tla      the guards, and an action for each new row or kind; for a new rule its revert (Without)
  weightsync/protocol/     the guards as pure functions; a message's new fields in messages.py
  spec/modelcheck/second/  the second reading of the properties
  weightsync/verify/       what a trace may show
  tests/protocol/graph/    senders.py, receivers.py and refusing.py: the events that the search tries
  tests/protocol/stateful/ reference.py: the model of the random walks; guarantees.py: what holds after each step
at the end, since they take long:
  python spec/check.py mutants --share 1/20 --pin     the model's new mutants; write why one may live
  pytest --trace-counts tests/protocol/traces/recorded.json   how much of the suite is recorded, for docs/assurance.md
  HYPOTHESIS_PROFILE=nightly pytest tests/protocol/stateful      other walks than in CI, which always tries the same
  make test verify-quick
CONTRIBUTING.md goes through one such change, step by step."""


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
            print(f"{what}: it failed, for the reason above. Mend that, and run `make protocol` again.")
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


def lacking(what: str, name: str, others: set[str], texts: Mapping[str, str]) -> dict[str, int]:
    """The files that name at least two of ``others`` but not ``name``, each with the line that names most of them."""
    found = {}
    for path, text in texts.items():
        lines = [sum(_says(line, other, _ENUMS[what]) for other in others) for line in text.splitlines()]
        listed = sum(_says(text, other, _ENUMS[what]) for other in others)
        if listed > 1 and not _says(text, name, _ENUMS[what]):
            found[path] = lines.index(max(lines)) + 1
    return dict(sorted(found.items(), key=lambda each: (_place(each[0]), each[0])))


def _says(text: str, name: str, enum: str) -> bool:
    """Whether a text has the name other than as a member of another enum."""
    return re.search(rf"(?<![\w.]){re.escape(name)}\b|\b(?:{enum}|_\w)\.{re.escape(name)}\b", text) is not None


def _place(path: str) -> int:
    return next((place for place, folder in enumerate(_ORDER) if path.startswith(folder)), len(_ORDER))


def written() -> dict[str, str]:
    """The hand-written files of this repository, by path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    texts = [path for path in listed.splitlines() if Path(path).suffix in _TEXTS and path not in _FOLLOW]
    paths = [path for path in texts if not path.startswith(_HISTORY)]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in paths if (ROOT / path).is_file()}


def still_to_write(since: str) -> Iterator[str]:
    """The places that a person must check, one per line, in the order in which a change goes through them."""
    old = subprocess.run(
        ["git", "show", f"{since}:{SOURCE}"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    now = names((ROOT / SOURCE).read_text(encoding="utf-8"))
    texts = written()
    for what, added in fresh(names(old), now).items():
        for name in sorted(added):
            yield f"{what} {name} is new since {since}. These files name two or more of its kind, and not it:"
            places = lacking(what, name, now[what] - added, texts)
            yield from (f"  {path}:{line}" for path, line in places.items())
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
