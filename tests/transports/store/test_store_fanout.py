"""Payloads that travel down a tree of workers over torch.distributed: the bytes sent, and the versions applied."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, constants, filled, free_port, large
from torch import nn

from weightsync import ConfigurationError, DistributedWeightSyncScheme, TransportError, WeightReceiver, WeightSender
from weightsync.transports.buffers import Buffer
from weightsync.transports.store import arriving, fanout, fetching, forwarding
from weightsync.transports.store.fanout import Branch
from weightsync.transports.store.forwarding import Feed
from weightsync.transports.store.stream import Stream

NBYTES = sum(each.nbytes for each in large().state_dict().values())


class Fleet:
    """A sender with a fan-out, and workers in this process, each in its own thread."""

    def __init__(self, store: Any, workers: int, **options: Any) -> None:
        self.source = large(1.0)
        narrow = torch.bfloat16 if "wire_dtype" in options else torch.float32
        self.models: list[nn.Module] = [large(0.0).to(narrow) for _ in range(workers)]
        self.scheme = DistributedWeightSyncScheme(**{"fanout": 2, **options})
        self.scheme.init_on_sender("policy", store=store, num_workers=workers, model=self.source)
        self.sender: WeightSender = self.scheme.get_sender()
        self.schemes = [DistributedWeightSyncScheme() for _ in range(workers)]
        for index, (scheme, destination) in enumerate(zip(self.schemes, self.models, strict=True)):
            scheme.init_on_worker("policy", store=store, rank=index + 1, model=destination)
        self.receivers: list[WeightReceiver] = [scheme.get_receiver() for scheme in self.schemes]
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(each,)) for each in self.receivers]
        for thread in self._threads:
            thread.start()
        self.sender.await_workers(timeout=PATIENCE)

    def _serve(self, receiver: WeightReceiver) -> None:
        with contextlib.suppress(TransportError):  # raised once the trainer has closed
            while not self._over.is_set():
                receiver.receive(timeout=0.05)

    def send(self, value: float, **options: Any) -> Any:
        filled(self.source, value)
        return self.sender.send(timeout=PATIENCE, **options)

    def values(self) -> list[set[float]]:
        return [constants(model) for model in self.models]

    @property
    def branches(self) -> list[Branch]:
        return [link._threads.branch for link in self.sender.transports().values()]  # type: ignore[attr-defined]

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        self.scheme.close()
        for scheme in self.schemes:
            scheme.close()


@pytest.fixture
def fleet_of(store: Any) -> Iterator[Callable[..., Fleet]]:
    """A function that makes fleets, which are closed after the test."""
    made: list[Fleet] = []

    def make(workers: int, **options: Any) -> Fleet:
        made.append(Fleet(store, workers, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A counter of the payload bytes that were sent over links."""
    counted: Counter[str] = Counter()
    write, lock = Stream._write_piece, threading.Lock()

    def write_piece(stream: Stream, piece: memoryview, go_on: Any) -> None:
        with lock:  # each link has a writer thread
            counted["links"] += len(piece)
        write(stream, piece, go_on)

    monkeypatch.setattr(Stream, "_write_piece", write_piece)
    return counted


@pytest.fixture
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts, so that no parent counts as silent even on a slow machine."""
    monkeypatch.setattr(fetching, "SILENCE", PATIENCE)
    monkeypatch.setattr(forwarding, "PATIENCE", PATIENCE)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[Buffer]:
    """A list of all buffers that are sent through a fan-out."""
    seen: list[Buffer] = []
    gathers = fanout.Fanout.gathers

    def noted(self: Any, branch: Any, update: Any, buffer: Buffer, message: Any) -> bool:
        seen.append(buffer)
        return gathers(self, branch, update, buffer, message)

    monkeypatch.setattr(fanout.Fanout, "gathers", noted)
    return seen


# ------------------------------------------------------------------------------------------- what is sent


@pytest.mark.usefixtures("long_timeouts")
def test_the_trainer_sends_a_payload_to_two_of_eight_workers_and_all_apply_it(
    fleet_of: Callable[..., Fleet], sent: Counter[str]
) -> None:
    fleet = fleet_of(8)
    for version in (1, 2, 3):
        sent.clear()
        assert fleet.send(float(version)).ok
        assert fleet.values() == [{float(version)}] * 8
        assert sent["links"] == 2 * NBYTES


@pytest.mark.usefixtures("long_timeouts")
@pytest.mark.parametrize("width", [1, 3, 7])
def test_chains_and_wide_trees_deliver_the_payload_to_all_workers(
    fleet_of: Callable[..., Fleet], sent: Counter[str], width: int
) -> None:
    fleet = fleet_of(7, fanout=width)
    sent.clear()

    assert fleet.send(2.0).ok
    assert fleet.values() == [{2.0}] * 7
    assert sent["links"] == width * NBYTES


@pytest.mark.usefixtures("long_timeouts")
def test_only_the_addressed_workers_take_part_in_the_fan_out(
    fleet_of: Callable[..., Fleet], sent: Counter[str]
) -> None:
    fleet = fleet_of(6)
    assert fleet.send(1.0).ok
    sent.clear()

    assert fleet.send(2.0, worker_ids=[1, 3, 4, 5]).ok
    assert fleet.values() == [{1.0}, {2.0}, {1.0}, {2.0}, {2.0}, {2.0}]
    assert sent["links"] == 2 * NBYTES


@pytest.mark.usefixtures("long_timeouts")
@pytest.mark.parametrize(
    "options",
    [{"key": "the fleet's own secret"}, {"verify": "layout"}, {"wire_dtype": "bfloat16"}, {"delta": True}],
    ids=lambda options: next(iter(options)),
)
def test_other_options_work_with_a_fan_out(
    fleet_of: Callable[..., Fleet], sent: Counter[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "key" in options:
        monkeypatch.setenv("WEIGHTSYNC_KEY", options["key"])
    fleet = fleet_of(5, **options)
    for value in (1.0, 2.0, 3.0):
        sent.clear()
        assert fleet.send(value).ok
        assert fleet.values() == [{value}] * 5
        assert 0 < sent["links"] <= 2 * NBYTES


@pytest.mark.usefixtures("long_timeouts")
def test_a_small_delta_travels_inline_and_a_large_one_down_the_tree(
    fleet_of: Callable[..., Fleet], sent: Counter[str]
) -> None:
    fleet = fleet_of(5, delta=True)
    assert fleet.send(1.0).ok
    half = fleet.source.get_parameter("0.weight")
    for rows in (1, 80):
        with torch.no_grad():
            half[:rows] += 1.0
        sent.clear()
        assert fleet.sender.send(timeout=PATIENCE).ok
        assert all(torch.equal(each.get_parameter("0.weight"), half) for each in fleet.models)
        assert sent["links"] < 2 * NBYTES
    assert sent["links"] > 0


@pytest.mark.parametrize("width", [0, -1, True, 2.5, "8"])
def test_a_fan_out_that_is_not_a_positive_whole_number_is_refused(width: Any) -> None:
    with pytest.raises(ConfigurationError, match="whole number of at least 1"):
        DistributedWeightSyncScheme(fanout=width)


def test_a_fan_out_over_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.schemes.distributed.require_backend", lambda backend: None)
    with pytest.raises(ConfigurationError, match="fanout=2 needs backend='gloo'"):
        DistributedWeightSyncScheme("nccl", fanout=2)


# ----------------------------------------------------------------------------------- parents that fail


@pytest.mark.usefixtures("long_timeouts")
def test_a_payload_falsified_by_a_parent_is_detected_and_sent_by_the_trainer(
    fleet_of: Callable[..., Fleet],
    sent: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "weightsync")
    fleet = fleet_of(4)
    beyond = Feed.beyond

    def other(feed: Feed, sent: int, timeout: float) -> memoryview | None:
        piece = beyond(feed, sent, timeout)
        return memoryview(bytes(len(piece))) if piece else piece

    monkeypatch.setattr(Feed, "beyond", other)
    for value in (1.0, 2.0):
        assert fleet.send(value).ok
        assert fleet.values() == [{value}] * 4
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING and "fan-out" in each.message]

    assert len(warnings) == 1
    assert "which sent other bytes" in warnings[0].message
    assert "which sent other bytes: the trainer sends it" in caplog.text


def test_an_unreachable_parent_is_not_used_as_a_parent_again(
    fleet_of: Callable[..., Fleet], sent: Counter[str]
) -> None:
    fleet = fleet_of(4)
    unreachable = f"127.0.0.1:{free_port()}"
    for branch in fleet.branches:
        branch.address = unreachable
    sent.clear()
    assert fleet.send(1.0).ok
    assert sent["links"] == 4 * NBYTES

    assert fleet.send(2.0).ok
    assert fleet.values() == [{2.0}] * 4
    assert [branch.node is None for branch in fleet.branches] == [True, False, True, False]


def test_a_worker_without_memory_refuses_and_its_children_get_the_payload_elsewhere(
    fleet_of: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = fleet_of(4, fanout=1)
    first = fleet.receivers[0]
    find, lock = arriving.ReceiveBuffers.find, threading.Lock()
    refused: list[int] = []

    def none_left_once(buffers: Any, nbytes: int) -> memoryview:
        with lock:
            if not refused:
                refused.append(nbytes)
                raise arriving.NoRoom(f"No memory for {nbytes} bytes.")
        return find(buffers, nbytes)

    monkeypatch.setattr(arriving.ReceiveBuffers, "find", none_left_once)
    report = fleet.send(2.0, on_failure="report")
    kinds = sorted(outcome.kind.value for outcome in report.outcomes.values())

    assert kinds == ["applied"] * 3 + ["refused"]
    assert first is fleet.receivers[0]
    assert fleet.send(3.0).ok
    assert fleet.values() == [{3.0}] * 4


# ----------------------------------------------------------------------------------------- superseded, closed


def test_versions_superseded_in_transit_are_followed_by_the_newest_and_unpinned(
    fleet_of: Callable[..., Fleet], buffers: list[Buffer]
) -> None:
    fleet = fleet_of(6)
    for value in range(1, 8):
        filled(fleet.source, float(value))
        fleet.sender.send_async(on_pending="supersede")
    assert fleet.sender.wait_async(timeout=PATIENCE).ok
    assert fleet.values() == [{7.0}] * 6
    assert fleet.send(8.0).ok

    assert not any(each.pinned for each in buffers if each is not buffers[-1])


def test_close_leaves_no_thread_and_no_descriptor(store: Any) -> None:
    gc.collect()
    before, threads = len(_sockets()), set(threading.enumerate())
    for _ in range(2):
        fleet = Fleet(store, 5)
        assert fleet.send(1.0).ok
        fleet.close()
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)  # as in tests/conftest.py

    assert not set(threading.enumerate()) - threads
    until = time.monotonic() + 10
    while len(_sockets()) > before and time.monotonic() < until:
        gc.collect()  # torch closes a connection with the last reference to it
        time.sleep(0.05)
    assert len(_sockets()) <= before


def test_a_trainer_that_closes_during_a_payload_ends_all_its_links(store: Any) -> None:
    fleet = Fleet(store, 5)
    filled(fleet.source, 2.0)
    fleet.sender.send_async()
    fleet.scheme.close()
    fleet._over.set()
    for thread in fleet._threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    fleet.close()

    assert all(each in ({0.0}, {2.0}) for each in fleet.values())


def _sockets() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [name for name in found if name.startswith("socket:")]
