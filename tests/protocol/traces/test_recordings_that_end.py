"""A recording may end before its run, with its block or because the disk is full. The run goes on.

What was recorded until then is still verified.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
from pathlib import Path

import pytest
from recorded import Cast, lines_of, model, play, recorded, write

import weightsync
from weightsync.engine import recorder as tracing
from weightsync.verify import verify


def _two_recordings(tmp_path: Path, role: str) -> tuple[Path, Path]:
    """Record a run of three versions, of which the recording of one role ends after the first version.

    Returns the folder of this recording, and that of the other role's.
    """
    short, whole = tmp_path / "short", tmp_path / "whole"
    cast = Cast.__new__(Cast)
    cast.scheme = weightsync.MultiProcessWeightSyncScheme()
    with tracing.record(whole):
        if role == "sender":
            cast.workers = {0: cast.worker()}
        else:
            cast.sender = weightsync.WeightSender(cast.scheme)
        with tracing.record(short):
            if role == "sender":
                cast.sender = weightsync.WeightSender(cast.scheme)
            else:
                cast.workers = {0: cast.worker()}
            cast.create_link(cast.sender, 0)
            _send(cast, 1.0)
        _send(cast, 2.0)
        _send(cast, 3.0)
        cast.close()
    return short, whole


def _send(cast: Cast, value: float) -> None:
    cast.sender.send_async(model(value))
    cast.receive()
    assert cast.sender.wait_async().ok


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_messages_after_the_end_of_a_recording_are_counted_and_not_refused(tmp_path: Path, role: str) -> None:
    verdict = verify(_two_recordings(tmp_path, role))

    assert verdict.findings == ()
    [run] = verdict.runs
    assert len(run.machines) == 2
    assert len(run.unseen) == 2


@pytest.mark.parametrize("role", ["sender", "receiver"])
def test_messages_missing_before_the_end_of_a_recording_are_refused(tmp_path: Path, role: str) -> None:
    short, whole = _two_recordings(tmp_path, role)
    [file] = short.glob(tracing.PATTERN)
    lines = lines_of(file)
    said = next(at for at, line in enumerate(lines) if line.get("message", {}).get("is") in ("Update", "Ack"))
    write(file, [*lines[: said if role == "sender" else said - 2], lines[-1]])

    verdict = verify([short, whole])

    assert {found.rule for found in verdict.findings} >= {"the network"}


def test_a_line_after_the_end_of_a_recording_is_refused(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    lines = lines_of(file)
    write(file, [*lines[:-2], lines[-1], lines[-2]])

    [found, *_] = verify([tmp_path]).findings

    assert found.line.number == len(lines)
    assert "the recording had ended before it" in found.what


def _play_on_a_full_disk(folder: Path, room: int) -> None:
    logging.getLogger("weightsync").addHandler(logging.FileHandler(folder / "log", delay=True))
    with tracing.record(folder):
        # Acts like a full disk: bytes that do not fit are not written, and then there is an error.
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        play()


@pytest.mark.parametrize("room", [10, 400, 1000, 1001, 1800, 5000, 20_000])
def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path, room: int) -> None:
    child = multiprocessing.get_context("fork").Process(target=_play_on_a_full_disk, args=(tmp_path, room))
    child.start()
    child.join(60)

    assert child.exitcode == 0
    [file] = tmp_path.glob(tracing.PATTERN)
    assert file.stat().st_size <= room
    if room > 500:
        assert lines_of(file)[-1]["what"] == "end"
        assert verify([tmp_path]).findings == ()
    if room > 1500:
        assert f"Recording to {file} ended after" in (tmp_path / "log").read_text()


def test_a_recording_that_has_ended_keeps_no_later_events(tmp_path: Path) -> None:
    with tracing.record(tmp_path) as recorder:
        cast = Cast()
        _send(cast, 1.0)
    _send(cast, 2.0)
    cast.close()

    assert not recorder._waiting
    assert os.environ.get(tracing.ENVIRONMENT) != str(tmp_path)
