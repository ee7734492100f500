"""Every name of generation B, in which one scheme serves both sides (`reference_rows.py` maps names to tests)."""

from __future__ import annotations

import pickle
from typing import Any

import generation_b_cases as setups
import pytest
import torch
from fleet import PATIENCE, Crew, constants, filled, small
from generation_b_cases import fleet_of
from tensordict import TensorDict

import weightsync
from weightsync import (
    DistributedWeightSyncScheme,
    InitialSyncTransport,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    OutcomeKind,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
    SyncReport,
    WeightStrategy,
    WeightSyncScheme,
    register_weight_sync_backend,
)

CPU = torch.device("cpu")


def nested(fill: float) -> TensorDict:
    return TensorDict.from_module(small(fill)).data


# ------------------------------------------------------------------------------------------------- both inits


def tagged(_worker_idx: int, weights: Any) -> Any:
    return weights


class Trainer:
    """A context with the attributes that a scheme reads from TorchRL's multi-process collectors in the trainer."""

    def __init__(self) -> None:
        self.policy = small(1.0)
        self.num_workers = 2
        self.policy_device = [CPU, CPU]


FORMS = {
    "context": lambda: {"context": Trainer()},
    "params_map": lambda: {"params_map": {0: nested(1.0), 1: nested(1.0)}},
    "weights and devices": lambda: {"weights": nested(1.0), "devices": [CPU, CPU]},
    "weights, devices and num_workers": lambda: {"weights": nested(1.0), "devices": [CPU, CPU], "num_workers": 2},
    "model and devices": lambda: {"model": small(1.0), "devices": [CPU, CPU]},
    "weights, device_map_fn": lambda: {"weights": nested(1.0), "device_map_fn": tagged, "num_workers": 2},
    "model, device_map_fn": lambda: {"model": small(1.0), "device_map_fn": tagged, "num_workers": 2},
}


@pytest.mark.parametrize("form", list(FORMS))
def test_init_on_sender_in_each_form_and_connect_brings_the_first_weights(
    scheme_class: Any, crew: Crew, form: str
) -> None:
    given = FORMS[form]()
    with fleet_of(crew, scheme_class(), **given) as fleet:
        assert fleet.first == [{1.0}, {1.0}]
        assert fleet.scheme.send(nested(2.0)).ok
        assert fleet.all(setups.holds) == [{2.0}, {2.0}]


def test_init_on_sender_takes_a_multiprocessing_context(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1, model=small(1.0), devices=[CPU], ctx=crew.context) as fleet:
        assert fleet.first == [{1.0}]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"weights": 1},
        {"model": 1, "weights": 1, "devices": 1},
        {"params_map": 1, "devices": 1},
        {"model": 1, "device_map_fn": 1},
        {"model": 1, "devices": 1, "num_workers": 3},
    ],
)
def test_init_on_sender_with_a_form_that_is_incomplete_or_contradictory_is_a_value_error(
    scheme_class: Any, given: dict[str, Any]
) -> None:
    whole = {
        "weights": nested(1.0),
        "model": small(1.0),
        "devices": [CPU, CPU],
        "params_map": {0: nested(1.0)},
        "device_map_fn": tagged,
        "num_workers": 3,
    }
    scheme = scheme_class()

    with pytest.raises(ValueError, match=r"\w"):
        scheme.init_on_sender(model_id="policy", **{name: whole[name] for name in given})
    assert scheme.initialized_on_sender is False


def test_init_on_receiver_takes_its_model_from_its_context(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), entering=setups.enter_with_context) as fleet:
        assert fleet.first == [{1.0}, {1.0}]


# ---------------------------------------------------------------------------------------------------- connect


def test_connect_twice_is_a_runtime_error_on_both_sides(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1) as fleet:
        with pytest.raises(RuntimeError):
            fleet.scheme.connect()

        assert "RuntimeError" in fleet.workers[0].do(setups.connects_again, 0)
        assert fleet.scheme.send(nested(2.0)).ok


def test_connect_before_any_init_is_a_runtime_error(scheme_class: Any) -> None:
    with pytest.raises(RuntimeError):
        scheme_class().connect()


def test_connect_with_the_other_sides_argument_is_a_runtime_error(scheme_class: Any, crew: Crew) -> None:
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", model=small(1.0), devices=[CPU])
    with pytest.raises(RuntimeError):
        scheme.connect(worker_idx=0)
    scheme.shutdown()


def test_connect_takes_the_first_weights(scheme_class: Any, crew: Crew) -> None:
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", model=small(1.0), devices=[CPU])
    (worker,) = crew.start(scheme)
    worker.tell(setups.enter, 0)
    scheme.connect(weights=nested(7.0))

    assert worker.answer() == {7.0}
    scheme.shutdown()
    worker.do(setups.ends)


# ------------------------------------------------------------------------------------------- send and receive


def test_send_is_applied_in_the_background_and_returns_a_report(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class()) as fleet:
        filled(fleet.given["model"], 3.0)
        report = fleet.scheme.send()

        assert isinstance(report, SyncReport)
        assert {outcome.kind for outcome in report.outcomes.values()} == {OutcomeKind.APPLIED}
        assert fleet.all(setups.holds) == [{3.0}, {3.0}]


@pytest.mark.parametrize(("worker_ids", "values"), [(0, [{2.0}, {1.0}]), ([1], [{1.0}, {2.0}]), ([0, 1], [{2.0}] * 2)])
def test_send_takes_worker_ids(scheme_class: Any, crew: Crew, worker_ids: Any, values: list[set[float]]) -> None:
    with fleet_of(crew, scheme_class()) as fleet:
        fleet.scheme.send(nested(2.0), worker_ids=worker_ids)

        assert fleet.all(setups.holds) == values


def test_send_takes_weights_of_each_kind(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1) as fleet:
        for fill, weights in enumerate((small, nested, lambda fill: dict(small(fill).state_dict())), start=2):
            fleet.scheme.send(weights(float(fill)))

            assert fleet.all(setups.holds) == [{float(fill)}]


def test_send_before_init_or_connect_is_a_runtime_error(scheme_class: Any) -> None:
    scheme = scheme_class()
    with pytest.raises(RuntimeError):
        scheme.send(nested(1.0))
    scheme.init_on_sender(model_id="policy", model=small(1.0), devices=[CPU])
    with pytest.raises(RuntimeError):
        scheme.send(nested(1.0))
    scheme.shutdown()


def test_receive_is_none_when_nothing_comes_and_the_weights_when_something_does(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1) as fleet:
        (worker,) = fleet.workers
        assert worker.do(setups.receives, 0.01) is None
        worker.tell(setups.receives, PATIENCE)
        fleet.scheme.send(nested(4.0))

        assert worker.answer() == [4.0]


def test_receive_before_init_is_a_runtime_error(scheme_class: Any) -> None:
    with pytest.raises(RuntimeError):
        scheme_class().receive(timeout=0)


def test_apply_weights_by_hand_on_the_receiver(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1) as fleet:
        assert fleet.workers[0].do(setups.applies_by_hand, 9.0) == {9.0}
        assert fleet.scheme.send(nested(2.0)).ok


def test_apply_weights_before_init_or_on_the_sender_is_a_runtime_error(scheme_class: Any) -> None:
    scheme = scheme_class()
    with pytest.raises(RuntimeError):
        scheme.apply_weights(nested(1.0))
    scheme.init_on_sender(model_id="policy", model=small(1.0), devices=[CPU])
    with pytest.raises(RuntimeError):
        scheme.apply_weights(nested(1.0))
    scheme.shutdown()


def test_sync_false_returns_before_the_workers_have_answered(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(sync=False), 1) as fleet:
        (worker,) = fleet.workers
        worker.stop()
        report = fleet.scheme.send(nested(5.0))
        worker.resume()

        assert report[0].kind is OutcomeKind.PENDING
        assert worker.do(setups.comes_to_hold, 5.0)


def test_the_receiver_hands_on_to_its_sub_collectors(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1, entering=setups.enter_with_context) as fleet:
        before = len(fleet.workers[0].do(setups.handed_on))
        fleet.scheme.send(nested(2.0))

        assert fleet.workers[0].do(setups.handed_on)[before:] == ["policy"]


# -------------------------------------------------------------------------------------------------- shutdown


def test_shutdown_is_final_and_allowed_twice(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1) as fleet:
        fleet.scheme.shutdown()
        fleet.scheme.shutdown()
        with pytest.raises(RuntimeError):
            fleet.scheme.send(nested(2.0))

        assert fleet.all(setups.holds) == [{1.0}]


def test_shutdown_before_any_init_is_allowed(scheme_class: Any) -> None:
    assert scheme_class().shutdown() is None


# ------------------------------------------------------------------------------------------------ properties


def test_properties_on_the_sender(scheme_class: Any, crew: Crew) -> None:
    scheme = scheme_class(strategy="state_dict")
    assert (scheme.initialized_on_sender, scheme.initialized_on_receiver) == (False, False)
    assert (scheme.synchronized_on_sender, scheme.synchronized_on_receiver) == (False, False)
    assert (scheme.strategy, scheme.strategy_str) == ("state_dict", "state_dict")
    assert (scheme.context, scheme.worker_idx) == (None, None)
    context = Trainer()
    with fleet_of(crew, scheme, context=context) as fleet:
        assert (scheme.initialized_on_sender, scheme.initialized_on_receiver) == (True, False)
        assert (scheme.synchronized_on_sender, scheme.synchronized_on_receiver) == (True, False)
        assert scheme.context is context
        assert scheme.model_id == "policy"
        assert scheme.model is context.policy
        assert constants(small_of(scheme.weights)) == {1.0}
        assert scheme.worker_idx is None
        assert fleet.first == [{1.0}, {1.0}]


def small_of(weights: Any) -> Any:
    """A model with these weights."""
    model = small()
    WeightStrategy().apply_weights(model, weights)
    return model


def test_properties_on_the_receiver(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(strategy="tensordict"), 2, entering=setups.enter_with_context) as fleet:
        for index, worker in enumerate(fleet.workers):
            assert worker.do(setups.properties) == {
                "initialized": (False, True),
                "synchronized": (False, True),
                "model_id": "policy",
                "worker_idx": index,
                "model": True,
                "weights": [1.0],
                "context": True,
                "strategy": ("tensordict", "tensordict"),
                "receiver_transport": True,
            }


def test_sender_transports_are_those_of_the_workers(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class()) as fleet:
        assert sorted(fleet.scheme.sender_transports) == [0, 1]
        assert fleet.scheme.receiver_transport is None


def test_there_is_no_shared_transport_since_each_worker_has_a_link_of_its_own(scheme_class: Any) -> None:
    assert scheme_class().shared_transport is None


def test_context_and_model_can_be_set_as_torchrls_collectors_set_them(scheme_class: Any, crew: Crew) -> None:
    with fleet_of(crew, scheme_class(), 1) as fleet:
        assert fleet.workers[0].do(setups.moves_to_another_model)
        fleet.scheme.send(nested(3.0))

        assert fleet.all(setups.holds) == [{3.0}]


# --------------------------------------------------------------------------------------------------- backends


@pytest.mark.parametrize(
    ("backend", "scheme"),
    [
        ("none", NoWeightSyncScheme),
        ("direct", NoWeightSyncScheme),
        ("shared", SharedMemWeightSyncScheme),
        ("thread", SharedMemWeightSyncScheme),
        ("process", MultiProcessWeightSyncScheme),
        ("multiprocessing", MultiProcessWeightSyncScheme),
        ("distributed", DistributedWeightSyncScheme),
        ("rpc", RPCWeightSyncScheme),
        ("ray", RayWeightSyncScheme),
    ],
)
def test_from_backend_makes_each_scheme(backend: str, scheme: Any) -> None:
    assert type(WeightSyncScheme.from_backend(backend)) is scheme


def test_from_backend_hands_its_arguments_on() -> None:
    assert WeightSyncScheme.from_backend("process", strategy="tensordict").strategy == "tensordict"
    with pytest.raises(ValueError, match="telepathy"):
        WeightSyncScheme.from_backend("telepathy")


def test_register_weight_sync_backend_adds_a_name() -> None:
    @register_weight_sync_backend("names-test")
    class Mine(NoWeightSyncScheme):
        pass

    assert type(WeightSyncScheme.from_backend("names-test")) is Mine


# ------------------------------------------------------------------------------------------------ the protocols


def test_initial_sync_transport_is_a_protocol_of_its_two_methods() -> None:
    class Mine:
        def setup_connection_and_weights_on_sender(self) -> None: ...

        def setup_connection_and_weights_on_receiver(self, *, worker_idx: int, **_: Any) -> None: ...

    assert isinstance(Mine(), InitialSyncTransport)
    assert not isinstance(object(), InitialSyncTransport)


class Mine:
    """A user's transport with generation B's signatures, without model ids."""

    def __init__(self) -> None:
        self.model = small()

    def send_weights(self, weights: Any) -> None:
        WeightStrategy().apply_weights(self.model, weights)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        return None


def test_transport_backend_takes_weights_without_a_model_id() -> None:
    class Scheme(MultiProcessWeightSyncScheme):
        def create_transport(self, *given: Any, **named: Any) -> Any:
            return given[0]

    transport = Mine()
    with Scheme().create_sender() as sender:
        sender.register_worker(0, transport)
        sender.send(small(4.0))

    assert constants(transport.model) == {4.0}


# -------------------------------------------------------------------------------------------------- other behaviour


def test_extra_state_travels(scheme_class: Any, crew: Crew) -> None:
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", model=setups.counted(5), devices=[CPU])
    (worker,) = crew.start(scheme)
    worker.tell(setups.enter, 0, setups.counted)
    scheme.connect()
    worker.answer()

    assert worker.do(setups.extra_of) == 5
    scheme.shutdown()
    worker.do(setups.ends)


class Adapted(torch.nn.Module):
    """A model like LoRA's, which sends its merged weights and not its own."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.delta = torch.nn.Parameter(torch.ones(1))

    def merge_and_unload(self) -> torch.nn.Module:
        with torch.no_grad():
            for tensor in self.base.parameters():
                tensor.add_(self.delta)
        return self.base


def test_lora_modules_are_merged_on_a_copy(scheme_class: Any, crew: Crew) -> None:
    adapted = Adapted(torch.nn.Linear(2, 2))
    filled(adapted.base, 1.0)
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", model=adapted, devices=[CPU])
    (worker,) = crew.start(scheme)
    worker.tell(setups.enter, 0, setups.linear)
    scheme.connect()

    assert worker.answer() == {2.0}
    assert constants(adapted.base) == {1.0}
    scheme.shutdown()
    worker.do(setups.ends)


def test_a_pickled_scheme_is_initialised_on_neither_side(scheme_class: Any) -> None:
    scheme = scheme_class()
    scheme.init_on_sender(model_id="policy", model=small(1.0), devices=[CPU])
    clone = pickle.loads(pickle.dumps(scheme))

    assert (clone.initialized_on_sender, clone.initialized_on_receiver) == (False, False)
    assert (clone.synchronized_on_sender, clone.synchronized_on_receiver) == (False, False)
    assert scheme.initialized_on_sender is True
    scheme.shutdown()


def test_no_scheme_needs_nothing_in_generation_b_either() -> None:
    trainer, worker = NoWeightSyncScheme(), NoWeightSyncScheme()
    trainer.init_on_sender(model_id="policy")
    worker.init_on_receiver(model_id="policy")
    for scheme in (trainer, worker):
        scheme.connect()

    assert dict(trainer.send(nested(1.0)).outcomes) == {}
    assert worker.receive() is None
    for scheme in (trainer, worker):
        scheme.shutdown()


def test_constructors_take_generation_bs_arguments() -> None:
    assert weightsync.MultiProcessWeightSyncScheme("tensordict", True).strategy == "tensordict"
    assert weightsync.SharedMemWeightSyncScheme(strategy="tensordict", sync=True, per_worker_weights=False).strategy
    assert weightsync.SharedMemWeightSyncScheme("state_dict", True).strategy == "state_dict"
    assert weightsync.RayWeightSyncScheme(strategy="tensordict", backend="gloo").strategy == "tensordict"
    assert weightsync.RayModuleTransformScheme(strategy="tensordict", backend="gloo").strategy == "tensordict"
    assert weightsync.DistributedWeightSyncScheme(backend="gloo", sync=True, timeout=3600.0) is not None
    assert weightsync.RPCWeightSyncScheme("tensordict").strategy == "tensordict"
