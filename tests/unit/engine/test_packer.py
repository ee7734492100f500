"""A version is packed into a buffer that nobody reads, and stays the packer's until it is handed over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weightsync import LayoutError
from weightsync.engine import packer as packing
from weightsync.engine.packer import Packer
from weightsync.options import Verify
from weightsync.protocol.messages import WeightsForm
from weightsync.weights.layout import Layout
from weightsync.weights.packing import digest_of_weights
from weightsync.weights.tree_digest import digest


def weights(fill: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.full((3,), fill), "b": torch.full((2, 2), fill, dtype=torch.float64)}


class Remembers(nn.Module):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def get_extra_state(self) -> str:
        return "remembered"

    def set_extra_state(self, state: str) -> None:
        """Nothing to do."""


def test_a_packed_update_has_its_size_its_digest_and_its_form() -> None:
    packer, module = Packer(), Remembers()
    packed, flat = packer.pack(module), packer.pack(weights())

    assert packed.layout == packer.layout_of(module)
    assert packed.nbytes == packed.layout.nbytes + len(packed.extras) > packed.layout.nbytes
    assert packed.digest == packed.digested() == digest_of_weights(module) != b""
    assert packed.digest == digest(packed.buffer.view[: packed.layout.nbytes], packed.extras)
    assert (packed.form, flat.form) == (WeightsForm.FLAT, WeightsForm.FLAT)
    packer.close()


def test_what_is_not_to_be_verified_has_no_digest_until_it_is_asked() -> None:
    packed = Packer(Verify.LAYOUT).pack(weights())

    assert (packed.digest, packed.digested()) == (b"", digest_of_weights(weights()))


def test_a_buffer_is_written_again_once_it_was_handed_over_and_not_before() -> None:
    packer = Packer()
    first, second = packer.pack(weights(1.0)), packer.pack(weights(2.0))
    assert second.buffer is not first.buffer
    assert (first.buffer.pinned, second.buffer.pinned) == (True, True)
    assert first.digested() == first.digest

    packer.handed_over(first)
    assert not first.buffer.pinned
    assert packer.pack(weights(3.0)).buffer is first.buffer
    assert packer._pool.statistics().buffers == 2
    packer.close()
    assert packer._pool.statistics().buffers == 0


def test_weights_that_cannot_be_copied_leave_no_buffer_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(*_: object) -> None:
        raise LayoutError("'a' cannot be copied.", mismatched={})

    packer = Packer()
    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack_digested", pack)
        with pytest.raises(LayoutError, match="cannot be copied"):
            packer.pack(weights())

    assert packer._pool.statistics().pinned == 0
    assert packer.pack(weights()).digest == digest_of_weights(weights())


def test_the_same_layout_is_the_same_object_version_after_version() -> None:
    packer = Packer()
    told = packer.layout_of(weights())

    assert packer.pack(weights(2.0)).layout is told
    assert packer.layout_of(weights(3.0)) is told
    assert packer.layout_of({"a": torch.ones(4)}) != told


def test_names_and_extra_state_beyond_what_a_message_carries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, module = Packer(), Remembers()
    packed = packer.pack(module)
    needed = len(packed.layout.encode()) + len(packed.extras)
    monkeypatch.setattr(packing, "MAX_NAMES_AND_EXTRAS_NBYTES", needed)
    assert isinstance(packer.pack(module).layout, Layout)

    monkeypatch.setattr(packing, "MAX_NAMES_AND_EXTRAS_NBYTES", needed - 1)
    with pytest.raises(LayoutError, match=rf"take {needed} bytes, but one update carries {needed - 1} beside"):
        packer.pack(module)
