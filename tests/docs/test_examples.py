"""Every Python example in the documents is run by a test that is named here. Nightly ones have a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_documents import DOCS, PAGES, ROOT, SCHEMES, TUTORIALS, programs

#: The ids of the tests.
PRINTS = "tests/docs/test_documents.py::test_the_programs_of_a_page_print_what_it_says"
SCHEME = "tests/docs/test_documents.py::test_a_schemes_program_runs_and_prints_what_its_page_says"
TUTORIAL = "tests/docs/test_documents.py::test_a_tutorials_program_runs_and_prints_what_its_page_says"
IN_GUIDE = "tests/unit/schemes/test_start_methods.py::test_the_guides_code_replaces_a_lost_worker"
GROUP_RAY = "tests/docs/test_documents.py::test_the_program_of_a_group_over_ray_serves_each_version"
GROUP_RANKS = "tests/docs/test_documents.py::test_the_program_of_a_group_over_ranks_serves_each_version"
WALK = "tests/docs/test_contributing.py::test_the_walk_of_contributing_adds_a_transport"
README = (
    "tests/unit/schemes/test_start_methods.py::test_the_readme_example_runs_and_prints_its_report",
    "tests/unit/group/test_ppo.py::test_the_readmes_ppo_ends_and_its_results_name_the_versions_that_made_them",
)

#: For each page with Python, the tests that run its blocks, in order.
RUN_BY: dict[str, tuple[str, ...]] = {
    "README.md": README,
    "CONTRIBUTING.md": (WALK,) * 4,
    "docs/engines.md": (PRINTS,) * 3,
    "docs/group.md": (PRINTS, GROUP_RAY, GROUP_RANKS),
    "docs/guide.md": (IN_GUIDE, PRINTS, PRINTS, PRINTS, PRINTS),
    "docs/observability.md": (PRINTS,) * 3,
    "docs/testing.md": (PRINTS,) * 2,
    "docs/tracing.md": (PRINTS,),
    "docs/transports.md": (PRINTS,) * 3,
    **{f"docs/schemes/{name}.md": (SCHEME,) for name in SCHEMES},
    **{f"docs/tutorials/{name}.md": (TUTORIAL,) for name in TUTORIALS},
}
#: The example programs in files of their own, and the tests that run them.
EXAMPLES: dict[str, str] = {
    "group_ray.py": GROUP_RAY,
    "group_torchrun.py": GROUP_RANKS,
    "ppo_cartpole.py": README[1],
    "queue_scheme.py": (
        "tests/transports/conformance/test_example_in_docs.py::test_the_example_scheme_of_the_docs_sends_over_its_links"
    ),
    "queue_transport.py": (
        "tests/transports/conformance/test_example_in_docs.py::test_the_example_transport_of_the_docs_conforms"
    ),
    "torchrun_fsdp.py": (
        "tests/docs/test_documents.py::test_the_fsdp_program_serves_the_whole_model_and_every_rank_reports_it"
    ),
}
#: The pages whose programs run nightly and not in CI, and why.
NIGHTLY = {
    "docs/tutorials/collectors.md": "25 seconds on two idle cores; tests/torchrl has a cheaper one in CI",
    "CONTRIBUTING.md": "a minute: the walk makes the transport in a copy of the repository, and its commands lint that",
}


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def fences(text: str) -> list[tuple[str, str]]:
    """The language and the text of each fenced block."""
    return re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)


def indented(text: str) -> list[str]:
    """The blocks that are code because they are indented, outside of lists."""
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"(?<=\n\n)((?: {4}[^\n]*\n)+)", outside)


def is_python(code: str) -> bool:
    """Whether a text is a Python program, and not prose, a command or output."""
    lines = [line[4:] if code.startswith("    ") else line for line in code.splitlines()]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    telling = ast.Assign | ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.With | ast.Call
    return any(isinstance(node, telling) for node in ast.walk(tree))


def test_each_python_block_of_the_documents_is_listed_with_the_test_that_runs_it() -> None:
    found = {
        str(path.relative_to(ROOT)): sum(language == "python" for language, _ in fences(path.read_text("utf-8")))
        for path in documents()
    }

    assert {name: count for name, count in found.items() if count} == {name: len(by) for name, by in RUN_BY.items()}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_python_is_in_blocks_without_a_language_or_in_indented_blocks(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    hidden = [code for language, code in fences(text) if language in {"", "py", "python3"} and is_python(code)]

    assert hidden + [code for code in indented(text) if is_python(code)] == []


@pytest.mark.parametrize("test", sorted({*EXAMPLES.values(), *(each for tests in RUN_BY.values() for each in tests)}))
def test_the_listed_tests_exist(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]

    slow = "pytest.mark.slow" in [ast.unparse(each) for each in function.decorator_list]
    assert slow == (test == WALK), "a slow test runs only nightly: give the reason in NIGHTLY"


def test_each_example_file_is_listed_with_the_test_that_runs_it() -> None:
    assert {path.name for path in (DOCS / "examples").glob("*.py")} == EXAMPLES.keys()


def test_each_program_listed_as_printing_is_followed_by_its_output() -> None:
    printing = {f"docs/{name}.md": len(programs((DOCS / f"{name}.md").read_text("utf-8"))) for name in PAGES}

    assert printing == {name: by.count(PRINTS) for name, by in RUN_BY.items() if PRINTS in by}


def test_pages_that_run_only_nightly_are_listed_with_a_reason() -> None:
    tutorials = {f"docs/tutorials/{name}.md" for name, marks in TUTORIALS.items() if pytest.mark.slow in marks}

    assert NIGHTLY.keys() == {*tutorials, "CONTRIBUTING.md"}
