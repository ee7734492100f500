"""A handshake for another model id than that of a Ray actor's receiver: both sides name both ids."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from ray_fleet import PATIENCE, Plain, ray, small

from weightsync import OutcomeKind, RayWeightSyncScheme, RefusedError


@pytest.fixture
def listening(cluster: Any) -> Iterator[Any]:
    """An actor with its own method for weights, and with a weightsync receiver of "policy"."""
    actor = ray.remote(num_cpus=0)(Plain).remote()
    ray.get(actor.do.remote(_init), timeout=PATIENCE)
    yield actor
    ray.kill(actor)


def _init(actor: Any) -> None:
    lines = actor.kept["lines"] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weightsync").addHandler(handler)
    actor.kept["scheme"] = RayWeightSyncScheme()
    actor.kept["scheme"].init_on_worker("policy", model=actor.policy)


def test_another_model_id_is_refused_with_both_ids_at_both_sides_and_no_method_is_called(
    listening: Any, trainer: Any
) -> None:
    sender = trainer([listening], small(1.0), model_id="critic")
    for _ in range(2):
        with pytest.raises(RefusedError, match="receiver of 'policy', and none of 'critic'") as refused:
            sender.send(timeout=PATIENCE)
        assert refused.value.report[0].kind is OutcomeKind.REFUSED

    assert ray.get(listening.shows.remote(), timeout=PATIENCE) == {0.0}
    lines = ray.get(listening.do.remote(lambda actor: actor.kept["lines"]), timeout=PATIENCE)
    assert any("'critic'" in line and "'policy'" in line for line in lines)


def test_an_actor_without_that_model_refuses_it_with_both_ids(setups: list[Any], trainer: Any) -> None:
    assert trainer(setups[:1], small(1.0)).send(timeout=PATIENCE).ok
    sender = trainer(setups[:1], small(2.0), model_id="critic")

    with pytest.raises(RefusedError, match="receiver of 'policy', and none of 'critic'"):
        sender.send(timeout=PATIENCE)

    assert ray.get(setups[0].shows.remote(), timeout=PATIENCE) == {1.0}
