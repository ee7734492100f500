"""The kit refuses deliberately wrong adapters, each for the rule that it breaks."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_links import LocalLink, local_pair
from msgspec.structs import replace

import weightsync.testing
from weightsync import ConfigurationError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Update
from weightsync.testing import Ends, Nonconforming, Rule, check_transport
from weightsync.transports.base import Payloads, Received, Waker
from weightsync.transports.buffers import Buffer

#: Traces are not recorded: these links violate the contract on purpose.
pytestmark = pytest.mark.untraced("adapters that are wrong on purpose")

#: Seconds until the kit gives up on an event. Each adapter that swallows messages costs this much.
PATIENCE = 1.5


class Wrong:
    """Wraps a correct link. Each subclass breaks one rule."""

    def __init__(self, link: LocalLink) -> None:
        self.link = link
        self.delivery = link.delivery
        self.peer = link.peer
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


class Drops(Wrong):
    number = 7

    def send(self, message: Any, payload: Any = None) -> None:
        self.count += 1
        if self.count != self.number:
            self.link.send(message, payload)


class DropsTheSecond(Drops):
    number = 2


class DropsTheSixtieth(Drops):
    number = 60


class LosesExtras(Wrong):
    def receive(self) -> list[Received]:
        received = self.link.receive()
        return [
            replace(one, message=replace(one.message, extras=b"")) if isinstance(one.message, Update) else one
            for one in received
        ]


class Reorders(Wrong):
    number = 5
    kept: Any = None

    def send(self, message: Any, payload: Any = None) -> None:
        self.count += 1
        if self.count == self.number:
            self.kept = message, payload
            return
        self.link.send(message, payload)
        if self.kept is not None:
            kept, self.kept = self.kept, None
            self.link.send(*kept)


class ReordersTheSecond(Reorders):
    number = 2


class SendsHandshakeLate(Reorders):
    """Lets the update overtake the handshake."""

    def send(self, message: Any, payload: Any = None) -> None:
        self.count += 4 if self.count == 0 else 1
        super().send(message, payload)


class Duplicates(Wrong):
    def send(self, message: Any, payload: Any = None) -> None:
        self.link.send(message, payload)
        if isinstance(message, Update):
            self.link.send(message, payload)


class Forges(Wrong):
    def receive(self) -> list[Received]:
        received = self.link.receive()
        return [
            Received(Ack(model_id=one.message.model_id, incarnation=1, version=99))
            if isinstance(one.message, Ack)
            else one
            for one in received
        ]


class SwallowsDeath(Wrong):
    def receive(self) -> list[Received]:
        try:
            return self.link.receive()
        except TransportError:
            if self.link._closed:
                raise
            return []


class ReportsDeathOnce(Wrong):
    def receive(self) -> list[Received]:
        try:
            return self.link.receive()
        except TransportError:
            self.count += 1
            if self.link._closed or self.count == 1:
                raise
            return []


class NeverAsksToWrite(Wrong):
    """Writes only at every second flush, without asking for another through ``wants_write``."""

    kept: Any = None

    def send(self, message: Any, payload: Any = None) -> None:
        if payload is None:
            self.link.send(message)
        else:
            self.kept = message, payload

    def flush(self) -> bool:
        if self.kept is None:
            return self.link.flush()
        self.count += 1
        if self.count % 2:
            return False
        kept, self.kept = self.kept, None
        self.link.send(*kept)
        return self.link.flush()


class ClosesOnce(Wrong):
    def close(self) -> None:
        if self.link._closed:
            raise TransportError("It is closed already.")
        self.link.close()


class FailsAfterSecondRead(Wrong):
    enough = 2

    def receive(self) -> list[Received]:
        self.count += 1
        if self.count > self.enough:
            raise TransportError("The link has had enough.")
        return self.link.receive()


class FailsAfterFirstRead(FailsAfterSecondRead):
    enough = 1


class DropsLastMessages(Wrong):
    def receive(self) -> list[Received]:
        side = self.link.side
        if not self.link._closed and side in self.link.network._ended:
            self.link.network._inboxes[side].clear()
        return self.link.receive()


class Tears(Wrong):
    def receive(self) -> list[Received]:
        received = self.link.receive()
        for one in received:
            if one.payload is not None and len(one.payload) > 4096:
                one.payload[4096:] = bytes(len(one.payload) - 4096)
        return received


class PadsCutOffPayload(Wrong):
    """Delivers a large payload although its sender closed in the middle of it, with zeros for the missing rest."""

    kept: Any = None

    def send(self, message: Any, payload: Any = None) -> None:
        if payload is None or message.nbytes < 2**20:
            self.link.send(message, payload)
        else:
            payload.pin(self)
            self.kept = message, payload

    def flush(self) -> bool:
        if self.kept is not None:
            (message, payload), self.kept = self.kept, None
            self.link.send(message, payload)
            payload.unpin(self)
        return self.link.flush()

    def wants_write(self) -> int | None:
        return self.link.waitables()[0] if self.kept is not None else None

    def close(self) -> None:
        if self.kept is not None:
            (message, payload), self.kept = self.kept, None
            padded = Buffer(message.nbytes)
            padded.view[: 2**16] = payload.view[: 2**16]
            self.link.send(message, padded)
            payload.unpin(self)
        self.link.close()


class Shortens(Wrong):
    def receive(self) -> list[Received]:
        received = self.link.receive()
        return [Received(one.message, one.payload and one.payload[:65_536]) for one in received]


class TearsSecondHalf(Wrong):
    """Replaces the second half of each payload by zeros."""

    def receive(self) -> list[Received]:
        received = self.link.receive()
        for one in received:
            if one.payload is not None:
                one.payload[len(one.payload) // 2 :] = bytes(len(one.payload) - len(one.payload) // 2)
        return received


class Delays(Wrong):
    """Sends each message together with the next one, so that the last is never sent."""

    kept: Any = None

    def send(self, message: Any, payload: Any = None) -> None:
        if self.kept is not None:
            self.link.send(*self.kept)
        self.kept = message, payload


class CrossesLinks(Wrong):
    """Sends acks over the link that was created last, whichever link they belong to."""

    newest: Any = None

    def __init__(self, link: LocalLink) -> None:
        super().__init__(link)
        type(self).newest = link  # the receiver's end is created second

    def send(self, message: Any, payload: Any = None) -> None:
        link = type(self).newest if isinstance(message, Ack) else self.link
        link.send(message, payload)


class AcksOnArrival(Wrong):
    """Acks each version on its arrival, before it is applied."""

    def receive(self) -> list[Received]:
        received = self.link.receive()
        for message in [one.message for one in received]:
            if isinstance(message, Update):
                self.link.send(
                    Ack(
                        model_id=message.model_id,
                        incarnation=message.incarnation,
                        version=message.version,
                        digest=message.digest,
                    )
                )
        return received


class Blocks(Wrong):
    def __init__(self, link: LocalLink) -> None:
        super().__init__(link)
        self.closed = threading.Event()

    def send(self, message: Any, payload: Any = None) -> None:
        self.count += 1
        if self.count == 9:
            self.closed.wait()
        self.link.send(message, payload)

    def close(self) -> None:
        self.closed.set()
        self.link.close()


class KeepsPinned(Wrong):
    def send(self, message: Any, payload: Any = None) -> None:
        if payload is not None:
            payload.pin(object())
        self.link.send(message, payload)


class NeverPins(Wrong):
    """Shows the worker the sender's own buffer without pinning it."""

    def send(self, message: Any, payload: Any = None) -> None:
        self.link.send(message, None if payload is None else _Unpinned(payload))


class _Unpinned(Buffer):
    def __init__(self, real: Buffer) -> None:
        super().__init__(0)
        self.real, self.nbytes = real, real.nbytes

    @property
    def view(self) -> memoryview:
        return self.real.view


class NeverReadable(Wrong):
    """Has waitables that never become readable."""

    def __init__(self, link: LocalLink) -> None:
        super().__init__(link)
        self.waker = Waker()

    def waitables(self) -> list[int]:
        return [] if self.link._closed else [self.waker.fileno()]


class AlwaysReadable(NeverReadable):
    """Has waitables that are always readable."""

    def waitables(self) -> list[int]:
        self.waker.fire()
        return super().waitables()


class NeverCloses(Wrong):
    def close(self) -> None:
        self.count += 1

    def send(self, message: Any, payload: Any = None) -> None:
        self.link.send(message, payload)


class LeavesDescriptorToGarbageCollector(Wrong):
    """Leaves a descriptor open until the link is garbage-collected."""

    def __init__(self, link: LocalLink) -> None:
        super().__init__(link)
        self.left = Waker()


class RaisesUntypedError(Wrong):
    def send(self, message: Any, payload: Any = None) -> None:
        if self.link._closed:
            raise OSError("Bad file descriptor")
        self.link.send(message, payload)


def factory(wrong: Callable[[LocalLink], Any], payloads: Payloads = Payloads.INLINE) -> Callable[[str], Ends]:
    def connect(model_id: str) -> Ends:
        first, second = local_pair(payloads=payloads)
        return Ends(wrong(first), wrong(second), cut=first.network.cut, dispose=lambda: close(first, second))

    def close(*links: LocalLink) -> None:
        for link in links:
            link.close()

    return connect


WRONG = [
    (Drops, Rule.ARRIVES, "many messages"),
    (DropsTheSixtieth, Rule.ARRIVES, "many messages"),
    (LosesExtras, Rule.GENUINE, "every field"),
    (ReportsDeathOnce, Rule.DEATH_REPORTED, "a receiver that is gone"),
    (NeverAsksToWrite, Rule.WAKES, "room to write"),
    (ClosesOnce, Rule.OWN_ERRORS, "closing"),
    (ClosesOnce, Rule.CLOSED, "a receiver that is gone"),
    (Reorders, Rule.ORDER, "many messages"),
    (SendsHandshakeLate, Rule.ORDER, "the first update with the handshake"),
    (Duplicates, Rule.ONCE, "many messages"),
    (Duplicates, Rule.ONCE, "updates"),
    (Forges, Rule.GENUINE, "many messages"),
    (SwallowsDeath, Rule.DEATH_REPORTED, "a receiver that is gone"),
    (SwallowsDeath, Rule.DEATH_REPORTED, "the sender is lost"),
    (SwallowsDeath, Rule.DEATH_REPORTED, "a cut with an update outstanding"),
    (FailsAfterSecondRead, Rule.LIVES, "waitables"),
    (DropsLastMessages, Rule.LAST_WORDS, "the sender's last words"),
    (Tears, Rule.PAYLOAD, "payloads of every size (segments)"),
    (PadsCutOffPayload, Rule.PAYLOAD, "an update that is cut off"),
    (Shortens, Rule.PAYLOAD, "payloads of every size (heap)"),
    (Blocks, Rule.NEVER_BLOCKS, "a peer that does not read"),
    (KeepsPinned, Rule.UNPINNED, "buffers (heap)"),
    (KeepsPinned, Rule.UNPINNED, "updates"),
    (NeverReadable, Rule.WAKES, "many messages"),
    (AlwaysReadable, Rule.QUIET, "waitables"),
    (NeverCloses, Rule.CLOSED, "closing"),
    (LeavesDescriptorToGarbageCollector, Rule.FREED, "many connections"),
    (RaisesUntypedError, Rule.OWN_ERRORS, "closing"),
]


@pytest.mark.parametrize(("wrong", "rule", "scenario"), WRONG, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_wrong_adapter_is_refused_for_the_rule_that_it_breaks(wrong: Any, rule: Rule, scenario: str) -> None:
    with pytest.raises(Nonconforming) as refused:
        check_transport(factory(wrong), only=[scenario], patience=PATIENCE)

    assert refused.value.rules == {rule}
    (broken,) = refused.value.conformance.broken
    assert (broken.scenario, bool(broken.steps), bool(broken.what)) == (scenario, True, True)
    assert f"{rule.name}: {rule.value}" in str(refused.value)


def test_an_adapter_that_leaves_a_thread_at_each_link_is_refused() -> None:
    done = threading.Event()

    class LeavesAThread(Wrong):
        def __init__(self, link: LocalLink) -> None:
            super().__init__(link)
            threading.Thread(target=done.wait).start()

    try:
        with pytest.raises(Nonconforming, match="each left at least one of its threads") as refused:
            check_transport(factory(LeavesAThread), only=["many connections"], patience=PATIENCE)
    finally:
        done.set()

    assert refused.value.rules == {Rule.FREED}


#: A wrong adapter for each class of faults that the replay of the model's paths finds by itself.
BY_REPLAY = [
    (DropsTheSecond, "one version", {Rule.ARRIVES}),
    (ReordersTheSecond, "two versions", {Rule.ORDER}),
    (Duplicates, "one version", {Rule.ONCE}),
    (Delays, "one version", {Rule.ARRIVES}),
    (CrossesLinks, "two workers", {Rule.GENUINE}),
    (AcksOnArrival, "one version", {Rule.GENUINE, Rule.ONCE}),
    (Forges, "one version", {Rule.GENUINE}),
    (SwallowsDeath, "losses", {Rule.DEATH_REPORTED}),
    (SwallowsDeath, "crashes", {Rule.DEATH_REPORTED}),
    (SwallowsDeath, "successors", {Rule.DEATH_REPORTED}),
    (FailsAfterFirstRead, "one version", {Rule.LIVES}),
    (TearsSecondHalf, "one version", {Rule.PAYLOAD}),
    (KeepsPinned, "one version", {Rule.UNPINNED}),
]


@pytest.mark.parametrize(
    ("wrong", "graph", "rules"), BY_REPLAY, ids=[f"{wrong.__name__}-{graph}" for wrong, graph, _ in BY_REPLAY]
)
def test_replay_alone_refuses_each_class_of_faults(wrong: Any, graph: str, rules: set[Rule]) -> None:
    with pytest.raises(Nonconforming) as refused:
        check_transport(factory(wrong), only=[f"the graph of {graph}"], patience=PATIENCE)

    (broken,) = refused.value.conformance.broken
    assert broken.rule in rules, str(broken)
    assert broken.steps[0].startswith("path ")
    assert "an earlier step broke a rule" in set(refused.value.conformance.unreached.values())


@pytest.mark.parametrize("scenario", ["payloads of every size (heap)", "updates"])
def test_a_shared_buffer_that_is_not_pinned_breaks_the_payload_or_pinned_rule(scenario: str) -> None:
    with pytest.raises(Nonconforming) as refused:
        check_transport(factory(NeverPins, Payloads.SHARED), only=[scenario], patience=PATIENCE)

    assert refused.value.rules <= {Rule.PAYLOAD, Rule.PINNED}


def test_an_unreachable_scenario_that_is_not_declared_is_refused() -> None:
    def connect(model_id: str) -> Ends:
        return Ends(*local_pair())

    with pytest.raises(Nonconforming, match=r"Ends\.cut") as refused:
        check_transport(connect, only=["a cut", "several models", "handshake"], patience=PATIENCE)
    assert refused.value.rules == {Rule.DECLARED}
    assert refused.value.conformance.passed == ("handshake",)

    reasons = {"a cut": "nothing can be cut here", "several models": "one model a link"}
    found = check_transport(connect, unreachable=reasons, only=[*reasons, "handshake"], patience=PATIENCE)
    assert found.unreachable == reasons
    assert "not reached: a cut: nothing can be cut here" in str(found)


@pytest.mark.parametrize(
    ("stop_at_first", "broken"), [(False, ["several models", "a cut"]), (True, ["several models"])]
)
def test_stop_at_first_ends_the_check_at_the_first_scenario_that_breaks_a_rule(
    stop_at_first: bool, broken: list[str]
) -> None:
    with pytest.raises(Nonconforming) as refused:
        check_transport(
            lambda model_id: Ends(*local_pair()), only=["a cut", "several models"], stop_at_first=stop_at_first
        )
    assert [each.scenario for each in refused.value.conformance.broken] == broken


@pytest.mark.parametrize("bad", [{"no such scenario": "why"}, {"a cut": " "}])
def test_invalid_declarations_of_unreachable_scenarios_are_refused(bad: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        check_transport(lambda model_id: Ends(*local_pair()), unreachable=bad)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"factory": None}, r"^factory= is None: give a function of a model id that returns Ends"),
        ({"unreachable": ["a cut"]}, r"^unreachable= is \['a cut'\]: give a dict that maps the name of a scenario"),
        ({"unreachable": {"a cut": None}}, r"^unreachable= is \{'a cut': None\}: give a dict"),
        ({"only": "handshake"}, r"^only= is 'handshake': give a list of the names of scenarios"),
        ({"only": ["handshake", 3]}, r"^only= is \['handshake', 3\]: give a list"),
        ({"patience": "10"}, r"^patience= is '10': give seconds, more than 0"),
        ({"patience": 0}, r"^patience= is 0: give seconds, more than 0"),
        ({"stop_at_first": 1}, "^stop_at_first=1 is not a bool"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_connected(given: dict[str, Any], match: str) -> None:
    def connect(model_id: str) -> Ends:
        raise AssertionError

    with pytest.raises(ConfigurationError, match=match):
        check_transport(**{"factory": connect, **given})


class DeclaresText(Wrong):
    def __init__(self, link: LocalLink) -> None:
        super().__init__(link)
        self.delivery = "ordered"


@pytest.mark.parametrize(
    ("connect", "match"),
    [
        (lambda model_id: local_pair(), "made a tuple"),
        (factory(DeclaresText), "declares delivery 'ordered'"),
        (
            lambda model_id: Ends(local_pair()[0], object()),
            r"Ends have a receiver of type object, which lacks delivery",
        ),
    ],
)
def test_a_factory_that_does_not_return_valid_ends_is_refused(connect: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        check_transport(connect, patience=PATIENCE)


def test_lossy_links_are_not_checked_for_lost_messages() -> None:
    found = check_transport(lambda model_id: Ends(*local_pair(Delivery.BEST_EFFORT)), patience=PATIENCE)

    assert "updates" in found.beside
    assert "many messages" in found.passed


def test_the_kit_needs_no_pytest_and_no_hypothesis() -> None:
    kit = Path(weightsync.testing.__file__).parent
    modules = set(kit.glob("*.py")) - {kit / "pytest_plugin.py"}  # a pytest plugin, which the kit does not import
    found = {
        alias.name
        for path in modules
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import)
        for alias in node.names
    }

    assert found & {"pytest", "hypothesis"} == set()
    assert {"contextlib", "random"} <= found
