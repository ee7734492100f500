"""The shape of a fan-out's tree, and the messages between its ends."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import ProtocolError
from weightsync.transports.store.routes import (
    Ask,
    FetchFailure,
    Listen,
    ParentAddress,
    Route,
    Routed,
    Supply,
    decode_route,
)
from weightsync.transports.store.tree import Node, tree_of

NODES = st.builds(Node, st.sampled_from([b"a", b"b", b"c"]), st.just(False), st.booleans())
#: The trainer's host, whose workers listen at the loopback.
HERE = st.builds(Node, st.just(b"here"), st.booleans(), st.booleans())
FLEETS = st.lists(NODES | HERE, max_size=60)


def depth(parents: list[int | None], index: int) -> int:
    """The number of workers that a payload passes through before it reaches this one."""
    parent = parents[index]
    return 0 if parent is None else 1 + depth(parents, parent)


@given(FLEETS, st.integers(1, 9))
def test_no_worker_has_more_children_than_the_width_or_is_its_own_ancestor(nodes: list[Node], width: int) -> None:
    parents = tree_of(nodes, width)
    children = Counter(parent for parent in parents if parent is not None)

    assert len(parents) == len(nodes)
    assert all(count <= width for count in children.values())
    assert all(nodes[parent].passes_on for parent in children)
    assert all(depth(parents, index) < len(nodes) for index in range(len(nodes)))


@given(FLEETS, st.integers(1, 9))
def test_every_worker_can_reach_its_parent(nodes: list[Node], width: int) -> None:
    for index, parent in enumerate(tree_of(nodes, width)):
        assert parent is None or nodes[index].reaches(nodes[parent])


@given(st.lists(NODES, max_size=60), st.integers(1, 9))
def test_the_trainer_exceeds_the_width_only_if_no_worker_has_room_for_a_child(nodes: list[Node], width: int) -> None:
    parents = tree_of(nodes, width)
    able = sum(node.passes_on for node in nodes)

    assert parents.count(None) == min(len(nodes), max(width, len(nodes) - able * width))


@pytest.mark.parametrize(("workers", "width", "deepest"), [(1, 2, 0), (8, 2, 2), (1000, 8, 3), (1000, 2, 8), (5, 1, 4)])
def test_the_tree_is_as_shallow_as_it_can_be(workers: int, width: int, deepest: int) -> None:
    parents = tree_of([Node(b"one")] * workers, width)
    assert max(depth(parents, index) for index in range(workers)) == deepest


def test_the_parent_of_a_leaf_is_the_first_worker_with_room_or_else_the_trainer() -> None:
    leaf = Node(b"one", passes_on=False)
    assert tree_of([Node(b"one"), leaf, leaf], 1) == [None, 0, None]
    assert tree_of([Node(b"one"), leaf, leaf, leaf, leaf], 2) == [None, None, 0, 0, None]


def test_most_workers_have_a_parent_on_their_own_host() -> None:
    nodes = [Node(bytes([index % 8])) for index in range(64)]  # eight hosts, in rotation
    parents = tree_of(nodes, 2)
    across = sum(parent is None or nodes[parent].host != nodes[index].host for index, parent in enumerate(parents))
    assert across <= 16


ROUTES = [
    Listen(),
    ParentAddress(b"h" * 16, "127.0.0.1:4711"),
    ParentAddress(b"", "::1:4711"),
    Routed(b"t" * 16, 3, b"", "", b"frame"),
    Routed(b"t" * 16, 0, b"d" * 16, "10.0.0.1:1", b"frame"),
    Routed(b"t" * 16, 65535, b"d" * 32, "worker.example:1", b""),
    Ask(2**64 - 1, FetchFailure.SILENT),
    Supply(7),
]


@pytest.mark.parametrize("route", ROUTES, ids=repr)
def test_fan_out_messages_survive_encoding_and_decoding(route: Route) -> None:
    assert decode_route(memoryview(route.encoded())) == route


@pytest.mark.parametrize("text", [b"", b"WSY", b"WSYN\x01", b"WSYK\x01"])
def test_other_texts_are_not_read_as_fan_out_messages(text: bytes) -> None:
    assert decode_route(memoryview(text)) is None


@pytest.mark.parametrize(
    "text",
    [
        b"WSYF",
        b"WSYF\x00",
        b"WSYF\x09",
        b"WSYF\x02",
        b"WSYF\x02\x04abcdno address",
        b"WSYF\x02\x00\xff\xfe:1",
        b"WSYF\x03short",
        Routed(b"t" * 16, 0, b"d" * 16, "", b"").encoded(),
        Routed(b"t" * 16, 0, b"", "host:1", b"").encoded(),
        Routed(b"t" * 16, 0, b"d" * 5, "host:1", b"").encoded(),
        Ask(1, FetchFailure.ENDED).encoded()[:-1] + b"\x00",
        Ask(1, FetchFailure.ENDED).encoded() + b"\x00",
        Supply(1).encoded()[:-1],
    ],
    ids=repr,
)
def test_malformed_fan_out_messages_raise_protocol_error(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="fan-out is malformed"):
        decode_route(memoryview(text))


@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_or_raise_protocol_error(rest: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert decode_route(memoryview(b"WSYF" + rest)) is not None
