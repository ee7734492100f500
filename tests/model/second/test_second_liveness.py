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


def may_wait_forever(graph: Graph, *fair: str) -> bool:
    conditions = [Fair(frozenset({name}), (1,)) for name in fair]
    return lasting(graph, lambda node: node.blocked[0], conditions) is not None


def test_stopping_is_fair_only_where_no_fair_action_is_enabled():
    chain = graph("-w-", (0, "begin", 1), (1, "end", 2))
    assert may_wait_forever(chain)
    assert may_wait_forever(chain, "another")
    assert not may_wait_forever(chain, "end")


def test_a_caller_may_wait_forever_in_a_dead_end_whatever_is_fair():
    assert may_wait_forever(graph("-ww", (0, "begin", 1), (1, "end", 2)), "end", "begin")


def test_a_loop_in_which_an_action_is_always_enabled_is_not_fair_to_that_action():
    loop = graph("-ww-", (0, "begin", 1), (1, "go", 2), (2, "back", 1), (1, "end", 3), (2, "end", 3))
    assert may_wait_forever(loop, "go", "back")
    assert not may_wait_forever(loop, "end")


def test_an_action_that_is_repeatedly_disabled_need_never_be_taken():
    loop = graph("-ww-", (0, "begin", 1), (1, "go", 2), (2, "back", 1), (1, "end", 3))
    assert may_wait_forever(loop, "end", "go", "back")


def test_a_loop_that_takes_the_fair_action_is_fair():
    assert may_wait_forever(graph("-ww", (0, "begin", 1), (1, "end", 2), (2, "end", 1)), "end")


def test_a_self_loop_does_not_count_as_an_enabled_action():
    assert may_wait_forever(graph("-w", (0, "begin", 1), (1, "end", 1)), "end")


def test_fairness_to_an_action_with_one_argument_does_not_cover_another_argument():
    chain = graph("-w-", (0, "begin", 1), (1, "end", 2))
    other = Fair(frozenset({"end"}), (2,))
    assert lasting(chain, lambda node: node.blocked[0], [other]) == {1}


def test_components_are_computed_within_the_given_nodes_only():
    edges = [[1], [2], [0, 3], [4], [3], []]
    assert sorted(map(sorted, components(range(6), edges))) == [[0, 1, 2], [3, 4], [5]]
    assert sorted(map(sorted, components([0, 1], [[1], [2]]))) == [[0], [1]]


BOUNDS = Bounds(1, 1, 1, 1, 1, frozenset({"deadline"}))


def test_a_violated_property_has_the_path_to_its_violation():
    found = graph("-w-", (0, "begin", 1), (1, "Deadline", 2))
    [broken] = examine(found, Question(BOUNDS, "Safe", ("EverySendEnds",)))
    assert (broken.name, broken.path, broken.lasting) == ("EverySendEnds", (("begin", 1),), 1)
    assert examine(found, Question(BOUNDS, "ByTheClock", ("EverySendEnds",))) == []


def test_a_node_without_outgoing_edges_is_a_deadlock():
    found = graph("--", (0, "begin", 1))
    [broken] = examine(found, Question(BOUNDS, "Safe", (), deadlock=True))
    assert (broken.name, broken.path) == ("deadlock", (("begin", 1),))
    assert examine(graph("--", (0, "begin", 1), (1, "rest", 1)), Question(BOUNDS, "Safe", (), deadlock=True)) == []


def test_by_the_clock_is_refused_if_no_deadline_can_pass():
    with pytest.raises(ConfigurationError, match="no behaviour is fair"):
        examine(graph("-"), Question(Bounds(1, 1, 1, 1, 1, frozenset()), "ByTheClock", ("EverySendEnds",)))


@pytest.mark.parametrize(("specification", "name"), [("Safe", "NoSuchProperty"), ("ByMagic", "EverySendEnds")])
def test_a_property_or_specification_unknown_to_the_second_checker_is_refused(specification, name):
    with pytest.raises(ConfigurationError, match=r"NoSuchProperty|ByMagic"):
        examine(graph("-"), Question(BOUNDS, specification, (name,)))


def test_depth_and_path_follow_the_shortest_paths():
    found = graph("----", (0, "a", 1), (1, "b", 2), (2, "c", 3), (0, "d", 2))
    assert found.depth == 3
    assert found.path(3) == [("d", 1), ("c", 1)]
    assert list(found.stuck) == [3]
