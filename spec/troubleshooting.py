"""Renders the list of errors in `docs/troubleshooting.md` from the docstrings of all public error classes.

With ``--check`` nothing is written and the page is compared byte for byte.
Exit status: 0 the page is up to date, 1 the page differs, 2 the page or an error's docstring cannot be read.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocolgen.docs import fill, keep
from protocolgen.source import SpecError

from weightsync import errors
from weightsync.bench import settings
from weightsync.model import toolchain
from weightsync.verify import lines, tlc

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/troubleshooting.md"
_CURE = "What to do: "


#: Modules with errors of their own, which the commands print.
_OF_COMMANDS = (toolchain, lines, tlc, settings)


def classes() -> list[type[errors.WeightSyncError]]:
    """The documented errors: those of `weightsync.errors` in its order, and those of the commands."""
    found = []
    for module in (errors, *_OF_COMMANDS):
        own = (each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__)
        found += [each for each in own if issubclass(each, errors.WeightSyncError)]
    return [each for each in found if each is not errors.WeightSyncError]


def section(kind: type[errors.WeightSyncError]) -> Iterator[str]:
    """The section on an error: its meaning, what to do, and its attributes.

    Raises:
        SpecError: its docstring does not say what to do.
    """
    cause, *rest = (textwrap.dedent(part).strip() for part in inspect.cleandoc(kind.__doc__ or "").split("\n\n"))
    cures = [part.removeprefix(_CURE) for part in rest if part.startswith(_CURE)]
    if not cures:
        raise SpecError([f"{kind.__name__}: its docstring has no paragraph that begins with '{_CURE}'"])
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__[1:])
    yield f"### {kind.__name__}\n"
    also = f" (Also {'an' if bases[1] in 'AEIOU' else 'a'} {bases}.)" if bases else ""
    yield f"{_line(cause)}{also}\n"
    yield f"**What to do:** {_line(cures[0])}\n"
    for part in rest:
        if part.startswith("Attributes:"):
            yield from _attributes(part)
            yield ""


def _attributes(part: str) -> Iterator[str]:
    lines = textwrap.dedent(part.partition("\n")[2]).splitlines()
    text = "\n".join(line if not line.startswith(" ") else f"\x00{line.strip()}" for line in lines)
    for line in text.replace("\n\x00", " ").splitlines():
        name, _, meaning = line.partition(": ")
        yield f"- `{name}`: {_code(meaning)}"


def _line(text: str) -> str:
    return _code(" ".join(text.split()))


def _code(text: str) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", text)


def render(text: str) -> str:
    """The page with its generated part rewritten.

    Raises:
        SpecError: a docstring does not say what to do, or a marker of the page does not end.
    """
    return fill(PAGE, text, {"errors": "\n".join(line for kind in classes() for line in section(kind))})


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    page = ROOT / PAGE
    try:
        text = render(page.read_text(encoding="utf-8"))
    except SpecError as error:
        print(f"nothing was written:\n{error}", file=sys.stderr)
        return 2
    return keep(page, text, arguments, f"{PAGE} is not what the errors say: run `python spec/troubleshooting.py`.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
