"""Analysis of a model's text: traps of TLC, temporal properties, and the properties at a place in the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.model.text import Library, Module, traps, without_comments

HERE = Path(__file__).parent


@pytest.fixture
def library() -> Library:
    return Library(HERE / "specs")


def test_comments_are_blanked_without_moving_other_text() -> None:
    text = 'a (* x (* y *)\n z *) b \\* c\n"\\* (* kept" d'

    assert without_comments(text) == "a             \n      b     \n" + '"\\* (* kept" d'


@pytest.mark.parametrize(
    "line",
    [
        "x' = [[i \\in S |-> 0] EXCEPT ![2] = 1]",
        "x' = [[i \\in S |-> [j \\in S |-> 0]] EXCEPT ![2][1] = 1]",
        "x' = [ [i \\in S |-> f[i]]\n       EXCEPT ![2] = 1]",
        "x' = Tail([i \\in S |-> 0])",
        "x' = Append([i \\in S |-> f[i]], 1)",
        "LET zeros == [i \\in S |-> 0] IN x' = [zeros EXCEPT ![2] = 1]",
        "LET zeros(T) == [i \\in T |-> 0] IN x' = SubSeq(zeros(S), 1, 2)",
    ],
)
def test_expressions_that_tlc_gets_wrong_are_refused(line: str) -> None:
    found = list(traps(Module("M", f"A == {line}")))

    assert len(found) == 1
    assert found[0].startswith("M.tla line 1: ")


@pytest.mark.parametrize(
    "line",
    [
        "x' = [x EXCEPT ![2] = 1]",
        "x' = [x EXCEPT ![2] = [i \\in S |-> 0]]",
        "x' = [i \\in S |-> [x[i] EXCEPT !.a = 1]]",
        "x' = Append(x, [a |-> 1])",
        "x' = Tail(x)",
        "x' = [i \\in S |-> 0]",
        "LET m == [a |-> 1, b |-> 2] IN x' = [m EXCEPT !.a = 2]",
    ],
)
def test_expressions_that_tlc_gets_right_are_accepted(line: str) -> None:
    assert list(traps(Module("M", f"A == {line}"))) == []


@pytest.mark.parametrize(
    ("name", "temporal"),
    [
        ("Rises", False),
        ("BothWays", False),
        ("Refines", False),
        ("Ends", True),
        ("Settles", True),
        ("Spec", True),
    ],
)
def test_temporal_properties_are_recognised(library: Library, name: str, temporal: bool) -> None:
    assert temporal is library.is_temporal("Counter", name)


@pytest.mark.parametrize(
    ("body", "temporal"),
    [
        ("x = <<>>", False),
        ("[]a /\\ [][N]_v", False),
        ("[](a \\/ b) /\\ []c", False),
        ("[](a \\/ []b)", True),
        ("[]~[]a", True),
        ("a => []b", True),
        ("a ~> b", True),
        ("<>[]a", True),
        ("SF_v(A)", True),
    ],
)
def test_temporal_operators_are_recognised(tmp_path: Path, body: str, temporal: bool) -> None:
    (tmp_path / "M.tla").write_text(f"---- MODULE M ----\nP == {body}\n====\n")

    assert temporal is Library(tmp_path).is_temporal("M", "P")


def test_nested_boxes_are_temporal() -> None:
    assert Library(HERE / "faults").is_temporal("TwoWorkers", "LitOnce")


def test_a_place_in_the_text_belongs_to_the_properties_that_contain_it(library: Library) -> None:
    listed = ("TypeOK", "BothWays", "Rises", "Overpromises", "Refines")

    in_both = library.owners("Counter", listed, "line 41, col 23 to line 41, col 34 of module Counter")
    in_promise = library.owners("Counter", listed, "line 6, col 25 to line 6, col 37 of module Promise")

    assert in_both == ("BothWays",)
    assert in_promise == ("Overpromises", "Refines")
    assert library.owners("Counter", listed, "somewhere") == ()


def test_all_modules_in_use_are_found(library: Library) -> None:
    assert {"Counter", "Promise"} == {module.name for module in library.closure("Counter")}


def test_a_module_may_define_nothing() -> None:
    assert Module("M", "---- MODULE M ----\nEXTENDS Naturals\nASSUME TRUE\n====\n").definitions == {}


def test_a_definition_ends_where_the_next_unit_begins() -> None:
    text = "S == {\n  1\n}\n\nASSUME 2\nT(x) ==\n  3\n----\nU == 4\n====\n"
    found = Module("M", text).definitions.values()

    assert [(each.name, each.body.split()) for each in found] == [("S", ["{", "1", "}"]), ("T", ["3"]), ("U", ["4"])]
    assert [(each.first_line, each.last_line) for each in found] == [(1, 4), (6, 7), (9, 9)]


def test_definitions_in_extended_and_instantiated_modules_are_found(tmp_path: Path) -> None:
    (tmp_path / "A.tla").write_text("---- MODULE A ----\nEXTENDS Naturals,\n        B\nP == Q\n====\n")
    (tmp_path / "B.tla").write_text("---- MODULE B ----\nINSTANCE C\nQ == R(1)\n====\n")
    (tmp_path / "C.tla").write_text("---- MODULE C ----\nLOCAL R(x) == <>(x = 1)\n====\n")

    assert Library(tmp_path).is_temporal("A", "P")
    assert {"A", "B", "C"} == {module.name for module in Library(tmp_path).closure("A")}
