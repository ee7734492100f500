"""The charts of the guarantees are those of runs made now, whose traces conform."""

from __future__ import annotations

from pathlib import Path

import charts


def test_the_charts_are_what_the_scenarios_give(root: Path) -> None:
    page = (root / "docs" / "scenarios.md").read_text(encoding="utf-8")
    assert page == charts.render(root)
    assert page.count("```mermaid") == 12
