"""New links: a sender announces them under the worker's key, and the worker takes each once."""

from __future__ import annotations

import uuid

from weightsync.transports.distributed import pulse
from weightsync.transports.distributed.letters import Side
from weightsync.transports.distributed.link import StoreLink
from weightsync.transports.distributed.store import Client, StoreEnd


def base_key(model_id: str, rank: int) -> str:
    """Where links to the worker of that rank are announced."""
    return f"weightsync/{model_id}/{rank}"


def sender_link(meeting: StoreEnd, model_id: str, peer: str) -> StoreLink:
    """The sender's end of a new link, announced to the worker.

    Raises:
        ConfigurationError: the backend is not to be had here.
    """
    name = uuid.uuid4().hex
    base = base_key(model_id, meeting.rank)

    def announce(client: Client) -> None:
        # No counter: between counting and writing a sender may die, and the worker would wait for ever.
        number = int(client.value(f"{base}/newest") or b"0")
        while client.claim(f"{base}/door/{number}", name) != name:
            number += 1
        client.set(f"{base}/newest", str(number).encode())

    def withdraw(client: Client) -> None:
        client.claim(f"weightsync/link/{name}/taken", "closed")

    return StoreLink(meeting, name, Side(0, "down", "up", peer, announce, withdraw))


def worker_link(meeting: StoreEnd, name: str) -> StoreLink:
    """The worker's end of a link that it has taken."""
    return StoreLink(meeting, name, Side(1, "up", "down", "the sender", _nothing, _nothing))


def taken(client: Client, name: str) -> bool:
    """Whether a link that was announced is ours now: each is taken once."""
    mine = f"{pulse.process_name()} {uuid.uuid4().hex}"
    return client.claim(f"weightsync/link/{name}/taken", mine) == mine


def _nothing(_: Client) -> None:
    return None
