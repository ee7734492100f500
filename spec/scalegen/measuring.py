"""Measures what a fleet of many workers costs the trainer. Imports torch, which rendering the page does not need."""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weightsync.bench import results as bench_results
from weightsync.bench.contenders import Situation
from weightsync.bench.models import Source
from weightsync.bench.processes import calls_of, environment
from weightsync.bench.schemes import ProcessScheme, default_verify
from weightsync.bench.settings import MIB, Payload, SchemeName, Settings
from weightsync.local_workers import start_forkserver
from weightsync.protocol import sender
from weightsync.protocol._tables import State
from weightsync.protocol.messages import Ack

_PROCESSES = (SchemeName.SHARED, SchemeName.PROCESS, SchemeName.DISTRIBUTED)
_GB = 1e9


def measure() -> dict[str, Any]:
    """Make all measurements, and return them in the form of the JSON file."""
    with environment({"RES_OPTIONS": "timeout:1 attempts:1", "GLOO_SOCKET_IFNAME": "lo"}):
        start_forkserver(["weightsync.bench.call_schemes"])
        return {
            "machine": dict(bench_results.describe("cpu")),
            "step": [_step(workers) for workers in (10, 100, 1000, 10_000)],
            "fleet": [_fleet(workers) for workers in (1, 2, 4, 8, 16, 32, 64)],
            "memory": [_memory(name) for name in _PROCESSES],
            "memcpy_gb_s": _memcpy(),
            "poll_us": _poll(300),
        }


class _Pure:
    """The pure half of a sender, without links: its state and data."""

    def __init__(self, workers: int) -> None:
        self.state, self.data, self.workers = State.UNINITIALIZED, sender.SenderData(), workers
        for worker in range(workers):
            self.take(sender.Join(worker, worker + 1))
        self.take(sender.Connect(7))

    def take(self, event: sender.Event) -> None:
        step = sender.step(self.state, self.data, event)
        self.state, self.data = step.to, step.data

    def answer(self) -> None:
        """Take the ack of every worker for the newest version."""
        for ack in self.acks:
            self.take(ack)

    def send(self) -> None:
        self.take(sender.Send(None))
        message = Ack(model_id="policy", incarnation=7, version=self.data.version)
        self.acks = [sender.Answer(worker, worker + 1, message) for worker in range(self.workers)]


def _step(workers: int) -> dict[str, Any]:
    """The time and the Python calls that one answer takes in the sender's pure half."""
    fleet, times = _Pure(workers), []
    for _ in range(5):
        fleet.send()
        began = time.perf_counter()
        fleet.answer()
        times.append((time.perf_counter() - began) / workers)
    fleet.send()
    calls = calls_of(fleet.answer)
    return {"workers": workers, "us": round(1e6 * statistics.median(times), 1), "calls": round(calls / workers, 1)}


@contextlib.contextmanager
def _scheme(name: SchemeName, payload: Payload, workers: int) -> Iterator[tuple[ProcessScheme, Source]]:
    with contextlib.ExitStack() as cleanup:
        source = Source(payload, "cpu")
        settings = Settings(payloads=(payload,), workers=(workers,), schemes=(name,))
        situation = Situation(settings, payload, workers, source, f"{name.value}{workers}", cleanup)
        yield ProcessScheme(name, default_verify(), situation), source


def _fleet(workers: int) -> dict[str, Any]:
    """The time of a send of a small model over shared memory, and the trainer's CPU time and Python calls for it."""
    with _scheme(SchemeName.SHARED, Payload("256 KiB", 2**18, 10), workers) as (scheme, source):
        for _ in range(3):
            scheme.send()
        own, whole = [], []
        for _ in range(20):
            source.change()
            began, used = time.perf_counter(), time.process_time()
            scheme.send()
            own.append(time.process_time() - used)
            whole.append(time.perf_counter() - began)
        calls = scheme.count_calls()[0]
    return {
        "workers": workers,
        "send_ms": round(1e3 * statistics.median(whole), 2),
        "trainer_ms": round(1e3 * statistics.median(own), 2),
        "calls": calls,
    }


def _memory(name: SchemeName, nbytes: int = 128 * MIB, workers: int = 2) -> dict[str, Any]:
    """The peak memory besides the models while versions are sent, in multiples of the payload."""
    with _scheme(name, Payload("memory", nbytes, 50), workers) as (scheme, source):
        pids = [os.getpid(), *(process.pid for process in scheme._workers.processes)]
        before = [_anonymous(pid) for pid in pids]
        peaks, over = list(before), threading.Event()

        def watch() -> None:
            while not over.wait(0.002):
                peaks[:] = map(max, peaks, map(_anonymous, pids))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            for _ in range(6):
                source.change()
                scheme.send()
            slots = _slots(os.getpid())
        finally:
            over.set()
            watching.join()
    grown = [round((peak - was) / nbytes, 1) for peak, was in zip(peaks, before, strict=True)]
    return {
        "scheme": name.value,
        "workers": workers,
        "payload_mib": nbytes // MIB,
        "trainer": grown[0],
        "shared": round(slots / nbytes, 1),
        "worker": max(grown[1:]),
    }


def _anonymous(pid: int | None) -> int:
    """The bytes of a process's private memory."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _slots(pid: int) -> int:
    """The bytes of the slots that a process holds."""
    held = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:weightsync" in os.readlink(entry):
                held[entry.stat().st_ino] = entry.stat().st_blocks * 512
    return sum(held.values())


def _poll(links: int) -> float:
    """The time in microseconds that the kernel needs to look at three descriptors of each link."""
    poller, times = select.poll(), []
    descriptors = [os.eventfd(0, os.EFD_CLOEXEC) for _ in range(3 * links)]
    try:
        for fd in descriptors:
            poller.register(fd, select.POLLIN)
        for _ in range(50):
            began = time.perf_counter()
            poller.poll(0)
            times.append(time.perf_counter() - began)
    finally:
        for fd in descriptors:
            os.close(fd)
    return round(1e6 * statistics.median(times), 1)


def _memcpy(nbytes: int = 256 * MIB) -> float:
    """GB/s of one copy by one thread, into memory that was touched before."""
    import torch  # noqa: PLC0415

    one, other, times = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(7):
        began = time.perf_counter()
        other.copy_(one)
        times.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return round(nbytes / statistics.median(times) / _GB, 1)
