"""The receiving end of links whose messages are calls: a server for one model, with a link for each sender."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final
from weakref import ref

from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.keys import SharedKey
from weightsync.protocol.messages import Bye, Hello
from weightsync.transports.base import Link, Received
from weightsync.transports.calls.gates import CallAuthenticator, HeldCall, UntrustedCall
from weightsync.transports.calls.same_host import REACHES, reaches
from weightsync.transports.calls.server_link import CallServerLink, Frames, Parcel, changed, opened
from weightsync.transports.calls.waiting import complete_like
from weightsync.transports.exposure import warn_exposed
from weightsync.transports.process import own_host
from weightsync.transports.sealing import decoded, is_envelope

__all__ = ["CallRefused", "CallServer", "CallServerLink", "Frames", "Parcel", "decoded"]

#: How many links of one model may be open in a process, and how many closed ones are remembered.
MAX_LINKS: Final = 256
_REMEMBERED: Final = 64
#: How many links, or calls with a key, may wait before a receiver listens, and the bytes of their payloads.
MAX_UNMET: Final = 64
MAX_UNMET_NBYTES: Final = 2**30


class CallRefused(Future[Frames]):
    """The answer to a call from a sender that is not trusted: the call has no effect."""


class _GateReplaced(Exception):
    """The call is to be checked again."""


class _Listener:
    """What a receiver holds while it listens. Calling it, or dropping it, ends the listening."""

    def __init__(self, call_server: CallServer, accept: Callable[[Link], None]) -> None:
        self._call_server = call_server
        self.accept = accept

    def __call__(self) -> None:
        self._call_server._stop_listening(self)


def _no_listener() -> None:
    """In place of a reference to a `_Listener`: no receiver listens."""


class CallServer:
    """Receives the calls for one model in this process. Calls that arrive before a receiver listens wait here.

    Args:
        unreachable: says why no call can arrive here any more; empty while they can.
    """

    def __init__(
        self,
        model_id: str,
        way: str = "calls",
        worker: Callable[[], str] = str,
        unreachable: Callable[[], str] = str,
    ) -> None:
        self.model_id = model_id
        self._way = way
        self._worker = worker
        self._unreachable = unreachable
        #: None: no receiver has listened yet, so it is not known whether there is a key.
        self._gate: CallAuthenticator | None = None
        self._sealed: list[tuple[Parcel, Future[Frames]]] = []
        self._lock = threading.Lock()
        self._links: dict[str, CallServerLink] = {}
        #: The names of those that were found closed, in the order in which they were: the last ones may still have
        #: something to say to their senders.
        self._found_closed: dict[str, None] = {}
        self._unmet: list[CallServerLink] = []
        #: Links that the receiver is being given. Their other calls wait, or the receiver would not know the link.
        self._being_accepted: set[CallServerLink] = set()
        self._accepted = threading.Condition(self._lock)
        #: Gives what the receiver holds while it listens; None: it was dropped.
        self._listener: Callable[[], _Listener | None] = _no_listener

    def submit(self, parcel: Parcel) -> Future[Frames]:
        """Process a call, from any thread: see `CallServerLink.bring`.

        A link that breaks the protocol while no receiver listens is closed: its sender gets the reason, and no receiver
        sees the link.

        Raises TransportError: the limit of waiting calls is reached.
        """
        try:
            return self._submit(parcel)
        except _GateReplaced:
            return self.submit(parcel)

    def _submit(self, parcel: Parcel) -> Future[Frames]:
        if parcel.place is not None and (self._key is not None or is_envelope(parcel.frame)):
            raise ProtocolError("a call under a key named memory instead of carrying its payload.")
        with self._lock:
            gate = self._gate
            if gate is None and is_envelope(parcel.frame):
                future: Future[Frames] = Future()
                nbytes = sum(each.payload.nbytes for each, _ in self._sealed if each.payload is not None)
                self._require_room(len(self._sealed), nbytes)
                self._sealed.append((parcel, future))
                return future
        if gate is None:
            return self._process_call(parcel, gate)
        admitted = gate.admit(parcel)
        if isinstance(admitted, Parcel):
            return gate.sealed(parcel.link, self._process_call(admitted, gate))
        answer: Future[Frames] = CallRefused() if isinstance(admitted, UntrustedCall) else Future()
        answer.set_result(admitted.frames)
        return answer

    def _require_room(self, count: int, nbytes: int) -> None:
        """Refuse new calls while too many wait for a receiver. Earlier calls stay."""
        if count >= MAX_UNMET or nbytes >= MAX_UNMET_NBYTES:
            raise TransportError(
                f"no receiver listens for model {self.model_id!r} here yet, and {count} others wait ({nbytes} bytes): "
                "make the worker's receiver first."
            )

    def _process_call(self, parcel: Parcel, gate: CallAuthenticator | None) -> Future[Frames]:
        """Process a call that ``gate`` has let through. Raises _GateReplaced: there is another gate now."""
        content = opened(parcel) if parcel.frame else None
        if self._key is None and _is_from_other_host(content):
            warn_exposed(f"A sender of model {self.model_id!r} calls from another host")
        with self._lock:
            self._accepted.wait_for(lambda: self._links.get(parcel.link) not in self._being_accepted)
            if self._gate is not gate:  # a receiver listens since then, perhaps with a key
                raise _GateReplaced
            link, accept = self._link_of(parcel.link)
            is_unfit = isinstance(content, ProtocolError) and link in self._unmet
            if is_unfit:
                self._unmet.remove(link)
        if isinstance(content, ProtocolError) and is_unfit:
            link.close(f"this link broke the protocol: {content}")
            raise content
        if content is not None and parcel.place is not None:
            content = link.locate_payload(content, parcel.place)
        try:
            if gate is not None and _is_goodbye(content):
                # Proven with it: their sender may ask for none of them again, and the goodbye is read after them.
                for kept_parcel in gate.forget(parcel.link):
                    link.bring(kept_parcel.number, opened(kept_parcel))
            answer = link.bring(parcel.number, content)
            if self._key is None and _can_map_sender_memory(content):
                return changed(answer, lambda frames: [*frames, REACHES])
            return answer
        finally:
            if accept is not None:
                self._give_link(link, accept)

    def _link_of(self, name: str) -> tuple[CallServerLink, Callable[[Link], None] | None]:
        """A call's link; and, if it is a new one and a receiver listens, what takes it. The caller holds the lock."""
        link, accept = self._links.get(name), self._accept  # read once: a receiver may be dropped at any time
        if accept is None:
            waiting = sum(each.unread_nbytes for each in self._unmet)
            self._require_room(0 if link is not None else len(self._unmet), waiting)
        if link is not None:
            return link, None
        link = self._new_link(name)
        if accept is None:
            self._unmet.append(link)
        else:
            self._being_accepted.add(link)
        return link, accept

    def _give_link(self, link: CallServerLink, accept: Callable[[Link], None]) -> None:
        """Give the receiver a link. From then on any call of that link can have the receiver read it."""
        try:
            accept(link)
        finally:
            with self._lock:
                self._being_accepted.discard(link)
                self._accepted.notify_all()

    def _new_link(self, name: str) -> CallServerLink:
        self._found_closed.update((each, None) for each, link in self._links.items() if link.is_closed)
        for each in list(self._found_closed)[:-_REMEMBERED]:
            del self._links[each], self._found_closed[each]
            if self._gate is not None:
                self._gate.drop(each)
        count = len(self._links) - len(self._found_closed)
        if count >= MAX_LINKS:
            raise TransportError(
                f"{count} senders of model {self.model_id!r} have links here, which is the limit, and another called: "
                "close() those that are no longer used."
            )
        link = self._links[name] = CallServerLink("the sender", self._unreachable)
        return link

    @property
    def _accept(self) -> Callable[[Link], None] | None:
        """What gives the receiver a link; None: no receiver listens."""
        listener = self._listener()
        return None if listener is None else listener.accept

    @property
    def _key(self) -> SharedKey | None:
        return None if self._gate is None else self._gate.key

    def release(self, parcel: Parcel) -> None:
        """End a call now, with the answers that there are."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            link.release(parcel.number)

    def hang_up(self, parcel: Parcel) -> None:
        """Process a link's last call: none of its calls waits for an answer any more, with or without a receiver.

        Raises ProtocolError, TransportError: as for `submit`; the link's calls end nevertheless.
        """
        try:
            self._hang_up(parcel)
        except _GateReplaced:
            self.hang_up(parcel)

    def _hang_up(self, parcel: Parcel) -> None:
        gate = self._gate
        if gate is None and is_envelope(parcel.frame):
            self._end_sealed_calls(parcel.link)
            return
        admitted = parcel if gate is None else gate.admit(parcel)
        if isinstance(admitted, Parcel):
            self._end_link(admitted, gate)
        elif gate is not None and isinstance(admitted, HeldCall):
            # None, unless a proof has just come in another thread. The goodbye, which was kept too, is the last.
            for kept in gate.forget(parcel.link):
                self._end_link(kept, gate)

    def _end_sealed_calls(self, name: str) -> None:
        """End the calls of a link that has not been opened yet."""
        with self._lock:
            gone = [waiting for parcel, waiting in self._sealed if parcel.link == name]
            self._sealed = [each for each in self._sealed if each[0].link != name]
        for waiting in gone:
            waiting.set_result([])

    def _end_link(self, parcel: Parcel, gate: CallAuthenticator | None) -> None:
        try:
            self._process_call(parcel, gate)
        finally:
            with self._lock:
                link = self._links.get(parcel.link)  # None: it was refused, as others wait
                unheard = link in self._unmet
                if link is not None and unheard:
                    self._unmet.remove(link)
            if link is not None:
                link.hang_up()
                if unheard:
                    link.close()

    def knows(self, link: str) -> bool:
        """Whether a call of that link has arrived before."""
        with self._lock:
            return link in self._links or (self._gate is not None and self._gate.knows(link))

    def awaits_turn(self, parcel: Parcel) -> bool:
        """Whether a call waits for earlier calls of its link that have not arrived yet."""
        with self._lock:
            link = self._links.get(parcel.link)
        return link is not None and link.awaits_turn(parcel.number)

    def skip(self, parcel: Parcel, numbers: Sequence[int]) -> None:
        """Skip calls of the parcel's link that will never arrive: see `CallServerLink.skip`."""
        with self._lock:
            link, gate = self._links.get(parcel.link), self._gate
        for number in numbers:
            if gate is not None:
                gate.skip(parcel.link, number)
            if link is not None:
                link.skip(number)

    def drop(self, parcel: Parcel) -> None:
        """Close the link that a parcel came from."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            link.close()

    @property
    def listening(self) -> bool:
        """Whether a receiver listens."""
        with self._lock:
            return self._accept is not None

    @property
    def idle(self) -> bool:
        """Whether no receiver has ever listened, and no sender waits for one."""
        with self._lock:
            return self._gate is None and not self._sealed and all(link.is_closed for link in self._links.values())

    def open(self, accept: Callable[[Link], None], key: SharedKey | None = None) -> Callable[[], None]:
        """Call ``accept`` with each sender's link, including those that have already arrived.

        Args:
            key: shared with the senders. A sender with another key, or without one, is turned away.

        Returns:
            A function that ends this; so does dropping it.

        Raises ConfigurationError: a receiver listens already.
        """
        listener = _Listener(self, accept)
        with self._lock:
            if self._accept is not None:
                raise ConfigurationError(f"Model {self.model_id!r} has a receiver in this process: close that first.")
            dropped = self._listener is not _no_listener
            dropped_links = [link for link in self._links.values() if dropped and link not in self._unmet]
            self._listener = ref(listener)
            same_key = self._key == key
            if self._gate is None or not same_key:
                self._gate = CallAuthenticator(key, self.model_id, self._way, self._worker)
            unmet, self._unmet = self._unmet, []
            sealed, self._sealed = self._sealed, []
            if same_key:
                self._being_accepted.update(unmet)
        for link in dropped_links:
            link.close("its receiver was dropped without close(), and another one listens now.")
        for link in unmet:
            if same_key:
                self._give_link(link, accept)
            else:
                link.close("these calls came under another key than the receiver's, or under none.")
        for parcel, future in sealed:
            self.submit(parcel).add_done_callback(partial(complete_like, future))
        return listener

    def _stop_listening(self, listener: _Listener) -> None:
        with self._lock:
            if self._listener() is listener:  # else another receiver listens by now
                self._listener = _no_listener


def _is_goodbye(brought: Received | ProtocolError | None) -> bool:
    return isinstance(brought, Received) and isinstance(brought.message, Bye)


def _is_from_other_host(brought: Received | ProtocolError | None) -> bool:
    hello = brought.message if isinstance(brought, Received) else None
    return isinstance(hello, Hello) and hello.host not in {b"", own_host()}


def _can_map_sender_memory(brought: Received | ProtocolError | None) -> bool:
    hello = brought.message if isinstance(brought, Received) else None
    return isinstance(hello, Hello) and reaches(hello)
