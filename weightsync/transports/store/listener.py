"""Accepts the links that senders announce to a worker."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import ref

from weightsync.errors import ConfigurationError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Message
from weightsync.transports.base import Link, Received, Waker
from weightsync.transports.buffers import Buffer
from weightsync.transports.process import PerProcess, forget_after_fork
from weightsync.transports.sealing import TURNED_AWAY
from weightsync.transports.store import heartbeat
from weightsync.transports.store.announcing import (
    RECEIVERS,
    SENDERS,
    Announced,
    Models,
    WorkerLocation,
    announced_key,
    claim_link,
    decline,
    worker_link,
    worker_location,
)
from weightsync.transports.store.blocking_threads import start_threads, unforeseen
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.store import Client, PrefixStore, Store, StoreEndpoint, base_of, keep_in_child

logger = logging.getLogger("weightsync")

_WAKE_UP = "nobody"
#: How often the end of a link checks for an earlier announcement that was not processed yet, and the seconds between.
_LOOKS: Final = 200
_LOOK_SECONDS: Final = 0.01


class _Listeners(PerProcess):
    """The listeners of this process whose threads run."""

    def _begin(self) -> None:
        self._listeners: tuple[_Listener, ...] = ()

    def add(self, listener: _Listener) -> None:
        """Add a listener."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def drop(self, listener: _Listener) -> None:
        """Remove a listener that has ended."""
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

    def at(self, location: WorkerLocation) -> list[_Listener]:
        """The listeners for the same worker."""
        return [each for each in self._listeners if each.where == location]


_listeners = _Listeners()


@dataclass(eq=False)
class _Place:
    """Where a receiver listens. If it listens there again, the earlier listener ends a little later."""

    #: What takes its links, once for each listener; empty once it listens here no more.
    accepts: list[Callable[[Link], None]] = field(default_factory=list)
    #: Links whose senders have not proved yet that they have the key.
    unproven: set[StoreLink] = field(default_factory=set)
    #: Links whose senders have proved it, and that the receiver does not have yet.
    admitted: set[StoreLink] = field(default_factory=set)
    #: Whether another process listens for the same worker; None: no listener has asked yet.
    other: _OtherProcess | None = None


class _OtherProcess:
    """Another process that has listened for the same worker, and may still do so.

    Args:
        key: the worker's.
    """

    def __init__(self, key: str) -> None:
        self._key = f"{key}/receiver"
        self._name, self._beat = "", b""

    def find(self, client: Client) -> None:
        """Take its place in the store, or keep it. Raises TransportError: the store is gone."""
        name = (client.value(self._key) or b"").decode("ascii", "replace")
        client.set(self._key, heartbeat.process_name().encode())
        self._name = name if name != heartbeat.process_name() else self._name

    def is_alive(self, client: Client) -> bool:
        """Whether it lives. Asked now and then, and said once. Raises TransportError: the store is gone."""
        if not self._name:
            return False
        before, self._beat = self._beat, client.peek(f"weightsync/heartbeat/{self._name}") or b""
        if not before or not self._beat or self._beat == before:
            return False
        self._name = ""
        return True

    def leave(self, client: Client) -> None:
        """Leave the place, if it is still ours. Raises TransportError: the store is gone."""
        if client.value(self._key) == heartbeat.process_name().encode():
            client.set(self._key, b"")


class _Listener:
    """A thread that waits under the worker's key for the next link.

    Args:
        place: shared with the receiver's other listeners there.
        leave: called when it is closed.
    """

    owner: Callable[[], object] = object  #: Gives the handle, and None once that was dropped.

    def __init__(
        self,
        endpoint: StoreEndpoint,
        model_id: str,
        accept: Callable[[Link], None],
        place: _Place,
        leave: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._model_id = model_id
        self.where = worker_location(endpoint, model_id)
        self._accept, self._place, self._leave = accept, place, leave
        self._other = place.other = place.other or _OtherProcess(self.where.key)
        self._over = threading.Event()
        #: Whether its thread has ended, as it does without its store.
        self.ended = False
        self._client: Client | None = None
        #: Wakes the thread when it is blocked on the other client.
        self._waking_client: Client | None = None
        self._next = 0
        #: Set once the sender of the link taken last has said goodbye.
        self._sender_left = threading.Event()
        self._remark = heartbeat.Remark()
        #: Why its store is lost; empty: it is not.
        self._lost = ""
        self._heartbeat_member = heartbeat.join(
            endpoint.store, heartbeat.Callbacks(self._on_store_lost, self._on_store_lost, self._on_beat)
        )
        forget_after_fork(self)
        _listeners.add(self)  # before an earlier one at the same place ends: a goodbye waits for one of them
        try:
            start_threads(self, {"weightsync-listener": self._listen})
        except TransportError:
            _listeners.drop(self)
            self._heartbeat_member.leave()
            raise

    def forget(self) -> None:
        """In a forked child: stop listening. The thread is the parent's."""
        self._over.set()
        keep_in_child(self._client, self._waking_client, self._heartbeat_member, self._endpoint)

    def _listen(self) -> None:
        try:
            self._waking_client = Client(self._endpoint.store)
            client = self._client = Client(self._endpoint.store)
            if self._lost:  # meanwhile: no heartbeat will report it again
                raise TransportError(f"The store is lost: {self._lost}.")
            self._heartbeat_member.await_name()  # from the first link on, its sender counts our beats
            Models(self._endpoint.rank, RECEIVERS).add(client, self._model_id)
            self._other.find(client)
            while not self._over.is_set():
                announced = client.await_value(self._next_key).decode("ascii", "replace")
                if not self._over.is_set() and announced != _WAKE_UP:
                    self._process(client, Announced.of(announced))
                self._next += 1
        except TransportError as error:
            # After a goodbye the loss of the store is expected: it may have been the sender's own.
            if not self._over.is_set() and not self._sender_left.is_set():
                self._accept(PlaceholderLink(error))
        except Exception as error:  # noqa: BLE001 - a thread that ends must say so
            self._accept(PlaceholderLink(unforeseen(error)))
        finally:
            _listeners.drop(self)
            self._heartbeat_member.leave()
            for opened in (self._client, self._waking_client):
                if opened is not None:
                    opened.close()
            self.ended = True

    def _on_beat(self, client: Client, _follow: heartbeat.Follow) -> None:
        """Called with each heartbeat: log other listeners for this rank, or senders that wait for other models only."""
        if self.owner() is None:
            self.close()
        if not self._over.is_set() and self._other.is_alive(client):
            logger.warning(
                "model %r: another process receives for rank %d of this store too, and each link goes to one of them: "
                "give every worker a rank of its own",
                *(self._model_id, self._endpoint.rank),
            )
        if self._next or self._over.is_set() or not Models.are_readable_in(self._endpoint.store):
            return
        other_models = Models(self._endpoint.rank, SENDERS).without(client, self._model_id)
        if self._remark.is_due(other_models):
            logger.warning(
                "model %r: a sender of %s waits for rank %d, and none of %r so far: give both sides the same model_id",
                *(self._model_id, other_models, self._endpoint.rank, self._model_id),
            )

    @property
    def _next_key(self) -> str:
        """The key under which the next link will be announced."""
        return announced_key(self.where.key, self._next)

    def _process(self, client: Client, announced: Announced | None) -> None:
        """Accept an announced link, unless it is another worker's, or refuse it before any receiver sees it."""
        if announced is None:
            logger.warning("the store's key %s names no link: it is skipped", self._next_key)
            return
        refused = announced.refusal_reason(self._endpoint, self._model_id)
        if refused is not None:
            logger.warning("model %r: a sender was turned away: %s.", self._model_id, TURNED_AWAY[refused])
            announced.refuse(client, refused)
        elif claim_link(client, announced.name):
            Models(self._endpoint.rank, SENDERS).remove(client, self._model_id)
            self._accept_link(client, announced.name)

    def _accept_link(self, client: Client, name: str) -> None:
        self._sender_left = sender_left = threading.Event()
        try:
            link = worker_link(self._endpoint, self._model_id, name, sender_left.set, self._before_end)
        except TransportError as error:
            logger.error("a link to %s was announced but cannot be accepted: %s", self.where.key, error)
            decline(client, name)
            self._accept(PlaceholderLink(error))
            return
        self._place.unproven.add(link)
        link.when_admitted(self._admit, self._reject)
        if not self._place.accepts and link in self._place.unproven:
            link.close()

    def _admit(self, link: StoreLink) -> None:
        # Added here before it leaves the other set: until the receiver has it, this listener is behind.
        self._place.admitted.add(link)
        self._place.unproven.discard(link)
        try:
            link.when_refused(partial(self._await_successor, link))
            self._accept(link)
        finally:
            self._place.admitted.discard(link)

    def _await_successor(self, link: StoreLink, why: str) -> None:
        """A handshake was refused. Its sender may already have replaced the link and announced another.

        A stand-in keeps the receiver listening until the sender's end is closed: by then its announcement has arrived.
        """
        placeholder = PlaceholderLink()
        if placeholder.waitables() and self._place.accepts:
            self._accept(placeholder)
            link.when_over(lambda: placeholder.end(TransportError(f"its handshake was refused: {why}")))

    def _reject(self, link: StoreLink) -> None:
        self._place.unproven.discard(link)
        if self._place.accepts:
            logger.warning(
                "model %r: a sender was turned away before it was authenticated: %s", self._model_id, link.failure
            )
        link.close()

    def _before_end(self, client: Client) -> None:
        """A link has ended: wait for a while until links announced before that are processed."""
        pause = threading.Event()
        for _ in range(_LOOKS):
            if not any(each.is_behind(client) for each in _listeners.at(self.where)):
                return
            pause.wait(_LOOK_SECONDS)

    def is_behind(self, client: Client) -> bool:
        """Whether a link was announced that the receiver does not have yet."""
        # In this order: a link that was announced is unproven, then admitted, before the receiver has it. One that is
        # closed counts as well, while its thread still takes a link.
        return client.present(self._next_key) or bool(self._place.unproven) or bool(self._place.admitted)

    def _on_store_lost(self, reason: str) -> None:
        self._lost = reason
        self.cut()

    def cut(self) -> None:
        """End the thread now."""
        if self._client is not None:
            self._client.cut()

    def close(self) -> None:
        """Accept no further link. The thread ends soon. What it has taken stays, if its receiver listens here again."""
        if self._over.is_set():
            return
        self._over.set()
        self._leave()
        for link in () if self._place.accepts else tuple(self._place.unproven):
            link.close()
        try:
            start_threads(self, {"weightsync-listener-waker": self._wake})
        except TransportError:  # from Python 3.12 on, no thread starts while the interpreter ends
            self.cut()

    def _wake(self) -> None:
        """Announce a dummy link where the thread waits. A link that has just been announced there wakes it as well."""
        # Without this client the thread is not waiting yet: it checks before it waits.
        try:
            if self._waking_client is not None:
                if all(each._over.is_set() for each in _listeners.at(self.where)):  # else we still receive there
                    self._other.leave(self._waking_client)  # first: the thread closes the client
                self._waking_client.claim(self._next_key, _WAKE_UP)
        except TransportError:
            self.cut()


class PlaceholderLink:
    """Stands for a link that could not be made, or that may still come: nothing is heard over it but how it ended.

    Args:
        error: how it has ended; None if it has not yet.
    """

    delivery = Delivery.ORDERED
    peer = "the sender"

    def __init__(self, error: TransportError | None = None) -> None:
        self._ended: TransportError | None = None
        self._wakers: list[Waker] = []
        # If it has no descriptor, its driver still reads it once, when it gets the link.
        with contextlib.suppress(TransportError):
            self._wakers.append(Waker())
        if error is not None:
            self.end(error)

    def end(self, error: TransportError) -> None:
        """End the link with this error, and wake its reader."""
        self._ended = error
        for waker in self._wakers:
            waker.fire()

    def send(self, message: Message, payload: Buffer | None = None) -> None:  # noqa: ARG002
        """Raise: this link has no reader."""
        raise self._ended or TransportError("this link has no other end yet.")

    def flush(self) -> bool:
        """Nothing is queued."""
        return True

    def receive(self) -> list[Received]:
        """Raise the error with which the link has ended, if it has."""
        if self._ended is not None:
            raise self._ended
        return []

    def waitables(self) -> list[int]:
        """Readable once it has ended, until it is closed."""
        return [waker.fileno() for waker in self._wakers if waker.fileno() >= 0]

    def wants_write(self) -> int | None:
        """Nothing is ever written here."""
        return None

    def watch(self, pid: int, started: int) -> None:
        """Do nothing: there is no process to watch."""

    def close(self) -> None:
        """Close the descriptors."""
        for waker in self._wakers:
            waker.close()


class _Receivers(PerProcess):
    """The receivers of this process that listen at stores: at most one for each model, rank and store."""

    def _begin(self) -> None:
        self._by_place: dict[Hashable, _Place] = {}

    def open(
        self, endpoint: StoreEndpoint, model_id: str, accept: Callable[[Link], None]
    ) -> tuple[_Place, Callable[[], None]]:
        """Register a receiver by what takes its links. Returns its place, and a function that removes it.

        Raises ConfigurationError: there is another. The same receiver may be registered again.
        """
        key = _identity_of(endpoint.store), endpoint.rank, model_id
        with self._lock:
            place = self._by_place.setdefault(key, _Place())
            if any(other != accept for other in place.accepts):
                raise ConfigurationError(
                    f"Model {model_id!r} has a receiver for rank {endpoint.rank} in this process: close that first."
                )
            place.accepts.append(accept)

        def shut() -> None:
            with self._lock:
                if accept in place.accepts:
                    place.accepts.remove(accept)
                if not place.accepts and self._by_place.get(key) is place:
                    del self._by_place[key]

        return place, shut


def _identity_of(store: Store) -> Hashable:
    """Identifies a store. A prefix cannot be read, so with one only the same object is the same place."""
    base = base_of(store)
    return (base.host, base.port) if store is base else store


_receivers = _Receivers()


@dataclass(frozen=True)
class ListenerHandle:
    """Ends what `listen` began when called. Two listeners at one place for one worker are equal."""

    where: WorkerLocation
    #: The id of a prefixed store, else 0. A prefix cannot be read, so only the same object is the same place.
    prefixed: int
    listener: _Listener = field(compare=False)

    @property
    def ended(self) -> bool:
        """Whether it gives no further link: its store has ended."""
        return self.listener.ended

    def __call__(self) -> None:
        """Accept no further link."""
        self.listener.close()


def listen(endpoint: StoreEndpoint, model_id: str, accept: Callable[[Link], None]) -> ListenerHandle:
    """Call ``accept``, from a thread, with each link that a sender announces to this worker.

    Returns:
        A callable that ends this.

    Raises:
        ConfigurationError: this process has another receiver of that model for that rank.
        TransportError: no more threads can be started.
    """
    endpoint.warn_if_exposed()
    place, leave = _receivers.open(endpoint, model_id, accept)
    try:
        listener = _Listener(endpoint, model_id, accept, place, leave)
    except BaseException:
        leave()
        raise
    prefixed = id(endpoint.store) if isinstance(endpoint.store, PrefixStore) else 0
    handle = ListenerHandle(listener.where, prefixed, listener)
    # A receiver that is dropped holds it no more: see `StoreLink`.
    listener.owner = ref(handle)
    return handle
