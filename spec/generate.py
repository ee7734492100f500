"""Renders `spec/protocol.toml`, the one source of the protocol.

Writes `weightsync/protocol/_tables.py`, `tla/Tables.tla`, the marked parts of `docs/protocol.md` and `README.md`, and
`weightsync/protocol/_actions.py`, the names of the actions in `tla/AckProtocol.tla`.
With ``--check`` it writes nothing and compares byte for byte.
Exit status: 0 all files are up to date, 1 a file differs, 2 the protocol is not valid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import count, zip_longest
from pathlib import Path

from protocolgen import actions, checks, docs, python, source, tla

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "spec/protocol.toml"
#: The model, which names the actions.
MODEL = "tla/AckProtocol.tla"
#: Markdown files with marked parts.
DOCUMENTS = ("docs/protocol.md", "README.md")


def render(text: str, documents: Mapping[str, str], model: str) -> dict[str, str]:
    """Render all generated files.

    Args:
        text: the contents of `protocol.toml`.
        documents: path to contents of the Markdown files with marked parts.
        model: the contents of `AckProtocol.tla`.

    Returns:
        Path to contents, for each generated file.

    Raises:
        SpecError: the protocol or a marker is not valid, or the model's actions cannot be read.
    """
    protocol = source.read(text)
    checks.check(protocol)
    parts = docs.sections(protocol)
    return {
        "weightsync/protocol/_tables.py": python.render(protocol),
        "weightsync/protocol/_actions.py": actions.render(model),
        "tla/Tables.tla": tla.render(protocol),
        **{path: docs.fill(path, document, parts) for path, document in documents.items()},
    }


def difference(path: str, found: bytes | None, wanted: bytes) -> str | None:
    """Describe where a file first differs from its expected contents.

    Args:
        path: its name.
        found: its contents; None if it does not exist.
        wanted: what it should contain.

    Returns:
        One line that names the file, the line's number and both lines; None if the contents are equal.
    """
    if found == wanted:
        return None
    if found is None:
        return f"{path}: missing"
    pairs = zip_longest(found.splitlines(keepends=True), wanted.splitlines(keepends=True))
    for number, (is_there, should_be) in zip(count(1), pairs, strict=False):
        if is_there != should_be:
            return f"{path}:{number}: {_shown(is_there)} should be {_shown(should_be)}"
    raise AssertionError("equal line by line, yet not equal")


def _shown(line: bytes | None) -> str:
    return "the end of the file" if line is None else repr(line.decode(errors="replace"))


def _read(path: str) -> bytes | None:
    try:
        return (ROOT / path).read_bytes()
    except FileNotFoundError:
        return None


def _rendered() -> dict[str, bytes]:
    found = {path: _read(path) for path in DOCUMENTS}
    documents = {path: contents.decode() for path, contents in found.items() if contents is not None}
    model = (ROOT / MODEL).read_text(encoding="utf-8")
    rendered = render((ROOT / SOURCE).read_text(encoding="utf-8"), documents, model)
    return {path: contents.encode() for path, contents in rendered.items()}


def _check(rendered: Mapping[str, bytes]) -> int:
    differences = [line for path, wanted in rendered.items() if (line := difference(path, _read(path), wanted))]
    for line in differences:
        print(line)
    if differences:
        print(f"{SOURCE} says otherwise: run `python spec/generate.py`.")
    return 1 if differences else 0


def _write(rendered: Mapping[str, bytes]) -> int:
    for path, contents in rendered.items():
        if _read(path) != contents:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_bytes(contents)
            print(f"wrote {path}")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=f"Renders {SOURCE}.")
    parser.add_argument("--check", action="store_true", help="compare byte for byte, write nothing")
    options = parser.parse_args(arguments)
    try:
        rendered = _rendered()
    except source.SpecError as error:
        print(f"{SOURCE} is refused, nothing was written:\n{error}", file=sys.stderr)
        return 2
    return _check(rendered) if options.check else _write(rendered)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
