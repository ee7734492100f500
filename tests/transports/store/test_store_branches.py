"""The trainer's side of a fan-out, without a network: the messages to each worker, and the choice of parents."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import xxhash

from weightsync.protocol.codec import encode
from weightsync.protocol.messages import Ack, Update
from weightsync.transports.buffers import Buffer
from weightsync.transports.sealing import digest_of
from weightsync.transports.store import fanout
from weightsync.transports.store.fanout import Branch, Fanout
from weightsync.transports.store.mailbox import INLINE_NBYTES, QueuedMessage
from weightsync.transports.store.routes import Ask, FetchFailure, ParentAddress, Routed, Supply, decode_route
from weightsync.transports.store.tree import Node, tree_of

NBYTES = INLINE_NBYTES + 8
HOST = b"one host"


class Workers:
    """Branches of one fan-out, with the messages posted to each, and the workers whose payloads were released."""

    def __init__(self, count: int, width: int = 1, keyed: bool = False) -> None:
        self.tree = Fanout(width)
        self.posted: list[list[QueuedMessage]] = [[] for _ in range(count)]
        self.done: list[int] = []
        self.branches = [
            Branch(self.tree, self.posted[index].append, f"worker {index}", keyed) for index in range(count)
        ]
        for index, branch in enumerate(self.branches):
            branch.listens(ParentAddress(HOST, f"10.0.0.1:{index + 1}"))
            self.posted[index].clear()  # drop the request to listen

    def send(self, index: int, buffer: Buffer, version: int = 1, nbytes: int = NBYTES) -> None:
        """Send a version to one worker. Its message's ``done`` records the worker."""
        update = Update(model_id="policy", incarnation=1, version=version, layout_digest=bytes(32), nbytes=nbytes)
        message = QueuedMessage(
            encode(update), buffer.view[:nbytes], hint=("torchrl", "update"), done=lambda: self.done.append(index)
        )
        self.branches[index].send(update, buffer, message)

    def dispatch(self, buffer: Buffer, version: int = 1) -> None:
        """Send a version to all workers, as one dispatch."""
        self.tree.begin()
        for index in range(len(self.branches)):
            self.send(index, buffer, version)
        self.tree.end()

    def routes(self) -> list[Routed | None]:
        """The route of the last payload to each worker; None for a payload that travels only with its message."""
        heads = [posted[-1].head for posted in self.posted]
        return [None if head is None else routed(head()) for head in heads]


def routed(text: bytes) -> Routed:
    found = decode_route(memoryview(text))
    assert isinstance(found, Routed)
    return found


def ack(version: int) -> Ack:
    return Ack(model_id="policy", incarnation=1, version=version)


def payload(fill: int = 1) -> Buffer:
    buffer = Buffer(NBYTES)
    buffer.view[:] = bytes([fill]) * NBYTES
    return buffer


@pytest.mark.parametrize("keyed", [False, True])
def test_workers_in_a_chain_are_told_their_parent_their_children_and_the_digest(keyed: bool) -> None:
    workers, buffer = Workers(3, keyed=keyed), payload()
    workers.dispatch(buffer)
    first, second, third = workers.routes()

    assert first is not None
    assert second is not None
    assert third is not None
    digest = digest_of(buffer.view) if keyed else xxhash.xxh3_128_digest(buffer.view)
    assert (first.parent, first.children, first.digest) == ("", 1, b"")
    assert (second.parent, second.children, second.digest) == ("10.0.0.1:1", 1, digest)
    assert (third.parent, third.children, third.digest) == ("10.0.0.1:2", 0, digest)
    assert first.token == second.token == third.token
    assert [posted[-1].payload is None for posted in workers.posted] == [False, True, True]


def test_each_of_two_payloads_has_a_tree_of_its_own() -> None:
    workers = Workers(4)
    workers.tree.begin()
    ones, twos = payload(1), payload(2)
    for index in range(4):
        workers.send(index, (ones, twos)[index % 2])
    workers.tree.end()
    routes = workers.routes()

    assert ["", "", "10.0.0.1:1", "10.0.0.1:2"] == [route.parent for route in routes if route is not None]
    tokens = [route.token for route in routes if route is not None]
    assert tokens[0] == tokens[2] != tokens[1] == tokens[3]


def test_inline_payloads_and_payloads_outside_a_dispatch_are_sent_at_once() -> None:
    workers, buffer = Workers(2), payload()
    workers.send(0, buffer)
    assert [len(posted) for posted in workers.posted] == [1, 0]
    workers.tree.begin()
    workers.send(0, buffer, nbytes=INLINE_NBYTES)
    workers.send(1, buffer, nbytes=INLINE_NBYTES + 1)
    assert [len(posted) for posted in workers.posted] == [2, 0]
    workers.tree.end()
    assert [len(posted) for posted in workers.posted] == [2, 1]
    assert workers.routes() == [None, None]  # trees of a single worker


def test_a_payload_is_held_until_a_worker_that_may_still_ask_for_it_has_answered() -> None:
    workers, buffer = Workers(2), payload()
    workers.dispatch(buffer, 1)
    workers.dispatch(buffer, 2)
    assert all(posted.done() is None for posted in workers.posted[1])  # the message was without the payload
    assert workers.done == []

    workers.branches[1].answered(ack(1))
    assert workers.done == [1]
    workers.branches[1].answered(ack(2))
    assert workers.done == [1, 1]


def test_an_answer_and_the_end_of_a_link_also_release_payloads_of_older_versions() -> None:
    for settles in (lambda branch: branch.answered(ack(2)), Branch.end):
        workers, buffer = Workers(2), payload()
        workers.dispatch(buffer, 1)
        workers.dispatch(buffer, 2)
        settles(workers.branches[1])
        assert workers.done == [1, 1]


def test_a_worker_that_asks_gets_the_payload_from_the_trainer_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "weightsync")
    workers, buffer = Workers(2), payload()
    for version in (1, 2):
        workers.dispatch(buffer, version)
        workers.branches[1].asked(Ask(version, FetchFailure.SILENT))
        supplied = workers.posted[1][-1]
        workers.branches[0].answered(ack(version))

        assert decode_route(memoryview(supplied.frame)) == Supply(version)
        assert (supplied.payload, supplied.hint, supplied.head) == (buffer.view[:NBYTES], None, None)
        with pytest.raises(Exception, match=f"worker 1 asks for a payload of version {version} that it is not owed"):
            workers.branches[1].asked(Ask(version, FetchFailure.SILENT))
    assert workers.done == []  # left to the message's writer
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "fan-out: worker 1 did not get version 1 from worker 0, which sent nothing for a while" in warnings[0]
    assert "version 2: worker 1 did not get the payload from worker 0, which sent nothing for a while" in caplog.text


def test_a_link_that_has_ended_is_sent_nothing_and_its_payload_is_released() -> None:
    workers, buffer = Workers(2), payload()
    workers.tree.begin()
    for index in range(2):
        workers.send(index, buffer)
    for branch in workers.branches:
        branch.end()
    workers.tree.end()

    assert workers.posted == [[], []]
    assert sorted(workers.done) == [0, 1]
    workers.branches[1].asked(Ask(1, FetchFailure.SILENT))  # late, but no violation of the protocol


@pytest.mark.parametrize("why", [FetchFailure.ENDED, FetchFailure.SILENT, FetchFailure.WRONG])
def test_a_parent_that_failed_a_child_is_a_leaf_until_it_answers(why: FetchFailure) -> None:
    workers = Workers(2)
    workers.dispatch(payload())
    workers.branches[1].asked(Ask(1, why))
    assert [branch.node for branch in workers.branches] == [Node(HOST, passes_on=False), Node(HOST)]

    workers.branches[0].answered(ack(0))  # an ack that names no version
    assert workers.branches[0].node == Node(HOST, passes_on=False)
    workers.branches[0].answered(ack(1))
    assert workers.branches[0].node == Node(HOST)


def test_a_parent_that_no_child_has_ever_reached_is_not_used_as_a_parent_again() -> None:
    workers = Workers(2)
    workers.dispatch(payload())
    workers.branches[1].asked(Ask(1, FetchFailure.UNREACHABLE))
    assert [branch.node for branch in workers.branches] == [None, Node(HOST)]


def test_a_parent_reported_unreachable_during_a_dispatch_gets_no_children_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, buffer = Workers(3), payload()
    workers.dispatch(payload(), 1)

    def chain(nodes: Sequence[Node], width: int) -> list[int | None]:
        made = tree_of(nodes, width)
        workers.branches[1].asked(Ask(1, FetchFailure.UNREACHABLE))  # as the thread that reads the link would do
        return made

    monkeypatch.setattr(fanout, "tree_of", chain)
    workers.dispatch(buffer, 2)
    second, third = workers.routes()[1:]
    assert second is not None
    assert third is not None
    assert (second.parent, second.children, second.digest) == ("", 1, b"")
    assert third.parent == "10.0.0.1:2"
    assert workers.posted[1][-1].payload == buffer.view


def test_a_worker_that_can_no_longer_reach_its_parent_gets_payloads_from_the_trainer() -> None:
    workers = Workers(2)
    workers.dispatch(payload(), 1)
    workers.branches[1].answered(ack(1))  # the payload came from worker 0, which is therefore reachable
    workers.dispatch(payload(), 2)
    workers.branches[1].asked(Ask(2, FetchFailure.UNREACHABLE))
    assert [branch.node for branch in workers.branches] == [Node(HOST), None]


@pytest.mark.parametrize(
    ("address", "at_loopback"),
    [
        ("127.0.0.1:5", True),
        ("::1:5", True),
        ("10.0.0.1:5", False),
        ("fe80::1%eth0:5", False),
        ("a-name:5", False),
    ],
)
def test_a_worker_that_listens_at_loopback_is_reachable_only_from_its_own_host(address: str, at_loopback: bool) -> None:
    branch = Branch(Fanout(1), lambda message: None, "worker 0", False)
    assert branch.node is None  # until the worker has announced its address
    branch.listens(ParentAddress(HOST, address))
    assert branch.node == Node(HOST, at_loopback)


def test_a_branch_in_a_forked_child_has_no_payloads_to_release() -> None:
    workers = Workers(2)
    workers.dispatch(payload())
    workers.branches[1].forget()
    workers.branches[1].answered(ack(1))
    assert workers.done == []
