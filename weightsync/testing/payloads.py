"""Weights for the bench: bytes that name their version, in buffers that are overwritten once they are not pinned.

This module also makes the answers to the updates that carry them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from weightsync.engine.packer import Packed
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Refusal, Update
from weightsync.testing.link_setup import LinkSetup
from weightsync.transports.buffers import Buffer, Storage
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.tree_digest import digest

_NOISE = 0xA5
#: The part of the bytes that depends on their place, for every seed.
_PLACES = bytes((index * 11 + index // 256) % 256 for index in range(4093))


def pattern(nbytes: int, seed: int) -> bytes:
    """Bytes that show which seed made them and where in the payload they belong."""
    block = _PLACES.translate(bytes((seed * 37 + place) % 256 for place in range(256)))
    return (block * (nbytes // len(block) + 1))[:nbytes]


def ack_of(update: Update) -> Ack:
    """The ack of an update that was applied as it arrived."""
    return Ack(model_id=update.model_id, incarnation=update.incarnation, version=update.version, digest=update.digest)


def refusal_of(update: Update, fence: int) -> Refusal:
    """The refusal of an update, by a receiver with this fence."""
    return Refusal(
        model_id=update.model_id,
        incarnation=update.incarnation,
        version=update.version,
        kind=RefusalKind.REFUSED,
        reason="it does not fit",
        fence=fence,
    )


class Payloads:
    """Makes the weights of one version after another.

    Args:
        nbytes: their size.
        storage: where they are stored.
    """

    def __init__(self, nbytes: int, storage: Storage) -> None:
        self._layout = layout_of(read_weights({"weight": torch.zeros(nbytes, dtype=torch.uint8)}))
        self._storage = storage
        self._seeds = itertools.count(1)
        self._buffers: list[Buffer] = []
        self._seed_of: dict[bytes, int] = {}

    def packed(self) -> Packed:
        """The next version's weights, which we pin until `release_packed`."""
        seed = next(self._seeds)
        buffer = self._made(seed)
        buffer.pin(self)
        found = digest(buffer.view[: self._layout.nbytes], b"")
        self._seed_of[found] = seed
        return Packed(self._layout, buffer, b"", found)

    def _made(self, seed: int) -> Buffer:
        buffer = Buffer(self._layout.nbytes, self._storage)
        fill(buffer, self._layout.nbytes, seed)
        self._buffers.append(buffer)
        return buffer

    def again(self, wanted: bytes) -> Buffer:
        """The weights with that digest, made again."""
        return self._made(self._seed_of[wanted])

    def adopt(self, buffer: Buffer) -> None:
        """Treat a buffer as one that was made here."""
        self._buffers.append(buffer)

    def seal(self, payload: memoryview | None) -> tuple[memoryview, bytes] | None:
        """A payload, and the digest that it must keep."""
        return None if payload is None else (payload, digest(payload, b""))

    def release_packed(self, packed: Packed) -> None:
        """Unpin the weights: the driver and the links have pinned what they need."""
        packed.buffer.unpin(self)

    def scribble(self) -> None:
        """Overwrite every buffer that is not pinned, as a sender's pool would."""
        for buffer in self._buffers:
            if not buffer.pinned and not buffer.retired:
                buffer.view[:] = bytes([_NOISE]) * buffer.nbytes
        self._buffers = [buffer for buffer in self._buffers if buffer.pinned]

    def intact(self, payload: memoryview, wanted: bytes) -> bool:
        """Whether a payload is still what was sent."""
        return digest(payload, b"") == wanted

    def all_free(self, link_setup: LinkSetup, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Require that every buffer becomes free."""
        link_setup.until_free(self._buffers, "are still pinned after everything was closed", meanwhile)


def fill(buffer: Buffer, nbytes: int, seed: int) -> None:
    """Write the pattern of that seed into a buffer."""
    buffer.view[:nbytes] = pattern(nbytes, seed)
