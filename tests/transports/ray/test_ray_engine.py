"""A vLLM engine in a Ray actor, called through the actor's handle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_server import Inline
from ray_fleet import PATIENCE, ray, small

from weightsync import EngineWeightSyncScheme, Evidence, OutcomeKind, VLLMEngine


class EngineActor:
    """A fake engine with vLLM's four methods, which records their calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fails = ""
        self.go_on = threading.Event()

    def do(self, fails: str) -> None:
        self.fails = fails

    def said(self) -> list[Any]:
        return self.calls

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self._called("init", request["init_info"])

    def start_weight_update(self) -> None:
        self._called("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self._called("update", sorted(request["update_info"]["names"]))

    def finish_weight_update(self) -> None:
        self._called("finish")

    def _called(self, name: str, *what: Any) -> None:
        if self.fails == "stall":
            self.go_on.wait(PATIENCE)
        if self.fails == name:
            raise MemoryError("no room")
        self.calls.append((name, *what))


@pytest.fixture
def actor(cluster: Any) -> Iterator[Any]:
    made = ray.remote(num_cpus=0)(EngineActor).remote()
    ray.get(made.said.remote(), timeout=PATIENCE)
    yield made
    ray.kill(made)


def test_an_engine_in_an_actor_is_called_in_order_and_each_failure_has_its_outcome(actor: Any) -> None:
    source = small(1.0)
    with EngineWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", engines=[VLLMEngine(actor, Inline())], model=source)
        sender = scheme.get_sender()

        def outcome() -> Any:
            return sender.send(on_failure="report", timeout=PATIENCE)[0]

        ray.get(actor.do.remote("init"))
        refused = outcome()
        assert (refused.kind, refused.evidence) == (OutcomeKind.REFUSED, Evidence.CALL)
        assert "no room" in refused.reason
        ray.get(actor.do.remote(""))
        applied = outcome()
        assert (applied.kind, applied.evidence) == (OutcomeKind.APPLIED, Evidence.CALL)
        names = sorted(source.state_dict())
        assert ray.get(actor.said.remote()) == [
            ("init", {"backend": "inline"}),
            ("start",),
            ("update", names),
            ("finish",),
        ]
        ray.get(actor.do.remote("update"))
        assert outcome().kind is OutcomeKind.LOST


def test_an_engine_whose_actor_dies_is_lost(actor: Any) -> None:
    with EngineWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", engines=[VLLMEngine(actor, Inline())], model=small(1.0))
        scheme.get_sender().send(timeout=PATIENCE)
        ray.get(actor.do.remote("stall"))
        scheme.get_sender().send_async()
        ray.kill(actor)
        report = scheme.get_sender().wait_async(on_failure="report", timeout=PATIENCE)
    assert (report[0].kind, report[0].evidence) == (OutcomeKind.LOST, Evidence.NONE)


def test_close_ends_the_wait_for_an_actor_that_stalls(actor: Any) -> None:
    scheme = EngineWeightSyncScheme()
    scheme.init_on_sender("policy", engines=[VLLMEngine(actor, Inline())], model=small(1.0))
    ray.get(actor.do.remote("stall"))
    scheme.get_sender().send_async()
    scheme.close()
    assert [each.name for each in threading.enumerate() if each.name.startswith("weightsync feeds")] == []
