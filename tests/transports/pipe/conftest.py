"""Fixtures of the tests of links."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.forkserver import _forkserver
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path

import pytest

from weightsync.engine import recorder
from weightsync.transports.pipe.link import PipeLink

Pair = tuple[PipeLink, PipeLink]


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """Check that each test closes all descriptors that it opens."""
    before = descriptors()
    yield
    # Ray, if this process is connected to a cluster, opens and closes a few descriptors meanwhile.
    given_up = time.monotonic() + 10
    while set(descriptors()) - set(before) and time.monotonic() < given_up:
        gc.collect()
        time.sleep(0.01)

    assert {fd: name for fd, name in descriptors().items() if fd not in before} == {}


def descriptors() -> dict[int, str]:
    """The open descriptors of this process, except for those of multiprocessing's helpers and of the test's trace."""
    helpers = {_forkserver._forkserver_alive_fd, _resource_tracker._fd}
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return {fd: name for fd, name in found.items() if fd not in helpers and not Path(name).match(recorder.PATTERN)}


@pytest.fixture
def linked() -> Iterator[Callable[..., Pair]]:
    """A function that makes two links over one pipe. They are closed after the test."""
    links: list[PipeLink] = []

    def link_both(
        model_id: str = "policy", ends: tuple[Connection, Connection] | None = None, **options: object
    ) -> Pair:
        first, second = ends or multiprocessing.Pipe()
        pair = (
            PipeLink(first, model_id, peer="worker 0", **options),
            PipeLink(second, model_id, peer="the trainer", **options),
        )
        links.extend(pair)
        return pair

    yield link_both
    for link in links:
        link.close()
