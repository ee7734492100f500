"""Where a receiver listens for links, and who reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import ref

from weightsync.engine.copies import SchemeServices
from weightsync.engine.driver import Shield
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.errors import sentence
from weightsync.protocol._tables import State
from weightsync.transports.base import Link


class BackgroundReader(Protocol):
    """Reads a receiver's links on a thread of its own."""

    def receive(self, timeout: float | None) -> bool:
        """Wait until a version is live or refused: see `WeightReceiver.receive`."""

    def link_added(self) -> None:
        """There is one more link to read."""

    def model_set(self, model: Any) -> None:
        """Another model is served from now on."""

    def version_decided(self) -> None:
        """A version went live or was refused, on any thread."""

    def prepare_relay(self) -> bool:
        """Note how the version that is about to go live is passed on to other workers; False: to none."""

    def stop(self) -> None:
        """Stop reading and end the thread. Waits for the thread, unless called on it."""


@runtime_checkable
class SelfEndingListener(Protocol):
    """A listener that may end before it is stopped, because its place has ended."""

    @property
    def ended(self) -> bool:
        """Whether it gives no further link."""


class Listening:
    """Where a receiver listens, and its background reader. The links themselves are its driver's."""

    #: How it is given another sender that cannot make a new link by itself, for messages.
    relink_advice = (
        "pass a new pipe to register_worker_transport(), or, over torch.distributed with another store, (store, rank)"
    )

    def __init__(self, services: SchemeServices, driver: ReceiverDriver) -> None:
        self._services = services
        self._driver = driver
        self._listeners: list[Callable[[], None]] = []
        #: Where the receiver listens, as it was registered last; None: nowhere yet.
        self.endpoint: Any = None
        #: The only reader of the links; None: the threads that call `receive` read them.
        self.background_reader: BackgroundReader | None = None

    def listen(self, endpoint: Any) -> None:
        """Take links from one more endpoint. An earlier listener at the same place is stopped.

        Raises:
            ConfigurationError: no link can be made of it.
            StateError: another thread has closed the receiver meanwhile.
        """
        self.endpoint = endpoint
        # An interrupt waits for the new listener: its thread would be left without an owner.
        with Shield(self._driver.waker.fire):
            with self._driver.expecting_sender():
                listener = self._services.listen(endpoint, self._driver.model_id, _LinkAcceptor(ref(self)))
            self._add_listener(listener)

    def _add_listener(self, listener: Callable[[], None]) -> None:
        with self._driver.lock:
            # At the same place: nothing would reach the earlier one any more. One that has ended holds its store.
            useless = [each for each in self._listeners if each == listener or _has_ended(each)]
            self._listeners = [*(each for each in self._listeners if each not in useless), listener]
        for each in useless:
            each()
        if self._driver.machine.state is State.CLOSED:
            self.stop()
            raise self._driver.refused("register_worker_transport")

    def accept(self, link: Link) -> None:
        """Take a link."""
        self._driver.add_link(link)
        if self.background_reader is not None:
            self.background_reader.link_added()

    def check(self, method: str = "receive") -> None:
        """Check that a sender is linked, or may still be.

        Raises:
            StateError: the receiver is closed, or has no link yet.
            SenderClosed: the sender closed the link cleanly.
            TransportError: the sender is gone.
        """
        driver = self._driver
        if driver.links():
            return
        driver.require_open(method)
        if self._listeners and not driver.ended:
            return
        if not driver.ended:
            raise driver.refused(method)
        served = driver.data.served
        kept = f"keeps version {served[1]}" if served else "serves no version"
        raise driver.ended_error(
            f"model {driver.model_id!r} has no sender any more: {sentence(driver.ended)} It {kept}. To receive from "
            f"another sender, {self.relink_advice}. Over the same store, RPC and Ray there is nothing to do: the new "
            "sender makes a new link."
        )

    def stop(self) -> None:
        """Stop taking links. Those that are open stay open."""
        with self._driver.lock:
            listeners, self._listeners = self._listeners, []
        for each in listeners:
            each()


def _has_ended(listener: Callable[[], None]) -> bool:
    return isinstance(listener, SelfEndingListener) and listener.ended


@dataclass(frozen=True)
class _LinkAcceptor:
    """Gives a receiver its links, and does not hold it: listeners may have threads, and it may be dropped."""

    listening: ref[Listening]

    def __call__(self, link: Link) -> None:
        listening = self.listening()
        if listening is None:
            link.close()
        else:
            listening.accept(link)
