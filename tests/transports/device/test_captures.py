"""Captures of CUDA graphs in one thread while other threads search for graphs or release memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from test_cuda import Capturing, Driver, Watcher, no_gpu  # noqa: F401 - no_gpu is for all tests here

from weightsync.weights.device import captures as module
from weightsync.weights.device import cuda
from weightsync.weights.device.captures import Captures

#: Seconds. Only a failing test waits this long.
PATIENCE = 30.0


def test_memory_dropped_while_another_thread_captures_is_released_when_the_capture_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Graph(Capturing):
        def capture_begin(self) -> None:
            """Do nothing."""

    driver, captures, graph = cast(Any, Driver()), Captures(Graph, after=cuda.release_pending), Graph()
    monkeypatch.setattr(cuda, "_unreleased", deque())
    monkeypatch.setattr(cuda, "captures", lambda: captures)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: driver.calls.append("wait"))
    mapped = cuda._Mapping(driver, 0, 4096, 100)  # no watcher, and no thread in `apart`
    with ThreadPoolExecutor(1) as other:
        other.submit(graph.capture_begin).result()
        del mapped
        assert driver.calls == []
        other.submit(graph.capture_end).result()
    assert driver.calls == ["wait", "unmap 100"]


class Inspected(Capturing):
    """A graph of torch 2.15, where ``capture_end_pre`` ends the capture before ``capture_end`` builds the graph."""

    def capture_begin(self) -> None:
        """Do nothing."""

    def capture_end_pre(self) -> None:
        """Do nothing."""

    def capture_end(self) -> None:
        self.capture_end_pre()


@pytest.mark.parametrize("end", ["capture_end", "capture_end_pre"])
def test_a_capture_ends_by_either_of_torchs_methods_and_ends_no_other_capture(end: str) -> None:
    kind = type("Graph", (Inspected,), {})
    captures, one, other = Captures(kind), kind(), kind()
    captures.know()
    one.capture_begin()
    other.capture_begin()
    getattr(one, end)()
    assert captures.under_way
    getattr(other, end)()
    assert not captures.under_way


def test_the_search_for_graphs_does_not_disturb_a_thread_that_builds_a_tuple() -> None:
    class WaitingMetaclass(type):
        """A metaclass of graphs whose first subclass check waits until the other thread has finished its tuple."""

        def __subclasscheck__(cls, other: type) -> bool:
            if not go_on.is_set():
                go_on.set()
                made.exception(PATIENCE)
            return super().__subclasscheck__(other)

    def numbers() -> Iterator[int]:
        begun.set()
        yield 47
        go_on.wait(PATIENCE)

    begun, go_on = threading.Event(), threading.Event()
    graph_class = WaitingMetaclass("Graph", (Capturing,), {"capture_begin": None})
    with ThreadPoolExecutor(1) as other:
        made = other.submit(lambda: tuple(numbers()))
        assert begun.wait(PATIENCE)
        assert not Captures(graph_class).watch(Watcher())
        assert made.result() == (47,)


class Plain(Capturing):
    """A graph whose capture does nothing."""

    def capture_begin(self) -> None:
        """Do nothing."""


def test_a_capture_that_outlasts_another_threads_wait_counts_as_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    kind = type("Graph", (Plain,), {})
    captures, graph = Captures(kind), kind()
    captures.know()
    graph.capture_begin()
    with captures.apart():
        assert not captures.under_way


def test_a_capture_waits_for_another_thread_inside_apart_but_not_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", PATIENCE)
    kind = type("Graph", (Plain,), {})
    captures, own, other = Captures(kind), kind(), kind()
    with ThreadPoolExecutor(1) as thread:
        with captures.apart():
            begun = thread.submit(other.capture_begin)
            own.capture_begin()  # returns, although this thread is in `apart`
            own.capture_end()
            assert not begun.done()
        begun.result(PATIENCE / 2)
    assert captures.under_way
