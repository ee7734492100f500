"""The second checker parses TLC's output correctly, and refuses anything unknown."""

from __future__ import annotations

import pytest
from modelcheck.second import Bounds, question_of
from modelcheck.second.examination import KNOWN
from modelcheck.second.judgement import reason_to_leave_out
from modelcheck.second.labelling import disjuncts, labelling_module
from modelcheck.second.reading import GraphReader
from modelcheck.second.values import parse
from modelcheck.second.words import Message, Node

from weightsync.errors import ConfigurationError
from weightsync.model import Manifest, Purpose, find_model
from weightsync.model.text import Library


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-3", -3),
        ('"ready"', "ready"),
        ("<<TRUE, FALSE>>", (True, False)),
        ("<<>>", ()),
        ("{}", frozenset()),
        ("{<<1, {2}>>, <<1, {}>>}", frozenset({(1, frozenset({2})), (1, frozenset())})),
        ("(1 :> <<7>> @@ 2 :> <<>>)", ((7,), ())),
        ("[p |-> 5, v |-> 4, k |-> 3, w |-> 2, s |-> 1]", Message(1, 2, 3, 4, 5)),
    ],
)
def test_values_that_tlc_prints_are_parsed(text, value):
    assert parse(text) == value


def test_a_record_of_unknown_fields_is_refused():
    with pytest.raises(ConfigurationError, match=r"a record of k, s, v, w, .*must follow"):
        parse("[s |-> 1, w |-> 1, k |-> 1, v |-> 1]")


def test_a_function_over_anything_but_1_to_n_is_refused():
    with pytest.raises(ConfigurationError, match=r"not over 1\.\.n"):
        parse("(2 :> 1 @@ 3 :> 1)")


_NODE = {
    "sstate": "<<0>>",
    "sdata": "{}",
    "slife": "<<1>>",
    "blocked": "<<TRUE>>",
    "rstate": "<<2>>",
    "rdata": "<<3>>",
    "messages": "{}",
    "answers": "{}",
    "gone": "<<<<FALSE>>>>",
}


def _line(name: str, value: str) -> str:
    text = f'<<"{name}", {value}>>'.replace('"', '\\"')
    return f'"{text}"\n'


def _node(**changes: str) -> list[str]:
    return [*(_line(name, value) for name, value in (_NODE | changes).items()), _line("FROM", "<<>>")]


def test_printed_nodes_and_steps_become_a_graph():
    reader = GraphReader()
    for line in (
        *_node(),
        _line("sstate", "<<5>>"),
        _line("STEP", '<<"A", 1>>'),
        _line("STEP", '<<"B", {2, 1}>>'),
        *_node(sstate="<<5>>"),
        _line("sstate", "<<0>>"),
        _line("STEP", '<<"A", 1>>'),
        _line("sstate", "<<0>>"),
        _line("STEP", '<<"A", 1>>'),
    ):
        reader.feed(line)
    first = Node((0,), frozenset(), (1,), (True,), (2,), (3,), frozenset(), frozenset(), ((False,),))
    assert reader.graph.nodes == [first, first._replace(sstate=(5,))]
    assert reader.graph.labels == [("A", 1), ("B", frozenset({1, 2}))]
    assert list(reader.graph.edges) == [(0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert reader.printed == 4


def test_a_node_that_lacks_a_variable_is_refused():
    reader = GraphReader()
    *variables, end = _node()[1:]
    for line in variables:
        reader.feed(line)
    with pytest.raises(ConfigurationError, match="a node of 8 variables"):
        reader.feed(end)


# ------------------------------------------------------------------------------------------- our own model


@pytest.fixture(scope="module")
def model() -> Manifest:
    return Manifest.read(find_model())


def test_constants_made_from_bounds_are_read_as_the_same_bounds():
    bounds = Bounds(2, 1, 2, 1, 3, frozenset({"copy", "async"}), frozenset({"Loses"}), frozenset({"FenceKept"}),
                    frozenset({"Reads"}))  # fmt: skip
    assert Bounds.read(bounds.constants) == bounds


@pytest.mark.parametrize("wrong", [{"Senders": [1, 3]}, {"MaxLink": True}, {"Loses": 0}, {"Features": "copy"}])
def test_a_constant_of_a_wrong_type_is_refused_by_name(wrong):
    constants = {**Bounds(1, 1, 1, 1, 1, frozenset()).constants, **wrong}
    with pytest.raises(ConfigurationError, match=f"The configuration's {next(iter(wrong))} "):
        Bounds.read(constants)


def test_the_second_checker_knows_each_property_of_the_model(model):
    """Except for a canary, which is then left out with a line of output."""
    library = Library(model.folder)
    for found in model.configurations:
        if found.purpose is not Purpose.CANARY and not reason_to_leave_out(found, library):
            assert set(question_of(found.config).names) <= KNOWN, found.name


def test_configurations_without_a_graph_or_with_too_many_states_are_left_out_with_the_reason(model):
    library = Library(model.folder)
    reasons = {found.name: reason_to_leave_out(found, library) for found in model.configurations}
    assert reasons["MCCheckerAssume"] == "a false assumption has no graph"
    assert reasons["MCFaults"] == ""
    assert "states" in reasons["MCCopy"]


def test_a_disjunct_that_cannot_be_labelled_is_refused(model, tmp_path):
    for path in model.folder.glob("*.tla"):
        text = path.read_text().replace("\\/ \\E s \\in Senders : Wait(s)", "\\/ \\E s \\in Senders : TRUE /\\ Wait(s)")
        (tmp_path / path.name).write_text(text)
    with pytest.raises(ConfigurationError, match="cannot be labelled"):
        labelling_module(Library(tmp_path), "MC")


def test_an_additional_variable_of_the_model_is_refused(model, tmp_path):
    for path in model.folder.glob("*.tla"):
        (tmp_path / path.name).write_text(path.read_text().replace("answers, gone>>", "answers, gone, more>>"))
    with pytest.raises(ConfigurationError, match="must follow the model"):
        labelling_module(Library(tmp_path), "MC")


def test_all_disjuncts_of_next_are_found(model):
    text = (model.folder / "AckProtocol.tla").read_text().split("\nNext ==")[1].split("\n-----")[0]
    assert len(disjuncts(Library(model.folder), "MC")) == text.count("\n  \\/ ") > 30
