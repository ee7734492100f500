"""Follow the two walks of CONTRIBUTING.md in a copy of the repository.

Each block of the page is an instruction: ``python FILE`` writes or appends to this file, ``diff`` changes the file in
its first line, ``sh`` runs commands (``sh fails``: the last one fails), and ``text`` must be in their output.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from skipping import require_tlc

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
REFUSAL_KIND, TRANSPORT = "A new refusal kind", "A new transport"
#: Files that a copy does not need: environments, caches, build outputs.
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "site")
#: Seconds in which the commands of one block must end, even on a busy machine.
_PATIENCE = 600.0


class Block(NamedTuple):
    """One instruction of the page."""

    language: str
    #: The rest of the fence's line: a file, or "fails".
    rest: str
    body: str


def walk(title: str) -> list[Block]:
    """The instructions below a heading."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [Block(*found) for found in re.findall(r"^```(\w+) ?(.*?)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)]


# ------------------------------------------------------------------------------------------------- changes


def change(copy: Path, block: Block) -> None:
    """Apply a block: write a file, append to it, or apply a diff."""
    if block.language == "python":
        path = copy / block.rest
        before = f"{path.read_text(encoding='utf-8')}\n" if path.exists() else ""
        path.write_text(before + block.body, encoding="utf-8")
        return
    head, *hunks = re.split(r"^@@.*\n", block.body, flags=re.MULTILINE)
    path = copy / head.removeprefix("--- ").strip()
    text = path.read_text(encoding="utf-8")
    for hunk in hunks:
        text = changed(text, hunk.splitlines(keepends=True), path.relative_to(copy))
    path.write_text(text, encoding="utf-8")


def changed(text: str, hunk: list[str], name: Path) -> str:
    """The text after one hunk, whose old lines must occur exactly once. A line of ``...`` matches any one line."""
    old = [line[1:] or "\n" for line in hunk if not line.startswith("+")]
    pattern = "".join(r"([^\n]*\n)" if line == "...\n" else re.escape(line) for line in old)
    found = list(re.finditer(f"^{pattern}", text, re.MULTILINE))
    assert len(found) == 1, f"{name} has these lines of CONTRIBUTING.md {len(found)} times:\n{''.join(old)}"
    [place] = found
    any_lines = iter(place.groups())
    new = [next(any_lines) if line == " ...\n" else line[1:] for line in hunk if not line.startswith("-")]
    return text[: place.start()] + "".join(new) + text[place.end() :]


# ------------------------------------------------------------------------------------------------- commands


def run(copy: Path, block: Block) -> str:
    """Run the commands of a block as a reader would. Returns their output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),  # takes precedence over the installed tree
        # Keep `make` from installing anything: the copy uses this Python's environment.
        "MAKEFLAGS": f"BIN={Path(sys.executable).parent} INSTALLED={copy / '.git' / 'installed'}",
        "COLUMNS": "200",
    }
    environment.pop("PYTEST_XDIST_WORKER", None)
    process = subprocess.Popen(
        ["bash", "-euc", block.body],
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        pytest.fail(f"not done within {_PATIENCE:g} s:\n{block.body}\n{printed}")
    assert (process.returncode != 0) == (block.rest == "fails"), f"{block.body}\n{printed}"
    return printed


def follow(copy: Path, blocks: list[Block]) -> list[str]:
    """Carry out the blocks in order. Returns the commands that were run."""
    printed = ""
    ran = []
    for block in blocks:
        match block.language:
            case "sh":
                printed = run(copy, block)
                ran += block.body.splitlines()
            case "text":
                missing = [line for line in block.body.splitlines() if line not in printed]
                assert missing == [], f"{missing} is not in:\n{printed}"
            case _:
                change(copy, block)
    return ran


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the repository with one commit, which uses this Python's environment."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=_LEFT_OUT, symlinks=True)
    (copy / ".venv").symlink_to(sys.prefix)
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "--no-gpg-sign", "-m", "The copy"]):
        subprocess.run(["git", *command], cwd=copy, check=True, stdin=subprocess.DEVNULL)
    (copy / ".git" / "installed").touch()  # newer than the files that would make `make` install again
    return copy


@pytest.mark.tlc
@pytest.mark.timeout(1800)
def test_the_walk_of_contributing_adds_a_refusal_kind(copy: Path) -> None:
    require_tlc("THE REFUSAL KIND OF CONTRIBUTING.md")
    ran = follow(copy, walk(REFUSAL_KIND))

    assert [command.split()[0] for command in ran].count("make") == 2
    rendered = (copy / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert "| TORN | a swap failed half way" in rendered


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_walk_of_contributing_adds_a_transport(copy: Path) -> None:
    ran = follow(copy, walk(TRANSPORT))

    assert sum("test_stream.py" in command for command in ran) == 3
    page = (copy / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.search(r"transports\[.*\bstream\b", page)


# ----------------------------------------------------------------------------------------- in every `make test`


@pytest.mark.parametrize("title", [REFUSAL_KIND, TRANSPORT])
def test_every_change_of_the_walks_still_applies_to_the_repository(title: str, tmp_path: Path) -> None:
    changes = [block for block in walk(title) if block.language in ("diff", "python")]
    assert len(changes) > 3
    for block in changes:
        name = block.rest or block.body.split()[1]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists() and not path.exists():
            shutil.copy(ROOT / name, path)
        change(tmp_path, block)
        if path.suffix == ".py":
            compile(path.read_text(encoding="utf-8"), name, "exec")


def test_a_hunk_changes_the_lines_it_names_and_no_others() -> None:
    text = "a\nb\nanything\nc\n"
    assert changed(text, [" b\n", " ...\n", "-c\n", "+d\n"], Path("x")) == "a\nb\nanything\nd\n"
    with pytest.raises(AssertionError, match="0 times"):
        changed(text, ["-e\n", "+f\n"], Path("x"))
    with pytest.raises(AssertionError, match="2 times"):
        changed("a\na\n", ["-a\n", "+b\n"], Path("x"))


def test_every_command_of_the_page_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {target for targets in re.findall(r"`make ([a-z -]+)", PAGE) for target in targets.split()}
    assert "protocol" in named
    assert named <= targets
    scripts = set(re.findall(r"(?<!``)python ((?:spec|tests)/[\w/]+\.py)", PAGE))
    assert "spec/check.py" in scripts
    assert [script for script in sorted(scripts) if not (ROOT / script).is_file()] == []
