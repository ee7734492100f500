"""The run: each case sets its contenders up, proves that they carry weights, and times them in turns."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import distributed

from weightsync.bench.call_schemes import RayCluster, RpcWorld
from weightsync.bench.contenders import Backend, Contender, Situation
from weightsync.bench.floors import cpu_floors, cuda_floors
from weightsync.bench.models import Source, compare_digests, find_factory
from weightsync.bench.processes import environment
from weightsync.bench.results import Case, Label, Measured, Results, describe, installed
from weightsync.bench.schemes import default_verify, process_schemes, variants
from weightsync.bench.settings import Device, Payload, SchemeName, Settings
from weightsync.bench.torchrl_schemes import torchrl_schemes
from weightsync.bench.watching import Watchdog
from weightsync.errors import ConfigurationError
from weightsync.local_workers import start_forkserver
from weightsync.transports.memory_limit import available_memory

#: The share of the free memory that a case may take, by its estimate.
_SHARE_OF_MEMORY = 0.8
#: What CUDA takes of a GPU for each process, about.
_CONTEXT_NBYTES = 600 * 2**20
#: torch asks the DNS about every connection, and gloo for the host's own address; the bench stays on the loopback.
_ENVIRONMENT = {"RES_OPTIONS": "timeout:1 attempts:1", "GLOO_SOCKET_IFNAME": "lo"}
_WORKER_MODULES = ("weightsync.bench.call_schemes", "weightsync.bench.torchrl_schemes")


class Progress(Protocol):
    """Receives the progress of a run."""

    def began(self, cases: int) -> None:
        """The number of cases is known."""

    def setting_up(self, payload: Payload, workers: int) -> None:
        """A case is being set up."""

    def measured(self, samples: Mapping[Label, Sequence[float]], share: float) -> None:
        """A round has ended: the samples so far, and which share of the case is done."""

    def ended(self, case: Case) -> None:
        """A case has ended."""


def run(settings: Settings, progress: Progress, note: str = "") -> Results:
    """Measure every payload with every number of workers. All processes have ended when this returns or raises.

    Raises:
        BenchError: a worker ended, or weights did not arrive.
        ConfigurationError: nothing of what was chosen can be measured here, or the model's factory is wrong.
    """
    left_out = missing(settings)
    if "cuda" in (settings.device.trainer, settings.device.worker) and not torch.cuda.is_available():
        raise ConfigurationError(f"--device {settings.device.value}: torch finds no CUDA device here.")
    if all(name.value in left_out for name in settings.schemes):
        raise ConfigurationError(f"nothing can be measured: {'; '.join(left_out.values())}.")
    for payload in settings.payloads:
        if payload.factory:
            find_factory(payload.factory)  # before a minute of starting processes
    cases = [(payload, workers) for payload in settings.payloads for workers in settings.workers]
    progress.began(len(cases))
    threads = torch.get_num_threads()
    facts = dict(describe(settings.device.value))
    with environment(_ENVIRONMENT), Watchdog() as watchdog, _backends(settings, left_out, watchdog) as backends:
        torch.set_num_threads(settings.threads)
        try:
            run_case = _Cases(settings, backends, left_out, progress, watchdog).run
            done = [run_case(number, *case) for number, case in enumerate(cases)]
        finally:
            torch.set_num_threads(threads)
    return Results(facts | ({"note": note} if note else {}), settings.noise_limit, tuple(done))


def missing(settings: Settings) -> dict[str, str]:
    """The chosen schemes that cannot be measured here, and why."""
    why = {}
    cuda = settings.device is not Device.CPU
    for name in settings.schemes:
        if name.is_torchrl and not installed("torchrl"):
            why[name.value] = "TorchRL is not installed (weightsync[torchrl])"
        elif name is SchemeName.RAY and not installed("ray"):
            why[name.value] = "Ray is not installed (weightsync[ray])"
        elif name is SchemeName.DISTRIBUTED and not (distributed.is_available() and distributed.is_gloo_available()):
            why[name.value] = "this torch has no gloo"
        elif name is SchemeName.RPC and not (distributed.is_available() and distributed.rpc.is_available()):
            why[name.value] = "this torch has no RPC"
        elif name in (SchemeName.RPC, SchemeName.RAY) and cuda:
            why[name.value] = "its workers are measured with models on the CPU only"
    return why


@contextlib.contextmanager
def _backends(settings: Settings, left_out: Mapping[str, str], watchdog: Watchdog) -> Iterator[list[Backend]]:
    """What lasts for the whole run: the process that workers are forked from, the RPC world, Ray."""
    chosen = {name for name in settings.schemes if name.value not in left_out}
    torchrl = ["torchrl.weight_update"] if any(name.is_torchrl for name in chosen) else []
    start_forkserver([*_WORKER_MODULES, *torchrl])
    most = max(settings.workers)
    with contextlib.ExitStack() as cleanup:
        found: list[Backend] = []
        makers: Mapping[SchemeName, Callable[[int], Backend]] = {SchemeName.RPC: RpcWorld, SchemeName.RAY: RayCluster}
        for name, make in makers.items():
            if name in chosen:
                made = watchdog.do(name.value, partial(make, most))
                cleanup.callback(made.close)
                found.append(made)
        yield found


class _Cases:
    """Runs one case after another."""

    def __init__(
        self,
        settings: Settings,
        backends: Sequence[Backend],
        left_out: Mapping[str, str],
        progress: Progress,
        watchdog: Watchdog,
    ) -> None:
        self._settings, self._backends, self._left_out, self._progress = settings, backends, left_out, progress
        self._watchdog = watchdog

    def run(self, number: int, payload: Payload, workers: int) -> Case:
        """Set the contenders of a case up, measure them, and end them."""
        settings, left_out = self._settings, dict(self._left_out)
        self._progress.setting_up(payload, workers)
        source = Source(payload, settings.device.trainer)
        measured: tuple[Measured, ...] = ()
        with contextlib.ExitStack() as cleanup:
            names = frozenset(left_out)
            situation = Situation(settings, payload, workers, source, f"case{number}", cleanup, names)
            if too_large := _too_large(situation):
                left_out["all"] = too_large
            else:
                contenders = self._set_up(situation)
                measured = _measure(settings, contenders, source, self._progress, self._watchdog)
                self._watchdog.do("the end of a case", cleanup.close)
        counts = (source.nbytes, source.tensors, workers, settings.device.value, settings.threads)
        case = Case(payload.name, *counts, default_verify(), settings.command, measured, left_out)
        self._progress.ended(case)
        return case

    def _set_up(self, situation: Situation) -> list[Contender]:
        following = partial(next, _contenders(situation, self._backends), None)
        found: list[Contender] = []
        while contender := self._watchdog.do("the next contender's start", following):
            found.append(contender)
        return found


def _too_large(situation: Situation) -> str:
    """Why the case does not fit into the memory that is left, by an estimate; or nothing."""
    chosen = [name for name in situation.settings.schemes if situation.chosen(name)]
    fleets = sum(1 if name.is_torchrl else len(variants(situation)) for name in chosen)
    # The floors' copies; two slots or buffers a fleet; a worker's own copy, and what is under way to some of them.
    needed = int(situation.source.nbytes * (4 + 2 * fleets + 1.25 * (fleets + 1) * situation.workers))
    if lacking := _memory_shortage(needed, available_memory() or 0, "GiB"):
        return lacking
    device = situation.settings.device
    if device is Device.CPU:
        return ""
    # The floors' copies and the trainer's; two slots a fleet; a worker's own copy, where it is there, and its context.
    processes = fleets * situation.workers if device.worker == "cuda" else 0
    needed = situation.source.nbytes * (4 + 2 * fleets + processes) + _CONTEXT_NBYTES * processes
    return _memory_shortage(needed, torch.cuda.mem_get_info()[0], "GiB of the GPU")


def _memory_shortage(needed: int, left: int, unit: str) -> str:
    if needed <= left * _SHARE_OF_MEMORY:
        return ""
    return f"takes about {needed / 2**30:.0f} {unit} and {left / 2**30:.0f} are free: choose fewer schemes or workers"


def _contenders(situation: Situation, backends: Sequence[Backend]) -> Iterator[Contender]:
    if situation.settings.device is not Device.CPU:
        yield from cuda_floors(situation)
    yield from cpu_floors(situation)
    yield from process_schemes(situation)
    for backend in backends:
        yield from backend.contenders(situation)
    yield from torchrl_schemes(situation)


def _measure(
    settings: Settings, contenders: Sequence[Contender], source: Source, progress: Progress, watchdog: Watchdog
) -> tuple[Measured, ...]:
    """Prove every contender, time all of them in turns, and prove them again while their calls are counted."""
    for contender in contenders:
        watchdog.do(str(contender.label), partial(_prove, contender, source))
    samples: dict[Label, list[float]] = {contender.label: [] for contender in contenders}
    shuffled = random.Random(0)
    began = time.monotonic()
    for done in range(settings.rounds):
        share = max((time.monotonic() - began) / settings.seconds, done / settings.rounds)
        if done >= settings.least_rounds and share >= 1:
            break
        source.change()
        # In another order each time: what a send finds in the caches depends on what ran before it.
        for contender in shuffled.sample(contenders, len(contenders)):
            samples[contender.label].append(watchdog.do(str(contender.label), partial(_time, contender)))
        progress.measured(samples, min(1.0, share))
    calls = {}
    for contender in contenders:
        calls[contender.label] = watchdog.do(str(contender.label), partial(_prove, contender, source))
    found = []
    for label, times in samples.items():
        trainer, worker = calls[label]
        once = Measured.of(label, times)
        found.append(Measured(label, once.count, once.median, once.low, once.high, trainer, worker))
    return tuple(found)


def _time(contender: Contender) -> float:
    contender.ready()
    began = time.perf_counter()
    contender.send()
    took = time.perf_counter() - began
    contender.settle()
    return took


def _prove(contender: Contender, source: Source) -> tuple[int | None, int | None]:
    """Send new weights, and compare what each worker has with them. Returns the Python calls that it took."""
    source.change()
    contender.ready()
    calls = contender.count_calls()
    contender.settle()
    compare_digests(str(contender.label), contender.sent_digest(), contender.digests())
    return calls
