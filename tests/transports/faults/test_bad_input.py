"""Bad input raises a typed error that names it; every worker keeps its weights, and the sender continues."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair, constants, filled, small
from torch import nn

from weightsync import ConfigurationError, LayoutError, ModelPathError, OutcomeKind, RefusedError, State


def plain(**changes: Any) -> dict[str, Any]:
    """The weights of `small`, filled with 9, with the given changes; None removes a weight."""
    weights: dict[str, Any] = {name: tensor.clone() for name, tensor in filled(small(), 9.0).state_dict().items()}
    for name, value in changes.items():
        weights[name.replace("_", ".", 1)] = value
    return {name: value for name, value in weights.items() if value is not None}


MISFITS = {
    "missing": (plain(**{"0_weight": None}), "0.weight", "missing"),
    "unexpected": (plain(**{"9_weight": torch.ones(1)}), "9.weight", "unexpected"),
    "misshaped": (plain(**{"0_weight": torch.ones(4, 3)}), "0.weight", "shape"),
    "of a wrong dtype": (plain(**{"0_weight": torch.ones(3, 4, dtype=torch.float64)}), "0.weight", "dtype"),
    "of half the precision": (plain(**{"2_bias": torch.ones(2, dtype=torch.float16)}), "2.bias", "dtype"),
    "a counter that floats": (plain(**{"1_num_batches_tracked": torch.tensor(1.0)}), "1.num_batches_tracked", "dtype"),
    "empty": ({}, "0.weight", "missing"),
    "another model's": (nn.Linear(2, 2), "weight", "unexpected"),
}


@pytest.mark.parametrize("case", list(MISFITS))
def test_weights_that_do_not_fit_are_refused_by_each_worker(three: Pair, case: str) -> None:
    three.sync()
    weights, culprit, how = MISFITS[case]
    # With a registered model, the trainer itself would refuse them.
    three.scheme.model = None
    three.sender.send_async(weights)
    assert [receiver.receive(timeout=0) for receiver in three.receivers] == [False] * 3
    with pytest.raises(RefusedError) as refused:
        three.sender.wait_async()

    assert all(culprit in reason and how in reason for reason in refused.value.refused.values())
    assert all(culprit in receiver.last_refusal for receiver in three.receivers)
    assert [constants(model) for model in three.models] == [{1.0}] * 3
    assert [receiver.version for receiver in three.receivers] == [1] * 3
    filled(three.source, 2.0)
    assert three.sync(three.source).version == 3
    assert [constants(model) for model in three.models] == [{2.0}] * 3


UNSUPPORTED = {
    "an int": 3,
    "a list": [torch.ones(1)],
    "a tensor": torch.ones(1),
    "an object": object(),
    "bytes": b"weights",
    "text in a dict": plain(**{"0_weight": "text"}),
    "None in a dict": {"0.weight": None},
    "a number in a dict": {"0.weight": 1.0},
    "keys that are not str": {0: torch.ones(1)},
    "one name twice": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
    "a generator": (tensor for tensor in [torch.ones(1)]),
}


@pytest.mark.parametrize("case", list(UNSUPPORTED))
def test_weights_of_an_unsupported_type_raise_configuration_error(pair: Pair, case: str) -> None:
    pair.sync()
    with pytest.raises(ConfigurationError):
        pair.sender.send(UNSUPPORTED[case])

    assert (pair.sender.version, pair.sender.state) == (1, State.READY)
    assert pair.sync().version == 2


UNSENDABLE = {
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("case", list(UNSENDABLE))
def test_sparse_and_meta_tensors_raise_layout_error_with_their_name(pair: Pair, case: str) -> None:
    pair.sync()
    with pytest.raises(LayoutError, match=r"0\.weight"):
        pair.sender.send(plain(**{"0_weight": UNSENDABLE[case]}))

    assert (pair.sender.version, pair.sender.state) == (1, State.READY)
    assert pair.sync().version == 2


def test_extra_state_that_would_need_unpickling_is_a_layout_error(pair: Pair) -> None:
    class Secret(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"hook": print}

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises(LayoutError, match="inner"):
        pair.sender.send(nn.Sequential(small(), nn.ModuleDict({"inner": Secret(1, 1)})))

    assert (pair.sender.version, pair.sender.state) == (0, State.READY)


def test_extra_state_too_large_for_the_wire_is_refused_before_dispatch(three: Pair) -> None:
    class Heavy(nn.Linear):
        def get_extra_state(self) -> Any:
            return bytes(257 * 2**20)

        def set_extra_state(self, state: Any) -> None: ...

    with pytest.raises((LayoutError, ConfigurationError)):
        three.sender.send(Heavy(1, 1))

    assert three.sender.state is State.READY
    assert three.sync().ok


def test_the_error_for_an_unresolvable_model_path_names_the_failing_part(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = SimpleNamespace(env=SimpleNamespace(), pipes=[ours])
    workers = SimpleNamespace(pipe=theirs, env=SimpleNamespace(net=[small()]))
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", context, model=small(1.0))
        b.init_on_worker("env.net[1]", workers)
        with pytest.raises(ModelPathError) as here:
            a.get_sender().send("env.net.weight")
        with pytest.raises(ModelPathError) as there:
            b.get_receiver().receive()

    assert here.value.part == "net"
    assert there.value.part == "[1]"


@pytest.mark.parametrize("path", ["", ".", "env..net", "env.net[", "env[x]", "env.net[1.5]", "a b", "__import__('os')"])
def test_a_malformed_model_path_raises_model_path_error(scheme_class: Any, path: str) -> None:
    ours, _theirs = multiprocessing.Pipe()
    context = SimpleNamespace(env=SimpleNamespace(net=[1]), pipes=[ours])
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", context)
        with pytest.raises(ModelPathError):
            scheme.get_sender().send(path)

        assert scheme.get_sender().version == 0


def test_a_worker_with_another_model_is_refused_at_connect_with_the_differences(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours], model=small(1.0))
        b.init_on_worker("policy", pipe=theirs, model=nn.Linear(4, 5))
        with pytest.raises(ConnectionError, match=r"0\.weight"):
            b.get_receiver().receive(timeout=PATIENCE)
        with pytest.raises(RefusedError) as refused:
            a.get_sender().send(timeout=PATIENCE)

    assert "0.weight" in refused.value.refused[0]
    assert b.get_receiver().version is None


def test_a_receiver_whose_model_changed_refuses_until_the_model_is_restored(pair: Pair) -> None:
    pair.sync()
    kept = pair.model[0]
    pair.model[0] = nn.Linear(7, 3)
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=0) is False
    assert pair.sender.wait_async(on_failure="report")[0].kind is OutcomeKind.REFUSED
    pair.model[0] = kept

    assert pair.sync().ok


def test_a_set_extra_state_that_raises_refuses_the_update_and_changes_nothing(scheme_class: Any) -> None:
    class Picky(nn.Linear):
        note = "old"

        def get_extra_state(self) -> Any:
            return self.note

        def set_extra_state(self, state: Any) -> None:
            if state == "poison":
                raise ZeroDivisionError("I will not")
            self.note = state

    ours, theirs = multiprocessing.Pipe()
    source, destination = filled(Picky(200, 200), 1.0), filled(Picky(200, 200), 0.0)
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours], model=source)
        b.init_on_worker("policy", pipe=theirs, model=destination)
        source.note = "poison"
        a.get_sender().send_async()
        assert b.get_receiver().receive(timeout=0) is False
        with pytest.raises(RefusedError, match="I will not") as refused:
            a.get_sender().wait_async()
        assert "ZeroDivisionError" in refused.value.refused[0]
        assert (destination.weight[0, 0].item(), destination.note) == (0.0, "old")
        source.note = "new"
        a.get_sender().send_async()

        assert b.get_receiver().receive(timeout=0)
        assert (destination.weight[0, 0].item(), destination.note) == (1.0, "new")


def test_tied_weights_that_disagree_are_refused(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    tied[1].weight = tied[0].weight
    before = tied[0].weight.detach().clone()
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours])
        b.init_on_worker("policy", pipe=theirs, model=tied)
        a.get_sender().send_async({"0.weight": torch.ones(2, 2), "1.weight": torch.zeros(2, 2)})
        assert b.get_receiver().receive(timeout=0) is False

        assert "0.weight" in b.get_receiver().last_refusal
        assert torch.equal(tied[0].weight, before)


@pytest.mark.parametrize("weights", [None, 3, "policy", [torch.ones(1)]])
def test_apply_weights_by_hand_refuses_unsupported_types(pair: Pair, weights: Any) -> None:
    pair.sync()
    with pytest.raises(ConfigurationError):
        pair.receiver.apply_weights(weights)

    assert (pair.receiver.version, constants(pair.model)) == (1, {1.0})
