"""Ray's names, row by row, as both generations document them (`tests/compat/reference_rows.py`)."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from ray_fleet import Module, Seat, constants, small
from tensordict import TensorDict

from weightsync import (
    Evidence,
    OutcomeKind,
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayTransport,
    RayWeightSyncScheme,
    RayWeightUpdater,
    RefusedError,
    WorkerLostError,
)


def nested(fill: float) -> TensorDict:
    return TensorDict.from_module(small(fill)).data


def shown(actor: Any) -> set[float]:
    import ray

    return ray.get(actor.shows.remote())


@pytest.fixture(scope="session")
def module_actor(cluster: Any) -> Any:
    import ray

    return ray.remote(num_cpus=0)(Shown).remote()


class Shown(Module):
    """As TorchRL's RayModuleTransform makes it; shows its weights."""

    def shows(self) -> set[float]:
        return constants(self.module.state_dict())


# ----------------------------------------------------------------------------------------------- RayTransport


def test_ray_transport_sends_to_a_collector(plain: Any) -> None:
    transport = RayTransport(plain)
    for fill in (1.0, 2.0):
        transport.send_weights("policy", nested(fill))

        assert shown(plain) == {fill}
    assert transport.check_connection() is True
    transport.close()


def test_ray_transport_async_keeps_the_future_for_wait_ack(plain: Any) -> None:
    transport = RayTransport(remote_collector=plain, tensor_transport="object_store")
    transport.send_weights_async("policy", nested(3.0))
    transport.wait_ack()

    assert shown(plain) == {3.0}
    with pytest.raises(RuntimeError):
        transport.wait_ack()
    transport.close()


def test_ray_transport_receives_nothing(plain: Any) -> None:
    transport = RayTransport(plain)

    assert transport.receive_weights(timeout=0.01) is None
    transport.close()


def test_fault_05_ray_transports_without_anybody_to_send_to_say_so(cluster: Any) -> None:
    for transport in (RayTransport(), RayActorTransport()):
        for send in (transport.send_weights, transport.send_weights_async):
            with pytest.raises((RuntimeError, ValueError)):
                send("policy", nested(1.0))


def test_ray_transport_without_ray_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(ImportError, match="ray"):
        RayTransport(object())
    with pytest.raises(ImportError, match="ray"):
        RayActorTransport(object())


def test_ray_transport_takes_generation_bs_arguments(plain: Any) -> None:
    transport = RayTransport(remote_actor=plain, worker_idx=0, backend="gloo", model_id="policy")
    transport.send_weights(nested(4.0))

    assert shown(plain) == {4.0}
    transport.close()


def test_fault_12_a_worker_that_failed_is_not_updated(plain: Any) -> None:
    import ray

    ray.get(plain.do.remote(breaks))
    transport = RayTransport(plain)
    transport.send_weights_async("policy", nested(1.0))
    with pytest.raises(RefusedError, match="not for me"):
        transport.wait_ack()
    transport.close()


def breaks(actor: Any) -> None:
    actor.kept["raise"] = True


def test_fault_12_a_worker_that_died_is_not_updated(cluster: Any) -> None:
    import ray

    doomed = ray.remote(num_cpus=0)(Seat).remote()
    ray.get(doomed.pid.remote())
    transport = RayTransport(doomed)
    busy = doomed.sleep.remote(30)
    transport.send_weights_async("policy", nested(1.0))
    ray.kill(doomed)
    with pytest.raises(WorkerLostError):
        transport.wait_ack()
    transport.close()
    del busy


# ------------------------------------------------------------------------------------------ RayActorTransport


@pytest.mark.parametrize("update_method", ["tensordict", "state_dict"])
def test_ray_actor_transport_calls_the_method_that_is_meant(module_actor: Any, update_method: str) -> None:
    transport = RayActorTransport(update_method=update_method)
    transport.set_actor(module_actor)
    fill = 5.0 if update_method == "tensordict" else 6.0
    transport.send_weights("policy", small(fill))

    assert shown(module_actor) == {fill}
    assert transport.check_connection() is True
    transport.close()


def test_ray_actor_transport_of_another_method_is_a_value_error(cluster: Any) -> None:
    with pytest.raises(ValueError, match="telepathy"):
        RayActorTransport(None, "telepathy").send_weights("policy", nested(1.0))


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
def test_ray_scheme_takes_its_workers_from_context_or_keywords(seats: list[Any], name: str) -> None:
    for context, given in ((Context(**{name: seats}, num_workers=2), {}), (None, {name: seats})):
        with RayWeightSyncScheme() as scheme:
            scheme.init_on_sender("policy", context, model=small(2.0), **given)
            report = scheme.get_sender().send()

            assert set(report) == {0, 1}
            assert [shown(seat) for seat in seats] == [{2.0}, {2.0}]


def test_ray_scheme_without_workers_names_what_is_missing(cluster: Any) -> None:
    with pytest.raises(ValueError, match="remote_collectors"):
        RayWeightSyncScheme().init_on_sender("policy", model=small())


def test_ray_scheme_counts_its_collectors(seats: list[Any]) -> None:
    with pytest.raises(ValueError, match="num_collectors"):
        RayWeightSyncScheme().init_on_sender("policy", remote_collectors=seats, num_collectors=3, model=small())


def test_ray_scheme_create_transport_takes_an_actor(plain: Any) -> None:
    transport = RayWeightSyncScheme().create_transport(plain)
    transport.send_weights("policy", nested(2.0))

    assert shown(plain) == {2.0}
    transport.close()


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


def test_ray_module_transform_sender_has_every_way_of_sending(transform: Any, module_actor: Any) -> None:
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender("module", transform)
        sender = scheme.get_sender()
        sender.send(small(1.0))
        assert shown(module_actor) == {1.0}
        sender.send_async(small(2.0))
        assert sender.wait_async().ok
        assert shown(module_actor) == {2.0}
        sender.update_weights(small(4.0))
        assert shown(module_actor) == {4.0}


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

    assert constants(model.state_dict()) == {3.0}
    receiver.close()


# -------------------------------------------------------------------------------------------- RayWeightUpdater


def test_ray_weight_updater_puts_once_for_all(seats: list[Any], plain: Any) -> None:
    updater = RayWeightUpdater(nested(2.0), [*seats, plain])
    report = updater.push_weights()

    assert [shown(actor) for actor in (*seats, plain)] == [{2.0}] * 3
    assert {outcome.kind for outcome in report.outcomes.values()} == {OutcomeKind.APPLIED}
    assert updater.all_worker_ids() == [0, 1, 2]


def test_ray_weight_updater_skips_max_interval_pushes_between_two(seats: list[Any]) -> None:
    updater = RayWeightUpdater(policy_weights=nested(1.0), remote_collectors=seats, max_interval=2)
    kinds = [updater.push_weights(nested(float(i)))[0].kind.name for i in range(1, 8)]

    assert kinds == ["APPLIED", "SKIPPED", "SKIPPED", "APPLIED", "SKIPPED", "SKIPPED", "APPLIED"]
    assert shown(seats[0]) == {7.0}


def test_ray_weight_updater_skips_workers_that_were_named_too(seats: list[Any]) -> None:
    updater = RayWeightUpdater(nested(1.0), seats, 1)
    updater.push_weights(worker_ids=0)

    report = updater.push_weights(nested(2.0), worker_ids=[0, 1])

    assert [report[i].kind for i in (0, 1)] == [OutcomeKind.SKIPPED, OutcomeKind.APPLIED]


def test_ray_weight_updater_takes_a_negative_interval_for_none(seats: list[Any]) -> None:
    updater = RayWeightUpdater(nested(1.0), seats, -3)

    assert [updater.push_weights()[0].kind for _ in range(2)] == [OutcomeKind.APPLIED] * 2


def test_fault_12_ray_weight_updater_looks_at_its_futures(seats: list[Any], plain: Any) -> None:
    import ray

    ray.get(plain.do.remote(breaks))
    updater = RayWeightUpdater(nested(2.0), [seats[0], plain])
    with pytest.raises(RefusedError, match="not for me") as refused:
        updater.push_weights()

    assert refused.value.report.failed == (1,)
    assert shown(seats[0]) == {2.0}


def test_evidence_of_plain_actors_is_the_call(seats: list[Any], plain: Any, trainer: Any) -> None:
    report = trainer([seats[0], plain], small(2.0)).send()

    assert (report[0].evidence, report[1].evidence) == (Evidence.ANSWER, Evidence.CALL)
