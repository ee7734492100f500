"""An observer that several tests of the checker share."""

from __future__ import annotations

from weightsync.model.manifest import Configuration
from weightsync.model.output import Progress
from weightsync.model.verdict import Verdict


class Recorder:
    """An observer that records its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def started(self, configuration: Configuration) -> None:
        self.seen.append(("started", configuration.name))

    def progressed(self, configuration: Configuration, progress: Progress) -> None:
        self.seen.append(("progressed", configuration.name))

    def ended(self, verdict: Verdict) -> None:
        self.seen.append(("ended", verdict.configuration.name))
