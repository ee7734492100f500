"""A generated page: written, or compared byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def keep(page: Path, text: str, arguments: Sequence[str], otherwise: str) -> int:
    """Write the page, or with ``--check`` only compare it.

    Args:
        page: where it lies.
        text: what it should contain.
        arguments: of the command line.
        otherwise: what is printed if it differs.

    Returns:
        The exit status: 0 it is as it should be, 1 it differs.
    """
    if "--check" not in arguments:
        page.write_text(text, encoding="utf-8")
        return 0
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(otherwise)
    return 1
