"""Sixty-four worker processes on one host, over shared memory: the versions they get and the resources they use."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from fleet import PATIENCE, Crew, Worker, WorkerSetup, constants, descriptors, join, large, segments, serve_until_gone

from weightsync import OutcomeKind, SharedMemWeightSyncScheme

WORKERS = 64
#: For each worker, in the trainer: the link's copy of the pipe, a waker, and a descriptor of the worker's process.
TRAINER_DESCRIPTORS = 3
#: In a worker: the same three for the trainer, the receiver's waker, and two slots while they are being mapped.
WORKER_DESCRIPTORS = 6


def served(setup: WorkerSetup, version: int) -> tuple[int, set[float], int, int, int]:
    """The version and values served, and the numbers of threads, descriptors and slots of this process."""
    while (setup.receiver.version or 0) < version:
        assert setup.receiver.receive(timeout=PATIENCE)
    threads = len(list(Path("/proc/self/task").iterdir()))
    return setup.receiver.version, constants(setup.model), threads, len(descriptors()), segments()


def resources(_: WorkerSetup) -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(descriptors())


@pytest.fixture
def workers(crew: Crew) -> list[Worker]:
    return crew.start(SharedMemWeightSyncScheme(), WORKERS)


@pytest.mark.slow
def test_sixty_four_workers_on_one_host_get_every_version_in_the_same_two_slots(workers: list[Worker]) -> None:
    before = [worker.do(resources) for worker in workers]
    gc.collect()  # close the descriptors of earlier tests now, rather than at any time
    ours, threads = len(descriptors()), len(list(Path("/proc/self/task").iterdir()))
    scheme = SharedMemWeightSyncScheme()
    model = large(0.0)
    with scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe for worker in workers], model=model)
        for worker in workers:
            worker.do(join, large)
        sender = scheme.get_sender()
        for version in range(1, 5):
            for worker in workers:
                worker.tell(served, version)
            report = sender.send(large(float(version)), timeout=PATIENCE)
            assert report.of(OutcomeKind.APPLIED) == tuple(range(WORKERS))
            found = [worker.answer() for worker in workers]
            assert {(each[0], *each[1]) for each in found} == {(version, float(version))}

        opened = [after[3] - was[1] for after, was in zip(found, before, strict=True)]
        assert {after[2] - was[0] for after, was in zip(found, before, strict=True)} == {0}
        assert max(opened) <= WORKER_DESCRIPTORS
        assert {each[4] for each in found} | {segments()} == {2}
        assert TRAINER_DESCRIPTORS * WORKERS <= len(descriptors()) - ours <= TRAINER_DESCRIPTORS * WORKERS + 8
        assert len(list(Path("/proc/self/task").iterdir())) == threads

        for worker in workers[1:]:
            worker.tell(serve_until_gone)
        workers[0].kill()
        report = sender.send(large(9.0), timeout=PATIENCE, on_failure="report")
        assert report.of(OutcomeKind.LOST) == (0,)
        assert report.of(OutcomeKind.APPLIED) == tuple(range(1, WORKERS))
    assert all("goodbye" in worker.answer() for worker in workers[1:])
