"""Weights that do not fit the registered model are refused in the trainer. A refused layout harms no later joiner."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from fleet import PATIENCE, Pair, constants, small
from pools import statistics
from tensordict import TensorDict
from torch import nn

from weightsync import LayoutError, MultiProcessWeightSyncScheme, OutcomeKind, RefusedError, State, TransportError
from weightsync.weights.reading import layout_of, read_weights, transient_buffers


@pytest.fixture
def one() -> Any:
    pair = Pair(MultiProcessWeightSyncScheme)
    yield pair
    pair.close()


def state() -> dict[str, torch.Tensor]:
    return small(3.0).state_dict()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda found: {f"module.{name}": tensor for name, tensor in found.items()}, "by the prefix 'module.'"),
        (lambda found: {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}, "dtype bfloat16, expected"),
        (lambda found: {name: tensor for name, tensor in found.items() if name != "0.bias"}, "missing '0.bias'"),
        (lambda found: {**found, "0.bias": torch.ones(7)}, r"shape \(7,\), expected \(3,\)"),
    ],
)
@pytest.mark.parametrize("send", ["send", "send_async"])
def test_weights_of_another_layout_are_refused_in_the_trainer_naming_both_layouts(
    one: Pair, change: Any, error: str, send: str
) -> None:
    one.sync()
    pool = one.sender._packer._pool
    pinned = statistics(pool).pinned

    with pytest.raises(LayoutError, match=error) as caught:
        getattr(one.sender, send)(change(state()))

    message = str(caught.value)
    assert "are not those of the model that is registered for 'policy'" in message
    assert "The model has 9 tensors (1 int64, 8 float32): '0.bias', '0.weight', '1.bias' and 6 more." in message
    assert "The weights have " in message
    assert (one.sender.version, one.sender.state, statistics(pool).pinned) == (1, State.READY, pinned)
    assert one.sync(state()).ok
    assert one.receiver.version == 2


def test_a_tensordict_with_buffers_that_are_not_persistent_is_refused_with_advice(one: Pair) -> None:
    one.sync()
    one.source[1].register_buffer("mask", torch.ones(2), persistent=False)

    with pytest.raises(LayoutError, match=r"unexpected '1.mask'.* send the model itself, or its state_dict\(\)"):
        one.sender.send(TensorDict.from_module(one.source))
    with pytest.raises(LayoutError, match="If the workers have another model now"):
        one.sender.send({**one.source.state_dict(), "1.other": torch.ones(2)})
    assert one.sync(one.source).ok


def test_transient_buffers_of_a_module_with_two_names_are_listed_under_both() -> None:
    part = nn.Linear(2, 2)
    part.register_buffer("mask", torch.ones(2), persistent=False)
    model = nn.Sequential(part, nn.Linear(2, 2), part)

    assert transient_buffers(model) == {"0.mask", "2.mask"}
    assert set(TensorDict.from_module(model).flatten_keys(".").keys()) - set(model.state_dict()) == {"0.mask", "2.mask"}


def test_refused_weights_do_not_supersede_the_outstanding_update(one: Pair) -> None:
    one.sender.send_async()

    with pytest.raises(LayoutError, match="registered for 'policy'"):
        one.sender.send_async({"w": torch.ones(2)}, on_pending="supersede")

    assert one.sender.state is State.PENDING_ASYNC
    assert one.receiver.receive(timeout=PATIENCE)
    assert one.sender.wait_async().version == 1


def test_a_new_model_on_both_sides_is_sent(one: Pair) -> None:
    one.sync()
    other = nn.Linear(5, 2)
    one.scheme.model = other
    one.receiver.register_model(nn.Linear(5, 2))

    assert one.sync().ok
    assert one.sync(dict(other.state_dict())).ok
    assert torch.equal(one.receiver.model.weight, other.weight)


def test_a_model_that_has_grown_on_both_sides_is_sent_with_its_new_layers(one: Pair) -> None:
    one.sync()
    for model in (one.source, one.model):
        model.add_module("3", nn.Linear(2, 2))

    assert one.sync(one.source).ok
    assert one.sync().ok
    assert torch.equal(one.model[3].weight, one.source[3].weight)


def unregistered() -> tuple[Any, Any, Any]:
    """A scheme whose trainer has no model, the scheme of its worker, and the worker's model."""
    ours, theirs = multiprocessing.Pipe()
    a, b, model = MultiProcessWeightSyncScheme(), MultiProcessWeightSyncScheme(), small()
    a.init_on_sender("policy", pipes=[ours])
    b.init_on_worker("policy", pipe=theirs, model=model)
    return a, b, model


@pytest.mark.parametrize("served", [False, True])
def test_a_layout_that_all_workers_refused_is_not_in_the_handshake_of_later_joiners(served: bool) -> None:
    a, b, _ = unregistered()
    sender, joined = a.get_sender(), small()
    with a, b, MultiProcessWeightSyncScheme() as c:
        if served:
            sender.send_async(state())
            assert b.get_receiver().receive(timeout=PATIENCE)
            assert sender.wait_async().ok
        sender.send_async({"w": torch.ones(2)})
        assert not b.get_receiver().receive(timeout=PATIENCE)
        with pytest.raises(RefusedError, match="missing 9 names"):
            sender.wait_async()

        ours, theirs = multiprocessing.Pipe()
        sender.add_worker(1, ours)
        c.init_on_worker("policy", pipe=theirs, model=joined)
        # The joiner refuses the version that it is to catch up with, and takes the next one.
        assert not c.get_receiver().receive(timeout=PATIENCE)
        sender.send_async(filled_state())
        assert all(side.get_receiver().receive(timeout=PATIENCE) for side in (b, c))
        report = sender.wait_async()

        assert report.of(OutcomeKind.APPLIED) == (0, 1)
        assert report.not_caught_up.keys() == {1}
        assert constants(joined) == {4.0}
        greeting = c.get_receiver().driver.greeting
        assert bool(greeting.layout) is served


def filled_state() -> dict[str, torch.Tensor]:
    return small(4.0).state_dict()


def rejoin(sender: Any, receiver: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    sender.add_worker(0, ours)
    receiver.register_worker_transport(theirs)


def refuses_the_handshake(sender: Any, receiver: Any) -> None:
    with pytest.raises(TransportError, match="its handshake was refused"):
        receiver.receive(timeout=PATIENCE)
    sender.progress()
    with pytest.raises(RefusedError, match="every target has refused the handshake"):
        sender.send()


@pytest.mark.parametrize("served", [False, True])
def test_a_worker_added_again_after_refusing_the_handshake_is_offered_the_current_layout(
    one: Pair, served: bool
) -> None:
    if served:
        one.sync()
        rejoin(one.sender, one.receiver)
    one.receiver.register_model(nn.Linear(2, 2))
    refuses_the_handshake(one.sender, one.receiver)

    one.scheme.model = nn.Linear(2, 2)
    rejoin(one.sender, one.receiver)

    assert one.sync().ok
    assert one.receiver.driver.greeting.layout


def test_a_worker_added_again_after_both_models_changed_applies_the_next_version(one: Pair) -> None:
    one.sync()
    one.scheme.model = nn.Linear(2, 2)
    one.receiver.register_model(nn.Linear(2, 2))
    rejoin(one.sender, one.receiver)

    assert not one.receiver.receive(timeout=PATIENCE)  # refuses the version before
    assert one.sync().ok
    assert one.sender._driver.layout == one.receiver.driver.layout


def joined(sender: Any, model: nn.Module) -> MultiProcessWeightSyncScheme:
    """Add a worker 1. Returns its scheme."""
    ours, theirs = multiprocessing.Pipe()
    sender.add_worker(1, ours)
    scheme = MultiProcessWeightSyncScheme()
    scheme.init_on_worker("policy", pipe=theirs, model=model)
    return scheme


def test_a_late_ack_for_the_old_model_does_not_exclude_workers_with_the_new_model(one: Pair) -> None:
    one.sender.send_async()
    one.scheme.model = nn.Linear(2, 2)
    assert one.receiver.receive(timeout=PATIENCE)
    assert one.sender.wait_async().ok

    with pytest.raises(LayoutError, match="are not those of the model that is registered"):
        one.sender.send_async(state())
    with joined(one.sender, nn.Linear(2, 2)) as other:
        assert not other.get_receiver().receive(timeout=PATIENCE)  # refuses the version before
        one.receiver.register_model(nn.Linear(2, 2))
        one.sender.send_async()
        assert all(each.receive(timeout=PATIENCE) for each in (one.receiver, other.get_receiver()))
        assert one.sender.wait_async().of(OutcomeKind.APPLIED) == (0, 1)


def test_before_the_first_version_a_joiner_is_offered_the_trainers_current_layout(one: Pair) -> None:
    assert not one.receiver.receive(timeout=0)  # only the handshake
    one.scheme.model = nn.Linear(2, 2)
    one.receiver.register_model(nn.Linear(2, 2))

    with joined(one.sender, nn.Linear(2, 2)) as other:
        one.sender.send_async()
        assert all(each.receive(timeout=PATIENCE) for each in (one.receiver, other.get_receiver()))
        assert one.sender.wait_async().of(OutcomeKind.APPLIED) == (0, 1)
        assert other.get_receiver().driver.greeting.layout


def test_weights_given_to_connect_take_precedence_over_the_registered_model() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", num_workers=1)
        scheme.model = nn.Linear(2, 2)
        sender = scheme.get_sender()
        sender.connect(weights=small())

        assert sender._driver.layout == layout_of(read_weights(small()))


def test_without_a_registered_model_a_worker_that_refused_the_handshake_can_rejoin() -> None:
    a, b, _ = unregistered()
    with a, b:
        sender, receiver, model = a.get_sender(), b.get_receiver(), nn.Linear(2, 2)
        sender.send_async(state())
        assert receiver.receive(timeout=PATIENCE)
        assert sender.wait_async().ok
        rejoin(sender, receiver)
        receiver.register_model(model)
        refuses_the_handshake(sender, receiver)

        rejoin(sender, receiver)
        assert not receiver.receive(timeout=PATIENCE)  # refuses the version before
        sender.send_async(nn.Linear(2, 2))
        assert receiver.receive(timeout=PATIENCE)
        assert sender.wait_async().ok


def test_without_a_registered_model_any_weights_are_sent() -> None:
    a, b, model = unregistered()
    with a, b:
        for weights in (state(), small(5.0), dict(small(6.0).state_dict())):
            a.get_sender().send_async(weights)
            assert b.get_receiver().receive(timeout=PATIENCE)
            assert a.get_sender().wait_async().ok
        assert constants(model) == {6.0}


def test_workers_that_refuse_for_the_same_reason_share_one_line_of_the_report() -> None:
    wide = nn.Sequential(*[nn.Linear(1, 1) for _ in range(600)])
    ends = [multiprocessing.Pipe() for _ in range(4)]
    sides = [MultiProcessWeightSyncScheme() for _ in range(5)]
    sides[0].init_on_sender("policy", pipes=[ours for ours, _ in ends])
    for side, (_, theirs) in zip(sides[1:], ends, strict=True):
        side.init_on_worker("policy", pipe=theirs, model=wide)
    sender = sides[0].get_sender()
    sender.send_async({name: tensor.half() for name, tensor in wide.state_dict().items()})
    for side in sides[1:]:
        assert not side.get_receiver().receive(timeout=PATIENCE)

    with pytest.raises(RefusedError) as caught:
        sender.wait_async()

    message = str(caught.value)
    assert "  workers 0-3: REFUSED (The weights do not fit the destination: mismatched 1200 names: " in message
    assert message.count("dtype float16, expected float32") == 1
    assert str(caught.value.report).count("mismatched 1200 names") == 1
    assert caught.value.refused.keys() == {0, 1, 2, 3}
    for side in sides:
        side.close()
