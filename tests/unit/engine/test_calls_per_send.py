"""The cost of a small send in Python function calls, which must not exceed that stored in `calls_per_send.toml`.

A second measure: how many files of the package an update passes at both ends, and how often it crosses between files.

`sys.setprofile` counts the calls, by ``call`` events alone: calls of C functions are not counted, resumed generators
are. Trainer and workers share this process, so that the counts do not depend on which of them is faster. After an
intended change, ``PYTHONPATH=tests python tests/unit/engine/test_calls_per_send.py`` rewrites the stored counts.
"""

from __future__ import annotations

import multiprocessing
import tomllib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair, note_calls

import weightsync
from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

PACKAGE = Path(weightsync.__file__).parent
#: The limits for one update over pipes, trainer and worker together: files passed, and calls between files.
MOST_FILES, MOST_CROSSINGS = 32, 165
STORED = Path(__file__).with_name("calls_per_send.toml")
#: The factor by which a count may exceed the stored one: it varies with releases of Python and of the libraries.
TOLERANCE = 1.1
#: Elements of the model's only parameter. The payload travels inline, or in a slot.
SIZES = {"inline": 4, "slot": 64 * 1024}
SCHEMES = {"pipes": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme}
#: How many sends of one number are measured.
SENDS = 20
CASES = [f"{scheme}-{size}-{workers}" for scheme in SCHEMES for size in SIZES for workers in (1, 2)]


def counted(call: Callable[[], object]) -> int:
    """The number of Python functions that are called during this call, itself included."""
    return sum(passed(call).values())


def passed(call: Callable[[], object]) -> Counter[tuple[str, str]]:
    """The number of calls by pair of files: the file of the caller, and that of the called function."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType) -> None:
        caller = frame.f_back
        calls[caller.f_code.co_filename if caller else "", frame.f_code.co_filename] += 1

    note_calls(call, note)
    return calls


def update_over_a_pipe(size: int) -> Counter[tuple[str, str]]:
    """The calls of one update at both ends of a warmed-up pipe: dispatched, applied, acked and reported."""
    trainer, worker, (ours, theirs) = SCHEMES["pipes"](), SCHEMES["pipes"](), multiprocessing.Pipe()
    try:
        trainer.init_on_sender("policy", pipes=[ours], model=model(size))
        worker.init_on_worker("policy", pipe=theirs, model=model(size))
        sender, receiver = trainer.get_sender(), worker.get_receiver()
        for _ in range(5):
            _sent(sender, [receiver])
        calls = passed(sender.send_async) + passed(lambda: receiver.receive(0.0))
        return calls + passed(sender.wait_async)
    finally:
        for each in (trainer, worker, ours, theirs):
            each.close()


def counts(case: str) -> dict[str, int]:
    """The calls of one warmed-up send in the trainer, and of one `receive` in a worker."""
    scheme, size, workers = case.split("-")
    pairs = [multiprocessing.Pipe() for _ in range(int(workers))]
    trainer = SCHEMES[scheme]()
    receiving = [SCHEMES[scheme]() for _ in pairs]
    try:
        trainer.init_on_sender("policy", pipes=[ours for ours, _ in pairs], model=model(SIZES[size]))
        for worker, (_, theirs) in zip(receiving, pairs, strict=True):
            worker.init_on_worker("policy", pipe=theirs, model=model(SIZES[size]))
        sender, receivers = trainer.get_sender(), [worker.get_receiver() for worker in receiving]
        found = [_sent(sender, receivers) for _ in range(8)]
    finally:
        for each in (trainer, *receiving):
            each.close()
        for pair in pairs:
            for end in pair:
                end.close()
    in_trainer, in_worker = zip(*found[3:], strict=True)
    return {"trainer": min(in_trainer), "worker": min(in_worker)}


def _sent(sender: Any, receivers: list[Any]) -> tuple[int, int]:
    """Send to all workers. Returns the calls in the trainer and in the busiest worker."""
    in_trainer = counted(sender.send_async)
    in_workers = [counted(lambda receiver=receiver: receiver.receive(0.0)) for receiver in receivers]
    while any(receiver.version != sender.version for receiver in receivers):  # handshakes arrive first
        for receiver in receivers:
            receiver.receive(0.0)
        sender.poll()
    report = None

    def wait() -> None:
        nonlocal report
        report = sender.wait_async()

    in_trainer += counted(wait)
    assert report is not None
    assert report.ok
    return in_trainer, max(in_workers)


def model(size: int) -> torch.nn.Module:
    return torch.nn.Linear(size, 1, bias=False)


@pytest.mark.untraced("a recorded driver calls more")
@pytest.mark.parametrize("case", CASES)
def test_a_small_send_takes_at_most_the_stored_number_of_python_calls(case: str) -> None:
    stored, found = tomllib.loads(STORED.read_text(encoding="utf-8"))[case], counts(case)

    assert {end: calls for end, calls in found.items() if calls > stored[end] * TOLERANCE} == {}


def calls_of_one_number(scheme: str, workers: int) -> tuple[float, float]:
    """The median number of calls of a whole send of one number: in the trainer, and in the busiest worker.

    The count varies: a waiting worker may have looked for the update in vain before, and one look may find two answers.
    """
    made = Pair(SCHEMES[scheme], workers, lambda value: torch.nn.ParameterDict({"number": torch.tensor([value])}))

    def received(receiver: Any) -> float:
        return median(counted(lambda: receiver.receive(PATIENCE)) for _ in range(SENDS))

    try:
        with ThreadPoolExecutor(workers) as beside:
            receiving = [beside.submit(received, receiver) for receiver in made.receivers]
            in_trainer = median(counted(made.sender.send) for _ in range(SENDS))
            return in_trainer, max(each.result() for each in receiving)
    finally:
        made.close()


@pytest.mark.untraced("a recorded driver calls more")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_send_of_one_number_takes_at_most_150_calls_and_60_for_each_further_worker(scheme: str, workers: int) -> None:
    in_trainer, in_worker = calls_of_one_number(scheme, workers)

    assert in_trainer <= 150 + 60 * (workers - 1)
    assert in_worker <= 150


@pytest.mark.untraced("a recorded driver calls more")
@pytest.mark.parametrize("size", SIZES)
def test_an_update_passes_a_bounded_number_of_files_and_calls_between_files(size: str) -> None:
    # A layout that no other test uses: equal layouts left by other tests would be compared with this one.
    calls = update_over_a_pipe(SIZES[size] + 7)
    ours = {pair: count for pair, count in calls.items() if Path(pair[1]).is_relative_to(PACKAGE)}
    crossings = {pair: n for pair, n in ours.items() if pair[0] != pair[1] and Path(pair[0]).is_relative_to(PACKAGE)}

    assert len(files := sorted({called for _, called in ours})) <= MOST_FILES, files
    assert len(files) > 20, "the update has not come through"
    assert sum(crossings.values()) <= MOST_CROSSINGS, crossings


@pytest.mark.untraced("a recorded driver calls more")
def test_another_worker_costs_the_trainer_less_than_the_first() -> None:
    one, two, three = (counts(f"pipes-inline-{workers}")["trainer"] for workers in (1, 2, 3))

    assert two - one == three - two < one


def calls_per_answer(workers: int) -> float:
    """The trainer's calls for one answer that arrives alone, averaged over all workers."""
    made = Pair(MultiProcessWeightSyncScheme, workers)
    try:
        driver = made.sender._driver
        made.sync()
        made.sender.send_async()
        driver.pump(driver.wait(0.0, driver.waker.fired))
        calls = 0
        for receiver in made.receivers:
            receiver.receive(0.0)
            calls += counted(lambda: driver.pump(driver.wait(0.0, driver.waker.fired)))
        assert made.sender.wait_async(timeout=0.0).ok
    finally:
        made.close()
    return calls / workers


@pytest.mark.untraced("a recorded driver calls more")
def test_an_answer_costs_the_trainer_about_the_same_with_any_number_of_workers() -> None:
    # Both are enough workers for mappings by worker to be trees. Up to 32 workers they are dicts, with fewer calls.
    assert calls_per_answer(72) <= 1.15 * calls_per_answer(36)


def test_calls_are_counted() -> None:
    assert counted(lambda: [model(1)]) > counted(lambda: model) == 1


if __name__ == "__main__":
    lines = ["# Calls of Python functions, written by test_calls_per_send.py.", ""]
    for case in CASES:
        found = counts(case)
        lines.append(f"{case} = {{ trainer = {found['trainer']}, worker = {found['worker']} }}")
    STORED.write_text("\n".join(lines) + "\n", encoding="utf-8")
