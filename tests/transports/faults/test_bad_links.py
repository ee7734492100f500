"""An error in one link's adapter, or in the handling of its messages, fails that link and no other."""

from __future__ import annotations

import multiprocessing
import struct
from typing import Any

import pytest
from fleet import PATIENCE, Pair, constants, filled, raw, small
from local_links import local_pair

from weightsync import TransportError, WorkerLostError
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.protocol import codec
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Hello, Update
from weightsync.transports.base import Link
from weightsync.transports.buffers import Buffer
from weightsync.weights.layout import Layout

BY_HAND = pytest.mark.untraced("a link that is wrong on purpose")


def boom(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("boom")


def unsteady(driver: Any) -> None:
    """Make a driver flush and poll its links as if they were not `Steady`."""
    if isinstance(driver, ReceiverDriver):
        driver._outlets.clear()
    else:
        for lane in driver._links.values():
            lane.outlet = None
    for waits in driver._waits:
        waits._waits_left = 0


def link_to(pair: Pair, worker: int) -> Link:
    return pair.sender._driver.by_worker()[worker]


def served(pair: Pair, value: float, *workers: int) -> Any:
    """Send a version that these workers receive. Returns the report."""
    filled(pair.source, value)
    pair.sender.send_async()
    for worker in workers:
        assert pair.receivers[worker].receive(timeout=0)
    return pair.sender.wait_async(timeout=PATIENCE, on_failure="report")


@BY_HAND
@pytest.mark.parametrize("method", ["receive", "flush", "watch", "send"])
def test_g10_any_exception_of_a_link_in_the_trainer_loses_only_its_worker(three: Pair, method: str) -> None:
    three.sender.send_async()
    setattr(link_to(three, 1), method, boom)
    unsteady(three.sender._driver)
    for receiver in three.receivers:
        assert receiver.receive(timeout=0)
    three.sender.wait_async(timeout=PATIENCE, on_failure="report")
    report = served(three, 2.0, 0, 2)

    assert [report[worker].kind.name for worker in range(3)] == ["APPLIED", "LOST", "APPLIED"]
    assert "boom" in report[1].reason


@BY_HAND
@pytest.mark.parametrize("method", ["receive", "flush", "watch"])
def test_g10_any_exception_of_a_link_in_a_worker_ends_the_link_on_both_sides(pair: Pair, method: str) -> None:
    pair.sender.send_async()
    setattr(pair.receiver._driver.links()[0], method, boom)
    unsteady(pair.receiver._driver)
    with pytest.raises(TransportError, match="boom"):
        pair.receiver.receive(timeout=0)
    with pytest.raises(WorkerLostError):
        pair.sender.wait_async(timeout=PATIENCE)


@BY_HAND
@pytest.mark.parametrize("method", ["waitables", "wants_write"])
def test_g10_a_link_that_cannot_be_waited_for_loses_only_its_worker(three: Pair, method: str) -> None:
    assert three.sync().ok
    three.sender.send_async()
    setattr(link_to(three, 1), method, boom)
    unsteady(three.sender._driver)
    for receiver in (three.receivers[0], three.receivers[2]):
        assert receiver.receive(timeout=0)
    report = three.sender.wait_async(timeout=PATIENCE, on_failure="report")

    assert [report[worker].kind.name for worker in range(3)] == ["APPLIED", "LOST", "APPLIED"]
    assert "boom" in report[1].reason
    assert served(three, 2.0, 0, 2).of(report[1].kind) == (1,)


@BY_HAND
def test_g10_a_worker_that_cannot_wait_for_its_link_tells_its_trainer(pair: Pair) -> None:
    assert pair.sync().ok
    pair.receiver._driver.links()[0].waitables = boom  # type: ignore[method-assign]
    unsteady(pair.receiver._driver)
    with pytest.raises(TransportError, match="boom"):
        pair.receiver.receive(timeout=PATIENCE)
    with pytest.raises(WorkerLostError, match="boom"):
        pair.sender.send(timeout=PATIENCE)


@BY_HAND
def test_g11_an_answer_sent_before_its_link_fails_to_flush_is_counted(three: Pair) -> None:
    def cut(*_: Any) -> bool:
        raise TransportError("cut")

    three.sender.send_async()
    for receiver in three.receivers:
        assert receiver.receive(timeout=0)
    link_to(three, 1).flush = cut  # type: ignore[method-assign]
    unsteady(three.sender._driver)
    report = three.sender.wait_async(timeout=PATIENCE, on_failure="report")

    assert report.ok
    assert three.sender.workers[1].link_state is pure.LinkState.LOST


@BY_HAND
def test_g10_a_link_whose_close_raises_is_dropped_and_the_other_links_continue(three: Pair) -> None:
    assert three.sync().ok
    link = link_to(three, 1)
    closing, link.close = link.close, boom
    three.sender.remove_worker(1)
    report = served(three, 2.0, 0, 2)
    closing()

    assert (list(report), report.ok) == ([0, 2], True)


@BY_HAND
@pytest.mark.parametrize("where", ["before the step", "in the step"])
def test_g10_an_answer_that_cannot_be_handled_loses_only_its_worker(
    three: Pair, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert three.sync().ok
    driver, failing = three.sender._driver, iter([True])
    step, verify = driver._pure_step, driver._verify

    def fails_once(*arguments: Any) -> Any:
        if isinstance(arguments[-1], pure.Answer) and next(failing, False):
            boom()
        return step(*arguments)

    def verifies_once(link: int, message: Any) -> None:
        if next(failing, False):
            boom()
        verify(link, message)

    if where == "in the step":
        monkeypatch.setattr(driver, "_pure_step", fails_once)
    else:
        monkeypatch.setattr(driver, "_verify", verifies_once)
    report = served(three, 2.0, 0, 1, 2)

    assert sorted(report[worker].kind.name for worker in range(3)) == ["APPLIED", "APPLIED", "LOST"]
    (lost,) = report.failed
    assert "boom" in report[lost].reason
    assert served(three, 3.0, *({0, 1, 2} - {lost})).of(report[lost].kind) == (lost,)


def test_a_receiver_that_is_given_several_pipes_in_turn_keeps_one_listener(pair: Pair) -> None:
    """A worker may outlive many trainers, so listeners for former pipes must not pile up."""
    for _ in range(3):
        ours, theirs = multiprocessing.Pipe()
        pair.pipes.append((ours, theirs))
        pair.receiver.register_worker_transport(theirs)

    assert len(pair.receiver._listening._listeners) == 1


@BY_HAND
@pytest.mark.parametrize("content", [codec.MAGIC, codec.encode(Hello(model_id="policy", incarnation=3))[:40]])
def test_a_second_link_that_breaks_the_protocol_does_not_disturb_the_current_link(pair: Pair, content: bytes) -> None:
    assert pair.sync().ok
    ours, theirs = multiprocessing.Pipe()
    pair.receiver.register_worker_transport(theirs)
    with raw(ours) as out:
        out._send(struct.pack("!i", len(content)) + content)

    assert pair.receiver.receive(timeout=0) is False
    assert len(pair.receiver._driver.links()) == 1
    filled(pair.source, 2.0)
    assert pair.sync().ok
    assert constants(pair.model) == {2.0}
    ours.close()


def test_a_send_to_an_unknown_worker_raises_in_the_trainer(pair: Pair) -> None:
    assert pair.sync().ok
    with pytest.raises(ValueError, match="worker"):
        pair.sender.send_async(worker_ids=[7])
    assert constants(small(1.0)) == constants(pair.model)


@BY_HAND
@pytest.mark.parametrize("whole", [True, False], ids=["with its layout", "with a forgotten layout"])
def test_over_a_shared_link_an_older_senders_update_is_stale_and_the_newer_ones_is_pending(
    whole: bool,
) -> None:
    old, new = Layout([("a", "float32", (2,))]), Layout([("b", "float32", (3,))])
    theirs, ours = local_pair()
    driver = ReceiverDriver("policy")
    driver.add_link(ours)

    def says(incarnation: int, version: int, layout: Layout, whole: bool) -> list[Any]:
        """The receiver's answers to the update of a sender that has completed its handshake."""
        named = {
            "layout_digest": layout.digest,
            "layout": layout.encode() if whole else b"",
            "nbytes": layout.nbytes,
        }
        update = Update(model_id="policy", incarnation=incarnation, version=version, **named)
        theirs.send(update, Buffer(layout.nbytes))
        driver.pump()
        return [received.message for received in theirs.receive()]

    for incarnation, layout in ((1, old), (2, new)):
        theirs.send(Hello(model_id="policy", incarnation=incarnation))
        driver.pump()
        assert isinstance(theirs.receive()[-1].message, Hello)  # after a STALE, for what the takeover left unanswered
        assert says(incarnation, 1, layout, whole=True) == []
    (stale,) = says(1, 2, old, whole)
    assert (stale.kind, stale.incarnation, stale.version) == (RefusalKind.STALE, 1, 2)
    assert driver.links() == [ours]

    (superseded,) = says(2, 2, new, whole=False)
    assert (superseded.kind, superseded.version) == (RefusalKind.SUPERSEDED, 1)
    assert driver.pending is not None
    assert driver.pending.update.version == 2
    driver.close()
    theirs.close()
