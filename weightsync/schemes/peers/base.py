"""Workers without a weightsync receiver, and users' own transports: how weights reach them, and what they must offer.

How they answer is in `weightsync.transports.calls.without_receiver`.
"""

from __future__ import annotations

import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from weightsync.engine.context import optional
from weightsync.errors import ConfigurationError, thread_not_started
from weightsync.protocol.messages import Update, WeightsForm
from weightsync.transports.buffers import Buffer
from weightsync.weights.layout import Layout
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.unpacking import present_as


class Presenter:
    """Turns updates into weights. A link's first update has the layout, which is kept for later updates."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: dict[bytes, Layout] = {}

    def read_layout(self, update: Update) -> None:
        """Keep the layout of an update, if it has one."""
        if update.layout:
            with self._lock:
                self._layouts[update.layout_digest] = Layout.decode(update.layout)

    def present(self, update: Update, payload: memoryview, form: WeightsForm | None = None) -> Any:
        """The weights of an update as fresh tensors, in a form (None: the form in which the trainer gave them)."""
        self.read_layout(update)
        return present_as(form or update.form, self._layouts[update.layout_digest], payload, update.extras)


class SharedWeights:
    """A version's weights, kept as long as a call carries them."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights


class SharedPresenter:
    """Presents each version once for all workers of a sender."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._presenter = Presenter()
        self._shared: weakref.WeakValueDictionary[tuple[str, int, int, WeightsForm], SharedWeights] = (
            weakref.WeakValueDictionary()
        )

    def present(self, update: Update, payload: Buffer | None, form: WeightsForm | None) -> SharedWeights:
        """The weights of an update in a form (None: as they were given). The payload may be overwritten afterwards."""
        key = update.model_id, update.incarnation, update.version, form or update.form
        with self._lock:
            self._presenter.read_layout(update)
            shared = self._shared.get(key)
            if shared is None:
                weights = self._presenter.present(update, payload_of(update, payload), form)
                shared = self._shared[key] = SharedWeights(weights)
            return shared


class JobThread:
    """A daemon thread that does one job after another. The first job starts it.

    Args:
        name: the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Queue a job. Raises TransportError: the thread cannot be started."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                raise thread_not_started(self._name, error) from error
        self._jobs.put(job)

    def end(self) -> threading.Thread | None:
        """Let the thread end after its current job. Returns it, if it was started and is not this thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
        return None if thread is threading.current_thread() else thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


#: What to give in place of a transport or an adapter whose methods are ``async``.
PLAIN_METHODS: Final = "Let it run its own event loop, and return when it is done."


def refuse_coroutines(owner: Any, names: Sequence[str], instead: str) -> None:
    """Refuse an object whose methods are coroutine functions: nobody would await the coroutines, so nothing would run.

    Args:
        owner: the user's object.
        names: the methods that are called; those that it lacks do not matter.
        instead: what to give in its place.

    Raises:
        ConfigurationError: one of the methods is ``async def``.
    """
    never = [name for name in names if inspect.iscoroutinefunction(optional(owner, name))]
    if never:
        raise ConfigurationError(
            f"{', '.join(f'{name}()' for name in never)} of {type(owner).__name__} is async: it is called in a thread "
            f"without an event loop, where nothing would run. {instead} Nothing was sent."
        )


def payload_of(update: Update, payload: Buffer | None) -> memoryview:
    """The bytes of an update."""
    return memoryview(b"") if payload is None else payload.view[: update.nbytes]


@runtime_checkable
class TransportBackend(Protocol):
    """A user's own transport to one worker. `WeightSender.send` calls it in a thread.

    Both generations' signatures work: ``send_weights(model_id, weights)`` and ``send_weights(weights)``. An exception
    is reported as REFUSED, with its traceback. A return is reported as APPLIED, with the evidence `Evidence.CALL`. A
    transport whose ``send_weights`` returns only when the worker has applied the weights declares that with the class
    attribute ``evidence = Evidence.ANSWER``.
    """

    def send_weights(self, model_id: str, weights: Any) -> Any:
        """Send weights, and wait until they have arrived, or are applied."""

    def receive_weights(
        self, timeout: float = 1.0, *, weights: Any = None, model: Any = None, strategy: WeightStrategy | None = None
    ) -> Any:
        """The next ``(model_id, weights)``, or None.

        weightsync passes at most ``timeout``; the keywords are for programs that call it themselves.
        """

    def check_connection(self) -> bool:
        """Whether the worker can be reached. If this is False before a call, the worker is LOST."""


@runtime_checkable
class BareTransport(Protocol):
    """The minimum of a user's own transport: generation B's protocol, which has no ``check_connection``."""

    def send_weights(self, weights: Any) -> Any:
        """Send weights, and wait until they have arrived, or are applied."""

    def receive_weights(self, timeout: float | None = None) -> Any:
        """The next weights, or None."""


@runtime_checkable
class InitialSyncTransport(Protocol):
    """A transport that transfers the first weights in its own way, for programs that call these methods themselves.

    weightsync calls neither: it sends the first weights by ``send_weights``, like all others.
    """

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect, and send the first weights."""

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int, weights: Any = None, model: Any = None, strategy: WeightStrategy | None = None
    ) -> Any:
        """Connect, and return the first weights."""
