"""Random walks of an attacker through the code: after each step, ends believe what `tla/Challenge.tla` permits."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from weightsync import AuthenticationError
from weightsync.keys import SharedKey
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack, Message
from weightsync.transports.calls.gates import CallAuthenticator, HeldCall, UntrustedCall
from weightsync.transports.calls.server import Frames, Parcel
from weightsync.transports.sealing import Challenged, EnvelopeKind, Identity, KeyedSeal
from weightsync.transports.store.seals import SenderGuard, WorkerGuard

KEY = SharedKey("a secret of both")
SENDERS = 2
STEPS = 60


@dataclass(frozen=True)
class Envelope:
    """An envelope of the model, and its bytes in the code."""

    kind: EnvelopeKind
    sender: int
    #: The worker's end whose nonce the MAC covers; 0 for none.
    worker: int
    number: int
    content: bytes
    text: bytes = field(compare=False)


def identity(sender: int, way: str) -> Identity:
    return Identity(way, "policy", "", f"{sender}" * 32)


def believes(open_it: Callable[[], object]) -> bool:
    try:
        open_it()
    except AuthenticationError:
        return False
    return True


# ----------------------------------------------------------------------------------------------- links over a store


class Row:
    """The ends of links over a store, and the model's variables under the same names. Ends count from 1."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wire: list[Envelope] = []
        self.senders = {s: SenderGuard(KEY, identity(s, "row"), "w") for s in range(1, SENDERS + 1)}
        self.workers: dict[int, WorkerGuard] = {}
        self.said: dict[int, list[bytes]] = {s: [] for s in self.senders}
        self.met = dict.fromkeys(self.senders, 0)
        self.heard: dict[int, list[bytes]] = {s: [] for s in self.senders}
        self.link: dict[int, int] = {}
        self.read: dict[int, list[bytes]] = {}
        self.proven: dict[int, bool] = {}
        self.answered: dict[int, int] = {}

    def say(self) -> None:
        s = self.random.choice([*self.senders])
        content = self.random.choice([b"", f"message {s} {len(self.said[s])}".encode()])
        kind = EnvelopeKind.PROVEN if self.met[s] else EnvelopeKind.EARLY
        if content or self.met[s]:
            text = self.senders[s].seal(content)
            self.wire.append(Envelope(kind, s, self.met[s], len(self.said[s]), content, text))
            self.said[s].append(content)

    def take(self) -> None:
        w, s = len(self.workers) + 1, self.random.choice([*self.senders])
        if w > 2 * SENDERS:
            return
        guard = self.workers[w] = WorkerGuard(KEY, identity(s, "row"))
        self.link[w], self.read[w], self.proven[w], self.answered[w] = s, [], False, 0
        [challenge] = guard.first()
        self.wire.append(Envelope(EnvelopeKind.CHALLENGE, s, w, 0, b"", challenge))

    def tell(self) -> None:
        for w in [w for w in self.workers if self.proven[w] and self.read[w]][-1:]:
            self.answered[w] += 1
            content = f"answer {w} {self.answered[w]}".encode()
            text = self.workers[w].seal(content)
            self.wire.append(Envelope(EnvelopeKind.ANSWER, self.link[w], w, self.answered[w], content, text))

    def deliver(self) -> None:
        envelope = self.random.choice(self.wire)
        if self.workers and self.random.random() < 0.6:
            self.down(envelope, self.random.choice([*self.workers]))
        else:
            self.up(envelope, self.random.choice([*self.senders]))

    def down(self, it: Envelope, w: int) -> None:
        sealed_for = {EnvelopeKind.EARLY: 0, EnvelopeKind.PROVEN: w}.get(it.kind)
        fits = (it.sender, it.worker, it.number) == (self.link[w], sealed_for, len(self.read[w]))
        # In the code a link fails on an envelope that it does not believe: use a copy, so that the walk can go on.
        guard = self.workers[w] if fits else copy.deepcopy(self.workers[w])
        assert believes(lambda: guard.open(memoryview(it.text))) is fits, (it, w)
        if fits:
            self.read[w].append(it.content)
            self.proven[w] |= it.kind is EnvelopeKind.PROVEN

    def up(self, it: Envelope, s: int) -> None:
        meets = it.kind is EnvelopeKind.CHALLENGE and it.sender == s and not self.met[s]
        answers = (it.kind, it.sender, it.number) == (EnvelopeKind.ANSWER, s, len(self.heard[s]) + 1)
        fits = meets or (answers and it.worker == self.met[s] != 0)
        guard = self.senders[s] if fits else copy.deepcopy(self.senders[s])
        assert believes(lambda: guard.open(memoryview(it.text))) is fits, (it, s)
        if meets:
            self.met[s] = it.worker
        elif fits:
            self.heard[s].append(it.content)

    def step(self) -> None:
        moves: list[Callable[[], None]] = [self.say, self.take, self.tell]
        self.random.choice([*moves, *[self.deliver] * 5 * bool(self.wire)])()
        for w, guard in self.workers.items():
            assert guard.admits is self.proven[w]
            if self.proven[w]:  # the invariant OnlyTheSender
                s = self.link[w]
                assert (self.met[s], self.read[w]) == (w, self.said[s][: len(self.read[w])])


@pytest.mark.parametrize("seeds", [range(40), range(40, 80)], ids=["these", "those"])
def test_store_links_accept_exactly_the_envelopes_that_the_model_accepts(seeds: range) -> None:
    believed = 0
    for seed in seeds:
        walk = Row(seed)
        for _ in range(STEPS):
            walk.step()
        believed += sum(map(len, walk.heard.values()))

    assert believed, "no walk came as far as an answer"


# ---------------------------------------------------------------------------------------------------------- calls


def ack(version: int) -> Ack:
    return Ack(model_id="policy", incarnation=1, version=version + 1)


class Calls:
    """The seals of senders, and an authenticator for each process of the worker."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.wire: list[Envelope] = []
        self.senders = {s: KeyedSeal(KEY, identity(s, "calls"), "w") for s in range(1, SENDERS + 1)}
        self.gates = [CallAuthenticator(KEY, "policy", "calls", str) for _ in range(2)]
        self.said = dict.fromkeys(self.senders, 0)
        self.met = dict.fromkeys(self.senders, 0)
        self.heard: dict[int, list[int]] = {s: [] for s in self.senders}
        #: The number of the worker's end for each gate and sender, from the first call that it keeps.
        self.ends: dict[tuple[int, int], int] = {}
        self.kept: dict[int, set[int]] = {}
        self.asked: dict[int, set[int]] = {}
        self.read: dict[int, list[int]] = {}
        self.proven: dict[int, bool] = {}
        self.answered: dict[int, int] = {}

    def say(self) -> None:
        s = self.random.choice([*self.senders])
        self._sealed(s, self.said[s], self.senders[s].frame(self.said[s], ack(self.said[s]), None), b"content")
        self.said[s] += 1

    def prove(self) -> None:
        s = self.random.choice([*self.senders])
        if self.met[s] and self.said[s]:
            number = self.random.randrange(self.said[s])
            self._sealed(s, number, self.senders[s].again(number), b"")

    def _sealed(self, s: int, number: int, text: bytes, content: bytes) -> None:
        kind = EnvelopeKind.PROVEN if self.met[s] else EnvelopeKind.EARLY
        self.wire.append(Envelope(kind, s, self.met[s], number, content, text))

    def tell(self) -> None:
        for (g, s), w in self.ends.items():
            if self.proven[w] and self.read[w]:
                plain: Future[Frames] = Future()
                sealed = self.gates[g].sealed(f"{s}" * 32, plain)
                plain.set_result([codec.encode(ack(100 + self.answered[w]))])
                [text] = sealed.result(0)
                self.wire.append(Envelope(EnvelopeKind.ANSWER, s, w, self.answered[w], b"content", text))
                self.answered[w] += 1

    def deliver(self) -> None:
        it = self.random.choice(self.wire)
        s = self.random.choice([*self.senders, it.sender, it.sender])
        if self.random.random() < 0.6:
            number = self.random.choice([it.number] * 3 + [it.number + 1])
            self.down(it, self.random.randrange(2), s, number)
        else:
            self.up(it, s)

    def down(self, it: Envelope, g: int, s: int, number: int) -> None:
        w = self.ends.get((g, s), 0)
        admitted = self.gates[g].admit(Parcel(f"{s}" * 32, number, it.text))
        fits = it.sender == s and (
            it.kind is EnvelopeKind.EARLY or (it.kind is EnvelopeKind.PROVEN and it.worker == w != 0)
        )
        if fits and w:
            self.proven[w] |= it.kind is EnvelopeKind.PROVEN
        fits &= number == it.number
        if fits and it.content and not (w and self.proven[w]):
            assert isinstance(admitted, HeldCall)
            self._keeps(g, s, number, admitted.frames)
        elif fits and (it.content or number in self.kept[w] | self.asked[w]):
            assert isinstance(admitted, Parcel)
            assert bool(admitted.frame) == (bool(it.content) or number in self.kept[w])
            self._reads(w, number, admitted, it)
        else:
            assert isinstance(admitted, UntrustedCall), (it, g, s, number)

    def _keeps(self, g: int, s: int, number: int, frames: Frames) -> None:
        w = self.ends.setdefault((g, s), len(self.ends) + 1)
        self.proven.setdefault(w, False)
        self.kept.setdefault(w, set()).add(number)
        for variable, empty in ((self.asked, set()), (self.read, []), (self.answered, 0)):
            variable.setdefault(w, empty)  # type: ignore[attr-defined] # one loop for three types
        self.wire.append(Envelope(EnvelopeKind.CHALLENGE, s, w, 0, b"", frames[0]))

    def _reads(self, w: int, number: int, admitted: Parcel, it: Envelope) -> None:
        if not it.content:
            self.kept[w].discard(number)
            self.asked[w].add(number)
        if admitted.frame:
            assert codec.decode(admitted.frame) == ack(number)
            self.read[w].append(number)

    def up(self, it: Envelope, s: int) -> None:
        meets = it.kind is EnvelopeKind.CHALLENGE and it.sender == s and self.met[s] in {0, it.worker}
        answers = (it.kind, it.sender) == (EnvelopeKind.ANSWER, s) and it.worker == self.met[s] != 0
        fits = answers and it.number not in self.heard[s]
        heard: list[Message] = []
        if meets:
            with pytest.raises(Challenged):
                self.senders[s].brought([it.text])
            self.met[s] = it.worker
            return
        with contextlib.suppress(AuthenticationError):
            heard = self.senders[s].brought([it.text])
        assert heard == ([ack(100 + it.number)] if fits else []), (it, s)
        if fits:
            self.heard[s].append(it.number)

    def step(self) -> None:
        moves: list[Callable[[], None]] = [self.say, self.prove, self.tell]
        self.random.choice([*moves, *[self.deliver] * 5 * bool(self.wire)])()
        for (_, s), w in self.ends.items():
            if self.proven[w]:  # the invariant OnlyTheSender; a call server accepts each number once, in order
                assert self.met[s] == w
                assert set(self.read[w]) <= set(range(self.said[s]))
            else:
                assert self.read[w] == []


@pytest.mark.parametrize("seeds", [range(40), range(40, 80)], ids=["these", "those"])
def test_calls_accept_exactly_the_envelopes_that_the_model_accepts(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.transports.calls.gates.logger.warning", _silent)
    believed = 0
    for seed in seeds:
        walk = Calls(seed)
        for _ in range(STEPS):
            walk.step()
        believed += sum(map(len, walk.heard.values()))

    assert believed, "no walk came as far as an answer"


def _silent(*_: Any) -> None:
    """Drop the warnings, since calls are rejected thousands of times."""
