"""The check in front of a call server: rejects calls with another key, or without a key if the server has one."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from weightsync.errors import AuthenticationError
from weightsync.keys import SharedKey
from weightsync.transports.calls.server_link import Frames, Parcel, changed
from weightsync.transports.sealing import (
    TURNED_AWAY,
    Identity,
    Reason,
    WorkerSeal,
    digest_of,
    is_envelope,
    refusal,
)

logger = logging.getLogger("weightsync")

#: Limits for senders that have not proved that they are alive: their links, and the bytes kept for them. The oldest
#: goes first, since a live sender proves itself within one call.
MAX_UNPROVEN: Final = 64
MAX_KEPT_NBYTES: Final = 2**30


@dataclass(frozen=True, slots=True)
class UntrustedCall:
    """A call from a sender that is not trusted."""

    #: The answer of the call.
    frames: Frames


@dataclass(frozen=True, slots=True)
class HeldCall:
    """A call whose sender has the key, but may be a replayed recording: its content is kept for now."""

    #: The answer of the call: the challenge.
    frames: Frames


class CallAuthenticator:
    """Checks and opens the parcels for one model.

    Args:
        key: shared with the sender. None: parcels are passed on unchanged.
    """

    def __init__(self, key: SharedKey | None, model_id: str, way: str, worker: Callable[[], str]) -> None:
        self.key = key
        self._model_id = model_id
        self._way = way
        self._worker = worker
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}

    def admit(self, parcel: Parcel) -> Parcel | HeldCall | UntrustedCall:
        """Open a parcel that may be delivered; or return the answer of its call, which ends at once."""
        if self.key is None:
            return self._refuse(Reason.WORKER_HAS_NONE) if is_envelope(parcel.frame) else parcel
        if not is_envelope(parcel.frame):
            return self._refuse(Reason.SENDER_HAS_NONE)
        with self._lock:
            session = self._sessions.get(parcel.link)
        session = session or self._begun(self.key, parcel.link)
        try:
            admitted = session.admit(parcel)
        except AuthenticationError:
            return self._refuse(Reason.OTHER_KEY)
        with self._lock:
            # If two calls arrived as the first one, one of them is repeated with the other's challenge.
            first = self._sessions.setdefault(parcel.link, session)
            if isinstance(admitted, HeldCall):
                self._evict_excess()
        return admitted if first is session else self.admit(parcel)

    def _begun(self, key: SharedKey, link: str) -> _Session:
        return _Session(WorkerSeal(key, Identity(self._way, self._model_id, self._worker(), link)))

    def _evict_excess(self) -> None:
        unproven = [name for name, session in self._sessions.items() if not session.proven]
        nbytes = sum(self._sessions[name].kept_nbytes for name in unproven)
        for count, name in zip(range(len(unproven), 1, -1), unproven, strict=False):
            if count <= MAX_UNPROVEN and nbytes <= MAX_KEPT_NBYTES:
                return
            nbytes -= self._sessions.pop(name).kept_nbytes

    def _refuse(self, reason: Reason) -> UntrustedCall:
        logger.warning("model %r: a sender's call was turned away: %s.", self._model_id, TURNED_AWAY[reason])
        return UntrustedCall([refusal(reason)])

    def knows(self, link: str) -> bool:
        """Whether a call of that link was admitted or kept before."""
        with self._lock:
            return link in self._sessions

    def sealed(self, link: str, answer: Future[Frames]) -> Future[Frames]:
        """The sealed form of an answer."""
        with self._lock:
            session = self._sessions.get(link)
        return answer if session is None else session.sealed(answer)

    def skip(self, link: str, number: int) -> None:
        """Drop a kept call that will never be asked for."""
        with self._lock:
            session = self._sessions.get(link)
        if session is not None:
            session.skip(number)

    def drop(self, link: str) -> None:
        """Drop the session of a link."""
        with self._lock:
            self._sessions.pop(link, None)

    def forget(self, link: str) -> list[Parcel]:
        """Keep the calls of a link that its sender has closed no longer.

        Returns:
            Those calls, the oldest first, if their sender has proved itself; else none: they count for nothing.
        """
        with self._lock:
            session = self._sessions.get(link)
        return [] if session is None else session.forget()


class _Session:
    """The session of one sender's link."""

    def __init__(self, seal: WorkerSeal) -> None:
        self._seal = seal
        self._lock = threading.Lock()
        self._kept: dict[int, Parcel] = {}
        self._asked_again: set[int] = set()
        self._answers = itertools.count()

    @property
    def proven(self) -> bool:
        """Whether its sender has proved that it is alive."""
        return self._seal.proven

    @property
    def kept_nbytes(self) -> int:
        """The bytes of the payloads that are kept."""
        with self._lock:
            return sum(each.payload.nbytes for each in self._kept.values() if each.payload is not None)

    def admit(self, parcel: Parcel) -> Parcel | HeldCall:
        """Open a parcel. Until its sender has proved that it is alive, keep it and answer with a challenge.

        Raises AuthenticationError: it is not from the sender.
        """
        with self._lock:
            envelope = self._seal.open(parcel.frame)
            carried = b"" if parcel.payload is None else digest_of(parcel.payload)
            if envelope.number != parcel.number or envelope.digest != carried:
                raise AuthenticationError("A call's number or weights do not match its seal.")
            opened = replace(parcel, frame=bytes(envelope.content))
            if opened.frame and not self._seal.proven:
                self._kept[parcel.number] = opened
                return HeldCall([self._seal.challenge])
            return opened if opened.frame else self._take_kept(opened)

    def _take_kept(self, parcel: Parcel) -> Parcel:
        kept_parcel = self._kept.pop(parcel.number, None)
        if kept_parcel is None and parcel.number not in self._asked_again:
            raise AuthenticationError("A proof arrived for a call that has not arrived.")
        self._asked_again.add(parcel.number)
        return kept_parcel or parcel

    def sealed(self, answer: Future[Frames]) -> Future[Frames]:
        """An answer sealed with the key, each frame with its own number."""
        return changed(answer, lambda frames: [self._seal.seal(next(self._answers), frame) for frame in frames])

    def skip(self, number: int) -> None:
        """Drop a kept call that will never be asked for."""
        with self._lock:
            self._kept.pop(number, None)

    def forget(self) -> list[Parcel]:
        """Keep no calls any longer; returns them if their sender has proved itself.

        A proof that comes for one of those later brings nothing.
        """
        with self._lock:
            kept = [self._kept[number] for number in sorted(self._kept)] if self._seal.proven else []
            self._asked_again.update(parcel.number for parcel in kept)
            self._kept.clear()
            return kept
