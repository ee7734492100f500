"""A process without free file descriptors raises a typed error, and continues once some are free."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from descriptor_limit import limit_descriptors
from fleet import PATIENCE, Pair, small

from weightsync import ConfigurationError, TransportError, WeightSyncError
from weightsync.engine import recorder


@pytest.mark.parametrize("left", [0, 1])
def test_add_worker_without_free_descriptors_raises_and_can_be_repeated(pair: Pair, left: int) -> None:
    assert pair.sync().ok
    ours, theirs = multiprocessing.Pipe()
    with limit_descriptors(left), pytest.raises(TransportError, match="Too many open files"):
        pair.sender.add_worker(1, ours)
    assert pair.sender.worker_ids == (0,)
    pair.sender.add_worker(1, ours)

    assert pair.sender.worker_ids == (0, 1)
    pair.sender.remove_worker(1)
    theirs.close()


@pytest.mark.parametrize("left", range(3))
def test_initialising_a_scheme_without_free_descriptors_raises_weightsync_error(scheme_class: Any, left: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as scheme, limit_descriptors(left), pytest.raises(WeightSyncError, match="Too many open files"):
        _create_link(scheme, ours)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("watched", [False, True], ids=["", "with events"])
@pytest.mark.parametrize("left", [2, 3])
def test_a_failed_init_on_sender_can_be_repeated_while_its_error_is_handled(
    scheme_class: Any, left: int, watched: bool
) -> None:
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(3)), strict=True)
    with contextlib.ExitStack() as stack:
        scheme, *workers = [stack.enter_context(scheme_class()) for _ in range(4)]
        if watched:
            scheme.on_event(print)
        with pytest.raises(TransportError, match="Too many open files") as caught, limit_descriptors(left):
            scheme.init_on_sender("policy", pipes=ours, model=small(1.0))
        scheme.init_on_sender("policy", pipes=ours, model=small(1.0))
        for worker, pipe in zip(workers, theirs, strict=True):
            worker.init_on_worker("policy", pipe=pipe, model=small())
        scheme.get_sender().send_async()
        for worker in workers:
            assert worker.get_receiver().receive(timeout=PATIENCE)

        assert scheme.get_sender().wait_async(timeout=PATIENCE).ok
        assert caught.traceback


def _create_link(scheme: Any, pipe: Any) -> None:
    scheme.init_on_sender("policy", pipes=[pipe], model=small())
    scheme.get_sender().poll()


@pytest.mark.parametrize("how", ["a file", "a file above it"])
def test_a_trace_folder_that_cannot_be_used_is_a_configuration_error(
    scheme_class: Any, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    folder = tmp_path / "taken" if how == "a file" else tmp_path / "taken" / "traces"
    ours, theirs = multiprocessing.Pipe()
    with (
        recorder.record(folder),
        scheme_class() as scheme,
        pytest.raises(ConfigurationError, match=r"Nothing can be recorded to .*taken.*: \w+"),
    ):
        scheme.init_on_sender("policy", pipes=[ours], model=small())
    for end in (ours, theirs):
        end.close()
