"""Ends of every kind, of worker and trainer: the other side learns of it and continues, and nothing is left behind."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import (
    PATIENCE,
    Crew,
    Pair,
    Worker,
    WorkerSetup,
    command,
    constants,
    descriptors,
    filled,
    join,
    large,
    leave,
    mapped,
    publish,
    receive,
    segments,
    serve,
    serve_until_gone,
    shows,
    small,
)
from pools import statistics
from torch import nn

from weightsync import AckTimeoutError, OutcomeKind, SharedMemWeightSyncScheme, WeightSender, WorkerLostError

SIZES = {"inline": small, "segment": large}


@pytest.fixture(params=list(SIZES.values()), ids=list(SIZES))
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def trained(scheme_class: Any, crew: Crew, make: Any, count: int = 2) -> tuple[Any, WeightSender, list[Worker]]:
    """A trainer in this process, and workers in child processes that serve version 1."""
    workers = crew.start(scheme_class(), count)
    scheme = scheme_class()
    scheme.init_on_sender("policy", pipes=[worker.pipe for worker in workers], model=make(1.0))
    for worker in workers:
        worker.do(join, make)
        worker.tell(receive)
    assert scheme.get_sender().send(timeout=PATIENCE).ok
    assert all(worker.answer() for worker in workers)
    return scheme, scheme.get_sender(), workers


# ---------------------------------------------------------------------------------------- a worker ends


def raise_at_exit(setup: WorkerSetup) -> None:
    atexit.register(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("how", "make"), [("close", small), ("exit", large), ("exception at exit", small), ("kill", large)]
)
def test_the_end_of_one_worker_does_not_affect_another(scheme_class: Any, crew: Crew, make: Any, how: str) -> None:
    scheme, sender, (ending, staying) = trained(scheme_class, crew, make)
    before = staying.do(shows)
    if how == "close":
        ending.do(leave)
    elif how == "exception at exit":
        ending.do(raise_at_exit)
    if how == "kill":
        ending.kill()
    else:
        ending.end()

    assert staying.do(shows) == before
    staying.tell(receive)
    report = sender.send(timeout=PATIENCE, on_failure="report")
    assert staying.answer()
    assert report[1].kind is OutcomeKind.APPLIED
    assert 0 not in report or report[0].kind is OutcomeKind.LOST
    scheme.close()


@pytest.mark.parametrize(("seed", "kills"), [(11, 12), pytest.param(12, 50, marks=pytest.mark.slow)])
def test_a_worker_killed_at_a_random_moment_is_reported_lost_or_applied(
    scheme_class: Any, crew: Crew, seed: int, kills: int
) -> None:
    draw = random.Random(seed)
    source = filled(nn.Linear(512, 512), 0.0)
    (survivor,) = crew.start(scheme_class())
    survivor.do(join, five_hundred)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[survivor.pipe], model=source)
        sender = scheme.get_sender()
        seen = set()
        for _ in range(kills):
            (victim,) = crew.start(scheme_class())
            sender.add_worker(1, victim.pipe)
            victim.do(join, five_hundred)
            version = sender.version + 1
            victim.tell(serve, version)
            survivor.tell(serve, version)
            filled(source, float(version))
            killing = threading.Timer(draw.uniform(0, 0.004), victim.process.kill)
            killing.start()
            report = sender.send(timeout=PATIENCE, on_failure="report")
            killing.join(PATIENCE)
            victim.process.join(PATIENCE)

            assert survivor.answer() == version
            assert report[0].kind is OutcomeKind.APPLIED
            assert report[1].kind in (OutcomeKind.LOST, OutcomeKind.APPLIED)
            seen.add(report[1].kind)
            if report[1].kind is OutcomeKind.APPLIED:
                survivor.tell(serve, version + 1)
                report = sender.send(timeout=PATIENCE, on_failure="report")
                assert survivor.answer() == version + 1
                assert (report[0].kind, report[1].kind) == (OutcomeKind.APPLIED, OutcomeKind.LOST)
            assert survivor.do(shows)[2] == constants(source)
        assert statistics(sender._packer._pool).buffers <= 4

    assert OutcomeKind.LOST in seen


def five_hundred() -> nn.Module:
    return filled(nn.Linear(512, 512), -1.0)


# --------------------------------------------------------------------------------------- the trainer ends


def exits(setup: WorkerSetup) -> None:
    """End the process without closing anything."""


@pytest.mark.parametrize(
    ("how", "make"), [("close", small), ("exit", large), ("exception at exit", small), ("kill", large)]
)
def test_when_the_trainer_ends_workers_are_told_and_keep_their_weights(
    scheme_class: Any, crew: Crew, make: Any, how: str
) -> None:
    workers = crew.start(scheme_class(), 2)
    trainer = crew.lead(scheme_class(), workers)
    trainer.do(command, make, 5.0)
    for worker in workers:
        worker.do(join, make)
        worker.tell(receive)
    assert trainer.do(publish) == 1
    assert [worker.answer() for worker in workers] == [True, True]
    for worker in workers:
        worker.tell(serve_until_gone)
    if how == "kill":
        trainer.kill()
    elif how == "close":
        trainer.do(close_scheme)
    else:
        if how == "exception at exit":
            trainer.do(raise_at_exit)
        trainer.end()

    for worker in workers:
        assert "no sender any more" in worker.answer()
        assert worker.do(shows)[:3] == ("uninitialized", 1, {5.0})
        worker.end()
        assert not worker.process.is_alive()


def close_scheme(setup: WorkerSetup) -> None:
    setup.scheme.close()


def test_killing_all_processes_leaves_no_descriptors_or_shared_memory_names(scheme_class: Any, crew: Crew) -> None:
    """Neither descriptors nor, by the leak check of tests/conftest.py, names in shared memory are left."""
    workers = crew.start(scheme_class(), 2)
    trainer = crew.lead(scheme_class(), workers)
    trainer.do(command, large)
    for worker in workers:
        worker.do(join, large)
        worker.tell(serve, 3)
    assert trainer.do(publish, 3) == 3
    assert segments(trainer.pid) >= 1
    pids = [process.pid for process in (trainer, *workers)]
    for process in (trainer, *workers):
        process.process.kill()
    for process in (trainer, *workers):
        process.process.join(PATIENCE)

    assert not any(Path(f"/proc/{pid}/fd").exists() and list_or_nothing(pid) for pid in pids)


def list_or_nothing(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []


# --------------------------------------------------------------------------------- descriptors and memory


def test_fifty_closed_pairs_leave_no_descriptors_or_segments(scheme_class: Any, make: Any) -> None:
    Pair(scheme_class, model=make).close()
    gc.collect()
    before, held = Counter(descriptors().values()), (segments(), mapped())
    for _ in range(50):
        pair = Pair(scheme_class, model=make)
        pair.sync()
        pair.sync()
        pair.close()

    del pair
    gc.collect()
    # Ray, if this process is connected to a cluster, opens and closes a few descriptors meanwhile.
    assert (Counter(descriptors().values()) - before).total() < 10
    assert (segments(), mapped()) == held


@pytest.mark.filterwarnings("ignore")
def test_fifty_unclosed_pairs_leave_no_descriptors_or_mappings(scheme_class: Any, make: Any) -> None:
    gc.collect()
    before, held = Counter(descriptors().values()), mapped()
    for _ in range(50):
        Pair(scheme_class, model=make).sync()
    gc.collect()

    assert (Counter(descriptors().values()) - before).total() < 10  # see above
    assert mapped() == held


def test_the_number_of_segments_stays_bounded_over_200_sends(scheme_class: Any, crew: Crew) -> None:
    gc.collect()  # errors caught by earlier tests keep frames, and thereby segments, alive
    before = segments()
    scheme, sender, workers = trained(scheme_class, crew, large)
    for worker in workers:
        worker.tell(serve, 201)
    held = set()
    for _ in range(200):
        assert sender.send(timeout=PATIENCE).ok
        held.add((segments() - before, statistics(sender._packer._pool).segments))
    assert [worker.answer() for worker in workers] == [201, 201]

    assert max(fds for fds, _ in held) <= 4
    assert max(slots for _, slots in held) <= 4
    assert all(mapped(worker.pid) <= 4 for worker in workers)
    scheme.close()


def test_a_stopped_worker_pins_a_bounded_number_of_slots_over_many_sends(scheme_class: Any, crew: Crew) -> None:
    gc.collect()
    before = segments()
    scheme, sender, (awake, asleep) = trained(scheme_class, crew, large)
    asleep.stop()
    held = []
    for number in range(2, 42):
        awake.tell(receive)
        with pytest.raises(AckTimeoutError) as timed_out:
            sender.send(timeout=0.0 if number > 5 else 0.02)
        assert 1 in timed_out.value.pending
        assert awake.answer()
        sender.abandon()
        held.append(segments())
    asleep.tell(serve, 41)
    asleep.resume()

    assert max(held) - before <= 6, (before, held)
    while not asleep.answered():
        sender.poll()
    assert asleep.answer() == 41
    for worker in (awake, asleep):
        worker.tell(serve, 42)
    assert sender.send(timeout=PATIENCE).ok
    assert asleep.answer() == awake.answer() == 42
    scheme.close()


# --------------------------------------------------------------------------------------------- torn reads


class Probe(nn.Module):
    """A module whose forward reads every tensor: the parameters and a buffer."""

    def __init__(self, fill: float = -1.0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((64, 97), fill)) for _ in range(12))
        self.register_buffer("note", torch.full((3,), fill))

    def forward(self) -> set[float]:
        return {float(edge) for tensor in [*self.weights, self.note] for edge in (tensor.min(), tensor.max())}


def act(setup: WorkerSetup, last: int) -> tuple[int, int, list[Any]]:
    """Act until the last version is served. Returns the numbers of forwards and of versions, and the torn reads."""
    forwards, versions, torn, receiver = 0, 0, [], setup.receiver
    before = 0
    while before < last:
        versions += receiver.receive(timeout=0.001)
        with receiver.serving() as version:
            if version is None:
                continue
            for _ in range(2):
                seen = setup.model()
                forwards += 1
                if seen != {float(version)} or version != receiver.version or version < before:
                    torn.append((version, before, seen))
            before = version
    return forwards, versions, torn


@pytest.mark.parametrize("pace", ["send", "supersede"])
def test_no_forward_sees_a_torn_model(scheme_class: Any, crew: Crew, pace: str) -> None:
    last = 250
    workers = crew.start(scheme_class(), 2)
    source = Probe(0.0)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe for worker in workers], model=source)
        sender = scheme.get_sender()
        for worker in workers:
            worker.do(join, Probe)
            worker.tell(act, last)
        for version in range(1, last + 1):
            filled(source, float(version))
            if pace == "send":
                assert sender.send(timeout=PATIENCE).version == version
            else:
                sender.send_async(on_pending="supersede")
        if pace == "supersede":
            assert sender.wait_async(timeout=PATIENCE).ok
        for worker in workers:
            forwards, versions, torn = worker.answer()
            assert torn == []
            assert forwards >= versions > 0


def test_a_closed_sender_holds_no_segment_even_if_the_user_keeps_a_dead_workers_pipe() -> None:
    """The stored error of the broken pipe used to keep alive the frames that hold the weights."""
    gc.collect()
    before, (ours, theirs) = segments(), multiprocessing.Pipe()
    sender = WeightSender(SharedMemWeightSyncScheme())
    sender.add_worker(0, ours)
    theirs.close()
    with pytest.raises(WorkerLostError):
        sender.send(filled(large(), 1.0), timeout=PATIENCE)
    sender.close()
    gc.collect()

    assert segments() == before
    ours.close()
