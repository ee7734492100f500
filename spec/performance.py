"""Renders `docs/performance.md` from the results in `docs/performance/*.json`, which `weightsync bench --json` wrote.

With ``--check`` nothing is written and the page is compared byte for byte.
Exit status: 0 the page is up to date, 1 the page differs, 2 results or the page cannot be read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from protocolgen.docs import fill, keep
from protocolgen.source import SpecError

from weightsync.bench import Case, Kind, Label, Results, noise
from weightsync.bench.judging import Floor
from weightsync.bench.reporting import (
    CASE_COLUMNS,
    TARGET_COLUMNS,
    case_rows,
    left_out,
    markdown,
    ms,
    reached,
    size,
    target_rows,
    title,
)
from weightsync.bench.results import counted
from weightsync.errors import ConfigurationError

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/performance.md"
RESULTS = "docs/performance"
#: The floors that the summary shows.
_SHOWN_FLOORS = (Floor.PING.value, Floor.MEMCPY.value, Floor.D2D.value)
#: Text that no published result may contain: paths and names of machines.
_PRIVATE = re.compile(r"(^|\s)(/|~/)\w|\bfile:|@\w+\.")


def read(root: Path = ROOT) -> Mapping[str, Results]:
    """All stored results, by the names of their files.

    Raises:
        SpecError: there is none, one cannot be read, or one names a path.
    """
    try:
        found = {path.stem: Results.read(path) for path in sorted((root / RESULTS).glob("*.json"))}
    except ConfigurationError as error:
        raise SpecError([str(error)]) from error
    if not found:
        raise SpecError([f"{RESULTS} has no results: `weightsync bench --json {RESULTS}/NAME.json` writes them"])
    private = [
        f"{RESULTS}/{name}.json: {text!r} names a path or a host"
        for name, results in found.items()
        for text in (*results.machine.values(), *(case.command for case in results.cases))
        if _PRIVATE.search(text)
    ]
    if private:
        raise SpecError(private)
    return found


def section(found: Mapping[str, Results]) -> str:
    """The generated part of the page: each machine with its targets and all its cases."""
    return "\n".join(line for name, results in found.items() for line in _machine(name, results))


def summary(found: Mapping[str, Results]) -> str:
    """The generated summary of the page: for each machine the medians with the fewest workers."""
    return "\n".join(line for name, results in found.items() for line in _overview(name, results))


def _overview(name: str, results: Results) -> Iterator[str]:
    """A table for each device."""
    cases = [case for case in results.cases if case.measured]
    for device in dict.fromkeys(case.device for case in cases):
        yield from _table(name, [case for case in cases if case.device == device])


def _table(name: str, cases: Sequence[Case]) -> Iterator[str]:
    """A table with a row per contender and a column per payload. Our schemes have the default for ``verify=``."""
    fewest = min((case.workers, case.threads) for case in cases)
    columns = [case for case in cases if (case.workers, case.threads) == fewest]
    rows = dict.fromkeys(each.label for case in columns for each in case.measured if _in_overview(case, each.label))
    device = "" if columns[0].device == "cpu" else f"{columns[0].device}, "
    yield f"**{name}** ({device}{counted(fewest[0], 'worker')}, {counted(fewest[1], 'thread')} in the trainer)\n"
    heads = ("", *(f"{case.payload}: {size(case.nbytes)} in {counted(case.tensors, 'tensor')}" for case in columns))
    yield markdown(heads, [(label.name, *(_median(case, label) for case in columns)) for label in rows])


def _in_overview(case: Case, label: Label) -> bool:
    if label.kind is Kind.FLOOR:
        return label.name in _SHOWN_FLOORS
    return label.kind is Kind.TORCHRL or (label.kind is Kind.SCHEME and label.verify == case.default_verify)


def _median(case: Case, label: Label) -> str:
    found = case.find(label.name, label.kind, label.verify)
    return ms(found.median) if found else ""


def _machine(name: str, results: Results) -> Iterator[str]:
    yield f"### Results: {name}\n"
    yield markdown(("", ""), [(key, value) for key, value in results.machine.items()])
    yield f"{reached(results).capitalize()}.\n"
    rows = target_rows(results)
    if rows:
        yield markdown(TARGET_COLUMNS, rows)
    noisy = noise(results)
    if noisy:
        limit = f"{results.noise_limit:.0%}"
        yield f"Noisy floors, with an interquartile range above {limit} of their median:\n"
        yield "\n".join([*(f"- {line}" for line in noisy), ""])
    for command, cases in _by_command(results):
        yield f"To repeat what follows:\n\n```sh\n{command}\n```\n"
        for case in cases:
            yield f"**{title(case)}**\n"
            yield markdown(CASE_COLUMNS, case_rows(case, results.noise_limit))
    yield "\n".join([*(f"- {line}" for line in left_out(results)), ""])


def _by_command(results: Results) -> Iterator[tuple[str, list[Case]]]:
    for command in dict.fromkeys(case.command for case in results.cases):
        yield command, [case for case in results.cases if case.command == command and case.measured]


def _sections(found: Mapping[str, Results]) -> dict[str, str]:
    return {"summary": summary(found), "results": section(found)}


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run the command; returns its exit status."""
    page = root / PAGE
    try:
        text = fill(PAGE, page.read_text(encoding="utf-8"), _sections(read(root)))
    except SpecError as error:
        print(f"nothing was written:\n{error}", file=sys.stderr)
        return 2
    return keep(page, text, arguments, f"{PAGE} is not what {RESULTS} gives: run `python spec/performance.py`.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
