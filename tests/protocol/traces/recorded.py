"""A recorded run that uses most of the protocol, and helpers that read, change and write traces."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import weightsync
from weightsync.engine import recorder
from weightsync.verify import Verdict, verify

Lines = list[dict[str, Any]]


def model(value: float = 0.0) -> torch.nn.Module:
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.weight, value)
    return net


class Cast:
    """A trainer and two workers in one process, over pipes."""

    def __init__(self, scheme: Any = None) -> None:
        self.scheme = scheme or weightsync.MultiProcessWeightSyncScheme()
        self.sender = weightsync.WeightSender(self.scheme)
        self.workers = {0: self.worker(), 1: self.worker()}
        for worker in self.workers:
            self.create_link(self.sender, worker)

    def worker(self) -> weightsync.WeightReceiver:
        receiver = weightsync.WeightReceiver(self.scheme)
        receiver.register_model(model())
        return receiver

    def create_link(self, sender: weightsync.WeightSender, worker: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.workers[worker].register_worker_transport(theirs)
        sender.add_worker(worker, ours)

    def receive(self, *workers: int) -> None:
        for worker in workers or self.workers:
            self.workers[worker].receive(1.0)

    def close(self) -> None:
        self.sender.close()
        for receiver in self.workers.values():
            receiver.close()


def play(scheme: Any = None) -> None:
    """A run for the recorder.

    It has sends to all and to some workers, a refusal, an abandoned version, a rejoin, a takeover, closes, and a wait
    that is refused.
    """
    cast = Cast(scheme)
    sender, workers = cast.sender, cast.workers
    sender.send_async(model(1.0))
    cast.receive()
    sender.wait_async()
    workers[1].register_model(torch.nn.Linear(3, 3))
    sender.send_async(model(2.0), worker_ids=[1, 0])
    cast.receive()
    sender.wait_async(on_failure="report")
    sender.send_async(model(3.0), worker_ids=[0])
    sender.abandon()
    sender.send_async(model(4.0), worker_ids=[0])
    cast.receive(0)
    sender.wait_async()
    with contextlib.suppress(weightsync.StateError):
        sender.wait_async()
    workers[1].register_model(model())
    cast.create_link(sender, 1)
    workers[1].receive(0.0)
    workers[1].receive(0.0)  # nothing is due to it
    sender.poll()
    sender.send(model(5.0), timeout=0.0, on_failure="report")
    cast.receive()
    sender.wait_async()
    successor = weightsync.WeightSender(cast.scheme)
    cast.create_link(successor, 0)
    successor.send_async(model(6.0))
    cast.receive(0)
    successor.wait_async()
    workers[1].close()
    sender.poll()
    successor.close()
    cast.close()


def recorded(folder: Path, scenario: Callable[[], None] = play) -> Path:
    """Record a scenario, and return the only file that it leaves."""
    with recorder.record(folder):
        scenario()
    [file] = folder.glob(recorder.PATTERN)
    return file


def recorded_in_two_files(folder: Path) -> tuple[Path, Path]:
    """Record one send; return the trainer's file and the worker's, as two processes would leave them."""
    here, there = folder / "here", folder / "there"
    with recorder.record(here):
        sender = weightsync.WeightSender(weightsync.MultiProcessWeightSyncScheme())
        with recorder.record(there):
            cast = Cast()
            cast.sender.close()
            cast.sender = sender
            cast.create_link(sender, 0)
            sender.send_async(model(1.0))
            cast.receive(0)
            assert sender.wait_async().ok
            cast.close()
    [trainer], [worker] = here.glob(recorder.PATTERN), there.glob(recorder.PATTERN)
    return trainer, worker


def lines_of(file: Path) -> Lines:
    return [json.loads(raw) for raw in file.read_text(encoding="utf-8").splitlines()]


def write(file: Path, lines: Lines) -> Path:
    """Write lines as a forger who knows the format would, with new numbers and new seals."""
    checksum, counts, whole = 0, dict[str, int](), []
    for number, line in enumerate(lines):
        copied = {name: value for name, value in line.items() if name != "c"}
        copied["i"] = number
        if "m" in copied:
            copied["n"] = counts[copied["m"]] = counts.get(copied["m"], -1) + 1
        sealed, checksum = recorder.seal(copied, checksum)
        whole.append(sealed)
    file.write_text("".join(whole), encoding="utf-8")
    return file


def judged(file: Path) -> Verdict:
    return verify([file])
