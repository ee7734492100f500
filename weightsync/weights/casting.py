"""Casting weights to a narrower floating dtype before they are sent, and checks of the values that are sent.

A cast (the option ``wire_dtype``) is a layout: packing copies each tensor into the place that the layout of what is
sent has for it, and torch converts it there, on the device of the weights.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from weightsync.errors import LayoutError, NonFiniteError
from weightsync.options import WireDtype
from weightsync.weights.layout import ITEMSIZES, Entry, Group, Layout, extra_state_name, listed, quoted
from weightsync.weights.reading import Weights, layout_of
from weightsync.weights.tensors import DTYPE_NAMES, DTYPES, shaped

#: The dtypes that are cast if they are wider than the option. Complex numbers, float8, integers and bools never are.
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
#: Numbers of this size or larger are added up to be checked; smaller ones are compared, which is faster.
_SUMMED_ITEMSIZE: Final = 4
#: How many bytes of float8 are converted at once to be checked.
_PIECE: Final = 16 << 20


def wire_dtype_of(value: torch.dtype | WireDtype | str | None) -> WireDtype | None:
    """Convert the option, given as a torch dtype, its name, a `WireDtype`, or None, to the member.

    Raises ConfigurationError: weights cannot be cast to it.
    """
    if value is None:
        return None
    name = DTYPE_NAMES.get(value, str(value)) if isinstance(value, torch.dtype) else value
    return WireDtype(name)


@lru_cache(maxsize=64)
def sent_layout(layout: Layout, wire_dtype: WireDtype | None) -> Layout:
    """The layout in which weights of this layout are sent; the same object if nothing is cast."""
    if wire_dtype is None or not any(_is_cast(entry, wire_dtype) for entry in layout.entries):
        return layout
    specs = (
        (entry.name, wire_dtype.value if _is_cast(entry, wire_dtype) else entry.dtype, entry.shape)
        for entry in layout.entries
    )
    return Layout(specs, layout.extras, layout.orders)


def as_sent(weights: Weights, destination: Weights, wire_dtype: WireDtype) -> dict[str, Any] | None:
    """Weights as they are sent, flat, for a destination that has the dtypes that are sent; None: it has others."""
    sent = sent_layout(layout_of(weights), wire_dtype)
    if not sent.fits(layout_of(destination)):
        return None
    cast = {entry.name: weights.tensors[entry.name].to(DTYPES[entry.dtype]) for entry in sent.entries}
    return {**cast, **{extra_state_name(module): value for module, value in weights.extras().items()}}


def _is_cast(entry: Entry, wire_dtype: WireDtype) -> bool:
    return entry.dtype in _FLOATS and ITEMSIZES[entry.dtype] > ITEMSIZES[wire_dtype.value]


def refuse_overflow(weights: Weights, layout: Layout, flat: Tensor, wire_dtype: WireDtype) -> None:
    """Refuse weights of which a finite value became infinite when they were packed.

    Args:
        flat: the bytes of what was packed, where they are. Only those of the dtype are read.

    Raises LayoutError: there is such a value. The error names the tensor and the value.
    """
    dtype = DTYPES[wire_dtype.value]
    with torch.inference_mode():
        for group in layout.groups:
            if group.dtype != wire_dtype.value or _is_finite(_bytes(flat, group).view(dtype)):
                continue
            # An infinite value may have been infinite before (the mask of an attention layer is).
            for entry in layout.entries[group.first : group.last]:
                cast = shaped(_bytes(flat, entry).view(dtype), entry)
                _refuse_overflow_of(entry, weights.tensors[entry.name], cast)


def refuse_non_finite(model_id: str, layout: Layout, flat: Tensor) -> None:
    """Refuse weights with NaN or infinite values: the option ``check_finite``.

    Args:
        model_id: the name of the model, for the message.
        layout: the layout of what was packed.
        flat: the bytes of what was packed, where they are. Integers and bools are not read.

    Raises:
        NonFiniteError: there are such values. The error names the tensors.
    """
    non_finite: dict[str, tuple[int, int]] = {}
    with torch.inference_mode():
        for group in layout.groups:
            dtype = DTYPES[group.dtype]
            if not (dtype.is_floating_point or dtype.is_complex) or _all_finite(_bytes(flat, group), dtype):
                continue
            for entry in layout.entries[group.first : group.last]:
                values = _bytes(flat, entry)
                if not _all_finite(values, dtype):
                    real = _real(values, dtype)
                    non_finite[entry.name] = int(real.isnan().sum()), int(real.isinf().sum())
    if non_finite:
        counts = [f"{quoted(name)} ({nans} NaN, {infinite} infinite)" for name, (nans, infinite) in non_finite.items()]
        raise NonFiniteError(
            f"some tensors of {model_id!r} have values that are not finite: {listed(counts)}. No version was sent; the "
            "workers keep the version that they serve. Look at the trainer's loss and gradients.",
            non_finite,
        )


def _all_finite(flat: Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes hold finite numbers only. float8 is converted in pieces, since float32 takes four times as much."""
    pieces = torch.split(flat, _PIECE) if dtype.itemsize == 1 else (flat,)
    return all(_is_finite(_real(piece, dtype)) for piece in pieces)


def _real(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as real numbers that can be compared: float8 has no such kernels."""
    values = flat.view(dtype)
    if dtype.is_complex:
        return torch.view_as_real(values.to(torch.complex64) if dtype is torch.complex32 else values).flatten()
    return values.to(torch.float32) if dtype.itemsize == 1 else values


def _bytes(flat: Tensor, part: Entry | Group) -> Tensor:
    return flat[part.offset : part.offset + part.nbytes]


def _is_finite(flat: Tensor) -> bool:
    # One pass over the packed bytes. A sum of values that are not all finite is not finite; it takes two thirds of the
    # time, but may overflow. The extremes of a tensor with a NaN are NaN.
    if not flat.numel() or (flat.itemsize >= _SUMMED_ITEMSIZE and math.isfinite(float(flat.sum()))):
        return True
    return all(math.isfinite(float(extreme)) for extreme in torch.aminmax(flat))


def _refuse_overflow_of(entry: Entry, source: Tensor, cast: Tensor) -> None:
    if _is_finite(cast):
        return
    lost = cast.isinf().cpu() & source.isfinite().cpu()
    if not lost.any():
        return
    count = int(lost.sum())
    amount = f"{count} value{'s' * (count > 1)}"
    value, most = float(source.cpu()[lost][0]), torch.finfo(cast.dtype).max
    advice = "wire_dtype='bfloat16' has the range of float32" if entry.dtype == "float16" else "bring it into range"
    raise LayoutError(
        f"'{entry.name}' has {amount}, such as {value:g}, that would be sent as inf: the largest "
        f"{entry.dtype} is {most:g}, and wire_dtype='{entry.dtype}' was chosen. No version was sent: {advice}.",
        mismatched={entry.name: f"{value:g} does not fit into {entry.dtype}"},
    )
