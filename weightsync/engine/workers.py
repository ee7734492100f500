"""A sender's workers, and how each is reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from msgspec import Struct

from weightsync.clock import Deadline, Timeout
from weightsync.engine.arguments import expected_number, require_worker_id
from weightsync.engine.copies import SchemeServices
from weightsync.engine.driver import Shield, close
from weightsync.engine.packer import Packer
from weightsync.engine.sender_driver import SenderDriver
from weightsync.errors import AckTimeoutError, ConfigurationError, RefusedError, StateError, WorkerLostError, sentence
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import SenderInput
from weightsync.protocol.sender import LinkState
from weightsync.transports.base import Link, Withdraws, require_link
from weightsync.transports.pipe.user_messages import UserMessages
from weightsync.transports.wakeup import AwaitedProcess
from weightsync.weights.layout import Layout

#: Seconds between two checks of processes that have not started yet.
START_CHECK_SECONDS: Final = 0.5


class SendTargets(Struct, frozen=True):
    """The workers that a send is for."""

    #: Worker ids; None: all.
    targets: tuple[int, ...] | None
    #: The least number of workers there must be; None: what the sender expects.
    expected: int | None
    #: Whether a send to all may find no worker.
    allow_empty: bool


class Workers:
    """The workers of one sender.

    The methods are those of `WeightSender` by the same names, which documents them.
    """

    def __init__(self, services: SchemeServices, driver: SenderDriver, packer: Packer) -> None:
        self._services = services
        self._driver = driver
        self._packer = packer
        #: How each worker is reached, by its id: what `SchemeServices.create_link` was given.
        self.endpoints: dict[int, Any] = {}
        driver.kept.append(self.endpoints)

    def add(self, worker_id: int, endpoint: Any, process: Any, known_layout: Callable[[], Layout | None]) -> None:
        """See `WeightSender.add_worker`.

        Args:
            known_layout: the layout of what a send without weights would send now; None: unknown.
        """
        self._driver.require_open("add_worker")
        worker_id = require_worker_id(worker_id)
        awaited = None if process is None else AwaitedProcess(process)
        self._renew_layout(worker_id, known_layout)
        # An interrupt waits for the new link: its threads would be left without an owner.
        with Shield(self._driver.waker.fire):
            link = self._services.create_link(endpoint, self._driver.model_id, f"worker {worker_id}")
            require_link(link, f"create_link() of {type(self._services).__name__} returned an object")
            self._join(worker_id, endpoint, link, awaited)

    def _join(self, worker_id: int, endpoint: Any, link: Link, process: AwaitedProcess | None) -> None:
        with self._driver.lock:
            try:
                self._driver.require_open("add_worker")
            except StateError:  # another thread has closed the sender meanwhile
                close(link)
                raise
            self.endpoints[worker_id] = endpoint
            self._driver.join(worker_id, link, process)

    def model_replaced(self, known_layout: Callable[[], Layout | None]) -> None:
        """The trainer has another model: handshakes carry no layout until a version of that was applied.

        If no version was sent yet, those that carry a layout carry that of the new model, if it is known.
        """
        driver = self._driver
        layout = None if driver.data.version or driver.layout is None else known_layout()
        with driver.lock:
            driver.last_of_former_model = driver.data.version
            if layout is not None or driver.data.version:
                driver.layout = layout

    def _renew_layout(self, worker_id: int, known_layout: Callable[[], Layout | None]) -> None:
        """If this worker has refused the handshake, have the next one carry the layout of the present weights.

        If the trainer has no model, it is unknown: the worker then answers for the version that follows.
        """
        entry = self._driver.data.workers.get(worker_id)
        if entry is None or entry.link_state is not LinkState.REFUSED:
            return
        layout = known_layout()
        if layout is not None or self._driver.data.version:
            self._driver.layout = layout

    def remove(self, worker_id: int) -> None:
        """See `WeightSender.remove_worker`."""
        self._driver.require_open("remove_worker")
        worker_id = require_worker_id(worker_id)
        with Shield(self._driver.waker.fire):
            self._driver.remove(worker_id, "it was removed from the workers")

    def open_endpoints(self) -> dict[int, Any]:
        """How each worker with an open link is reached. A pipe that was closed with its link reaches no worker."""
        workers, endpoints = self._driver.data.workers, self.endpoints.copy()
        return {
            w: endpoint for w, endpoint in endpoints.items() if (entry := workers.get(w)) is not None and entry.open
        }

    def withdraw(self) -> None:
        """The sender could not be initialised: close its links, and leave open the connections that the user gave."""
        for link in self._driver.links():
            link.withdraw() if isinstance(link, Withdraws) else close(link)

    def wait(self, timeout: float | Timeout | None, method: str = "await_workers") -> None:
        """See `WeightSender.await_workers`; ``method`` is the method that the user called."""
        deadline = Deadline(timeout)
        with Shield(self._driver.waker.fire) as shield:
            while True:
                fired = self._driver.waker.fired
                self._driver.require(SenderInput.SEND, method)
                self._driver.pump()
                expected = self._workers_in_state(LinkState.EXPECTED)
                if not expected:
                    break
                if deadline.passed:
                    self._raise_timeout(sorted(expected))
                shield.deliver()
                self._driver.wait(seconds_to_check(deadline.nap) if self._driver.awaited else deadline.nap, fired)
        self._require_all_up()
        self.make_slots()

    def make_slots(self) -> None:
        """Make the slots that had to wait for the workers' answers."""
        self._packer.reserve(self._driver)

    def _raise_timeout(self, expected: list[int]) -> NoReturn:
        remark_by_worker = {worker: remark for worker in expected if (remark := self._driver.remark(worker))}
        remarks = "".join(f" Worker {worker}: {sentence(remark)}" for worker, remark in remark_by_worker.items())
        raise AckTimeoutError(
            f"workers {expected} of {self._driver.model_id!r} have not connected.{remarks} They may still be "
            "starting, or have no model of that name yet: look at their logs and wait again, or remove them with "
            "remove_worker().",
            pending=expected,
        )

    def _require_all_up(self) -> None:
        lost, refused = self._reasons(LinkState.LOST), self._reasons(LinkState.REFUSED)
        ended = sorted({**lost, **refused}.items())
        reasons = sentence("; ".join(f"worker {worker}: {reason.rstrip('.')}" for worker, reason in ended))
        if lost:
            raise WorkerLostError(f"{reasons} add_worker() brings one back, remove_worker() removes it.", lost=lost)
        if refused:
            raise RefusedError(f"{reasons} Give it the trainer's model and add_worker() it again.", refused=refused)

    def _reasons(self, link_state: LinkState) -> dict[int, str]:
        return {worker: entry.reason for worker, entry in self._workers_in_state(link_state).items()}

    def _workers_in_state(self, link_state: LinkState) -> dict[int, pure.Entry]:
        """The workers whose link is in a state."""
        workers = dict(self._driver.data.workers.items())
        return {worker: entry for worker, entry in workers.items() if entry.link_state is link_state}

    def require_enough_workers(self, targets: SendTargets, default_number: int | None) -> None:
        """Raise ConfigurationError: there are fewer workers than expected, or what is expected is not a number.

        Args:
            default_number: how many workers the sender expects if the send does not say so.
        """
        data, expected = self._driver.data, expected_number(targets.expected)
        expected = expected_number(default_number) if expected is None else expected
        if expected is not None and len(data.workers) < expected:
            goodbyes = "".join(f" Worker {worker} left: {goodbye}." for worker, goodbye in data.left.items())
            raise ConfigurationError(
                f"{expected} workers are expected, and {len(data.workers)} have been added: "
                f"{sorted(data.workers)}.{goodbyes} "
                "Nothing was sent and no version was used. add_worker() adds a worker."
            )

    def pipe(self, worker_id: int) -> UserMessages:
        """See `WeightSender.pipe`."""
        with self._driver.lock:  # another thread may take the worker's goodbye
            self._driver.require_open("pipe")
            worker_id = require_worker_id(worker_id)
            pure.known(self._driver.data, worker_id)
            endpoint = self.endpoints[worker_id]
        return self._services.user_messages(endpoint)


def seconds_to_check(nap: float | None) -> float:
    """Seconds to sleep while processes have not started: until the next check of them, and no longer than ``nap``."""
    return START_CHECK_SECONDS if nap is None else min(nap, START_CHECK_SECONDS)
