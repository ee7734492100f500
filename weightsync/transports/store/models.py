"""Which models the senders and the receivers of one rank have: two that wait for another model's peer are told."""

from __future__ import annotations

import itertools
from typing import Final

from weightsync.transports.store.store import Client

SENDERS: Final = "senders"
RECEIVERS: Final = "receivers"
#: The models that are looked at, and the letters of each: anybody may write here.
_MOST: Final = 32
_LONGEST: Final = 200


class Models:
    """A list in the store."""

    def __init__(self, rank: int, whose: str) -> None:
        self._key = f"weightsync/rank/{rank}/{whose}"

    def add(self, client: Client, model_id: str) -> None:
        """Add a model, unless it is there. Raises TransportError: the store is gone."""
        for number in range(_MOST):
            if client.claim(f"{self._key}/{number}", model_id) == _as_read(model_id):
                return

    def without(self, client: Client, model_id: str) -> str:
        """The models that are there, if that one is not; empty: it is, or none are.

        Raises TransportError: the store is gone.
        """
        found = (client.value(f"{self._key}/{number}") for number in range(_MOST))
        known = [value.decode("ascii", "replace") for value in itertools.takewhile(bool, found) if value]
        if _as_read(model_id) in known:
            return ""
        return ", ".join(repr(each[:_LONGEST]) for each in known)


def _as_read(model_id: str) -> str:
    """A name as `Client.claim` returns it."""
    return model_id.encode().decode("ascii", "replace")
