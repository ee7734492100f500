"""New links: a sender announces them under the worker's key, and the worker takes each once."""

from __future__ import annotations

import hmac
import re
import uuid
from dataclasses import dataclass
from typing import Final

from weightsync.transports.distributed import pulse
from weightsync.transports.distributed.guards import Guard, NoGuard, SenderGuard, WorkerGuard
from weightsync.transports.distributed.letters import Outbox, Side
from weightsync.transports.distributed.link import StoreLink
from weightsync.transports.distributed.store import Client, StoreEnd
from weightsync.transports.sealing import Identity, Reason, announcement, new_name, refusal

_NAME: Final = re.compile("[0-9a-f]{32}")


def base_key(model_id: str, rank: int) -> str:
    """Where links to the worker of that rank are announced."""
    return f"weightsync/{model_id}/{rank}"


def sender_link(meeting: StoreEnd, model_id: str, peer: str) -> StoreLink:
    """The sender's end of a new link, announced to the worker.

    Raises:
        ConfigurationError: the backend is not to be had here.
    """
    meeting.tell_if_exposed()
    name = new_name()
    key, identity = meeting.key, _identity(meeting, model_id, name)
    announced = name if key is None else f"{name} {announcement(key, identity)}"
    base = base_key(model_id, meeting.rank)

    def announce(client: Client) -> None:
        # No counter: between counting and writing a sender may die, and the worker would wait for ever.
        number = int(client.value(f"{base}/newest") or b"0")
        while client.claim(f"{base}/door/{number}", announced) != announced:
            number += 1
        client.set(f"{base}/newest", str(number).encode())

    def withdraw(client: Client) -> None:
        client.claim(f"weightsync/link/{name}/taken", "closed")

    guard: Guard = NoGuard(peer) if key is None else SenderGuard(key, identity, peer)
    return StoreLink(meeting, name, Side(0, "down", "up", peer, announce, withdraw), guard)


def worker_link(meeting: StoreEnd, model_id: str, name: str) -> StoreLink:
    """The worker's end of a link that it has taken."""
    key, identity = meeting.key, _identity(meeting, model_id, name)
    guard: Guard = NoGuard("the sender") if key is None else WorkerGuard(key, identity)
    return StoreLink(meeting, name, Side(1, "up", "down", "the sender", _nothing, _nothing), guard)


@dataclass(frozen=True, slots=True)
class Announced:
    """What a sender wrote under the worker's key."""

    name: str
    #: What proves that it has the key; empty: it has none.
    proof: str

    @classmethod
    def of(cls, written: str) -> Announced | None:
        """What is written there; None: nothing that a sender writes."""
        name, _, proof = written.partition(" ")
        return cls(name, proof) if _NAME.fullmatch(name) else None

    def why_refused(self, meeting: StoreEnd, model_id: str) -> Reason | None:
        """Why whoever wrote it is not let in; None: it may be."""
        if meeting.key is None:
            return Reason.WORKER_HAS_NONE if self.proof else None
        if not self.proof:
            return Reason.SENDER_HAS_NONE
        wanted = announcement(meeting.key, _identity(meeting, model_id, self.name))
        # Of bytes: a stranger's text may be anything.
        fits = hmac.compare_digest(self.proof.encode(errors="replace"), wanted.encode())
        return None if fits else Reason.OTHER_KEY

    def refuse(self, client: Client, reason: Reason) -> None:
        """Tell whoever wrote it that it is not let in.

        Raises:
            TransportError: the store is gone.
        """
        Outbox(client, f"weightsync/link/{self.name}/up").put(refusal(reason))


def _identity(meeting: StoreEnd, model_id: str, name: str) -> Identity:
    return Identity("store", model_id, str(meeting.rank), name)


def taken(client: Client, name: str) -> bool:
    """Whether a link that was announced is ours now: each is taken once."""
    mine = f"{pulse.process_name()} {uuid.uuid4().hex}"
    return client.claim(f"weightsync/link/{name}/taken", mine) == mine


def _nothing(_: Client) -> None:
    return None
