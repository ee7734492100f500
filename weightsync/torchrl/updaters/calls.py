"""A worker's call as a link of a sender: an update begins the call, and the end of the call is the answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Final, Never

import torch

from weightsync.clock import Stopwatch
from weightsync.engine.packer import Packed, Packer, Readers, nobody
from weightsync.errors import ConfigurationError, TransportError
from weightsync.options import Verify
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Message, Update, WeightsForm
from weightsync.protocol.report import Evidence
from weightsync.transports.base import Link
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, CallLink
from weightsync.transports.calls.without_receiver import ack, raised, refusal, start_call
from weightsync.weights.layout import Layout
from weightsync.weights.loader import has_not_run
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.target import Mode

#: A worker's id; None: an updater's only worker, without an id.
WorkerId = int | torch.device | None
#: Makes a worker's call: returns once it has ended, or returns a future of its end.
Begin = Callable[[WorkerId], Any]
#: Errors of a call that mean that its worker is gone, not that it refused.
CONNECTION_ERRORS: Final = (ConnectionError, EOFError)


class Raised(Exception):
    """Set on a call's future when the worker's own code raised."""

    def __init__(self, reason: str, remote_traceback: str) -> None:
        super().__init__(reason, remote_traceback)
        self.reason = reason
        self.remote_traceback = remote_traceback


class NotCalled(Exception):
    """Raised in place of a worker's call if it could not be made: the worker has heard of nothing."""


@dataclass(frozen=True, slots=True)
class Call:
    """One worker's part of one push."""

    worker: WorkerId
    update: Update
    answers: Answers

    def make(self, begin: Begin) -> None:
        """Make the call. An interrupt is raised, and leaves the call's outcome unknown."""
        watch = Stopwatch()
        try:
            returned = begin(self.worker)
        except Exception as error:  # noqa: BLE001 - a user's hook may raise anything: its worker's outcome reports it
            self._failed(error)
        except BaseException:
            self.answers.set_exception(TransportError("the call was interrupted"))
            raise
        else:
            if has_not_run(returned):
                self._failed(NotCalled("its method is async, and nothing here awaits it: nothing of it has run"))
            elif isinstance(returned, Future):
                returned.add_done_callback(lambda over: self._over(over, watch))
            else:
                self._returned(watch)

    def superseded(self) -> None:
        """Answer without making the call: its push has ended."""
        self.answers.set_result([refusal(self.update, "its push is over", kind=RefusalKind.SUPERSEDED)])

    def _over(self, future: Future[Any], watch: Stopwatch) -> None:
        error = CancelledError("the call was cancelled") if future.cancelled() else future.exception()
        if error is None:
            self._returned(watch)
        else:
            self._failed(error)

    def _returned(self, watch: Stopwatch) -> None:
        self.answers.set_result([ack(self.update, seconds=watch.seconds)])

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, Raised):
            self.answers.set_result([refusal(self.update, error.reason, error.remote_traceback)])
        elif isinstance(error, NotCalled):
            self.answers.set_result([refusal(self.update, str(error), evidence=Evidence.NONE)])
        elif isinstance(error, TransportError):
            self.answers.set_exception(error)
        elif isinstance(error, CONNECTION_ERRORS):
            lost = TransportError(f"the call failed: {type(error).__name__}: {error}")
            lost.__cause__ = error
            self.answers.set_exception(lost)
        else:
            self.answers.set_result([raised(self.update, error)])


class Calls:
    """Takes the calls of one updater's call clients. What it does with them depends on the push in progress."""

    def __init__(self) -> None:
        self.take: Callable[[Call], None] = Call.superseded


class WorkerCallClient:
    """Turns the updates for one worker into calls: a `weightsync.transports.calls.client.CallClient`."""

    def __init__(self, worker: WorkerId, calls: Calls) -> None:
        self._worker = worker
        self._calls = calls

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Turn an update into a call; answer a handshake or goodbye at once."""
        return start_call(message, f"worker {self._worker}", self._bring)

    def _bring(self, update: Update) -> Answers:
        answers: Answers = Future()
        self._calls.take(Call(self._worker, update, answers))
        return answers

    def close(self) -> None:
        """Do nothing: the calls are the updater's."""


class NoPacker(Packer):
    """Packs nothing: a call takes the weights as the updater has them."""

    def __init__(self) -> None:
        super().__init__()
        self._packed = Packed(Layout([]), Buffer(0), b"", b"", verify=Verify.LAYOUT)

    def layout_of(self, weights: Any) -> Layout:
        """An empty layout."""
        return self._packed.layout

    def pack(
        self,
        weights: Any,
        form: WeightsForm | None = None,
        readers: Readers = nobody,
        targets: tuple[int, ...] | None = None,
    ) -> Packed:
        """An empty payload."""
        return self._packed


class CallServices:
    """`SchemeServices` of an updater's sender: one link per worker, whose updates become calls."""

    apply_mode = Mode.COPY
    #: All weights are received.
    applied_selection = None

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.strategy = WeightStrategy()

    @property
    def packer(self) -> Packer:
        """A packer that packs nothing."""
        return NoPacker()

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        """A link to the worker whose id is ``endpoint``."""
        return CallLink(WorkerCallClient(endpoint, self._calls), f"worker {endpoint}")

    def listen(self, endpoint: Any, model_id: str, accept: Callable[[Link], None]) -> Never:
        """Not supported: an updater only sends. Raises ConfigurationError: always."""
        raise ConfigurationError("An updater only sends: make receivers by a scheme.")

    def user_messages(self, endpoint: Any) -> Never:
        """Not supported: an updater has no pipes. Raises ConfigurationError: always."""
        raise ConfigurationError("An updater has no pipes that could carry messages of your own.")

    def transport_of(self, receiver: Any, endpoint: Any) -> Never:
        """Not supported: an updater has no receivers. Raises ConfigurationError: always."""
        raise ConfigurationError("An updater only sends: make receivers by a scheme.")

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        """The weights as they are."""
        return weights

    def published(self, model_id: str, weights: Any) -> None:
        """Do nothing: no copy of the weights is kept."""
