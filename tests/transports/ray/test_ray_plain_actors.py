"""Actors without `WeightSyncActor`: calls of their own method, and schemes that were initialised in them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray_fleet import PATIENCE, BareActor, Bench, Collector, init_by_hand, ray, small
from tensordict import TensorDict

from weightsync import (
    ConfigurationError,
    Evidence,
    RayTransport,
    RayWeightSyncScheme,
    RayWeightUpdater,
    WorkerLostError,
)
from weightsync.schemes.peers import ray_actors


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=PATIENCE)


@pytest.fixture(scope="module")
def actors(cluster: Any) -> dict[str, Any]:
    return {kind.__name__: ray.remote(num_cpus=0)(kind).remote() for kind in (Collector, BareActor)}


@pytest.fixture
def collector(actors: dict[str, Any]) -> Any:
    get(actors["Collector"].start_over.remote())
    return actors["Collector"]


@pytest.fixture
def bare_actor(actors: dict[str, Any]) -> Any:
    get(actors["BareActor"].start_over.remote())
    return actors["BareActor"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Collector, r"the class Collector, not a running actor: .*remote\(Collector\)"),
        (Collector(), r"an object of the class Collector, not a running actor: .*remote\(Collector\)"),
        ("eve", r"the str 'eve', not an actor: .*ray.get_actor\('eve'\)"),
        pytest.param(None, "an ObjectRef, the result of a call, not an actor: .*handle", id="ObjectRef"),
    ],
)
def test_an_object_that_is_not_an_actor_is_refused_with_a_hint(given: Any, said: str) -> None:
    given = given or ray.ObjectRef.nil()
    with RayWeightSyncScheme() as scheme, pytest.raises(ConfigurationError, match=f"worker 0 is {said}"):
        scheme.init_on_sender("policy", remote_collectors=[given], model=small(1.0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({0: "an actor"}, r"remote_collectors= is a dict: give a list of actors\."),
        ("eve", r"worker 0 is the str 'eve', not an actor: .*ray.get_actor\('eve'\)"),
    ],
)
def test_remote_collectors_that_is_not_a_list_of_actors_is_refused_with_a_hint(given: Any, said: str) -> None:
    with RayWeightSyncScheme() as scheme, pytest.raises(ConfigurationError, match=said):
        scheme.init_on_sender("policy", remote_collectors=given, model=small(1.0))


def test_the_same_actor_given_by_two_handles_is_refused(collector: Any) -> None:
    again = get(ray.put(collector))
    with (
        RayWeightSyncScheme() as scheme,
        pytest.raises(ConfigurationError, match="workers 0 and 1 are the same ActorHandle"),
    ):
        scheme.init_on_sender("policy", remote_collectors=[collector, again], model=small(1.0))
    assert again is not collector


def test_the_same_actor_given_directly_and_wrapped_is_refused(collector: Any) -> None:
    behind = SimpleNamespace(_actor=collector)
    with (
        RayWeightSyncScheme() as scheme,
        pytest.raises(ConfigurationError, match="workers 0 and 1 are the same ActorHandle"),
    ):
        scheme.init_on_sender("policy", remote_collectors=[collector, behind], model=small(1.0))


@pytest.mark.parametrize("strategy", ["state_dict", "tensordict"])
def test_an_actors_method_like_that_of_torchrls_collectors_gets_a_tensordict(
    collector: Any, trainer: Any, strategy: str
) -> None:
    sender = trainer([collector], small(1.0), strategy=strategy)
    for fill, weights in ((1.0, None), (2.0, small(2.0)), (3.0, dict(small(3.0).state_dict()))):
        assert sender.send(weights, timeout=PATIENCE)[0].evidence is Evidence.CALL
        assert get(collector.shows.remote()) == {fill}


def test_ray_transport_passes_a_tensordict_to_a_method_like_that_of_torchrls_collectors(collector: Any) -> None:
    with RayTransport(collector) as transport:
        assert transport.send_weights("policy", dict(small(4.0).state_dict())).ok

    assert get(collector.shows.remote()) == {4.0}


@pytest.mark.parametrize("method", ["update_policy_weights_", "anything_else"])
def test_over_ray_client_an_actor_without_the_mixin_is_refused_with_a_hint(method: str) -> None:
    """A send would deadlock: it would wait for the object store in the thread that receives the store's answer."""
    call = SimpleNamespace(remote=None)
    kind = type("ClientActorHandle", (), {"__module__": "ray.util.client.common", method: call, "__ray_call__": call})
    with RayWeightSyncScheme() as scheme, pytest.raises(ConfigurationError, match=r"worker 0 .* Ray Client \(ray://\)"):
        scheme.init_on_sender("policy", remote_collectors=[kind()], model=small(1.0))


class Method:
    """A fake of an actor's method, as in the actor's handle."""

    def __init__(self, function: Any) -> None:
        self._signature = list(inspect.signature(function).parameters.values())

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return arguments, named


BY_NAME, AS_FIRST = ((), {"policy_or_weights": "weights"}), (("weights",), {})


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda policy_or_weights: None, BY_NAME),
        (lambda worker_ids=None, policy_or_weights=None: None, BY_NAME),
        (lambda **anything: None, BY_NAME),
        (lambda policy_weights: None, AS_FIRST),
        (lambda weights=None, worker_ids=None: None, AS_FIRST),
        (lambda *anything: None, AS_FIRST),
    ],
)
def test_weights_are_passed_by_the_parameters_name_or_as_the_first_argument(function: Any, given: Any) -> None:
    assert ray_actors._calling("update_policy_weights_", Method(function))("weights") == given


def test_a_call_is_awaited_even_if_its_method_is_declared_without_a_result(cluster: Any, trainer: Any) -> None:
    """Ray returns nothing to wait for, unless the caller asks for one result."""

    class Silent(Bench):
        @ray.method(num_returns=0)
        def update_policy_weights_(self, policy_or_weights: Any) -> None:
            self.policy.load_state_dict(dict(policy_or_weights))

    silent = ray.remote(num_cpus=0)(Silent).remote()

    assert trainer([silent], small(1.0)).send(timeout=PATIENCE)[0].evidence is Evidence.CALL
    assert get(silent.shows.remote()) == {1.0}
    updater = RayWeightUpdater(TensorDict(small(2.0).state_dict()), [silent])
    assert updater.push_weights(timeout=PATIENCE).ok
    assert get(silent.shows.remote()) == {2.0}
    ray.kill(silent)


@pytest.mark.parametrize("how", ["model", "context"])
def test_a_scheme_initialised_in_an_actor_without_the_mixin_answers(bare_actor: Any, trainer: Any, how: str) -> None:
    get(bare_actor.do.remote(init_by_hand, how))
    sender = trainer([bare_actor], small(1.0))
    for fill in (5.0, 6.0):
        report = sender.send(small(fill), timeout=PATIENCE)

        assert report[0].evidence is Evidence.ANSWER
        assert get(bare_actor.shows.remote()) == {fill}
    assert get(bare_actor.do.remote(lambda actor: actor.kept["scheme"].get_receiver().version)) == 2


def test_a_scheme_in_an_actor_is_preferred_to_the_actors_own_method(collector: Any, trainer: Any) -> None:
    get(collector.do.remote(init_by_hand, "model"))

    assert trainer([collector], small(7.0)).send(timeout=PATIENCE)[0].evidence is Evidence.ANSWER
    assert get(collector.shows.remote()) == {7.0}


def test_actors_that_initialise_their_scheme_after_init_on_sender_answer(collector: Any) -> None:
    """TorchRL's collector initialises the scheme in its actors only after `init_on_sender`."""
    context = SimpleNamespace(_weight_sync_schemes={}, remote_collectors=[collector])
    with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", context, model=small(1.0))
        get(collector.do.remote(init_by_hand, "model"))
        scheme.connect(timeout=PATIENCE)

        assert scheme.send(small(2.0), timeout=PATIENCE)[0].evidence is Evidence.ANSWER
    assert get(collector.shows.remote()) == {2.0}


def test_an_actor_with_neither_a_scheme_nor_a_method_is_lost_with_a_hint(bare_actor: Any, trainer: Any) -> None:
    with pytest.raises(WorkerLostError, match="initialise a RayWeightSyncScheme in it"):
        trainer([bare_actor], small(1.0)).send(timeout=PATIENCE)
