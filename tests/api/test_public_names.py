"""Every public name imports from `weightsync`, lazily, and type checkers see the same names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import weightsync


@pytest.mark.parametrize("name", weightsync.__all__)
def test_every_public_name_imports(name: str) -> None:
    assert getattr(weightsync, name) is not None
    assert name in dir(weightsync)


def test_type_checkers_see_the_same_names() -> None:
    source = Path(weightsync.__file__).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    seen = {f"{node.module}.{alias.asname}" for node in imports for alias in node.names if alias.asname}

    assert seen == {f"weightsync.{home}.{name}" for name, home in weightsync._HOMES.items()}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Nonesuch"):
        weightsync.Nonesuch  # noqa: B018


def test_importing_weightsync_imports_no_torch() -> None:
    program = "import sys, weightsync; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
