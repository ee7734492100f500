"""`names=`: only a part of a model (adapters) is sent, as declared on both sides, and a worker keeps the rest."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fleet import PATIENCE, constants, filled
from torch import nn

from weightsync import (
    ConfigurationError,
    LayoutError,
    MultiProcessWeightSyncScheme,
    RefusedError,
    SharedMemWeightSyncScheme,
    TransportError,
)

ADAPTERS = "*.lora_?.weight"


class Adapted(nn.Module):
    """A linear layer with an adapter, as in peft. A send of the whole model would merge it."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.lora_B = nn.Linear(2, 4, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        filled(self, fill)


class Mergeable(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.layer = Adapted(fill)

    def merge_and_unload(self) -> nn.Module:
        raise AssertionError("adapters are sent as they are")


class Quantised(Mergeable):
    """A model with state outside of its weights, as a quantised base has."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "quant_state"] = torch.ones(1)


class Linked:
    """A trainer and a worker in this process, each with its own ``names=`` (None: not given)."""

    def __init__(self, scheme_class: Any, names: Any, theirs: Any, source: Any, destination: Any) -> None:
        self.pipes = multiprocessing.Pipe()
        self.model, self.scheme, self.worker = destination, scheme_class(), scheme_class()
        self.scheme.init_on_sender("policy", pipes=[self.pipes[0]], model=source, names=names)
        self.worker.init_on_worker("policy", pipe=self.pipes[1], model=destination, names=theirs)
        self.sender, self.receiver = self.scheme.get_sender(), self.worker.get_receiver()

    def sync(self, weights: Any = None) -> Any:
        self.sender.send_async(weights)
        self.receiver.receive(timeout=0)
        return self.sender.wait_async(timeout=PATIENCE)

    def close(self) -> None:
        self.scheme.close()
        self.worker.close()
        for pipe in self.pipes:
            pipe.close()


@pytest.fixture
def link(scheme_class: Any) -> Iterator[Any]:
    """A function that makes a trainer and a worker."""
    made: list[Linked] = []

    def make(names: Any = ADAPTERS, theirs: Any = ADAPTERS, source: Any = None, destination: Any = None) -> Linked:
        source, destination = source or Mergeable(1.0), destination or Mergeable(0.0)
        made.append(Linked(scheme_class, names, theirs, source, destination))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_name_with_brackets_chooses_the_weight_of_that_name(link: Any) -> None:
    def model(fill: float) -> nn.Module:
        return filled(nn.ModuleDict({"layer[0]": nn.Linear(2, 2, bias=False), "other": nn.Linear(2, 2)}), fill)

    one = link(["layer[0].weight"], ["layer[0].weight"], model(1.0), model(0.0))

    assert one.sync().ok
    assert (constants(one.model["layer[0]"]), constants(one.model["other"])) == ({1.0}, {0.0})


@pytest.mark.parametrize("kind", [Mergeable, Quantised])
def test_only_the_chosen_weights_change_and_the_digest_covers_them(link: Any, kind: Any) -> None:
    one = link(source=kind(1.0), destination=kind(0.0))
    rest = one.model.layer.base.weight
    report = one.sync()

    assert (report.ok, report.nbytes) == (True, 2 * 8 * 4)
    assert one.receiver.digest() == one.sender.digest()
    assert constants(one.model.layer.lora_A) == constants(one.model.layer.lora_B) == {1.0}
    assert constants(one.model.layer.base) == {0.0}
    assert one.model.layer.base.weight is rest
    assert int(one.model.layer.steps) == 0

    with torch.no_grad():
        one.model.layer.base.weight.fill_(7)  # not sent, so it is the worker's own
    one.sync(dict(filled(Mergeable(), 3.0).named_parameters()))
    assert (constants(one.model.layer.lora_A), one.receiver.version) == ({3.0}, 2)
    assert constants(one.model.layer.base) == {7.0, 0.0}


def test_names_that_choose_the_same_weights_agree_in_any_form(link: Any) -> None:
    exact = ["layer.lora_B.weight", "layer.lora_A.weight"]
    assert link(names=exact).sync().ok
    adapters = {name: torch.zeros_like(tensor) for name, tensor in Mergeable().named_parameters() if name in exact}
    one = link(names=None, source=filled_dict(adapters, 5.0))
    assert one.sync().ok
    assert constants(one.model.layer.lora_A) == {5.0}


def filled_dict(weights: dict[str, torch.Tensor], fill: float) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, fill) for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("names", "theirs"),
    [(ADAPTERS, None), (None, ADAPTERS), (ADAPTERS, "layer.lora_A.*")],
    ids=["the worker expects all", "the trainer sends all", "another set"],
)
def test_sides_that_chose_different_weights_refuse_the_handshake(link: Any, names: Any, theirs: Any) -> None:
    one = link(names, theirs, source=plain(1.0), destination=plain(0.0))
    with pytest.raises(TransportError, match="its handshake was refused"):
        one.receiver.receive(timeout=0)
    with pytest.raises(RefusedError, match=r"(missing|unexpected) .*'layer\..* the same names=\."):
        one.sender.send(timeout=PATIENCE)
    assert constants(one.model) == {0.0}


def plain(fill: float) -> nn.Module:
    model = nn.Module()
    model.layer = Adapted(fill)
    return model


def test_a_chosen_tensor_that_shares_memory_with_another_is_refused(link: Any) -> None:
    tied = plain(0.0)
    tied.head = nn.Linear(4, 2, bias=False)
    tied.head.weight = tied.layer.lora_A.weight
    with pytest.raises(LayoutError, match=r"'layer\.lora_A\.weight' .* shares memory with 'head\.weight'.*add"):
        link(destination=tied)


def _tied(model: Any) -> None:
    model.head.weight = model.layer.lora_A.weight


def _tied_in_memory(model: Any) -> None:
    model.head.weight.data = model.layer.lora_A.weight.data


@pytest.mark.parametrize("tie", [_tied, _tied_in_memory])
def test_a_chosen_tensor_that_is_tied_to_another_later_is_refused_until_it_is_untied(link: Any, tie: Any) -> None:
    model = plain(0.0)
    model.head = nn.Linear(4, 2, bias=False)
    pair = link(destination=model)
    pair.sync()
    tie(model)

    with pytest.raises(RefusedError, match="shares memory with 'head"):
        pair.sync(Mergeable(2.0))

    assert constants(model.head) == constants(model.layer.lora_A) == {1.0}
    model.head.weight = nn.Parameter(torch.zeros(2, 4))
    assert pair.sync(Mergeable(3.0)).ok
    assert (constants(model.head), constants(model.layer.lora_A)) == ({0.0}, {3.0})


def test_names_that_match_nothing_are_refused_by_both_sides(link: Any) -> None:
    with pytest.raises(
        LayoutError, match=r"no weights match '\*\.adapter\.\*' in names=\. Available: 'layer\.base\.bias'"
    ):
        link(theirs=[ADAPTERS, "*.adapter.*"])
    one = link(names="lora_A")
    with pytest.raises(LayoutError, match=r"no weights match 'lora_A' in names=") as caught:
        one.sender.send(timeout=PATIENCE)
    assert caught.value.missing == ("lora_A",)
    assert one.sender.version == 0


@pytest.mark.parametrize("names", ["", [], [3], 3, b"weight"])
def test_invalid_names_are_refused(names: Any) -> None:
    with pytest.raises(ConfigurationError, match="names="):
        MultiProcessWeightSyncScheme().init_on_sender("policy", num_workers=1, names=names)


def test_names_are_refused_for_a_model_on_the_meta_device() -> None:
    with pytest.raises(ConfigurationError, match="meta device"):
        MultiProcessWeightSyncScheme().init_on_receiver(
            model_id="policy", model=nn.Linear(2, 2, device="meta"), names="weight", worker_idx=0
        )


@pytest.mark.parametrize("whole", [False, True])
def test_a_copy_target_gets_the_chosen_weights_and_keeps_all_others(whole: bool) -> None:
    source = Quantised(1.0)
    target = {name: torch.zeros_like(tensor) for name, tensor in Adapted().state_dict(prefix="layer.").items()}
    if not whole:
        target = {name: tensor for name, tensor in target.items() if "lora" in name}
    ours, theirs = multiprocessing.Pipe()
    with SharedMemWeightSyncScheme({"policy": target}) as scheme, SharedMemWeightSyncScheme() as worker:
        scheme.init_on_sender("policy", pipes=[ours], model=source, names=ADAPTERS)
        worker.init_on_worker("policy", pipe=theirs, model=Mergeable(0.0), names=ADAPTERS)
        scheme.get_sender().send_async()
        assert worker.get_receiver().receive(timeout=0)
        assert scheme.get_sender().wait_async(timeout=PATIENCE).ok

    assert {name for name, tensor in target.items() if tensor.any()} == {"layer.lora_A.weight", "layer.lora_B.weight"}
    ours.close()
    theirs.close()


CHOSEN = {"layer.lora_A.weight", "layer.lora_B.weight"}


def connected(scheme: Any, worker: Any) -> None:
    """Connect both ends, as the second generation does."""
    thread = threading.Thread(target=lambda: worker.connect(timeout=PATIENCE))
    thread.start()
    scheme.connect(timeout=PATIENCE)
    thread.join(PATIENCE)


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
@pytest.mark.parametrize("kind", [Mergeable, Quantised])
def test_scheme_receive_returns_only_the_chosen_weights_unmerged(kind: Any, strategy: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    with MultiProcessWeightSyncScheme() as scheme, MultiProcessWeightSyncScheme(strategy) as worker:
        scheme.init_on_sender("policy", pipes=[ours], model=kind(1.0), names=ADAPTERS)
        worker.init_on_receiver(model_id="policy", pipe=theirs, model=kind(0.0), names=ADAPTERS, worker_idx=0)
        connected(scheme, worker)
        assert scheme.send(timeout=PATIENCE).ok
        found = worker.receive(timeout=PATIENCE)

    flat = found if strategy == "state_dict" else found.flatten_keys(".")
    assert set(flat.keys()) == CHOSEN
    assert all(set(tensor.flatten().tolist()) == {1.0} for tensor in flat.values())


def test_device_map_fn_gets_only_the_chosen_weights_unmerged() -> None:
    ours, theirs = multiprocessing.Pipe()
    given: list[set[str]] = []

    def place(_: int, weights: Any) -> Any:
        given.append(set(weights))
        return weights

    with MultiProcessWeightSyncScheme() as scheme, MultiProcessWeightSyncScheme() as worker:
        chosen = {"model": Mergeable(1.0), "names": ADAPTERS}
        scheme.init_on_sender("policy", pipes=[ours], num_workers=1, device_map_fn=place, **chosen)
        model = Mergeable(0.0)
        worker.init_on_receiver(model_id="policy", pipe=theirs, model=model, names=ADAPTERS, worker_idx=0)
        connected(scheme, worker)

    assert given == [CHOSEN]
    assert constants(model.layer.lora_A) == {1.0}
    assert constants(model.layer.base) == {0.0}
