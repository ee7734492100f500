"""A table of all kinds of weights. Each entry makes a source and a destination, and changes the source."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from weightsync.weights.extra_state import encode_extras
from weightsync.weights.reading import read_live, read_weights
from weightsync.weights.tensors import DTYPES


@dataclass(frozen=True)
class Kind:
    """An entry of the table. Other processes can import all its functions."""

    name: str
    #: Called with a seed.
    source: Callable[[int], Any]
    destination: Callable[[int], Any]
    #: Turns the source of one version into the next.
    change: Callable[[Any], Any]


def snapshot(weights: Any, merged: bool = False) -> dict[str, Any]:
    """Weights, bit by bit: the dtype, shape and bytes of each tensor, and the extra states."""
    read = read_weights(weights) if merged else read_live(weights)
    tensors = {
        name: (str(tensor.dtype), tuple(tensor.shape), raw(tensor)) for name, tensor in sorted(read.tensors.items())
    }
    return {**tensors, "extra state": encode_extras(read.extras())}


def raw(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements, in row-major order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def nudge(weights: Any) -> Any:
    """Change every tensor in place, whatever its dtype. Returns the weights."""
    for tensor in read_live(weights).tensors.values():
        with torch.no_grad():
            tensor.copy_(shaken(tensor))
    return weights


def shaken(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return ~tensor
    bits = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) ^ 1
    return bits.view(tensor.dtype).view(tensor.shape)


# ----------------------------------------------------------------------------------------------------- modules


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def large() -> nn.Module:
    return nn.Linear(300, 300)


def buffered() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    made(torch.randn(8, 4))
    made.register_buffer("unseen", torch.randn(2), persistent=False)
    return made


class Counted(nn.Module):
    """A module whose extra state has every type that can be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.state: Any = {"count": 1, "ratio": 0.5, "text": "ö", "raw": b"\x00", "none": None, "list": [1, (2, True)]}

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def counted() -> nn.Module:
    return nn.Sequential(Counted(), Counted())


def count(module: Any) -> Any:
    for child in module:
        child.state = {**child.state, "count": child.state["count"] + 1, "ema": torch.full((2,), 0.25)}
    return nudge(module)


class Tied(nn.Module):
    """A module with a parameter under two names, and a submodule under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(3, 3)
        self.again = self.body


def train_tied(module: Any) -> Any:
    with torch.no_grad():
        module.embedding.weight.mul_(2)
        module.body.bias.add_(1)
    return module


class LoRA(nn.Module):
    """A layer with a LoRA adapter, which a sender merges on a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.randn(4, 2))

    def merge_and_unload(self) -> nn.Module:
        with torch.no_grad():
            self.base.weight.add_(self.up @ self.down)
        return self.base


def plain_layer() -> nn.Module:
    return nn.Linear(4, 4)


def train_adapter(module: Any) -> Any:
    with torch.no_grad():
        module.up.add_(1)
    return module


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


# ------------------------------------------------------------------------------------------ dicts, TensorDicts


def flat(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(3, 2, generator=draw), "a.bias": torch.randn(3, generator=draw)}


def nested(seed: int) -> dict[str, Any]:
    return {"actor": {"layer": flat(seed), "scale": torch.full((2,), float(seed))}, "critic": flat(seed + 1)}


def tensordict(seed: int) -> TensorDict:
    torch.manual_seed(seed)
    return TensorDict({"a": {"weight": torch.randn(3, 2)}, "b": torch.randn(4)})


def flat_tensordict(seed: int) -> TensorDict:
    return TensorDict({name: tensor.clone() for name, tensor in flat(seed).items()})


def state_dict(seed: int) -> dict[str, Any]:
    return dict(seeded(buffered, seed).state_dict())


def module_like_state_dict(seed: int) -> nn.Module:
    return seeded(buffered, seed)


def many(seed: int) -> dict[str, Tensor]:
    draw = torch.randn(2000, 3, generator=torch.Generator().manual_seed(seed))
    return {f"layer{index}.weight": draw[index].clone() for index in range(2000)}


# -------------------------------------------------------------------------------------------- odd tensors


def of_dtype(name: str, seed: int) -> dict[str, Tensor]:
    dtype = DTYPES[name]
    bits = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (6 * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return {"one": bits.view(dtype).clone(), "matrix": bits.view(dtype).reshape(2, 3).clone()}


def empty_and_scalar(seed: int) -> dict[str, Tensor]:
    return {
        "nothing": torch.empty(0),
        "no rows": torch.empty(0, 5, dtype=torch.int16),
        "scalar": torch.tensor(float(seed)),
        "count": torch.tensor(2**62 + seed),
        "one": torch.ones(1),
    }


def nothing(seed: int) -> dict[str, Tensor]:
    return {"nothing": torch.empty(0, 3)}


def strided(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "transposed": torch.randn(4, 7, generator=draw).t(),
        "sliced": torch.randn(6, 9, generator=draw)[1:, ::2],
        "offset": torch.randn(50, generator=draw)[13:],
        "channels last": torch.randn(2, 3, 4, 5, generator=draw).to(memory_format=torch.channels_last),
        "flipped": torch.randn(5, generator=draw).flip(0),
    }


def expanded(seed: int) -> dict[str, Tensor]:
    return {"row": torch.tensor([float(seed), 2.0]).expand(4, 2)}


def room_for_expanded(seed: int) -> dict[str, Tensor]:
    return {"row": torch.zeros(4, 2)}


def again_expanded(weights: Any) -> Any:
    return {"row": weights["row"][:1].add(1.0).expand(4, 2)}


def special_numbers(seed: int) -> dict[str, Tensor]:
    odd = [float("nan"), -0.0, float("inf"), -float("inf"), 5e-324, 1.0 + seed]
    return {"odd": torch.tensor(odd, dtype=torch.float64), "half": torch.tensor(odd).half()}


def of_modules(name: str, make: Callable[[], nn.Module], change: Callable[[Any], Any] = nudge) -> Kind:
    return Kind(name, partial(seeded, make), partial(seeded, make), change)


def of_dicts(name: str, make: Callable[[int], Any], change: Callable[[Any], Any] = nudge) -> Kind:
    return Kind(name, make, make, change)


KINDS = [
    of_modules("module", linear),
    of_modules("large module", large),
    of_modules("frozen module", frozen),
    of_modules("buffers", buffered),
    of_modules("extra state", counted, count),
    of_modules("tied parameters", Tied, train_tied),
    Kind("LoRA merged on a copy", partial(seeded, LoRA), partial(seeded, plain_layer), train_adapter),
    of_dicts("flat state dict", flat),
    of_dicts("nested dict", nested),
    of_dicts("TensorDict", tensordict),
    of_dicts("flat TensorDict", flat_tensordict),
    Kind("state dict to module", state_dict, module_like_state_dict, nudge),
    Kind("module to state dict", module_like_state_dict, state_dict, nudge),
    *(of_dicts(name, partial(of_dtype, name)) for name in DTYPES),
    of_dicts("zero-size and 0-dim", empty_and_scalar),
    of_dicts("nothing but zero-size", nothing),
    of_dicts("non-contiguous and strided", strided),
    Kind("expanded", expanded, room_for_expanded, again_expanded),
    of_dicts("special numbers", special_numbers),
    of_dicts("2,000 small tensors", many),
]
BY_NAME = {kind.name: kind for kind in KINDS}


# ------------------------------------------------------------------------------------------------- refused


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def meta() -> nn.Module:
    return nn.Linear(3, 3, device="meta")


def sparse() -> dict[str, Tensor]:
    return {"weight": torch.eye(3).to_sparse()}


def half_meta() -> dict[str, Tensor]:
    return {"good": torch.ones(3), "bad": torch.ones(3, device="meta")}


#: Weights that cannot be sent, with a part of the error's message.
REFUSED = {
    "uninitialised": (lazy, "initiali"),
    "meta": (meta, "meta"),
    "sparse": (sparse, "sparse"),
    "one of two on meta": (half_meta, "bad"),
}


def expected(source: Any) -> dict[str, Any]:
    """The weights that a worker must serve after a send of this source: those of a LoRA module are merged on a copy."""
    return snapshot(copy.deepcopy(source) if isinstance(source, LoRA) else source, merged=True)
