"""Every documented name of generation A behaves as documented (`reference_rows.py` maps rows to tests)."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import pickle
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from constant_models import constants_of
from fleet import PATIENCE, Pair, constants, filled, small
from tensordict import TensorDict
from torch import nn

import weightsync
from weightsync import (
    AckTimeoutError,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    OutcomeKind,
    SharedMemWeightSyncScheme,
    State,
    StateError,
    SyncReport,
    WeightReceiver,
    WeightSender,
    WeightStrategy,
)
from weightsync.weights.model_path import _resolve_model


class Context:
    """A context in TorchRL's sense: a collector, or any object with the same attributes."""

    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# ------------------------------------------------------------------------------------------- WeightSyncScheme


def test_init_on_sender_takes_everything_from_its_context(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = Context(pipes=[ours], num_workers=1, get_cached_weights={"policy": plain(small(2.0))}.get)
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", context)
        b.init_on_worker("policy", pipe=theirs, model=small())
        a.get_sender().send_async()

        assert b.get_receiver().receive(timeout=PATIENCE)
        assert constants(b.get_receiver().model) == {2.0}


@pytest.mark.parametrize("given", ["model", "source_model", "cached_weights"])
def test_init_on_sender_takes_the_same_by_keyword(scheme_class: Any, given: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    weights = plain(small(2.0)) if given == "cached_weights" else small(2.0)
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", pipes=[ours], num_workers=1, **{given: weights})
        b.init_on_worker("policy", pipe=theirs, model=small())
        a.get_sender().send_async()

        assert b.get_receiver().receive(timeout=PATIENCE)
        assert constants(b.get_receiver().model) == {2.0}


def test_init_on_sender_names_what_is_missing_or_contradictory(scheme_class: Any) -> None:
    ours, _theirs = multiprocessing.Pipe()

    with pytest.raises(ValueError, match="pipes"):
        scheme_class().init_on_sender("policy", Context())
    with pytest.raises(ValueError, match="num_workers"):
        scheme_class().init_on_sender("policy", Context(pipes=[ours], num_workers=2))


def test_init_holds_its_context_weakly(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = Context(pipes=[ours], pipe=theirs, policy=small(1.0), get_model={"policy": small()}.get)
    watched = weakref.ref(context)
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", context)
        scheme.init_on_worker("policy", context)
        del context
        gc.collect()

        assert watched() is None
        assert scheme.get_sender().state is State.READY


def test_init_on_worker_takes_pipe_and_model_from_its_context_or_by_keyword(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe(), multiprocessing.Pipe()
    context = Context(pipe=ours[1], get_model={"policy": small()}.get)
    with scheme_class() as a, scheme_class() as b, scheme_class() as c:
        a.init_on_sender("policy", pipes=[ours[0], theirs[0]], model=small(3.0))
        b.init_on_worker("policy", context)
        c.init_on_worker("policy", pipe=theirs[1], model=small())
        a.get_sender().send_async()

        assert [each.get_receiver().receive(timeout=PATIENCE) for each in (b, c)] == [True, True]
        assert constants(b.get_receiver().model) == constants(c.get_receiver().model) == {3.0}


def test_init_on_worker_resolves_its_model_id_lazily(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = Context(pipe=theirs)
    with scheme_class() as a, scheme_class() as b:
        b.init_on_worker("env.value_net", context)
        context.env = SimpleNamespace(value_net=small())
        a.init_on_sender("env.value_net", pipes=[ours], model=small(2.0))
        a.get_sender().send_async()

        assert b.get_receiver().receive(timeout=PATIENCE)
        assert constants(context.env.value_net) == {2.0}


def test_get_sender_and_get_receiver_before_their_inits_are_runtime_errors() -> None:
    for scheme in (MultiProcessWeightSyncScheme(), SharedMemWeightSyncScheme(), NoWeightSyncScheme()):
        for get in (scheme.get_sender, scheme.get_receiver):
            with pytest.raises(RuntimeError):
                get()


def test_get_sender_and_get_receiver_give_the_sides(pair: Pair) -> None:
    assert isinstance(pair.scheme.get_sender(), WeightSender)
    assert pair.scheme.get_sender() is pair.scheme.get_sender()
    assert isinstance(pair.schemes[0].get_receiver(), WeightReceiver)
    with pytest.raises(RuntimeError):
        pair.scheme.get_receiver()


def test_create_sender_and_create_receiver_are_wired_by_hand(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    destination, scheme = small(), scheme_class()
    with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
        sender.register_worker(0, SimpleNamespace(pipe=ours))
        receiver.register_model(destination)
        receiver.register_worker_transport(theirs)
        sender.send_async(small(4.0))

        assert receiver.receive(timeout=PATIENCE)
        assert sender.wait_async().ok
        assert constants(destination) == {4.0}


def test_prepare_weights_with_none_and_no_model_is_an_error(scheme_class: Any) -> None:
    scheme = scheme_class()

    with pytest.raises(ValueError, match="model"):
        scheme.prepare_weights(None, "policy", scheme.strategy)
    with pytest.raises(ValueError, match="model"):
        scheme.prepare_weights(None, "policy", scheme.strategy, Context())


def test_prepare_weights_takes_paths_modules_and_what_is_ready(scheme_class: Any) -> None:
    scheme, context = scheme_class(), Context(env=SimpleNamespace(transform=[small(2.0)]))
    flat, ready = WeightStrategy("state_dict"), TensorDict({"a": torch.ones(1)})

    assert constants_of(scheme.prepare_weights("env.transform[0]", "policy", flat, context)) == {2.0}
    assert constants_of(scheme.prepare_weights(small(3.0), "policy", flat, context)) == {3.0}
    assert constants_of(scheme.prepare_weights(None, "env.transform[0]", flat, context)) == {2.0}
    assert scheme.prepare_weights(ready, "policy", flat, context) is ready


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_prepare_weights_takes_a_strategy_by_its_name(scheme_class: Any, strategy: str) -> None:
    found = scheme_class().prepare_weights(small(3.0), "policy", strategy)

    assert isinstance(found, TensorDict if strategy == "tensordict" else dict)
    with pytest.raises(ValueError, match="no strategy 'dict'"):
        scheme_class().prepare_weights(small(3.0), "policy", "dict")


def test_pickling_a_scheme_strips_its_sides(pair: Pair) -> None:
    for scheme in (pair.scheme, pair.schemes[0]):
        clone = pickle.loads(pickle.dumps(scheme))

        assert clone.strategy == scheme.strategy
        for get in (clone.get_sender, clone.get_receiver):
            with pytest.raises(RuntimeError):
                get()
    assert pair.sync().ok


def test_strategy_is_equal_to_its_name_and_hashes_like_it(scheme_class: Any) -> None:
    for name in ("state_dict", "tensordict"):
        strategy = scheme_class(strategy=name).strategy

        assert isinstance(strategy, WeightStrategy)
        assert strategy == name
        assert {name: 1}[strategy] == 1
    with pytest.raises(ValueError, match="no_such"):
        scheme_class(strategy="no_such")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("policy", "p"),
        ("env.value_net", "v"),
        ("env.transform[0]", "t0"),
        ("env.transform[-1]", "t1"),
        ("grid[1][0]", "g10"),
        ("grid[1][0].upper", None),
    ],
)
def test_model_paths_are_attributes_and_integer_indices(path: str, found: str | None) -> None:
    context = Context(
        policy="p",
        env=SimpleNamespace(value_net="v", transform=["t0", "t1"]),
        grid=[[], ["g10"]],
    )

    resolved = _resolve_model(context, path)

    assert resolved == found if found is not None else callable(resolved)


@pytest.mark.parametrize(("path", "part"), [("env.none", "none"), ("nowhere.x", "nowhere"), ("grid[7]", "7")])
def test_a_model_path_that_does_not_resolve_is_an_attribute_error_that_names_the_part(path: str, part: str) -> None:
    with pytest.raises(AttributeError, match=part):
        _resolve_model(Context(env=SimpleNamespace(), grid=[1]), path)


def test_a_model_path_without_a_context_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="context"):
        _resolve_model(None, "policy")


# ---------------------------------------------------------------------------------- schemes and their defaults


def test_default_strategies_are_those_of_generation_a() -> None:
    defaults = {
        name: getattr(weightsync, name)().strategy.extract_as
        for name in ("MultiProcessWeightSyncScheme", "SharedMemWeightSyncScheme", "NoWeightSyncScheme")
    }

    assert defaults == {
        "MultiProcessWeightSyncScheme": "state_dict",
        "SharedMemWeightSyncScheme": "tensordict",
        "NoWeightSyncScheme": "state_dict",
    }


def test_shared_mem_scheme_registers_weights_and_shows_them() -> None:
    first, second = plain(small()), plain(small())
    scheme = SharedMemWeightSyncScheme({"policy": first}, "tensordict", True)
    scheme.register_shared_weights("value", second)

    assert scheme.policy_weights["policy"] is first
    assert scheme.policy_weights["value"] is second


def test_no_scheme_succeeds_without_anything() -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender("policy")
    scheme.init_on_worker("policy")

    report = scheme.get_sender().send()

    assert isinstance(report, SyncReport)
    assert dict(report.outcomes) == {}
    assert scheme.get_receiver().receive() is False
    transport = scheme.create_transport(None)
    assert transport.send_weights("policy", {}) is None
    assert transport.receive_weights() is None
    assert transport.check_connection() is True
    scheme.close()


# --------------------------------------------------------------------------------------------- WeightStrategy


def sources(fill: float) -> dict[str, Any]:
    flat = plain(small(fill))
    nested = WeightStrategy("tensordict").extract_weights(small(fill))
    return {"module": small(fill), "tensordict": nested, "dict": flat}


@pytest.mark.parametrize("kind", ["module", "tensordict", "dict"])
def test_extract_weights_of_each_source_to_each_format(kind: str) -> None:
    names = set(small().state_dict())
    flat = WeightStrategy("state_dict").extract_weights(sources(1.0)[kind])
    nested = WeightStrategy("tensordict").extract_weights(sources(1.0)[kind])

    assert isinstance(flat, dict)
    assert isinstance(nested, TensorDict)
    assert set(flat) == set(nested.flatten_keys(".").keys()) == names


@pytest.mark.parametrize("destination", ["module", "tensordict", "dict"])
@pytest.mark.parametrize("weights", ["state_dict", "tensordict"])
@pytest.mark.parametrize("inplace", [True, False])
def test_apply_weights_to_each_destination_in_each_format(destination: str, weights: str, inplace: bool) -> None:
    into = sources(0.0)[destination]
    given = WeightStrategy(weights).extract_weights(small(5.0))

    WeightStrategy("tensordict").apply_weights(into, given, inplace=inplace)

    assert constants_of(WeightStrategy("state_dict").extract_weights(into)) == {5.0}


def test_apply_weights_of_other_types_is_a_value_error() -> None:
    for into, given in ((3, plain(small())), (small(), 3), (small(), None), (None, plain(small()))):
        with pytest.raises(ValueError, match=r"int|None"):
            WeightStrategy().apply_weights(into, given)


@pytest.mark.parametrize("destination", ["module", "tensordict", "dict"])
@pytest.mark.parametrize("misfit", ["missing", "unknown", "shape", "dtype"])
def test_apply_weights_that_do_not_fit_is_a_key_error_and_changes_nothing(destination: str, misfit: str) -> None:
    into, given = sources(0.0)[destination], plain(small(5.0))
    match misfit:
        case "missing":
            del given["0.bias"]
        case "unknown":
            given["more"] = torch.ones(1)
        case "shape":
            given["0.bias"] = torch.ones(9)
        case "dtype":
            given["0.bias"] = given["0.bias"].double()

    with pytest.raises(KeyError):
        WeightStrategy().apply_weights(into, given)
    assert constants_of(WeightStrategy("state_dict").extract_weights(into)) == {0.0}


def test_extract_weights_of_other_types_is_a_value_error() -> None:
    for source in (3, None, [torch.ones(1)], "policy"):
        with pytest.raises(ValueError, match="support"):
            WeightStrategy().extract_weights(source)


# ----------------------------------------------------------------------------------------------- WeightSender


def test_send_dispatches_to_all_first_and_returns_when_all_acked(three: Pair) -> None:
    done: list[SyncReport] = []
    thread = threading.Thread(target=lambda: done.append(three.sender.send(timeout=PATIENCE)))
    thread.start()
    # In reverse order, so a send that waited for worker 0 before dispatching to worker 2 would never end.
    for receiver in reversed(three.receivers):
        assert not done
        assert receiver.receive(timeout=PATIENCE)
    thread.join(PATIENCE)

    assert done[0].ok
    assert set(done[0]) == {0, 1, 2}


@pytest.mark.parametrize(("worker_ids", "reached"), [(None, {0, 1, 2}), (1, {1}), ([0, 2], {0, 2})])
def test_send_takes_worker_ids_none_an_int_or_a_list(three: Pair, worker_ids: Any, reached: set[int]) -> None:
    assert set(three.sync(worker_ids=worker_ids)) == reached
    assert {i for i, model in enumerate(three.models) if constants(model) == {1.0}} == reached


@pytest.mark.parametrize("worker_ids", [3, [0, 3], -1])
def test_send_to_an_unknown_id_is_a_value_error(three: Pair, worker_ids: Any) -> None:
    with pytest.raises(ValueError, match="worker"):
        three.sender.send(worker_ids=worker_ids)


def test_send_and_send_async_while_one_is_pending_are_runtime_errors(pair: Pair) -> None:
    pair.sender.send_async()
    for call in (pair.sender.send, pair.sender.send_async, lambda: pair.sender.update_weights(None)):
        with pytest.raises(RuntimeError):
            call()
    pair.receiver.receive(timeout=PATIENCE)

    assert pair.sender.wait_async().version == 1


def test_send_async_returns_with_what_is_pending(three: Pair) -> None:
    report = three.sender.send_async(worker_ids=[0, 1])

    assert {i: outcome.kind for i, outcome in report.outcomes.items()} == dict.fromkeys((0, 1), OutcomeKind.PENDING)


def test_wait_async_blocks_until_all_targets_acked(three: Pair) -> None:
    three.sender.send_async()
    three.receivers[0].receive(timeout=PATIENCE)
    with pytest.raises(AckTimeoutError) as late:
        three.sender.wait_async(timeout=0.01)
    for receiver in three.receivers[1:]:
        receiver.receive(timeout=PATIENCE)

    assert set(late.value.pending) == {1, 2}
    assert three.sender.wait_async().ok


def test_wait_async_with_none_pending_is_a_runtime_error(pair: Pair) -> None:
    with pytest.raises(RuntimeError):
        pair.sender.wait_async()
    pair.sync()
    with pytest.raises(RuntimeError):
        pair.sender.wait_async()


def test_update_weights_sends_to_all(three: Pair) -> None:
    thread = threading.Thread(target=lambda: three.sender.update_weights(small(6.0)))
    thread.start()
    for receiver in three.receivers:
        assert receiver.receive(timeout=PATIENCE)
    thread.join(PATIENCE)

    assert [constants(model) for model in three.models] == [{6.0}] * 3


def test_weight_sender_is_made_of_a_scheme_and_wired_with_the_underscored_names_too(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme, context = scheme_class(), Context(value=small(2.0))
    with WeightSender(scheme) as sender, WeightReceiver(scheme) as receiver:
        sender._set_context(context, "value")
        sender._register_worker(0, ours)
        receiver._set_context(Context(), "value")
        receiver._register_model(small())
        receiver._register_worker_transport(theirs)
        sender.send_async("value")

        assert receiver.receive(timeout=PATIENCE)
        assert constants(receiver.model) == {2.0}


def test_pickling_a_sender_drops_its_context_and_what_is_pending(pair: Pair) -> None:
    context = Context(policy=small(2.0))
    pair.sender.set_context(context)
    pair.sender.send_async()
    clone = pickle.loads(pickle.dumps(pair.sender))

    assert clone.state is State.UNINITIALIZED
    with pytest.raises(RuntimeError):
        clone.wait_async()
    with pytest.raises((ValueError, StateError)):
        clone.send("policy")
    pair.receiver.receive(timeout=PATIENCE)
    assert pair.sender.wait_async().ok


# --------------------------------------------------------------------------------------------- WeightReceiver


def test_receive_is_true_with_an_update_and_false_without(pair: Pair) -> None:
    assert pair.receiver.receive() is False
    pair.sender.send_async()

    assert pair.receiver.receive() is True
    assert pair.receiver.receive(timeout=0) is False
    assert pair.sender.wait_async(timeout=0).ok
    assert inspect.signature(WeightReceiver.receive).parameters["timeout"].default == 0.001


def test_receive_without_a_model_is_a_value_error(scheme_class: Any) -> None:
    _ours, theirs = multiprocessing.Pipe()
    with scheme_class().create_receiver() as receiver:
        receiver.register_worker_transport(theirs)
        with pytest.raises(ValueError, match="model"):
            receiver.receive()


def test_receive_is_true_on_shared_memory_too() -> None:
    pair = Pair(SharedMemWeightSyncScheme)
    pair.sender.send_async()

    assert pair.receiver.receive() is True
    pair.close()


def test_apply_weights_acks_a_pending_update_if_these_are_its_weights(pair: Pair) -> None:
    pair.sender.send_async(small(3.0))
    pair.receiver.apply_weights(plain(small(3.0)))

    assert pair.sender.wait_async(timeout=0).ok
    assert (pair.receiver.version, constants(pair.model)) == (1, {3.0})


def test_apply_weights_refuses_a_pending_update_that_is_another(pair: Pair) -> None:
    pair.sender.send_async(small(3.0))
    pair.receiver.apply_weights(plain(small(4.0)))
    report = pair.sender.wait_async(timeout=0, on_failure="report")

    assert report[0].kind is OutcomeKind.REFUSED
    assert (pair.receiver.version, constants(pair.model)) == (None, {4.0})


def test_apply_weights_with_nothing_pending_acks_nothing(pair: Pair) -> None:
    pair.receiver.apply_weights(plain(small(4.0)))

    assert constants(pair.model) == {4.0}
    assert pair.sender.poll() is None
    assert pair.sender.stale_answers == 0


def test_register_model_takes_an_object_or_a_path(scheme_class: Any) -> None:
    for registered in (small(), "net"):
        ours, theirs = multiprocessing.Pipe()
        context, scheme = Context(net=small()), scheme_class()
        with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
            receiver.set_context(context)
            receiver.register_model(registered)
            receiver.register_worker_transport(theirs)
            sender.register_worker(0, ours)
            sender.send_async(small(2.0))

            assert receiver.receive(timeout=PATIENCE)
            assert constants(receiver.model) == {2.0}


def test_pickling_a_receiver_drops_its_context(scheme_class: Any) -> None:
    receiver = scheme_class().create_receiver()
    context = Context(net=small())
    receiver.set_context(context, "net")
    receiver.register_model("net")
    clone = pickle.loads(pickle.dumps(receiver))

    assert clone.state is State.UNINITIALIZED
    assert clone.model_id == "net"
    with pytest.raises(ValueError, match="context"):
        clone.receive()


def test_the_models_weights_are_read_anew_at_each_send(pair: Pair) -> None:
    for fill in (2.0, 3.0):
        filled(pair.source, fill)
        pair.sync()

        assert constants(pair.model) == {fill}
