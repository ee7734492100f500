"""Models whose weights all have one value, and the values that a model has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def small(fill: float = 0.0) -> nn.Module:
    """A model whose weights travel inline, of a few hundred bytes."""
    return filled(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), fill)


def large(fill: float = 0.0) -> nn.Module:
    """A model whose weights travel in a segment, of 160 KiB."""
    return filled(nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 200)), fill)


def filled(model: nn.Module, fill: float) -> nn.Module:
    """Set all weights of a model to ``fill``, and return the model."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(fill)
    return model


def constants(model: nn.Module) -> set[float]:
    """The distinct values of all weights of a model."""
    return constants_of(model.state_dict())


def constants_of(weights: Any) -> set[float]:
    """The distinct values of all weights in a state dict or a flat TensorDict."""
    return {value for tensor in weights.values() for value in tensor.flatten().tolist()}
