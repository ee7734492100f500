"""Tensors of every dtype and arrangement, whose bytes are known without the help of torch, and models to move."""

from __future__ import annotations

import numpy
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from weightsync.weights.extra_state import encode_extras
from weightsync.weights.layout import Entry
from weightsync.weights.packing import pack
from weightsync.weights.reading import layout_of, read_weights
from weightsync.weights.tensors import DTYPES

ARRANGEMENTS = ("contiguous", "transposed", "strided", "offset", "expanded")


def sample(dtype: str, shape: tuple[int, ...], seed: int, arrangement: str = "contiguous") -> tuple[Tensor, bytes]:
    """A tensor of random bits, NaN payloads included, and the bytes of its elements in row-major order."""
    size = DTYPES[dtype].itemsize
    whole = {
        "contiguous": shape,
        "transposed": shape[::-1],
        "strided": (*shape[:-1], 2 * shape[-1]) if shape else (),
        "offset": (shape[0] + 3, *shape[1:]) if shape else (),
        "expanded": (1, *shape[1:]) if shape else (),
    }[arrangement]
    count = max(int(numpy.prod(whole)), 1)
    bits = numpy.random.default_rng(seed).integers(0, 256, count * size, dtype=numpy.uint8)
    if dtype == "bool":
        bits &= 1
    base = torch.from_numpy(bits).view(DTYPES[dtype])
    array = bits.view(f"V{size}")[: int(numpy.prod(whole))].reshape(whole)
    array = {
        "contiguous": lambda: array,
        "transposed": lambda: array.T,
        "strided": lambda: array[..., ::2] if shape else array,
        "offset": lambda: array[3:] if shape else array,
        "expanded": lambda: numpy.broadcast_to(array, shape),
    }[arrangement]()
    start = (array.__array_interface__["data"][0] - bits.ctypes.data) // size if array.size else 0
    steps = tuple(step // size for step in array.strides)
    return torch.as_strided(base, shape, steps, start), array.tobytes()


def in_order(elements: bytes, entry: Entry) -> bytes:
    """The bytes of an entry as they lie in a payload, from its elements in row-major order."""
    array = numpy.frombuffer(elements, f"V{DTYPES[entry.dtype].itemsize}").reshape(entry.shape)
    return array.transpose(entry.order).tobytes() if entry.order else elements


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map(".".join)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
seeds = st.integers(0, 2**32 - 1)
samples = st.builds(sample, st.sampled_from(list(DTYPES)), shapes, seeds, st.sampled_from(ARRANGEMENTS))
sampled_dicts = st.dictionaries(names, samples, max_size=8)


class Counted(nn.Module):
    """A module with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.state: object = {"count": 0}

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


class Policy(nn.Module):
    """A module with whatever is odd but valid: tied, empty and narrow tensors, buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.PReLU())
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.counted = Counted()
        self.register_parameter("absent", None)
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.brief = nn.Parameter(torch.randn(2, 2).to(torch.bfloat16))
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("tiny", torch.randn(3).to(torch.float8_e4m3fn))
        self.register_buffer("scratch", torch.randn(2), persistent=False)


def trained(seed: int) -> Policy:
    """A policy with values of its own, including BatchNorm's integer counter."""
    torch.manual_seed(seed)
    policy = Policy()
    for _ in range(seed % 5 + 1):
        policy.body(torch.randn(4, 3))
    policy.counted.state = {"count": seed, "ema": torch.randn(3)}
    return policy


def packed(source: object) -> tuple[object, memoryview, bytes]:
    """Layout, payload and extra state of a source, as they travel. The payload is aligned as in a slot."""
    weights = read_weights(source)
    layout = layout_of(weights)
    payload = torch.empty(layout.nbytes, dtype=torch.uint8).numpy().data
    pack(weights, layout, payload)
    return layout, payload, encode_extras(weights.extras())


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    copied = torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    copied.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return copied.numpy().tobytes()


def snapshot(source: object) -> dict[str, object]:
    """Everything that a source has, bit by bit."""
    weights = read_weights(source)
    found: dict[str, object] = {
        name: (tensor.dtype, tuple(tensor.shape), bits(tensor)) for name, tensor in weights.tensors.items()
    }
    return {**found, "extras": encode_extras(weights.extras())}
