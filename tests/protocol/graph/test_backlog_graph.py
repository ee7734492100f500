"""The backlog of the shipped sender has the graph of `tla/Backlog.tla`: the same states, the same labelled steps.

A real driver takes every path, over a link that keeps what it is given. So what TLC checks of the model holds for the
code too, within the same bounds: at most two updates are unanswered, an update that was overtaken is never sent, and
nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import pytest
import torch
from graph_support import MODEL
from modelcheck.second.values import parse
from skipping import require_tlc

from weightsync.engine.packer import Packed
from weightsync.engine.sender_driver import SenderDriver
from weightsync.errors import StateError
from weightsync.model import Manifest
from weightsync.model.output import Counts
from weightsync.model.process import Ending, Job, Size, TlcRun
from weightsync.options import Verify
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Message, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer, Storage
from weightsync.weights.reading import layout_of, read_weights

#: Each configuration, and the delivery of its link.
LINKS = {"BacklogOrdered": Delivery.ORDERED, "BacklogReordered": Delivery.REORDERED}
VERSIONS = range(1, 6)
ACTIONS = ("Dispatch", "Abandon", "Answer", "Hear")
LAYOUT = layout_of(read_weights({"weight": torch.zeros(1, dtype=torch.uint8)}))

names = pytest.mark.parametrize("name", LINKS)


class State(NamedTuple):
    """A node: the values of the model's variables."""

    newest: int
    owed: int
    unanswered: frozenset[int]
    waiting: frozenset[int]
    messages: frozenset[int]
    answers: frozenset[int]


Step = tuple[str, int]
Graph = set[tuple[State, Step, State]]


@dataclass
class KeepingLink:
    """A link that keeps every update that is sent, and receives what the test lets arrive."""

    delivery: Delivery
    peer: str = "worker"
    messages: set[int] = field(default_factory=set)
    arrived: list[Received] = field(default_factory=list)

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        if isinstance(message, Update):
            self.messages.add(message.version)

    def flush(self) -> bool:
        return True

    def receive(self) -> list[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def watch(self, pid: int, started: int) -> None:
        pass

    def close(self) -> None:
        pass


class Trainer:
    """A driver with two workers. The second only takes the versions that are not sent to the first."""

    def __init__(self, delivery: Delivery, path: tuple[Step, ...]) -> None:
        self.driver = SenderDriver("policy")
        self.link = KeepingLink(delivery)
        self.answers: set[int] = set()
        self.driver.join(1, self.link)  # type: ignore[arg-type]
        self.driver.join(2, KeepingLink(delivery))  # type: ignore[arg-type]
        self.driver.take(sending.Connect(1))
        for step in path:
            self.take(step)

    def take(self, step: Step) -> None:
        action, version = step
        {"Dispatch": self._dispatch, "Abandon": self._abandon, "Answer": self._answer, "Hear": self._hear}[action](
            version
        )

    def _dispatch(self, version: int) -> None:
        if self._owed() == 0 and self.driver.data.outstanding is not None:
            self.driver.take(sending.Wait())
        while self.driver.data.version + 1 < version:
            self._send((2,))
            self.driver.take(sending.Abandon())
        self._send((1,))

    def _send(self, targets: tuple[int, ...]) -> None:
        packed = Packed(LAYOUT, Buffer(LAYOUT.nbytes, Storage.HEAP), b"", b"", verify=Verify.LAYOUT)
        self.driver.dispatch(sending.SendAsync(targets), packed)

    def _abandon(self, version: int) -> None:
        assert self._owed() == version
        self.driver.take(sending.Abandon())

    def _answer(self, version: int) -> None:
        self.link.messages.remove(version)
        self.answers.add(version)

    def _hear(self, version: int) -> None:
        self.answers.remove(version)
        answer = Ack(model_id="policy", incarnation=self.driver.data.incarnation, version=version, digest=b"")
        self.link.arrived.append(Received(answer))
        self.driver.pump()

    def _owed(self) -> int:
        out = self.driver.data.outstanding
        return out.version if out is not None and 1 in out.owed else 0

    def state(self) -> State:
        entry = self.driver.data.workers[1]
        backlog = self.driver._links[entry.link].backlog
        return State(
            entry.due,
            self._owed(),
            frozenset(backlog._unanswered),
            frozenset({backlog._waiting} - {0}),
            frozenset(self.link.messages),
            frozenset(self.answers),
        )


def possible_steps(state: State, delivery: Delivery) -> Iterator[Step]:
    """The steps to try in a state: every call, and all that may happen on the link. The driver may refuse a call."""
    most = None if delivery.reorders else 1
    yield from (("Dispatch", version) for version in VERSIONS if version > state.newest)
    yield from (("Abandon", version) for version in VERSIONS if version == state.owed)
    yield from (("Answer", version) for version in sorted(state.messages)[:most])
    yield from (("Hear", version) for version in sorted(state.answers)[:most])


def searched(delivery: Delivery) -> tuple[Graph, int]:
    """Every state and step that the driver reaches, and the depth of the search as TLC counts it."""
    start = Trainer(delivery, ()).state()
    paths: dict[State, tuple[Step, ...]] = {start: ()}
    todo, graph = deque([start]), set[tuple[State, Step, State]]()
    while todo:
        state = todo.popleft()
        for step in possible_steps(state, delivery):
            trainer = Trainer(delivery, paths[state])
            try:
                trainer.take(step)
            except StateError:
                continue
            after = trainer.state()
            graph.add((state, step, after))
            if after not in paths:
                paths[after] = (*paths[state], step)
                todo.append(after)
    return graph, 1 + max(map(len, paths.values()))


@names
def test_the_graph_of_the_shipped_backlog_has_the_pinned_counts(name):
    graph, depth = searched(LINKS[name])
    [configuration] = Manifest.read(MODEL).select([name])
    states = {state for before, _, after in graph for state in (before, after)}

    assert Counts(len(graph) + 1, len(states), depth) == configuration.pinned


@pytest.mark.tlc
@names
def test_the_shipped_backlog_and_the_model_have_the_same_graph(name, tmp_path):
    theirs: Graph = set()

    def read(line: str) -> None:
        before, action, version, after = cast("tuple[object, ...]", parse(line.strip()[1:-1].replace('\\"', '"')))
        theirs.add((State(*before), (action, version), State(*after)))

    outcome = TlcRun(require_tlc("THE GRAPH"), _printing_job(name, tmp_path)).run(lambda _: None, read)

    assert (outcome.ending, outcome.exit_code) == (Ending.EXITED, 0)
    assert searched(LINKS[name])[0] == theirs


def _printing_job(name, folder):
    """A job in which TLC prints each step of the model."""
    (folder / "Backlog.tla").write_text((MODEL / "Backlog.tla").read_text(encoding="utf-8"), encoding="utf-8")
    taken = [f'  /\\ {action}(v) => PrintT(ToString(<<vars, "{action}", v, vars\'>>))' for action in ACTIONS]
    text = ["---- MODULE Said ----", "EXTENDS Backlog, TLC", "Said == \\A v \\in Versions :", *taken, "====", ""]
    (folder / "Said.tla").write_text("\n".join(text), encoding="utf-8")
    [configuration] = Manifest.read(MODEL).select([name])
    config = replace(configuration.config, action_constraints=("Said",), invariants=(), properties=())
    return Job(folder, "Said", config.text, timeout=120, size=Size.SMALL)
