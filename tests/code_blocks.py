"""The blocks of code in the documents."""

from __future__ import annotations

import re


def blocks(document: str, language: str = "python") -> list[str]:
    """The blocks of code of a language in a document, given as its text."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
