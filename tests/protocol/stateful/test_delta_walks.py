"""Random walks of the shipped sender and receiver that take the actions of tla/Delta.tla and check its properties.

Weights are real: those that were sent and those that the worker applied are compared bit by bit. The links are pipes,
so messages keep their order.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from fleet import filled
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, OutcomeKind, State
from weightsync.protocol.messages import BaseRef, NoBase, Update
from weightsync.transports.pipe.link import PipeLink
from weightsync.weights.tree_digest import digest

#: The number of actions in a walk.
STEPS: Final = 60
_KINDS: Final = frozenset({OutcomeKind.APPLIED, OutcomeKind.REFUSED})


def _model(fill: float = 0.0) -> nn.Module:
    return filled(nn.Linear(64, 64), fill)


def _bits(model: nn.Module) -> bytes:
    return b"".join(bytes(each.detach().view(torch.uint8).numpy().data) for each in model.parameters())


class Walk:
    """A trainer and a worker, with the history that the properties of tla/Delta.tla need."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.open = contextlib.ExitStack()
        self.source = _model(1.0)
        self.trainer = self.open.enter_context(MultiProcessWeightSyncScheme(delta=True))
        self.sent: dict[int, bytes] = {}
        #: Of the current link: the versions sent as deltas, those whose base was refused, and those sent whole.
        self.deltas: set[int] = set()
        self.no_bases: set[int] = set()
        self.wholes: list[int] = []
        self.lost = False
        self.expected_refusals: set[int] = set()
        #: The situations that occurred in this walk.
        self.seen: set[str] = set()
        #: The properties that were violated, in words.
        self.violations: list[str] = []
        ours = self._worker()
        self.trainer.init_on_sender("policy", pipes=[ours], model=self.source)
        self.sender = self.trainer.get_sender()

    def _worker(self) -> Any:
        """Start a new worker, and return the trainer's end of its pipe."""
        ours, theirs = (self.open.enter_context(end) for end in multiprocessing.Pipe())
        self.model = _model()
        scheme = self.open.enter_context(MultiProcessWeightSyncScheme())
        scheme.init_on_worker("policy", pipe=theirs, model=self.model)
        self.scheme, self.receiver = scheme, scheme.get_receiver()
        self.served = 0
        self.deltas, self.no_bases, self.wholes = set(), set(), []
        return ours

    def watch(self, message: Any) -> None:
        """Check a message that is given to a link: AckedBase, OnlyTheNewest, RefusedOnlyIfLost, ResentOnce.

        Violations are collected in `violations`, since a link swallows errors.
        """
        match message:
            case NoBase():
                self.no_bases.add(message.version)
                self._require(self.lost, f"the base of {message.version} is refused, though none was lost")
            case Update(base=BaseRef(version=base)) if base:
                self.deltas.add(message.version)
                self._require(self.sender.workers[0].served == base, f"{base} is no base: it was not acked")
            case Update():
                self.wholes.append(message.version)
                self._require(message.version == self.sender.version, f"{message.version} comes behind a newer version")
                self._require(self.wholes.count(message.version) == 1, f"{message.version} is sent whole twice")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)

    # ------------------------------------------------------------------------------------------- actions

    def send(self) -> None:
        if self.sender.state is not State.READY:
            return
        with torch.no_grad():
            share = self.chance.choice([0.0, 0.001, 0.05, 1.0])
            self.source.weight += (torch.rand_like(self.source.weight) < share).float()
        version = self.sender.send_async().version
        assert version is not None
        self.sent[version] = _bits(self.source)

    def abandon(self) -> None:
        if self.sender.state is State.PENDING_ASYNC:
            self.sender.abandon()

    def hear(self) -> None:
        """Collect the report of an update that the worker has answered.

        Checks NobodyIsRefusedForADelta and AckedMeansServed.
        """
        report = self.sender.poll()
        if report is None or report[0].kind not in _KINDS:
            return
        report = self.sender.wait_async(on_failure="report")
        assert report.version is not None
        if report[0].kind is OutcomeKind.REFUSED:
            assert report.version in self.expected_refusals
        else:
            assert self.served >= report.version
            self.seen.add("resent" if report.version in self.no_bases else "applied")

    def receive(self) -> None:
        held = self.receiver.driver.held
        if self.receiver.receive(0):
            version = self.receiver.version
            assert version is not None
            assert version >= self.served
            assert _bits(self.model) == self.sent[version]
            if version in self.deltas and version not in self.no_bases:
                self.seen.add("delta")
            self.served = version
            assert held._update is not None
            assert held._update.version == version
            assert digest(held._payload, held._update.extras) == held._update.digest

    def lose(self) -> None:
        self.lost = True
        self.receiver.driver.held.drop()

    def damage(self) -> None:
        held = self.receiver.driver.held
        if held._update is not None:
            held._payload[self.chance.randrange(len(held._payload))] ^= 0xFF
            self.expected_refusals |= set(range(1, 1000))
            self.seen.add("damaged")

    def refuse(self) -> None:
        if self.receiver.take_update(0.0) is not None:
            self.expected_refusals.add(self.sender.version)
            self.receiver.nack(ValueError("not this one"))

    def relink(self) -> None:
        self.scheme.close()
        self.sender.poll()
        if 0 in self.sender.workers:
            self.sender.remove_worker(0)
        if self.sender.state is State.PENDING_ASYNC:
            self.sender.wait_async(on_failure="report")
        self.sender.add_worker(0, self._worker())
        self.receive()
        self.sender.poll()

    def settle(self) -> None:
        """Check EverySendEnds: if both ends only read, every answer that is owed arrives."""
        for _ in range(20):
            self.receive()
            self.hear()
        assert self.sender.state is State.READY
        assert self.violations == []


@pytest.fixture
def walk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], contextlib.AbstractContextManager[Walk]]:
    """A function that begins a walk, which watches every message that is given to a pipe link."""
    walks: list[Walk] = []
    send = PipeLink.send

    def watched(link: PipeLink, message: Any, payload: Any = None) -> None:
        for latest in walks[-1:]:
            latest.watch(message)
        send(link, message, payload)

    @contextlib.contextmanager
    def begin(seed: int) -> Iterator[Walk]:
        walks.append(Walk(seed))
        with walks[-1].open:
            yield walks[-1]

    monkeypatch.setattr(PipeLink, "send", watched)
    return begin


OFTEN: Final = ["send", "hear", "receive"] * 4
RARELY: Final = ["abandon", "lose", "refuse", "relink"]


@pytest.mark.parametrize(
    ("features", "situations"),
    [
        ([], {"delta"}),
        (["lose"], {"delta", "resent"}),
        (["abandon", "lose"], {"delta", "resent"}),
        (RARELY, {"delta"}),
        (["damage"], {"delta", "damaged"}),
    ],
)
def test_random_walks_with_deltas_satisfy_the_properties_of_delta_tla(
    features: list[str], situations: set[str], walk: Callable[[int], contextlib.AbstractContextManager[Walk]]
) -> None:
    seen = set[str]()
    for seed in range(3):
        with walk(seed) as taken:
            for _ in range(STEPS):
                getattr(taken, taken.chance.choice(OFTEN + features))()
            taken.settle()
            seen |= taken.seen

    assert situations <= seen
