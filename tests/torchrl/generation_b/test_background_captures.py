"""A worker that captures CUDA graphs while its background reader receives: each waits for the other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from duo import Duo, beside
from fake_device import FakeDevice, fake_device
from fleet import PATIENCE, constants, filled

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from weightsync.weights.device import captures, cuda, registry
from weightsync.weights.device.captures import Captures

#: Seconds in which a thread that does not wait has certainly finished.
A_WHILE = 0.3


class Graph:
    """A CUDA graph that captures nothing, and fails on request."""

    def __init__(self) -> None:
        self.fails: set[str] = set()

    def capture_begin(self) -> None:
        self._fail_on_request("begin")

    def capture_end(self) -> None:
        self._fail_on_request("end")

    def _fail_on_request(self, what: str) -> None:
        if what in self.fails:
            raise RuntimeError(f"capture_{what}")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """The captures of this process, in which CUDA counts as initialized."""
    kind = type("Own", (Graph,), {"capture_begin": Graph.capture_begin, "capture_end": Graph.capture_end})
    made = Captures(kind)
    for module in (registry, cuda):
        monkeypatch.setattr(module, "captures", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


@pytest.fixture
def duo() -> Iterator[Duo]:
    with fake_device():
        made = Duo(SharedMemWeightSyncScheme)
        made.connect()
        with contextlib.closing(made.sending):
            yield made
        made.end()


def graph_of(made: Captures) -> Any:
    return made._class()


def capture(graph: Any) -> None:
    graph.capture_begin()
    graph.capture_end()


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads that have called the fake device."""
    found: set[int] = set()

    def noting(method: Any) -> Any:
        return lambda *given, **named: found.add(threading.get_ident()) or method(*given, **named)

    for name in ("allocate", "open", "launch", "register", "finish", "synchronize"):
        monkeypatch.setattr(FakeDevice, name, noting(getattr(FakeDevice, name)))
    return found


def test_a_background_reader_applies_no_version_while_another_thread_captures(
    duo: Duo, graphs: Captures, callers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "PATIENCE", PATIENCE)
    assert duo.send(2.0, timeout=PATIENCE).ok
    graph = graph_of(graphs)
    with graphs.apart():  # the first call wraps the methods of the class
        pass
    graph.capture_begin()
    sender, trainer = duo.sending.get_sender(), threading.get_ident()
    callers.clear()
    sender.send_async(filled(duo.source, 3.0))
    time.sleep(A_WHILE)
    assert (duo.receiving.get_receiver().version, constants(duo.model)) == (sender.version - 1, {2.0})
    assert callers == {trainer}

    graph.capture_end()
    assert sender.wait_async(timeout=PATIENCE).ok
    assert constants(duo.model) == {3.0}
    assert callers > {trainer}


def test_a_forward_swaps_no_version_while_another_thread_captures(
    duo: Duo, graphs: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "PATIENCE", PATIENCE)
    assert duo.send(2.0, timeout=PATIENCE).ok
    receiver, sender, graph = duo.receiving.get_receiver(), duo.sending.get_sender(), graph_of(graphs)
    with receiver.serving():  # the version is staged here, but swapped only after the block
        sender.send_async(filled(duo.source, 3.0))
        while receiver._served.staged is None:
            time.sleep(0.001)
        graph.capture_begin()
    with beside(duo.model) as seen:
        pass
    assert seen == [{2.0}]

    graph.capture_end()
    assert sender.wait_async(timeout=PATIENCE).ok
    assert constants(duo.model) == {3.0}


class CapturingRelay:
    """A relay. While it passes weights on to its workers, another thread begins a capture."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.captured, self.too_early = graph, threading.Event(), False
        self.capturing = threading.Thread(target=lambda: (capture(graph), self.captured.set()))

    def update_policy_weights_(self, *, model_id: str, policy_or_weights: Any) -> None:
        del model_id, policy_or_weights
        if not self.capturing.ident:
            self.capturing.start()
            self.too_early = self.captured.wait(A_WHILE)


def test_no_other_thread_captures_while_a_relay_passes_weights_on_to_its_workers(graphs: Captures) -> None:
    passing = CapturingRelay(graph_of(graphs))
    duo = Duo(MultiProcessWeightSyncScheme)
    duo.connect(context=passing)
    try:
        assert passing.captured.wait(PATIENCE)
        assert not passing.too_early
        assert duo.send(2.0, timeout=PATIENCE).ok
    finally:
        duo.end()


def test_a_capture_waits_until_no_other_thread_receives(graphs: Captures) -> None:
    graph, ended = graph_of(graphs), threading.Event()
    with contextlib.ExitStack() as receiving:
        receiving.enter_context(graphs.apart())
        with beside(lambda: (capture(graph), ended.set())):
            assert not ended.wait(A_WHILE)
            receiving.close()
    assert ended.is_set()


def test_back_to_back_captures_let_a_waiting_thread_receive_between_them(graphs: Captures) -> None:
    graph, received = graph_of(graphs), threading.Event()
    with graphs.apart():
        pass
    graph.capture_begin()

    def receive() -> None:
        with graphs.apart():
            time.sleep(A_WHILE)
            received.set()

    with beside(receive):
        while not graphs._apart:
            time.sleep(0)
        graph.capture_end()
        graph.capture_begin()
        assert received.is_set()
        graph.capture_end()


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_failed_capture_does_not_block_other_threads(graphs: Captures, fails: str) -> None:
    graph = graph_of(graphs)
    with graphs.apart():  # does not keep this thread itself from capturing
        capture(graph)
    graph.fails.add(fails)
    with pytest.raises(RuntimeError, match=f"capture_{fails}"):
        capture(graph)

    assert not graphs.under_way


def test_a_capture_that_never_ends_blocks_other_threads_for_a_limited_time(
    graphs: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "PATIENCE", 0.01)
    with graphs.apart():
        pass
    graph_of(graphs).capture_begin()
    with graphs.apart(), beside(lambda: graph_of(graphs).capture_begin()):
        pass
