"""The models that are sent: making them, changing them between sends, and their digests."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from weightsync.bench.settings import BenchError, Payload
from weightsync.errors import ConfigurationError, with_type

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class PayloadModel(nn.Module):
    """A model without a forward: a number of float32 parameters, and their bytes in all."""

    def __init__(self, payload: Payload) -> None:
        super().__init__()
        size, extra = divmod(payload.nbytes // 4, payload.tensors)
        for index in range(payload.tensors):
            values = torch.ones(size + (index < extra))  # written, so that its pages count as memory of the model
            self.register_parameter(f"weight_{index}", nn.Parameter(values))


def make_model(payload: Payload, device: str) -> nn.Module:
    """Make a payload's model on a device. Its values are arbitrary.

    Raises ConfigurationError: the user's factory is not found, or makes no module.
    """
    if not payload.factory:
        return PayloadModel(payload).to(device)
    function = find_factory(payload.factory)
    with refused_as_factory(payload.factory):
        made = function()
        if not isinstance(made, nn.Module):
            raise TypeError(f"it returned a {type(made).__name__}")
        return made.to(device)


def find_factory(factory: str) -> Callable[[], object]:
    """Import the user's ``module:function``. Raises ConfigurationError: it is not found."""
    module, _, name = factory.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: the user's module may be in the current directory
    with refused_as_factory(factory):
        function: Callable[[], object] = getattr(importlib.import_module(module), name)
        return function


@contextlib.contextmanager
def refused_as_factory(factory: str) -> Iterator[None]:
    """Raise ConfigurationError for whatever the user's own code raises; a script raises SystemExit."""
    module, _, name = factory.partition(":")
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"--model {factory}: {with_type(error)}. Name a function that takes no arguments and returns an nn.Module; "
            f'try it with: python -c "from {module} import {name}; print({name}())"'
        ) from error


def tensors_of(model: nn.Module) -> Mapping[str, Tensor]:
    """What a scheme sends: parameters and persistent buffers, by name."""
    return {name: value.detach() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def digest_of(*tensors: Tensor) -> str:
    """A digest of tensors' bytes, wherever they are."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(memory_of(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
    return state.hexdigest()


def memory_of(flat: Tensor) -> memoryview:
    """The memory of a flat tensor of bytes."""
    array: Any = flat.numpy()
    return memoryview(array)


def digest_of_model(model: nn.Module) -> str:
    """A digest of a model's weights, in the order of their names."""
    return digest_of(*(tensor for _, tensor in sorted(tensors_of(model).items())))


class Source:
    """The trainer's weights: as a model, and as the same number of bytes in one flat tensor for the floors.

    Raises ConfigurationError: of the user's own model, if its weights cannot be changed.
    """

    def __init__(self, payload: Payload, device: str) -> None:
        self.model = make_model(payload, device)
        with refused_as_factory(payload.factory) if payload.factory else contextlib.nullcontext():
            self._prepare(device)

    def _prepare(self, device: str) -> None:
        weights = tensors_of(self.model)
        self.tensors = len(weights)
        self.nbytes = sum(tensor.nbytes for tensor in weights.values())
        floats = [tensor for tensor in weights.values() if tensor.dtype in _FLOATS and tensor.numel()]
        # Each once, tied ones too: to change them twice would leave them as they were.
        self._floats = list({tensor.data_ptr(): tensor for tensor in floats}.values())
        if not self._floats:
            raise ValueError("it has no floating-point weights to change")
        self.flat = torch.randint(0, 256, (self.nbytes,), dtype=torch.uint8, device=device)
        for tensor in self._floats:
            tensor.copy_(torch.randn(tensor.shape))
        self._changes = 0

    def change(self) -> None:
        """Change every floating-point weight, as an optimizer would, and the flat bytes."""
        self._changes += 1
        for tensor in self._floats:
            tensor.neg_()
        first = self._floats[0]
        # No two of 251 changes leave the same weights, so a send that was lost is seen.
        first[(0,) * first.dim()] = float(self._changes % 251)
        self.flat.add_(1)
        if self.flat.is_cuda:
            torch.cuda.synchronize()


def compare_digests(name: str, sent: str, found: Mapping[int, str]) -> None:
    """Check that each worker has the weights that were sent. Raises BenchError: one has others."""
    wrong = [str(worker) for worker, digest in found.items() if digest != sent]
    if wrong:
        raise BenchError(
            f"{name}: the weights did not arrive at worker {', '.join(wrong)}: the digest of its tensors differs from "
            "that of the trainer's. No time of this run can be trusted."
        )
