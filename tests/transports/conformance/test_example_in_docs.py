"""The examples of docs/testing.md work; the page names all methods of a link, and only scenarios that exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import weightsync.testing
from weightsync.testing import SCENARIOS, Ends, check_transport

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = DOCS / "examples" / "queue_transport.py"


def load(example: Path = EXAMPLE) -> Any:
    spec = importlib.util.spec_from_file_location(example.stem, example)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_transport_of_the_docs_conforms(caplog: Any) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    found = check_transport(load().connect, unreachable={"several models": "each connection carries one model"})

    assert {*found.passed, *found.beside, "several models"} == set(SCENARIOS)
    assert set(found.beside) == {"the graph of reordered", "the graph of duplicated", "the graph of lost"}
    assert found.unreached == {}


def test_the_example_scheme_of_the_docs_sends_over_its_links(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))

    load(EXAMPLE.with_name("queue_scheme.py")).main()

    assert capsys.readouterr().out == "APPLIED ANSWER True\n"


def test_the_testing_page_names_the_rule_class_and_its_examples_exist() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")

    assert "`weightsync.testing.Rule`" in page
    assert all((DOCS / example).is_file() for example in re.findall(r"\]\((examples/[^)]+)\)", page))


def test_the_testing_page_names_each_field_of_ends_and_each_method_of_a_link() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    methods = [name for name in vars(load().QueueLink) if not name.startswith("_")]

    assert [name for name in methods if f"`{name}" not in page] == []
    assert [field.name for field in dataclasses.fields(Ends) if f"`{field.name}`" not in page] == []


def test_scenarios_named_on_the_testing_page_exist() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    (declared,) = re.findall(r"unreachable=\{(.*?)\}", page, re.DOTALL)

    assert set(re.findall(r'"([^"]+)":', declared)) <= set(SCENARIOS)
    assert "check_transport" in weightsync.testing.__all__
