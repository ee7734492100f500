"""Odd but valid weights travel bit-exactly, over both schemes, small and large, within a process and to another one."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Crew, WorkerSetup, receive
from tensordict import TensorDict
from torch import nn


class Odd(nn.Module):
    """A module with one of each kind of odd tensor, and with extra state."""

    def __init__(self, seed: int = 0, rows: int = 6) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.strided = nn.Parameter(torch.randn(8, rows, generator=draw).t())
        self.sliced = nn.Parameter(torch.randn(rows, 9, generator=draw)[:, ::2])
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.scalar = nn.Parameter(torch.randn((), generator=draw))
        self.norm = nn.BatchNorm1d(rows)
        self.norm(torch.randn(4, rows, generator=draw))
        self.tied = nn.Linear(rows, rows)
        self.again = self.tied
        self.left = nn.Linear(3, 3, bias=False)
        self.right = nn.Linear(3, 3, bias=False)
        self.right.weight = self.left.weight
        bits = torch.randint(0, 255, (rows, 4), generator=draw, dtype=torch.uint8)
        self.register_buffer("sixteenth", bits.view(torch.bfloat16))
        self.register_buffer("eighth", bits.view(torch.float8_e4m3fn))
        self.register_buffer("fifth", bits.view(torch.float8_e5m2))
        self.register_buffer("flags", bits > 128)
        self.register_buffer("wave", torch.randn(3, generator=draw, dtype=torch.complex64))
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, float("inf")]) * (1 + seed))
        self.register_buffer("count", torch.tensor(2**62 + seed))
        self.register_buffer("unseen", torch.full((2,), float(seed)), persistent=False)
        self.note: dict[str, Any] = {
            "seed": seed,
            "text": "ö",
            "raw": b"\x00\xff",
            "none": None,
            "list": [1, (2.5, True)],
        }

    def get_extra_state(self) -> dict[str, Any]:
        return self.note

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state


def wide(seed: int = 0) -> Odd:
    """A module that is large enough for a segment: one megabyte."""
    return Odd(seed, rows=512)


def bits(module: nn.Module) -> dict[str, Any]:
    """The bytes of every tensor, and every extra state."""
    found = {}
    for name, value in module.state_dict().items():
        plain = isinstance(value, torch.Tensor)
        found[name] = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if plain else value
    return found


@pytest.mark.parametrize("make", [Odd, wide])
@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_every_kind_of_tensor_and_extra_state_arrives_bit_identical(
    scheme_class: Any, make: Any, strategy: str
) -> None:
    ours, theirs = multiprocessing.Pipe()
    source, destination = make(1), make(2)
    with scheme_class(strategy=strategy) as a, scheme_class(strategy=strategy) as b:
        a.init_on_sender("policy", pipes=[ours], model=source)
        b.init_on_worker("policy", pipe=theirs, model=destination)
        for _ in range(5):
            a.get_sender().send_async()
            assert b.get_receiver().receive(timeout=PATIENCE), b.get_receiver().last_refusal
            assert a.get_sender().wait_async().ok
            assert bits(destination) == bits(source)
            with torch.no_grad():
                source.scalar.add_(1)
                source.norm.num_batches_tracked.add_(1)
                source.left.weight.mul_(2)

        assert destination.left.weight is destination.right.weight
        assert destination.tied is destination.again
        assert destination.unseen.tolist() == [2.0, 2.0]
        assert b.get_receiver().digest() == a.get_sender().digest()


def join_odd(setup: WorkerSetup) -> None:
    setup.model = wide(7)
    setup.scheme.init_on_worker("policy", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()


def odd_bits(setup: WorkerSetup) -> dict[str, Any]:
    return bits(setup.model)


def write_everywhere(setup: WorkerSetup) -> None:
    with torch.no_grad():
        for tensor in [*setup.model.parameters(), setup.model.norm.running_mean]:
            tensor.fill_(99.0)


def test_a_worker_that_overwrites_its_weights_does_not_affect_other_workers(scheme_class: Any, crew: Crew) -> None:
    workers = crew.start(scheme_class(), 2)
    source = wide(1)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", pipes=[worker.pipe for worker in workers], model=source)
        for worker in workers:
            worker.do(join_odd)
        for _ in range(6):
            with torch.no_grad():
                source.scalar.add_(1)
            for worker in workers:
                worker.tell(receive)
            assert scheme.get_sender().send().ok
            assert [worker.answer() for worker in workers] == [True, True]
            assert [worker.do(odd_bits) == bits(source) for worker in workers] == [True, True]
            workers[0].do(write_everywhere)
            assert workers[1].do(odd_bits) == bits(source)


@pytest.mark.parametrize("empty", [nn.Identity, dict, TensorDict])
def test_a_model_without_weights_is_sent_and_applied(scheme_class: Any, empty: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours])
        b.init_on_worker("policy", pipe=theirs, model=empty())
        a.get_sender().send_async(empty())

        assert b.get_receiver().receive(timeout=PATIENCE)
        assert a.get_sender().wait_async().ok
        assert b.get_receiver().version == 1


@pytest.mark.parametrize("nbytes", [0, 1, 64 * 1024 - 4, 64 * 1024, 64 * 1024 + 4, 2 * 2**20])
def test_payloads_of_sizes_around_the_slot_threshold_arrive(scheme_class: Any, nbytes: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    source = {"w": torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)}
    destination = {"w": torch.zeros(nbytes, dtype=torch.uint8)}
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours])
        b.init_on_worker("policy", pipe=theirs, model=destination)
        for _ in range(3):
            a.get_sender().send_async(source)
            assert b.get_receiver().receive(timeout=PATIENCE)
            assert a.get_sender().wait_async().ok
            assert torch.equal(destination["w"], source["w"])
            source["w"].add_(1)


def test_two_models_share_one_pipe_and_one_may_close_before_the_other(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    schemes = [scheme_class() for _ in range(4)]
    models = {"policy": nn.Linear(3, 2), "value": nn.Linear(300, 100)}
    copies = {"policy": nn.Linear(3, 2), "value": nn.Linear(300, 100)}
    for name, a, b in zip(models, schemes[:2], schemes[2:], strict=True):
        a.init_on_sender(name, pipes=[ours], model=models[name])
        b.init_on_worker(name, pipe=theirs, model=copies[name])
    for _ in range(3):
        for a in schemes[:2]:
            a.get_sender().send_async()
        for b in reversed(schemes[2:]):
            assert b.get_receiver().receive(timeout=PATIENCE)
        for a in schemes[:2]:
            assert a.get_sender().wait_async().ok
    assert all(torch.equal(model.weight, copies[name].weight) for name, model in models.items())

    schemes[0].close()
    schemes[1].get_sender().send_async()
    assert schemes[3].get_receiver().receive(timeout=PATIENCE)
    assert schemes[1].get_sender().wait_async().ok
    for scheme in schemes:
        scheme.close()
