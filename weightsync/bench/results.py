"""Results: what was measured in each case, and on what machine; as JSON, and back."""

from __future__ import annotations

import enum
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from weightsync.errors import ConfigurationError, with_type

#: The version of the JSON. It changes when a reader of the old one would misunderstand the new one.
SCHEMA = 1


class Kind(enum.Enum):
    """What a contender is."""

    #: What the hardware or a library's plainest call costs.
    FLOOR = "floor"
    #: A scheme of weightsync: a send ends when every worker has applied the version and acked it.
    SCHEME = "scheme"
    #: A scheme of weightsync: how long `send_async()` takes to return.
    ASYNC = "send_async"
    #: A scheme of TorchRL.
    TORCHRL = "torchrl"


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a contender.

    Attributes:
        name: the name of the floor or the scheme.
        kind: the kind of contender.
        verify: the value of `weightsync.Verify` that it was measured with; None for what has none.
    """

    name: str
    kind: Kind
    verify: str | None = None

    def __str__(self) -> str:
        suffix = ": send_async" if self.kind is Kind.ASYNC else ""
        return self.name + (f", {self.verify}" if self.verify else "") + suffix


@dataclass(frozen=True, slots=True)
class Measured:
    """A contender's sends in one case. Times are in seconds.

    Attributes:
        label: the contender.
        count: how many sends were timed.
        median: their median.
        low: their lower quartile.
        high: their upper quartile.
        trainer_calls: Python calls of one send in the trainer's calling thread, counted in an untimed send.
        worker_calls: Python calls in the first worker's receiving thread for the same send. None: not counted.
    """

    label: Label
    count: int
    median: Annotated[float, msgspec.Meta(gt=0)]
    low: float
    high: float
    trainer_calls: int | None = None
    worker_calls: int | None = None

    @classmethod
    def of(cls, label: Label, samples: Sequence[float]) -> Measured:
        """The median and the quartiles of samples."""
        if len(samples) == 1:
            low = median = high = samples[0]
        else:
            low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(label, len(samples), median, low, high)

    @property
    def spread(self) -> float:
        """The interquartile range in units of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """One payload with one number of workers: its contenders were interleaved, so ratios inside a case hold.

    Attributes:
        payload: its name.
        nbytes: its bytes.
        tensors: its tensors.
        workers: how many workers got each send.
        device: where the models were.
        threads: torch's threads in the trainer.
        default_verify: the library's default for ``verify=`` in that run.
        command: repeats the run.
        measured: one record per contender.
        left_out: what was not measured, and why.
    """

    payload: str
    nbytes: int
    tensors: int
    workers: int
    device: str
    threads: int
    default_verify: str
    command: str
    measured: tuple[Measured, ...]
    left_out: Mapping[str, str]

    @property
    def key(self) -> tuple[Any, ...]:
        """What the case is about. A later case with the same key takes the place of an earlier one."""
        names = sorted({each.label.name for each in self.measured if each.label.kind is not Kind.FLOOR})
        return (self.payload, self.workers, self.device, self.threads, *names)

    def find(self, name: str, kind: Kind, verify: str | None = None) -> Measured | None:
        """A contender's record, if it was measured."""
        return next((each for each in self.measured if each.label == Label(name, kind, verify)), None)


@dataclass(frozen=True)
class Results:
    """All cases of a machine.

    Attributes:
        machine: what it is, in words; no host name, no path.
        noise_limit: a floor with a larger relative spread says nothing.
        cases: what was measured.
    """

    machine: Mapping[str, str]
    noise_limit: float
    cases: tuple[Case, ...]

    def joined(self, later: Results) -> Results:
        """These results with those of a later run on the same machine.

        Raises ConfigurationError: the machine, or a version of a library, is another.
        """
        ours, theirs = dict(self.machine), dict(later.machine)
        # A run names what it uses: one on the CPU alone names no GPU.
        differ = sorted(name for name in ours.keys() & theirs.keys() - {"note"} if ours[name] != theirs[name])
        if differ:
            said = "; ".join(f"{name}: {ours[name]} and {theirs[name]}" for name in differ)
            raise ConfigurationError(f"results of different machines are not joined ({said}): write to another file.")
        new = {case.key for case in later.cases}
        return replace(later, machine=ours | theirs, cases=(*(c for c in self.cases if c.key not in new), *later.cases))

    def record(self) -> dict[str, Any]:
        """The results as plain data, for JSON."""
        record: dict[str, Any] = json.loads(json.dumps({"schema": SCHEMA, **asdict(self)}, default=_plain))
        return record

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the JSON. Raises ConfigurationError: the file cannot be read, or is not what `write` wrote."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            schema = record["schema"]
            if schema == SCHEMA:
                return msgspec.convert(record, cls)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, msgspec.ValidationError) as error:
            raise ConfigurationError(f"{path} holds no results of `weightsync bench`: {with_type(error)}.") from error
        raise ConfigurationError(f"{path} is of schema {schema!r}, and this weightsync reads {SCHEMA}: measure again.")


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{value!r} has no JSON")


#: Distributions whose versions matter to the times.
_LIBRARIES = ("weightsync", "torch", "tensordict", "torchrl", "ray")


def describe(device: str) -> Mapping[str, str]:
    """What the machine is: processor, cores, memory, GPU, and the versions of what is measured."""
    facts = {
        "processor": _first("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _gibibytes(_first("/proc/meminfo", "MemTotal")),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }
    if "cuda" in device:
        import torch  # noqa: PLC0415 - takes seconds, and describing a CPU needs none of it

        facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {**facts, **{name: version for name in _LIBRARIES if (version := _version(name))}}


def installed(name: str) -> bool:
    """Whether a distribution is installed."""
    return _version(name) is not None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first(path: str, field: str) -> str:
    """The value of the first line of a file of ``field: value`` lines that is about the field; or nothing."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _gibibytes(kilobytes: str) -> str:
    return f"{int(kilobytes.partition(' ')[0]) / 2**20:.0f} GiB" if kilobytes else "unknown"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 worker", "2,000 tensors"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
