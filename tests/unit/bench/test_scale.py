"""The page about clusters: rendered from stored results, and calculated by the formulas on the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import scale
from scalegen.measuring import _step

STORED = {
    "machine": {"cores": "2"},
    "memcpy_gb_s": 10.0,
    "poll_us": 40.0,
    "step": [{"workers": 10, "us": 8.5, "calls": 22.0}],
    "fleet": [
        {"workers": 1, "send_ms": 1.0, "trainer_ms": 1.0, "calls": 390},
        {"workers": 11, "send_ms": 9.0, "trainer_ms": 3.0, "calls": 2200},
    ],
    "memory": [{"scheme": "shared", "trainer": 0.0, "shared": 2.0, "worker": 0.0}],
}


def test_the_time_of_a_send_follows_the_formula_on_the_page() -> None:
    assert scale.per_worker(STORED) == pytest.approx(0.2e-3)
    assert scale.seconds(STORED, 10e9, links=100, copies=4, rate=1e9) == pytest.approx(1.0 + 40.0 + 0.02)


def test_an_answer_costs_about_the_same_with_40_and_400_workers() -> None:
    few, many = _step(40), _step(400)

    assert 10 < many["calls"] <= 1.2 * few["calls"]


def test_the_page_is_checked_without_importing_torch() -> None:
    checked = "import sys, scale; assert not scale.main(['--check']); sys.exit('torch' in sys.modules)"
    spec = Path(scale.__file__).parent

    assert subprocess.run([sys.executable, "-c", checked], cwd=spec, check=False).returncode == 0


def test_the_page_is_rendered_and_an_outdated_page_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / scale.PAGE
    page.parent.mkdir()
    sections = "".join(f"<!-- generated: {name} -->\n<!-- /generated -->\n" for name in ("measured", "calculated"))
    page.write_text(sections, encoding="utf-8")
    assert scale.main([], tmp_path) == 2
    assert "has no results" in capsys.readouterr().err

    (tmp_path / scale.RESULTS).mkdir()
    (tmp_path / scale.RESULTS / "two-cores.json").write_text(json.dumps(STORED), encoding="utf-8")
    assert scale.main(["--check"], tmp_path) == 1
    assert scale.main([], tmp_path) == 0
    assert scale.main(["--check"], tmp_path) == 0
    text = page.read_text(encoding="utf-8")
    assert "| 11 | 9.0 | 3.0 | 0.27 | 200 |" in text
    assert "| 1,000 | 125 | 256 MiB |  | 215 s | 22 s |" in text
