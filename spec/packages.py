"""Tests the built packages outside the source tree (`make smoke`), and other releases (`make test-matrix`).

    python spec/packages.py smoke
    python spec/packages.py matrix [PYTEST ARGUMENT...]

`smoke` builds both, installs each into an empty environment without extras, and runs the program of a documentation
page there. `matrix` runs tests on each Python of `PYTHONS`, with the two newest minor releases of torch and tensordict,
and with every tool of the tests except Ray and TorchRL, which may not support these releases yet. The first Python is
also tested with the lowest releases that the package allows. A Python is taken from this machine, or downloaded by uv.
A Python that is not available is named at the end, and fails the run if ``CI`` is set.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = str(Path(sys.executable).with_name("uv"))
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: The tests that the matrix runs by default.
TESTS = (
    "tests/unit/weights",
    "tests/unit/schemes",
    "tests/unit/engine",
    "tests/unit/cli",
    "tests/protocol/pure",
    "tests/transports/pipe",
)
#: The package's extras that these tests need.
EXTRAS = ("cli", "otel", "prometheus", "rl")
#: The packages that the matrix installs: weightsync with these extras, and another one that the tests need.
INSTALLED = ("-e", f"{ROOT}[{','.join(EXTRAS)},test]", "opentelemetry-sdk>=1.30")
#: Variables that are unset for the tests. ``CI`` would require every tool; the other disables the bytecode cache.
_UNSET = {"CI", "PYTHONDONTWRITEBYTECODE"}
#: The time limit of the smoke programs, in seconds.
PATIENCE = 120
PAGE = "docs/schemes/shared.md"

#: The program that runs after that of the page, and checks the installed package.
CHECKS = """
import pathlib, subprocess, sys
import weightsync
home = pathlib.Path(weightsync.__file__)
assert home.is_relative_to(sys.prefix), home
for name in weightsync.__all__:
    getattr(weightsync, name)
assert (home.parent / "tla" / "AckProtocol.tla").is_file()
found = subprocess.run([sys.executable, "-I", "-m", "weightsync", "check"], capture_output=True, text=True)
assert found.returncode and "weightsync[cli]" in found.stderr + found.stdout, found
"""


def smoke() -> int:
    """Build, install and try both packages. Returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        _uv("build", "--quiet", "--out-dir", folder, str(ROOT))
        packages = sorted(each for each in Path(folder).iterdir() if each.suffix in {".whl", ".gz"})
        assert len(packages) == 2, packages
        for package in packages:
            _try(package, Path(folder))
            print(f"{package.name} works in an empty environment.", flush=True)
    return 0


def _try(package: Path, folder: Path) -> None:
    environment, elsewhere = folder / "environment", folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    python = str(environment / "bin" / "python")
    _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(environment))
    _uv("pip", "install", "--quiet", "--python", python, "-c", str(ROOT / "constraints.txt"), str(package))
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for name, text in (("page.py", program), ("checks.py", CHECKS)):
        (elsewhere / name).write_text(text, encoding="utf-8")
        subprocess.run([python, "-I", name], cwd=elsewhere, check=True, timeout=PATIENCE)


def matrix(arguments: Sequence[str]) -> int:
    """Run the tests on each Python with each pair of releases. Returns the exit status."""
    results: dict[str, str] = {}
    for version in PYTHONS:
        python = _interpreter(version)
        if python is None:
            results[f"Python {version}"] = "MISSING: there is none on this machine, and uv could not fetch one"
            continue
        for releases in [*_releases(python), *([_lowest()] if version == PYTHONS[0] else [])]:
            results[f"Python {version}, {' '.join(releases)}"] = _tested(python, releases, arguments)
    print("\n".join(["", *(f"{where}: {what}" for where, what in results.items())]))
    failed = [what for what in results.values() if what == "FAILED" or (what.startswith("MISSING") and _in_ci())]
    return 1 if failed else 0


def _in_ci() -> bool:
    return bool(os.environ.get("CI"))


def _interpreter(version: str) -> str | None:
    """A Python of this version: one that uv finds, one of pyenv, or one that uv downloads. None: there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for command in (["find", "--no-python-downloads", version], ["install", version], ["find", version]):
        found = subprocess.run([UV, "python", *command], check=False, capture_output=True, text=True)
        if command[0] == "find" and found.returncode == 0:
            return found.stdout.strip()
        ours = sorted(pyenv.glob(f"{version}.*/bin/python"))
        if ours:
            return str(ours[-1])
    return None


def _releases(python: str) -> list[list[str]]:
    """The two newest minor releases of torch and tensordict that can be installed together on this Python."""
    newest = _resolved(python, ["torch", "tensordict"])
    below = [re.sub(r"==(\d+\.\d+).*", r"<\1", each) for each in newest]
    return [newest, _resolved(python, below)]


def _lowest() -> list[str]:
    """The lowest allowed releases of the package's dependencies, including those of `EXTRAS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (project["optional-dependencies"][name] for name in EXTRAS)
    return [f"{each.replace('>=', '==')}.*" for each in itertools.chain(project["dependencies"], *extras)]


def _resolved(python: str, wanted: list[str]) -> list[str]:
    command = [UV, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", python, "-"]
    found = subprocess.run(command, input="\n".join(wanted), check=True, capture_output=True, text=True)
    return re.findall(r"^(?:torch|tensordict)==\S+", found.stdout, re.MULTILINE)


def _tested(python: str, releases: list[str], arguments: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "environment")
        own = str(home / "bin" / "python")
        _uv("venv", "--quiet", "--python", python, str(home))
        try:
            _uv("pip", "install", "--quiet", "--compile-bytecode", "--python", own, *releases, *INSTALLED)
        except subprocess.CalledProcessError:
            return "FAILED"
        command = [own, "-m", "pytest", "-q", "-m", "not slow and not tlc and not ray", *(arguments or TESTS)]
        environment = {name: value for name, value in os.environ.items() if name not in _UNSET}
        found = subprocess.run(command, cwd=ROOT, check=False, env=environment)
        return "FAILED" if found.returncode else "passed"


def _uv(*arguments: str) -> None:
    subprocess.run([UV, *arguments], check=True)


def main(arguments: Sequence[str]) -> int:
    """Run `smoke` or `matrix`. Returns the exit status."""
    if arguments[:1] == ["matrix"]:
        return matrix(arguments[1:])
    if list(arguments) == ["smoke"]:
        return smoke()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
