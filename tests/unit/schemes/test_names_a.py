"""Generation A: every name and signature that the reference documents, and what each of them does here."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from fleet import PATIENCE, Pair, constants, filled, small
from pools import statistics
from tensordict import TensorDict
from torch import nn

import weightsync
from weightsync import (
    AckTimeoutError,
    ConfigurationError,
    LayoutError,
    ModelPathError,
    MPTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    OutcomeKind,
    SharedMemWeightSyncScheme,
    State,
    StateError,
    WeightReceiver,
    WeightSender,
    WeightStrategy,
    WeightSyncScheme,
)

SIGNATURES = {
    "WeightSyncScheme": {
        "init_on_sender": ["model_id", "context", "kwargs"],
        "init_on_worker": ["model_id", "context", "kwargs"],
        "get_sender": [],
        "get_receiver": [],
        "create_transport": ["pipe_or_context"],
        "create_sender": [],
        "create_receiver": [],
        "prepare_weights": ["weights", "model_id", "strategy", "context"],
    },
    "WeightSender": {
        "send": ["weights", "worker_ids"],
        "send_async": ["weights", "worker_ids"],
        "wait_async": [],
        "update_weights": ["weights"],
        "register_worker": ["worker_idx", "pipe_or_context"],
        "set_context": ["context", "model_id"],
    },
    "WeightReceiver": {
        "receive": ["timeout"],
        "apply_weights": ["weights"],
        "register_model": ["model"],
        "register_worker_transport": ["pipe_or_context"],
        "set_context": ["context", "model_id"],
    },
    "WeightStrategy": {"extract_weights": ["source"], "apply_weights": ["destination", "weights", "inplace"]},
    "SharedMemWeightSyncScheme": {"register_shared_weights": ["model_id", "weights"]},
}


@pytest.mark.parametrize(("name", "member"), [(n, m) for n, members in SIGNATURES.items() for m in members])
def test_signatures_are_the_references_with_keyword_only_additions(name: str, member: str) -> None:
    parameters = list(inspect.signature(getattr(getattr(weightsync, name), member)).parameters.values())[1:]

    positional = [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]

    assert positional == SIGNATURES[name][member]


def test_defaults_are_the_references() -> None:
    assert inspect.signature(WeightReceiver.receive).parameters["timeout"].default == 0.001
    assert MultiProcessWeightSyncScheme().strategy == "state_dict"
    assert SharedMemWeightSyncScheme().strategy == "tensordict"
    assert NoWeightSyncScheme().strategy == "state_dict"
    assert WeightStrategy().extract_as == "tensordict"
    shared = inspect.signature(SharedMemWeightSyncScheme.__init__).parameters
    assert [*shared][1:4] == ["policy_weights", "strategy", "auto_register"]
    assert [p.default for p in shared.values()][1:4] == [None, "tensordict", True]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in list(shared.values())[4:])


@pytest.mark.parametrize(
    ("owner", "alias", "name"),
    [
        (WeightSender, "_register_worker", "register_worker"),
        (WeightSender, "_set_context", "set_context"),
        (WeightReceiver, "_register_model", "register_model"),
        (WeightReceiver, "_register_worker_transport", "register_worker_transport"),
        (WeightReceiver, "_set_context", "set_context"),
    ],
)
def test_underscored_names_are_aliases(owner: type, alias: str, name: str) -> None:
    assert getattr(owner, alias) is getattr(owner, name)


def test_every_public_name_imports_from_the_package() -> None:
    assert all(getattr(weightsync, name) is not None for name in weightsync.__all__)


# ---------------------------------------------------------------------------------------------- both inits


class Trainer:
    """A context of a sender."""

    def __init__(self, pipes: list[Any], **own: Any) -> None:
        self.pipes = pipes
        self.num_workers = len(pipes)
        self.__dict__.update(own)


def test_initialised_from_contexts(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    trainer = Trainer([ours], get_model={"policy": small(3.0)}.get)
    worker = SimpleNamespace(pipe=theirs, get_model={"policy": small()}.get)
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", trainer)
        b.init_on_worker("policy", worker)
        a.get_sender().send_async()

        assert b.get_receiver().receive(timeout=PATIENCE) is True
        assert constants(b.get_receiver().model) == {3.0}
        assert a.get_sender().wait_async().ok


def test_initialised_from_keywords(pair: Pair) -> None:
    assert pair.sync().ok
    assert constants(pair.model) == {1.0}


def test_a_worker_without_a_model_resolves_its_id_when_weights_come(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = SimpleNamespace(pipe=theirs, env=SimpleNamespace(transform=[small()]))
    with scheme_class() as a, scheme_class() as b:
        b.init_on_worker("env.transform[0]", worker)
        a.init_on_sender("env.transform[0]", pipes=[ours], model=small(2.0))
        a.get_sender().send_async()

        assert b.get_receiver().receive(timeout=PATIENCE)
        assert constants(worker.env.transform[0]) == {2.0}


def test_getters_before_their_init_are_runtime_errors(scheme_class: Any) -> None:
    scheme = scheme_class()

    with pytest.raises(RuntimeError, match="get_sender"):
        scheme.get_sender()
    with pytest.raises(RuntimeError, match="get_receiver"):
        scheme.get_receiver()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "pipes"),
        ({"pipes": "three", "num_workers": 2}, "pipes= is 'three'"),
        ({"pipes": [], "model": None, "pipe": 3}, "pipe"),
    ],
)
def test_what_init_on_sender_misses_is_named(scheme_class: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scheme_class().init_on_sender("policy", **arguments)


@pytest.mark.parametrize(("arguments", "named"), [({}, "pipe"), ({"model": nn.Linear(1, 1)}, "pipe")])
def test_what_init_on_worker_misses_is_named(scheme_class: Any, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scheme_class().init_on_worker("policy", **arguments)


def test_a_worker_without_model_and_context_is_refused(scheme_class: Any) -> None:
    _, theirs = multiprocessing.Pipe()

    with pytest.raises(ValueError, match="model"):
        scheme_class().init_on_worker("policy", pipe=theirs)


def test_a_failed_init_can_be_repeated_with_better_arguments(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    closed, _ = multiprocessing.Pipe()
    closed.close()
    scheme = scheme_class()
    with pytest.raises(ConfigurationError) as refused:
        scheme.init_on_sender("policy", pipes=[ours, closed], model=small(1.0))
    with scheme, scheme_class() as worker:
        scheme.init_on_sender("policy", pipes=[ours], model=small(1.0))
        worker.init_on_worker("policy", pipe=theirs, model=small())
        scheme.get_sender().send_async()

        assert worker.get_receiver().receive(timeout=PATIENCE)
    assert refused.value is not None


def test_each_side_is_initialised_once(pair: Pair) -> None:
    with pytest.raises(StateError):
        pair.scheme.init_on_sender("policy", pipes=[], model=small())
    with pytest.raises(StateError):
        pair.schemes[0].init_on_worker("policy", pipe=None, model=small())

    assert pair.sync().ok


def test_a_subclass_without_init_is_not_implemented() -> None:
    class Mine(WeightSyncScheme):
        def create_transport(self, pipe_or_context: Any) -> Any: ...

        def create_link(self, endpoint: Any, model_id: str, peer: str) -> Any: ...

    for init in (Mine().init_on_sender, Mine().init_on_worker):
        with pytest.raises(NotImplementedError, match=r"override it, or use what create_\w+\(\) returns"):
            init("policy")


@pytest.mark.parametrize("name", ["pickle", "", 3, None])
def test_a_bad_name_of_a_strategy_is_a_value_error(scheme_class: Any, name: Any) -> None:
    with pytest.raises(ValueError, match="strategy"):
        scheme_class(strategy=name)


def test_a_strategy_equals_and_hashes_like_its_name(scheme_class: Any) -> None:
    scheme = scheme_class(strategy="tensordict")

    assert scheme.strategy == "tensordict"
    assert {scheme.strategy: 1}["tensordict"] == 1
    assert scheme_class(strategy=WeightStrategy("state_dict")).strategy == "state_dict"


# --------------------------------------------------------------------------------------------- the low level


def test_the_low_level_way(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    destination = small()
    scheme = scheme_class()
    with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
        sender.register_worker(0, ours)
        receiver.register_model(destination)
        receiver.register_worker_transport(SimpleNamespace(pipe=theirs))
        assert sender.state is State.UNINITIALIZED
        sender.send_async(small(4.0))

        assert receiver.receive(timeout=PATIENCE)
        assert sender.wait_async().version == 1
        assert constants(destination) == {4.0}


def test_an_incomplete_low_level_sender_raises_at_its_first_send(scheme_class: Any) -> None:
    with pytest.raises(StateError):
        scheme_class().create_sender().send(small())


def test_an_incomplete_low_level_receiver_says_what_it_misses(scheme_class: Any) -> None:
    receiver = scheme_class().create_receiver()

    with pytest.raises(ValueError, match="register_model"):
        receiver.receive()
    receiver.register_model(small())
    with pytest.raises(RuntimeError):
        receiver.receive()


def test_a_low_level_receiver_resolves_a_path_on_its_context(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = SimpleNamespace(env=SimpleNamespace(nets=[None, small()]))
    scheme = scheme_class()
    with scheme.create_sender() as sender, scheme.create_receiver() as receiver:
        sender.set_context(None, "value")
        sender.register_worker(0, ours)
        receiver.set_context(context, "value")
        receiver.register_model("env.nets[1]")
        receiver.register_worker_transport(theirs)
        sender.send_async(small(5.0))

        assert receiver.receive(timeout=PATIENCE)
        assert constants(context.env.nets[1]) == {5.0}


def test_create_transport_makes_the_references_transport_class(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()

    with scheme_class().create_transport(ours) as transport, MPTransport(theirs) as worker:
        transport.send_weights_async("policy", small(4.0))

        assert worker.receive_weights(PATIENCE)[0] == "policy"


# -------------------------------------------------------------------------- weights, and where they come from


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in flat.items():
        module, _, last = name.rpartition(".")
        found.setdefault(module, {})[last] = tensor
    return found


KINDS = {
    "module": lambda: small(7.0),
    "flat dict": lambda: plain(small(7.0)),
    "nested dict": lambda: nested(plain(small(7.0))),
    "flat TensorDict": lambda: TensorDict(plain(small(7.0))),
    "nested TensorDict": lambda: TensorDict(nested(plain(small(7.0)))),
    "TensorDict.from_module": lambda: WeightStrategy("tensordict").extract_weights(small(7.0)),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_weights_of_every_kind_arrive(scheme_class: Any, kind: str, strategy: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    destination = small()
    with scheme_class(strategy=strategy) as a, scheme_class(strategy=strategy) as b:
        a.init_on_sender("policy", pipes=[ours])
        b.init_on_worker("policy", pipe=theirs, model=destination)
        a.get_sender().send_async(KINDS[kind]())
        b.get_receiver().receive(timeout=PATIENCE)

        assert a.get_sender().wait_async().ok
        assert constants(destination) == {7.0}
        assert b.get_receiver().digest() == a.get_sender().digest()


def test_update_weights_is_the_older_name_of_send(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TIMEOUT", "0")
    with pytest.raises(AckTimeoutError):
        pair.sender.update_weights(small(9.0))
    assert pair.receiver.receive(timeout=0)

    assert pair.sender.wait_async().ok
    assert constants(pair.model) == {9.0}


def test_a_string_is_a_path_on_the_context(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = Trainer([ours], env=SimpleNamespace(transform=[small(6.0)]))
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", context)
        b.init_on_worker("policy", pipe=theirs, model=small())
        a.get_sender().send_async("env.transform[0]")

        assert b.get_receiver().receive(timeout=PATIENCE)
        assert constants(b.get_receiver().model) == {6.0}


def prepared(scheme: Any, context: Any, model_id: str = "policy", **given: Any) -> Any:
    scheme.init_on_sender(model_id, context, **given)
    found = scheme.prepare_weights(None, model_id, scheme.strategy, context)
    scheme.close()
    return next(iter(WeightStrategy("state_dict").extract_weights(found).values())).flatten()[0].item()


def test_none_means_the_registered_model_in_the_documented_order(scheme_class: Any) -> None:
    full = {
        "get_cached_weights": {"policy": plain(small(1.0))}.get,
        "get_model": {"policy": small(2.0)}.get,
        "policy": small(3.0),
        "_fallback_policy": small(4.0),
    }
    given = {"model": small(5.0), "source_model": small(6.0)}
    seen = []
    for missing in range(5):
        context = Trainer([], **dict(list(full.items())[missing:]))
        seen.append(prepared(scheme_class(), context, **given))
    seen.append(prepared(scheme_class(), Trainer([]), source_model=small(6.0)))
    seen.append(prepared(scheme_class(), None, pipes=[], model=small(5.0), cached_weights=plain(small(0.5))))

    assert seen == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.5]


def test_only_policy_falls_back_to_the_fallback_policy(scheme_class: Any) -> None:
    with pytest.raises(ValueError, match="value"):
        prepared(scheme_class(), Trainer([], _fallback_policy=small(4.0)), "value")


def test_prepare_weights_extracts_modules_and_passes_the_rest(scheme_class: Any) -> None:
    scheme, td = scheme_class(), TensorDict({"a": torch.ones(2)})

    assert scheme.prepare_weights(td, "policy", scheme.strategy) is td
    assert set(scheme.prepare_weights(small(), "policy", WeightStrategy("state_dict"))) == set(small().state_dict())


def test_a_path_without_a_context_is_a_value_error(pair: Pair) -> None:
    with pytest.raises(ValueError, match="context"):
        pair.sender.send("env.transform[0]")


def test_a_path_on_a_collected_context_is_a_value_error(scheme_class: Any) -> None:
    ours, _theirs = multiprocessing.Pipe()
    context = Trainer([ours], policy=small(1.0))
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", context)
        del context
        gc.collect()

        with pytest.raises(ValueError, match="collected"):
            scheme.get_sender().send("policy")


class Slotted:
    """A context that cannot be referenced weakly."""

    __slots__ = ("pipes", "policy")


def test_a_context_that_cannot_be_referenced_weakly_is_kept_alive(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = Slotted()
    context.pipes, context.policy = [ours], small(7.0)
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", context)
        b.init_on_worker("policy", pipe=theirs, model=small())
        del context
        gc.collect()
        a.get_sender().send_async()

        assert b.get_receiver().receive(timeout=PATIENCE)
        assert constants(b.get_receiver().model) == {7.0}


def test_weights_that_are_given_need_no_context(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with scheme_class() as a, scheme_class() as b:
        a.init_on_sender("policy", Trainer([ours]))
        b.init_on_worker("policy", pipe=theirs, model=small())
        gc.collect()
        a.get_sender().send_async(small(2.0))

        assert b.get_receiver().receive(timeout=PATIENCE)


@pytest.mark.parametrize(("path", "part"), [("env.net", "net"), ("env.nets[5]", "[5]"), ("nowhere", "nowhere")])
def test_a_path_that_does_not_resolve_names_its_part(scheme_class: Any, path: str, part: str) -> None:
    ours, _theirs = multiprocessing.Pipe()
    context = Trainer([ours], env=SimpleNamespace(nets=[small()]))
    with scheme_class() as scheme:
        scheme.init_on_sender("policy", context)
        with pytest.raises(AttributeError, match="path") as refused:
            scheme.get_sender().send(path)

    assert isinstance(refused.value, ModelPathError)
    assert refused.value.part == part


# ------------------------------------------------------------------------------------------------ worker ids


@pytest.mark.parametrize(
    ("worker_ids", "reached"), [(None, {0, 1, 2}), (1, {1}), ([2], {2}), ([0, 2], {0, 2}), ((1, 1), {1}), (0, {0})]
)
def test_worker_ids_are_none_an_int_or_a_list(three: Pair, worker_ids: Any, reached: set[int]) -> None:
    report = three.sync(worker_ids=worker_ids)

    assert set(report) == reached
    assert {i for i, model in enumerate(three.models) if constants(model) == {1.0}} == reached


@pytest.mark.parametrize("worker_ids", [[], (), 3, -1, [0, 7], "0", 1.5, [None], [[0]], True, [0.0], {"0": 1}])
def test_bad_worker_ids_are_value_errors_and_nothing_changes(three: Pair, worker_ids: Any) -> None:
    before = three.sender.version, three.sender.state

    with pytest.raises(ValueError, match="worker"):
        three.sender.send(worker_ids=worker_ids)
    assert (three.sender.version, three.sender.state) == before
    assert three.sync().ok


def test_numpy_integers_are_ints(three: Pair) -> None:
    assert set(three.sync(worker_ids=numpy.int64(1))) == {1}
    assert set(three.sync(worker_ids=numpy.array([0, 2]))) == {0, 2}


# ------------------------------------------------------------------------------------ for shared memory only


def test_a_registered_buffer_holds_the_newest_version_after_a_send() -> None:
    target = WeightStrategy("tensordict").extract_weights(small())
    target = target.clone()
    ours, theirs = multiprocessing.Pipe()
    scheme, worker = SharedMemWeightSyncScheme({"policy": target}), SharedMemWeightSyncScheme()
    with scheme, worker:
        scheme.init_on_sender("policy", pipes=[ours])
        worker.init_on_worker("policy", pipe=theirs, model=small())
        scheme.get_sender().send_async(small(8.0))
        assert worker.get_receiver().receive(timeout=PATIENCE)
        scheme.get_sender().wait_async()

    assert {value for tensor in target.flatten_keys(".").values() for value in tensor.flatten().tolist()} == {8.0}


def test_register_shared_weights_and_policy_weights() -> None:
    scheme, target = SharedMemWeightSyncScheme(), plain(small())

    scheme.register_shared_weights("policy", target)

    assert scheme.policy_weights["policy"] is target


def test_with_auto_register_off_an_unregistered_model_is_a_key_error_that_lists_the_known() -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme = SharedMemWeightSyncScheme({"value": plain(small())}, auto_register=False)
    with scheme, SharedMemWeightSyncScheme() as worker:
        scheme.init_on_sender("policy", pipes=[ours], model=small(1.0))
        worker.init_on_worker("policy", pipe=theirs, model=small())
        with pytest.raises(KeyError, match="value"):
            scheme.get_sender().send()
        scheme.register_shared_weights("policy", plain(small()))
        scheme.get_sender().send_async()

        assert worker.get_receiver().receive(timeout=PATIENCE)


def test_a_registered_buffer_that_does_not_fit_refuses_the_send_and_leaks_no_slot() -> None:
    ours, theirs = multiprocessing.Pipe()
    scheme = SharedMemWeightSyncScheme({"policy": {"other": torch.zeros(3)}})
    with scheme, SharedMemWeightSyncScheme() as worker:
        scheme.init_on_sender("policy", pipes=[ours], model=small(1.0))
        worker.init_on_worker("policy", pipe=theirs, model=small())
        sender = scheme.get_sender()
        for _ in range(5):
            with pytest.raises(LayoutError):
                sender.send()

        assert sender.state is State.READY
        assert sender.version == 0
        assert statistics(sender._packer._pool).pinned == 0


# --------------------------------------------------------------------------------------------- what a send does


def test_all_are_dispatched_to_before_any_is_waited_for(three: Pair) -> None:
    report = three.sender.send_async()

    assert {outcome.kind for outcome in report.outcomes.values()} == {OutcomeKind.PENDING}
    assert [receiver.receive(timeout=0) for receiver in three.receivers] == [True] * 3
    assert three.sender.wait_async().ok


def test_a_snapshot_is_taken_before_send_async_returns(pair: Pair) -> None:
    weights = plain(small(1.0))
    pair.sender.send_async(weights)
    for tensor in weights.values():
        tensor.fill_(2.0)
    pair.receiver.receive(timeout=0)
    pair.sender.wait_async()

    assert constants(pair.model) == {1.0}


def test_a_model_is_read_anew_at_each_send(pair: Pair) -> None:
    pair.sync()
    filled(pair.source, 5.0)
    pair.sync()

    assert constants(pair.model) == {5.0}
    assert pair.receiver.version == 2


def test_no_scheme_needs_nothing() -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender("policy")
    scheme.init_on_worker("policy")
    sender, receiver = scheme.get_sender(), scheme.get_receiver()

    assert dict(sender.send(object()).outcomes) == {}
    assert dict(sender.send_async(worker_ids=[9]).outcomes) == {}
    assert dict(sender.wait_async().outcomes) == {}
    assert dict(sender.update_weights(None).outcomes) == {}
    assert receiver.receive() is False
    assert receiver.receive(timeout=None) is False
    transport = scheme.create_transport(None)
    assert transport.send_weights("policy", {}) is None
    assert transport.receive_weights(timeout=1.0) is None
    assert transport.check_connection() is True
    scheme.close()
    for call in (sender.send, sender.send_async, receiver.receive):
        with pytest.raises(StateError):
            call()


def test_no_scheme_initialised_twice_is_a_state_error() -> None:
    scheme = NoWeightSyncScheme()
    scheme.init_on_sender("policy")
    scheme.init_on_worker("policy")

    with pytest.raises(StateError):
        scheme.init_on_sender("policy")
    with pytest.raises(StateError):
        scheme.init_on_worker("policy")
