"""Unpacking an update into weights for the user: new tensors, in the format of a strategy."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from weightsync.errors import ProtocolError
from weightsync.protocol.messages import WeightsForm
from weightsync.weights.extra_state import decode_extras_of
from weightsync.weights.layout import Entry, Layout, extra_state_name, is_extra_state
from weightsync.weights.packing import views
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.tensors import DTYPES, PLAIN, address_of, borrowed, on_cpu, shaped

#: A parameter that ``update_policy_weights_`` has in all of TorchRL's collectors.
_COLLECTOR_PARAMETER: Final = "worker_ids"


def present(
    layout: Layout, payload: memoryview, extras: bytes, strategy: WeightStrategy
) -> TensorDict | dict[str, Any]:
    """Unpack the weights of an update, in the strategy's format, on the CPU.

    Each tensor owns its memory, so keeping or pickling one does not keep the others; its elements lie in the order in
    which they were sent. The payload may be overwritten afterwards. Extra state is stored under its module's
    ``_extra_state``, as in `WeightStrategy`.

    Args:
        payload: the flat buffer; its first ``layout.nbytes`` bytes are read.

    Raises:
        ProtocolError: payload or extras do not match the layout, or this version of torch lacks one of its dtypes.
        ConfigurationError: a TensorDict was requested, but the names cannot be nested ("a" beside "a.b").
    """
    if payload.nbytes < layout.nbytes or not payload.c_contiguous:
        raise ProtocolError(f"A payload of {payload.nbytes} bytes arrived for {layout!r}.")
    decoded = decode_extras_of(layout, extras)
    fresh = [_empty(entry) for entry in layout.entries]
    if fresh:
        torch._foreach_copy_(fresh, views(layout, borrowed(address_of(payload), layout.nbytes)))
    tensors = {entry.name: tensor for entry, tensor in zip(layout.entries, fresh, strict=True)}
    return strategy.extract_weights({**tensors, **{extra_state_name(name): value for name, value in decoded.items()}})


def form_of(weights: object) -> WeightsForm:
    """The form in which the user passed weights; a module counts as its state dict."""
    if isinstance(weights, TensorDictBase):
        return WeightsForm.TENSORDICT
    if not isinstance(weights, Mapping):
        return WeightsForm.FLAT
    odd = (item for item in weights.items() if type(item[1]) not in PLAIN)
    inner = (value for name, value in odd if not is_extra_state(str(name)))
    return WeightsForm.NESTED if any(isinstance(v, Mapping | TensorDictBase) for v in inner) else WeightsForm.FLAT


def form_taken(parameters: Container[str]) -> WeightsForm | None:
    """The form in which a collector's own method takes weights. TorchRL's takes TensorDicts; None means any form."""
    return WeightsForm.TENSORDICT if _COLLECTOR_PARAMETER in parameters else None


def present_as(form: WeightsForm, layout: Layout, payload: memoryview, extras: bytes) -> TensorDict | dict[str, Any]:
    """Unpack the weights of an update in the form in which the user passed them to the sender: see `present`."""
    if form is WeightsForm.FLAT:
        return present(layout, payload, extras, WeightStrategy("state_dict"))
    found: TensorDict = present(layout, payload, extras, WeightStrategy("tensordict"))
    return found if form is WeightsForm.TENSORDICT else _as_dict(found)


def _as_dict(tensordict: TensorDictBase) -> dict[str, Any]:
    items = {str(name): tensordict.get(name) for name in tensordict.keys()}  # noqa: SIM118 - iterating a TensorDict yields rows
    return {
        name: _as_dict(value)
        if isinstance(value, TensorDictBase) and not isinstance(value, NonTensorData)
        else (value.data if isinstance(value, NonTensorData) else value)
        for name, value in items.items()
    }


def _empty(entry: Entry) -> Tensor:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise ProtocolError(
            f"'{entry.name}' has the dtype {entry.dtype}, which this version of torch lacks: install the trainer's."
        )
    # Allocated as bytes, because torch warns when it allocates some dtypes.
    return shaped(on_cpu(entry.nbytes).view(dtype), entry)
