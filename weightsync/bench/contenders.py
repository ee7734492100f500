"""What a contender is: something that carries the trainer's weights to the workers, again and again."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from weightsync.bench.models import Source, digest_of_model
from weightsync.bench.processes import calls_of
from weightsync.bench.results import Label
from weightsync.bench.settings import Payload, SchemeName, Settings


@dataclass(frozen=True)
class Situation:
    """One payload with one number of workers.

    Attributes:
        settings: the settings of the run.
        payload: what is sent.
        workers: the number of workers that it is sent to.
        source: the trainer's weights.
        model_id: the name of the model, another one in each situation of a run.
        cleanup: ends everything that contenders start for it.
        left_out: names of schemes that cannot be measured here.
    """

    settings: Settings
    payload: Payload
    workers: int
    source: Source
    model_id: str
    cleanup: contextlib.ExitStack
    left_out: frozenset[str] = frozenset()

    def chosen(self, name: SchemeName) -> bool:
        """Whether a scheme is to be measured, and can be."""
        return name in self.settings.schemes and name.value not in self.left_out


class Contender(abc.ABC):
    """Something to measure. `ready`, `send` and `settle` follow each other; only `send` is timed."""

    label: Label

    def ready(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare the next send."""

    @abc.abstractmethod
    def send(self) -> None:
        """Carry the weights over, and return when every worker has them."""

    def settle(self) -> None:  # noqa: B027 - most end with their send
        """Wait for what the send left under way."""

    @abc.abstractmethod
    def sent_digest(self) -> str:
        """The digest of what the last send carried."""

    @abc.abstractmethod
    def digests(self) -> Mapping[int, str]:
        """The digest of what each worker has now. Empty: it carries nothing."""

    def count_calls(self) -> tuple[int | None, int | None]:
        """Send once, and count the Python calls in the trainer and in the first worker. None: not counted."""
        self.send()
        return None, None


class ModelContender(Contender):
    """Carries a model. The Python calls of a send are counted in the trainer."""

    source: Source

    def sent_digest(self) -> str:
        """The digest of the trainer's model."""
        return digest_of_model(self.source.model)

    def count_calls(self) -> tuple[int | None, int | None]:
        """Count the calls in the trainer; a subclass that can also asks a worker."""
        return calls_of(self.send), None


class Backend(Protocol):
    """Makes contenders, and holds what they share for the whole run."""

    def contenders(self, situation: Situation) -> Iterator[Contender]:
        """Make the contenders of one situation."""

    def close(self) -> None:
        """End what they shared."""
