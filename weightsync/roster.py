"""Who is on a sender's roll, and how each worker is reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync._tables import SENDER_ROWS, SenderInput
from weightsync.driving.interrupts import Shield
from weightsync.driving.sender import SenderDriver
from weightsync.driving.traced import sender_driver
from weightsync.errors import ConfigurationError, LayoutError
from weightsync.layout import Layout
from weightsync.machine import next_state
from weightsync.protocol import sender as pure
from weightsync.side import Side, pipes_travel, require_worker_id
from weightsync.timing import new_incarnation
from weightsync.transports.awaited import AwaitedProcess
from weightsync.transports.base import Link
from weightsync.transports.user import UserMessages


class Roster(Side):
    """A sender's workers and their links."""

    _driver: SenderDriver

    def _begin(self) -> None:
        self._endpoints: dict[int, Any] = {}
        self._driver = sender_driver(self._model_id)
        self._packer = self._scheme.packer

    def add_worker(self, worker_id: int, pipe_or_context: Any, *, process: Any = None) -> None:
        """Put a worker on the roll, or give one that is on it a new link. Never waits.

        A joiner gets the newest version that is due to it right behind the handshake.

        Args:
            worker_id: its id, 0 or more.
            pipe_or_context: our end of a duplex `multiprocessing.Pipe`, or an object whose ``.pipe`` is that.
            process: the worker's process on this host, if there is one: a `multiprocessing` process or a
                `subprocess.Popen`, started or not yet, or a process id. Its death is then noticed before it has
                connected too.

        Raises:
            StateError: the sender is closed.
            ConfigurationError: no link can be made of it, or ``process`` is no process.
        """
        next_state(SENDER_ROWS, self.state, SenderInput.JOIN)
        worker_id = require_worker_id(worker_id)
        awaited = None if process is None else AwaitedProcess(process)
        link = self._scheme.lay_link(pipe_or_context, self._model_id, f"worker {worker_id}")
        self._endpoints[worker_id] = pipe_or_context
        with Shield(self._driver.waker.fire):
            self._driver.join(worker_id, link, awaited)

    def remove_worker(self, worker_id: int) -> None:
        """Take a worker off the roll and close its link; if it owed, its outcome is LOST.

        Raises:
            StateError: the sender is closed.
            ConfigurationError: it is not on the roll.
        """
        with Shield(self._driver.waker.fire):
            self._driver.remove(worker_id, "removed from the roll")
        self._endpoints.pop(worker_id, None)

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """The reference's name of `add_worker`, with its argument's name."""
        self.add_worker(worker_idx, pipe_or_context)

    _register_worker = register_worker

    def connect(self, fence: int | None = None, *, weights: Any = None) -> None:
        """Lay the links: each holds our Hello where its worker will find it. Never waits for a worker.

        Args:
            fence: the incarnation to rise above, as a `WorkerLostError` of a fenced sender carries it.
            weights: what will be sent first, where that is not the registered model: the handshake carries its layout.

        Raises:
            StateError: the links were laid already, or the sender is closed.
            ConfigurationError, LayoutError: these weights cannot be sent; no link was laid.
        """
        incarnation = new_incarnation(fence or 0)
        next_state(SENDER_ROWS, self.state, SenderInput.CONNECT)
        layout = self._known_layout() if weights is None else self._packer.layout_of(weights)
        with Shield(self._driver.waker.fire), self._driver.lock:
            if self._driver.layout is None:
                self._driver.layout = layout
            self._driver.take(pure.Connect(incarnation))

    def transports(self) -> dict[int, Link]:
        """Each worker's link, while it is up or expected."""
        return self._driver.by_worker()

    def _known_layout(self) -> Layout | None:
        """The layout of the registered model, if there is one already."""
        try:
            weights = self._scheme.prepare_weights(None, self._model_id, self._scheme.strategy, self._context())
        except (ConfigurationError, LayoutError):
            return None  # the first send will say why
        return self._packer.layout_of(weights)

    # ------------------------------------------------------------------------------------------- reading

    @property
    def version(self) -> int:
        """The newest version ever dispatched; 0: none."""
        return self._driver.data.version

    @property
    def incarnation(self) -> int:
        """This sender's incarnation; 0 before its links are laid."""
        return self._driver.data.incarnation

    @property
    def roll(self) -> Mapping[int, pure.Entry]:
        """Each worker's entry: how its link stands, which version it last acked."""
        return dict(self._driver.data.roll)

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids on the roll."""
        return tuple(self._driver.data.roll)

    @property
    def stale_answers(self) -> int:
        """How many answers came that nobody was owed."""
        return self._driver.data.stale

    def pipe(self, worker_id: int) -> UserMessages:
        """The user's own messages on a worker's pipe, with the methods of a connection.

        Raises:
            StateError: the sender is closed.
            ConfigurationError: it is not on the roll, or has no pipe.
        """
        next_state(SENDER_ROWS, self.state, SenderInput.JOIN)
        pure.known(self._driver.data, worker_id)
        return self._scheme.user_messages(self._endpoints[worker_id])

    # ------------------------------------------------------------------------------------------- copies

    def _travelling(self) -> dict[int, Any]:
        return dict(self._endpoints) if pipes_travel() else {}

    def _arrived(self, own: dict[int, Any]) -> None:
        for worker_id, endpoint in own.items():
            self.add_worker(worker_id, endpoint)
