"""Judges results: ratios to the floor that belongs to a path, targets, noise, and one run against another."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from weightsync.bench.results import Case, Kind, Label, Measured, Results, counted
from weightsync.bench.settings import MIB, SchemeName


class Floor(enum.Enum):
    """The floors, by their names in results."""

    PING = "ping"
    MEMCPY = "memcpy"
    COPY_OUT = "memcpy + copy-out"
    TCP = "raw TCP"
    GLOO = "flat gloo"
    GLOO_PING = "gloo ping"
    RPC = "flat rpc_sync"
    RAY = "ray.put + copy-out"
    D2D = "device to device"
    D2H = "device to pinned"
    H2D = "pinned to device"


class Verdict(enum.Enum):
    """Whether a target is reached."""

    REACHED = "reached"
    MISSED = "missed"
    NOISY = "too noisy to tell"


class Change(enum.Enum):
    """How a contender did in a second run."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    NOISY = "too noisy to tell"


#: Below this size a send on one machine costs messages rather than copies.
_SMALL = MIB
_ON_A_DEVICE = {"cuda": Floor.D2D, "cuda-to-cpu": Floor.D2H, "cpu-to-cuda": Floor.H2D}


def floor_of(case: Case, label: Label) -> Measured | None:
    """The floor that belongs to a contender's path, if it was measured in the same case."""
    small = case.nbytes < _SMALL
    match label.name:
        case SchemeName.DISTRIBUTED.value:
            floor = Floor.GLOO_PING if small else Floor.GLOO
        case SchemeName.RPC.value:
            floor = Floor.RPC
        case SchemeName.RAY.value:
            floor = Floor.RAY
        case _ if label.kind is Kind.ASYNC:
            floor = Floor.MEMCPY
        case _ if case.device in _ON_A_DEVICE:
            floor = _ON_A_DEVICE[case.device]
        case SchemeName.PROCESS.value | SchemeName.TORCHRL_PIPE.value:
            floor = Floor.PING if small else Floor.COPY_OUT
        case _:
            floor = Floor.PING if small else Floor.MEMCPY
    return case.find(floor.value, Kind.FLOOR)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A contender against its floor.

    Attributes:
        measured: the contender.
        floor: its floor; None if it was not measured.
        noisy: the floor's own spread is above the limit, so the ratio says nothing.
    """

    measured: Measured
    floor: Measured | None
    noisy: bool

    @property
    def value(self) -> float | None:
        """The ratio of the medians."""
        return self.measured.median / self.floor.median if self.floor and self.floor.median else None


def ratio(case: Case, measured: Measured, noise_limit: float) -> Ratio:
    """A contender against its floor."""
    floor = floor_of(case, measured.label)
    return Ratio(measured, floor, floor is not None and floor.spread > noise_limit)


@dataclass(frozen=True, slots=True)
class Target:
    """What a scheme should cost.

    Attributes:
        scheme: the scheme that is judged.
        payload: the payload that it sends.
        limit: the most that it may be, in `unit`.
        unit: the floor that it is measured in; or "ms", or "calls in the trainer" or "in a worker".
        device: where the models are.
        kind: the kind of the contender.
    """

    scheme: str
    payload: str
    limit: float
    unit: str
    device: str = "cpu"
    kind: Kind = Kind.SCHEME


@dataclass(frozen=True, slots=True)
class Line:
    """A target, and what was measured in one case."""

    case: Case
    label: Label
    value: float
    limit: float
    unit: str
    verdict: Verdict


_TRAINER_CALLS, _WORKER_CALLS, _MS = "calls in the trainer", "calls in a worker", "ms"
_OTHER_VERIFY = "the send with verify=layout"
#: Of `send()` with the library's default for verify=, one thread in the trainer.
TARGETS = (
    Target("shared", "L", 1.10, Floor.MEMCPY.value),
    Target("shared", "M", 1.35, Floor.MEMCPY.value),
    Target("shared", "S", 2.0, Floor.PING.value),
    Target("shared", "T", 4.0, Floor.MEMCPY.value),
    Target("process", "M", 1.3, Floor.COPY_OUT.value),
    Target("process", "L", 1.3, Floor.COPY_OUT.value),
    Target("shared", "L", 1.1, Floor.MEMCPY.value, kind=Kind.ASYNC),
    Target("distributed", "S", 1.5, Floor.GLOO_PING.value),
    Target("distributed", "M", 1.15, Floor.GLOO.value),
    Target("distributed", "L", 1.15, Floor.GLOO.value),
    Target("ray", "L", 1.2, Floor.RAY.value),
    Target("rpc", "L", 1.2, Floor.RPC.value),
    Target("shared", "L", 0.6, _MS, "cuda"),
    Target("shared", "T", 2.5, _MS, "cuda"),
    Target("shared", "G", 2.0, _MS, "cuda"),
    Target("process", "G", 4.5, _MS, "cuda"),
    Target("process", "L", 1.5, _MS, "cuda"),
    Target("process", "T", 3.0, _MS, "cuda"),
    Target("shared", "L", 1.15, Floor.D2H.value, "cuda-to-cpu"),
    Target("shared", "L", 1.15, Floor.H2D.value, "cpu-to-cuda"),
)
#: With several threads in the trainer, memcpy has them too, and one target is another.
_SEVERAL_THREADS = {("shared", "L", Floor.MEMCPY.value, Kind.SCHEME): 1.3}
#: Of a send with verify=digest, in units of the same send with verify=layout; on every path.
_DIGEST_LIMIT = 1.3
#: Of a payload of one number, which leaves the protocol alone: (first worker, each further worker).
_CALLS_LIMIT = (150, 60)


def targets(results: Results) -> list[Line]:
    """Every target that these results speak about, case by case."""
    return [line for case in results.cases for line in _case_lines(case, results.noise_limit)]


def _case_lines(case: Case, noise_limit: float) -> Iterator[Line]:
    for target in TARGETS:
        if (target.payload, target.device) == (case.payload, case.device):
            yield from _target_lines(case, target, noise_limit)
    for measured in case.measured:
        if measured.label.kind is not Kind.SCHEME:
            continue
        name, verify = measured.label.name, measured.label.verify
        plain = case.find(name, Kind.SCHEME, "layout")
        if verify == "digest" and plain is not None:
            yield _judge(case, measured, plain, (_DIGEST_LIMIT, _OTHER_VERIFY), noise_limit)
        if case.payload == "E" and verify == case.default_verify and name in ("shared", "process"):
            yield from _call_lines(case, measured)


def _target_lines(case: Case, target: Target, noise_limit: float) -> Iterator[Line]:
    measured = case.find(target.scheme, target.kind, case.default_verify)
    if measured is None:
        return
    if target.unit == _MS:
        value = measured.median * 1000
        verdict = Verdict.NOISY if measured.spread > noise_limit else _verdict_on(value, target.limit)
        yield Line(case, measured.label, value, target.limit, _MS, verdict)
        return
    floor = case.find(target.unit, Kind.FLOOR)
    limit = target.limit
    if case.threads > 1:
        limit = _SEVERAL_THREADS.get((target.scheme, target.payload, target.unit, target.kind), limit)
    if floor is not None:
        yield _judge(case, measured, floor, (limit, target.unit), noise_limit)


def _judge(case: Case, measured: Measured, floor: Measured, target: tuple[float, str], noise_limit: float) -> Line:
    """Judge by the medians; by the quartiles where the floor is noisy, if even they are on one side of the limit."""
    limit, unit = target
    value = measured.median / floor.median
    if floor.spread <= noise_limit:
        verdict = _verdict_on(value, limit)
    elif measured.low / floor.high > limit:
        verdict = Verdict.MISSED
    else:
        verdict = Verdict.REACHED if measured.high / floor.low <= limit else Verdict.NOISY
    return Line(case, measured.label, value, limit, f"x {unit}", verdict)


def _call_lines(case: Case, measured: Measured) -> Iterator[Line]:
    first, further = _CALLS_LIMIT
    for value, limit, unit in (
        (measured.trainer_calls, first + further * (case.workers - 1), _TRAINER_CALLS),
        (measured.worker_calls, first, _WORKER_CALLS),
    ):
        if value is not None:
            yield Line(case, measured.label, value, limit, unit, _verdict_on(value, limit))


def _verdict_on(value: float, limit: float) -> Verdict:
    return Verdict.REACHED if value <= limit else Verdict.MISSED


def noise(results: Results) -> list[str]:
    """Which floors were too noisy for a ratio to mean anything; empty if none was."""
    said = []
    for case in results.cases:
        noisy = [
            f"{each.label} {each.spread:.0%}"
            for each in case.measured
            if each.label.kind is Kind.FLOOR and each.spread > results.noise_limit
        ]
        if noisy:
            said.append(f"{case.payload}, {counted(case.workers, 'worker')}: {', '.join(noisy)}")
    return said


@dataclass(frozen=True, slots=True)
class Compared:
    """A contender in two runs. Ratios to the floor are compared where both runs have them, else times.

    Attributes:
        case: the case of the first run.
        first: its record there.
        second: its record in the second run.
        factor: the second in units of the first.
        in_floors: whether the factor is of ratios to the floor, which another machine's speed does not change.
        change: what that means.
    """

    case: Case
    first: Measured
    second: Measured
    factor: float
    in_floors: bool
    change: Change


def compare(first: Results, second: Results) -> list[Compared]:
    """Compare every contender that both runs measured in a case of the same payload, workers, device and threads."""
    limit = max(first.noise_limit, second.noise_limit)
    found = []
    for case in first.cases:
        others = [other for other in second.cases if _comparison_key(other) == _comparison_key(case)]
        for measured in case.measured:
            label = measured.label
            again = [(other, each) for other in others for each in other.measured if each.label == label][:1]
            for other, each in again:
                found.append(_compare_case(ratio(case, measured, limit), ratio(other, each, limit), case))
    return found


def _comparison_key(case: Case) -> tuple[object, ...]:
    return (case.payload, case.nbytes, case.workers, case.device, case.threads)


def _compare_case(first: Ratio, second: Ratio, case: Case) -> Compared:
    units = (1.0, 1.0)
    in_floors = first.measured.label.kind is not Kind.FLOOR and bool(first.value and second.value)
    if in_floors and first.floor is not None and second.floor is not None:
        units = (first.floor.median, second.floor.median)
    one, two = first.measured, second.measured
    factor = (two.median / units[1]) / (one.median / units[0])
    if in_floors and (first.noisy or second.noisy):
        change = Change.NOISY
    elif two.low / units[1] > one.high / units[0]:
        change = Change.SLOWER
    elif two.high / units[1] < one.low / units[0]:
        change = Change.FASTER
    else:
        change = Change.SAME
    return Compared(case, one, two, factor, in_floors, change)
