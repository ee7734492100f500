"""The example of docs/testing.md passes, is as short as the page says, and the page names what there is."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import weightsync.testing
from weightsync.testing import SCENARIOS, Ends, check_transport

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "queue_transport.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("queue_transport", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_conforms(caplog: Any) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    found = check_transport(load().lay, unreachable={"several models": "each connection carries one model"})

    assert {*found.passed, *found.beside, "several models"} == set(SCENARIOS)
    assert set(found.beside) == {"the graph of reordered", "the graph of duplicated", "the graph of lost"}
    assert found.unreached == {}


def test_the_page_names_each_ability_and_each_method_of_a_link() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    methods = [name for name in vars(load().QueueLink) if not name.startswith("_")]

    assert [name for name in methods if f"`{name}" not in page] == []
    assert [field.name for field in dataclasses.fields(Ends) if f"`{field.name}`" not in page] == []


def test_scenarios_named_on_the_page_exist() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    (declared,) = re.findall(r"unreachable=\{(.*?)\}", page, re.DOTALL)

    assert set(re.findall(r'"([^"]+)":', declared)) <= set(SCENARIOS)
    assert "check_transport" in weightsync.testing.__all__
