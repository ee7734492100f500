"""A worker without descriptors or memory for an update refuses it with the reason, and applies the next one."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path
from typing import Any

import pytest
from descriptor_limit import limit_descriptors
from fleet import PATIENCE, Crew, Pair, WorkerSetup, constants, filled, join, large, receive, serve, shows
from msgspec.structs import replace
from torch import nn

from weightsync import MultiProcessWeightSyncScheme, OutcomeKind, RefusedError, SharedMemWeightSyncScheme
from weightsync.protocol import codec
from weightsync.protocol.messages import Update
from weightsync.torchrl.transports import queues
from weightsync.torchrl.transports.queues import QueueChannel
from weightsync.transports.buffers import NoRoom
from weightsync.transports.pipe import framing


def huge(fill: float = 0.0) -> nn.Module:
    """A model of 32 MiB, more than the address space that `_limit` leaves."""
    return filled(nn.Linear(2048, 4096, bias=False), fill)


@pytest.fixture
def served(scheme_class: Any) -> Any:
    """A pair whose weights are large enough for segments, at version 1."""
    pair = Pair(scheme_class, model=large)
    assert pair.sync().ok
    yield pair
    pair.close()


def refused(pair: Pair, left: int) -> str:
    """Send to a receiver that may open only ``left`` descriptors. Returns why it refused."""
    pair.sender.send_async()
    with limit_descriptors(left):
        assert pair.receiver.receive(timeout=0) is False
    with pytest.raises(RefusedError) as caught:
        pair.sender.wait_async(timeout=PATIENCE)
    assert pair.receiver.last_refusal in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("left", [0, 1])
def test_g11_an_update_without_a_descriptor_is_refused_with_the_reason_and_later_ones_are_applied(
    served: Pair, left: int
) -> None:
    for _ in range(2):
        reason = refused(served, left)
        assert "Too many open files" in reason
        assert "send the weights again" in reason
    assert (served.receiver.version, constants(served.model)) == (1, {1.0})

    for value in (2.0, 3.0, 4.0):
        filled(served.source, value)
        assert served.sync().ok
        assert constants(served.model) == {value}


def test_a_segment_lost_with_a_superseded_version_is_passed_again(served: Pair) -> None:
    served.sender.send_async()
    with limit_descriptors(0):
        served.receiver._driver.pump()
    served.sender.send_async(on_pending="supersede")
    assert served.receiver.receive(timeout=0)
    assert served.sender.wait_async(timeout=PATIENCE).ok

    for value in (2.0, 3.0, 4.0):
        filled(served.source, value)
        assert served.sync().ok
        assert constants(served.model) == {value}


def test_an_update_that_could_not_be_taken_is_refused_if_weights_are_applied_by_hand(served: Pair) -> None:
    filled(served.source, 2.0)
    served.sender.send_async()
    with limit_descriptors(0):
        served.receiver._driver.pump()
    served.receiver.apply_weights(dict(served.source.state_dict()))

    assert constants(served.model) == {2.0}
    with pytest.raises(RefusedError, match="by hand"):
        served.sender.wait_async(timeout=PATIENCE)


@pytest.mark.parametrize("left", range(2))
def test_g11_a_joiner_without_descriptors_is_reported_in_the_next_report(served: Pair, left: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    joined = type(served.scheme)()
    joined.init_on_worker("policy", pipe=theirs, model=large())
    served.pipes.append((ours, theirs))
    served.schemes.append(joined)
    served.sender.add_worker(1, ours)
    with limit_descriptors(left):
        joined.get_receiver()._driver.pump()
    if left:  # enough to watch the trainer's process, none for its segment
        assert joined.get_receiver().receive(timeout=0) is False
        served.receivers.append(joined.get_receiver())
    served.sender.send_async()
    for receiver in served.receivers:
        assert receiver.receive(timeout=0)
    report = served.sender.wait_async(timeout=PATIENCE, on_failure="report")

    outcome = report.not_caught_up[1] if left else report[1]
    assert outcome.kind is (OutcomeKind.REFUSED if left else OutcomeKind.LOST)
    assert "Too many open files" in outcome.reason
    assert [report[0].kind, served.sender.worker_ids] == [OutcomeKind.APPLIED, (0, 1)]


def test_g11_an_inline_payload_without_memory_is_refused_and_the_link_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(MultiProcessWeightSyncScheme, model=large)
    with monkeypatch.context() as patched:
        for link in (*pair.sender._driver.links(), *pair.receiver._driver.links()):
            patched.setattr(link._channel, "passes_descriptors", False)
        pair.sender.send_async()
        patched.setattr(framing, "anonymous", lambda nbytes: (_ for _ in ()).throw(NoRoom(f"No memory for {nbytes}.")))
        while pair.receiver.receive(timeout=0) or not pair.receiver.last_refusal:
            pair.sender.poll()
        with pytest.raises(RefusedError, match="could not be received: No memory for 161"):
            pair.sender.wait_async(timeout=PATIENCE)
    assert pair.sync().ok
    assert constants(pair.model) == {1.0}
    pair.close()


def test_a_queue_payload_without_memory_is_untaken_and_the_next_one_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_: Any) -> Any:
        raise MemoryError

    channel = QueueChannel(None, None)
    payload = Update(model_id="policy", incarnation=1, version=1, layout_digest=b"", nbytes=3)
    with monkeypatch.context() as patched:
        patched.setattr(queues, "bytearray", none_left, raising=False)
        channel._sort(codec.encode(payload) + b"abc")
    channel._sort(codec.encode(replace(payload, version=2)) + b"abc")

    lost, taken = channel._boxes["policy"]
    assert (lost.message.version, lost.payload, lost.untaken) == (1, None, "No memory for a payload of 3 bytes.")
    assert (bytes(taken.payload), taken.untaken) == (b"abc", "")


def _limit(_: WorkerSetup, spare: int | None) -> None:
    """Limit this process's address space to its present size and ``spare`` bytes; None removes the limit."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard if spare is None else used + spare, hard))


def test_g11_a_worker_at_its_memory_limit_refuses_and_applies_once_the_limit_is_lifted(crew: Crew) -> None:
    (worker,) = crew.start(SharedMemWeightSyncScheme())
    worker.do(join, huge)
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=huge(1.0))
        sender = scheme.get_sender()
        worker.do(_limit, 24 * 2**20)
        worker.tell(receive)
        with pytest.raises(RefusedError, match="Cannot allocate memory"):
            sender.send(timeout=PATIENCE)
        assert worker.answer() is False
        worker.do(_limit, None)
        worker.tell(serve, 2)
        assert sender.send(timeout=PATIENCE).ok
        assert worker.answer() == 2
        assert worker.do(shows)[2] == {1.0}
