"""The programs in the documents run and print what the page says, links work, and names and commands exist."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import pkgutil
import re
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer
from code_blocks import blocks
from fleet import free_port
from ray_environment import ENVIRONMENT
from typer.core import TyperGroup

from weightsync.cli._app import COMMANDS, build, with_file_of_json
from weightsync.names import FORMER_HOMES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Seconds in which the program of a page must end.
PATIENCE = 110.0
NEEDS = {"ray": [pytest.mark.ray], "rpc": [pytest.mark.rpc], "distributed": [pytest.mark.gloo]}
GROUP_RAY, GROUP_TORCHRUN = (DOCS / "examples" / f"group_{name}.py" for name in ("ray", "torchrun"))
SCHEMES = ("processes", "shared", "none", "ray", "rpc", "distributed")
#: Schemes whose programs spawn workers, which spend most of the time importing torch. They run unchanged only nightly.
SPAWNING = ("processes", "shared", "rpc", "distributed")


def page(name: str) -> str:
    return (DOCS / "schemes" / f"{name}.md").read_text(encoding="utf-8")


def test_each_scheme_has_its_page() -> None:
    assert {path.stem for path in (DOCS / "schemes").glob("*.md")} == set(SCHEMES)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_schemes_page_has_exactly_one_complete_program(name: str) -> None:
    (program,) = blocks(page(name), "python")

    compile(program, f"{name}.md", "exec")
    assert "print(" in program


def runs() -> list[Any]:
    """The programs of all schemes, and the start method of their processes ("": unchanged)."""
    nightly = [pytest.param(name, "", marks=[*NEEDS.get(name, []), pytest.mark.slow]) for name in SPAWNING]
    ways = {name: "fork" if name in SPAWNING else "" for name in SCHEMES}
    return nightly + [pytest.param(name, method, marks=NEEDS.get(name, [])) for name, method in ways.items()]


@pytest.mark.parametrize(("name", "method"), runs())
def test_a_schemes_program_runs_and_prints_what_its_page_says(
    name: str, method: str, tmp_path: Path, forkserver: Any
) -> None:
    (program,) = blocks(page(name), "python")
    path = tmp_path / f"program_of_{name}.py"  # "ray.py" would be found in place of Ray
    path.write_text(program, encoding="utf-8")

    code, output, errors = run(path, forkserver, method=method)

    assert code == 0, errors
    assert output
    for line in "".join(blocks(page(name), "text")).splitlines():
        assert promised(line, output), f"{line!r} is not in:\n{output}\n{errors}"


@pytest.mark.gloo
@pytest.mark.parametrize("launch", ["forked", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_fsdp_program_serves_the_whole_model_and_every_rank_reports_it(
    launch: str, tmp_path: Path, forkserver: Any
) -> None:
    path = Path(shutil.copy(DOCS / "examples" / "torchrun_fsdp.py", tmp_path))
    if launch == "forked":
        code, output, errors = run(path, forkserver, ranks=2, method="fork")
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=PATIENCE)
        code, output, errors = done.returncode, done.stdout, done.stderr

    assert code == 0, errors
    for rank in range(2):
        for version in range(1, 4):
            assert f"rank {rank}: version {version} of 'policy' [worker 0: APPLIED] 904 bytes" in output


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_program_of_a_group_over_ray_serves_each_version(
    capsys: pytest.CaptureFixture[str], cluster: object
) -> None:
    assert blocks((DOCS / "group.md").read_text(encoding="utf-8"), "python")[1] == GROUP_RAY.read_text(encoding="utf-8")
    runpy.run_path(str(GROUP_RAY), run_name="imported")["main"](num_workers=1)

    output = capsys.readouterr().out
    assert all(f"version {version} of 'policy' [worker 0: APPLIED]" in output for version in (2, 3, 4))


@pytest.mark.gloo
def test_the_program_of_a_group_over_ranks_serves_each_version(tmp_path: Path, forkserver: Any) -> None:
    program = GROUP_TORCHRUN.read_text(encoding="utf-8")
    assert blocks((DOCS / "group.md").read_text(encoding="utf-8"), "python")[2] == program
    torchruns = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    paths = [tmp_path / f"rank_{rank}.py" for rank in range(3)]
    for rank, path in enumerate(paths):
        path.write_text(f"import os\nos.environ |= {torchruns | {'RANK': str(rank)}}\n{program}", encoding="utf-8")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(run, paths, [forkserver] * 3))

    assert [code for code, _, _ in found] == [0, 0, 0], found
    for version in (2, 3, 4):
        assert f"version {version} of 'policy' [worker 0: APPLIED, worker 1: APPLIED]" in found[0][1]


#: Pages on which each program is followed by its output.
PAGES = ("transports", "observability", "engines", "guide", "group", "tracing", "testing")


def programs(document: str) -> list[tuple[str, str]]:
    """The programs of a page that are followed by their output, and that output."""
    printing = r"^```python\n((?:(?!^```).)*)^```\n\n(?:It prints:\n\n)?```text\n(.*?)^```$"
    return re.findall(printing, document, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_the_programs_of_a_page_print_what_it_says(name: str, tmp_path: Path, forkserver: Any) -> None:
    found = programs((DOCS / f"{name}.md").read_text(encoding="utf-8"))
    assert found
    for number, (program, text) in enumerate(found):
        path = tmp_path / f"{name}_{number}.py"
        path.write_text(program, encoding="utf-8")
        code, output, errors = run(path, forkserver, method="fork" if name == "group" else "")

        assert (0, text) == (code, output), errors


TUTORIALS = {
    "quickstart": [],
    "ppo": [],
    "staleness": [],
    "night": [],
    "torchrun": [pytest.mark.gloo],
    "collectors": [pytest.mark.torchrl, pytest.mark.slow],  # nightly: see NIGHTLY in test_examples.py
    "ray": [pytest.mark.ray],
    "engine": [],
    "transport": [],
    "counterexample": [pytest.mark.tlc],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in TUTORIALS.items()])
@pytest.mark.parametrize("method", ["fork", pytest.param("", marks=pytest.mark.slow)])
def test_a_tutorials_program_runs_and_prints_what_its_page_says(
    name: str, method: str, tmp_path: Path, forkserver: Any, request: pytest.FixtureRequest
) -> None:
    """Outside the nightly run, processes are forked, and the Ray program joins the cluster of the tests.

    At night each program runs unchanged. The program on the page of the Ray scheme starts a cluster in any run.
    """
    document = (DOCS / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    (program,), (text,) = blocks(document, "python"), blocks(document, "text")
    path = tmp_path / f"tutorial_{name}.py"  # "ray.py" would be found in place of Ray
    path.write_text(program, encoding="utf-8")

    ranks = 2 if name == "torchrun" else 1
    joined = request.getfixturevalue("cluster").address if (name, method) == ("ray", "fork") else ""
    code, output, errors = run(path, forkserver, ranks, method, joined)

    assert code == 0, errors
    for line in text.splitlines():
        assert promised(line, output), f"{line!r} is not in:\n{output}\n{errors}"


def test_each_tutorial_is_run_by_a_test() -> None:
    assert {path.stem for path in (DOCS / "tutorials").glob("*.md")} == {"README", *TUTORIALS}


def promised(line: str, output: str) -> bool:
    """Whether the output contains this line, in which ``...`` matches any text.

    Several processes write the output, so the text may follow an unfinished line of another process.
    """
    return re.search(".*".join(map(re.escape, line.strip().split("..."))), output) is not None


def run(path: Path, context: Any, ranks: int = 1, method: str = "", joined: str = "") -> tuple[int, str, str]:
    """Run a program like ``python path``, but with torch imported already. All processes that it started end with it.

    With several ranks, it runs as under torchrun. A start method applies to all its processes; forking is the cheapest.
    With the address of a Ray cluster, the program joins that cluster.
    """
    said = path.with_suffix(".out"), path.with_suffix(".err")
    environments: list[dict[str, str]] = [{}]
    if ranks > 1:
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port() - 1), "WORLD_SIZE": str(ranks)}
        environments = [world | {"RANK": str(rank)} for rank in range(ranks)]
    processes = [context.Process(target=as_main, args=(path, *said, each, method, joined)) for each in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    ended = not any(process.is_alive() for process in processes)
    for process in processes:
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
    output, errors = (each.read_text(encoding="utf-8") for each in said)
    assert ended, f"{path.name} did not end within {PATIENCE} s\n{output}\n{errors}"
    return max(abs(process.exitcode) for process in processes), output, errors


def as_main(  # noqa: PLR0917 - sent to a process, by position
    path: Path, output: Path, errors: Path, environment: dict[str, str], method: str, joined: str
) -> None:
    """Run the program as the main module of a new process."""
    os.setsid()
    for stream, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(path.parent)
    os.environ |= {**ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment}
    sys.argv, sys.path[:] = [str(path)], [str(path.parent), *sys.path]
    if method:
        context = multiprocessing.get_context(method)
        multiprocessing.get_context = lambda *_: context
    if joined:
        ray = importlib.import_module("ray")
        started = ray.init
        ray.init = lambda **_: started(address=joined, log_to_driver=False, logging_level="error")
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them; Ray ends its processes in one


# ------------------------------------------------------------------------------------------------------- links


def documents() -> list[Path]:
    return sorted(
        [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "spec").glob("*.md"), *(ROOT / "tla").glob("*.md")]
    )


def links(path: Path) -> list[str]:
    """The targets of the links in a document, except those to other sites."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_has_an_existing_target(path: Path) -> None:
    missing = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        leads_to = (path.parent / name).resolve() if name else path
        if not leads_to.exists() or (anchor and anchor not in anchors(leads_to)):
            missing.append(target)

    assert missing == []


def anchors(path: Path) -> set[str]:
    """The anchors that a website generates for the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    named = {(DOCS / target).resolve() for target in links(DOCS / "README.md")}

    pages = {path for path in DOCS.rglob("*.md") if path.name != "README.md" and path.parent.name != "design"}
    assert pages - named == set()


def test_design_pages_are_short_and_indexed_and_have_dated_sections() -> None:
    named = {(DOCS / "design" / target).resolve() for target in links(DOCS / "design" / "README.md")}
    pages = [path for path in (DOCS / "design").glob("*.md") if path.name != "README.md"]

    assert set(pages) - named == set()
    for page in pages:
        lines = page.read_text(encoding="utf-8").splitlines()
        sections = [line for line in lines if line.startswith("##")]
        assert [line for line in sections if not re.search(r" \(\d{4}-\d\d-\d\d\)$", line)] == [], page.name
        assert len(lines) <= 300, page.name


def test_the_readme_names_existing_files_instead_of_links() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/.-]+\.(?:md|toml)|docs/\w+/)`", text)

    assert links(ROOT / "README.md") == []
    assert "docs/README.md" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_command_is_documented_with_its_exit_codes() -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `weightsync (\w+).*?` \|.*\| 0(.*) \|$", text, re.MULTILINE)

    assert {name for name, _ in rows} == COMMANDS.keys()
    for name, codes in rows:
        _, _, described = (
            (ROOT / "weightsync" / "cli" / f"{name}.py").read_text(encoding="utf-8").partition("exit code is 0")
        )
        missing = [code for code in re.findall(r"\b(\d+):? ?", codes) if not re.search(rf"\b{code}\b", described)]
        assert (described != "", missing) == (True, []), name


def commands(path: Path) -> list[str]:
    """The commands of `weightsync` in a document, in its blocks and between backticks."""
    text = path.read_text(encoding="utf-8")
    shells = "".join(block for language in ("sh", "console") for block in blocks(text, language))
    alone = re.findall(r"^(?:\$ )?(weightsync [a-z][^#\n]*)", shells, re.MULTILINE)
    return alone + re.findall(r"`(weightsync [a-z][^`\n]*)`", text)


def test_every_command_in_a_document_is_accepted_by_the_command_line() -> None:
    found = sorted({command for path in documents() for command in commands(path)})

    assert len(found) > 20
    assert [f"{command}: {said}" for command in found if (said := refusal(command))] == []


def test_the_performance_page_lists_exactly_the_options_of_the_bench() -> None:
    table = re.findall(r"^\| (`--.*?) \|", (DOCS / "performance.md").read_text(encoding="utf-8"), re.MULTILINE)
    bench = vars(importlib.import_module("weightsync.cli.bench"))["bench"]
    declared = typer.Typer(add_completion=False)
    declared.command()(bench)
    options = {name for each in typer.main.get_command(declared).params for name in each.opts}

    assert set(re.findall(r"--[\w-]+", "".join(table))) == options - {"--help", "-h"}


def refusal(command: str) -> str:
    """The error of the command line for a command and its options, or "". Values are not checked, and may be absent."""
    found: Any = typer.main.get_command(build())
    words = command.split()[1:]
    words += ["value", "value"] if words[-1].startswith("-") else []
    try:
        while isinstance(found, TyperGroup) and words:
            _, found, words = found.resolve_command(typer.Context(found), words)
        found.make_parser(typer.Context(found)).parse_args(with_file_of_json(words))
    except Exception as error:  # noqa: BLE001 - typer's errors, which in an older typer are click's
        return repr(error)
    return ""


# ------------------------------------------------------------------------------------------------- identifiers


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_the_package_that_a_document_uses_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"^from (weightsync[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
    named = {f"{module}.{name}" for module, names in lines for name in re.split(r", *", names.strip())}
    named |= set(re.findall(r"\bweightsync(?:\.\w+)+", text))

    made = {"weightsync.transports.stream"} if path.name == "CONTRIBUTING.md" else set()  # created by the walk
    there = (name for name in sorted(named) if not any(name.startswith(module) for module in made))
    assert [name for name in there if not resolves(name)] == []


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of the package, or an attribute of one."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            return False
    return True


def defined() -> set[str]:
    """All modules, classes, functions and variables of the package, and all names in `protocol.toml`."""
    package = ROOT / "weightsync"
    found = {part for path in package.rglob("*.py") for part in path.relative_to(ROOT).with_suffix("").parts}
    for path in package.rglob("*.py"):
        for names in re.findall(
            r"^\s*(?:class|def|async def) (\w+)|^\s*(?:self\.)?(\w+)(?:: | = )|(\w+): ",
            path.read_text(encoding="utf-8"),
            re.MULTILINE,
        ):
            found.update(names)
    return found | set(re.findall(r'^name = "(\w+)"', (ROOT / "spec/protocol.toml").read_text("utf-8"), re.MULTILINE))


def test_every_name_in_the_glossary_exists() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    known = defined() | {"get_extra_state", "torch", "distributed"}  # names of torch
    known |= {part for former in FORMER_HOMES for part in former.split(".")}

    named = {part for term in re.findall(r"`([\w.]+)`", text) for part in term.split(".")}

    assert len(named) > 80
    assert named - known == set()
