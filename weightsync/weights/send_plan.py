"""What is planned once about sending the same weights again and again: their layout, and how they are copied."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from weightsync.options import WireDtype
from weightsync.weights.casting import sent_layout
from weightsync.weights.layout import Layout
from weightsync.weights.packing import Pieces, movable
from weightsync.weights.reading import Weights, layout_of, ordered
from weightsync.weights.tensors import PLAIN, WITH_STORAGE, Form, held, past_modes

_DEVICE: Final = attrgetter("device")


class SendPlan:
    """How weights are sent for as long as they stay where they are. It refers to none of their tensors.

    Args:
        weights: as they are read now.
        before: the plan before, or None.
        wire_dtype: what wider floating tensors are cast to; None if nothing is cast.

    Raises:
        LayoutError: a tensor, which the error names, cannot be sent.
    """

    def __init__(self, weights: Weights, before: SendPlan | None, wire_dtype: WireDtype | None) -> None:
        #: The layout of the weights.
        self.layout: Layout = layout_of(weights, before.layout if before else None)
        #: The layout in which they are sent.
        self.sent: Layout = sent_layout(self.layout, wire_dtype)
        #: The encoded layout, with the names of the tensors.
        self.names: bytes = self.sent.encode()
        self._names = list(weights.tensors)
        self._slots = list(weights.slots)
        #: Where all of them are; None: in several places, or they are no plain tensors.
        self.place = _place_of(weights)
        self._plain = self.place is not None
        self._form = Form(weights.tensors.values() if self._plain else ())
        self._held = held(weights.tensors.values()) if self._plain else []
        self._offsets = _offsets(weights) if self._plain else []
        self._pieces: Pieces | None = None
        self._threads = 0
        #: Whether they were sent before, there or elsewhere: only then is it worth planning how they are copied.
        self._recur = False
        #: Those whose bytes are moved: where each is in the layout, and among the weights; None: not known yet.
        self._movable: dict[int, int] | None = None

    def fits(self, weights: Weights) -> bool:
        """Whether these are the weights of the plan, in the same memory. Their values may have changed."""
        fits = (
            self._plain
            and list(weights.tensors) == self._names
            and list(weights.slots) == self._slots
            and PLAIN.issuperset(map(type, weights.tensors.values()))
            and self._form.fits(weights.tensors.values())
            # One whose storage was freed or shrunk may be where it was, if that happened twice.
            and held(weights.tensors.values()) == self._held
        )
        self._recur = self._recur or fits
        return fits

    def moved(self, weights: Weights) -> SendPlan | None:
        """The plan for these weights if they differ from those of this one only in where they are; else None."""
        tensors = weights.tensors.values()
        form = self._form.moved(tensors) if self._plain and PLAIN.issuperset(map(type, tensors)) else None
        if form is None:
            return None
        moved = copy.copy(self)
        moved._form, moved._pieces = form, None
        # At the same offsets, in storages of the same sizes, they lie within them as before.
        return moved if moved.fits(weights) and _offsets(weights) == self._offsets else None

    def pieces(self, weights: Weights) -> Pieces | None:
        """How these weights, which fit, are copied; None if it is not planned."""
        threads = torch.get_num_threads()
        if self._pieces is not None and threads != self._threads:  # parts are for as many threads as were to be used
            self._pieces = None
        if self._recur and self._pieces is None and self.place is not None and self.place.type == "cpu":
            self._threads = threads
            self._pieces = Pieces(self.sent, self._places(weights))
        return self._pieces

    def _places(self, weights: Weights) -> Mapping[int, int]:
        """The addresses of the tensors whose bytes are moved, by index."""
        if self._movable is None:
            among = {name: at for at, name in enumerate(self._names)}
            found = movable(self.sent, ordered(weights, self.sent), least=0)
            self._movable = {index: among[self.sent.names[index]] for index in found}
        addresses = self._form.addresses
        return {index: addresses[at] for index, at in self._movable.items()}


def plan_for(weights: Weights, before: SendPlan | None, wire_dtype: WireDtype | None) -> SendPlan:
    """The plan for weights that the one before, for the same `wire_dtype`, does not fit.

    Raises LayoutError: a tensor, which the error names, cannot be sent.
    """
    moved = before.moved(weights) if before is not None else None
    return moved or SendPlan(weights, before, wire_dtype)


def _place_of(weights: Weights) -> torch.device | None:
    """The device that all of these plain tensors are on, if it tells where in its memory they are."""
    tensors = weights.tensors.values()
    places = set(map(_DEVICE, tensors)) if PLAIN.issuperset(map(type, tensors)) else set()
    place = places.pop() if len(places) == 1 else None
    return place if place is not None and place.type in WITH_STORAGE else None


def _offsets(weights: Weights) -> list[int | torch.SymInt]:
    """Where in their storages the tensors begin, in elements."""
    with past_modes():
        return list(map(Tensor.storage_offset, weights.tensors.values()))
