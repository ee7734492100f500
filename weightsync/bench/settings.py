"""The settings of a run: payloads, schemes, workers, devices, and how long to measure."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from weightsync.errors import ConfigurationError, WeightSyncError
from weightsync.options import Verify

KIB, MIB = 2**10, 2**20
#: How many seconds workers have to start, and how many one send may take.
START_TIMEOUT, SEND_TIMEOUT = 120.0, 120.0
#: More workers, or threads, than any machine has cores for. torch aborts the process where it cannot start a thread.
MOST = 1000


class BenchError(WeightSyncError):
    """Of `weightsync bench`: a worker ended, or the weights did not arrive. The run's processes have ended.

    What to do: measure fewer workers or smaller weights; `weightsync doctor` says what this machine allows.
    """


class SchemeName(enum.Enum):
    """What can be measured: the schemes of weightsync, and two of TorchRL's."""

    SHARED = "shared"
    PROCESS = "process"
    DISTRIBUTED = "distributed"
    RPC = "rpc"
    RAY = "ray"
    TORCHRL_PIPE = "torchrl-multiprocess"
    TORCHRL_SHARED = "torchrl-shared"

    @property
    def is_torchrl(self) -> bool:
        """Whether it is one of TorchRL's own."""
        return self in (SchemeName.TORCHRL_PIPE, SchemeName.TORCHRL_SHARED)


class Device(enum.StrEnum):
    """Where the trainer's and the workers' models are."""

    CPU = "cpu"
    CUDA = "cuda"
    CUDA_TO_CPU = "cuda-to-cpu"
    CPU_TO_CUDA = "cpu-to-cuda"

    @property
    def trainer(self) -> str:
        """The device of the trainer's model, in torch's words."""
        return "cuda" if self in (Device.CUDA, Device.CUDA_TO_CPU) else "cpu"

    @property
    def worker(self) -> str:
        """The device of the workers' models, in torch's words."""
        return "cuda" if self in (Device.CUDA, Device.CPU_TO_CUDA) else "cpu"


@dataclass(frozen=True, slots=True)
class Payload:
    """A model to send.

    Attributes:
        name: its name in results.
        nbytes: the bytes of its tensors; 0 where `factory` says what the model is.
        tensors: how many float32 tensors share these bytes.
        factory: ``module:function``, which makes the user's own model; or empty.
    """

    name: str
    nbytes: int
    tensors: int
    factory: str = ""


PAYLOADS = MappingProxyType(
    {
        payload.name: payload
        for payload in (
            Payload("E", 4, 1),
            Payload("S", 64 * KIB, 10),
            Payload("M", 16 * MIB, 100),
            Payload("L", 256 * MIB, 200),
            Payload("T", 8 * MIB, 2000),
            Payload("G", 2048 * MIB, 200),
        )
    }
)
#: What is sent if nothing is chosen: G takes the memory of a large machine.
USUAL_PAYLOADS = tuple(payload for payload in PAYLOADS.values() if payload.name != "G")
#: The word for the verification that the library does by default.
DEFAULT_VERIFY = "default"


@dataclass(frozen=True)
class Settings:
    """What a run measures.

    Attributes:
        payloads: the models to send.
        workers: the numbers of workers.
        schemes: what to measure.
        verify: values of `weightsync.Verify`, or ``"default"``: each is a contender of its own.
        device: where the models are.
        threads: torch's threads in the trainer, and those of the memcpy that it is compared with. Workers have one.
        seconds: how long to measure one payload with one number of workers, without setting up.
        rounds: the most rounds of one such case; each contender sends once per round. There are at least three.
        noise_limit: the relative interquartile range of a floor above which a ratio to it says nothing.

    Raises:
        ConfigurationError: a number is too small or too large, there is nothing to measure, or a value of `verify` is
            unknown.
    """

    payloads: tuple[Payload, ...] = USUAL_PAYLOADS
    workers: tuple[int, ...] = (2,)
    schemes: tuple[SchemeName, ...] = tuple(SchemeName)
    verify: tuple[str, ...] = (DEFAULT_VERIFY, "layout", "digest")
    device: Device = Device.CPU
    threads: int = 1
    seconds: float = 20.0
    rounds: int = 50
    noise_limit: float = 0.25

    def __post_init__(self) -> None:
        if not (self.payloads and self.workers and self.schemes and self.verify):
            raise ConfigurationError("the bench needs at least one payload, scheme, number of workers and verify=.")
        if min(self.workers) < 1 or self.threads < 1 or self.rounds < 1:
            raise ConfigurationError("the bench needs at least 1 worker, 1 thread and 1 round.")
        if max(*self.workers, self.threads) > MOST:
            raise ConfigurationError(f"the bench takes at most {MOST} workers, and {MOST} threads.")
        if not self.seconds > 0 or not 0 < self.noise_limit < math.inf:
            raise ConfigurationError("the bench needs more than 0 seconds, and a finite noise limit above 0.")
        for word in self.verify:
            _require_known(word, (DEFAULT_VERIFY, *(each.value for each in Verify)), "value of --verify")

    @property
    def least_rounds(self) -> int:
        """The rounds that are measured however long they take: quartiles need three."""
        return min(3, self.rounds)

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        words = {
            "--payloads": ",".join(each.name for each in self.payloads if not each.factory),
            "--model": ",".join(each.factory for each in self.payloads if each.factory),
            "--workers": ",".join(map(str, self.workers)),
            "--schemes": ",".join(each.value for each in self.schemes) if self.schemes != tuple(SchemeName) else "",
            "--verify": ",".join(self.verify),
            "--device": self.device.value,
            "--threads": str(self.threads),
            "--seconds": f"{self.seconds:g}",
            "--rounds": str(self.rounds),
            "--noise-limit": "" if self.noise_limit == Settings.noise_limit else f"{self.noise_limit:g}",
        }
        return " ".join(["weightsync bench", *(f"{word} {value}" for word, value in words.items() if value)])


def payloads(names: str | None, factory: str | None) -> tuple[Payload, ...]:
    """The payloads that a comma-separated list names, and the user's own model.

    Raises:
        ConfigurationError: a name is unknown, or the factory is not ``module:function``.
    """
    chosen = USUAL_PAYLOADS if names is None and factory is None else ()
    if names is not None:
        chosen = tuple(PAYLOADS[_require_known(name, PAYLOADS, "payload")] for name in listed(names))
    if factory is not None:
        module, _, name = factory.partition(":")
        if not name or not all(map(str.isidentifier, module.split("."))):
            raise ConfigurationError(
                f"--model {factory!r} is not of the form module:factory: give a module's name as `import` takes it, "
                "not a path, such as models.small:make."
            )
        chosen += (Payload(factory, 0, 0, factory),)
    return chosen


Word = TypeVar("Word", bound=enum.Enum)


def members(kind: type[Word], words: str) -> tuple[Word, ...]:
    """The members of an enum that a comma-separated list names by their values.

    Raises:
        ConfigurationError: a value is unknown.
    """
    values = [member.value for member in kind]
    return tuple(kind(_require_known(word, values, "scheme")) for word in listed(words))


def numbers(words: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list.

    Raises:
        ConfigurationError: one is not a whole number.
    """
    try:
        return tuple(int(word) for word in listed(words))
    except ValueError:
        raise ConfigurationError(f"{words!r} is not a list of whole numbers, such as 1,2,4.") from None


def listed(words: str) -> Sequence[str]:
    """The words of a comma-separated list, each once, in their order."""
    return list(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))


def _require_known(word: str, known: Iterable[str], what: str) -> str:
    if word not in known:
        raise ConfigurationError(f"{word!r} is not a {what} of the bench: choose from {', '.join(known)}.")
    return word
