"""Workers and models for the bench's tests: module-level functions, so that other processes can import them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weightsync.bench import models, schemes


def serves_other_weights_than_it_acks(channel: Any, *rest: Any) -> None:
    """A worker whose live weights are not those that it acks."""
    honest = models.digest_of_model

    def changed(model: nn.Module) -> str:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1
        return honest(model)

    schemes.digest_of_model = changed  # type: ignore[attr-defined]
    schemes.serve(channel, *rest)


def never_starts(channel: Any, *rest: Any) -> None:
    """A worker that ends before its first message."""


def raises(channel: Any, *rest: Any) -> None:
    """A worker that fails."""
    raise ZeroDivisionError("planted")


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)


def transposed() -> nn.Module:
    return nn.ParameterList([torch.zeros(4, 3).t()])


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[1].weight
    return model


def empty_first() -> nn.Module:
    return nn.ParameterList([torch.zeros(0), torch.zeros(())])


def no_module() -> str:
    return "weights"


def lacks_an_attribute() -> nn.Module:
    return nn.planted


def wants_a_width(width: int) -> nn.Module:
    return nn.Linear(width, width)


def exits() -> nn.Module:
    raise SystemExit(0)


def without_memory() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def one_number_everywhere() -> nn.Module:
    return nn.ParameterList([torch.zeros(1).expand(5)])


def without_weights() -> nn.Module:
    return nn.ReLU()


TINY = 3
