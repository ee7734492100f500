"""The heartbeat of this process in a store, and the watch on the heartbeats of others."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from weightsync.clock import Deadline
from weightsync.errors import TransportError
from weightsync.transports.process import PerProcess
from weightsync.transports.store.blocking_threads import start_threads
from weightsync.transports.store.store import DIAL, Client, Store, TCPStore, base_of

#: Seconds between two beats.
PERIOD: Final = 0.5
#: After this many rounds without a beat a process counts as dead: within 5 s, including the duration of a round.
ROUNDS: Final = 8
#: Seconds without a beat after which the store counts as lost. Checked twice, since this process itself may have been
#: stopped. A store's one thread asks the DNS for the name of each new peer: a lost answer stops it for 5 s.
_SILENCE_SECONDS: Final = 3.5
#: Seconds for the connection to the store, after which it counts as lost too: torch gives up before, unless it hangs.
_DIAL_SECONDS: Final = DIAL.total_seconds() + 5.0


#: Beats for which a remark must be true before it is logged: while a run starts, models and workers come one by one.
REMARK_BEATS: Final = 10


class Remark:
    """What to say about a worker that takes no link, and when to log it."""

    def __init__(self) -> None:
        self.text = ""
        self._beats = 0

    def is_due(self, text: str) -> bool:
        """Note what to say now; empty: nothing. Returns whether to log it: once, after `REMARK_BEATS` beats."""
        self._beats = self._beats + 1 if text == self.text else 1
        self.text = text
        return bool(text) and self._beats == REMARK_BEATS


#: Has a member follow a process too.
Follow = Callable[[str], None]


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a member, called from another thread with the reason."""

    #: The heartbeat of the followed process has stopped.
    silence: Callable[[str], None]
    #: The store is lost or silent: requests to it may never be answered.
    store_lost: Callable[[str], None]
    #: Called with each beat, perhaps before the member has joined. Gets a connection to the store, and what follows a
    #: process.
    beat: Callable[[Client, Follow], None] = lambda *_: None


@dataclass
class _Member:
    """What a heartbeat knows of one member."""

    callbacks: Callbacks
    #: The process that it follows; empty: none.
    process: str = ""
    #: That process's last beat, and for how many rounds there was no other.
    beat: bytes | None = None
    missed: int = 0


class Heartbeat:
    """Beats while it has members. Reports the death of the processes that they follow, or of the store.

    It has two threads: one beats and watches, the other checks that the first is not blocked by a silent store.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._members: dict[int, _Member] = {}
        self._last = 0
        self._over = threading.Event()
        self._dial_ended = threading.Event()
        self._ended = threading.Event()
        #: Released with each beat.
        self._beat_written = threading.Semaphore(0)
        self._beats = 0
        self._client: Client | None = None

    def start(self) -> None:
        """Start beating. Raises TransportError: no more threads can be started; it has stopped again."""
        try:
            bodies = {"weightsync-heartbeat": self._beat, "weightsync-heartbeat-watchdog": self._watch_own_beats}
            start_threads(self, bodies)
        except TransportError:
            self.close()
            raise

    def add(self, callbacks: Callbacks) -> int:
        """Add a member, which is called when the store is lost. Returns a token for the other methods."""
        with self._lock:
            self._last += 1
            self._members[self._last] = _Member(callbacks)
            return self._last

    def follow(self, token: int, process: str) -> None:
        """Call that member also when ``process`` has no heartbeat any more."""
        with self._lock:
            if token in self._members:
                self._members[token].process = process

    def await_connection(self) -> None:
        """Return once it can beat, or never will."""
        self._dial_ended.wait(_DIAL_SECONDS)

    def drop(self, token: int) -> bool:
        """Remove that member; whether it was the last."""
        with self._lock:
            self._members.pop(token, None)
            return not self._members

    def close(self) -> None:
        """Stop beating."""
        self._over.set()
        self._beat_written.release()

    def cut(self) -> None:
        """End the beating thread now."""
        if self._client is not None:
            self._client.cut()

    def _beat(self) -> None:
        try:
            client = self._client = Client(self._store)
            self._dial_ended.set()
            while not self._over.is_set():
                self._run_round(client)
                self._over.wait(PERIOD)
            client.delete(f"weightsync/heartbeat/{process_name()}")
        except TransportError as error:
            self._report_store_lost(str(error))
        except Exception as error:  # noqa: BLE001 - a thread that ends must say so
            self._report_store_lost(f"its heartbeat failed: {error!r}")
        finally:
            self._dial_ended.set()
            self._ended.set()
            if self._client is not None:
                self._client.close()

    def _run_round(self, client: Client) -> None:
        """One round. It asks the store once or more for each member, and so may take long: beats do not wait for it."""
        with self._lock:
            members = list(self._members.items())
        next_beat = self._write_beat(client)
        for token, member in members:
            member.callbacks.beat(client, partial(self.follow, token))
            if member.process:
                self._watch(member, client)
            if next_beat.passed:
                next_beat = self._write_beat(client)

    def _write_beat(self, client: Client) -> Deadline:
        """Beat; returns when the next beat is due."""
        self._beats += 1
        # Not a counter in the store: a value written there by another program would end our connection.
        client.set(f"weightsync/heartbeat/{process_name()}", str(self._beats).encode())
        self._beat_written.release()
        return Deadline(PERIOD)

    def _watch(self, member: _Member, client: Client) -> None:
        beat = client.peek(f"weightsync/heartbeat/{member.process}")
        member.missed = 0 if beat != member.beat else member.missed + 1
        member.beat = beat
        if member.missed == ROUNDS:
            member.callbacks.silence(f"no heartbeat for {ROUNDS * PERIOD:.0f} s")

    def _watch_own_beats(self) -> None:
        """Report the store lost if this process's own beats stop: then a request to it is not answered."""
        if not self._dial_ended.wait(_DIAL_SECONDS):
            self._report_store_lost(f"the store has not answered for {_DIAL_SECONDS:.0f} s")
        while not self._over.is_set():
            if not self._beat_written.acquire(timeout=_SILENCE_SECONDS) and not self._beat_written.acquire(
                timeout=_SILENCE_SECONDS
            ):
                self._report_store_lost(f"the store has been silent for {2 * _SILENCE_SECONDS:.0f} s")
        if not self._ended.wait(_SILENCE_SECONDS) and self._client is not None:
            self._client.cut()

    def _report_store_lost(self, reason: str) -> None:
        if self._over.is_set():
            return
        self._over.set()
        _heartbeats.drop(self)
        with self._lock:
            callbacks = [member.callbacks for member in self._members.values()]
        for each in callbacks:
            each.store_lost(reason)
        if self._client is not None:
            self._client.cut()


class _Heartbeats(PerProcess):
    """The heartbeats of this process, one for each store."""

    def _begin(self) -> None:
        self._running: dict[tuple[str, int], Heartbeat] = {}
        self.name = uuid.uuid4().hex

    def join(self, store: TCPStore, callbacks: Callbacks) -> HeartbeatMember:
        address = store.host, store.port
        with self._lock:
            heartbeat = self._running.get(address)
            if heartbeat is None:
                heartbeat = Heartbeat(store)
                heartbeat.start()
                self._running[address] = heartbeat
            return HeartbeatMember(heartbeat, heartbeat.add(callbacks))

    def leave(self, heartbeat_member: HeartbeatMember) -> None:
        with self._lock:
            if heartbeat_member.heartbeat.drop(heartbeat_member.token):
                self._remove(heartbeat_member.heartbeat)
                heartbeat_member.heartbeat.close()

    def drop(self, heartbeat: Heartbeat) -> None:
        """Drop a heartbeat that has lost its store: the next member starts another."""
        with self._lock:
            self._remove(heartbeat)

    def _remove(self, heartbeat: Heartbeat) -> None:
        self._running = {where: known for where, known in self._running.items() if known is not heartbeat}


@dataclass(frozen=True)
class HeartbeatMember:
    """What a member of a heartbeat holds: it says whom to follow, and leaves."""

    heartbeat: Heartbeat
    #: What `Heartbeat.add` returned.
    token: int

    def follow(self, process: str) -> None:
        """Watch ``process`` too."""
        self.heartbeat.follow(self.token, process)

    def await_name(self) -> str:
        """The name of this process, for peers: once it can beat, since they would miss its beats from then on."""
        self.heartbeat.await_connection()
        return process_name()

    def leave(self) -> None:
        """Remove the member. The heartbeat ends with its last member."""
        _heartbeats.leave(self)


_heartbeats = _Heartbeats()


def process_name() -> str:
    """The name of this process in stores; a forked child has another."""
    return _heartbeats.name


def join(store: Store, callbacks: Callbacks) -> HeartbeatMember:
    """Start the heartbeat of this process in a store, or join it.

    Args:
        store: the user's; prefixes do not matter.
    """
    return _heartbeats.join(base_of(store), callbacks)
