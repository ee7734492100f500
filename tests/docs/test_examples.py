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
IN_GUIDE = "tests/unit/schemes/test_start_methods.py::test_the_python_of_the_guide"
GROUP_RAY = "tests/docs/test_documents.py::test_the_program_of_a_group_over_ray_serves_each_version"
GROUP_RANKS = "tests/docs/test_documents.py::test_the_program_of_a_group_over_ranks_serves_each_version"
WALK = "tests/docs/test_contributing.py::test_a_new_transport_is_made_as_contributing_says"
README = (
    "tests/unit/schemes/test_start_methods.py::test_the_example_of_the_readme",
    "tests/unit/group/test_ppo.py::test_the_ppo_of_the_readme_ends_and_its_workers_act_with_the_versions_that_their_results_name",
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
        "tests/transports/conformance/test_example_in_docs.py"
        "::test_the_scheme_of_the_docs_sends_over_the_links_of_the_docs"
    ),
    "queue_transport.py": "tests/transports/conformance/test_example_in_docs.py::test_the_example_conforms",
    "torchrun_fsdp.py": (
        "tests/docs/test_documents.py::test_the_program_of_two_ranks_serves_the_whole_model_and_every_rank_says_so"
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


def test_each_python_block_of_each_document_is_run_by_a_test_that_is_named_here() -> None:
    found = {
        str(path.relative_to(ROOT)): sum(language == "python" for language, _ in fences(path.read_text("utf-8")))
        for path in documents()
    }

    assert {name: count for name, count in found.items() if count} == {name: len(by) for name, by in RUN_BY.items()}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_python_hides_in_a_block_without_a_language_or_an_indented_one(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    hidden = [code for language, code in fences(text) if language in {"", "py", "python3"} and is_python(code)]

    assert hidden + [code for code in indented(text) if is_python(code)] == []


@pytest.mark.parametrize("test", sorted({*EXAMPLES.values(), *(each for tests in RUN_BY.values() for each in tests)}))
def test_the_tests_named_here_exist(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]

    slow = "pytest.mark.slow" in [ast.unparse(each) for each in function.decorator_list]
    assert slow == (test == WALK), "what is slow runs each night only: NIGHTLY says why"


def test_each_program_in_a_file_is_run_by_a_test_that_is_named_here() -> None:
    assert {path.name for path in (DOCS / "examples").glob("*.py")} == EXAMPLES.keys()


def test_the_pages_that_print_have_a_text_behind_each_program() -> None:
    printing = {f"docs/{name}.md": len(programs((DOCS / f"{name}.md").read_text("utf-8"))) for name in PAGES}

    assert printing == {name: by.count(PRINTS) for name, by in RUN_BY.items() if PRINTS in by}


def test_what_runs_each_night_only_is_here_with_its_reason() -> None:
    tutorials = {f"docs/tutorials/{name}.md" for name, marks in TUTORIALS.items() if pytest.mark.slow in marks}

    assert NIGHTLY.keys() == {*tutorials, "CONTRIBUTING.md"}
