"""The package has the structure in `docs/architecture.md`: floors, packages, and sizes of modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import architecture
import pytest
from architecture import Room

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "weightsync"
PAGE = (ROOT / architecture.PAGE).read_text(encoding="utf-8")

#: Modules over 500 lines, and why each is not split.
LONG = {
    "schemes/base.py": "TorchRL's verbs with their documentation, and what a scheme overrides, are one class",
    "protocol/sender.py": "a role's values, guards and step are in one file",
}
#: Modules under 40 lines, and why each is a file of its own. Do not add to this list.
SHORT = {
    "__main__.py": "`python -m weightsync` looks for it",
}


def sizes() -> dict[str, int]:
    return {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }


def test_no_module_is_over_500_lines_except_those_with_a_reason():
    assert {name for name, lines in sizes().items() if lines > 500} <= set(LONG)


def test_no_module_is_under_40_lines_except_those_with_a_reason():
    short = {name for name, lines in sizes().items() if lines < 40 and not name.endswith("__init__.py")}
    assert short <= set(SHORT), "a module of so few lines belongs in the one that uses it"


def test_the_module_map_matches_the_imports():
    house = architecture.floors()
    assert architecture.render(PAGE, house) == PAGE, "run `make generate`"
    assert len(house) == 7


def test_every_path_named_on_the_page_exists():
    named = {name for name in re.findall(r"`([\w/.]+)`", PAGE) if "/" in name}
    assert "engine/sender.py" in named
    assert [name for name in sorted(named) if not (PACKAGE / name).exists() and not (ROOT / name).exists()] == []


def defined(module: Path) -> set[str]:
    """The classes and functions of a module, and its methods as ``Class.method``."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    found = {each.name for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
    for each in tree.body:
        if isinstance(each, ast.ClassDef):
            found |= {f"{each.name}.{one.name}" for one in each.body if isinstance(one, ast.FunctionDef)}
    return found


def test_every_class_or_function_named_for_a_rule_exists():
    rows = PAGE.partition("## Where a rule is")[2].splitlines()
    gone: list[str] = []
    places = 0
    for row in rows:
        known = {name for path in re.findall(r"`([\w/]+\.py)`", row) for name in defined(PACKAGE / path)}
        named = re.findall(r"\.py` `([\w.]+)`", row) + re.findall(r"`([A-Z]\w+\.\w+)`", row)
        places += len(named)
        gone += [name for name in named if name not in known]
    assert places > 20
    assert gone == []


def test_every_command_named_on_the_page_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", PAGE)) <= targets
    tested = {path for command in re.findall(r"`\.venv/bin/pytest ([^`]+)`", PAGE) for path in command.split()}
    assert tested
    assert [path for path in sorted(tested) if not list((ROOT / path).glob("**/test_*.py"))] == []


# ---------------------------------------------------------------------------------------------- the picture


def room(name: str, *imports: str, modules: tuple[str, ...] = ()) -> Room:
    return Room(name, f"what {name} is", modules, frozenset(imports))


HOUSE = [
    (room("errors"), room("clock", "errors")),
    (room("links", "clock", modules=("base", "pipe.link", "pipe.framing")),),
    (room("schemes", "links", "errors"),),
]


def test_an_import_implied_by_another_is_in_the_table_without_an_arrow():
    drawn = architecture.picture(HOUSE)
    assert re.findall(r"floor\d --> floor\d", drawn) == ["floor3 --> floor2", "floor2 --> floor1"]
    assert "| 3 | `schemes` | what schemes is | `errors`, `links` |" in architecture.table(HOUSE)


def test_an_import_inside_a_floor_is_dotted_and_every_module_is_in_its_box():
    drawn = architecture.picture(HOUSE)
    assert re.findall(r"\w+ -\.-> \w+", drawn) == ["clock -.-> errors"]
    assert 'links["<b>links</b><br>base<br><i>pipe:</i> link, framing"]' in drawn


def test_an_import_that_skips_a_floor_has_its_own_arrow_unless_implied():
    house = [(room("errors"),), (room("links"),), (room("schemes", "links", "errors"),)]
    assert re.findall(r"floor\d --> floor\d", architecture.picture(house)) == [
        "floor3 --> floor2",
        "floor3 --> floor1",
    ]


def test_check_reports_an_outdated_page_without_changing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "docs").mkdir()
    page = tmp_path / architecture.PAGE
    page.write_text("<!-- generated: floors -->\nold\n<!-- /generated -->\n", encoding="utf-8")
    monkeypatch.setattr(architecture, "ROOT", tmp_path)
    monkeypatch.setattr(architecture, "floors", lambda: HOUSE)
    assert architecture.main(["--check"]) == 1
    assert "run `python spec/architecture.py`" in capsys.readouterr().out
    assert "old" in page.read_text(encoding="utf-8")
    assert architecture.main([]) == 0
    assert architecture.main(["--check"]) == 0
