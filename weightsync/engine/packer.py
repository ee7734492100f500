"""What stands in the way of a refused call, and what its caller can do about it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Final

from weightsync.errors import LayoutError
from weightsync.options import Verify
from weightsync.protocol.codec import MAX_BODY_NBYTES
from weightsync.protocol.messages import WeightsForm
from weightsync.transports.buffers import Buffer, Pool
from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import Layout
from weightsync.weights.packing import digest, pack
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.unpacking import form_of

#: What an update carries beside its tensors: a message's body, less the fields of known size and the model's id.
MAX_NAMES_AND_EXTRAS_NBYTES: Final = MAX_BODY_NBYTES - 2**20


@dataclass(frozen=True, slots=True)
class Packed:
    """One version's weights as they travel."""

    layout: Layout
    buffer: Buffer
    extras: bytes
    #: xxh3-128 of the payload, then of the extra state; empty: not to be verified.
    digest: bytes
    #: As what the weights were given.
    form: WeightsForm = WeightsForm.FLAT

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes, extra state included."""
        return self.layout.nbytes + len(self.extras)

    def digested(self) -> bytes:
        """The digest, computed now if it is not to be verified."""
        return self.digest or digest(self.buffer.view[: self.layout.nbytes], self.extras)


class Packer:
    """Packs the weights of one sender, version after version, by a plan that is made once a layout.

    Args:
        verify: whether to digest what is packed.
    """

    def __init__(self, verify: Verify = Verify.DIGEST) -> None:
        self._verify = verify
        self._pool = Pool()
        self._lock = threading.Lock()
        self._layout: Layout | None = None

    def layout_of(self, weights: Any) -> Layout:
        """The layout of weights, without packing them.

        Raises:
            ConfigurationError, LayoutError: they cannot be sent.
        """
        self._layout = layout_of(read_weights(weights), self._layout)
        return self._layout

    def pack(self, weights: Any) -> Packed:
        """Copy weights into a buffer that nobody reads. It stays ours until `handed_over`.

        Raises:
            ConfigurationError, LayoutError: they cannot be sent.
            TransportError: there is not enough memory.
        """
        read = read_weights(weights)
        layout = self._layout = layout_of(read, self._layout)
        extras = encode_extras(read.extras())
        _require_room(layout, extras)
        with self._lock:
            buffer = self._pool.acquire(layout.nbytes)
            buffer.pin(self)
        try:
            pack(read, layout, buffer.view)
            packed = Packed(layout, buffer, extras, b"", form_of(weights))
            return packed if self._verify is Verify.LAYOUT else replace(packed, digest=packed.digested())
        except BaseException:
            buffer.unpin(self)
            raise

    def handed_over(self, packed: Packed) -> None:
        """Whoever reads the packed weights has pinned them; we let go."""
        packed.buffer.unpin(self)

    def close(self) -> None:
        """Let all buffers go; what workers map stays theirs."""
        with self._lock:
            self._pool.close()


def _require_room(layout: Layout, extras: bytes) -> None:
    """Refuse what no message can carry, before anybody is dispatched to.

    Raises:
        LayoutError: the names of the tensors and the extra state take too much.
    """
    nbytes = len(layout.encode()) + len(extras)
    if nbytes > MAX_NAMES_AND_EXTRAS_NBYTES:
        raise LayoutError(
            f"The tensors' names and the extra state of {list(layout.extras)} take {nbytes} bytes, but one update "
            f"carries {MAX_NAMES_AND_EXTRAS_NBYTES} beside the tensors: keep what is large in tensors."
        )
