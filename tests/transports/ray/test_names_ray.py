"""The names for Ray of both generations, row by row (`tests/torchrl/transports/reference_rows.py`)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from ray_fleet import Module, constants_of, ray, small
from tensordict import TensorDict

from weightsync import (
    Evidence,
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayTransport,
    RayWeightSyncScheme,
    RayWeightUpdater,
    RefusedError,
)


def nested(fill: float) -> TensorDict:
    return TensorDict.from_module(small(fill)).data


def shown(actor: Any) -> set[float]:
    return ray.get(actor.shows.remote())


@pytest.fixture(scope="session")
def module_actor(cluster: Any) -> Any:
    return ray.remote(num_cpus=0)(Shown).remote()


class Shown(Module):
    """An actor like that of TorchRL's `RayModuleTransform`, with a method that returns its weights."""

    def shows(self) -> set[float]:
        return constants_of(self.module.state_dict())


# ----------------------------------------------------------------------------------------------- RayTransport


def test_ray_transport_receives_nothing(plain: Any) -> None:
    transport = RayTransport(plain)

    assert transport.receive_weights(timeout=0.01) is None
    transport.close()


def test_ray_transport_without_ray_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ImportError, match="ray"):
        RayTransport(object())
    with pytest.raises(ImportError, match="ray"):
        RayActorTransport(object())


def test_fault_12_a_worker_that_failed_is_not_updated(plain: Any) -> None:
    """TorchRL counts a collector that raised as updated."""
    ray.get(plain.do.remote(breaks))
    transport = RayTransport(plain)
    transport.send_weights_async("policy", nested(1.0))
    with pytest.raises(RefusedError, match="not for me"):
        transport.wait_ack()
    transport.close()


def breaks(actor: Any) -> None:
    actor.kept["raise"] = True


# ------------------------------------------------------------------------------------------ RayActorTransport


def test_ray_actor_transport_acks_do_nothing(module_actor: Any) -> None:
    transport = RayActorTransport(module_actor)

    assert transport.send_ack() is None
    assert transport.check_ack() is None
    assert transport.receive_weights(timeout=0.01) is None
    transport.close()


def test_ray_actor_transport_async_and_wait_ack(module_actor: Any) -> None:
    transport = RayActorTransport(module_actor)
    transport.send_weights_async("policy", nested(7.0))
    transport.wait_ack()

    assert shown(module_actor) == {7.0}
    with pytest.raises(RuntimeError):
        transport.wait_ack()
    transport.close()


def test_ray_actor_transport_without_an_actor_is_not_connected(cluster: Any) -> None:
    assert RayActorTransport().check_connection() is False


# ---------------------------------------------------------------------------------------- RayWeightSyncScheme


class Context:
    def __init__(self, **own: Any) -> None:
        self.__dict__.update(own)


@pytest.mark.parametrize("name", ["remote_collectors", "actor_refs", "actors"])
def test_ray_scheme_takes_its_workers_from_context_or_keywords(setups: list[Any], name: str) -> None:
    for context, given in ((Context(**{name: setups}, num_workers=2), {}), (None, {name: setups})):
        with RayWeightSyncScheme() as scheme:
            scheme.init_on_sender("policy", context, model=small(2.0), **given)
            report = scheme.get_sender().send()

            assert set(report) == {0, 1}
            assert [shown(setup) for setup in setups] == [{2.0}, {2.0}]


def test_ray_scheme_counts_its_collectors(setups: list[Any]) -> None:
    with pytest.raises(ValueError, match="num_collectors"):
        RayWeightSyncScheme().init_on_sender("policy", remote_collectors=setups, num_collectors=3, model=small())


# ------------------------------------------------------------------------------------ RayModuleTransformScheme


@pytest.fixture
def transform(module_actor: Any) -> Any:
    return Context(_actor=module_actor)


def test_ray_module_transform_scheme_sends_to_one_shared_actor(transform: Any, module_actor: Any) -> None:
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender("module", transform, model=small(3.0))
        sender = scheme.get_sender()
        assert isinstance(sender, RayModuleTransformSender)
        for worker_ids in (None, 0, [0]):
            report = sender.send(worker_ids=worker_ids)

            assert set(report) == {0}
        assert shown(module_actor) == {3.0}
        with pytest.raises(ValueError, match="1"):
            sender.send(worker_ids=1)
    assert scheme.strategy == "tensordict"


def test_ray_module_transform_sender_finds_its_actor_on_first_use(module_actor: Any) -> None:
    sender = RayModuleTransformSender(RayModuleTransformScheme())
    sender.register_worker(0, "anything")
    context = Context(actor_refs=[module_actor])
    sender.set_context(context)

    assert sender.send(small(5.0)).ok
    assert shown(module_actor) == {5.0}
    sender.close()


def test_ray_module_transform_sender_with_several_actors_is_a_value_error(module_actor: Any) -> None:
    context = Context(actor_refs=[module_actor, module_actor])
    sender = RayModuleTransformSender(RayModuleTransformScheme())
    sender.set_context(context)

    with pytest.raises(ValueError, match="actor"):
        sender.send(small(1.0))
    sender.close()


def test_ray_module_transform_receiver_applies_locally() -> None:
    receiver, model = RayModuleTransformReceiver(RayModuleTransformScheme()), small()
    receiver.register_model(model)
    receiver.apply_weights(nested(3.0))

    assert constants_of(model.state_dict()) == {3.0}
    receiver.close()


# -------------------------------------------------------------------------------------------- RayWeightUpdater


def test_fault_12_ray_weight_updater_looks_at_its_futures(plain: Any) -> None:
    ray.get(plain.do.remote(breaks))
    updater = RayWeightUpdater(nested(2.0), [plain])
    with pytest.raises(RefusedError, match="not for me") as refused:
        updater.push_weights()

    assert refused.value.report.failed == (0,)


def test_evidence_of_plain_actors_is_the_call(setups: list[Any], plain: Any, trainer: Any) -> None:
    report = trainer([setups[0], plain], small(2.0)).send()

    assert (report[0].evidence, report[1].evidence) == (Evidence.ANSWER, Evidence.CALL)
