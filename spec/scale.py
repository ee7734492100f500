"""What a fleet of many workers costs the trainer: measures it, and renders `docs/cluster.md` from what was measured.

    python spec/scale.py --measure NAME     # a few minutes: writes docs/scale/NAME.json
    python spec/scale.py                    # renders the page
    python spec/scale.py --check            # compares it byte for byte

Exit status: 0 all is as it should be, 1 the page differs, 2 results or the page cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protocolgen.docs import fill, keep
from protocolgen.source import SpecError

from weightsync.bench import results as bench_results
from weightsync.bench.contenders import Situation
from weightsync.bench.models import Source
from weightsync.bench.processes import calls_of, environment
from weightsync.bench.reporting import markdown
from weightsync.bench.schemes import ProcessScheme, default_verify
from weightsync.bench.settings import MIB, Payload, SchemeName, Settings
from weightsync.local_workers import start_forkserver
from weightsync.protocol import sender
from weightsync.protocol._tables import State
from weightsync.protocol.messages import Ack

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/cluster.md"
RESULTS = "docs/scale"
_PROCESSES = (SchemeName.SHARED, SchemeName.PROCESS, SchemeName.DISTRIBUTED)
#: Workers that share one host, in what is calculated.
_A_HOST = 8
#: Fan-outs, in what is calculated.
_WIDTHS = (8, 2)
_GB = 1e9


# --------------------------------------------------------------------------------------------------- measuring


def measure() -> dict[str, Any]:
    """All measurements, as JSON has them."""
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
    """A sender without links: state and data."""

    def __init__(self, workers: int) -> None:
        self.state, self.data, self.workers = State.UNINITIALIZED, sender.SenderData(), workers
        for worker in range(workers):
            self.take(sender.Join(worker, worker + 1))
        self.take(sender.Connect(7))

    def take(self, event: sender.Event) -> None:
        step = sender.step(self.state, self.data, event)
        self.state, self.data = step.to, step.data

    def answer(self) -> None:
        """The ack of every worker for the newest version."""
        for ack in self.acks:
            self.take(ack)

    def send(self) -> None:
        self.take(sender.Send(None))
        message = Ack(model_id="policy", incarnation=7, version=self.data.version)
        self.acks = [sender.Answer(worker, worker + 1, message) for worker in range(self.workers)]


def _step(workers: int) -> dict[str, Any]:
    """What one answer costs the pure half of the sender."""
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
    """A small model, over shared memory: the trainer's own time, its calls, and a whole send."""
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
    """The bytes of memory that are a process's own."""
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


# --------------------------------------------------------------------------------------------------- the page


def read(root: Path = ROOT) -> dict[str, Any]:
    """All stored results, by the names of their files.

    Raises:
        SpecError: there is none, or one cannot be read.
    """
    try:
        found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (root / RESULTS).glob("*.json")}
    except ValueError as error:
        raise SpecError([f"{RESULTS}: {error}"]) from error
    if not found:
        raise SpecError([f"{RESULTS} has no results: `python spec/scale.py --measure NAME` writes them"])
    return dict(sorted(found.items()))


def measured(found: dict[str, Any]) -> str:
    """What was measured, each machine by itself."""
    return "\n".join(line for name, results in found.items() for line in _measured(name, results))


def _measured(name: str, results: dict[str, Any]) -> Iterator[str]:
    yield f"### Machine: {name}\n"
    yield markdown(("", ""), [*results["machine"].items(), ("memcpy, one thread", f"{results['memcpy_gb_s']} GB/s")])
    yield "One answer in the sender's pure half:\n"
    answers: list[tuple[str, ...]] = [
        (f"{row['workers']:,}", f"{row['us']}", f"{row['calls']}") for row in results["step"]
    ]
    yield markdown(("workers", "µs", "Python calls"), answers)
    yield f"Each time that the trainer wakes, the kernel looks at all links: at 300 in {results['poll_us']} µs.\n"
    yield "A send of 256 KiB over shared memory to worker processes on this machine:\n"
    columns = "workers", "send, ms", "trainer's CPU, ms", "a worker, ms", "Python calls a worker"
    yield markdown(columns, [_fleet_row(row) for row in results["fleet"]])
    yield "Memory at the peak, in addition to the models themselves, in multiples of the payload:\n"
    held = ("scheme", "trainer's own", "shared, once per host", "each worker's own")
    peaks = [(row["scheme"], *(f"{row[key]}" for key in ("trainer", "shared", "worker"))) for row in results["memory"]]
    yield markdown(held, peaks)


def _fleet_row(row: dict[str, Any]) -> tuple[str, ...]:
    workers = row["workers"]
    each = f"{row['trainer_ms'] / workers:.2f}", f"{row['calls'] / workers:.0f}"
    whole = f"{row['send_ms']}", f"{row['trainer_ms']}"
    return str(workers), *whole, *each


def per_worker(results: dict[str, Any]) -> float:
    """Seconds of the trainer's time for one more worker: between the smallest fleet and the largest."""
    first, last = results["fleet"][0], results["fleet"][-1]
    more: float = last["trainer_ms"] - first["trainer_ms"]
    return more / 1e3 / float(last["workers"] - first["workers"])


def seconds(results: dict[str, Any], nbytes: float, links: int, copies: float, rate: float) -> float:
    """How long a send takes, by calculation.

    Args:
        results: has the constants.
        nbytes: the size of the payload.
        links: how many workers the trainer itself talks to.
        copies: how often the payload leaves the trainer's host.
        rate: bytes a second of the trainer's network link.
    """
    copied: float = nbytes / (results["memcpy_gb_s"] * _GB)
    return copied + copies * nbytes / rate + links * per_worker(results)


def calculated(found: dict[str, Any]) -> str:
    """The table of what to expect, with the constants of the first machine."""
    name, results = next(iter(found.items()))
    lines = [f"Constants of `{name}`: {results['memcpy_gb_s']} GB/s, {1e3 * per_worker(results):.2f} ms a worker.\n"]
    rows = []
    for workers in (8, 64, 256, 1000):
        hosts = max(1, workers // _A_HOST)
        for title, nbytes in (("256 MiB", 256 * MIB), ("2 GiB", 2048 * MIB), ("14 GB", 14 * _GB)):
            row = [f"{workers:,}", f"{hosts:,}", title, _duration(seconds(results, nbytes, workers, 0, 1))]
            trees = ((min(width, workers), workers) for width in _WIDTHS)
            for copies, links in ((workers, workers), (hosts, hosts), *trees, (1, workers)):
                row += [_duration(seconds(results, nbytes, links, copies, gbit * 1e9 / 8)) for gbit in (10, 100)]
            if workers > 64:
                row[3] = ""
            rows.append(tuple(row))
    columns = (
        *("workers", "hosts", "payload", "all on one host, shared memory"),
        *("to each worker, 10 Gbit/s", "100 Gbit/s", "to each host, 10 Gbit/s", "100 Gbit/s"),
        *(f"{column}{gbit} Gbit/s" for width in _WIDTHS for column, gbit in ((f"fanout={width}, ", 10), ("", 100))),
        *("once, 10 Gbit/s", "100 Gbit/s"),
    )
    return "\n".join([*lines, markdown(columns, rows)])


def _duration(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.0f} ms"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Run the command; returns its exit status."""
    if "--measure" in arguments:
        target = root / RESULTS / f"{arguments[-1]}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    page = root / PAGE
    try:
        found = read(root)
        sections = {"measured": measured(found), "calculated": calculated(found)}
        text = fill(PAGE, page.read_text(encoding="utf-8"), sections)
    except SpecError as error:
        print(f"nothing was written:\n{error}", file=sys.stderr)
        return 2
    return keep(page, text, arguments, f"{PAGE} is not what {RESULTS} gives: run `python spec/scale.py`.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
