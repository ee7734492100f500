"""The charts in docs/scenarios.md and README.md equal those of new runs, whose traces conform to the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import charts


def test_the_charts_in_scenarios_md_equal_those_of_new_runs(root: Path) -> None:
    """The script runs as in `make protocol`: in a process without pytest's PYTHONPATH."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "spec/charts.py", "--check"]
    compared = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True, env=plain)

    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert (root / "docs" / "scenarios.md").read_text(encoding="utf-8").count("```mermaid") == 12


def test_the_chart_in_the_readme_equals_that_of_a_new_run(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    chart = text.partition("<!-- chart: update -->")[2].partition("<!-- /chart -->")[0]

    assert text == charts.render_readme(text)
    assert all(chart.count(word) == 2 for word in ("Update v1", "APPLIED", "Ack v1"))
