"""Who is on a sender's roll, and how each worker is reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.clock import Deadline, Timeout, new_incarnation
from weightsync.engine.copies import Side, pipes_travel, require_whole, require_worker_id
from weightsync.engine.recorded_drivers import sender_driver
from weightsync.engine.sender_driver import SenderDriver
from weightsync.engine.signals import Shield
from weightsync.errors import (
    AckTimeoutError,
    ConfigurationError,
    LayoutError,
    RefusedError,
    WorkerLostError,
    warn_renamed,
)
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import SenderInput
from weightsync.transports.base import Link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.wakeup import AwaitedProcess
from weightsync.weights.layout import Layout


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
        self._driver.require_open("add_worker")
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
        self._driver.require_open("remove_worker")
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
        above = 0 if fence is None else require_whole(fence, "fence", "the incarnation to rise above")
        incarnation = new_incarnation(above)
        self._driver.require(SenderInput.CONNECT)
        layout = self._known_layout() if weights is None else self._packer.layout_of(weights)
        with Shield(self._driver.waker.fire), self._driver.lock:
            if self._driver.layout is None:
                self._driver.layout = layout
            self._driver.take(pure.Connect(incarnation))

    def await_workers(self, timeout: float | Timeout | None = Timeout.DEFAULT) -> None:
        """Wait until every worker on the roll has answered the handshake: a rendez-vous without weights.

        Args:
            timeout: seconds; None: for ever; default: `WEIGHTSYNC_TIMEOUT` or 60.

        Raises:
            StateError: the links are not laid, or the sender is closed.
            AckTimeoutError: some had not answered by the deadline. It may be called again.
            WorkerLostError: the others have answered, and some links were lost.
            RefusedError: the others have answered, and some have refused the handshake: their models do not fit.
        """
        deadline = Deadline(timeout)
        with Shield(self._driver.waker.fire) as shield:
            while True:
                seen = self._driver.waker.fired
                self._driver.require(SenderInput.SEND, "connect")
                self._driver.pump()
                awaited = self._standing(pure.LinkState.EXPECTED)
                if not awaited:
                    break
                if deadline.passed:
                    remarks = "".join(
                        f" Worker {worker}: {remark}." for worker in awaited if (remark := self._driver.remark(worker))
                    )
                    raise AckTimeoutError(
                        f"workers {sorted(awaited)} of {self._model_id!r} have not connected.{remarks} They may still "
                        "be starting, or have no model of that name yet: see their logs, call it again, or "
                        "remove_worker() takes one off the roll.",
                        pending=sorted(awaited),
                    )
                shield.deliver()
                self._driver.wait(deadline.nap, seen)
        lost, refused = self._reasons(pure.LinkState.LOST), self._reasons(pure.LinkState.REFUSED)
        told = "; ".join(f"worker {worker}: {reason}" for worker, reason in sorted({**lost, **refused}.items()))
        if lost:
            raise WorkerLostError(f"{told}. add_worker() brings one back, remove_worker() takes it off.", lost=lost)
        if refused:
            raise RefusedError(f"{told}. Give it the trainer's model and add_worker() it again.", refused=refused)

    def _reasons(self, link_state: pure.LinkState) -> dict[int, str]:
        return {worker: entry.reason for worker, entry in self._standing(link_state).items()}

    def _standing(self, link_state: pure.LinkState) -> dict[int, pure.Entry]:
        return {worker: entry for worker, entry in self.workers.items() if entry.link_state is link_state}

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

    def _refuse_other_model(self, given: Layout) -> None:
        """Refuse weights that are not those of the registered model: its workers could only refuse them, one by one.

        Raises:
            LayoutError: their names, shapes or dtypes are others.
        """
        if given == self._driver.layout:
            return
        try:
            registered = self._known_layout()
        except (ConfigurationError, LayoutError):
            return  # a model that cannot be sent says nothing of what can
        told = f"The weights are not those of the model that is registered for {self._model_id!r}"
        error = None if registered is None else registered.difference(given, told)
        if registered is not None and error is not None:
            message = (
                f"{error} The model has {registered.summary()}. The weights have {given.summary()}. Nothing was sent. "
                "If the workers have another model now, register it in the trainer first (scheme.model = ...)."
            )
            raise LayoutError(message, error.missing, error.unexpected, error.mismatched)

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
    def workers(self) -> Mapping[int, pure.Entry]:
        """Each worker's entry: how its link stands, which version it last acked."""
        return dict(self._driver.data.workers)

    @property
    def roll(self) -> Mapping[int, pure.Entry]:
        """The former name of `workers`."""
        warn_renamed("WeightSender.roll", "workers")
        return self.workers

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """The ids on the roll."""
        return tuple(self._driver.data.workers)

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
        self._driver.require_open("pipe")
        pure.known(self._driver.data, worker_id)
        return self._scheme.user_messages(self._endpoints[worker_id])

    # ------------------------------------------------------------------------------------------- copies

    def _travelling(self) -> dict[int, Any]:
        return dict(self._endpoints) if pipes_travel() else {}

    def _arrived(self, own: dict[int, Any]) -> None:
        for worker_id, endpoint in own.items():
            self.add_worker(worker_id, endpoint)
