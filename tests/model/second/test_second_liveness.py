"""The second checker's search for fair infinite behaviours, on small graphs with an obvious answer."""

from __future__ import annotations

import pytest
from modelcheck.second import Bounds, Graph, Node, Question, examine
from modelcheck.second.graph import components
from modelcheck.second.liveness import Fair, lasting
from modelcheck.second.words import NEW_RECEIVER, new_sender

from weightsync.errors import ConfigurationError

NODE = Node(("ready",), (new_sender(1),), ("alive",), (False,), ("ready",), (NEW_RECEIVER,), frozenset(), frozenset(),
            ((False,),))  # fmt: skip


def graph(waiting: str, *edges: tuple[int, str, int]) -> Graph:
    """A graph in whose n-th node a caller waits if the n-th character of ``waiting`` is a w."""
    nodes = [NODE._replace(blocked=(message == "w",), messages=frozenset({at})) for at, message in enumerate(waiting)]
    labels = sorted({label for _, label, _ in edges})
    found = {(before, labels.index(label), after): None for before, label, after in edges}
    return Graph(nodes, [(label, 1) for label in labels], found)


def lasts(graph: Graph, *fair: str) -> bool:
    conditions = [Fair(frozenset({name}), (1,)) for name in fair]
    return lasting(graph, lambda node: node.blocked[0], conditions) is not None


def test_rest_is_fair_only_where_nothing_fair_can_happen():
    chain = graph("-w-", (0, "begin", 1), (1, "end", 2))
    assert lasts(chain)
    assert lasts(chain, "another")
    assert not lasts(chain, "end")


def test_a_dead_end_lasts_whatever_is_fair():
    assert lasts(graph("-ww", (0, "begin", 1), (1, "end", 2)), "end", "begin")


def test_a_loop_that_goes_by_the_way_out_for_ever_is_not_fair_to_it():
    loop = graph("-ww-", (0, "begin", 1), (1, "go", 2), (2, "back", 1), (1, "end", 3), (2, "end", 3))
    assert lasts(loop, "go", "back")
    assert not lasts(loop, "end")


def test_a_way_out_that_closes_again_and_again_need_never_be_taken():
    loop = graph("-ww-", (0, "begin", 1), (1, "go", 2), (2, "back", 1), (1, "end", 3))
    assert lasts(loop, "end", "go", "back")


def test_a_loop_that_takes_the_fair_action_within_is_fair():
    assert lasts(graph("-ww", (0, "begin", 1), (1, "end", 2), (2, "end", 1)), "end")


def test_a_step_that_changes_nothing_is_no_step():
    assert lasts(graph("-w", (0, "begin", 1), (1, "end", 1)), "end")


def test_what_is_fair_to_one_argument_is_not_to_another():
    chain = graph("-w-", (0, "begin", 1), (1, "end", 2))
    other = Fair(frozenset({"end"}), (2,))
    assert lasting(chain, lambda node: node.blocked[0], [other]) == {1}


def test_components_are_those_of_the_part_only():
    edges = [[1], [2], [0, 3], [4], [3], []]
    assert sorted(map(sorted, components(range(6), edges))) == [[0, 1, 2], [3, 4], [5]]
    assert sorted(map(sorted, components([0, 1], [[1], [2]]))) == [[0], [1]]


BOUNDS = Bounds(1, 1, 1, 1, 1, frozenset({"deadline"}))


def test_a_property_that_fails_tells_the_way_there():
    found = graph("-w-", (0, "begin", 1), (1, "Deadline", 2))
    [broken] = examine(found, Question(BOUNDS, "Safe", ("EverySendEnds",)))
    assert (broken.name, broken.path, broken.lasting) == ("EverySendEnds", (("begin", 1),), 1)
    assert examine(found, Question(BOUNDS, "ByTheClock", ("EverySendEnds",))) == []


def test_a_deadlock_is_a_node_that_no_edge_leaves():
    found = graph("--", (0, "begin", 1))
    [broken] = examine(found, Question(BOUNDS, "Safe", (), deadlock=True))
    assert (broken.name, broken.path) == ("deadlock", (("begin", 1),))
    assert examine(graph("--", (0, "begin", 1), (1, "rest", 1)), Question(BOUNDS, "Safe", (), deadlock=True)) == []


def test_a_clock_without_deadlines_is_refused():
    with pytest.raises(ConfigurationError, match="no behaviour is fair"):
        examine(graph("-"), Question(Bounds(1, 1, 1, 1, 1, frozenset()), "ByTheClock", ("EverySendEnds",)))


@pytest.mark.parametrize(("specification", "name"), [("Safe", "NoSuchProperty"), ("ByMagic", "EverySendEnds")])
def test_what_has_no_second_reading_is_refused(specification, name):
    with pytest.raises(ConfigurationError, match=r"NoSuchProperty|ByMagic"):
        examine(graph("-"), Question(BOUNDS, specification, (name,)))


def test_depth_and_path_are_those_of_the_shortest_way():
    found = graph("----", (0, "a", 1), (1, "b", 2), (2, "c", 3), (0, "d", 2))
    assert found.depth == 3
    assert found.path(3) == [("d", 1), ("c", 1)]
    assert list(found.stuck) == [3]
