"""The workers, as the trainer holds them. None of them outlives it."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from weightsync.demo.grounds import Seat
from weightsync.demo.settings import SchemeName, Settings
from weightsync.demo.wire import FromWorker, ToWorker

#: What a worker process runs: its id, the settings, its place, its end of the demo's pipe.
Body = Callable[[int, Settings, Seat, Connection], None]
#: Told of a worker's id and its message.
Listener = Callable[[int, FromWorker], None]
#: Seconds that workers have to end by themselves.
GRACE = 3.0


class Gone:
    """Nothing more will come from a worker."""


#: What arrives: a worker's id and its message.
Inbox = queue.SimpleQueue[tuple[int, FromWorker | Gone]]


class Fleet(Protocol):
    """Starts the workers, carries the demo's own messages, and ends them."""

    #: How many workers there are.
    size: int
    inbox: Inbox

    @property
    def pids(self) -> Sequence[int | None]:
        """The process id of each worker."""

    def arguments(self) -> dict[str, Any]:
        """What `init_on_sender` is to be given to reach them."""

    def tell(self, index: int, message: ToWorker) -> None:
        """Send a worker a command; one that is gone does not get it."""

    def kill(self, index: int) -> None:
        """Send a worker SIGKILL."""

    def close(self) -> None:
        """End all workers: by command, and those who do not obey by SIGKILL."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def warm_up(scheme: SchemeName) -> None:
    """Begin with what takes seconds at the start of workers over that scheme, and go on meanwhile."""
    from weightsync.demo import process_fleet  # noqa: PLC0415 - not where Ray starts the workers

    if scheme is SchemeName.RPC:
        # torch's RPC writes a line for each connection that ends, in every process.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if scheme is not SchemeName.RAY:
        process_fleet.warm_up()


def start(settings: Settings, heard: Listener, body: Body | None) -> Fleet:
    """Start the workers of a run.

    Args:
        settings: how many workers, and what they are told.
        heard: called with each message, in the thread that reads it.
        body: what worker processes run; None: `rollout.work`.

    Raises:
        MissingExtraError: Ray is wanted, and not installed.
        ConfigurationError: a body for workers that are no processes of ours.
    """
    if settings.scheme is SchemeName.RAY:
        from weightsync.demo.ray_fleet import RayFleet  # noqa: PLC0415 - only where it is used

        return RayFleet(settings, heard, body)
    from weightsync.demo.process_fleet import ProcessFleet  # noqa: PLC0415 - not where Ray starts the workers

    return ProcessFleet(settings, heard, body)
