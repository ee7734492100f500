"""Scenarios of links alone: what is sent must arrive, no call may block, and waitables must be right."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Hello, Refusal, WeightsForm
from weightsync.protocol.report import Evidence, Outcome, OutcomeKind, SyncReport
from weightsync.testing.line import INCARNATION, Line
from weightsync.testing.link_setup import Ability, LinkSetup, Scenario
from weightsync.testing.payloads import Payloads
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.transports.buffers import Buffer, Storage

_MIB = 2**20
_MANY = 100
SIZES = (0, 1, 3, 7, 63, 4095, 65_535, 65_536, 65_537, _MIB)


def messages(link_setup: LinkSetup) -> None:
    """Many small messages in both directions."""
    line = Line(link_setup)
    line.greet()
    for version in range(1, _MANY + 1):
        line.tell(*line.update(version, nbytes=version % 3))
    line.receive(line.receiver)
    for version in range(1, _MANY + 1):
        line.answer(line.ack(version))
    line.receive(line.sender)


def fields(link_setup: LinkSetup) -> None:
    """Every field of every message is transmitted."""
    line = Line(link_setup)
    hello = _hello_with_every_field(line)
    line.tell(hello)
    line.receive(line.receiver)
    line.answer(hello)
    line.receive(line.sender)
    for answer in _answers_with_every_field(line):
        line.tell(line.update(answer.version)[0])
        line.receive(line.receiver)
        line.answer(answer)
        line.receive(line.sender)
    update, buffer = line.update(3, 300)
    long = bytes(range(256)) * 300
    line.tell(replace(update, layout=long, digest=b"y" * 16, extras=long, form=WeightsForm.TENSORDICT), buffer)
    line.receive(line.receiver)
    line.answer(line.ack(3))
    line.receive(line.sender)
    line.tell(line.bye())
    line.receive(line.receiver)


def _hello_with_every_field(line: Line) -> Hello:
    return Hello(
        model_id=line.model_id,
        incarnation=2**128 - 1,
        version=2**63,
        layout_digest=b"d" * 16,
        layout=bytes(range(256)) * 300,
        host=b"h" * 16,
        fence=2**127,
    )


def _answers_with_every_field(line: Line) -> tuple[Ack | Refusal, ...]:
    nested = SyncReport(model_id="ö", version=3, incarnation=1, outcomes={0: Outcome(kind=OutcomeKind.APPLIED)})
    ack = replace(line.ack(1), digest=b"x" * 16, seconds=0.125, evidence=Evidence.CALL, nested=nested)
    refusal = Refusal(
        model_id=line.model_id,
        incarnation=INCARNATION,
        version=2,
        kind=RefusalKind.REFUSED,
        reason="ä\n" * 900,
        remote_traceback="at ♞",
        fence=9,
    )
    return ack, refusal


def payloads(link_setup: LinkSetup, sizes: tuple[int, ...], storage: Storage) -> None:
    """Payloads of every size, one after another. A delivered payload does not change until a newer one is acked."""
    link_setup.storage = storage
    line, guard = Line(link_setup), Payloads(1, storage)
    line.greet()
    held: tuple[memoryview, bytes] | None = None
    for version, nbytes in enumerate(sizes, 1):
        update, buffer = line.update(version, nbytes)
        line.tell(update, buffer)
        if buffer is not None:
            guard.adopt(buffer)
        guard.scribble()
        received = line.receive(line.receiver)
        if held is not None and not guard.intact(*held):
            raise RuleViolation(Rule.PINNED, "a payload was overwritten before a newer version was acked")
        held = guard.seal(received[0].payload) if received else None
        line.answer(line.ack(version))
        line.receive(line.sender)
        guard.scribble()


def a_peer_that_does_not_read(link_setup: LinkSetup) -> None:
    """Many messages are sent before any is read; then all of them are read."""
    line = Line(link_setup)
    line.greet()
    for version in range(1, 13):
        line.tell(*line.update(version, nbytes=3 * _MIB if version % 2 else 0))
        line.sender.flush()
    line.receive(line.receiver)
    for version in range(1, 13):
        line.answer(line.ack(version))
    line.receive(line.sender)


def room_to_write(link_setup: LinkSetup) -> None:
    """Data that does not fit at once is written when the link says that it can be; nothing else triggers a write."""
    line = Line(link_setup)
    line.greet()
    line.tell(*line.update(1, nbytes=4 * _MIB))
    link_setup.watch.steps.append("the sender's end writes whenever it reports room to write")
    link_setup.until_written(line.sender, line.receiver.receive)
    line.receive(line.receiver)
    line.answer(line.ack(1))
    line.receive(line.sender)


def waitables(link_setup: LinkSetup) -> None:
    """Waitables are readable while there is something to receive, and then stop being readable."""
    line = Line(link_setup)
    line.greet()
    for recorder in (line.sender, line.receiver):
        link_setup.quiet(recorder)
    for version in (1, 2, 3):
        line.tell(*line.update(version, nbytes=100_000))
        line.receive(line.receiver)
        link_setup.quiet(line.receiver)
        line.answer(line.ack(version))
        line.receive(line.sender)
        link_setup.quiet(line.sender)


def buffers(link_setup: LinkSetup, storage: Storage) -> None:
    """A buffer is free once the worker has acked a newer version. All are free once both ends are closed."""
    link_setup.storage = storage
    line = Line(link_setup)
    line.greet()
    sent: list[Buffer] = []
    for version in (1, 2, 3, 4):
        update, buffer = line.update(version, nbytes=200_000)
        line.tell(update, buffer)
        sent += [buffer] if buffer else []
        line.receive(line.receiver)
        line.answer(line.ack(version))
        line.receive(line.sender)
    link_setup.watch.steps.append("version 4 is acked")
    link_setup.until_free(sent[:3], "are still pinned, although their worker has acked a newer version")
    line.receiver.close()
    line.sender.close()
    link_setup.until_free(sent, "are still pinned after both ends were closed")


def several_models(link_setup: LinkSetup) -> None:
    """Two models over one connection: each link has its own messages, and closing one leaves the other alone."""
    first = Line(link_setup, "policy")
    assert first.ends.another is not None
    second = Line(link_setup, "value", first.ends.another("value"))
    first.greet()
    second.greet()
    for version in (1, 2, 3):
        for line in (first, second):
            line.tell(*line.update(version, nbytes=version * 50_000))
        for line in (second, first):
            line.receive(line.receiver)
            line.answer(line.ack(version))
    for line in (first, second):
        line.receive(line.sender)
    link_setup.watch.steps.append("the first model's links are closed")
    first.sender.close()
    first.receiver.close()
    second.tell(*second.update(4, nbytes=50_000))
    second.receive(second.receiver)
    second.answer(second.ack(4))
    second.receive(second.sender)


LINK_SCENARIOS = (
    Scenario("many messages", messages, over_losses=True),
    Scenario("every field", fields),
    *(
        Scenario(f"payloads of every size ({storage.value})", partial(payloads, sizes=SIZES, storage=storage))
        for storage in Storage
    ),
    Scenario("payloads of 40 MiB", partial(payloads, sizes=(40 * _MIB, 40 * _MIB - 3), storage=Storage.SEGMENTS)),
    Scenario("a peer that does not read", a_peer_that_does_not_read),
    Scenario("room to write", room_to_write),
    Scenario("waitables", waitables),
    *(Scenario(f"buffers ({storage.value})", partial(buffers, storage=storage)) for storage in Storage),
    Scenario("several models", several_models, needs=Ability.ANOTHER),
)
