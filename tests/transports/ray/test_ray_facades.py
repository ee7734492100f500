"""TorchRL's transports to Ray actors, and the scheme with one shared actor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray_fleet import PATIENCE, Module, constants_of, small
from tensordict import TensorDict

from weightsync import (
    ConfigurationError,
    Evidence,
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformScheme,
    RayModuleTransformSender,
    RayTransport,
    RayWeightSyncScheme,
)


def get(ref: Any) -> Any:
    return ref if not hasattr(ref, "future") else ref.future().result(PATIENCE)


def weights(fill: float) -> dict[str, Any]:
    return dict(small(fill).state_dict())


def nested(fill: float) -> TensorDict:
    return TensorDict.from_module(small(fill)).data


def test_ray_transport_sends_to_a_plain_collector(plain: Any) -> None:
    with RayTransport(plain) as transport:
        assert transport.check_connection()
        report = transport.send_weights("policy", weights(2.0))
        assert report[0].evidence is Evidence.CALL
        assert get(plain.shows.remote()) == {2.0}

        transport.send_weights_async("policy", TensorDict.from_module(small(3.0)).data)
        assert transport.wait_ack().ok
        assert get(plain.do.remote(lambda actor: actor.kept["type"])) == "TensorDict"
        assert transport.receive_weights() is None


def test_ray_transport_of_generation_a_sends_to_an_actor_with_a_receiver(setups: list[Any]) -> None:
    with RayTransport(setups[0]) as transport:
        report = transport.send_weights("policy", weights(4.0))
        assert report[0].evidence is Evidence.ANSWER
        assert get(setups[0].shows.remote()) == {4.0}

        transport.send_weights_async("policy", weights(5.0))
        assert transport.wait_ack()[0].evidence is Evidence.ANSWER
    assert get(setups[0].shows.remote()) == {5.0}


def test_ray_transport_of_generation_b_sends_to_an_actor_with_a_receiver(setups: list[Any]) -> None:
    with RayTransport(remote_actor=setups[0], worker_idx=0, backend="gloo") as transport:
        transport.setup_connection_and_weights_on_sender()
        report = transport.send_weights(weights(5.0))

    assert report[0].evidence is Evidence.ANSWER
    assert get(setups[0].shows.remote()) == {5.0}


@pytest.fixture(scope="module")
def module(cluster: Any) -> Any:
    import ray  # noqa: PLC0415 - the `cluster` fixture requires Ray

    return ray.remote(num_cpus=0)(Module).remote()


def _shown(module: Any) -> set[float]:
    return set(get(module.shows.remote()))


@pytest.mark.parametrize("update_method", ["tensordict", "state_dict"])
def test_ray_actor_transport_calls_the_given_update_method(module: Any, update_method: str) -> None:
    fill = float(len(update_method))
    with RayActorTransport(update_method=update_method) as transport:
        assert not transport.check_connection()
        transport.set_actor(module)
        assert transport.check_connection()
        transport.send_weights("policy", weights(fill))
        transport.send_ack()
        transport.check_ack()

    assert _shown(module) == {fill}


def test_ray_actor_transport_refuses_an_unknown_update_method(cluster: Any) -> None:
    with pytest.raises(ValueError, match="state_dict"):
        RayActorTransport(update_method="telepathy")


def test_create_transport_sends_to_its_actor_and_refuses_to_send_without_one(plain: Any) -> None:
    with RayWeightSyncScheme().create_transport(plain) as transport:
        assert transport.send_weights(weights(7.0)).ok
    with RayWeightSyncScheme().create_transport() as transport, pytest.raises(ConfigurationError):
        transport.send_weights(weights(7.0))


# ------------------------------------------------------------------------------- one shared actor


PATH = "env.transform[0]"
WAYS = ["context", "handle", "actor_refs", "set_transform", "path", "path to the actor", "path and actor_refs"]


@pytest.mark.parametrize("how", WAYS)
def test_the_module_scheme_finds_its_actor_in_each_way(module: Any, how: str) -> None:
    transform = SimpleNamespace(_actor=module)
    contexts = {
        "context": transform,
        "handle": module,
        "path": context_with(transform),
        "path to the actor": context_with(module),
        "path and actor_refs": context_with(transform, actor_refs=[module]),
    }
    context = contexts.get(how)
    with RayModuleTransformScheme() as scheme:
        if how == "set_transform":
            scheme._set_transform(SimpleNamespace(_actor=module))
        given = {"actor_refs": [module]} if how == "actor_refs" else {}
        scheme.init_on_sender(PATH if "path" in how else "module", context, model=small(6.0), **given)
        sender = scheme.get_sender()
        assert isinstance(sender, RayModuleTransformSender)
        sender.register_worker(3, "whatever")

        report = sender.send(worker_ids=[0], timeout=PATIENCE)

        assert report[0].evidence is Evidence.CALL
        assert _shown(module) == {6.0}
        sender.send_async(small(8.0))
        assert sender.wait_async(timeout=PATIENCE).ok
        assert _shown(module) == {8.0}
        with pytest.raises(ValueError, match="1"):
            sender.send(worker_ids=[1])


def context_with(transform: Any, **more: Any) -> SimpleNamespace:
    """A context like a collector whose environment has a transform."""
    return SimpleNamespace(env=SimpleNamespace(transform=[transform]), **more)


def test_another_transform_is_refused_once_the_actor_is_found(module: Any, plain: Any) -> None:
    with RayModuleTransformScheme() as scheme:
        scheme.set_transform(SimpleNamespace(_actor=module))
        scheme.init_on_sender("module", model=small(6.0))
        sender = scheme.get_sender()
        sender.send(timeout=PATIENCE)
        scheme.set_transform(SimpleNamespace(_actor=module))

        with pytest.raises(ConfigurationError, match=r"another transform already.*add_worker"):
            scheme.set_transform(SimpleNamespace(_actor=plain))

        sender.add_worker(0, plain)
        assert sender.send(small(7.0), timeout=PATIENCE).ok
        assert _shown(plain) == {7.0}
        assert _shown(module) == {6.0}


def test_a_model_path_to_an_actor_is_not_a_source_of_weights(module: Any) -> None:
    context = context_with(SimpleNamespace(_actor=module), actor_refs=[module])
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender(PATH, context)
        with pytest.raises(ConfigurationError, match="no model is registered"):
            scheme.get_sender().send(timeout=PATIENCE)
        assert scheme.get_sender().send(small(4.0), timeout=PATIENCE).ok
        assert scheme.model is None

    assert _shown(module) == {4.0}


def test_a_local_module_at_the_model_path_is_sent(module: Any) -> None:
    """A local transform has the methods of a remote one, but is no actor."""
    context = context_with(LocalTransform(small(2.0)), actor_refs=[module])
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender(f"{PATH}.module", context)
        assert scheme.get_sender().send(timeout=PATIENCE).ok

    assert _shown(module) == {2.0}


class LocalTransform:
    """A transform in this process, like TorchRL's ``ModuleTransform``."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def _update_weights_tensordict(self, params: Any) -> None: ...


def test_the_module_schemes_transport_calls_the_actors_own_methods(module: Any) -> None:
    for strategy, fill in (("tensordict", 3.0), ("state_dict", 5.0)):
        with RayModuleTransformScheme(strategy).create_transport(module) as transport:
            assert isinstance(transport, RayActorTransport)
            assert transport.send_weights("module", small(fill)).ok
            assert _shown(module) == {fill}


def test_the_module_scheme_requires_exactly_one_actor(setups: list[Any]) -> None:
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender("module", model=small(), actor_refs=setups)
        with pytest.raises(ValueError, match="2 actors"):
            scheme.get_sender().send()
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender("module", model=small())
        with pytest.raises(ValueError, match="actor_refs"):
            scheme.get_sender().send()


@pytest.mark.parametrize(
    "given",
    [
        {"params_map": {0: nested(2.0)}},
        {"weights": nested(1.0), "device_map_fn": lambda worker, given: given + 1 + worker, "num_workers": 1},
    ],
    ids=["params_map", "device_map_fn"],
)
def test_the_initial_weights_of_the_module_scheme_may_be_given_for_its_actor(
    module: Any, given: dict[str, Any]
) -> None:
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender("module", actor_refs=[module], **given)
        scheme.connect(timeout=PATIENCE)

        assert (scheme.get_sender().version, _shown(module)) == (1, {2.0})
        assert scheme.send(nested(3.0), timeout=PATIENCE).ok
        assert _shown(module) == {3.0}


def _as_transform(actor: Any) -> str:
    """Initialise the receiver of an actor that holds one module. Returns the name of the receiver's class."""
    actor.module, actor.policy = small(), None
    actor.kept["scheme"] = RayModuleTransformScheme()
    actor.kept["scheme"].init_on_worker("transform_module", context=actor)
    return type(actor.kept["scheme"].get_receiver()).__name__


def test_the_receiver_of_the_module_scheme_runs_in_the_actor(setups: list[Any]) -> None:
    assert get(setups[0].do.remote(_as_transform)) == RayModuleTransformReceiver.__name__
    with RayModuleTransformScheme() as scheme:
        scheme.init_on_sender("transform_module", SimpleNamespace(_actor=setups[0]), model=small(9.0))

        report = scheme.get_sender().send(timeout=PATIENCE)

    assert report[0].evidence is Evidence.ANSWER
    assert get(setups[0].do.remote(lambda actor: constants_of(actor.module.state_dict()))) == {9.0}
